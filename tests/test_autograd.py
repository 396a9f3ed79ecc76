"""The ops under autograd and what builds on it: gradcheck, torch.compile, checkpointing, autocast, DDP."""

import contextlib
import dataclasses

import accuracy
import pytest
import torch
from cases import (
    ALL_GRADIENTS_OF,
    ALL_INSIDE,
    GRADIENT_OF,
    Case,
    forward_mode,
    make_gradients,
    make_inputs,
    run_backward,
)
from dispatched import Ran
from every_op import NAMES, make_call
from reference import one_thread
from subprocesses import run_side_by_side
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flash_qla

FP64 = torch.float64
ALL_FP64 = dict.fromkeys(("dtype", "g_dtype", "beta_dtype", "initial_state", "dht", "A_log", "dt_bias"), FP64)
INSIDE = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
L2NORM = {"keys": "raw", "use_qk_l2norm_in_kernel": True}
INPUTS = ("q", "k", "v", "g", "beta")
SLOW_BATCHES = pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap calls an op for each sample


def both_functions(inputs: dict, names=tuple(GRADIENT_OF)):
    """(o, final_state) of each, as functions of the inputs with these names."""

    def high_level(*leaves):
        arguments = {**inputs, **dict(zip(names, leaves, strict=True))}
        return flash_qla.chunk_gated_delta_rule(**arguments, output_final_state=True)

    def low_level(*leaves):
        arguments = {**inputs, **dict(zip(names, leaves, strict=True))}
        _, _, o, _, final_state = flash_qla.chunk_gated_delta_rule_intermediates(**arguments)
        return o, final_state

    return high_level, low_level


def leaves_of(inputs: dict, names=tuple(GRADIENT_OF)) -> list[torch.Tensor]:
    return [inputs[name].detach().requires_grad_() for name in names]


# The formula


@pytest.mark.parametrize("name", (*GRADIENT_OF, "A_log", "dt_bias"))
@pytest.mark.parametrize("loss", ("o", "state", "both"))
def test_a_gradient_of_one_tensor(name, loss, device):
    """The bits of its gradient among all, whatever else wants none."""
    inputs = make_inputs(Case(lengths=(70, 3), use_gate_in_kernel=True), device)
    gradients = make_gradients(Case(lengths=(70, 3)), device)
    used = {"o": slice(1), "state": slice(1, 2), "both": slice(2)}[loss]
    for function in (flash_qla.chunk_gated_delta_rule, torch.ops.flash_qla.chunk_gated_delta_rule):

        def gradient(leaf_names, function=function):
            leaves = {x: inputs[x].detach().requires_grad_() for x in leaf_names}
            outputs = function(**inputs | leaves, output_final_state=True)
            dy = list(gradients.values())[used]
            return torch.autograd.grad(outputs[used], leaves[name], dy, allow_unused=True)[0]

        expected = gradient((*GRADIENT_OF, "A_log", "dt_bias"))
        assert torch.equal(gradient([name]), expected)
        with Ran() as ran:
            assert torch.equal(gradient([name]), expected)
        assert ran.ops == ["chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd"]
        assert expected.any() or (name, loss) == ("q", "state")


@pytest.mark.parametrize(
    ("fast_mode", "case"),
    (
        (False, Case(B=2, T=3, H_k=1, H_v=2, K=3, V=2, **ALL_FP64)),
        (False, Case(lengths=(2, 0, 3), H_k=2, H_v=2, K=2, V=3, state_v_first=True, scale=0.7, **ALL_FP64)),
        (False, Case(T=4, H_k=1, H_v=3, K=2, V=2, keys="raw", use_qk_l2norm_in_kernel=True, **ALL_FP64)),
        (True, Case(B=2, T=70, H_k=2, H_v=4, K=5, V=3, gate="logsigmoid", **ALL_FP64)),
        (True, Case(lengths=(66, 0, 3), H_k=1, H_v=2, K=4, V=9, state_v_first=True, **ALL_FP64)),
        (True, Case(lengths=(66, 5), H_k=1, H_v=3, K=4, V=4, keys="raw", use_qk_l2norm_in_kernel=True, **ALL_FP64)),
        (False, Case(B=2, T=3, H_k=1, H_v=2, K=3, V=2, **ALL_FP64, **ALL_INSIDE)),
        (False, Case(lengths=(2, 0, 3), H_v=2, K=2, V=3, state_v_first=True, **ALL_FP64, **INSIDE)),
        (True, Case(lengths=(66, 0, 3), H_k=1, H_v=2, K=4, V=9, gate="logsigmoid", **ALL_FP64, **INSIDE)),
        (True, Case(B=2, T=70, H_k=1, H_v=3, K=4, V=4, gate="logsigmoid", **ALL_FP64, **ALL_INSIDE, **L2NORM)),
    ),
    ids=str,
)
def test_gradcheck(fast_mode, case):
    """The gradients are right, also with each output's gradient undefined in turn."""
    inputs = make_inputs(case, "cpu")
    names = [name for name in ALL_GRADIENTS_OF if inputs.get(name) is not None]
    if case.use_gate_in_kernel:  # a head whose gate is 0 has -inf as its raw gate, which cannot be moved
        inputs["g"] = inputs["g"].clamp_min(-5.0)
    with one_thread():
        for function in both_functions(inputs, names):
            assert torch.autograd.gradcheck(function, leaves_of(inputs, names), fast_mode=fast_mode)


