"""What is compiled: each kernel in its dtypes. Head counts, batch, lengths and layouts are run-time numbers."""

from build_tools.instance import Instance

DTYPES = ("bfloat16", "float16")

INSTANCES = [
    *(Instance("chunk_plan", {"offset_dtype": dtype}) for dtype in ("int32", "int64")),
    Instance("gate_cumsum"),
    *(Instance("l2norm", {"dtype": dtype}) for dtype in DTYPES),
    *(
        Instance("chunk_matrices", {"dtype": dtype, "normalize": normalize})
        for dtype in DTYPES
        for normalize in (False, True)
    ),
    *(Instance("chunk_forward", {"dtype": dtype, "value_tile": tile}) for dtype in DTYPES for tile in (64, 128)),
    *(
        # What spills is the number of pieces, which is read once a piece.
        Instance(
            "fused_forward",
            {"dtype": dtype, "normalize": normalize, "low_level": low_level},
            spill_budget=12 if low_level else 0,
        )
        for dtype in DTYPES
        for normalize in (False, True)
        for low_level in (False, True)
        if not (low_level and dtype == "float16")  # whose A takes more digits than this kernel's inverse has
    ),
    *(Instance("segment_maps", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("segment_scan", {"dtype": dtype}) for dtype in DTYPES),
    # backward
    *(Instance("chunk_states", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_matrices_bwd", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_states_bwd", {"dtype": dtype}) for dtype in DTYPES),
    *(Instance("chunk_inputs_bwd", {"dtype": dtype}) for dtype in DTYPES),
]
