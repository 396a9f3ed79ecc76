"""Ground truth for the tests: the Gated Delta Rule one token at a time, in fp64 unless another dtype is asked for.

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
import torch.nn.functional as F

CHUNK = 64
L2NORM_EPS = 1e-6


@dataclasses.dataclass
class Reference:
    """All of the dtype of the arithmetic. Rows (tokens) and chunks that belong to no sequence are zero."""

    o: torch.Tensor  # [B, T, H_v, V]
    final_state: torch.Tensor  # [N, H_v, K, V], or [N, H_v, V, K] with state_v_first
    h: torch.Tensor  # the state each chunk starts from, [B, NT, H_v, K, V]; with cu_seqlens [1, (T + 63 N) // 64, ...]


@dataclasses.dataclass
class Gradients:
    """All of the dtype of the arithmetic, of the shapes of q, k, v, beta, g and the initial state. Rows that belong to
    no sequence are zero."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    db: torch.Tensor
    dg: torch.Tensor
    dh0: torch.Tensor
    # The size of each number of db and dg, a dot product x . y of n terms: |x| |y| / sqrt(n), the size with random
    # signs. With activations inside these sizes go through the chain rule; those of dA_log and ddt_bias are sums.
    sizes: dict[str, torch.Tensor]
    # [H_v], with the gate inside, and a bias
    dA_log: torch.Tensor | None = None
    ddt_bias: torch.Tensor | None = None


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