def test_both_functions_have_the_same_gradients(device):
    case = Case(lengths=(70, 3))
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    expected = run_backward(inputs, **gradients)
    for function in both_functions(inputs):
        leaves = leaves_of(inputs)
        actual = torch.autograd.grad(function(*leaves), leaves, tuple(gradients.values()))
        assert all(torch.equal(dx, expected[name]) for dx, name in zip(actual, GRADIENT_OF.values(), strict=True))


def test_what_requires_a_gradient(device):
    inputs = make_inputs(Case(T=70), device)
    inputs["k"].requires_grad_()
    o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert o.requires_grad and final_state.requires_grad
    g_cumsum, A, o, h, final_state = flash_qla.chunk_gated_delta_rule_intermediates(**inputs, output_h=True)
    assert o.requires_grad and final_state.requires_grad
    assert not any(x.requires_grad for x in (g_cumsum, A, h))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not flash_qla.chunk_gated_delta_rule(**inputs)[0].requires_grad


@SLOW_BATCHES
def test_double_backward_says_that_it_is_missing(device):
    """First derivatives with create_graph are what they are without."""
    case = Case(T=70)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    leaves = leaves_of(inputs)
    outputs = both_functions(inputs)[0](*leaves)
    first = torch.autograd.grad(outputs, leaves, tuple(gradients.values()), create_graph=True)
    expected = run_backward(inputs, **gradients)
    assert all(torch.equal(dx, expected[name]) for dx, name in zip(first, GRADIENT_OF.values(), strict=True))
    for dx in first:
        with pytest.raises(NotImplementedError, match=r"chunk_gated_delta_rule.*double backward"):
            dx.sum().backward(retain_graph=True)
    with pytest.raises(NotImplementedError, match=r"chunk_gated_delta_rule.*double backward"):
        torch.func.jacrev(torch.func.grad(lambda q: both_functions(inputs)[0](q, *leaves[1:])[0].sum()))(leaves[0])


# Transforms


@pytest.mark.parametrize(
    "case", (Case(T=70), Case(lengths=(70, 0, 3), keys="raw", use_qk_l2norm_in_kernel=True)), ids=str
)
def test_func_gradients(device, case):
    """torch.func.vjp and grad give what autograd gives, at every level of nesting."""
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    expected = run_backward(inputs, **gradients)
    names = GRADIENT_OF.values()
    everything = tuple(range(len(GRADIENT_OF)))
    for function in both_functions(inputs):
        leaves = leaves_of(inputs)
        _, pull_back = torch.func.vjp(function, *leaves)
        for dx, name in zip(pull_back(tuple(gradients.values())), names, strict=True):
            assert torch.equal(dx, expected[name])

        def loss(*leaves, function=function):
            return sum((x * dx).sum() for x, dx in zip(function(*leaves), gradients.values(), strict=True))

        def inside(scale, *leaves, loss=loss):
            return scale * torch.func.vjp(loss, *leaves)[0]

        in_one, in_two = torch.func.grad(loss, everything), torch.func.grad(inside, tuple(i + 1 for i in everything))
        for grads in (in_one(*leaves), in_two(torch.ones((), device=device), *leaves)):
            for dx, name in zip(grads, names, strict=True):
                assert accuracy.relative_error(dx, expected[name].double()) <= accuracy.BF16_BAR, name


@SLOW_BATCHES
def test_vmap(device):
    """vmap over outputs, and over gradients, makes one call after the other."""
    case = Case(lengths=(70, 0, 3), state_v_first=True)
    inputs = make_inputs(case, device)
    q = torch.stack([inputs["q"], inputs["q"].flip(1), inputs["k"]])

    def run(q):
        return flash_qla.chunk_gated_delta_rule(**inputs | {"q": q}, output_final_state=True)

    def gradient(q):
        return torch.func.grad(lambda q: run(q)[0].float().square().sum())(q)

    for function in (run, gradient, torch.func.grad(lambda q: torch.vmap(run)(q[None])[0].float().square().sum())):
        one_by_one = [function(x) for x in q]
        together = torch.vmap(function)(q)
        if torch.is_tensor(together):
            one_by_one, together = [(x,) for x in one_by_one], (together,)
        for expected, actual in zip(zip(*one_by_one, strict=True), together, strict=True):
            assert torch.equal(actual, torch.stack(expected))


