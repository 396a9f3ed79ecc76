"""Compiled instances: each kernel by dtype and K, the largest number of channels that a key may have.

Value rows, head counts, batch, lengths and layouts are run-time numbers.
"""

from build_tools.instance import EVERY, HOPPER, PORTABLE, SINCE_HOPPER, Instance
from kernels_tl import config
from kernels_tl.config import is_wide
from kernels_tl.convolution import tile as conv_tile
from kernels_tl.decode import region_tile
from kernels_tl.norm import tiles as norm

DTYPES = ("bfloat16", "float16")
STATE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # dtypes of pools, and their bytes
FLOAT8 = {"float8": 1}  # both formats, for pools, but not with deferred state writes
BITS16 = {"bits16": 2}  # bf16 or fp16, which the call chooses
KEY_DIMS = (128, 256)

TYPES = [{"dtype": dtype, "K": K} for dtype in DTYPES for K in KEY_DIMS]  # most kernels have these parameters
NARROW_TYPES = [types for types in TYPES if not is_wide(types["K"])]
WIDE_TYPES = [types for types in TYPES if is_wide(types["K"])]
# The types of decode, and their dtypes of states. K > 128 leaves the 16-bit dtypes to run time: fewer instances.
DECODE_TYPES = [
    *((types, STATE_DTYPES) for types in NARROW_TYPES),
    *(({"dtype": "bits16", "K": K}, {"float32": 4} | BITS16) for K in KEY_DIMS if is_wide(K)),
]
# The types of the norm. A thread has 16 channels of rows of more than 256, and of those that are no whole number of 16
# bytes.
NORM_TYPES = [
    {"dtype": dtype, "channels": channels, "vectors": vectors}
    for dtype in ("bits16", "float32")
    for channels, vectors in ((8, True), (16, True), (16, False))
]


def decode_paths(dtype, K, state_dtype):
    """The paths of decode that are compiled for K and these dtypes. `tensor_cores` needs tokens and states in bf16,
    because they become factors without a conversion; `rows` takes the others. `blocks` needs fp32 states, because its
    lanes convert none. States of 8 bits have V first, and with K > 128 `rows` takes one token too."""
    by_tensor_cores = dtype == state_dtype == "bfloat16"
    takes = {
        "one_token": state_dtype != "float8" or not is_wide(K),
        "rows": not by_tensor_cores,
        "blocks": state_dtype == "float32",
        "tensor_cores": by_tensor_cores,
        "key_first": state_dtype != "float8",
    }
    return [path for path in takes if takes[path] and path in config.DECODE[K]]


def normalizations(dtype, K):
    """The values of `normalize` that chunk_backward and backward_maps are compiled for: whether the l2norm is inside.
    Products divided by both norms may be below the normal numbers of fp16, and K > 128 has a backward of its own.
    So both take normalized keys and queries from the kernel l2norm."""
    return (False,) if is_wide(K) or dtype == "float16" else (False, True)


