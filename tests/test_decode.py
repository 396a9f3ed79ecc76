"""Decoding from a pool of states, against the recurrence written out in fp64. The file is long because all tests share
a Case and its recurrence."""

import dataclasses
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from accuracy import FLOAT8, is_rounded, relative_error
from cases import on_meta, parametrize

import flash_qla
from flash_qla import decode_gated_delta_rule, decode_gated_delta_rule_packed

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = FLOAT8
# Bars of o and of states, in relative L2: rounding of results and of the pool's states
BARS = {BF16: 4e-3, FP16: 5e-4, FP32: 2e-6, FP64: 1e-13}
SLACK = 3e-5  # of a state before it is rounded to 8 bits: the largest error of a number in fp32


@dataclasses.dataclass(frozen=True)
class Case:
    B: int = 3
    T: int = 1
    lengths: tuple[int, ...] | None = None  # with cu_seqlens; B and T are then not used
    padding: int = 0
    H_k: int = 2
    H_v: int = 4
    K: int = 16
    V: int = 24
    dtype: torch.dtype = FP32
    state_dtype: torch.dtype = FP32
    gate_dtype: torch.dtype = FP32
    index_dtype: torch.dtype = torch.int32
    slots: int = 40
    gap: int = 0  # elements between the pool's slots
    bias: bool = True
    l2norm: bool = True
    scale: float | None = None
    ready: str = ""  # which of the gates are ready: "", "g", "beta", "g beta"
    neg_eigval: bool = False
    v_first: bool = True
    plain: bool = False  # a state for each sequence instead of a pool

    def __str__(self):
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        return ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in fields.items()) or "default"