@SLOW_BATCHES
def test_forward_mode_says_that_it_is_missing(device):
    """Whether or not an input requires a gradient. Without a tangent nothing is wrong."""
    inputs = make_inputs(Case(T=70), device)
    for function in both_functions(inputs):
        leaves = leaves_of(inputs)
        for primals in (leaves, [x.detach() for x in leaves]):

            def of_q(q, function=function, primals=primals):
                return function(q, *primals[1:])[0].float().sum()

            q = primals[0].detach()
            for transform in (torch.func.jacfwd, torch.func.hessian):
                with pytest.raises(NotImplementedError, match="chunk_gated_delta_rule has no forward-mode derivative"):
                    transform(of_q)(q)
            with forward_ad.dual_level():
                assert torch.equal(function(*primals)[0], function(*leaves)[0])
                with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                    of_q(forward_ad.make_dual(q, q))
        o = function(*leaves)[0]
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.autograd.grad(o, leaves, forward_ad.make_dual(o.detach(), o.detach()))
        o, pull_back = torch.func.vjp(lambda *leaves, function=function: function(*leaves)[0], *leaves)
        with pytest.raises(NotImplementedError, match="chunk_gated_delta_rule_bwd has no forward-mode derivative"):
            torch.func.jvp(pull_back, (o,), (o,))