INSTANCES = [
    Instance("plan.chunk_plan", architectures=EVERY),
    Instance("tokens.copy_tokens", architectures=EVERY),
    # the convolution before the delta rule
    *(
        Instance("convolution.causal_conv1d", {"dtype": dtype}, EVERY, facts=tile.facts)
        for dtype, tile in conv_tile.FORWARD.items()
    ),
    *(
        Instance("convolution.causal_conv1d_backward", {"dtype": dtype}, EVERY, facts=tile.facts)
        for dtype, tile in conv_tile.BACKWARD.items()
    ),
    Instance("convolution.conv_windows", architectures=EVERY),
    Instance("convolution.conv_gradients", architectures=EVERY),
    # forward
    *(
        Instance(
            "matrices.chunk_matrices",
            types | {"normalize": normalize, "portable": portable},
            architectures,
            spill_budget=spills,
        )
        for portable, architectures, spills in ((False, HOPPER, 0), (True, PORTABLE, config.PORTABLE_MATRICES_SPILLS))
        for types in TYPES
        for normalize in (False, True)
    ),
    *(
        Instance("states.chunk_forward", types | {"value_tile": tile}, spill_budget=row.spills)
        for types in TYPES
        for tile, row in config.CHUNK_FORWARD[types["K"]].items()
    ),
    *(Instance("portable.portable_forward", types, PORTABLE) for types in TYPES),
    *(
        Instance("portable.portable_scan", {"K": K, "reverse": reverse}, PORTABLE)
        for K in KEY_DIMS
        for reverse in (False, True)
    ),
    *(
        Instance(
            "states.fused_forward",
            types | {"normalize": normalize, "low_level": low_level, "cut": cut, "planned": planned},
            spill_budget=config.FUSED_A_SPILLS[types["dtype"]] * low_level,
        )
        for types in NARROW_TYPES
        for normalize in (False, True)
        for low_level in (False, True)
        for cut, planned in ((False, True), (True, True), *(() if low_level else ((False, False),)))
    ),
    *(
        Instance("maps.segment_memory", types | {"normalize": normalize})
        for types in NARROW_TYPES
        for normalize in (False, True)
    ),
    *(Instance("maps.segment_maps", types | {"partial": True}) for types in TYPES),
    *(Instance("maps.segment_maps", types | {"partial": False}) for types in NARROW_TYPES),
    *(
        Instance("maps.segment_scan", types | {"reverse": reverse, "columns": columns})
        for types in TYPES
        for reverse in (False, True)
        for columns in config.SEGMENT_SCAN[types["K"]]
    ),
    *(Instance("maps.compose_maps", types | {"reverse": reverse}) for types in TYPES for reverse in (False, True)),
    # backward
    *(Instance(f"gradients.{kernel}", {"K": K}, EVERY) for kernel in ("l2norm", "l2norm_backward") for K in KEY_DIMS),
    *(
        Instance(
            "maps.backward_maps",
            types | {"normalize": normalize},
            spill_budget=config.BACKWARD_MAPS[types["K"]].spills,
        )
        for types in TYPES
        for normalize in normalizations(**types)
    ),
    *(Instance("states.replay_states", types, spill_budget=config.REPLAY_STATES[types["K"]].spills) for types in TYPES),
    *(
        Instance(
            "gradients.chunk_backward",
            types | {"normalize": normalize},
            spill_budget=(config.CHUNK_BACKWARD_NORMALIZE if normalize else config.CHUNK_BACKWARD).spills,
        )
        for types in NARROW_TYPES
        for normalize in normalizations(**types)
    ),
    *(
        Instance("gradients.replay_gradients", types, spill_budget=config.REPLAY_GRADIENTS.spills)
        for types in WIDE_TYPES
    ),
    *(Instance("gradients.token_gradients", types, spill_budget=config.TOKEN_GRADIENTS.spills) for types in WIDE_TYPES),
    *(
        Instance(f"portable.{kernel}", types, PORTABLE, spill_budget=tiles[types["K"]].spills)
        for kernel, tiles in (
            ("portable_replay", config.PORTABLE_REPLAY),
            ("portable_replay_gradients", config.PORTABLE_REPLAY_GRADIENTS),
        )
        for types in TYPES
    ),
    *(Instance("portable.portable_token_gradients", types, PORTABLE) for types in TYPES),
    Instance("gradients.gate_gradients", architectures=EVERY),
    # the norm after the delta rule
    *(
        Instance(f"norm.{kernel}", types, EVERY, facts=of.facts(**types))
        for kernel, of in (("gated_rms_norm", norm.FORWARD), ("gated_rms_norm_backward", norm.BACKWARD))
        for types in NORM_TYPES
    ),
    Instance("norm.sum_rows", architectures=EVERY),
    # serving
    *(
        Instance(
            "decode.decode",
            types | {"state_dtype": dtype, "path": path},
            EVERY,
            spill_budget=config.decode_path(types["K"], path, state_bytes).spills,
            facts=config.decode_path(types["K"], path, state_bytes).facts,
        )
        for types, state_dtypes in DECODE_TYPES
        for dtype, state_bytes in (state_dtypes | FLOAT8).items()
        for path in decode_paths(**types, state_dtype=dtype)
    ),
    *(
        Instance(
            f"decode.{kernel}",
            types | {"state_dtype": dtype},
            spill_budget=tile.fp16_spills if dtype == "float16" else 0,
            facts=tile.facts,
        )
        for kernel, tile in (
            ("decode_region", region_tile.ONE_TOKEN),
            ("decode_region_drafts", region_tile.DRAFTS),
        )
        for types in NARROW_TYPES
        for dtype in STATE_DTYPES | FLOAT8
    ),
    *(
        Instance(
            "decode.decode_buffered",
            types | {"state_dtype": dtype},
            SINCE_HOPPER,
            facts={"ctas": config.DECODE_BUFFERED[dtype == types["dtype"]].ctas},
        )
        for types in NARROW_TYPES
        for dtype in STATE_DTYPES
    ),
]
