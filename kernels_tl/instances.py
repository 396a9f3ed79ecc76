"""What is compiled: each kernel in its dtypes. Head counts, batch, lengths and layouts are run-time numbers."""

from build_tools.instance import Instance

DTYPES = ("bfloat16", "float16")

INSTANCES = [
    *(Instance("chunk_plan", {"offset_dtype": dtype}) for dtype in ("int32", "int64")),
    Instance("gate_cumsum"),
    *(Instance("l2norm", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_inverse", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_states", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_output", {"dtype": dtype}) for dtype in DTYPES),
]