@pytest.mark.parametrize("name", sorted({*NAMES} - {"chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd"}))
def test_ops_without_derivatives_say_so_in_forward_mode(device, name):
    """Otherwise they would pass for constants. Without a tangent nothing is wrong."""
    call = make_call(name, device)
    message = rf"{name.removesuffix('_begin')}\w* has no forward-mode derivative"
    floating = [x for x, value in call.arguments.items() if torch.is_tensor(value) and value.is_floating_point()]
    for argument in floating:
        x = call.arguments[argument].clone()

        def run(x, argument=argument):
            return dataclasses.replace(call, arguments=call.arguments | {argument: x})()

        with pytest.raises(NotImplementedError, match=message):
            torch.func.jvp(run, (x,), (x,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            run(forward_ad.make_dual(x, x))
    with forward_ad.dual_level():
        call()


# Memory and time that only training pays


@pytest.mark.parametrize(
    "case",
    (
        Case(B=2, T=70),
        Case(lengths=(70, 0, 3), padding=2, H_v=6, keys="raw", use_qk_l2norm_in_kernel=True),
        Case(lengths=(70, 0, 3), use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True),
    ),
    ids=str,
)
def test_autograd_saves_only_inputs(device, case):
    inputs = make_inputs(case, device)
    leaves = leaves_of(inputs)
    input_pointers = {x.untyped_storage().data_ptr() for x in (*leaves, *inputs.values()) if torch.is_tensor(x)}
    saved = set()

    def pack(x):
        saved.add(x.untyped_storage().data_ptr())
        return x

    for function in both_functions(inputs):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            function(*leaves)
        assert saved and saved <= input_pointers


def test_training_runs_the_op_of_inference(device):
    """It computes neither g_cumsum nor A."""
    inputs = make_inputs(Case(T=70), device)

    def ops_called(inputs):
        with Ran() as ran:
            flash_qla.chunk_gated_delta_rule(**inputs)
        return ran.ops

    training = {**inputs, "v": inputs["v"].detach().requires_grad_()}
    assert ops_called(inputs) == ["chunk_gated_delta_rule"]
    with torch.no_grad():
        assert ops_called(training) == ["chunk_gated_delta_rule"]
    assert ops_called(training) == ["chunk_gated_delta_rule"]


# torch.compile


def test_compile_a_loss_and_its_gradients(device):
    """Dense, and with the backward's expanded gradient inside the graph."""

    def loss(q, k, v, g, beta):
        return flash_qla.chunk_gated_delta_rule(q, k, v, g, beta)[0].float().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(Case(B=2, T=70, initial_state=None), device)
    results = []
    for function in (compiled, loss):
        leaves = [inputs[name].detach().requires_grad_() for name in INPUTS]
        results.append(torch.autograd.grad(function(*leaves), leaves))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_compiled_autograd(device):
    """A compiler that traces the backward of an eager call sees all that the call has kept."""
    inputs, gradients = (make(Case(lengths=(70, 3), scale=0.3), device) for make in (make_inputs, make_gradients))
    results = []
    for compiler in (None, torch.compile(backend="aot_eager")):
        torch._dynamo.reset()
        leaves = leaves_of(inputs)
        outputs = both_functions(inputs)[0](*leaves)
        with compiled_autograd._enable(compiler) if compiler else contextlib.nullcontext():
            torch.autograd.backward(outputs, tuple(gradients.values()))
        results.append([x.grad for x in leaves])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# Recomputation


@pytest.mark.parametrize("use_reentrant", (True, False), ids=("reentrant", "not_reentrant"))
def test_checkpoint(device, use_reentrant):
    """The same bits as without, if the first pass, which has no gradients if reentrant, takes the same kernels."""
    case = Case(lengths=(70, 3), keys="raw")
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    function, results = both_functions(inputs | {"use_qk_l2norm_in_kernel": True})[0], []
    for recompute in (False, True):
        leaves = leaves_of(inputs)
        with forward_mode(fused=0):
            outputs = checkpoint(function, *leaves, use_reentrant=use_reentrant) if recompute else function(*leaves)
            torch.autograd.backward(outputs, tuple(gradients.values()))
        results.append([*outputs, *(x.grad for x in leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# Autocast


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast(device, dtype):
    """q, k and v come to the autocast dtype; g, beta and states stay. Gradients have the dtypes of the inputs."""
    case = Case(T=70, dtype=torch.float32)
    inputs, gradients = make_inputs(case, device), make_gradients(case, device)
    inputs["v"] = inputs["v"].to(torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)
    gradients["do"] = gradients["do"].to(dtype)
    cast = {name: x.to(dtype) if name in ("q", "k", "v") else x for name, x in inputs.items()}
    expected = run_backward(cast, **gradients)
    expected_o = flash_qla.chunk_gated_delta_rule(**cast)[0]
    for function in both_functions(inputs):
        leaves = leaves_of(inputs)
        with torch.autocast(device, dtype=dtype):
            o, final_state = function(*leaves)
        assert o.dtype == dtype and final_state.dtype == torch.float32
        assert accuracy.relative_error(o, expected_o.double()) <= accuracy.BARS[dtype]
        actual = torch.autograd.grad((o, final_state), leaves, tuple(gradients.values()))
        for leaf, dx, name in zip(leaves, actual, GRADIENT_OF.values(), strict=True):
            assert dx.dtype == leaf.dtype
            assert torch.equal(dx, expected[name].to(leaf.dtype)), name


def test_autocast_leaves_fp64_alone():
    inputs = make_inputs(Case(T=5, K=4, V=4, **ALL_FP64), "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = flash_qla.chunk_gated_delta_rule(**inputs)[0]
    assert torch.equal(o, flash_qla.chunk_gated_delta_rule(**inputs)[0])


# Several processes

DDP = """
import datetime, os
import torch
import torch.distributed as dist
import flash_qla

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 2 * (8 + 8 + 8) + 4)

    def forward(self, x):
        q, k, v, gates = self.project(x).split((16, 16, 16, 4), -1)
        q, k, v = (y.unflatten(-1, (2, 8)) for y in (q, k, v))
        g, beta = torch.nn.functional.logsigmoid(gates).chunk(2, -1)
        return flash_qla.chunk_gated_delta_rule(q, k, v, g, beta.exp(), use_qk_l2norm_in_kernel=True)[0]

def gradients(module, x):
    module(x).square().mean().backward()
    return [parameter.grad for parameter in module.parameters()]

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(4, 70, 16, dtype=torch.float64)
joint, layer = (Layer().double() for _ in range(2))
layer.load_state_dict(joint.state_dict())
rank = int(os.environ["RANK"])
dist.init_process_group(
    "gloo",
    init_method="file://" + os.environ["STORE"],
    rank=rank,
    world_size=2,
    timeout=datetime.timedelta(seconds=60),
)
parallel = torch.nn.parallel.DistributedDataParallel(layer)
for expected, actual in zip(gradients(joint, x), gradients(parallel, x[rank::2])):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-14)
# In order: its threads end while the other process still answers, and before the interpreter does.
del parallel
dist.barrier()
dist.destroy_process_group()
print("equal")
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_distributed_data_parallel(tmp_path):
    """Two processes on the CPU, half of the batch each, end up with the gradients of the whole. They meet in a file and
    talk over the loopback interface."""
    environment = {"STORE": str(tmp_path / "store"), "GLOO_SOCKET_IFNAME": "lo", "FLASH_QLA_QUIET": "1"}
    outputs = run_side_by_side(DDP, [{**environment, "RANK": str(rank)} for rank in range(2)])
    assert [output.split()[-1] for output in outputs] == ["equal"] * 2, outputs  # gloo may print before it