def l2norm_bwd(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Gradient of x, from that of y = l2norm(x)."""
    r = torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)
    y = x * r
    return r * (dy - y * (y * dy).sum(-1, keepdim=True))


def gated_rms_norm(o, z, weight, *, eps=1e-6, activation="silu", norm_before_gate=True, dtype=torch.float64):
    o, z, weight = o.to(dtype), z.to(dtype), weight.to(dtype)
    gate = F.silu(z) if activation == "silu" else z.sigmoid()
    x = o if norm_before_gate else o * gate
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return y * gate if norm_before_gate else y


def activated(
    g,
    beta,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    dtype=torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log decay and beta that the recurrence takes, [B, T, H_v], of what an op is given."""
    g, beta = g.to(dtype), beta.to(dtype)
    if use_gate_in_kernel:
        x = g if dt_bias is None else g + dt_bias.to(dtype)
        resets = x.isposinf()  # -inf, without derivatives, which would be NaN times 0
        rate = A_log.to(dtype).exp()
        g = (-rate * F.softplus(x.masked_fill(resets, 0))).masked_fill(resets, -torch.inf)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    return g, beta


def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x[..., :, None] * y[..., None, :]


def vecmat(x: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    return (x[..., None, :] @ S)[..., 0, :]


def matvec(S: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (S @ y[..., :, None])[..., 0]


class Recurrence:
    """The inputs in `dtype`, with a row per token and a head per value head, and the sequences in the order in which
    they run: longest first, so that those still running at step t are the first ones and their states S[:n] a view."""

    def __init__(
        self, q, k, v, g, beta, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first, dtype
    ):
        B, T, H_v, V = v.shape
        self.B, self.T, self.H_v, self.V = B, T, H_v, V
        self.H_k, self.K = k.shape[2:]
        self.scale = self.K**-0.5 if scale is None else scale
        self.state_v_first = state_v_first
        rows = [x.to(dtype).reshape(B * T, *x.shape[2:]) for x in (q, k, v, g, beta)]
        self.q_in, self.k_in, self.v, g, self.beta = rows
        self.decay = g.exp()
        # value head h reads q/k head h // groups
        self.q, self.k = (
            (l2norm(x) if use_qk_l2norm_in_kernel else x).repeat_interleave(H_v // self.H_k, 1)
            for x in (self.q_in, self.k_in)
        )

        self.layout = Layout.of(B, T, cu_seqlens)
        N = len(self.layout.lengths)
        order = sorted(range(N), key=lambda n: -self.layout.lengths[n])
        self.lengths = [self.layout.lengths[n] for n in order]
        self.order = self.index(order)
        self.starts = self.index(self.layout.starts)[self.order]
        self.initial_state = self.states_in(initial_state)

    def index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.v.device)

    def states_in(self, states: torch.Tensor | None) -> torch.Tensor:
        """The caller's states, or zeros, in the order of this class."""
        if states is None:
            return self.v.new_zeros(len(self.lengths), self.H_v, self.K, self.V)
        states = states.mT if self.state_v_first else states
        return states.to(self.v.dtype)[self.order]

    def states_out(self, S: torch.Tensor) -> torch.Tensor:
        states = torch.empty_like(S)
        states[self.order] = S
        return states.mT if self.state_v_first else states

    def steps(self) -> list[torch.Tensor]:
        """The rows of token t of the sequences that have one, for each step t."""
        n, rows = len(self.lengths), []
        for t in range(max(self.lengths, default=0)):
            while self.lengths[n - 1] <= t:
                n -= 1
            rows.append(self.starts[:n] + t)
        return rows

    def advance(self, S: torch.Tensor, rows: torch.Tensor) -> None:
        """S_{t-1} becomes S_t."""
        k = self.k[rows]
        S *= self.decay[rows][..., None, None]
        S += outer(k, self.beta[rows][..., None] * (self.v[rows] - vecmat(k, S)))


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
    dtype=torch.float64,
    **activations,
) -> Reference:
    g, beta = activated(g, beta, **activations, dtype=dtype)
    p = Recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first, dtype)
    o = torch.zeros_like(p.v)
    h = p.v.new_zeros(p.layout.h_shape[0] * p.layout.h_shape[1], p.H_v, p.K, p.V)
    chunk_starts = p.index(p.layout.chunk_starts)[p.order]
    S = p.initial_state
    for t, rows in enumerate(p.steps()):
        S_n = S[: len(rows)]
        if t % CHUNK == 0:
            h[chunk_starts[: len(rows)] + t // CHUNK] = S_n
        p.advance(S_n, rows)
        o[rows] = p.scale * vecmat(p.q[rows], S_n)
    h = h.reshape(*p.layout.h_shape, p.H_v, p.K, p.V)
    return Reference(o.reshape(v.shape), p.states_out(S), h.mT if state_v_first else h)


@one_thread()
def gated_delta_rule_bwd(
    q,
    k,
    v,
    g,
    beta,
    do,
    dht=None,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
    state_v_first=False,
    dtype=torch.float64,
    **activations,
) -> Gradients:
    """The recurrence in reverse. With a = e^{g_t}, e = v_t - a S_{t-1}^T k_t, u = beta_t e: S_t = a S_{t-1} + k_t u^T.
    At first dS is dht; before step t it is the gradient of S_t but for what comes through o_t = scale * S_t^T q_t:

        dS  <- dS + scale q_t do_t^T                dq_t = scale * S_t do_t
        du   = dS^T k_t                             db_t = du . e
        dv_t = beta_t du                            dk_t = dS u - a S_{t-1} dv_t
        dS  <- a (dS - k_t dv_t^T)                  dg_t = <dS, S_{t-1}>

    and the last dS is that of S_{t-1}, in the end dh0. States are kept at every 64th token, those between made again.
    Through activations that are inside PyTorch's autograd goes.
    """
    raw = {"g": g, "beta": beta, **activations}
    g, beta = activated(**raw, dtype=dtype)
    p = Recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, state_v_first, dtype)
    do = do.to(dtype).reshape(p.v.shape)
    dq, dk, dv, db, dg = (torch.zeros_like(x) for x in (p.q, p.k, p.v, p.beta, p.decay))
    db_size, dg_size = torch.zeros_like(db), torch.zeros_like(dg)
    steps = p.steps()
    S = p.initial_state
    chunk_states = []
    for t, rows in enumerate(steps):
        if t % CHUNK == 0:
            chunk_states.append(S[: len(rows)].clone())
        p.advance(S[: len(rows)], rows)

    dS = p.states_in(dht)
    for first in reversed(range(0, len(steps), CHUNK)):
        S = chunk_states.pop()
        states = [S.clone()]
        for rows in steps[first : first + CHUNK]:
            p.advance(S[: len(rows)], rows)
            states.append(S[: len(rows)].clone())
        for t in reversed(range(first, first + len(states) - 1)):
            rows = steps[t]
            S_t, S_before, dS_n = states.pop(), states[-1][: len(rows)], dS[: len(rows)]
            k_t, do_t, a, b = p.k[rows], do[rows], p.decay[rows][..., None], p.beta[rows][..., None]
            e = p.v[rows] - a * vecmat(k_t, S_before)
            dS_n += outer(p.scale * p.q[rows], do_t)
            du = vecmat(k_t, dS_n)
            dv_t = b * du
            dq[rows] = p.scale * matvec(S_t, do_t)
            dk[rows] = matvec(dS_n, b * e) - a * matvec(S_before, dv_t)
            dv[rows] = dv_t
            db[rows] = (du * e).sum(-1)
            db_size[rows] = du.norm(dim=-1) * e.norm(dim=-1) * p.V**-0.5
            dS_n -= outer(k_t, dv_t)
            dS_n *= a[..., None]
            dg[rows] = (dS_n * S_before).sum((-2, -1))
            dg_size[rows] = dS_n.norm(dim=(-2, -1)) * S_before.norm(dim=(-2, -1)) * (p.K * p.V) ** -0.5

    dq, dk = (x.unflatten(1, (p.H_k, p.H_v // p.H_k)).sum(2) for x in (dq, dk))
    if use_qk_l2norm_in_kernel:
        # Rows of no sequence may hold NaN, and have a gradient of zero.
        covered = torch.zeros(p.B * p.T, 1, 1, dtype=torch.bool, device=dq.device)
        for rows in steps:
            covered[rows] = True
        dq, dk = (torch.where(covered, l2norm_bwd(x, dy), dy) for x, dy in ((p.q_in, dq), (p.k_in, dk)))
    dq, dk, dv, db, dg, db_size, dg_size = (
        x.reshape(p.B, p.T, *x.shape[1:]) for x in (dq, dk, dv, db, dg, db_size, dg_size)
    )
    dh0, sizes = p.states_out(dS), {"db": db_size, "dg": dg_size}
    if not activations:
        return Gradients(dq, dk, dv, db, dg, dh0, sizes)
    covered = torch.zeros(p.B * p.T, 1, dtype=torch.bool, device=dq.device)
    for rows in steps:
        covered[rows] = True
    through, sizes = activated_bwd(raw, dg, db, sizes, covered.reshape(p.B, p.T, 1))
    return Gradients(
        dq, dk, dv, through["beta"], through["g"], dh0, sizes, through.get("A_log"), through.get("dt_bias")
    )


@torch.enable_grad()
def activated_bwd(raw: dict, dg: torch.Tensor, db: torch.Tensor, sizes: dict, covered: torch.Tensor):
    """The gradients of activated's arguments from those of its results, by argument, and the sizes of the gradients by
    their names. Rows that are not covered may hold NaN, and do not count."""
    dtype = dg.dtype
    leaves = {name: raw[name] for name in ("g", "beta", "A_log", "dt_bias") if raw.get(name) is not None}
    for name in ("g", "beta"):
        leaves[name] = torch.where(covered, raw[name], 0)
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
    g, beta = activated(**{**raw, **leaves}, dtype=dtype)

    def backward(of: tuple[str, ...], dg: torch.Tensor, db: torch.Tensor) -> dict:
        grads = torch.autograd.grad((g, beta), [leaves[name] for name in of], (dg, db), retain_graph=True)
        return dict(zip(of, grads, strict=True))

    slopes = backward(("g", "beta"), torch.ones_like(dg), torch.ones_like(db))
    db_size, dg_size = sizes["db"] * slopes["beta"].abs(), sizes["dg"] * slopes["g"].abs()
    dA_log_size = sizes["dg"] * g.detach().masked_fill(g.isneginf(), 0)
    dA_log_size, ddt_bias_size = (x.square().sum((0, 1)).sqrt() for x in (dA_log_size, dg_size))
    sizes = {"db": db_size, "dg": dg_size, "dA_log": dA_log_size, "ddt_bias": ddt_bias_size}
    return backward(tuple(leaves), dg, db), sizes


def position_in_chunk(B: int, T: int, cu_seqlens=None) -> torch.Tensor:
    """[B, T] index of each token in its chunk, -1 for padding."""
    rows = Layout.of(B, T, cu_seqlens).chunk_rows()
    out = torch.full((B * T,), -1)
    for i in range(CHUNK):
        out[rows[:, i][rows[:, i] >= 0]] = i
    return out.reshape(B, T)


def chunk_cumsum(g, cu_seqlens=None, dtype=torch.float64) -> torch.Tensor:
    """Inclusive cumulative sum of g [B, T, H_v] that restarts at each chunk of each sequence, and after a token of
    -inf, where it is -inf."""
    B, T, H_v = g.shape
    rows = Layout.of(B, T, cu_seqlens).chunk_rows().to(g.device)
    in_chunk = rows >= 0
    g = g.to(dtype).reshape(B * T, H_v)
    out = torch.zeros_like(g)
    if len(rows):
        chunks = torch.where(in_chunk[..., None], g[rows.clamp_min(0)], 0)
        total = torch.zeros_like(chunks[:, 0])
        for i in range(CHUNK):
            total = total.masked_fill(total.isneginf(), 0) + chunks[:, i]
            chunks[:, i] = total
        out[rows[in_chunk]] = chunks[in_chunk]
    return out.reshape(B, T, H_v)


@one_thread()
def chunk_inverse(k, beta, cu_seqlens=None, use_qk_l2norm_in_kernel=False, dtype=torch.float64) -> torch.Tensor:
    """A = (I + stril(diag(beta) K K^T))^{-1} of each chunk, [B, T, H_v, 64]: row i of a chunk at its token i.

    Rows beyond the end of a partial chunk count as k = 0, so columns from its length on are zero.
    """
    B, T, H_v = beta.shape
    k = k.to(dtype)
    if use_qk_l2norm_in_kernel:
        k = l2norm(k)
    k = k.repeat_interleave(H_v // k.shape[2], 2).reshape(B * T, H_v, k.shape[-1])
    beta = beta.to(dtype).reshape(B * T, H_v)
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


def causal_conv1d(x, weight, bias=None, use_silu=True, initial_state=None, cu_seqlens=None):
    """The causal depthwise convolution, from its definition; can be differentiated.

    Returns:
        y: [B, T, D]; zeros for tokens of no sequence.
        final_state: the last rows of the initial window and the tokens, [N, D, columns].
    """
    x, weight = x.double(), weight.double().flatten(1)
    (B, T, D), W = x.shape, weight.shape[1]
    offsets = [T * n for n in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    columns = W - 1 if initial_state is None else initial_state.shape[2]
    y, windows = [], []
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        window = x.new_zeros(columns, D) if initial_state is None else initial_state[n].double().T
        rows = torch.cat((window, x.flatten(0, 1)[begin:end]))
        windows.append(rows[len(rows) - columns :].T)
        first = columns - (W - 1)
        out = sum(weight[:, w] * rows[first + w : first + w + end - begin] for w in range(W))
        y.append(out if bias is None else out + bias.double())
    y = torch.cat(y) if y else x.new_zeros(0, D)
    y = F.pad(F.silu(y) if use_silu else y, (0, 0, 0, B * T - len(y)))
    return y.view(B, T, D), torch.stack(windows) if windows else x.new_zeros(0, D, columns)
