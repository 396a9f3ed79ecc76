"""The ops that make the affine map of a state, and of its gradient in reverse, over a run of tokens."""

import accuracy
import pytest
import reference
import torch
from cases import (
    ALL_INSIDE,
    Case,
    activated,
    make_gradients,
    make_inputs,
    parametrize,
    reference_gradients,
    reference_of,
    run_forward,
)
from poison import poisoned
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.flash_qla
MAPS = ("gated_delta_rule_forward_map", "gated_delta_rule_backward_map")

# The ops know neither packed sequences nor other states than V-first ones.
CASES = (
    *(Case(B=2, T=T, K=16, V=24, dtype=torch.float64, state_v_first=True) for T in (0, 1, 64, 150)),
    Case(T=70, H_k=1, H_v=3, K=13, V=5, dtype=torch.float32, state_v_first=True, gate="logsigmoid", scale=0.5),
    Case(
        B=2,
        T=130,
        K=16,
        V=8,
        dtype=torch.float64,
        state_v_first=True,
        keys="raw",
        use_qk_l2norm_in_kernel=True,
        **ALL_INSIDE,
        g_dtype=torch.bfloat16,
        beta_dtype=torch.float16,
    ),
    Case(B=2, T=200, state_v_first=True),
    Case(T=200, state_v_first=True, gate="logsigmoid", dtype=torch.float16, K=64, V=96, strides="heads_first"),
    Case(T=200, state_v_first=True, gate="zero", beta="two", keys="raw", use_qk_l2norm_in_kernel=True, **ALL_INSIDE),
)
FLAGS = ("use_beta_sigmoid_in_kernel", "allow_neg_eigval")


def for_device(case: Case, device: str):
    if device == "cuda" and (case.K % 8 or case.V % 8 or case.dtype in (torch.float32, torch.float64)):
        pytest.skip("the GPU has multiples of 8 as K and V, in bf16 and fp16")


def arguments_of(op: str, case: Case, device: str, with_state: bool = True) -> tuple[tuple, dict]:
    """Tensors that the op requires, and the other arguments by name."""
    inputs = make_inputs(case, device)
    names = ("auto_cp", "use_qk_l2norm_in_kernel", *FLAGS)
    if op == MAPS[0]:
        args = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
        names += ("initial_state", "use_gate_in_kernel", "A_log", "dt_bias")
        options = {name: inputs[name] for name in names if name in inputs}
    else:
        gradients = make_gradients(case, device)
        g_cumsum = run_forward(inputs, output_h=False)[0]
        args = [inputs["q"], inputs["k"], inputs["v"], g_cumsum, inputs["beta"], gradients["do"]]
        options = {name: inputs[name] for name in names if name in inputs}
        options |= {"scale": case.scale, "dht": gradients["dht"]}
    for name in () if with_state else ("initial_state", "dht"):
        options.pop(name, None)
    return tuple(args), options


@parametrize(*CASES)
def test_against_the_recurrence(device, case):
    """A map from a state of its own is what the recurrence makes of that; one from none, applied to it, the same."""
    for_device(case, device)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    expected = reference_gradients(inputs, **gradients)
    b = reference.chunk_cumsum(activated(inputs)["g"])
    for op, state, after in (
        (MAPS[0], inputs["initial_state"], reference_of(inputs).final_state),
        (MAPS[1], gradients["dht"], expected.dh0),
    ):
        made = []
        for with_state in (True, False):
            args, options = arguments_of(op, case, device, with_state)
            with poisoned(device):
                made.append(getattr(ops, op)(*args, **options))
        assert all(x.shape == (case.B, case.H_v, case.V + case.K, case.K) and x.is_contiguous() for x in made)
        from_state, plain = (x.double().tensor_split([case.V], 2) for x in made)
        if not case.T:
            assert torch.equal(from_state[0], state.double())
        for x in (from_state[0], state.double() @ plain[1] + plain[0]):
            if op == MAPS[0]:
                accuracy.check("final_state", x, after, case.dtype, f"map, {case}")
            else:
                accuracy.check_gradients({"dh0": x.to(made[0].dtype)}, expected, case.dtype, f"map, {case}", b)


@pytest.mark.parametrize("op", MAPS)
@parametrize(*CASES)
def test_the_same_every_time(device, op, case):
    for_device(case, device)
    args, options = arguments_of(op, case, device)
    assert torch.equal(getattr(ops, op)(*args, **options), getattr(ops, op)(*args, **options))


@pytest.mark.parametrize("op", MAPS)
@parametrize(*CASES[2:])
def test_opcheck(device, op, case):
    for_device(case, device)
    for requires_grad in (False, True):
        args, options = arguments_of(op, case, device)
        for x in (*args, *options.values()):
            if isinstance(x, torch.Tensor) and requires_grad:
                x.requires_grad_()
        torch.library.opcheck(getattr(ops, op).default, args, options)


@pytest.mark.parametrize("op", MAPS)
@parametrize(*CASES)
def test_fake_output_is_like_the_real_one(device, op, case):
    for_device(case, device)
    args, options = arguments_of(op, case, device)
    real = getattr(ops, op)(*args, **options)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        fake = getattr(ops, op)(*(mode.from_tensor(x) for x in args), **fakes)
    assert (real.shape, real.stride(), real.dtype, real.device) == (fake.shape, fake.stride(), fake.dtype, fake.device)
    assert not real.requires_grad


@pytest.mark.parametrize(
    ("op", "name", "wrong"),
    [
        (MAPS[0], "initial_state", lambda x: x.mT),
        (MAPS[0], "v", lambda x: x[:, :5]),
        (MAPS[0], "g", lambda x: x.long()),
        (MAPS[1], "dht", lambda x: x[:, :1]),
        (MAPS[1], "do", lambda x: x[..., :8]),
        (MAPS[1], "beta", lambda x: x[..., :1]),
    ],
)
def test_errors_name_the_argument(device, op, name, wrong):
    args, options = arguments_of(op, Case(B=2, T=70, K=64, V=128, state_v_first=True), device)
    given = [x.name for x in getattr(ops, op).default._schema.arguments]
    options |= dict(zip(given, args, strict=False))
    with pytest.raises(RuntimeError, match=rf"flash_qla::{op}: {name} .*expected"):
        getattr(ops, op)(**options | {name: wrong(options[name])})


@pytest.mark.gpu
def test_rows_that_the_gpu_does_not_have():
    args, options = arguments_of(MAPS[0], Case(T=70, V=400, state_v_first=True), "cuda")
    with pytest.raises(RuntimeError, match="not supported on the GPU yet"):
        ops.gated_delta_rule_forward_map(*args, **options)
