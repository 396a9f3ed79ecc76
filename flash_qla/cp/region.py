"""The region of a layer on a rank's tokens: the halo of the convolution, then the delta rule over the ranks."""

import torch

from flash_qla.convolution import causal_conv1d
from flash_qla.cp.context import as_ours
from flash_qla.cp.halo import exchange_halo
from flash_qla.gated_delta_rule import chunk_gated_delta_rule
from flash_qla.gated_norm import gated_rms_norm


def gated_delta_net(
    cp_context, mixed, z, a, b, conv_weight, conv_bias, norm_weight, *, num_k_heads, head_k_dim, initial_window,
    output_final_state, norm_eps, norm_activation, **rule,
):  # fmt: skip
    """flash_qla.gated_delta_net with z [B, T, H_v, V]; `rule`: the other arguments, those of the delta rule."""
    context, width = as_ours(cp_context), conv_weight.shape[-1]
    if context.conv1d_kernel_size != width:
        raise ValueError(
            f"cp_context has conv1d_kernel_size {context.conv1d_kernel_size}, expected {width}, the taps of conv_weight"
        )
    if initial_window is not None:
        raise ValueError("initial_window is a tensor, expected None with cp_context: the window is the ranks' halo")
    windows, offsets = mixed.new_zeros(context.num_seqs, mixed.shape[2], width - 1), context.cu_seqlens
    # The results depend on each halo, so that its backward runs on every rank. A part of padding has a sequence without
    # tokens for it.
    for part, halo in zip(context._parts, exchange_halo(mixed, cp_context), strict=True):
        if part.first <= part.last:
            windows = windows.select_scatter(halo.mT, 0, part.first)
        else:
            windows, offsets = torch.cat([windows, halo.mT[None]]), torch.cat([offsets, offsets[-1:]])
    x, final_window = causal_conv1d(
        mixed, conv_weight, conv_bias, initial_state=windows, output_final_state=output_final_state,
        cu_seqlens=offsets,
    )  # fmt: skip
    key_channels, (H_v, V) = num_k_heads * head_k_dim, z.shape[2:]
    q, k, v = x.split([key_channels, key_channels, H_v * V], -1)
    q, k = (y.unflatten(-1, (num_k_heads, head_k_dim)) for y in (q, k))
    o, final_state = chunk_gated_delta_rule(
        q, k, v.unflatten(-1, (H_v, V)), a, b, cp_context=cp_context, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **rule,
    )  # fmt: skip
    y = gated_rms_norm(o, z, norm_weight, eps=norm_eps, activation=norm_activation)
    return y, final_state, None if final_window is None else final_window[: context.num_seqs]
