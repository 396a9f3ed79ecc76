"""The tests' own tools: a reference that were wrong, a metric that let NaN pass or a poison that did not poison would
make every other test worthless."""

import accuracy
import pytest
import reference
import torch
from cases import Case, make_inputs, reference_of
from poison import fill_free_cuda_blocks, poisoned

import flash_qla

LENGTHS = (70, 0, 3, 128)
CASE = Case(lengths=LENGTHS, padding=5, H_k=2, H_v=6, K=5, V=3, dtype=torch.float64, keys="long", beta="stable")


def test_reference_is_the_formula():
    """Against plain loops over sequences, heads and tokens, straight from the definition."""
    inputs = make_inputs(CASE, "cpu")
    q, k, v, g, beta = (inputs[name][0] for name in ("q", "k", "v", "g", "beta"))
    expected = reference_of(inputs)
    chunk = 0
    start = 0
    for n, length in enumerate(LENGTHS):
        for head in range(6):
            S = inputs["initial_state"][n, head].double()
            for t in range(length):
                if t % 64 == 0:
                    torch.testing.assert_close(expected.h[0, chunk + t // 64, head], S, rtol=1e-12, atol=1e-12)
                row, k_head = start + t, head // 3
                k_t, q_t = k[row, k_head], q[row, k_head]
                S = g[row, head].double().exp() * S
                S = S + beta[row, head].double() * torch.outer(k_t, v[row, head] - S.T @ k_t)
                o = 5**-0.5 * S.T @ q_t
                torch.testing.assert_close(expected.o[0, row, head], o, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(expected.final_state[n, head], S, rtol=1e-12, atol=1e-12)
        chunk += -(-length // 64)
        start += length
    assert not expected.o[0, start:].any() and not expected.h[0, chunk:].any()


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


def test_metric_rejects_what_it_should():
    expected = torch.randn(1, 128, 2, 64, dtype=torch.float64)
    accuracy.check("o", expected.bfloat16(), expected, torch.bfloat16, "rounded")
    before = dict(accuracy.worst)

    def fails(actual, expected=expected):
        with pytest.raises(AssertionError):
            accuracy.check("o", actual, expected, torch.bfloat16, "wrong")

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
    accuracy.check("o", zero, zero, torch.bfloat16, "zero")
    fails(zero + 1e-30, zero)
    fails(zero * float("nan"), zero)
    accuracy.worst.clear()
    accuracy.worst.update(before)


def test_poison_fills_what_torch_empty_returns(device):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        with poisoned(device):
            made = [
                torch.empty(1000, dtype=dtype, device=device),
                torch.empty_strided((5, 4), (1, 5), dtype=dtype, device=device),
            ]
            made.append(made[0].new_empty(3, 3))
        for x in made:
            assert x.isnan().all()
    with poisoned(device):
        assert (torch.empty(9, dtype=torch.int32, device=device) != 0).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_poison_reaches_allocations_made_inside_the_op(device):
    """Every allocation the op makes through PyTorch is seen to be filled."""
    inputs = make_inputs(Case(T=64, H_k=1, H_v=1), device)
    with poisoned(device), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    inside = [event for event in profile.events() if event.name.startswith("aten::") and "empty" in event.name]
    leaves = [event for event in inside if not any("empty" in child.name for child in event.cpu_children)]
    assert len(leaves) >= 2  # o and final_state
    for event in leaves:
        assert any("fill_" in child.name for child in event.cpu_children), event


@pytest.mark.gpu
def test_poison_fills_free_cuda_blocks():
    for size in (300, 40_000, 3_000_000, 30_000_000):
        del_me = torch.zeros(size, device="cuda")
        del del_me
        fill_free_cuda_blocks()
        assert torch.empty(size, device="cuda").isnan().all()
