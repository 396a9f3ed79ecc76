"""Inputs for the forward tests: a Case says everything about a call, make_inputs builds it, check_forward runs both
public functions over poisoned memory and compares every output with the fp64 reference."""

from __future__ import annotations

import dataclasses
import itertools

import accuracy
import reference
import torch
import torch.nn.functional as F
from poison import poisoned

import flash_qla


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
    auto_cp: bool = True
    strides: str = "contiguous"
    seed: int = 0

    def __str__(self):
        """The fields that differ from the defaults."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        if self.lengths is not None and len(self.lengths) > 8:
            fields["lengths"] = f"{sum(self.lengths)} tokens in {len(self.lengths)} sequences"
        return ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in fields.items()) or "default"


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


def restride(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values in other strides."""
    if kind == "contiguous":
        return x
    if kind == "heads_first":  # stored [B, H, T, ...], as attention layers keep it
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "packed":  # a slice of a wider projection
        return torch.cat([torch.full_like(x, float("nan")), x, torch.full_like(x, float("nan"))], -1)[
            ..., x.shape[-1] : 2 * x.shape[-1]
        ]
    if kind == "reversed_dims":  # innermost stride is the largest
        order = range(x.dim() - 1, -1, -1)
        return x.permute(*order).contiguous().permute(*order)
    raise ValueError(kind)


def make_inputs(case: Case, device: str) -> dict:
    """Keyword arguments that chunk_gated_delta_rule and chunk_gated_delta_rule_fwd have in common. Made on the CPU, so
    that both devices see the same numbers."""
    generator = torch.Generator().manual_seed(case.seed)
    if case.lengths is None:
        B, T, N = case.B, case.T, case.B
        cu_seqlens = None
    else:
        B, T, N = 1, sum(case.lengths) + case.padding, len(case.lengths)
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
        shape = (N, case.H_v, case.V, case.K) if case.state_v_first else (N, case.H_v, case.K, case.V)
        initial_state = case.state_scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        initial_state = initial_state.to(device, case.initial_state)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    dtypes = {"q": case.dtype, "k": case.dtype, "v": case.dtype, "g": case.g_dtype, "beta": case.beta_dtype}
    for name, x in tensors.items():
        if case.padding:
            x[:, T - case.padding :] = float("nan")
        tensors[name] = restride(x.to(device, dtypes[name]), case.strides)
    return dict(
        **tensors,
        scale=case.scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        state_v_first=case.state_v_first,
        auto_cp=case.auto_cp,
        use_qk_l2norm_in_kernel=case.use_qk_l2norm_in_kernel,
    )


def reference_of(inputs: dict) -> reference.Reference:
    return reference.gated_delta_rule(**{name: x for name, x in inputs.items() if name != "auto_cp"})


def run_forward(inputs: dict, output_h: bool = True, output_final_state: bool = True):
    """The low-level function, which does not normalise q and k: (g_cumsum, A, o, h, final_state)."""
    inputs = {name: x for name, x in inputs.items() if name != "use_qk_l2norm_in_kernel"}
    return flash_qla.chunk_gated_delta_rule_fwd(**inputs, output_h=output_h, output_final_state=output_final_state)


def check_forward(case: Case, device: str) -> None:
    """Both public functions against the reference, every output."""
    inputs = make_inputs(case, device)
    expected = reference_of(inputs)
    covered = sum(case.lengths) if case.lengths is not None else case.T
    compute_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32

    with poisoned(device):
        o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert o.dtype == case.dtype and final_state.dtype == compute_dtype
    assert o.is_contiguous() and final_state.is_contiguous()
    accuracy.check("o", o, expected.o, case.dtype, str(case))
    accuracy.check("final_state", final_state, expected.final_state, case.dtype, str(case))
    assert not o[:, covered:].any()

    if case.use_qk_l2norm_in_kernel:
        return
    with poisoned(device):
        g_cumsum, A, o, h, final_state = run_forward(inputs)
    assert o.dtype == A.dtype == case.dtype and final_state.dtype == g_cumsum.dtype == compute_dtype
    accuracy.check("o", o, expected.o, case.dtype, str(case))
    accuracy.check("final_state", final_state, expected.final_state, case.dtype, str(case))
    accuracy.check("h", h, expected.h, case.dtype, str(case))
    expected_cumsum = reference.chunk_cumsum(inputs["g"], inputs["cu_seqlens"])
    accuracy.check("g_cumsum", g_cumsum, expected_cumsum, case.dtype, str(case))
    expected_A = reference.chunk_inverse(inputs["k"], inputs["beta"], inputs["cu_seqlens"])
    accuracy.check("A", A, expected_A, case.dtype, str(case))
    # Above the diagonal, beyond a chunk's end and outside the sequences A is zero, not merely small.
    position = reference.position_in_chunk(*A.shape[:2], inputs["cu_seqlens"]).to(device)
    outside = torch.arange(reference.CHUNK, device=device) > position[..., None]
    assert not A.transpose(1, 2)[outside[:, None].expand(-1, case.H_v, -1, -1)].any()
    for x in (o, g_cumsum, A):
        assert not x[:, covered:].any()
