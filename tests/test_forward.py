"""The forward on every device, and lengths and dtypes of both passes, against the fp64 recurrence. test_pairs.py has
all arguments, in all pairs."""

import dataclasses

import pytest
import torch
from accuracy import check
from cases import (
    LONG_CASES,
    Case,
    check_backward,
    check_forward,
    forward_mode,
    make_inputs,
    parametrize,
    reference_of,
    run_forward,
)

import flash_qla

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def check_both_passes(case: Case, device: str) -> None:
    check_forward(case, device)
    check_backward(case, device)


# Lengths


@pytest.mark.long
@parametrize(
    Case(T=4095, H_k=1, H_v=2),
    Case(T=4095, H_k=1, H_v=2, gate="logsigmoid", dtype=FP16, state_v_first=True),
    Case(lengths=(2500, 1, 600), H_k=1, H_v=2, gate="logsigmoid", padding=3),
)
def test_long(device, case):
    check_both_passes(case, device)


@pytest.mark.gpu
@parametrize(*LONG_CASES, Case(T=4095, H_k=1, H_v=2, gate="logsigmoid", dtype=FP16, state_v_first=True))
def test_long_on_gpu(case):
    check_both_passes(case, "cuda")


# Gates


@pytest.mark.gpu
@pytest.mark.parametrize("auto_cp", (True, False))
def test_gates_near_the_context_parallel_threshold(auto_cp):
    """Long sequences on few heads, whose start still shows at their end by factors from e^-4 to e^-48 and more, and the
    other way round in gradients; small beta and a large initial state make the state's own decay the thing that is
    tested."""
    case = Case(T=2048, H_k=1, H_v=4, gate="near_threshold", beta="0.01", state_scale=30, auto_cp=auto_cp)
    check_both_passes(case, "cuda")
    check_both_passes(dataclasses.replace(case, T=4096, H_v=16), "cuda")


@pytest.mark.parametrize("gate", ("underflow", "softplus"))
def test_strong_decay_forgets_without_nan(device, gate):
    """A huge state before a run of strong gates leaves no trace, and no 0 * inf."""
    case = Case(T=192, H_k=1, H_v=1, gate=gate, state_scale=1e4)
    inputs = make_inputs(case, device)
    o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    reference = reference_of(inputs)
    check("final_state", final_state, reference.final_state, dtype=BF16, case=case)
    check("o", o[:, 64:], reference.o[:, 64:], dtype=BF16, case=case)


# Heads


@pytest.mark.gpu
@pytest.mark.parametrize("l2norm", ({}, {"keys": "raw", "use_qk_l2norm_in_kernel": True}), ids=("", "l2norm"))
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
@pytest.mark.parametrize(
    ("heads", "heads_per_cta"), (((16, 16), 1), ((8, 16), 2), ((8, 24), 3), ((8, 32), 4), ((4, 32), 4))
)
def test_value_heads_that_share_a_cta(heads, heads_per_cta, dtype, l2norm):
    """A CTA has all heads of a group, up to four, if there are enough chunks for every SM."""
    from flash_qla import _C

    case = Case(lengths=(1000, 0, 63, 65, 70), padding=70, H_k=heads[0], H_v=heads[1], dtype=dtype, **l2norm)
    T, N = sum(case.lengths) + case.padding, len(case.lengths)
    sm_count = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert _C.forward_dispatch(1, T, N, *heads, sm_count=sm_count).heads_per_cta == heads_per_cta
    check_both_passes(case, "cuda")


# State


def test_zero_length_sequences_pass_the_state_through(device):
    inputs = make_inputs(Case(lengths=(0, 70, 0)), device)
    _, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert torch.equal(final_state[0::2], inputs["initial_state"][0::2])
    inputs["initial_state"] = None
    _, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert not final_state[0::2].any()


def test_continuing_from_the_final_state(device):
    """Two halves with the state handed over are the whole."""
    case = Case(B=2, T=200, gate="logsigmoid")
    inputs = make_inputs(case, device)
    expected = reference_of(inputs)
    parts, state = [], inputs["initial_state"]
    for tokens in (slice(0, 77), slice(77, 200)):
        part = {name: x[:, tokens] if name in ("q", "k", "v", "g", "beta") else x for name, x in inputs.items()}
        part["initial_state"] = state
        o, state = flash_qla.chunk_gated_delta_rule(**part, output_final_state=True)
        parts.append(o)
    check("o", torch.cat(parts, 1), expected.o, dtype=BF16, case=case)
    check("final_state", state, expected.final_state, dtype=BF16, case=case)


def test_only_what_is_asked_for(device):
    inputs = make_inputs(Case(T=70), device)
    o, final_state = flash_qla.chunk_gated_delta_rule(**inputs)
    assert final_state is None
    o_fwd, h, final_state = run_forward(inputs, output_h=False, output_final_state=False)[2:]
    assert h is None and final_state is None
    expected = reference_of(inputs)
    check("o", o, expected.o, dtype=BF16, case="o alone")
    check("o", o_fwd, expected.o, dtype=BF16, case="o, g_cumsum and A")
    tensors = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    assert flash_qla.chunk_gated_delta_rule_intermediates(*tensors)[4] is not None


# Arguments


def test_l2norm_of_zero_and_tiny_vectors(device):
    """eps = 1e-6 under the root: zero stays zero, and a vector of length 1e-3 comes out with length 1/sqrt(2)."""
    inputs = make_inputs(Case(T=70, keys="raw", use_qk_l2norm_in_kernel=True, gate="logsigmoid"), device)
    inputs["q"][:, 3] = 0
    inputs["k"][:, 5] = 0
    for x in (inputs["q"][:, 10:20], inputs["k"][:, 15:25]):
        x *= 1e-3 / x.norm(dim=-1, keepdim=True)
    expected = reference_of(inputs)
    o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    check("o", o, expected.o, dtype=BF16, case="tiny q and k")
    check("final_state", final_state, expected.final_state, dtype=BF16, case="tiny q and k")
    assert not o[:, 3].any()


# Keys and beta


@pytest.mark.gpu
@pytest.mark.parametrize("fused", (0, 1), ids=("two_kernels", "fused"))
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_keys_that_are_alike(dtype, fused):
    """Rounding grows in the inverse of their chunks. Factors of one TF32 part would take fp16 beyond its bar."""
    with forward_mode(fused=fused):
        check_forward(Case(T=300, keys="alike", gate="zero", dtype=dtype), "cuda")


# Isolation: nothing crosses from padding or from one sequence to another


def test_tokens_do_not_look_ahead(device):
    """Changing token t changes no output before t, not by a bit, within its chunk included."""
    inputs = make_inputs(Case(T=150, gate="logsigmoid"), device)
    before = flash_qla.chunk_gated_delta_rule(**inputs)[0]
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 100:] *= 0.5
    after = flash_qla.chunk_gated_delta_rule(**inputs)[0]
    assert torch.equal(after[:, :100], before[:, :100])
    assert (after[:, 100:] != before[:, 100:]).any(-1).all()


# The CPU alone: fp32 and fp64, any head dimension


@parametrize(
    Case(T=1030, H_k=1, H_v=2, dtype=FP32, gate="logsigmoid"),
    Case(T=1030, H_k=1, H_v=2, gate="zero", dtype=FP64, g_dtype=FP64, beta_dtype=FP64, initial_state=FP64, dht=FP64),
    *(Case(T=130, H_k=1, K=K, V=V, dtype=FP64) for K, V in ((1, 1), (129, 33), (256, 128))),
)
def test_cpu_dtypes_and_head_dims(case):
    check_both_passes(case, "cpu")
