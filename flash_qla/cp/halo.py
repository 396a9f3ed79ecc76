"""The tokens before a rank's own, for the causal convolution before the Gated Delta Rule."""

import torch

from flash_qla.cp.context import CPContext, Part, as_ours, check_tokens
from flash_qla.cp.exchange import in_backward, refuse_transforms, start_gather, wait


class _ExchangeHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context, for_backward):
        ctx.context, ctx.shape = context, x.shape
        size = context.conv1d_kernel_size - 1
        tails = [_last_tokens(x[0, part.begin : part.end], min(size, context._part_len)) for part in context._parts]
        tails = wait(start_gather(torch.stack(tails), context, for_backward), context)
        halos = []
        for part in context._parts:
            # Each part before one with tokens has at least one token, so `size` parts are enough.
            preceding = tails[max(0, part.slot - size) : part.slot].flatten(0, 1)
            halos.append(_mask_other_sequences(_last_tokens(preceding, size), part))
        return torch.stack(halos)

    @staticmethod
    def backward(ctx, dhalo):
        context, dx = ctx.context, dhalo.new_zeros(ctx.shape)
        local_halos = zip(dhalo.unbind(), context._parts, strict=True)
        halos = torch.stack([_mask_other_sequences(halo, part) for halo, part in local_halos])
        halos = wait(start_gather(in_backward(halos), context), context)
        for part in context._parts:
            # The halo of a later part ends where that part begins, and may reach over several parts before it.
            tokens, reach = part.end - part.begin, dhalo.shape[1]
            for halo in halos[part.slot + 1 : part.slot + 1 + reach]:
                count = min(reach, tokens)
                dx[0, part.end - count : part.end] += halo[reach - count : reach]
                reach = max(0, reach - tokens)
        return dx, None, None


def _last_tokens(x: torch.Tensor, count: int) -> torch.Tensor:
    """The last tokens of x, after zeros if it has fewer."""
    x = x[max(0, x.shape[0] - count) :]
    missing = count - x.shape[0]
    return torch.cat([x.new_zeros(missing, *x.shape[1:]), x]) if missing else x


def _mask_other_sequences(halo: torch.Tensor, part: Part) -> torch.Tensor:
    """The halo, with zeros for tokens that do not belong to the part's first sequence."""
    num_masked = max(0, halo.shape[0] - part.tokens_before)
    return torch.cat([torch.zeros_like(halo[:num_masked]), halo[num_masked:]])


def exchange_halo(x: torch.Tensor, cp_context: CPContext) -> torch.Tensor:
    """Fetch the W - 1 tokens before each part of this rank, for a causal convolution of width W.

    All ranks of the group make the call. Gradients go back to the ranks that have the tokens, so the backward runs on
    all ranks or on none: x requires gradients on all or on none, and the loss of each depends on the result.

        halo = exchange_halo(x, context)             # [1, W - 1, D]
        x = torch.cat([halo, x], 1)                  # [1, W - 1 + T, D], for a convolution without padding

    Parameters
    ----------
    x : Tensor
        This rank's tokens, [1, T, ...], any dtype.
    cp_context : CPContext
        From build_cp_context with conv1d_kernel_size = W, or FLA's.

    Returns
    -------
    halo : Tensor
        [1, W - 1, ...], in the dtype of x; with zigzag [2, W - 1, ...], a row for each part. It is zero for tokens of
        another sequence than the part's first one.

    Raises
    ------
    ValueError
        The context has no conv1d_kernel_size, or x has another number of tokens than the context.
    NotImplementedError
        The call is under a transform of torch.func.
    """
    context = as_ours(cp_context)
    check_tokens("x", x, context)
    if context.conv1d_kernel_size is None:
        raise ValueError("cp_context has no conv1d_kernel_size, expected the width of the convolution")
    refuse_transforms("exchange_halo")
    return _ExchangeHalo.apply(x, context, torch.is_grad_enabled() and x.requires_grad)
