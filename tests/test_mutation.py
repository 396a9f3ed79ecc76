"""Autograd knows which ops write their arguments, and which ops have no derivatives."""

import contextlib

import pytest
import torch
from cases import Case, make_inputs
from every_op import NAMES, at_offset, later_ops, make_call, op_of

import flash_qla

# The arguments that each op writes
WRITES = {
    name: [x.name for x in op_of(name)._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    for name in (*NAMES, *(later for name in NAMES for later in later_ops(name)))
}
WITH_DERIVATIVES = {f"chunk_gated_delta_rule{of}" for of in ("", "_fwd", "_packed")}
WITH_DERIVATIVES |= {"causal_conv1d", "gated_delta_net", "gated_rms_norm"}
WITHOUT_DERIVATIVES = sorted({*NAMES} - WITH_DERIVATIVES)


def copies(name: str, arguments: dict) -> dict:
    """Copies of the arguments that the op writes."""
    return {x: arguments[x].clone() for x in WRITES[name] if x in arguments}


def fresh(call) -> dict:
    """Arguments that an op may write, and nothing that requires a gradient."""
    return {x: at_offset(y, 0) if torch.is_tensor(y) else y for x, y in call.arguments.items()}


def arguments_of(name: str, device: str) -> dict:
    """The arguments of an op, perhaps finish, by the names of its schema."""
    first = next(x for x in NAMES if name in (x, *later_ops(x)))
    call = make_call(first, device)
    values = fresh(call)
    if name != first:
        results = op_of(first)(**{x.name: values[x.name] for x in op_of(first)._schema.arguments if x.name in values})
        values |= {x.name: y for x, y in zip(op_of(first)._schema.returns, results, strict=True)}
    if "out" in WRITES[name]:
        results = call()
        values["out"] = torch.empty_like(results["y" if "y" in results else "o"])
    if "h" in WRITES[name]:
        heads_and_keys = values["state_pool"].shape[1:]
        chunks = (values["q"].shape[1] + 63 * len(values["state_indices"])) // 64
        values["h"] = values["q"].new_empty(1, chunks, *heads_and_keys)
    return {x.name: values[x.name] for x in op_of(name)._schema.arguments if x.name in values}


def test_which_ops_write():
    written = {name: names for name, names in WRITES.items() if names}
    assert written == {
        "prefill_gated_delta_rule": ["state_pool", "checkpoints", "out", "h"],
        "prefill_causal_conv1d": ["state_pool", "checkpoints"],
        "decode_gated_delta_net": [
            *("window_pool", "state_pool", "intermediate_states", "intermediate_windows", "out")
        ],
        "prefill_gated_delta_net": ["window_pool", "state_pool", "checkpoints", "window_checkpoints", "out"],
        "decode_gated_delta_rule": ["state_pool", "intermediate_states", "out"],
        "decode_gated_delta_rule_packed": ["state_pool", "intermediate_states", "out"],
        "decode_gated_delta_rule_buffered": ["state_pool", "d_cache", "k_cache", "g_cache", "out"],
        "gated_delta_rule_forward_finish": ["workspace", "o"],
        "gated_delta_rule_backward_replay": ["workspace"],
        "gated_delta_rule_backward_finish": ["workspace", "dq", "dk", "dv", "db", "dg"],
    }


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad, torch.inference_mode))
def test_versions(device, name, mode):
    """Tensors that are written have a later version, all others the same."""
    arguments = arguments_of(name, device)
    tensors = {x: y for x, y in arguments.items() if torch.is_tensor(y)}
    before = {x: y._version for x, y in tensors.items()}
    with mode():
        op_of(name)(**arguments)
    assert {x for x, y in tensors.items() if y._version > before[x]} == {*WRITES[name]}


@pytest.mark.parametrize("name", [name for name, written in WRITES.items() if written])
def test_inference_tensors_have_no_versions(device, name):
    with torch.inference_mode():
        op_of(name)(**arguments_of(name, device))
    arguments = arguments_of(name, device)
    with torch.inference_mode():
        for x in WRITES[name]:
            arguments[x] = arguments[x].clone()
    with torch.no_grad():
        op_of(name)(**arguments)


@pytest.mark.parametrize("layout", ("contiguous", "strided"))
@pytest.mark.parametrize("name", [name for name, written in WRITES.items() if "out" in written])
def test_out_of_inference_mode(device, name, layout):
    """`out` of inference mode, which engines allocate there, is written outside of it."""
    expected = arguments_of(name, device)
    op_of(name)(**expected)
    with torch.inference_mode():
        step = 2 if layout == "strided" else 1
        out = expected["out"].new_full((*expected["out"].shape, step), torch.nan)[..., 0]
    op_of(name)(**arguments_of(name, device) | {"out": out})
    assert torch.equal(out, expected["out"])


def train_and_prefill(device, write):
    """A loss whose initial state is a slot of a pool, which `write` changes before the backward."""
    case = Case(T=70, H_k=1, H_v=2, K=64, V=64, state_v_first=True)
    inputs = make_inputs(case, device)
    pool = torch.randn(4, 2, 64, 64).to(device)
    leaf = inputs["q"].requires_grad_()
    o, _ = flash_qla.chunk_gated_delta_rule(**inputs | {"initial_state": pool[1:2]})
    others = {x: y.detach() for x, y in inputs.items() if x in ("q", "k", "v", "g", "beta")}
    write(others, pool)
    return o.float().sum(), leaf


def prefill(others, pool):
    indices = torch.zeros(1, dtype=torch.int32, device=pool.device)
    flash_qla.prefill_gated_delta_rule(**others, state_pool=pool, state_indices=indices)


