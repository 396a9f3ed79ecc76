"""The activations of gate and beta inside: g = -exp(A_log) softplus(g_raw + dt_bias), beta = sigmoid(beta_raw) or
twice that. Wrong arguments are in test_errors.py, more of the ops' registration in test_op_registration.py."""

import dataclasses

import accuracy
import pytest
import torch
import torch.nn.functional as F
from cases import (
    ALL_GRADIENTS_OF,
    Case,
    activated,
    check_backward,
    check_forward,
    check_gradients,
    check_outputs,
    expected_outputs,
    make_gradients,
    make_inputs,
    parametrize,
    reference_gradients,
    run_autograd,
    run_backward,
    run_forward,
)
from torch._dynamo.testing import CompileCounterWithBackend

import flash_qla

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GATE = {"use_gate_in_kernel": True}
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
NEGATIVE = {**SIGMOID, "allow_neg_eigval": True}
RAW_BF16 = {"g_dtype": BF16, "beta_dtype": BF16}
INSIDE = {**GATE, **SIGMOID, **RAW_BF16}  # as a layer in bf16 calls it
ALL_FP64 = {"dtype": FP64, "g_dtype": FP64, "beta_dtype": FP64, "A_log": FP64, "dt_bias": FP64}
ALL_FP64 |= {"initial_state": FP64, "dht": FP64}
L2NORM = {"keys": "raw", "use_qk_l2norm_in_kernel": True}
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


LONG_CASES = (  # for the GPU
    Case(T=8192, H_k=2, H_v=8, gate="logsigmoid", **INSIDE),
    Case(T=8192, H_k=2, H_v=8, **INSIDE, **L2NORM),
    Case(lengths=(4095, 3000, 64, 0, 1000), H_k=8, H_v=32, gate="logsigmoid", padding=100, **INSIDE),
    Case(B=4, T=2048, H_k=16, H_v=32, gate="logsigmoid", dtype=FP16, **GATE, **NEGATIVE),
    Case(lengths=(1024,) * 8, H_k=16, H_v=64, gate="logsigmoid", **INSIDE),
    Case(lengths=(1000, 0, 63, 65, 70), padding=70, H_k=8, H_v=24, **INSIDE),
    Case(lengths=(1000, 0, 63, 65, 70), padding=70, H_k=16, H_v=16, **GATE, **NEGATIVE, g_dtype=FP16),
)


@pytest.mark.gpu
@parametrize(*LONG_CASES)
def test_long_on_gpu(case):
    check_forward(case, "cuda")
    check_backward(case, "cuda")


# The formulas


def test_the_range_of_raw_values():
    """Values and slopes are those of PyTorch's softplus and sigmoid, at the threshold and at both ends too."""
    raw = torch.cat([torch.linspace(-45, 45, 181), torch.tensor([-1e4, -300.0, 20.0, 20.1, 300.0, 1e4])]).double()
    T = len(raw)
    case = Case(T=T, H_k=1, H_v=1, K=4, V=4, **ALL_FP64, **GATE, **NEGATIVE)
    inputs, gradients = make_inputs(case, "cpu"), make_gradients(case, "cpu")
    inputs |= {"g": raw.reshape(1, T, 1), "beta": raw.flip(0).reshape(1, T, 1)}
    inputs |= {"A_log": torch.full((1,), -8.0, dtype=FP64), "dt_bias": torch.full((1,), 0.25, dtype=FP64)}
    leaves = {name: inputs[name].clone().requires_grad_() for name in TENSORS}
    g = -leaves["A_log"].exp() * F.softplus(leaves["g"] + leaves["dt_bias"])
    ready = {**activated({**inputs, **leaves}), "g": g, "beta": 2 * leaves["beta"].sigmoid()}
    outputs = flash_qla.chunk_gated_delta_rule(**ready, output_final_state=True)
    expected = torch.autograd.grad(outputs, list(leaves.values()), list(gradients.values()))
    actual = run_autograd(inputs, **gradients)
    for name, x in zip(leaves, expected, strict=True):
        torch.testing.assert_close(actual[ALL_GRADIENTS_OF[name]], x, rtol=1e-9, atol=1e-14)
        assert actual[ALL_GRADIENTS_OF[name]].isfinite().all()


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_the_ends_of_raw_values(device, dtype):
    """Nothing overflows to NaN, where a layer has gone astray."""
    case = Case(T=70, **GATE, **NEGATIVE, g_dtype=dtype, beta_dtype=dtype)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    largest = torch.finfo(dtype).max
    for name in ("g", "beta"):
        inputs[name][:, ::4] = largest
        inputs[name][:, 1::4] = -largest
        inputs[name][:, 2::8] = 88.8
        inputs[name][:, 6::8] = -88.8
    inputs["A_log"].fill_(-4.0)
    assert all(x.isfinite().all() for x in run_forward(inputs)[2:])
    assert all(x.isfinite().all() for x in run_backward(inputs, **gradients).values())


@pytest.mark.parametrize("A_log", (90.0, 80.0, -80.0))
def test_the_ends_of_rates(device, A_log):
    """exp(A_log) overflows in fp32 where its product with the softplus does not: as in fp64."""
    case = Case(T=200, H_k=1, H_v=2, gate="logsigmoid", **GATE)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    x = -A_log + 6 * torch.rand(inputs["g"].shape, generator=torch.Generator().manual_seed(4)) - 5
    x[:, 70:72] = -200.0  # no decay
    x[:, 130:132] = 200.0
    inputs["g"], inputs["A_log"] = x.to(device), torch.full_like(inputs["A_log"], A_log)
    check_outputs(case, inputs, expected_outputs(inputs))
    check_gradients(case, inputs, gradients, reference_gradients(inputs, **gradients))


