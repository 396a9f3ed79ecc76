"""The backward on every device, against the fp64 recurrence in reverse. test_pairs.py has all arguments, in all
pairs."""

import accuracy
import pytest
import torch
from cases import (
    GRADIENT_OF,
    Case,
    equal,
    make_gradients,
    make_inputs,
    reference_gradients,
    run_all,
    run_backward,
)

import flash_qla

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BY_TOKEN = ("dq", "dk", "dv", "db", "dg")


# Gates


@pytest.mark.parametrize("gate", ("underflow", "softplus"))
def test_strong_decay_forgets_without_nan(device, gate):
    """Huge states and gradients of states at the two ends leave no trace 64 tokens further, and no 0 * inf."""
    case = Case(T=192, H_k=1, H_v=1, gate=gate, state_scale=1e4)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    gradients["dht"] *= 1e5
    expected = reference_gradients(inputs, **gradients)
    actual = run_backward(inputs, **gradients)
    assert all(x.isfinite().all() for x in actual.values())
    for name in BY_TOKEN:
        size = expected.sizes[name][:, 64:128] if name in expected.sizes else None
        middle = actual[name][:, 64:128], getattr(expected, name)[:, 64:128]
        accuracy.check(name, *middle, dtype=BF16, case=case, size=size)
    accuracy.check("dh0", actual["dh0"], expected.dh0, dtype=BF16, case=case)


# States and their gradients


def test_zero_length_sequences_pass_the_gradient_through(device):
    case = Case(lengths=(0, 70, 0))
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    dh0 = run_backward(inputs, **gradients)["dh0"]
    assert torch.equal(dh0[0::2], gradients["dht"][0::2])
    assert not run_backward(inputs, gradients["do"])["dh0"][0::2].any()
    for case in (Case(lengths=(0, 0), padding=3), Case(B=2, T=0)):
        inputs, gradients = make_inputs(case, device), make_gradients(case, device)
        dh0 = run_backward(inputs, **gradients)["dh0"]
        assert torch.equal(dh0, gradients["dht"])
        assert dh0.untyped_storage().data_ptr() != gradients["dht"].untyped_storage().data_ptr()
        assert not run_backward(inputs, gradients["do"])["dh0"].any()


# The gradient of o


@pytest.mark.parametrize("dtype", (FP16, FP32, FP64), ids=str)
def test_dtype_of_the_gradient(device, dtype):
    case = Case(B=2, T=70)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    do = (gradients["do"] * 16).round() / 16  # which no conversion changes
    assert equal(run_backward(inputs, do.to(dtype)), run_backward(inputs, do))


# Arguments of the forward


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_l2norm_of_zero_and_tiny_vectors(device, dtype):
    """eps = 1e-6 under the root: the gradient of a zero vector is a thousand times that of its norm's, not NaN."""
    case = Case(T=70, keys="raw", use_qk_l2norm_in_kernel=True, gate="logsigmoid", dtype=dtype)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    inputs["q"][:, 3] = 0
    inputs["k"][:, 5] = 0
    for x in (inputs["q"][:, 10:20], inputs["k"][:, 15:25]):
        x *= 1e-3 / x.norm(dim=-1, keepdim=True)
    expected = reference_gradients(inputs, **gradients)
    actual = run_backward(inputs, **gradients)
    for name, x in actual.items():
        size = expected.sizes.get(name)
        accuracy.check(name, x, getattr(expected, name), dtype=dtype, case="tiny q and k", size=size)
    for tokens in (slice(3, 4), slice(4, 10), slice(10, 20), slice(25, 70)):  # sizes differ by a factor of a thousand
        for name in ("dq", "dk"):
            x, y = actual[name][:, tokens], getattr(expected, name)[:, tokens]
            accuracy.check(name, x, y, dtype=dtype, case=f"tiny q and k, {tokens}")


def test_expanded_inputs(device):
    """Stride 0 over heads, tokens and batch, in both passes, and of the final state's gradient; each element has its
    own gradient, as if it were another number."""
    inputs = make_inputs(Case(B=1, T=1, H_k=1, H_v=1, initial_state=None), device)
    shapes = {"q": (2, 70, 2, 128), "k": (2, 70, 2, 128), "v": (2, 70, 4, 128), "g": (2, 70, 4), "beta": (2, 70, 4)}
    expanded = {name: inputs[name].expand(shape) for name, shape in shapes.items()}
    expanded["initial_state"] = torch.ones((), device=device).expand(2, 4, 128, 128)
    arguments = inputs | expanded | make_gradients(Case(B=2, T=70), device)
    arguments["dht"] = torch.full((), 0.1, device=device).expand(arguments["dht"].shape)
    copies = {name: x.contiguous() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    assert equal(run_all(arguments), run_all(copies))


# Which gradients are made


def test_backward_twice(device):
    """The graph is kept, and the second time gives the same bits, added to the first."""
    inputs = make_inputs(Case(T=70), device)
    leaves = [inputs[name].requires_grad_() for name in GRADIENT_OF]
    loss = flash_qla.chunk_gated_delta_rule(**inputs)[0].float().square().sum()
    loss.backward(retain_graph=True)
    once = [x.grad.clone() for x in leaves]
    loss.backward()
    assert all(torch.equal(x.grad, dx + dx) for x, dx in zip(leaves, once, strict=True))
