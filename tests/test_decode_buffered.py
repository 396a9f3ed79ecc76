"""Decoding on states that lag, against the recurrence written out in fp64."""

import re

import pytest
import torch
import torch.nn.functional as F
from accuracy import relative_error
from cases import on_meta
from test_decode import BARS, BF16, FP16, FP32, FP64, Case, for_device, indices, make_inputs, moved

from flash_qla import decode_gated_delta_rule, decode_gated_delta_rule_buffered

TOKENS = ("q", "k", "v", "a", "b")


def make_backlog(case: Case, L: int, device: str = "cpu", d_dtype=None, k_dtype=None, gap: int = 0) -> dict:
    """A backlog of NaN, with a gap of `gap` elements after each slot."""
    compute_dtype = FP64 if case.dtype == FP64 else FP32

    def backlog(dtype, *slot):
        size = torch.Size(slot).numel()
        memory = torch.full((case.slots, size + gap), float("nan"), dtype=dtype, device=device)
        return memory[:, :size].unflatten(1, slot)

    return {
        "d_cache": backlog(d_dtype or compute_dtype, case.H_v, L, case.V),
        "k_cache": backlog(k_dtype or case.dtype, case.H_k, L, case.K),
        "g_cache": backlog(compute_dtype, case.H_v, L),
    }


def make_call(case: Case, L: int, device: str = "cpu", **of_backlog) -> dict:
    """The arguments of a step, with an empty backlog. The tensors of TOKENS have the tokens of all steps, [B, T]."""
    inputs = make_inputs(case, device)
    del inputs["cu_seqlens"]
    write_pos = torch.zeros(case.B, dtype=case.index_dtype, device=device)
    return inputs | make_backlog(case, L, device, **of_backlog) | {"write_pos": write_pos}


def step_of(call: dict, t: int) -> dict:
    return {name: call[name][:, t : t + 1] for name in TOKENS}


class Reference:
    """The recurrence in fp64, and the states that sequences have in a pool and backlog."""

    def __init__(self, call: dict):
        self.call = moved(call, "cpu")
        self.slots = self.call["state_indices"].tolist()
        self.states = [self.call["state_pool"][max(slot, 0)].double().clone() for slot in self.slots]

    def step(self, t: int) -> torch.Tensor:
        """o [B, 1, H_v, V] of token t of each sequence."""
        call = self.call
        q, k, v, a, b = (call[name][:, t].double() for name in TOKENS)
        bias = 0 if call["dt_bias"] is None else call["dt_bias"].double()
        decay = (-call["A_log"].double().exp() * F.softplus(a + bias)).exp()
        if call["use_qk_l2norm_in_kernel"]:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
        scale = q.shape[-1] ** -0.5 if call["scale"] is None else call["scale"]
        o = torch.zeros_like(v)
        for n, slot in enumerate(self.slots):
            if slot >= 0:
                S = decay[n, :, None, None] * self.states[n]
                error = v[n] - torch.einsum("hvk,hk->hv", S, k[n])
                self.states[n] = S + torch.einsum("hv,hk->hvk", b[n].sigmoid()[:, None] * error, k[n])
                o[n] = scale * torch.einsum("hvk,hk->hv", self.states[n], q[n])
        return o[:, None]


