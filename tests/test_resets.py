"""Numbers at the edge: gates of -inf, which forget everything, finite ones that are as good as that, betas of 0 and 2,
keys of zero with the l2norm inside. tests/fuzz.py goes through more of them."""

import dataclasses

import pytest
import reference
import torch
from cases import (
    Case,
    check_backward,
    check_forward,
    check_gradients,
    check_outputs,
    expected_outputs,
    make_gradients,
    make_inputs,
    reference_gradients,
    reference_of,
    run_autograd,
)

import flash_qla

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ALL_FP64 = {"dtype": FP64, "g_dtype": FP64, "beta_dtype": FP64, "A_log": FP64, "dt_bias": FP64}
ALL_FP64 |= {"initial_state": FP64, "dht": FP64}
SMALL = {"T": 200, "H_k": 1, "H_v": 2, "K": 16, "V": 24}
RAW = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
L2NORM = {"keys": "raw", "use_qk_l2norm_in_kernel": True}
# The first and the last token, two in a row, the first and the last one of a chunk, and of a chunk the only ones
RESETS = (0, 20, 21, 63, 64, 128, 150, 199)


def cut(inputs: dict, resets: tuple[int, ...]) -> dict:
    """The inputs of the same tokens where each reset begins a sequence, with a gate of no meaning. B is 1."""
    T, state = inputs["v"].shape[1], inputs["initial_state"]
    g = inputs["g"].clone()
    g[:, list(resets)] = 0
    states = torch.cat([state, state.new_zeros(len(resets), *state.shape[1:])])
    offsets = torch.tensor([0, *resets, T], device=g.device)
    return inputs | {"g": g, "initial_state": states, "cu_seqlens": offsets}


def with_resets(case: Case, device: str, resets=RESETS) -> tuple[dict, dict, dict]:
    """A case's inputs with resets, those cut there, and the gradients of the outputs."""
    inputs = make_inputs(case, device)
    inputs["g"][:, list(resets)] = torch.inf if case.use_gate_in_kernel else -torch.inf
    return inputs, cut(inputs, resets), make_gradients(case, device)


ON_BOTH = (
    Case(**SMALL | {"K": 128, "V": 128}),
    Case(**SMALL | {"K": 128, "V": 128}, dtype=FP16, gate="logsigmoid", state_v_first=True),
    Case(**SMALL | {"K": 128, "V": 128}, gate="logsigmoid", **RAW, **L2NORM, g_dtype=BF16, beta_dtype=BF16),
    Case(**SMALL | {"T": 1000, "K": 128, "V": 128}, gate="zero"),
)
ON_THE_CPU = (
    Case(**SMALL, dtype=FP32, gate="logsigmoid"),
    Case(**SMALL, dtype=FP32, gate="zero", beta="two"),
    Case(**SMALL, dtype=FP32, gate="logsigmoid", **RAW),
    Case(**SMALL, **ALL_FP64, gate="logsigmoid"),
    Case(**SMALL, **ALL_FP64, gate="logsigmoid", **RAW, **L2NORM),
)


@pytest.mark.parametrize(
    ("device", "case"),
    [
        *(("cpu", case) for case in (*ON_BOTH, *ON_THE_CPU)),
        *(pytest.param("cuda", case, marks=pytest.mark.gpu) for case in ON_BOTH),
    ],
    ids=str,
)
def test_as_if_cut(device, case):
    """Every output and gradient, against the recurrence of the sequences cut at the resets, which never sees one."""
    inputs, pieces, gradients = with_resets(case, device)
    exact = reference_of(pieces)
    expected = expected_outputs(inputs) | {"o": exact.o, "final_state": exact.final_state[-1:]}
    check_outputs(case, inputs, expected, str(case))

    dht = gradients["dht"]
    dht_of_pieces = torch.cat([dht.new_zeros(len(RESETS), *dht.shape[1:]), dht])
    exact = reference_gradients(pieces, gradients["do"], dht_of_pieces)
    check_gradients(case, inputs, gradients, dataclasses.replace(exact, dh0=exact.dh0[:1]))
    assert not run_autograd(inputs, **gradients)["dg"][:, list(RESETS)].any()


