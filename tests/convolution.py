"""A stand-in in torch for the package causal-conv1d, whose kernels need a GPU."""

import types

import torch
import torch.nn.functional as F


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    """The package's function and what it requires of strides, without states.

    Args:
        x: [B, D, T].
        weight: [D, W].
        bias: [D], or None.
        seq_idx: [B, T], int32: the number of each token's sequence; or None.
        activation: "silu", "swish" or None.
    """
    assert initial_states is None and not return_final_states and final_states_out is None
    assert activation in (None, "silu", "swish")
    T, W = x.shape[2], weight.shape[1]
    assert 2 <= W <= 4
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and seq_idx.shape == (x.shape[0], T)
        assert x.stride(1) == 1 and x.stride(2) > 1, "seq_idx requires a layout in which channels are neighbours"
    if x.stride(1) == 1:
        assert x.shape[1] % 8 == x.stride(0) % 8 == x.stride(2) % 8 == 0
    y = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for back in range(W):
        earlier = F.pad(x, (back, 0))[..., :T]
        if seq_idx is not None:
            is_same = F.pad(seq_idx, (back, 0), value=-1)[:, :T] == seq_idx
            earlier = earlier.masked_fill(~is_same[:, None], 0)
        y = y + weight[:, W - 1 - back, None] * earlier
    if bias is not None:
        y = y + bias[:, None]
    return (y if activation is None else F.silu(y)).to(x.dtype)


def package() -> types.ModuleType:
    """A module to import in place of the package."""
    module = types.ModuleType("causal_conv1d")
    module.causal_conv1d_fn = causal_conv1d_fn
    return module
