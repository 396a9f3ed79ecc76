"""Maps of states over parts, S' = S M + Z for V-first states: [H_v, V + K, K] each, Z [V, K] above M [K, K]."""

import torch

# Maps whose norm is smaller count as 0, as within a split (kernels_tl/maps/segments.cuh)
_NEGLIGIBLE = 2.0**-24


def fold(maps: torch.Tensor, parts: int, V: int) -> torch.Tensor:
    """The state [H_v, V, K] after the last of maps [parts, H_v, V + K, K], from a state of 0 before the first.

    Each of log2(parts) rounds composes neighbours, all pairs at once. The arithmetic is in float64, because settings
    that round float32 to TF32 do not reach it.

    `parts` is an argument because torch.compile of PyTorch 2.11 takes the size of a slice for a symbol.
    """
    if parts == 1:
        return maps[0, :, :V]
    folded = maps.double()
    if maps.dtype != torch.float64:
        Z, M = folded.tensor_split([V], 2)
        M = M.masked_fill(M.square().sum((2, 3), keepdim=True) < _NEGLIGIBLE**2, 0)
        folded = torch.cat([Z, M], 2)
    while parts > 1:
        pairs, last = folded.tensor_split([parts // 2 * 2])
        first, second = pairs[::2], pairs[1::2]
        Z, M = (first @ second[:, :, V:]).tensor_split([V], 2)
        folded = torch.cat([torch.cat([Z + second[:, :, :V], M], 2), last])
        parts -= parts // 2
    return folded[0, :, :V].to(maps.dtype)


def spread(computed: torch.Tensor, mapped: list[bool]) -> torch.Tensor:
    """The maps [parts, ...] of all parts: those of the mapped parts, and zeros for the others."""
    if all(mapped):
        return computed
    if not any(mapped):
        return computed.new_zeros(len(mapped), *computed.shape[1:])
    rows, zeros = iter(computed.unbind()), computed.new_zeros(computed.shape[1:])
    return torch.stack([next(rows) if is_mapped else zeros for is_mapped in mapped])
