"""Inputs for the tests: a Case says everything about a call, make_inputs and make_gradients build it, check_forward and
check_backward run the public functions over poisoned memory and compare every output with the fp64 reference. The file
is long because all of it takes a Case."""

from __future__ import annotations

import dataclasses
import itertools
import random

import accuracy
import pytest
import reference
import torch
import torch.nn.functional as F
from poison import poisoned

import flash_qla
from flash_qla.testing import forced_dispatch

# The differentiable arguments, and what the backward calls their gradients, in the order in which it returns them
GRADIENT_OF = {"q": "dq", "k": "dk", "v": "dv", "beta": "db", "g": "dg", "initial_state": "dh0"}
# The parameters of the gate, whose gradients come after them
ACTIVATION_GRADIENT_OF = {"A_log": "dA_log", "dt_bias": "ddt_bias"}
ALL_GRADIENTS_OF = GRADIENT_OF | ACTIVATION_GRADIENT_OF
ALL_INSIDE = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
# o's gradients add up to about this size in the state's over some hundred tokens, so that both sources matter.
DHT_SCALE = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    B: int = 1
    T: int = 0
    lengths: tuple[int, ...] | None = None  # with cu_seqlens; B and T are then not used
    padding: int = 0  # rows beyond cu_seqlens[-1]; they hold NaN
    H_k: int = 2
    H_v: int = 4
    K: int = 128
    V: int = 128
    dtype: torch.dtype = torch.bfloat16
    gate: str = "softplus"
    keys: str = "unit"
    beta: str = "sigmoid"
    g_dtype: torch.dtype = torch.float32
    beta_dtype: torch.dtype = torch.float32
    initial_state: torch.dtype | None = torch.float32
    state_scale: float = 0.5
    cu_dtype: torch.dtype = torch.int32
    state_v_first: bool = False
    scale: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    # g and beta then are what gives about the gates and betas that `gate` and `beta` say
    use_gate_in_kernel: bool = False
    A_log: torch.dtype = torch.float32
    dt_bias: torch.dtype | None = torch.float32
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    auto_cp: bool = True
    max_seqlen: int | None = None
    strides: str = "contiguous"  # of the tensors [B, T, ...], one of STRIDES
    do_strides: str = "contiguous"  # of do: one of STRIDES, "expanded", or "unused"
    dht: torch.dtype | None = torch.float32
    seed: int = 0

    def __str__(self):
        """The fields that differ from the defaults."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        if self.lengths is not None and len(self.lengths) > 8:
            fields["lengths"] = f"{sum(self.lengths)} tokens in {len(self.lengths)} sequences"
        return ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in fields.items()) or "default"


def parametrize(*cases):
    """Runs a test with each case, which says of itself what it is."""
    return pytest.mark.parametrize("case", cases, ids=str)


TINY = tuple(random.Random(0).choices((0, 1, 2, 3, 5), k=150))

LONG_CASES = (  # for the GPU
    Case(T=8192, H_k=2, H_v=8),
    Case(T=8192, H_k=2, H_v=8, gate="logsigmoid"),
    Case(T=8192, H_k=2, H_v=8, gate="logsigmoid", auto_cp=False),
    Case(lengths=(4095, 3000, 64, 0, 1000), H_k=8, H_v=32, gate="zero", padding=100),
    Case(B=4, T=2048, H_k=16, H_v=32, gate="logsigmoid", dtype=torch.float16),
    Case(lengths=(1024,) * 8, H_k=16, H_v=64, gate="logsigmoid"),
)


def gates(kind: str, shape, generator) -> torch.Tensor:
    """Log decay [B, T, H_v] in fp64."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    H_v = shape[-1]
    if kind == "softplus":  # as the models make it; a spans [0, 16], ends included
        return -torch.linspace(16, 0, H_v, dtype=torch.float64) * F.softplus(x)
    if kind == "logsigmoid":
        return F.logsigmoid(x) / 16
    if kind == "near_threshold":  # over 1024 tokens a factor of e^-4 to e^-24: neither negligible nor certain to matter
        return (-torch.linspace(4, 24, H_v, dtype=torch.float64) / 1024).expand(shape).clone()
    if kind == "resets":  # slow decay, and one token in ten that forgets everything
        resets = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.1
        return torch.where(resets, -50.0, F.logsigmoid(x) / 16)
    if kind == "hard_resets":  # the same, to the last bit
        resets = torch.rand(shape, generator=generator, dtype=torch.float64) < 0.1
        return torch.where(resets, -torch.inf, F.logsigmoid(x) / 16)
    if kind == "extreme":  # every size between, among slow ones
        strong = torch.tensor((-1e30, -5000.0, -700.0, -110.0, -90.0, -torch.inf), dtype=torch.float64)
        chosen = strong[torch.randint(len(strong), shape, generator=generator)]
        return torch.where(torch.rand(shape, generator=generator, dtype=torch.float64) < 0.2, chosen, F.logsigmoid(x))
    constant = {"tiny": -1e-6, "underflow": -50.0, "zero": 0.0}[kind]
    return torch.full(shape, constant, dtype=torch.float64)