def reconstructed(call: dict, n: int) -> torch.Tensor:
    """The state of sequence n, in fp64, from its slot and its backlog."""
    slot, steps = call["state_indices"][n], call["write_pos"][n].item()
    d, k, g = (call[name][slot, :, :steps].double().cpu() for name in ("d_cache", "k_cache", "g_cache"))
    S = call["state_pool"][slot].double().cpu()
    k = k.repeat_interleave(d.shape[0] // k.shape[0], 0)
    for i in range(steps):
        S = g[:, i, None, None].exp() * S + torch.einsum("hv,hk->hvk", d[:, i], k[:, i])
    return S


def check_steps(call: dict, forced: torch.Tensor | None = None) -> None:
    """Every step of the sequences: outputs, pool, backlog. forced [steps, B] says which sequences are flushed."""
    reference, pool, B = Reference(call), call["state_pool"], len(call["state_indices"])
    L, device = call["d_cache"].shape[2], pool.device
    bar = max(BARS[x.dtype] for x in (pool, call["d_cache"]))
    bar = max(bar, BARS[FP32 if call["q"].dtype != FP64 else FP64])
    idle = [slot for slot in range(len(pool)) if slot not in reference.slots]
    before = {name: call[name][idle].clone() for name in ("state_pool", "d_cache", "k_cache", "g_cache")}
    for t in range(call["q"].shape[1]):
        force = None if forced is None else forced[t]
        at_start, lagging = call["write_pos"].tolist(), pool.clone()
        step = step_of(call, t) | {"force_flush": None if force is None else force.to(device)}
        o = decode_gated_delta_rule_buffered(**call | step)
        expected = reference.step(t)
        assert o.dtype == call["q"].dtype and o.shape == expected.shape and o.is_contiguous()
        assert not B or relative_error(o.cpu(), expected) <= max(BARS[o.dtype], BARS[call["d_cache"].dtype])
        assert call["write_pos"].tolist() == at_start
        for n, slot in enumerate(reference.slots):
            if slot < 0:
                assert not o[n].any()
                continue
            flushed = at_start[n] == L - 1 or (force is not None and force[n] != 0)
            call["write_pos"][n] = 0 if flushed else at_start[n] + 1
            if not flushed:
                assert torch.equal(pool[slot], lagging[slot])
            assert relative_error(reconstructed(call, n), reference.states[n]) <= bar
            if flushed:  # later steps begin with the rounded state
                reference.states[n] = pool[slot].cpu().double().clone()
    for name, x in before.items():
        assert torch.equal(call[name][idle].nan_to_num(7), x.nan_to_num(7))


SIZES = {"K": 128, "V": 136, "T": 7, "B": 2}


@pytest.mark.parametrize("forced", (False, True))
@pytest.mark.parametrize(
    ("case", "L", "of_backlog"),
    [
        (Case(T=6), 1, {}),
        (Case(T=7), 3, {}),
        (Case(B=1, H_k=1, H_v=1, K=1, V=1, T=5), 2, {}),
        (Case(T=36, B=2, H_v=2), 32, {}),
        (Case(T=20, B=2, K=128, V=40, dtype=BF16), 17, {}),
        (Case(**SIZES, dtype=BF16), 4, {}),
        (Case(**SIZES, dtype=BF16), 4, {"k_dtype": FP32}),
        (Case(**SIZES, dtype=BF16), 4, {"d_dtype": BF16, "gap": 8}),
        (Case(**SIZES, dtype=BF16, state_dtype=BF16, gap=128), 4, {}),
        (Case(**SIZES, dtype=BF16, state_dtype=BF16, H_k=1), 4, {"d_dtype": BF16}),
        (Case(**SIZES | {"T": 20}, dtype=BF16, state_dtype=BF16), 18, {"k_dtype": FP32}),
        (Case(**SIZES, dtype=FP16, state_dtype=FP16, gate_dtype=FP16), 4, {"d_dtype": FP16}),
        (Case(T=20, B=2, K=72, V=40, dtype=BF16, state_dtype=BF16), 17, {}),
        (Case(T=34, B=1, H_k=1, H_v=2, K=8, V=8, dtype=FP16, state_dtype=FP16), 32, {"k_dtype": FP32}),
        (Case(**SIZES, dtype=FP16, state_dtype=BF16, H_k=1, H_v=3), 4, {"gap": 8}),
        (Case(**SIZES | {"K": 24, "V": 8}, dtype=BF16, state_dtype=FP16, index_dtype=torch.int64), 4, {}),
        (Case(T=7, K=96, V=256, dtype=BF16, gate_dtype=BF16, bias=False), 3, {}),
        (Case(T=7, dtype=FP64, state_dtype=FP64, gate_dtype=FP64, l2norm=False, scale=0.3), 3, {}),
        (Case(T=7, K=64, dtype=BF16, l2norm=False), 3, {}),
        (Case(B=0, T=1), 3, {}),
    ],
    ids=str,
)
def test_steps(case, L, of_backlog, forced, device):
    case = for_device(case, device)
    generator = torch.Generator().manual_seed(3)
    flushes = (torch.rand(case.T, case.B, generator=generator) < 0.3).to(case.index_dtype)
    check_steps(make_call(case, L, device, **of_backlog), flushes if forced else None)


@pytest.mark.parametrize("state_dtype", (FP32, BF16), ids=str)
def test_no_slot(state_dtype, device):
    """The second sequence has no slot: its output is zero, and nothing is written, whatever its write_pos is."""
    case = for_device(Case(T=5, B=3, state_dtype=state_dtype), device)
    call = make_call(case, 3, device)
    call["state_indices"][1] = -1
    call["write_pos"][1] = 77
    check_steps(call)
    call["null_index"] = int(call["state_indices"].max())
    o = decode_gated_delta_rule_buffered(**call | step_of(call, 0))
    assert not o.any()


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_entries_after_write_pos_are_not_read(value, device):
    case = for_device(Case(T=3, B=2), device)
    calls = [make_call(case, 5, device) for _ in range(2)]
    for name, other in (("d_cache", value), ("k_cache", value), ("g_cache", value)):
        calls[0][name].zero_()
        calls[1][name].fill_(other)
    for t in range(3):
        o = [decode_gated_delta_rule_buffered(**call | step_of(call, t)) for call in calls]
        assert torch.equal(*o)
        for call in calls:
            call["write_pos"] += 1


@pytest.mark.parametrize("state_dtype", (FP32, BF16), ids=str)
def test_backlog_of_one_step(state_dtype, device):
    """Each step writes the state: the bits of decode_gated_delta_rule on the CPU, and their rounding on a GPU."""
    call = make_call(for_device(Case(T=4, K=128, V=128, state_dtype=state_dtype), device), 1, device)
    pool = call["state_pool"].clone()
    others = {name: x for name, x in call.items() if name not in ("d_cache", "k_cache", "g_cache", "write_pos")}
    for t in range(4):
        o = decode_gated_delta_rule_buffered(**call | step_of(call, t))
        expected = decode_gated_delta_rule(**others | step_of(call, t) | {"state_pool": pool})
        if device == "cpu":
            assert torch.equal(o, expected) and torch.equal(call["state_pool"], pool)
        assert relative_error(o, expected.double()) <= BARS[o.dtype]
        assert relative_error(call["state_pool"], pool.double()) <= max(BARS[FP32], BARS[state_dtype])


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_a_written_state_is_rounded_once(dtype, device):
    """Nearly all numbers of the state are those of the recurrence in fp64, rounded to the dtype of the pool."""
    case = for_device(Case(T=8, B=2, K=128, V=72, dtype=dtype, state_dtype=dtype), device)
    call = make_call(case, 8, device)
    reference = Reference(call)
    for t in range(8):
        decode_gated_delta_rule_buffered(**call | step_of(call, t))
        call["write_pos"] += 1
        reference.step(t)
    for slot, expected in zip(reference.slots, reference.states, strict=True):
        assert (call["state_pool"][slot].cpu() != expected.to(dtype)).double().mean() < 0.01


@pytest.mark.parametrize("state_dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("B", (4, 40))
def test_a_sequence_does_not_depend_on_the_others(B, state_dtype, device):
    """The bits are the same alone, whatever the positions of the others in their backlog. On a GPU larger batches have
    larger CTAs."""
    case = for_device(Case(T=4, B=B, slots=2 * B, K=128, V=72, state_dtype=state_dtype), device)
    call = make_call(case, 3, device)
    positions = torch.tensor([2, 0, 1, 2] * (B // 4), device=device)
    for name in ("d_cache", "k_cache", "g_cache"):
        generator = torch.Generator().manual_seed(5)
        call[name].copy_(-0.1 * torch.rand(call[name].shape, generator=generator))
    written = ("state_pool", "d_cache", "k_cache", "g_cache")
    before = {name: call[name].clone() for name in written}
    o = decode_gated_delta_rule_buffered(**call | step_of(call, 0) | {"write_pos": positions})
    for n in range(0, B, max(1, B // 3)):
        alone = {name: x[n : n + 1] for name, x in step_of(call, 0).items()} | {"write_pos": positions[n : n + 1]}
        alone |= {"state_indices": call["state_indices"][n : n + 1]} | {name: before[name].clone() for name in written}
        assert torch.equal(decode_gated_delta_rule_buffered(**call | alone), o[n : n + 1])
        slot = call["state_indices"][n]
        assert all(torch.equal(alone[name][slot], call[name][slot]) for name in written)


# Errors


def zeros(*shape: int, **options) -> torch.Tensor:
    return torch.zeros(*shape, **options)


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(zip(TOKENS, (zeros(3, 2, *x) for x in ((2, 16), (2, 16), (4, 24), (4,), (4,))), strict=True)),
         "q has 2 tokens of each sequence, expected 1 ([B, 1, H_k, K])"),
        ({"state_indices": indices(1, 2, 3)[:, None]}, "state_indices has 2 dimensions (shape [3, 1]), expected 1"),
        ({"d_cache": zeros(40, 4, 24)}, "d_cache has 3 dimensions (shape [40, 4, 24]), expected 4"),
        ({"d_cache": zeros(40, 4, 0, 24)}, "d_cache has backlogs of 0 steps, expected 1 to 32"),
        ({"d_cache": zeros(40, 4, 33, 24)}, "d_cache has backlogs of 33 steps, expected 1 to 32"),
        ({"d_cache": zeros(40, 2, 3, 24)}, "d_cache has shape [40, 2, 3, 24], expected [40, 4, 3, 24]"),
        ({"d_cache": zeros(39, 4, 3, 24)}, "d_cache has shape [39, 4, 3, 24], expected [40, 4, 3, 24]"),
        ({"d_cache": zeros(40, 4, 3, 24, dtype=BF16)}, "d_cache has dtype bfloat16, expected float32"),
        ({"k_cache": zeros(40, 4, 3, 16)}, "k_cache has shape [40, 4, 3, 16], expected [40, 2, 3, 16]"),
        ({"k_cache": zeros(40, 2, 4, 16)}, "k_cache has shape [40, 2, 4, 16], expected [40, 2, 3, 16]"),
        ({"g_cache": zeros(40, 4, 3, dtype=BF16)}, "g_cache has dtype bfloat16, expected float32"),
        ({"g_cache": zeros(40, 4, 2)}, "g_cache has shape [40, 4, 2], expected [40, 4, 3]"),
        ({"write_pos": zeros(3)}, "write_pos has dtype float32, expected int32 or int64"),
        ({"write_pos": indices(0, 0)}, "write_pos has 2 rows, expected 3"),
        ({"force_flush": indices(0, 0, 0, 0)}, "force_flush has 4 rows, expected 3"),
        ({"force_flush": zeros(3)}, "force_flush has dtype float32, expected int32 or int64"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_wrong_arguments(change, text):
    call = make_call(Case(), 3)
    before = call["state_pool"].clone()
    with pytest.raises(RuntimeError, match=re.escape(text)):
        decode_gated_delta_rule_buffered(**call | change)
    assert torch.equal(call["state_pool"], before)
    with pytest.raises(RuntimeError, match=re.escape(text)):
        decode_gated_delta_rule_buffered(**on_meta(call | change))


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"d_cache": zeros(40, 4, 24, 3).transpose(2, 3)}, "d_cache has strides [288, 72, 1, 3], expected contiguous"),
        (
            {"k_cache": zeros(1, 2, 3, 16).expand(40, 2, 3, 16)},
            "k_cache has shape [40, 2, 3, 16] and strides [0, 48, 16, 1], expected elements that",
        ),
        ({"write_pos": indices(0, 3, 0)}, "write_pos[1] is 3, expected 0 to 2"),
        ({"write_pos": indices(0, 0, -1)}, "write_pos[2] is -1, expected 0 to 2"),
        ({"state_indices": indices(3, 5, 3)}, "state_indices[2] is 3, which is written already"),
        ({"state_indices": indices(3, 40, 5)}, "state_indices[1] is 40, expected 0 to 39"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_memory_and_contents(change, text):
    """Errors that a tracer does not see. Nothing has been written, `out` neither."""
    call = make_call(Case(), 3)
    call["out"] = torch.full_like(call["v"], 7.0)
    before = call["state_pool"].clone()
    with pytest.raises(RuntimeError, match=re.escape(text)):
        decode_gated_delta_rule_buffered(**call | change)
    assert torch.equal(call["state_pool"], before)


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.parametrize("name", ("d_cache", "k_cache", "g_cache"))
def test_slots_that_are_not_contiguous(name):
    """With a gap in any dimension of a slot; the slots themselves may be apart."""
    call = make_call(Case(), 3)
    cache = call[name]
    for dim in range(cache.dim()):
        spread = torch.repeat_interleave(cache, 2, dim)[(slice(None),) * dim + (slice(None, None, 2),)]
        arguments = {x: y.clone() if isinstance(y, torch.Tensor) else y for x, y in call.items()} | {name: spread}
        if dim == 0:
            assert torch.equal(decode_gated_delta_rule_buffered(**arguments), decode_gated_delta_rule_buffered(**call))
            continue
        with pytest.raises(RuntimeError, match=rf"{name} has strides \[.*\], expected contiguous slots"):
            decode_gated_delta_rule_buffered(**arguments)


@pytest.mark.usefixtures("errors_change_nothing")
def test_gates_have_the_compute_dtype():
    """Changes and keys may have the dtype of q, the sums of gates may not."""
    call = make_call(Case(dtype=BF16), 3)
    for name in ("d_cache", "k_cache"):
        decode_gated_delta_rule_buffered(**call | {name: call[name].bfloat16()})
    with pytest.raises(RuntimeError, match="g_cache has dtype bfloat16, expected float32"):
        decode_gated_delta_rule_buffered(**call | {"g_cache": call["g_cache"].bfloat16()})


# Only on a GPU


@pytest.mark.gpu
def test_an_index_has_all_of_its_bits():
    """One of 64 bits is no slot where its lower half would be one."""
    call = make_call(for_device(Case(T=1, B=3), "cuda"), 3, "cuda")
    call["state_indices"] = call["state_indices"].long() + torch.tensor([0, 2**32, 0], device="cuda")
    o = decode_gated_delta_rule_buffered(**call | step_of(call, 0))
    assert o.flatten(1).any(1).tolist() == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("positions", ((-5, 0, 2), (3, 99, 2), (-(2**31), 2**31 - 1, 1)), ids=str)
def test_positions_outside(positions):
    """A write_pos out of range counts as the nearest valid one."""
    call = make_call(for_device(Case(), "cuda"), 3, "cuda")
    generator = torch.Generator().manual_seed(5)
    written = ("state_pool", "d_cache", "k_cache", "g_cache")
    for name in written[1:]:
        call[name].copy_(-torch.rand(call[name].shape, generator=generator))
    copies = {name: call[name].clone() for name in written}
    write_pos = torch.tensor(positions, dtype=torch.int32, device="cuda")
    o = decode_gated_delta_rule_buffered(**call | {"write_pos": write_pos})
    assert torch.equal(o, decode_gated_delta_rule_buffered(**call | copies | {"write_pos": write_pos.clamp(0, 2)}))
    assert all(torch.equal(call[name], copies[name]) for name in written)


@pytest.mark.usefixtures("errors_change_nothing")
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "of_backlog", "text"),
    [
        (Case(dtype=FP32), {}, "q has dtype float32, expected bfloat16 or float16 on a GPU"),
        (Case(dtype=BF16, K=136), {}, "q has head dimension K = 136"),
        (Case(dtype=BF16), {"gap": 2}, "d_cache has slots that do not start at multiples of 16 bytes"),
    ],
    ids=str,
)
def test_not_on_the_gpu(case, of_backlog, text):
    call = make_call(case, 3, "cuda", **of_backlog)
    with pytest.raises(RuntimeError, match=re.escape(text)):
        decode_gated_delta_rule_buffered(**call)
