"""What is compiled: each kernel in its dtypes and head dimensions. Head counts, batch, lengths and layouts are run-time
numbers."""

from build_tools.instance import Instance
from kernels_tl.layout import NARROW_TILE, WIDE_TILE

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = ({"K": 128, "V": 128},)

KEY_DIMS = sorted({dims["K"] for dims in HEAD_DIMS})

TYPES = [{"dtype": dtype, **dims} for dtype in DTYPES for dims in HEAD_DIMS]  # of most kernels

INSTANCES = [
    *(Instance("plan.chunk_plan", {"offset_dtype": dtype}) for dtype in ("int32", "int64")),
    # forward
    *(Instance("forward.chunk_matrices", types | {"normalize": norm}) for types in TYPES for norm in (False, True)),
    *(
        Instance("forward.chunk_forward", types | {"value_tile": tile})
        for types in TYPES
        for tile in (NARROW_TILE, WIDE_TILE)
    ),
    *(
        Instance("forward.fused_forward", types | {"normalize": normalize, "low_level": low_level})
        for types in TYPES
        for normalize in (False, True)
        for low_level in (False, True)
        if not (low_level and types["dtype"] == "float16")  # whose A takes more digits than this kernel's inverse has
    ),
    *(Instance("forward.segment_maps", types) for types in TYPES),
    *(Instance("forward.segment_scan", types | {"reverse": reverse}) for types in TYPES for reverse in (False, True)),
    # backward
    *(
        Instance(f"backward.{kernel}", {"dtype": dtype, "K": K})
        for kernel in ("l2norm", "l2norm_backward")
        for dtype in DTYPES
        for K in KEY_DIMS
    ),
    *(Instance("backward.backward_maps", types) for types in TYPES),
    *(Instance("backward.replay_states", types) for types in TYPES),
    *(Instance("backward.chunk_backward", types, spill_budget=288) for types in TYPES),
    Instance("backward.sum_gates", {}),
]
