"""The effect of rounding on the outputs of a call, and the fuzzer's bars from it. The formula runs by chunks in fp64,
in several runs at once, whose products are exact, rounded, or off by a random part of the rounding."""

import reference
import torch
import torch.nn.functional as F
from accuracy import FLOAT8, to_float8
from cases import ALL_GRADIENTS_OF
from reference import CHUNK

BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64


class Noise:
    """The runs' roundings of tensors [RUNS, ...], to the digits of `dtype`: none, to the nearest, and at random."""

    def __init__(self, dtype: torch.dtype, device: str, runs: int, seed: int):
        self.dtype, self.runs = dtype, runs
        # Where sums have no more digits than their operands, what they round comes on top.
        self.unit = torch.finfo(dtype).eps * (0.5 if dtype in (BF16, FP16) else 2)
        self.scale = 2**13 if dtype == FP64 else 1  # random errors of fp64 must be larger than its own rounding
        self.generator = torch.Generator(torch.empty(0, device=device).device).manual_seed(
            seed
        )  # the emulator has CPUs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        off = self.unit * self.scale
        y = torch.empty(x.shape, dtype=FP64, device=x.device).uniform_(1 - off, 1 + off, generator=self.generator)
        y[0] = 1
        if self.dtype == FP64:  # as exact as the first run: they differ by the rounding of both
            y[1].sub_(1).div_(self.scale).add_(1)
        if self.dtype == FP16:  # below `tiny` rounding takes as much as there, at most the whole number
            tiny = torch.finfo(FP16).tiny
            small = x + (y - 1) / off * x.abs().clamp_max(off * tiny)
            y = torch.where(x.abs() < tiny, small, y * x)
        else:
            y *= x
        if self.dtype != FP64:
            near = x[1].to(self.dtype).to(FP64)
            y[1] = torch.where(near.isinf(), x[1], near)  # the exact number beyond the dtype's range
        return y


class Rounded(torch.autograd.Function):
    """Rounds the gradient too."""

    @staticmethod
    def forward(ctx, x, noise):
        ctx.noise = noise
        return noise(x)

    @staticmethod
    def backward(ctx, dx):
        return ctx.noise(dx), None


