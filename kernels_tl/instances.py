"""What is compiled: each kernel in its dtypes. Head counts, batch, lengths and layouts are run-time numbers."""

from build_tools.instance import Instance

DTYPES = ("bfloat16", "float16")

INSTANCES = [
    *(Instance("chunk_plan", {"offset_dtype": dtype}) for dtype in ("int32", "int64")),
    Instance("gate_cumsum"),
    *(Instance("l2norm", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_inverse", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_states", {"dtype": dtype, "update": "rounded"}) for dtype in DTYPES),  # forward
    *(Instance("chunk_states", {"dtype": dtype, "update": "exact"}) for dtype in DTYPES),  # backward
    *(Instance("chunk_output", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_matrices_bwd", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_states_bwd", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_inputs_bwd", {"dtype": dtype}) for dtype in DTYPES),
]
