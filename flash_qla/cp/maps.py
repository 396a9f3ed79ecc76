"""Maps of states over parts, S' = S M + Z for V-first states: [H_v, V + K, K] each, Z [V, K] above M [K, K]."""

import torch

# Maps whose norm is smaller count as 0, as within a split (kernels_tl/maps/segments.cuh)
_NEGLIGIBLE = 2.0**-24


def fold(maps: torch.Tensor, parts: int, V: int) -> torch.Tensor:
    """The state [H_v, V, K] after the last of maps [parts, H_v, V + K, K], from a state of 0 before the first.

    The arithmetic is in float64, because settings that round float32 to TF32 do not reach it. `parts` is an argument
    because torch.compile of PyTorch 2.11 takes the size of a slice for a symbol.
    """
    if parts == 1:
        return maps[0, :, :V]
    M = maps[1:, :, V:].double()
    if maps.dtype != torch.float64:
        M = M * (torch.linalg.vector_norm(M, dim=(2, 3), keepdim=True) >= _NEGLIGIBLE)
    state = maps[0, :, :V].double()
    for part in range(1, parts):
        state = torch.baddbmm(maps[part, :, :V].double(), state, M[part - 1])
    return state.to(maps.dtype)


def spread(computed: torch.Tensor, mapped: list[bool]) -> torch.Tensor:
    """The maps [parts, ...] of all parts: those of the mapped parts, and zeros for the others."""
    if all(mapped):
        return computed
    if not any(mapped):
        return computed.new_zeros(len(mapped), *computed.shape[1:])
    rows, zeros = iter(computed.unbind()), computed.new_zeros(computed.shape[1:])
    return torch.stack([next(rows) if is_mapped else zeros for is_mapped in mapped])