def round_trip(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (to_float8(x, dtype) if dtype in FLOAT8 else x.to(dtype)).to(x.dtype)


class Decayed(torch.autograd.Function):
    """decay * S; the gradient of the decay is a product of states, and rounded as such."""

    @staticmethod
    def forward(ctx, decay, S, noise):
        ctx.save_for_backward(decay, S)
        ctx.noise = noise
        return decay * S

    @staticmethod
    def backward(ctx, dS):
        decay, S = ctx.saved_tensors
        return (ctx.noise(S) * ctx.noise(dS)).sum((-2, -1), keepdim=True), decay * dS, None


@torch.enable_grad()
def expect(
    inputs: dict, noise: Noise, noise_of_sums: Noise, do=None, dht=None, run=0, rounds=None
) -> dict[str, torch.Tensor]:
    """Outputs and, with do, gradients of a call of chunk_gated_delta_rule_fwd, [RUNS, ...] each. `states` are those at
    the chunks' starts and the last one, [RUNS, N, chunks + 1, H_v, V, K]. Chunks begin anew after every `run` tokens,
    unless that is 0, and states are then rounded to the dtype `rounds`, if it is given. h is left out if a run has
    parts of chunks."""
    leaves = {name: inputs[name] for name in ALL_GRADIENTS_OF if inputs.get(name) is not None}
    leaves = {name: x.detach().double().expand(noise.runs, *x.shape).clone() for name, x in leaves.items()}
    leaves = {name: x.requires_grad_(do is not None) for name, x in leaves.items()}
    (B, T, H_v, V), K, device = inputs["v"].shape, inputs["k"].shape[-1], inputs["v"].device
    layout = reference.Layout.of(B, T, inputs["cu_seqlens"])
    N, longest = len(layout.lengths), max(1, *layout.lengths, 1)
    run = run or longest
    C = min(CHUNK, longest, run)
    of_run = -(-run // CHUNK)
    chunks = longest // run * of_run + -(-(longest % run) // CHUNK)
    begins = [c // of_run * run + c % of_run * CHUNK for c in range(chunks)]
    ends = [min(begin + CHUNK, (c // of_run + 1) * run) for c, begin in enumerate(begins)]
    starts, lengths, chunk_starts = (
        torch.tensor(x, dtype=torch.int64)[:, None] for x in (layout.starts, layout.lengths, layout.chunk_starts)
    )
    position = torch.tensor(begins)[:, None] + torch.arange(C)
    position = position.where(position < torch.tensor(ends)[:, None], longest).flatten()  # longest: of no sequence
    filled = position < lengths
    tokens, chunk_rows = (starts + position)[filled].to(device), filled.flatten().nonzero()[:, 0].to(device)
    covered = filled.unflatten(1, (chunks, 1, C)).to(device)  # [N, chunks, 1, C]

    def rounded(x):
        return Rounded.apply(x, noise)

    def product(x, y):
        return rounded(rounded(x) @ rounded(y))

    def split(x):  # [runs, B, T, H, ...] to [runs, N, chunks, H_v, C, ...]; zero beyond a sequence
        x = x.flatten(1, 2)
        zeros = x.new_zeros(len(x), N * chunks * C, *x.shape[2:])
        x = zeros.index_copy(1, chunk_rows, x.index_select(1, tokens)).unflatten(1, (N, chunks, C))
        return x.transpose(3, 4).repeat_interleave(H_v // x.shape[4], 3)

    def join(x):
        x = x.detach().transpose(3, 4).flatten(1, 3)
        out = x.new_zeros(len(x), B * T, *x.shape[2:])
        return out.index_copy_(1, tokens, x.index_select(1, chunk_rows)).unflatten(1, (B, T))

    q, k, v, g, beta = (split(leaves[name]) for name in ("q", "k", "v", "g", "beta"))
    flags = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    inside = {name: inputs[name] for name in flags if name in inputs}
    inside |= {name: leaves[name][:, None, None, :, None] for name in ("A_log", "dt_bias") if name in leaves}
    g, beta = (x.masked_fill(~covered, 0) for x in reference.activated(g, beta, **inside))
    g, beta = Rounded.apply(g, noise_of_sums), Rounded.apply(beta, noise_of_sums)
    if inputs["use_qk_l2norm_in_kernel"]:
        squares = (rounded(x).square().sum(-1, keepdim=True) for x in (q, k))
        q, k = (rounded(x) * torch.rsqrt(y + reference.L2NORM_EPS) for x, y in zip((q, k), squares, strict=True))

    # The two sides of a reset are independent. The gates' sums are rounded as sums.
    reset = g.exp() == 0
    resets, b = reset.cumsum(-1), g.masked_fill(reset, 0).cumsum(-1)
    # A decay is the product of the tokens' e^g on the CPU, and e^b on the GPU, where b counts resets as -1024.
    steps = torch.arange(1, C + 1, device=device)
    size = b.detach().abs() + (1024 * resets + 1 if device.type == "cuda" else steps)
    b = Rounded.apply(b + (noise_of_sums(size) - size), noise_of_sums)  # the gradients of b are summed up as well

    def decay(exponent):  # 0 in the rounded run if no digits are left
        x = exponent.exp()
        flushed = x.detach() < torch.finfo(noise_of_sums.dtype).tiny
        flushed[0], flushed[2:] = False, False
        return x.masked_fill(flushed, 0)

    below = torch.ones(C, C, dtype=torch.bool, device=device).tril(-1)
    apart = ~below | (resets[..., :, None] != resets[..., None, :])
    identity = torch.eye(C, dtype=FP64, device=device)
    D = identity + decay((b[..., :, None] - b[..., None, :]).masked_fill(apart, -torch.inf))
    gamma = decay(b.masked_fill(resets > 0, -torch.inf))[..., None]
    ended = ~F.pad(covered[..., 1:], (0, 1))  # 1, and not e^(b - b), whose derivatives cancel in rounding only
    to_end = decay((b[..., -1:] - b).masked_fill(ended | (resets != resets[..., -1:]), -torch.inf))
    to_end = (to_end + ended)[..., None]

    QK, KK = product(q, k.mT), product(k, k.mT)
    L = identity + rounded((beta[..., None] * KK).tril(-1))
    A = rounded(torch.linalg.solve_triangular(L, identity.expand_as(L), upper=False, unitriangular=True))
    P = QK.tril() * D
    S = leaves.get("initial_state", v.new_zeros(noise.runs, N, H_v, K, V))
    S = S.mT if inputs["state_v_first"] and "initial_state" in leaves else S
    states, o = [S], []
    by_chunk = (x.unbind(2) for x in (q, k, v, beta[..., None], gamma, A * D, P, to_end * k))
    for c, (q_c, k_c, v_c, beta_c, gamma_c, A_c, P_c, k_to_end) in enumerate(zip(*by_chunk, strict=True)):
        u = beta_c * (v_c - gamma_c * product(k_c, S))
        v_new = product(A_c, u)
        o.append(gamma_c * product(q_c, S) + product(P_c, v_new))
        S = Decayed.apply(gamma_c[..., -1:, :], S, noise) + product(k_to_end.mT, v_new)
        if rounds is not None:
            at_end = (ends[c] % run == 0) & (lengths >= ends[c])
            S = S.where(~at_end[..., None, None].to(device), round_trip(S, rounds))
        states.append(S)
    scale = K**-0.5 if inputs["scale"] is None else inputs["scale"]
    o, states = rounded(scale * torch.stack(o, 2)), torch.stack(states, 2)

    flip = (lambda x: x.mT) if inputs["state_v_first"] else (lambda x: x)
    outputs = {"o": join(o), "A": F.pad(join(A), (0, CHUNK - C)), "final_state": flip(S), "states": states.mT}
    if run % CHUNK == 0 or run == longest:
        h_chunks = layout.h_shape[0] * layout.h_shape[1]
        at = torch.where(filled[:, ::C], chunk_starts + torch.arange(chunks), h_chunks).to(device)
        h = states.new_zeros(noise.runs, h_chunks + 1, *states.shape[3:])
        h[:, at] = states[:, :, :-1].detach()
        outputs["h"] = flip(h[:, :-1].unflatten(1, layout.h_shape))
    outputs = {name: x.detach() for name, x in outputs.items()}
    if do is not None:
        loss = (o * split(do.double()[None])).sum() + (0 if dht is None else (flip(S) * dht.double()).sum())
        *gradients, dq, dk, dQK, dKK = torch.autograd.grad(
            loss, [*leaves.values(), q, k, QK, KK], materialize_grads=True
        )
        outputs |= {ALL_GRADIENTS_OF[name]: x for name, x in zip(leaves, gradients, strict=True)}
        pairs = torch.maximum(dQK.abs(), dKK.abs())
        pairs = join(torch.maximum(pairs.amax(-1), pairs.amax(-2))[..., None])[0, ..., 0]
        for name, x in (("dq", dq), ("dk", dk)):
            H_k = inputs[name[1]].shape[-2]
            normalized = join(x.unflatten(3, (H_k, -1)).sum(4))[0].norm(dim=-1)
            outputs[f"on the way to {name}"] = torch.maximum(normalized, pairs.unflatten(-1, (H_k, -1)).amax(-1))
    return outputs


HEAD_FACTOR, ROW_FACTOR = 6, 12  # of the runs' differences, to the norm of a head and to that of a token or state in it
STATES = ("final_state", "h", "dh0", "states of", "Z", "M", "reverse")
HEAD_AXIS = {**dict.fromkeys(("o", "A", "dq", "dk", "dv"), -2), **dict.fromkeys(("db", "dg", "dA_log", "ddt_bias"), -1)}


class Bars:
    """The bars of an output, from its runs: for each head, and for each row of a head (a token, a state)."""

    def __init__(self, name: str, runs: torch.Tensor, noise: Noise, on_the_way: torch.Tensor | None = None):
        """The bars of the output `name`, from its runs. on_the_way: the size of the numbers that a row is computed
        from, in the same dtype, in the shape of the output's rows."""
        self.name, self.shape, self.noise = name, runs.shape[1:], noise
        self.squares, self.batches = 0.0, 0  # the mean over the runs at random, added up
        if runs.numel() == 0:
            return
        self.expected = self.by_head(runs[0]).clone()  # not the other runs with it
        self.size = self.expected.norm(dim=-1)
        self.largest = self.size
        if on_the_way is not None:
            self.largest = self.size.maximum(self.by_head(on_the_way[..., None])[..., 0])
        self.add(runs)

    def add(self, runs: torch.Tensor) -> None:
        """More runs of the same output, of which those at random are others."""
        if runs.numel() == 0:
            return
        rounded, *at_random = ((self.by_head(x) - self.expected).norm(dim=-1) for x in runs[1:])
        self.squares, self.batches = self.squares + torch.stack(at_random).square().mean(0), self.batches + 1
        spread = torch.maximum(rounded, (self.squares / self.batches).sqrt() / self.noise.scale)
        self.rows = ROW_FACTOR * (spread + spread.square().mean(1, keepdim=True).sqrt())
        self.heads = HEAD_FACTOR * spread.norm(dim=1)

    def by_head(self, x: torch.Tensor) -> torch.Tensor:  # [heads, rows, elements]
        axis = HEAD_AXIS.get(self.name, -3)
        return x.movedim(axis, 0).reshape(x.shape[axis], -1, x.shape[axis + 1 :].numel() if axis < -1 else 1)

    def check(self, actual: torch.Tensor, compute: torch.dtype, segments: int = 0, carried: float = 0.0) -> float:
        """The largest error of a head or of a row over its bar; above 1 is wrong. States may be handed on through so
        many segments' maps, the largest of them with the norm `carried`; dg, the product of a state and a gradient,
        with the product of their norms."""
        shapes = tuple(actual.shape), tuple(self.shape)
        assert actual.shape == self.shape, f"{self.name} has shape {shapes[0]}, expected {shapes[1]}"
        if actual.numel() == 0:
            return 0.0
        kinds = torch.finfo(actual.dtype), torch.finfo(compute)
        eps, tiny = max(kind.eps for kind in kinds), max(kind.tiny for kind in kinds)
        stored = eps * self.size + tiny * self.expected.shape[-1] ** 0.5
        if actual.is_cuda:  # auto_cp may drop a part, and maps have two parts of 16 bits, see docs/accuracy.md
            is_carried = self.name.startswith((*STATES, "dg"))
            carried = max(carried, self.size.max().item()) if is_carried else self.size.max()
            stored = stored + (2**-22 + segments * (torch.finfo(self.noise.dtype).eps / 4) ** 2) * carried
        most, values = kinds[0].max, self.by_head(actual.double())  # larger numbers may be inf
        if self.name in ("dq", "dk"):  # and results of larger numbers may be nan, see docs/support.md
            values = torch.where(~values.isfinite() & (self.largest > most)[..., None], self.expected, values)
        error = (values.clamp(-most, most) - self.expected.clamp(-most, most)).norm(dim=-1)
        rows = error / (self.rows + stored)
        heads = error.norm(dim=1) / (self.heads + stored.norm(dim=1)).clamp_min(tiny)  # a norm may underflow
        return torch.maximum(rows.max(), heads.max()).nan_to_num(torch.inf, torch.inf).item()