@pytest.mark.parametrize("dtype", (BF16, FP32, FP64), ids=str)
def test_same_bits_as_cut(dtype):
    """Outputs on the CPU have the same bits for all resets. Gradients have them if the resets are at a chunk's start,
    so that the gates are summed up from the same tokens."""
    case = Case(**SMALL, dtype=dtype, gate="logsigmoid")
    for resets in (RESETS, (64, 128)):
        inputs, pieces, gradients = with_resets(case, "cpu", resets)
        o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
        o_of_pieces, states_of_pieces = flash_qla.chunk_gated_delta_rule(**pieces, output_final_state=True)
        assert torch.equal(o, o_of_pieces) and torch.equal(final_state, states_of_pieces[-1:])
    dht = gradients["dht"]
    actual = run_autograd(inputs, **gradients)
    expected = run_autograd(pieces, gradients["do"], torch.cat([torch.zeros_like(dht)] * 2 + [dht]))
    expected["dh0"] = expected["dh0"][:1]
    for name, x in actual.items():
        assert torch.equal(x, expected[name]), name
    assert not actual["dg"][:, list(resets)].any()


@pytest.mark.parametrize("options", ({}, RAW, RAW | L2NORM), ids=("", "raw", "raw+l2norm"))
@pytest.mark.parametrize("gate", ("hard_resets", "extreme"))
def test_gates(device, gate, options):
    """Other tokens in each head, and gates of every size."""
    case = Case(lengths=(300, 0, 64, 1, 65), padding=3, H_k=2, H_v=4, K=64, V=64, gate=gate, **options)
    check_forward(case, device)
    check_backward(case, device)


def test_beta_of_two(device):
    """A key of norm 1 then mirrors the state. Where keys come again the mirrors cancel, which takes digits."""
    case = Case(T=130, H_k=1, H_v=2, gate="logsigmoid", beta="2")
    check_forward(case, device)
    check_backward(case, device)
    if device == "cpu":
        case = dataclasses.replace(case, keys="repeated", dtype=FP32)
        check_forward(case, device)
        check_backward(case, device)


@pytest.mark.parametrize("gate", ("logsigmoid", "hard_resets"))
def test_beta_of_zero(device, gate):
    """Nothing is written."""
    case = Case(T=130, H_k=1, H_v=2, gate=gate, beta="0")
    check_forward(case, device)
    check_backward(case, device)


EDGES = (-torch.inf, -1e30, -5000.0, -100.0, 0.0, 100.0, 5000.0, 1e30, torch.inf)


@pytest.mark.parametrize("state_dtype", (FP32, BF16), ids=str)
def test_decoding_at_the_edge(device, state_dtype):
    """Raw gates and betas of every size in all pairs, so decays and betas from 0 to 1, a token each; every other key is
    zero. What is below fp32's normal numbers may be zero."""
    a, b = (x.reshape(-1, 1, 1).to(device) for x in torch.cartesian_prod(*[torch.tensor(EDGES)] * 2).unbind(1))
    N, generator = len(a), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(N, 1, 1, size, generator=generator).to(device, BF16) for size in (64, 64, 48))
    k[::2] = 0
    before = torch.randn(N, 1, 48, 64, generator=generator).to(device, state_dtype)
    pool, A_log = before.clone(), torch.zeros(1, device=device)
    o = flash_qla.decode_gated_delta_rule(q, k, v, a, b, A_log, None, pool, torch.arange(N, device=device))
    expected = reference.gated_delta_rule(
        q,
        k,
        v,
        a,
        b,
        initial_state=before,
        use_qk_l2norm_in_kernel=True,
        state_v_first=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        use_beta_sigmoid_in_kernel=True,
    )
    for actual, exact in ((o, expected.o), (pool, expected.final_state)):
        assert actual.isfinite().all()
        errors = (actual.double().cpu() - exact.cpu()).flatten(1).norm(dim=1)
        assert (errors <= 4e-3 * exact.cpu().flatten(1).norm(dim=1) + 1e-36).all()
    forgotten = (a.flatten() > 1000) & (torch.arange(N, device=device) % 2 == 0)
    assert forgotten.any() and not pool[forgotten].any()


def test_the_reference_forgets():
    """The reference's sums of gates begin anew after a reset."""
    g = torch.tensor([-1.0, -torch.inf, -2.0, -3.0, -torch.inf, -torch.inf])[None, :, None]
    sums = reference.chunk_cumsum(g).flatten().tolist()
    assert sums == [-1.0, -torch.inf, -2.0, -5.0, -torch.inf, -torch.inf]