@pytest.mark.parametrize(("A_log", "g"), ((-float("inf"), 0.0), (float("inf"), -float("inf"))), ids=str)
def test_infinite_rates(device, A_log, g):
    """-inf never decays, inf always forgets."""
    case = Case(T=130, H_k=1, H_v=2, gate="logsigmoid", **GATE)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    inputs["A_log"].fill_(A_log)
    ready = activated(inputs) | {"g": torch.full_like(inputs["g"], g), "beta": inputs["beta"]}
    o, state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    expected = flash_qla.chunk_gated_delta_rule(**ready, output_final_state=True)
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
    actual, expected = run_backward(inputs, **gradients), run_backward(ready, **gradients)
    for name, x in expected.items():
        assert torch.equal(actual[name], torch.zeros_like(x) if name == "dg" else x)
    assert not actual["dA_log"].any() and not actual["ddt_bias"].any()


# Autograd


def test_low_level_results():
    """Six results, and with the gate inside eight; ddt_bias only where there is a bias."""
    case = Case(T=5, K=4, V=4)
    for options, count in (({}, 6), (SIGMOID, 6), (GATE, 8), ({**GATE, "dt_bias": None}, 8)):
        inputs = make_inputs(dataclasses.replace(case, **options), "cpu")
        gradients = make_gradients(case, "cpu")
        g_cumsum, A = run_forward(inputs)[:2]
        g_raw = {"g_raw": inputs["g"]} if "use_gate_in_kernel" in options else {}
        grads = flash_qla.chunk_gated_delta_rule_bwd(**{**inputs, "g": g_cumsum}, A=A, **gradients, **g_raw)
        assert len(grads) == count
        if count == 8:
            assert (grads[7] is None) == ("dt_bias" in options)


def test_autocast_leaves_raw_tensors_alone(device):
    case = Case(T=70, **GATE, **SIGMOID, dtype=FP32)
    inputs = make_inputs(case, device)
    cast = {name: x.bfloat16() if name in ("q", "k", "v") else x for name, x in inputs.items()}
    expected = flash_qla.chunk_gated_delta_rule(**cast)[0]
    with torch.autocast(device, dtype=BF16):
        assert torch.equal(flash_qla.chunk_gated_delta_rule(**inputs)[0], expected)


# torch.compile, torch.export


class Layer(torch.nn.Module):
    """A layer around the op: one projection for gate and beta, parameters for the activations."""

    def __init__(self, H_v: int, device: str):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.project = torch.nn.Linear(8, 2 * H_v, device=device, dtype=BF16)
        self.A_log = torch.nn.Parameter(torch.rand(H_v, generator=generator).to(device))
        self.dt_bias = torch.nn.Parameter(torch.randn(H_v, generator=generator).to(device))

    def forward(self, x, q, k, v, initial_state, cu_seqlens):
        g, beta = self.project(x).chunk(2, -1)
        o, state = flash_qla.chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True,
        )
        return o * 2, state


def layer_inputs(lengths: tuple[int, ...], seed: int, device: str) -> tuple:
    inputs = make_inputs(Case(lengths=lengths, seed=seed), device)
    x = torch.randn(1, sum(lengths), 8, generator=torch.Generator().manual_seed(seed)).to(device, BF16)
    return (x, *(inputs[name] for name in ("q", "k", "v", "initial_state", "cu_seqlens")))


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compile_training_once_for_all_lengths(device, backend):
    torch.manual_seed(0)
    layer = Layer(4, device)
    parameters = list(layer.parameters())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    # No two sizes are equal in the first call: the compiler would take them for one symbol.
    for seed, lengths in enumerate(((65, 30, 1, 0, 4), (3, 200, 64, 2, 7, 0, 1, 70), (30, 0, 5, 9, 0, 0, 8))):
        results = []
        for function in (compiled, layer):
            x, q, k, v, initial_state, cu_seqlens = layer_inputs(lengths, seed, device)
            leaves = [y.requires_grad_() for y in (x, q, k, v, initial_state)]
            outputs = function(*leaves, cu_seqlens)
            loss = outputs[0].float().square().sum() + outputs[1].square().sum()
            results.append((*outputs, *torch.autograd.grad(loss, [*leaves, *parameters])))
        for actual, expected in zip(*results, strict=True):
            assert actual.dtype == expected.dtype
            # Not equal: compiled, the projection's gradients are rounded otherwise.
            assert accuracy.relative_error(actual, expected.double()) <= accuracy.BF16_BAR
    assert counter.frame_count == 1


@torch.no_grad()
def test_export_with_dynamic_lengths(device, tmp_path):
    torch.manual_seed(0)
    layer = Layer(4, device)
    T = torch.export.Dim("T", min=2)
    shapes = {name: {1: T} for name in ("x", "q", "k", "v")}
    shapes |= {name: {0: torch.export.Dim.AUTO} for name in ("initial_state", "cu_seqlens")}
    program = torch.export.export(layer, layer_inputs((65, 30, 4), 0, device), dynamic_shapes=shapes)
    assert "flash_qla.chunk_gated_delta_rule" in str(program.graph) and "softplus" not in str(program.graph)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for lengths in ((65, 30, 4), (200, 0), (1, 2, 3, 4, 64)):
        arguments = layer_inputs(lengths, 1, device)
        assert all(torch.equal(x, y) for x, y in zip(loaded(*arguments), layer(*arguments), strict=True))
