"""Ground truth for the tests: the Gated Delta Rule one token at a time, in fp64.

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T        o_t = scale * S_t^T q_t

Nothing here is shared with the package: no chunks in the recurrence, no 16-bit numbers, no reordering. Sequences and
heads run side by side, so a token costs a dozen tensor operations whatever the batch, and the same code runs on CPU and
GPU. The two chunk-wise quantities (the gate cumsum and the gate-free inverse A) are written from their definitions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import torch

CHUNK = 64
L2NORM_EPS = 1e-6


@dataclasses.dataclass
class Reference:
    """All fp64. Rows (tokens) and chunks that belong to no sequence are zero."""

    o: torch.Tensor  # [B, T, H_v, V]
    final_state: torch.Tensor  # [N, H_v, K, V], or [N, H_v, V, K] with state_v_first
    h: torch.Tensor  # the state each chunk starts from, [B, NT, H_v, K, V]; with cu_seqlens [1, (T + 63 N) // 64, ...]


@dataclasses.dataclass
class Layout:
    """Where each sequence lies in the flattened [B * T] token axis and in the flattened chunk axis."""

    starts: list[int]  # first token of each sequence
    lengths: list[int]
    chunk_starts: list[int]  # first chunk of each sequence
    h_shape: tuple[int, int]  # (B, NT) of h; NT is an upper bound with cu_seqlens

    @staticmethod
    def of(B: int, T: int, cu_seqlens=None) -> Layout:
        if cu_seqlens is None:
            NT = -(-T // CHUNK)
            return Layout([b * T for b in range(B)], [T] * B, [b * NT for b in range(B)], (B, NT))
        offsets = torch.as_tensor(cu_seqlens).tolist()
        starts = offsets[:-1]
        lengths = [end - start for start, end in itertools.pairwise(offsets)]
        chunk_starts = [0]
        for length in lengths:
            chunk_starts.append(chunk_starts[-1] + -(-length // CHUNK))
        return Layout(starts, lengths, chunk_starts[:-1], (1, (T + 63 * len(lengths)) // CHUNK))

    def chunk_rows(self) -> torch.Tensor:
        """[chunks, 64] token of each row of each chunk, -1 beyond the chunk's end."""
        chunks = [
            [start + first + i if first + i < length else -1 for i in range(CHUNK)]
            for start, length in zip(self.starts, self.lengths, strict=True)
            for first in range(0, length, CHUNK)
        ]
        return torch.tensor(chunks, dtype=torch.int64).reshape(-1, CHUNK)