def for_device(case: Case, device: str) -> Case:
    """The nearest case for a GPU, which takes 16-bit tokens and multiples of 8. States of 8 bits have multiples of 16,
    and V first."""
    if device == "cpu":
        return case
    if case.state_dtype in FLOAT8:
        case = dataclasses.replace(
            case, v_first=True, **{name: -(-getattr(case, name) // 16) * 16 for name in ("K", "gap")}
        )
    return dataclasses.replace(
        case,
        dtype=case.dtype if case.dtype == FP16 else BF16,
        state_dtype=FP32 if case.state_dtype == FP64 else case.state_dtype,
        **{name: -(-getattr(case, name) // 8) * 8 for name in ("K", "V", "gap")},
    )


def make_pool(case: Case, *outer: int, device: str = "cpu") -> torch.Tensor:
    """States [*outer, H_v, V, K] or [*outer, H_v, K, V], the slots of the first dimension `gap` elements apart; NaN in
    the gaps."""
    state = (case.H_v, case.V, case.K) if case.v_first else (case.H_v, case.K, case.V)
    size = torch.Size([*outer[1:], *state]).numel()
    rows = torch.full((outer[0], size + case.gap), float("nan"), dtype=case.state_dtype)
    rows[:, :size] = torch.randn(outer[0], size, generator=torch.Generator().manual_seed(1)).to(case.state_dtype)
    return rows.to(device)[:, :size].unflatten(1, (*outer[1:], *state))


def make_inputs(case: Case, device: str = "cpu") -> dict:
    generator = torch.Generator().manual_seed(0)
    B, T = (case.B, case.T) if case.lengths is None else (1, sum(case.lengths) + case.padding)
    N = case.B if case.lengths is None else len(case.lengths)

    def randn(*shape, dtype):
        return torch.randn(*shape, generator=generator, dtype=FP64).to(dtype)

    offsets = None
    if case.lengths is not None:
        offsets = torch.tensor([0, *case.lengths]).cumsum(0).to(case.index_dtype)
    inputs = {
        "q": randn(B, T, case.H_k, case.K, dtype=case.dtype),
        "k": randn(B, T, case.H_k, case.K, dtype=case.dtype),
        "v": randn(B, T, case.H_v, case.V, dtype=case.dtype),
        "a": randn(B, T, case.H_v, dtype=case.gate_dtype),
        "b": randn(B, T, case.H_v, dtype=case.gate_dtype),
        "A_log": randn(case.H_v, dtype=case.gate_dtype),
        "dt_bias": randn(case.H_v, dtype=case.gate_dtype) if case.bias else None,
        "state_indices": torch.randperm(case.slots, generator=generator)[:N].to(case.index_dtype),
        "scale": case.scale,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "cu_seqlens": offsets,
    }
    if "g" in case.ready.split():
        inputs |= {"a": F.logsigmoid(inputs["a"]), "A_log": None, "dt_bias": None}
    if "beta" in case.ready.split():
        inputs["b"] = inputs["b"].sigmoid() * (1.9 if case.neg_eigval else 1)
    if case.ready in ("g", "beta"):  # or both of neither is ready, which is the default
        inputs["use_beta_sigmoid_in_kernel"] = case.ready == "g"
    if case.neg_eigval and "beta" not in case.ready:
        inputs["allow_neg_eigval"] = True
    if not case.v_first:
        inputs["state_v_first"] = False
    if case.plain:
        inputs["state_indices"] = None
    if case.padding:
        for name in ("q", "k", "v", "a", "b"):
            inputs[name][:, T - case.padding :] = float("nan")
    if not case.l2norm:
        inputs["k"] = F.normalize(inputs["k"].double(), dim=-1).to(case.dtype)
    slots = N if case.plain else case.slots
    return moved(inputs, device) | {"state_pool": make_pool(case, slots, device=device)}


def moved(inputs: dict, device: str) -> dict:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def as_v_first(inputs: dict, states: torch.Tensor) -> torch.Tensor:
    """States of a call as [.., V, K]."""
    return states if inputs.get("state_v_first", True) else states.transpose(-2, -1)


def slots_of(inputs: dict) -> list[int]:
    """The slot of each sequence's state."""
    if inputs["state_indices"] is None:
        return list(range(inputs["state_pool"].shape[0]))
    return inputs["state_indices"].tolist()


def extents(inputs: dict) -> list[tuple[int, int, int]]:
    """(row of the batch, first token, end) of each sequence."""
    if inputs["cu_seqlens"] is None:
        B, T = inputs["q"].shape[:2]
        return [(n, 0, T) for n in range(B)]
    offsets = inputs["cu_seqlens"].tolist()
    return [(0, begin, end) for begin, end in itertools.pairwise(offsets)]


def states_after_tokens(inputs: dict) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """o and the states of each sequence [H_v, V, K], in fp64, if none is null; the first state is the one at the
    start. On the CPU."""
    inputs = moved(inputs, "cpu")
    q, k, v, a, b = (inputs[name].double() for name in ("q", "k", "v", "a", "b"))
    if inputs["A_log"] is None:
        gates = a.exp()
    else:
        dt_bias = 0 if inputs["dt_bias"] is None else inputs["dt_bias"].double()
        gates = (-inputs["A_log"].double().exp() * F.softplus(a + dt_bias)).exp()
    sigmoid = inputs.get("use_beta_sigmoid_in_kernel", inputs["A_log"] is not None)
    betas = b.sigmoid() * (2 if inputs.get("allow_neg_eigval") else 1) if sigmoid else b
    if inputs["use_qk_l2norm_in_kernel"]:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if inputs["scale"] is None else inputs["scale"]
    o, all_states = torch.zeros_like(v), []
    parents = inputs.get("parents")
    for n, (row, begin, end) in enumerate(extents(inputs)):
        index = torch.tensor(n) if inputs["state_indices"] is None else inputs["state_indices"][n]
        if index.dim():
            accepted = inputs.get("num_accepted_tokens")
            index = index[0 if accepted is None else accepted[n] - 1]
        states = [as_v_first(inputs, inputs["state_pool"][index].double())]
        for t in range(begin, end):
            parent = t - begin - 1 if parents is None else parents[n, t - begin].item()
            S = gates[row, t][:, None, None] * states[parent + 1]
            known = torch.einsum("hvk,hk->hv", S, k[row, t])
            S = S + torch.einsum("hv,hk->hvk", betas[row, t][:, None] * (v[row, t] - known), k[row, t])
            o[row, t] = scale * torch.einsum("hvk,hk->hv", S, q[row, t])
            states.append(S)
        all_states.append(states)
    return o, all_states


def is_state(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a state of a pool is the expected one, on the CPU and with V first."""
    if actual.dtype in FLOAT8:
        return is_rounded(actual, expected, SLACK)
    return relative_error(actual, expected) <= max(BARS[actual.dtype], BARS[FP32])


def check(inputs: dict, written: dict[int, torch.Tensor], o: torch.Tensor, expected_o: torch.Tensor, before) -> None:
    """o, and of the pool the written slots, all others being what they were."""
    pool, before, o = inputs["state_pool"].cpu(), before.cpu(), o.cpu()
    covered = expected_o.norm() > 0
    if covered:
        assert relative_error(o, expected_o) <= BARS[o.dtype]
    else:
        assert not o.any()
    for slot, state in enumerate(pool):
        if slot in written:
            assert is_state(as_v_first(inputs, state), written[slot])
        else:
            assert torch.equal(state, before[slot])


def check_call(inputs: dict) -> torch.Tensor:
    """o of a call that leaves the last states in the pool, after both have been checked."""
    before = inputs["state_pool"].clone()
    expected, states = states_after_tokens(inputs)
    o = decode_gated_delta_rule(**inputs)
    slot_states = zip(slots_of(inputs), states, strict=True)
    check(inputs, {slot: s[-1] for slot, s in slot_states if len(s) > 1}, o, expected, before)
    return o


# Sizes that test_pairs.py leaves out
@parametrize(
    Case(T=8, state_dtype=BF16, index_dtype=torch.int64),
    Case(dtype=BF16, gate_dtype=BF16, K=256, V=512),
    Case(lengths=(3, 0, 12), dtype=BF16, K=192, V=64, H_k=1, padding=1),
    Case(T=3, dtype=FP16, state_dtype=FP16, K=248, V=8),
    Case(lengths=(2, 9, 1), dtype=BF16, state_dtype=FP16, K=256, V=72),
    Case(dtype=FP16, state_dtype=BF16, K=200, V=40, H_k=1),
)
def test_last_state_goes_back(case, device):
    case = for_device(case, device)
    inputs = make_inputs(case, device)
    o = check_call(inputs)
    assert o.dtype == case.dtype and o.is_contiguous() and o.shape == inputs["v"].shape


@pytest.mark.parametrize("state_dtype", (FP32, BF16, FP16, E4M3), ids=str)
@pytest.mark.parametrize("T", (1, 3))
def test_small_norms(T, state_dtype, device):
    """eps = 1e-6 under the root of the l2norm: a vector of length 1e-3 comes out with length 1 / sqrt(2)."""
    case = for_device(Case(T=T, state_dtype=state_dtype, K=64, V=64), device)
    inputs = make_inputs(case, device)
    for name in ("q", "k"):
        inputs[name] *= 1e-3 / inputs[name].norm(dim=-1, keepdim=True)
    check_call(inputs)


@pytest.mark.parametrize("state_dtype", (FP32, BF16, FP16, E5M2), ids=str)
@pytest.mark.parametrize("T", (1, 3))
def test_strides_of_their_own(T, state_dtype, device):
    """q, k, v, a and b are parts of tensors of different widths, so that none has the strides of another."""
    case = for_device(Case(T=T, state_dtype=state_dtype, K=64, V=64), device)
    inputs = make_inputs(case, device)
    for i, name in enumerate(("q", "k", "v")):  # between heads, and between tokens
        x = inputs[name]
        wider = x.new_full((*x.shape[:2], x.shape[2] + i, x.shape[3] + 8 * (3 - i)), float("nan"))
        wider[:, :, : x.shape[2], : x.shape[3]] = x
        inputs[name] = wider[:, :, : x.shape[2], : x.shape[3]]
    for i, name in enumerate(("a", "b")):
        x = inputs[name]
        inputs[name] = torch.cat([x, x.new_full((*x.shape[:2], 1 + i), float("nan"))], -1)[..., : x.shape[2]]
    check_call(inputs)


def test_as_the_prefill():
    """One token after the other, and all at once, give the bits that chunk_gated_delta_rule gives."""
    inputs = make_inputs(Case(B=2, T=8, dtype=FP64, state_dtype=FP64, gate_dtype=FP64))
    slots = inputs["state_indices"].long()
    o, final_state = flash_qla.chunk_gated_delta_rule(
        *(inputs[name] for name in ("q", "k", "v", "a", "b")),
        initial_state=inputs["state_pool"][slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        state_v_first=True,
        use_gate_in_kernel=True,
        A_log=inputs["A_log"],
        dt_bias=inputs["dt_bias"],
        use_beta_sigmoid_in_kernel=True,
    )
    pools = [inputs["state_pool"].clone() for _ in range(2)]
    at_once = decode_gated_delta_rule(**{**inputs, "state_pool": pools[0]})
    tokens = []
    for t in range(8):
        token = {name: inputs[name][:, t : t + 1] for name in ("q", "k", "v", "a", "b")}
        tokens.append(decode_gated_delta_rule(**{**inputs, **token, "state_pool": pools[1]}))
    assert torch.equal(at_once, torch.cat(tokens, 1)) and torch.equal(*pools)
    assert torch.equal(at_once, o) and torch.equal(pools[0][slots], final_state)


@pytest.mark.parametrize("v_first", (True, False))
@pytest.mark.parametrize("state_dtype", (FP32, BF16, E5M2), ids=str)
def test_tree_in_slots(state_dtype, v_first, device):
    """The slot at the start is overwritten by the first token, and still is where the third one starts from."""
    inputs = make_inputs(for_device(Case(B=2, T=4, state_dtype=state_dtype, v_first=v_first), device), device)
    slots, others = inputs["state_indices"].cpu(), [(n + 20) % 40 for n in range(6)]
    writes = torch.tensor([[slots[0], *others[:3]], [slots[1], *others[3:]]])
    inputs |= moved({"write_indices": writes, "parents": torch.tensor([[-1, 0, -1, 2], [-1, -1, 1, 0]])}, device)
    before = inputs["state_pool"].clone()
    expected, states = states_after_tokens(inputs)
    o = decode_gated_delta_rule(**inputs)
    check(inputs, {writes[n, t].item(): states[n][t + 1] for n in range(2) for t in range(4)}, o, expected, before)


def test_tokens_beyond_the_columns_of_parents(device):
    """They follow the token before them."""
    inputs = make_inputs(for_device(Case(B=2, T=4), device), device) | {"update_state": False}
    parents = torch.tensor([[-1, 0, 1, 2], [-1, -1, 1, 2]], device=device)
    results = [decode_gated_delta_rule(**inputs, parents=parents[:, :columns].contiguous()) for columns in (4, 2)]
    assert torch.equal(*results)


def packed(inputs: dict, one_token: bool, stride: int = 1) -> dict:
    """The arguments of decode_gated_delta_rule_packed; mixed_qkv is a part of a tensor with NaN around it."""
    mixed_qkv = torch.cat([inputs[name].flatten(2) for name in ("q", "k", "v")], -1)
    wider = mixed_qkv.new_full((*mixed_qkv.shape[:2], 3, mixed_qkv.shape[2] * stride), float("nan"))
    wider[:, :, 1, ::stride] = mixed_qkv
    arguments = {name: x for name, x in inputs.items() if name not in ("q", "k", "v")} | {
        "mixed_qkv": wider[:, :, 1, ::stride]
    }
    if one_token:
        arguments |= {name: arguments[name].squeeze(1) for name in ("mixed_qkv", "a", "b")}
    return arguments


@pytest.mark.usefixtures("errors_change_nothing")
def test_packed_errors():
    arguments = packed(make_inputs(Case()), True)
    for change, text in (
        ({"mixed_qkv": torch.zeros(3, 170)}, "mixed_qkv has 170 channels, expected 2 H_k K + H_v V"),
        ({"mixed_qkv": torch.zeros(3, 96)}, "mixed_qkv has 96 channels"),
        ({"mixed_qkv": torch.zeros(160)}, "mixed_qkv has 1 dimensions"),
        ({"mixed_qkv": torch.zeros(3, 160, dtype=torch.bool)}, "mixed_qkv has dtype Bool"),
        ({"a": torch.zeros(3, 1, 4)}, "a has 3 dimensions (shape [3, 1, 4]), expected 2"),
        ({"b": torch.zeros(3, 5)}, "b has shape [3, 1, 5], expected [3, 1, 4]"),
        ({"state_pool": torch.zeros(9, 4, 24)}, "state_pool has 3 dimensions"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            decode_gated_delta_rule_packed(**arguments | change)


@pytest.mark.parametrize("T", (1, 5))
@pytest.mark.parametrize("with_rows", (False, True))
def test_layouts_have_the_same_bits(T, with_rows, device):
    """With fp32 states, if tokens go through the state one by one."""
    first, second = (for_device(Case(T=T, K=64, V=40, plain=True, v_first=x), device) for x in (True, False))
    inputs, others = make_inputs(first, device), make_inputs(second, device)
    if with_rows or device == "cuda":  # or a GPU takes a V-first state through several tokens together
        for case, x in ((first, inputs), (second, others)):
            x["intermediate_states"] = make_pool(case, 3, T, device=device)
    others["state_pool"].copy_(inputs["state_pool"].transpose(-2, -1))
    assert torch.equal(decode_gated_delta_rule(**inputs), decode_gated_delta_rule(**others))
    assert torch.equal(inputs["state_pool"], others["state_pool"].transpose(-2, -1))
    if with_rows:
        assert torch.equal(inputs["intermediate_states"], others["intermediate_states"].transpose(-2, -1))


# Errors


def check_raises(change: dict, *texts: str) -> None:
    inputs = make_inputs(Case(T=2))
    before = inputs["state_pool"].clone()
    with pytest.raises(RuntimeError, match=".*".join(map(re.escape, texts))):
        decode_gated_delta_rule(**{**inputs, **change})
    assert torch.equal(inputs["state_pool"], before)


def states(*shape: int, **options) -> torch.Tensor:
    return torch.zeros(*shape, **options)


TWO_COLUMNS = torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"k": states(3, 2, 2, 8)}, ("k has shape [3, 2, 2, 8]", "[3, 2, 2, 16]")),
        ({"v": states(3, 2, 3, 24)}, ("v has 3 heads", "multiple of the 2")),
        ({"a": states(3, 2, 5)}, ("a has shape", "[3, 2, 4]")),
        ({"b": states(3, 2, 4, dtype=torch.int32)}, ("b has dtype int32",)),
        ({"A_log": states(3)}, ("A_log has shape [3]", "[4]")),
        ({"dt_bias": states(2)}, ("dt_bias has shape [2]", "[4]")),
        ({"state_pool": states(9, 4, 16, 24)}, ("state_pool has shape", "V = 24", "K = 16")),
        ({"state_pool": states(9, 4, 16, 24).transpose(2, 3)}, ("state_pool has strides", "contiguous")),
        ({"state_pool": states(4, 24, 16)}, ("state_pool has 3 dimensions", "4")),
        ({"state_pool": states(9, 4, 24, 16, dtype=torch.int8)}, ("state_pool has dtype",)),
        ({"state_indices": states(3)}, ("state_indices has dtype float32", "int32 or int64")),
        ({"state_indices": states(2, dtype=torch.int32)}, ("state_indices has 2 rows", "3")),
        ({"state_indices": states(3, 0, dtype=torch.int32)}, ("state_indices has no columns",)),
        ({"num_accepted_tokens": states(3, dtype=torch.int32)}, ("num_accepted_tokens is a tensor", "None")),
        ({"write_indices": states(3, dtype=torch.int32)}, ("write_indices has 1 dimensions", "2")),
        ({"intermediate_indices": states(3, dtype=torch.int32)}, ("intermediate_indices is a tensor", "None")),
        ({"intermediate_states": states(3, 4, 24, 16)}, ("intermediate_states has 4 dimensions", "5")),
        ({"parents": states(3, 2, dtype=torch.int32)}, ("update_state is True", "parents")),
        ({"cu_seqlens": states(4, dtype=torch.int32)}, ("q has batch size 3", "1 with cu_seqlens")),
        ({"A_log": None}, ("dt_bias is a tensor", "None without A_log")),
        ({"A_log": None, "dt_bias": None, "allow_neg_eigval": True}, ("allow_neg_eigval is",)),
        ({"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}, ("allow_neg_eigval is",)),
        ({"state_v_first": False}, ("state_pool has shape [40, 4, 24, 16]",)),
        ({"state_indices": None}, ("state_pool has 40 states", "3, the number of sequences")),
        (
            {"state_indices": None, "state_pool": states(3, 4, 24, 16), "write_indices": TWO_COLUMNS},
            ("write_indices is a tensor", "None without state_indices"),
        ),
        (
            {"state_indices": None, "state_pool": states(3, 4, 24, 16), "num_accepted_tokens": TWO_COLUMNS[:, 0]},
            ("num_accepted_tokens is a tensor", "None"),
        ),
        ({"out": states(3, 2, 4, 16)}, ("out has shape [3, 2, 4, 16]", "[3, 2, 4, 24]")),
        ({"out": states(3, 2, 4, 24, dtype=BF16)}, ("out has dtype bfloat16", "float32")),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_arguments(change, texts):
    check_raises(change, *texts)
    if "strides" not in texts[0]:  # a tracer's tensors have other strides
        with pytest.raises(RuntimeError, match=re.escape(texts[0])):
            decode_gated_delta_rule(**on_meta(make_inputs(Case(T=2)) | change))


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = {"state_indices": indices(3, 5, 7).reshape(3, 1)}
WRONG_CONTENTS = [
    ({"state_indices": indices(0, 40, 1)}, ("state_indices[1] is 40", "0 to 39")),
    ({"state_indices": indices(0, -2, 1), "null_index": -5}, ("state_indices[1] is -2", "0 to 39")),
    ({"state_indices": indices(3, 5, 3)}, ("state_indices[2] is 3", "written already")),
    (TABLE | {"num_accepted_tokens": indices(1, 2, 1)}, ("num_accepted_tokens[1] is 2", "1 to 1")),
    ({"write_indices": indices(1, 2, 3, 4, 5, 77).reshape(3, 2)}, ("write_indices[2, 1] is 77", "0 to 39")),
    ({"write_indices": indices(1, 2, 3, 2, 5, 6).reshape(3, 2)}, ("write_indices[1, 1] is 2", "already")),
    (
        {"state_indices": indices(3, 5, 7), "write_indices": indices(5, 8, 9).reshape(3, 1)},
        ("state_indices[1] is 5", "which sequence 0 writes"),
    ),
    (
        {"state_indices": indices(3, 5, 7), "write_indices": indices(8, 3, 9).reshape(3, 1)},
        ("write_indices[1, 0] is 3", "which another sequence reads"),
    ),
    (
        {"intermediate_states": torch.zeros(4, 2, 4, 24, 16), "intermediate_indices": indices(1, 2, 1)},
        ("intermediate_indices[2] is 1", "written already"),
    ),
    (
        {"parents": indices(-1, 1, -1, 0, -1, 0).reshape(3, 2), "update_state": False},
        ("parents[0, 1] is 1", "-1 to 0"),
    ),
]


@pytest.mark.usefixtures("errors_change_nothing")
def test_a_slot_that_several_sequences_read():
    """One of them may write it, but not a state after its first token, which another would read."""
    inputs = make_inputs(Case(B=2, T=2)) | {"update_state": False}
    inputs |= {"state_indices": indices(3, 0, 3, 1).reshape(2, 2), "num_accepted_tokens": indices(1, 1)}
    with pytest.raises(RuntimeError, match=r"write_indices\[1, 1\] is 3, .*another sequence reads"):
        decode_gated_delta_rule(**inputs | {"write_indices": indices(0, 1, 2, 3).reshape(2, 2)})


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.parametrize(("change", "texts"), WRONG_CONTENTS, ids=lambda x: x[0] if isinstance(x, tuple) else "")
def test_wrong_contents(change, texts):
    """Which the CPU sees."""
    check_raises(change, *texts)


@pytest.mark.usefixtures("errors_change_nothing")
def test_wrong_offsets():
    case = make_inputs(Case(lengths=(2, 3)))
    with pytest.raises(RuntimeError, match=re.escape("cu_seqlens[1] is 9")):
        decode_gated_delta_rule(**case | {"cu_seqlens": indices(0, 9, 5)})