@pytest.mark.parametrize("backend", (None, "aot_eager", "inductor"))
@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad, torch.inference_mode))
def test_a_state_that_was_saved_and_written(device, backend, mode):
    """Any slot of the pool: a view shares the version of its base."""
    torch._dynamo.reset()
    write = prefill if backend is None else torch.compile(prefill, backend=backend, fullgraph=True)

    def in_mode(others, pool):
        with mode():
            write(others, pool)

    loss, _ = train_and_prefill(device, in_mode)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss, leaf = train_and_prefill(device, lambda others, pool: None)
    loss.backward()
    assert leaf.grad.any()


@pytest.mark.parametrize("name", WITHOUT_DERIVATIVES)
def test_no_derivative(device, name):
    """Results depend on what requires a gradient, and say so when one is asked for."""
    call = make_call(name, device)
    arguments = fresh(call)
    arguments = {x.name: arguments[x.name] for x in op_of(name)._schema.arguments if x.name in arguments}
    first = next(x for x, y in arguments.items() if torch.is_tensor(y) and y.is_floating_point())
    expected = op_of(name)(**arguments | copies(name, arguments))
    results = op_of(name)(**arguments | {first: arguments[first].requires_grad_()})
    results, expected = ((x,) if torch.is_tensor(x) else x for x in (results, expected))
    message = f"derivative for flash_qla::{name} is not implemented"
    for i, (x, y) in enumerate(zip(results, expected, strict=True)):
        assert x.requires_grad == x.is_floating_point()
        assert torch.equal(x, y) or (i > 0 and name.endswith("_begin"))  # the other half fills these in
        if x.requires_grad:
            with pytest.raises(NotImplementedError, match=message):
                torch.autograd.grad(x.float().sum(), arguments[first], retain_graph=True)
    for written in copies(name, arguments):
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad(arguments[written].float().sum(), arguments[first], retain_graph=True)
    for grad_mode in (torch.no_grad, torch.inference_mode):
        with grad_mode():
            results = op_of(name)(**arguments | {x: y.detach() for x, y in copies(name, arguments).items()})
        assert not any(x.requires_grad for x in ((results,) if torch.is_tensor(results) else results))


@pytest.mark.parametrize("name", [name for name in WITHOUT_DERIVATIVES if WRITES[name]])
def test_a_leaf_is_not_written(device, name):
    """The op raises before anything has changed, as PyTorch's own in-place ops do."""
    arguments = fresh(make_call(name, device))
    pool = arguments["state_pool"].clone().requires_grad_()
    before = pool.detach().clone()
    for of_pool in (pool, pool[1:]):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place"):
            op_of(name)(**arguments | {"state_pool": of_pool})
    assert torch.equal(pool, before)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_no_derivative_compiled(device, backend):
    """No constant: an error, at the latest when the gradient is asked for."""
    torch._dynamo.reset()
    arguments = fresh(make_call("decode_gated_delta_rule", device))
    q = arguments.pop("q").requires_grad_()
    function = torch.compile(lambda q, rest: op_of("decode_gated_delta_rule")(q * 2, **rest), backend=backend)
    with pytest.raises(Exception, match="derivative for flash_qla::decode_gated_delta_rule is not implemented"):
        function(q, arguments).float().sum().backward()
    with torch.no_grad():
        function(q, arguments)


@pytest.mark.parametrize(
    "name", ("prefill_gated_delta_rule", *(name for name in NAMES if name.startswith("decode_gated_delta_rule")))
)
@pytest.mark.parametrize("compiled", (False, True))
def test_autocast(device, name, compiled):
    """Tokens come to the dtype of autocast, whatever they are, but for float64."""
    torch._dynamo.reset()
    arguments = fresh(make_call(name, device))
    tokens = [x for x in ("q", "k", "v", "mixed_qkv") if x in arguments]
    op = torch.compile(op_of(name), backend="aot_eager", fullgraph=True) if compiled else op_of(name)
    with torch.no_grad():
        expected = op_of(name)(**arguments | copies(name, arguments))
        copied = arguments | copies(name, arguments)
        with torch.autocast(device, torch.bfloat16):
            actual = op(**copied | {x: arguments[x].float() for x in tokens})
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_autocast_of_the_low_level_functions(device, dtype):
    """The backward takes the inputs of the forward, and what it gave."""
    inputs = make_inputs(Case(T=70, H_k=1, H_v=2, K=64, V=64), device)
    converted = inputs | {x: inputs[x].to(dtype) for x in ("q", "k", "v")}
    do = torch.randn(inputs["v"].shape).to(device)
    gradients = []
    for tensors, cast in ((inputs, contextlib.nullcontext()), (converted, torch.autocast(device, torch.bfloat16))):
        with torch.no_grad(), cast:
            g, A, *_ = flash_qla.chunk_gated_delta_rule_fwd(**tensors)
            gradients.append(flash_qla.chunk_gated_delta_rule_bwd(**tensors | {"g": g}, A=A, do=do))
    for x, y in zip(*gradients, strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype


def test_a_backward_inside_autocast(device):
    """The backward of a forward outside of autocast keeps its dtypes."""
    if device == "cuda":
        pytest.skip("tokens of another dtype than autocast's, float32, run on the CPU")
    inputs = make_inputs(Case(T=70, H_k=1, H_v=2, K=16, V=16, dtype=torch.float32), device)
    gradients = []
    for cast in (contextlib.nullcontext(), torch.autocast(device, torch.bfloat16)):
        q = inputs["q"].clone().requires_grad_()
        o, _ = flash_qla.chunk_gated_delta_rule(**inputs | {"q": q})
        with cast:
            gradients += torch.autograd.grad(o.sum(), q)
    assert torch.equal(*gradients)