@contextlib.contextmanager
def one_thread():
    """Thousands of small operations: handing each to several threads costs more than it saves, and on a busy machine a
    hundred times more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


@one_thread()
def gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
    state_v_first=False,
) -> Reference:
    B, T, H_v, V = v.shape
    K = k.shape[-1]
    groups = H_v // k.shape[2]
    layout = Layout.of(B, T, cu_seqlens)
    N = len(layout.lengths)
    scale = K**-0.5 if scale is None else scale

    q, k, v, g, beta = (x.double().reshape(B * T, *x.shape[2:]) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    q = q.repeat_interleave(groups, 1)  # value head h reads q/k head h // groups
    k = k.repeat_interleave(groups, 1)
    decay = g.exp()

    o = v.new_zeros(B * T, H_v, V)
    h = v.new_zeros(layout.h_shape[0] * layout.h_shape[1], H_v, K, V)
    S = v.new_zeros(N, H_v, K, V)
    if initial_state is not None:
        S += initial_state.double().mT if state_v_first else initial_state.double()

    # Longest first: the sequences still running at step t are then the first n, and S[:n] is a view.
    order = sorted(range(N), key=lambda n: -layout.lengths[n])
    lengths = [layout.lengths[n] for n in order]
    order_index = torch.tensor(order, dtype=torch.int64, device=v.device)
    starts = torch.tensor(layout.starts, dtype=torch.int64, device=v.device)[order_index]
    chunk_starts = torch.tensor(layout.chunk_starts, dtype=torch.int64, device=v.device)
    chunk_starts = chunk_starts[order_index]
    S = S[order_index]
    n = N
    for t in range(max(lengths, default=0)):
        while lengths[n - 1] <= t:
            n -= 1
        rows = starts[:n] + t
        S_n, k_t = S[:n], k[rows]
        if t % CHUNK == 0:
            h[chunk_starts[:n] + t // CHUNK] = S_n
        S_n *= decay[rows][..., None, None]
        v_new = beta[rows][..., None] * (v[rows] - (k_t[..., None, :] @ S_n)[..., 0, :])
        S_n += k_t[..., :, None] * v_new[..., None, :]
        o[rows] = scale * (q[rows][..., None, :] @ S_n)[..., 0, :]

    final_state = torch.empty_like(S)
    final_state[order_index] = S
    h = h.reshape(*layout.h_shape, H_v, K, V)
    if state_v_first:
        final_state, h = final_state.mT, h.mT
    return Reference(o.reshape(B, T, H_v, V), final_state, h)


def position_in_chunk(B: int, T: int, cu_seqlens=None) -> torch.Tensor:
    """[B, T] index of each token in its chunk, -1 for padding."""
    rows = Layout.of(B, T, cu_seqlens).chunk_rows()
    out = torch.full((B * T,), -1)
    for i in range(CHUNK):
        out[rows[:, i][rows[:, i] >= 0]] = i
    return out.reshape(B, T)


def chunk_cumsum(g, cu_seqlens=None) -> torch.Tensor:
    """Inclusive cumulative sum of g [B, T, H_v] that restarts at each chunk of each sequence."""
    B, T, H_v = g.shape
    rows = Layout.of(B, T, cu_seqlens).chunk_rows().to(g.device)
    in_chunk = rows >= 0
    g = g.double().reshape(B * T, H_v)
    out = torch.zeros_like(g)
    if len(rows):
        out[rows[in_chunk]] = g[rows.clamp_min(0)].cumsum(1)[in_chunk]
    return out.reshape(B, T, H_v)


@one_thread()
def chunk_inverse(k, beta, cu_seqlens=None, use_qk_l2norm_in_kernel=False) -> torch.Tensor:
    """A = (I + stril(diag(beta) K K^T))^{-1} of each chunk, [B, T, H_v, 64]: row i of a chunk at its token i.

    Rows beyond the end of a partial chunk count as k = 0, so columns from its length on are zero.
    """
    B, T, H_v = beta.shape
    k = k.double()
    if use_qk_l2norm_in_kernel:
        k = l2norm(k)
    k = k.repeat_interleave(H_v // k.shape[2], 2).reshape(B * T, H_v, k.shape[-1])
    beta = beta.double().reshape(B * T, H_v)
    out = beta.new_zeros(B * T, H_v, CHUNK)
    rows = Layout.of(B, T, cu_seqlens).chunk_rows().to(k.device)
    in_chunk = rows >= 0
    if len(rows):
        mask = in_chunk[:, None, :, None]
        # [chunks, H_v, 64, ...]; where, not a product: rows outside the chunk may hold NaN
        k_c = torch.where(mask, k[rows.clamp_min(0)].transpose(1, 2), 0.0)
        beta_c = torch.where(mask, beta[rows.clamp_min(0)].transpose(1, 2)[..., None], 0.0)
        identity = torch.eye(CHUNK, dtype=k.dtype, device=k.device)
        L = (beta_c * (k_c @ k_c.mT)).tril(-1) + identity
        A = torch.linalg.solve_triangular(L, identity.expand_as(L), upper=False, unitriangular=True)
        out[rows[in_chunk]] = A.transpose(1, 2)[in_chunk]
    return out.reshape(B, T, H_v, CHUNK)
