"""What the published FlashQLA has under this name is not here; an import says what to take in its place."""

_INSTEAD = {
    **dict.fromkeys(
        ("l2norm", "l2norm_fwd", "l2norm_bwd"),
        "use_qk_l2norm_in_kernel=True of flash_qla.chunk_gated_delta_rule, forward and backward",
    ),
    **dict.fromkeys(
        ("pack", "unpack", "pad_and_reshape", "fill_last_chunk_of_g"),
        "cu_seqlens of flash_qla.chunk_gated_delta_rule, which takes packed sequences of any lengths",
    ),
    **dict.fromkeys(
        ("prepare_chunk_indices", "prepare_chunk_offsets"), "nothing: the ops make them on the device from cu_seqlens"
    ),
    **dict.fromkeys(("input_guard", "tensor_cache"), "nothing: the ops take tensors of any strides, on any device"),
}


def __getattr__(name: str):
    if name in _INSTEAD:
        raise ImportError(f"flash_qla.utils.{name} is of the published FlashQLA; take {_INSTEAD[name]}")
    raise AttributeError(f"module 'flash_qla.utils' has no attribute {name!r}")
