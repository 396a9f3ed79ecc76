"""The tests' own tools: a reference that were wrong, a metric that let NaN pass or a poison that did not poison would
make every other test worthless."""

import dataclasses
import itertools

import accuracy
import pytest
import ranks
import reference
import torch
from cases import (
    ALL_GRADIENTS_OF,
    ALL_INSIDE,
    GRADIENT_OF,
    Case,
    activated,
    make_gradients,
    make_inputs,
    reference_gradients,
    reference_of,
    run_backward,
)
from poison import fill_free_cuda_blocks, poisoned
from subprocesses import run_python

import flash_qla

LENGTHS = (70, 0, 3, 128)
CASE = Case(lengths=LENGTHS, padding=5, H_k=2, H_v=6, K=5, V=3, dtype=torch.float64, keys="long", beta="stable")


def plain_loops(inputs: dict):
    """o [tokens, H_v, V] and the final states, of sequences of LENGTHS, and the states before every token: loops over
    sequences, heads and tokens, straight from the definition, through which autograd can go."""
    q, k, v, g, beta = (inputs[name][0] for name in ("q", "k", "v", "g", "beta"))
    scale = 5**-0.5 if inputs["scale"] is None else inputs["scale"]
    outputs, states, final_states = [[] for _ in range(6)], [[] for _ in range(6)], [[] for _ in range(6)]
    for n, start, length in zip(range(4), (0, 70, 70, 73), LENGTHS, strict=True):
        for head in range(6):
            S = inputs["initial_state"][n, head].double()
            S = S.T if inputs["state_v_first"] else S
            for row in range(start, start + length):
                states[head].append(S)
                q_t, k_t = q[row, head // 3], k[row, head // 3]
                if inputs["use_qk_l2norm_in_kernel"]:
                    q_t, k_t = (x / (x @ x + 1e-6).sqrt() for x in (q_t, k_t))
                S = g[row, head].double().exp() * S
                S = S + beta[row, head].double() * torch.outer(k_t, v[row, head] - S.T @ k_t)
                outputs[head].append(scale * S.T @ q_t)
            final_states[head].append(S.T if inputs["state_v_first"] else S)
    o, states, final_states = (torch.stack([torch.stack(x) for x in y], 1) for y in (outputs, states, final_states))
    return o, final_states, states


def test_reference_is_the_formula():
    inputs = make_inputs(CASE, "cpu")
    expected = reference_of(inputs)
    o, final_states, states = plain_loops(inputs)
    torch.testing.assert_close(expected.o[0, :201], o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(expected.final_state, final_states, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(expected.h[0, :5], states[[0, 64, 70, 73, 137]], rtol=1e-12, atol=1e-12)
    assert not expected.o[0, 201:].any() and not expected.h[0, 5:].any()


@pytest.mark.parametrize(
    "case",
    (
        CASE,
        dataclasses.replace(CASE, state_v_first=True, scale=-2.0, dht=None, gate="resets"),
        dataclasses.replace(CASE, use_qk_l2norm_in_kernel=True, initial_state=torch.bfloat16),
        dataclasses.replace(
            CASE, beta="sigmoid", keys="unit", **ALL_INSIDE, g_dtype=torch.bfloat16, beta_dtype=torch.float16
        ),
        dataclasses.replace(CASE, use_gate_in_kernel=True, dt_bias=None),
    ),
    ids=str,
)
def test_reference_gradients_are_autograds(case):
    inputs, gradients = make_inputs(case, "cpu"), make_gradients(case, "cpu")
    expected = reference_gradients(inputs, **gradients)
    names = [name for name in ALL_GRADIENTS_OF if inputs.get(name) is not None]
    # Padding holds NaN, which 0 times remains.
    leaves = {name: torch.where(inputs[name].isnan(), 0, inputs[name]).double().requires_grad_() for name in names}
    o, final_states, _ = plain_loops(activated({**inputs, **leaves}))
    loss = (o * gradients["do"][0, :201]).sum()
    if gradients["dht"] is not None:
        loss = loss + (final_states * gradients["dht"]).sum()
    for name, dx in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        torch.testing.assert_close(getattr(expected, ALL_GRADIENTS_OF[name]), dx, rtol=1e-10, atol=1e-12)


def test_reference_gradients_are_slopes():
    """gradcheck of the reference's two directions, neither of which shares the other's arithmetic."""
    case = Case(lengths=(3, 0, 66), H_k=1, H_v=2, K=2, V=3, dtype=torch.float64, use_qk_l2norm_in_kernel=True)
    inputs = make_inputs(case, "cpu")

    class Recurrence(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *leaves):
            ctx.save_for_backward(*leaves)
            expected = reference_of({**inputs, **dict(zip(GRADIENT_OF, leaves, strict=True))})
            return expected.o, expected.final_state

        @staticmethod
        def backward(ctx, do, dht):
            leaves = dict(zip(GRADIENT_OF, ctx.saved_tensors, strict=True))
            gradients = reference_gradients({**inputs, **leaves}, do, dht)
            return tuple(getattr(gradients, name) for name in GRADIENT_OF.values())

    leaves = [inputs[name].double().requires_grad_() for name in GRADIENT_OF]
    assert torch.autograd.gradcheck(Recurrence.apply, leaves, fast_mode=True)


def test_sizes_are_those_of_dot_products():
    """db and dg of random signs: half of the numbers lie within 0.67 of their size."""
    case = Case(T=200, H_k=1, H_v=2, K=32, V=32, gate="logsigmoid", dtype=torch.float64)
    expected = reference_gradients(make_inputs(case, "cpu"), **make_gradients(case, "cpu"))
    for name in ("db", "dg"):
        ratio = (getattr(expected, name).abs() / expected.sizes[name]).flatten()
        assert 0.3 < ratio.median() < 1.2
        assert 0.1 < (ratio < 0.3).double().mean() < 0.5


def test_reference_agrees_with_the_chunk_form():
    """O and S' of a chunk from A, D and gamma, as the kernels compute them."""
    case = Case(T=64, H_k=1, H_v=2, K=16, V=8, dtype=torch.float64, gate="logsigmoid")
    inputs = make_inputs(case, "cpu")
    expected = reference_of(inputs)
    A = reference.chunk_inverse(inputs["k"], inputs["beta"])[0].transpose(0, 1)
    b = reference.chunk_cumsum(inputs["g"])[0].T
    gamma = b.exp()[..., None]
    D = (b[:, :, None] - b[:, None, :]).exp().tril()
    Q, K = (inputs[name][0].double().transpose(0, 1) for name in ("q", "k"))
    V, beta = inputs["v"][0].double().transpose(0, 1), inputs["beta"][0].double().T[..., None]
    S = inputs["initial_state"][0].double()
    V_new = (A * D) @ (beta * (V - gamma * (K @ S)))
    O = 16**-0.5 * (gamma * (Q @ S) + ((Q @ K.mT).tril() * D) @ V_new)
    S_next = gamma[:, -1:] * S + (gamma[:, -1:] / gamma * K).mT @ V_new
    torch.testing.assert_close(expected.o[0].transpose(0, 1), O, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(expected.final_state[0], S_next, rtol=1e-10, atol=1e-12)


def test_reference_state_layouts_and_dense_batches():
    inputs = make_inputs(Case(B=3, T=65, K=5, V=3, dtype=torch.float64), "cpu")
    dense = reference_of(inputs)
    flat = {name: x.flatten(0, 1)[None] if name in ("q", "k", "v", "g", "beta") else x for name, x in inputs.items()}
    flat["cu_seqlens"] = torch.tensor([0, 65, 130, 195])
    flat["initial_state"] = inputs["initial_state"].mT
    packed = reference_of({**flat, "state_v_first": True})
    assert torch.equal(packed.o.reshape(dense.o.shape), dense.o)
    assert torch.equal(packed.final_state.mT, dense.final_state)
    assert torch.equal(packed.h[:, :6].mT.reshape(dense.h.shape), dense.h)


@accuracy.not_measured()
def test_metric_rejects_what_it_should():
    expected = torch.randn(1, 128, 2, 64, dtype=torch.float64)
    accuracy.check("o", expected.bfloat16(), expected, dtype=torch.bfloat16, case="rounded")

    def fails(actual, expected=expected):
        with pytest.raises(AssertionError):
            accuracy.check("o", actual.bfloat16(), expected, dtype=torch.bfloat16, case="wrong")

    fails(expected[:, :-1])
    fails(expected * 1.006)
    for value in (float("nan"), float("inf")):
        bad = expected.clone()
        bad[0, 100, 1, 3] = value
        fails(bad)
    one_token = expected.clone()
    one_token[0, 100, 1] *= 1.3  # 4e-2 of its block, 2e-2 of the whole
    fails(one_token)
    long = torch.randn(1, 8192, 8, 32, dtype=torch.float64)
    one_token = long.clone()
    one_token[0, 5000, 3] = 0  # 4e-3 of the whole: only the block shows it
    assert accuracy.relative_error(one_token, long) < accuracy.BF16_BAR
    fails(one_token, long)
    zero = torch.zeros_like(expected)
    accuracy.check("o", zero.bfloat16(), zero, dtype=torch.bfloat16, case="zero")
    fails(zero + 1e-30, zero)
    fails(zero * float("nan"), zero)


@accuracy.not_measured()
def test_gradient_metric_rejects_what_it_should():
    case = Case(lengths=(500, 20), padding=10, H_k=1, H_v=2, K=16, V=16)
    inputs, gradients = make_inputs(case, "cpu"), make_gradients(case, "cpu")
    expected = reference_gradients(inputs, **gradients)
    g_cumsum = reference.chunk_cumsum(inputs["g"], inputs["cu_seqlens"])
    right = {name: getattr(expected, name) for name in GRADIENT_OF.values()}

    def check_gradients(actual, case):
        actual = {name: x.bfloat16() if name in accuracy.IN_THE_DTYPE_OF_Q else x for name, x in actual.items()}
        accuracy.check_gradients(actual, expected, dtype=torch.bfloat16, case=case, g_cumsum=g_cumsum)

    check_gradients(right, case="right")

    def fails(name, change):
        wrong = right[name].clone()
        change(wrong)
        with pytest.raises(AssertionError, match=name):
            check_gradients({name: wrong}, case="wrong")

    for name in right:
        fails(name, lambda x: x.mul_(1.02))
        fails(name, lambda x: x[0, 1].fill_(float("nan")))
        fails(name, lambda x: x[0, :64].zero_())  # of dh0, the first sequence
    for name in ("dq", "dk", "dv", "db"):  # exactly zero in padding; check_backward looks at dg there
        fails(name, lambda x: x[0, 525].fill_(1e-30))
    for name in ("db", "dg"):  # one token of one head, by half of what is usual there
        usual = right[name][0, :, 1].square().mean().sqrt()
        wrong = right[name].clone()
        wrong[0, 300, 1] += usual / 2
        assert accuracy.relative_error(wrong, right[name]) < 0.03
        fails(name, lambda x, usual=usual: x[0, 300, 1].add_(usual / 2))


def test_bar_of_fp32_gradients_follows_the_gates():
    """Half an ulp of the largest |b|, twice; sums of one gate show that so much is really lost."""
    for largest in (0.0, 100.0, 3000.0):
        bar = accuracy.gradient_bar("dq", torch.float32, torch.tensor([0.0, -largest]))
        assert bar == 1e-5 + 2.0**-23 * largest
    assert accuracy.gradient_bar("dq", torch.bfloat16, torch.tensor([-3000.0])) == 8e-3
    g = torch.tensor(-48.7)
    b = torch.stack(list(itertools.accumulate([g] * 64)))
    lost = (b.diff().double() - g).abs().max()
    assert 2.0**-26 * b.abs().max() < lost <= 2.0**-24 * b.abs().max()


def test_poison_fills_what_torch_empty_returns(device):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        with poisoned(device):
            tensors = [
                torch.empty(1000, dtype=dtype, device=device),
                torch.empty_strided((5, 4), (1, 5), dtype=dtype, device=device),
            ]
            tensors.append(tensors[0].new_empty(3, 3))
        for x in tensors:
            assert x.isnan().all()
    with poisoned(device):
        assert (torch.empty(9, dtype=torch.int32, device=device) != 0).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_poison_reaches_allocations_made_inside_the_op(device):
    """Every allocation that the ops make through PyTorch is seen to be filled."""
    case = Case(T=64, H_k=1, H_v=1)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    calls = {
        2: lambda: flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True),  # o, final_state
        6: lambda: run_backward(inputs, **gradients),  # dq, dk, dv, db, dg, dh0
    }
    for outputs, call in calls.items():
        with poisoned(device), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        inside = [event for event in profile.events() if event.name.startswith("aten::") and "empty" in event.name]
        leaves = [event for event in inside if not any("empty" in child.name for child in event.cpu_children)]
        assert len(leaves) >= outputs
        for event in leaves:
            assert any("fill_" in child.name for child in event.cpu_children), event


@pytest.mark.gpu
def test_poison_fills_free_cuda_blocks():
    for size in (300, 40_000, 3_000_000, 30_000_000):
        del_me = torch.zeros(size, device="cuda")
        del del_me
        fill_free_cuda_blocks()
        assert torch.empty(size, device="cuda").isnan().all()


def test_a_crash_says_where():
    with pytest.raises(AssertionError, match=r"ended by SIGSEGV\n.*Segmentation fault(?s:.*)in string_at"):
        run_python("import ctypes; ctypes.string_at(0)")


def test_ranks_start_from_a_process_that_has_not_asked_for_devices():
    """Where there are GPUs, ranks are forks of a process that has imported these modules. A first question to CUDA in
    it, such as torch.cuda.is_available(), makes CUDA unusable in all of them."""
    code = """
import importlib
import torch

def refuse(*args, **kwargs):
    raise AssertionError("CUDA was asked")

for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
for name in {modules}:
    importlib.import_module(name)
"""
    run_python(code.format(modules=ranks.PRELOADED))