def keys(kind: str, shape, generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "raw":  # normalised inside the op
        return x
    unit = F.normalize(x, dim=-1)
    if kind == "unit":
        return unit
    if kind == "long":  # lengths in [0.5, 2]
        return unit * (0.5 + 1.5 * torch.rand(shape[:-1], generator=generator, dtype=torch.float64))[..., None]
    if kind == "alike":  # any two of a head have a cosine of about 1/2
        return F.normalize(x + torch.randn(1, 1, *shape[2:], generator=generator, dtype=torch.float64), dim=-1)
    if kind == "repeated":  # a text of seven different tokens
        B, T, _H, _ = shape
        vocabulary = F.normalize(torch.randn(7, *shape[2:], generator=generator, dtype=torch.float64), dim=-1)
        return vocabulary[torch.randint(7, (B, T), generator=generator)]
    if kind == "zero":
        return torch.zeros(shape, dtype=torch.float64)
    raise ValueError(kind)


def betas(kind: str, k: torch.Tensor, H_v: int, generator) -> torch.Tensor:
    B, T, H_k, _ = k.shape
    x = torch.randn(B, T, H_v, generator=generator, dtype=torch.float64).sigmoid()
    if kind == "sigmoid":
        return x
    if kind == "two":  # negative eigenvalues: beta in (0, 2)
        return 2 * x
    if kind == "stable":  # beta |k|^2 < 1.9, whatever the length of k: I - beta k k^T is then no expansion
        return 1.9 * x / k.square().sum(-1).repeat_interleave(H_v // H_k, 2).clamp_min(0.5)
    return torch.full_like(x, float(kind))


def raw_gates(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    """The raw gate, from which the activation computes g, [B, T, H_v] in fp64; -inf where g is 0."""
    y = -g / A_log.double().exp()
    x = y + torch.log(-torch.expm1(-y))  # the inverse of softplus
    return x if dt_bias is None else x - dt_bias.double()


def activations(case: Case, generator) -> dict:
    """The arguments of the activations that are inside, beside g and beta; none without."""
    arguments = {}
    if case.use_gate_in_kernel:
        rates = torch.linspace(16, 0.25, case.H_v, dtype=torch.float64)
        arguments = {"use_gate_in_kernel": True, "A_log": rates.log().to(case.A_log), "dt_bias": None}
        if case.dt_bias is not None:
            bias = torch.randn(case.H_v, generator=generator, dtype=torch.float64)
            arguments["dt_bias"] = bias.to(case.dt_bias)
    if case.use_beta_sigmoid_in_kernel:
        arguments["use_beta_sigmoid_in_kernel"] = True
        if case.allow_neg_eigval:
            arguments["allow_neg_eigval"] = True
    return arguments


# A GPU reads the first four in place if rows have multiples of 16 bytes. Of the others it may read parts of a batch.
STRIDES = ("contiguous", "slices", "gaps", "heads_first", "part_of_batch", "odd_start", "reversed_dims", "every_third")


def restride(x: torch.Tensor, kind: str, number: int = 0) -> torch.Tensor:
    """The same values of a tensor [B, T, ...] in other strides, with NaN between them. "gaps" depend on the number."""
    if kind == "contiguous":
        return x
    if kind == "slices":  # of a tensor that has more channels
        return as_slices([x])[0]
    if kind == "gaps":
        return with_gaps(x, number)
    if kind == "odd_start":  # not at 16 bytes
        return with_gaps(x, number, 3)
    if kind == "heads_first":  # stored [B, H, T, ...], as attention layers keep it
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "part_of_batch":  # the first tokens
        return torch.cat([x, x.new_full((x.shape[0], 3, *x.shape[2:]), torch.nan)], 1)[:, : x.shape[1]]
    if kind == "reversed_dims":  # innermost stride is the largest
        order = range(x.dim() - 1, -1, -1)
        return x.permute(*order).contiguous().permute(*order)
    if kind == "every_third":
        memory = x.new_full((*x.shape, 3), torch.nan)
        memory[..., 0] = x
        return memory.flatten(-2)[..., ::3]
    raise ValueError(kind)


def as_slices(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors [B, T, ...] as slices of one, which has more channels, as of a convolution's output."""
    parts = [x.flatten(2) for x in (*tensors, tensors[0].new_full((*tensors[0].shape[:2], 16), torch.nan))]
    slices = torch.cat(parts, -1).split([part.shape[2] for part in parts], -1)
    return [part.unflatten(2, x.shape[2:]) for part, x in zip(slices, tensors, strict=False)]


def with_gaps(x: torch.Tensor, number: int, start: int = 8) -> torch.Tensor:
    """A copy of a tensor [B, T, ...] with NaN before and after each token's rows, from the element `start` on."""
    more_heads = [size + number for size in x.shape[2:-1]]
    memory = x.new_full((*x.shape[:2], *more_heads, x.shape[-1] + 16 + 8 * number), torch.nan)
    of_heads = memory if x.dim() == 3 else memory[:, :, : x.shape[2]]
    return of_heads[..., start : start + x.shape[-1]].copy_(x)


def restride_tokens(tensors: dict, kind: str) -> dict:
    """The same of q, k, v and others. Slices of q, k and v are of one tensor."""
    restrided = {name: restride(x, kind, number) for number, (name, x) in enumerate(tensors.items())}
    if kind == "slices":
        restrided |= zip("qkv", as_slices([tensors[name] for name in "qkv"]), strict=True)
    return restrided


def shapes(case: Case) -> tuple[int, int, int]:
    """B, T and the number of sequences."""
    if case.lengths is None:
        return case.B, case.T, case.B
    return 1, sum(case.lengths) + case.padding, len(case.lengths)


def state_shape(case: Case) -> tuple[int, ...]:
    N = shapes(case)[2]
    return (N, case.H_v, case.V, case.K) if case.state_v_first else (N, case.H_v, case.K, case.V)


def make_inputs(case: Case, device: str) -> dict:
    """Keyword arguments that chunk_gated_delta_rule and chunk_gated_delta_rule_fwd have in common. Made on the CPU, so
    that both devices see the same numbers."""
    generator = torch.Generator().manual_seed(case.seed)
    B, T, _ = shapes(case)
    cu_seqlens = None
    if case.lengths is not None:
        offsets = list(itertools.accumulate(case.lengths, initial=0))
        cu_seqlens = torch.tensor(offsets, dtype=case.cu_dtype, device=device)
    q = torch.randn(B, T, case.H_k, case.K, generator=generator, dtype=torch.float64)
    if case.keys != "raw":
        q = F.normalize(q, dim=-1)
    k = keys(case.keys, (B, T, case.H_k, case.K), generator)
    v = torch.randn(B, T, case.H_v, case.V, generator=generator, dtype=torch.float64)
    beta = betas(case.beta, k, case.H_v, generator)
    g = gates(case.gate, (B, T, case.H_v), generator)
    initial_state = None
    if case.initial_state is not None:
        initial_state = case.state_scale * torch.randn(state_shape(case), generator=generator, dtype=torch.float64)
        initial_state = initial_state.to(device, case.initial_state)
    inside = activations(case, generator)
    if case.use_gate_in_kernel:
        g = raw_gates(g, inside["A_log"], inside["dt_bias"])
    if case.use_beta_sigmoid_in_kernel:
        beta = (beta / (2 if case.allow_neg_eigval else 1)).logit()
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    dtypes = {"q": case.dtype, "k": case.dtype, "v": case.dtype, "g": case.g_dtype, "beta": case.beta_dtype}
    for name, x in tensors.items():
        if case.padding:
            x[:, T - case.padding :] = float("nan")
        tensors[name] = x.to(device, dtypes[name])
    return dict(
        **restride_tokens(tensors, case.strides),
        scale=case.scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        state_v_first=case.state_v_first,
        auto_cp=case.auto_cp,
        use_qk_l2norm_in_kernel=case.use_qk_l2norm_in_kernel,
        **{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inside.items()},
        **({} if case.max_seqlen is None else {"max_seqlen": case.max_seqlen}),
    )


def activated(inputs: dict) -> dict:
    """The inputs of the same call with gates and betas that are ready, in fp64."""
    names = (*ACTIVATION_GRADIENT_OF, "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    inside = {name: inputs[name] for name in names if name in inputs}
    g, beta = reference.activated(inputs["g"], inputs["beta"], **inside)
    return {name: x for name, x in inputs.items() if name not in inside} | {"g": g, "beta": beta}


def cumulative_gates(inputs: dict) -> torch.Tensor:
    """The expected g_cumsum of the low-level forward, in fp64. If e^g is 0 in the arithmetic of the CPU, the CPU takes
    g as -inf; the GPU stops at e^-1024."""
    g = activated(inputs)["g"]
    if g.is_cuda:
        g = g.clamp_min(-1024)
    else:
        g = g.masked_fill(g.to(torch.promote_types(inputs["q"].dtype, torch.float32)).exp() == 0, -torch.inf)
    return reference.chunk_cumsum(g, inputs["cu_seqlens"])


def make_gradients(case: Case, device: str) -> dict:
    """The gradients of o, in its dtype, and of the final state, which is None where the case has none. Made on the CPU
    too, by a generator of their own, so that the inputs are the forward's."""
    generator = torch.Generator().manual_seed(case.seed + 1_000_003)
    B, T, _ = shapes(case)
    shape = (B, T, case.H_v, case.V)
    if case.do_strides == "unused":
        do = torch.zeros((), dtype=case.dtype, device=device).expand(shape)
    elif case.do_strides == "expanded":  # the same for all tokens and heads, as from a mean over them
        do = torch.randn(case.V, generator=generator, dtype=torch.float64).to(device, case.dtype).expand(shape)
    else:
        do = torch.randn(shape, generator=generator, dtype=torch.float64)
        if case.padding:
            do[:, T - case.padding :] = float("nan")
        do = restride(do.to(device, case.dtype), case.do_strides, number=5)
    dht = None
    if case.dht is not None:
        dht = DHT_SCALE * torch.randn(state_shape(case), generator=generator, dtype=torch.float64)
        dht = dht.to(device, case.dht)
    return {"do": do, "dht": dht}


def of_formula(inputs: dict) -> dict:
    """The arguments that the result depends on."""
    return {name: x for name, x in inputs.items() if name not in ("auto_cp", "max_seqlen")}


def reference_of(inputs: dict, dtype: torch.dtype = torch.float64) -> reference.Reference:
    return reference.gated_delta_rule(**of_formula(inputs), dtype=dtype)


def reference_gradients(
    inputs: dict, do: torch.Tensor, dht: torch.Tensor | None = None, dtype: torch.dtype = torch.float64
) -> reference.Gradients:
    return reference.gated_delta_rule_bwd(**of_formula(inputs), do=do, dht=dht, dtype=dtype)


def run_forward(inputs: dict, output_h: bool = True, output_final_state: bool = True):
    """The low-level function: (g_cumsum, A, o, h, final_state)."""
    outputs = {"output_h": output_h, "output_final_state": output_final_state}
    return flash_qla.chunk_gated_delta_rule_intermediates(**inputs, **outputs)


def run_backward(inputs: dict, do: torch.Tensor, dht: torch.Tensor | None = None, intermediates=None) -> dict:
    """The low-level function: the gradients by name, dh0 only where there is an initial state. intermediates are the
    forward's g_cumsum and A; without them it is called as by autograd."""
    with_gate = inputs.get("use_gate_in_kernel", False)
    g_cumsum, A = intermediates or (None, None)
    g_raw = inputs["g"] if with_gate or intermediates is None else None
    arguments = {**inputs, "g": g_cumsum, "A": A, "do": do, "dht": dht, "g_raw": g_raw}
    outputs = flash_qla.chunk_gated_delta_rule_bwd(**arguments)
    names = ALL_GRADIENTS_OF if with_gate else GRADIENT_OF
    gradients = dict(zip(names.values(), outputs, strict=True))
    for argument, name in names.items():
        if inputs[argument] is None:
            assert gradients.pop(name) is None
    return gradients


def packed(inputs: dict, wider: int = 0) -> dict:
    """The arguments of chunk_gated_delta_rule_packed: q, k and v as the first channels of a tensor that has `wider`
    more of them."""
    mixed = torch.cat([inputs[name].flatten(2) for name in ("q", "k", "v")], -1)
    whole = F.pad(mixed, (0, wider), value=torch.nan)
    H_k, K = inputs["q"].shape[2:]
    others = {name: x for name, x in inputs.items() if name not in ("q", "k", "v")}
    return {"mixed_qkv": whole[..., : mixed.shape[-1]], "num_k_heads": H_k, "head_k_dim": K} | others


def split_gradient(gradient: torch.Tensor, inputs: dict) -> dict:
    """dq, dk and dv, the parts of mixed_qkv's gradient."""
    shapes = [inputs[name].shape[2:] for name in ("q", "k", "v")]
    parts = gradient.split([shape.numel() for shape in shapes], -1)
    return {name: x.unflatten(-1, y) for name, x, y in zip(("dq", "dk", "dv"), parts, shapes, strict=True)}


def run_packed(inputs: dict, do: torch.Tensor, dht: torch.Tensor | None = None) -> dict:
    """What the two ops of chunk_gated_delta_rule_packed return, by name."""
    arguments = packed(inputs)
    o, final_state = torch.ops.flash_qla.chunk_gated_delta_rule_packed(**arguments, output_final_state=True)
    results = torch.ops.flash_qla.chunk_gated_delta_rule_packed_bwd(**arguments, do=do, dht=dht)
    of_others = {"db": "beta", "dg": "g", "dh0": "initial_state", "dA_log": "A_log", "ddt_bias": "dt_bias"}
    gradients = dict(zip(("dmixed_qkv", *of_others), results, strict=True))
    gradients = split_gradient(gradients.pop("dmixed_qkv"), inputs) | gradients
    missing = [name for name, of in of_others.items() if inputs.get(of) is None]
    return {"o": o, "final_state": final_state} | {x: y for x, y in gradients.items() if x not in missing}


def run_autograd(
    inputs: dict, do: torch.Tensor | None, dht: torch.Tensor | None = None, of=tuple(ALL_GRADIENTS_OF), **options
) -> dict:
    """The gradients of the inputs named in `of` through chunk_gated_delta_rule. An output whose gradient is None is not
    used."""
    of = [name for name in of if inputs.get(name) is not None]
    leaves = {name: inputs[name].detach().requires_grad_() for name in of}
    outputs = flash_qla.chunk_gated_delta_rule(**{**inputs, **leaves}, output_final_state=dht is not None, **options)
    used = [(x, dx) for x, dx in zip(outputs, (do, dht), strict=True) if dx is not None]
    gradients = torch.autograd.grad([x for x, _ in used], list(leaves.values()), [dx for _, dx in used])
    return dict(zip((ALL_GRADIENTS_OF[name] for name in of), gradients, strict=True))


def make_arguments(case: Case, device: str) -> dict:
    return {**make_inputs(case, device), **make_gradients(case, device)}


def run_forwards(inputs: dict) -> dict:
    """Every output of both functions of the forward, by name."""
    o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    outputs = {"o": o, "final_state": final_state}
    low_level = ("g_cumsum", "A", "low-level o", "h", "low-level final_state")
    outputs |= zip(low_level, run_forward(inputs), strict=True)
    without_h = zip(low_level, run_forward(inputs, output_h=False), strict=True)  # which may be another kernel's
    return outputs | {f"{name} without h": x for name, x in without_h if x is not None}


def run_all(arguments: dict, store=dict) -> dict:
    """Every output of every function, by name. The backward gets what `store` makes of g_cumsum and A, by name."""
    gradients = {name: arguments[name] for name in ("do", "dht")}
    inputs = {name: x for name, x in arguments.items() if name not in gradients}
    outputs = run_forwards(inputs)
    intermediates = store({name: outputs[name] for name in ("g_cumsum", "A")})
    return {
        **outputs,
        **run_backward(inputs, **gradients, intermediates=tuple(intermediates.values())),
        **{f"autograd's {name}": x for name, x in run_autograd(inputs, **gradients).items()},
    }


def forward_mode(
    value_tile: int = 0,
    segment_chunks: int = -1,
    fused: int | None = None,
    cut_above: int = 0,
    long_tile: int = 0,
):
    """forced_dispatch of the forward; the defaults leave a field to the cost model. A tile or segments force the two
    kernels, unless fused is given."""
    if fused is None:
        fused = -1 if (value_tile, segment_chunks) == (0, -1) else 0
    fields = {"value_tile": value_tile, "segment_chunks": segment_chunks, "fused": fused}
    return forced_dispatch(forward=fields | {"cut_above": cut_above, "long_tile": long_tile})


def backward_mode(segment_chunks: int = -1, cut_above: int = 0):
    """forced_dispatch of the backward."""
    return forced_dispatch(backward={"segment_chunks": segment_chunks, "cut_above": cut_above})


def equal(actual: dict, expected: dict) -> bool:
    """The same names, the same bits."""
    return actual.keys() == expected.keys() and all(torch.equal(x, expected[name]) for name, x in actual.items())


def compute_dtype(case: Case) -> torch.dtype:
    return torch.float64 if case.dtype == torch.float64 else torch.float32


def gradient_dtype(case: Case, name: str) -> torch.dtype:
    """The dtype of the low-level function's result of this name."""
    if name == "dg" and case.use_gate_in_kernel:
        return case.g_dtype
    if name == "db" and case.use_beta_sigmoid_in_kernel:
        return case.beta_dtype
    return case.dtype if name in ("dq", "dk", "dv") else compute_dtype(case)


def covered_tokens(case: Case) -> int:
    return case.T if case.lengths is None else sum(case.lengths)


def expected_outputs(inputs: dict, dtype: torch.dtype = torch.float64) -> dict:
    """The reference's value of every output of the low-level function, by name."""
    expected, ready = reference_of(inputs, dtype), activated(inputs)
    cu_seqlens, l2norm = inputs["cu_seqlens"], inputs["use_qk_l2norm_in_kernel"]
    return {
        "g_cumsum": cumulative_gates(inputs),
        "A": reference.chunk_inverse(inputs["k"], ready["beta"], cu_seqlens, l2norm),
        "o": expected.o,
        "h": expected.h,
        "final_state": expected.final_state,
    }


def expected_of_both(inputs: dict, gradients: dict, dtype: torch.dtype = torch.float64) -> tuple[dict, dict]:
    """The same of both passes, and the sizes of gradients that may cancel."""
    derivatives = reference_gradients(inputs, **gradients, dtype=dtype)
    of_backward = {name: getattr(derivatives, name) for name in ALL_GRADIENTS_OF.values()}
    return expected_outputs(inputs, dtype) | of_backward, derivatives.sizes


def check_forward(case: Case, device: str) -> None:
    """Both public functions against the reference, every output."""
    inputs = make_inputs(case, device)
    check_outputs(case, inputs, expected_outputs(inputs))


def check_outputs(case: Case, inputs: dict, expected: dict, name: str = "") -> None:
    """The same where the reference has run already, for the inputs of a case, or inputs like them."""
    device = inputs["q"].device.type
    name = name or str(case)
    covered = covered_tokens(case)

    with poisoned(device):
        o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert o.dtype == case.dtype and final_state.dtype == compute_dtype(case)
    assert o.is_contiguous() and final_state.is_contiguous()
    accuracy.check("o", o, expected["o"], dtype=case.dtype, case=name)
    accuracy.check("final_state", final_state, expected["final_state"], dtype=case.dtype, case=name)
    assert not o[:, covered:].any()

    for output_h in (True, False):  # perhaps in other kernels
        with poisoned(device):
            g_cumsum, A, o, h, final_state = run_forward(inputs, output_h)
        assert o.dtype == A.dtype == case.dtype and final_state.dtype == g_cumsum.dtype == compute_dtype(case)
        actual = {"g_cumsum": g_cumsum, "A": A, "o": o, "final_state": final_state}
        if output_h:
            actual["h"] = h
        else:
            assert h is None
        for output, x in actual.items():
            accuracy.check(output, x, expected[output], dtype=case.dtype, case=name)
        check_zeros_of_A(A, inputs["cu_seqlens"])
        for x in (o, g_cumsum, A):
            assert not x[:, covered:].any()


def check_zeros_of_A(A: torch.Tensor, cu_seqlens: torch.Tensor | None) -> None:
    """A is zero, not merely small, above the diagonal, beyond a chunk's end and outside the sequences."""
    position = reference.position_in_chunk(*A.shape[:2], cu_seqlens).to(A.device)
    outside = torch.arange(reference.CHUNK, device=A.device) > position[..., None]
    assert not A.transpose(1, 2)[outside[:, None].expand(-1, A.shape[2], -1, -1)].any()


def check_backward(case: Case, device: str) -> None:
    """The low-level function's gradients against the reference, and autograd's against those, bit by bit."""
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    check_gradients(case, inputs, gradients, reference_gradients(inputs, **gradients))


def check_gradients(
    case: Case, inputs: dict, gradients: dict, expected: reference.Gradients, name_of_call: str = ""
) -> None:
    """The same where the reference has run already, for the inputs of a case, or inputs like them."""
    device = inputs["q"].device.type
    name_of_call = name_of_call or str(case)
    covered = covered_tokens(case)

    with poisoned(device):
        actual = run_backward(inputs, **gradients)
    for name, x in actual.items():
        dtype = gradient_dtype(case, name)
        assert x.dtype == dtype and x.is_contiguous(), f"{name} is {x.dtype} with strides {x.stride()} [{name_of_call}]"
        assert x.dim() < 3 or name == "dh0" or not x[:, covered:].any(), f"{name}: not zero in padding [{name_of_call}]"
    b = cumulative_gates(inputs)
    accuracy.check_gradients(actual, expected, dtype=case.dtype, case=name_of_call, g_cumsum=b)

    with poisoned(device):
        through_autograd = run_autograd(inputs, **gradients)
    assert through_autograd.keys() == actual.keys()
    for argument, name in ALL_GRADIENTS_OF.items():
        if name in actual:  # autograd's has the dtype of the input
            same = torch.equal(through_autograd[name], actual[name].to(inputs[argument].dtype))
            assert same, f"{name}: autograd's is another [{name_of_call}]"


def on_meta(arguments: dict) -> dict:
    """The same without contents, for the fake implementations."""
    return {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
