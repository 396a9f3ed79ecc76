"""The hook for Hugging Face transformers, on small random Qwen3-Next, Qwen3.5 and OLMo-Hybrid models, and the examples.

The reference is the model's own torch implementation. Only rounding may differ, so in float32 results and gradients
agree to FP32_TOLERANCE, and in bfloat16 flash_qla may be at most BF16_RATIO times as far from the same weights computed
in float32 as torch is. The file is long because all tests share these models.
"""

import contextlib
import copy
import functools
import importlib.util
import inspect
import itertools
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from dispatched import Ran
from subprocesses import run_python

import flash_qla
from flash_qla.integrations import _transformers_layer

pytest.importorskip("transformers", reason="transformers is not installed")

EXAMPLES = Path(__file__).parent.parent / "examples"
FP32_TOLERANCE = 1e-5
BF16_RATIO = 1.25
# Training steps amplify the rounding of bf16, by chance: texts that differ give ratios of 0.6 to 1.6, those of one text
# change by 0.1 with the last bits of a kernel. Geometric means over several texts are compared.
TRAINING_TEXTS = 4


def load_example(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_models_without_fla(names):
    """So that the models' own implementation is plain torch even where flash-linear-attention is installed."""
    fla = sys.modules.get("fla", ...)
    sys.modules["fla"] = None
    for name in names:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    del sys.modules["fla"]
    if fla is not ...:
        sys.modules["fla"] = fla


example = load_example("transformers_model")
import_models_without_fla(example.MODELS)

from transformers import DynamicCache  # noqa: E402

from flash_qla.integrations.transformers import (  # noqa: E402
    TESTED_RELEASES,
    chunk_gated_delta_rule,
    restore,
    use_flash_qla,
)

all_models = pytest.mark.parametrize("name", example.MODELS)


def small_model(name="qwen3_5", **arguments):
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return example.build_model(name, **layers, **arguments)


def text(length, rows=1, device="cpu"):
    source = Path(functools.__file__).read_bytes()
    return torch.tensor([list(source[i * length : (i + 1) * length]) for i in range(rows)], device=device)


def gated_delta_nets(model):
    return [layer for layer in model.modules() if type(layer).__name__.endswith("GatedDeltaNet")]


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of flash_qla's functions with the delta rule, by name. Those that compare a layer with
    flash_qla's, when it is switched, are not among them."""
    recorded_calls, agrees = [], _transformers_layer.agrees

    def recorded(function):
        def run(*args, **kwargs):
            recorded_calls.append(inspect.signature(function).bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return run

    def unrecorded(*args):
        before = len(recorded_calls)
        result = agrees(*args)
        del recorded_calls[before:]
        return result

    monkeypatch.setattr(_transformers_layer, "agrees", unrecorded)
    for name in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_packed", "gated_delta_net"):
        monkeypatch.setattr(flash_qla, name, recorded(getattr(flash_qla, name)))
    return recorded_calls


@torch.no_grad()
def assert_same_as_torch(model, length):
    """Asserts that a prefill, and decoding from it, compute the same as torch. The model is in fp32 afterwards."""
    prompt, rest = text(length + 8, device=model.device).split([length, 8], dim=1)
    torch_values, torch_written, _ = example.run(model, prompt, rest)
    with use_flash_qla(model):
        our_values, our_written, _ = example.run(model, prompt, rest)
    if model.dtype == torch.float32:
        for key, value in our_values.items():
            assert example.relative_error(value, torch_values[key]) < FP32_TOLERANCE, key
        assert torch.equal(our_written.argmax(-1), torch_written.argmax(-1))
        return
    exact_values, _, _ = example.run(model.float(), prompt, rest)
    for key, exact in exact_values.items():
        ours, theirs = (example.relative_error(v[key], exact) for v in (our_values, torch_values))
        assert ours < BF16_RATIO * theirs, f"{key}: {ours:.2e} from fp32, torch {theirs:.2e}"


@all_models
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_as_torch(name, dtype):
    assert_same_as_torch(small_model(name, dtype=dtype), length=130)


@pytest.mark.gpu
@all_models
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_same_as_torch_on_gpu(name, dtype):
    assert_same_as_torch(small_model(name, device="cuda", dtype=dtype), length=2000)


def gradients(model, tokens, **arguments):
    """The gradient of each parameter, by name, of the loss of predicting the next token."""
    model.train()
    model.zero_grad()
    model(tokens, labels=tokens, **arguments).loss.backward()
    by_name = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient.any() for gradient in by_name.values())
    return by_name


def assert_same_gradients(ours, theirs):
    for name, gradient in theirs.items():
        assert example.relative_error(ours[name], gradient) < FP32_TOLERANCE, name


def mean_error(actual, exact):
    """Root mean square of the relative errors of all parameters. Those of a single one may be a few numbers."""
    errors = [example.relative_error(actual[name], gradient) for name, gradient in exact.items()]
    return torch.tensor(errors).square().mean().sqrt().item()


@all_models
@pytest.mark.parametrize("padding", (0, 30))
def test_gradients_same_as_torch(name, padding, calls):
    """Also of a batch with padding on the left."""
    model = small_model(name)
    tokens = text(130, rows=2)
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    arguments = {"attention_mask": mask} if padding else {}
    theirs = gradients(model, tokens, **arguments)
    use_flash_qla(model)
    assert_same_gradients(gradients(model, tokens, **arguments), theirs)
    assert len(calls) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "autocast"])
@all_models
def test_gradients_in_bf16(name, autocast, device, calls):
    model = small_model(name, device=device, dtype=torch.float32 if autocast else torch.bfloat16)
    tokens = text(130 if device == "cpu" else 2000, rows=2, device=device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        theirs = gradients(model, tokens)
        with use_flash_qla(model):
            ours = gradients(model, tokens)
    assert len(calls) == 1
    exact = gradients(model.float(), tokens)
    our_error, their_error = (mean_error(actual, exact) for actual in (ours, theirs))
    assert our_error < BF16_RATIO * their_error, f"{our_error:.2e} from fp32, torch {their_error:.2e}"


def train(model, tokens, autocast, steps=5):
    """The loss before each of a few steps of gradient descent, and how all of them have changed the weights."""
    model.train()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "autocast"), [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=pytest.mark.gpu)]
)
@all_models
def test_training_and_decoding(name, device, autocast, calls):
    """A few steps change the weights as they do in torch, and with those the model computes and decodes the same."""
    length = 130 if device == "cpu" else 2000
    errors = []
    for tokens in text(length, rows=2 * (TRAINING_TEXTS if autocast else 1), device=device).split(2):
        their_losses, their_change = train(small_model(name, device=device), tokens, autocast)
        assert not calls
        model = small_model(name, device=device)
        with use_flash_qla(model):
            our_losses, our_change = train(model, tokens, autocast)
        assert len(calls) == len(our_losses)
        calls.clear()
        assert our_losses[-1] < our_losses[0] - 0.2
        if autocast:
            _, exact = train(small_model(name, device=device), tokens, False)
            errors.append([example.relative_error(change, exact) for change in (our_change, their_change)])
        else:
            assert our_losses == pytest.approx(their_losses, rel=FP32_TOLERANCE)
            assert example.relative_error(our_change, their_change) < FP32_TOLERANCE
    if autocast:
        ours, theirs = torch.tensor(errors).log().mean(dim=0).exp().tolist()
        assert ours < BF16_RATIO * theirs, f"{ours:.2e} from fp32, torch {theirs:.2e}"
    assert_same_as_torch(model.eval().to(torch.bfloat16 if autocast else torch.float32), length)


def test_gradient_checkpointing(calls):
    """The forward runs a second time in the backward, with the same result."""
    model = small_model()
    use_flash_qla(model)
    plain = gradients(model, text(130), use_cache=False)
    assert len(calls) == 1
    model.gradient_checkpointing_enable()
    checkpointed = gradients(model, text(130), use_cache=False)
    assert len(calls) == 3
    for name, gradient in plain.items():
        assert torch.equal(checkpointed[name], gradient), name


def test_gradients_with_a_cache(calls):
    """A model that is trained with its cache on, which is the default, asks for a final state that nothing uses."""
    model = small_model()
    use_flash_qla(model)
    plain = gradients(model, text(130), use_cache=False)
    cached = gradients(model, text(130), use_cache=True)
    assert [call.get("output_final_state", False) for call in calls] == [False, True]
    assert_same_gradients(cached, plain)


@all_models
def test_gradients_of_a_step_after_a_cache(name):
    """A token that follows a cache runs by parts where gradients are requested, because decoding has none. The cache
    is written in place, so only what follows the delta rule has gradients, in transformers' own layer too."""
    weight_gradients = []
    for switched in (False, True):
        model = small_model(name).requires_grad_(False)
        (layer,) = gated_delta_nets(model)
        if switched:
            use_flash_qla(model)
        with torch.no_grad():
            cache = example.cache_of(model, model(text(20)[:, :19], use_cache=True))
        weight = _transformers_layer.norm_of(layer).weight.requires_grad_()
        out = example.continued(model, cache, text(20)[:, 19:])
        weight_gradients += torch.autograd.grad(out.logits.square().sum(), weight)
    assert example.relative_error(*weight_gradients) < FP32_TOLERANCE and weight_gradients[0].any()


@pytest.mark.long
@all_models
def test_gradients_under_torch_compile(name):
    torch._dynamo.reset()  # all models share a decorator, and it compiles a function a few times only
    model = small_model(name)
    use_flash_qla(model)
    (layer,) = gated_delta_nets(model)
    hidden = torch.randn(1, 70, layer.hidden_size)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    weight_gradients = [
        torch.autograd.grad(run(hidden).square().sum(), list(layer.parameters())) for run in (layer, compiled)
    ]
    for eager, traced in zip(*weight_gradients, strict=True):
        torch.testing.assert_close(traced, eager)


@all_models
@torch.no_grad()
def test_prefill_in_two_pieces_starts_from_the_first_ones_state(name, calls):
    model = small_model(name)
    use_flash_qla(model)
    tokens = text(150)
    first = model(tokens[:, :70], use_cache=True)
    second = example.continued(model, example.cache_of(model, first), tokens[:, 70:])
    assert calls[0]["output_final_state"]  # of the whole layer
    assert calls[1]["initial_state"].shape == (1, 4, calls[1]["v"].shape[-1], calls[1]["k"].shape[-1])
    assert calls[1]["state_v_first"]
    whole = model(tokens, use_cache=True)
    assert example.relative_error(second.logits, whole.logits[:, 70:]) < FP32_TOLERANCE
    states = [example.recurrent_states(example.cache_of(model, out)) for out in (second, whole)]
    assert example.relative_error(*states) < FP32_TOLERANCE


@torch.no_grad()
def test_restore_is_exact(calls):
    model = small_model()
    (layer,) = gated_delta_nets(model)
    before, expected = dict(vars(layer)), model(text(20)).logits

    switched = use_flash_qla(model)
    assert list(switched.layers.values()) == [layer]
    model(text(20))
    assert len(calls) == 1

    restore(model)
    assert vars(layer) == before
    assert torch.equal(model(text(20)).logits, expected)
    assert len(calls) == 1
    restore(model)  # nothing left to do
    assert vars(layer) == before


@torch.no_grad()
@all_models
def test_convolution_and_norm(name):
    """A layer runs as one op, with a cache or without one; by parts if its norm is another, or one that something else
    has wrapped, which stays as it is."""
    model = small_model(name)
    (layer,) = gated_delta_nets(model)
    (of_norm,) = [x for x, y in layer.named_children() if type(y).__name__.endswith("RMSNormGated")]
    inputs, ops = text(70), {"causal_conv1d", "gated_rms_norm", "gated_delta_net"}
    for change in ("none", "another formula", "another forward", "other defaults"):
        norm = getattr(layer, of_norm)
        original = type(norm)
        if change == "another formula":
            norm.__class__ = type(original.__name__, (original,), {"forward": lambda self, x, gate: x + gate})
        if change == "another forward":
            norm.forward = functools.partial(original.forward, norm)
        before = type(norm)
        with contextlib.ExitStack() as stack:
            if change == "other defaults":  # as while a model is made
                stack.enter_context(torch.device("meta"))
            switched = use_flash_qla(model)
        with switched:
            for use_cache in (True, False):
                with Ran() as ran, torch.no_grad():
                    model(inputs, use_cache=use_cache)
                expected = "causal_conv1d" if change.startswith("another") else "gated_delta_net"
                assert ops & {*ran.ops} == {expected}
            assert isinstance(norm, before) and type(norm).__name__ == before.__name__
        assert type(norm) is before
        norm.__class__ = original
        vars(norm).pop("forward", None)


@torch.no_grad()
def test_autocast_of_another_dtype():
    """The op takes a convolution in autocast's dtype, whatever the layer's input has; parts take one in any dtype."""
    model = small_model(dtype=torch.bfloat16)
    (layer,) = gated_delta_nets(model)
    bias = torch.nn.Parameter(torch.randn(len(layer.conv1d.weight), dtype=torch.bfloat16))
    for layer.conv1d.bias, (dtype, of_autocast, is_one) in itertools.product(
        (None, bias), ((torch.float32, torch.bfloat16, True), (torch.bfloat16, torch.float16, False))
    ):
        x = torch.randn(1, 20, layer.hidden_size, dtype=dtype)
        with torch.autocast("cpu", of_autocast):
            theirs = layer(x)
            with use_flash_qla(model), Ran() as ran:
                ours = layer(x)
        assert ("gated_delta_net" in ran.ops) == is_one
        assert ours.dtype == theirs.dtype and example.relative_error(ours, theirs) < 1e-2


@torch.no_grad()
def test_shapes_on_meta():
    """The device meta has no autocast."""
    (layer,) = gated_delta_nets(small_model())
    layer.to("meta")
    use_flash_qla(layer)
    x = torch.empty(1, 20, layer.hidden_size, device="meta")
    assert layer(x).shape == x.shape
    layer.conv1d.register_forward_hook(lambda *args: None)  # so that its parts run
    assert layer(x).shape == x.shape


@torch.no_grad()
@all_models
@pytest.mark.parametrize("padding", (0, 30))
def test_a_cache_and_a_mask_by_position(name, padding, calls):
    """As by name: one op, which leaves out padding and fills the cache."""
    model = small_model(name)
    (layer,) = gated_delta_nets(model)
    use_flash_qla(model)
    names = [*inspect.signature(type(layer).forward).parameters][2:4]
    x, mask = torch.randn(2, 70, layer.hidden_size), torch.arange(70) >= torch.tensor([[0], [padding]])
    results = []
    for by_name in (True, False):
        given = (DynamicCache(config=model.config), mask if padding else None)
        y = layer(x, **dict(zip(names, given, strict=True))) if by_name else layer(x, *given)
        of_layer = given[0].layers[layer.layer_idx]
        results.append((y, of_layer.conv_states[0], of_layer.recurrent_states[0]))
    assert all(map(torch.equal, *results)) and [x["output_final_state"] for x in calls] == [True, True]


def test_caches_that_are_not_known():
    """Each differs in one thing from a cache that one op can take."""
    layer, one = types.SimpleNamespace(layer_idx=1), types.SimpleNamespace
    names = {name: {0: True} for name in ("conv_states", "recurrent_states", "has_previous_state")}

    def found(change, layer=layer):
        layers = [None, one(**names | change)]
        return _transformers_layer.layer_cache_of(layer, one(layers=layers)) is layers[1]

    assert found({}) and found({"record_past": False})
    assert not any(found({name: []}) for name in names) and not found({"record_past": True})
    for other in (one(), one(layer_idx=None), one(layer_idx=2)):
        assert _transformers_layer.layer_cache_of(other, one(layers=[one(**names)] * 2)) is None
    assert _transformers_layer.layer_cache_of(layer, one()) is None

    window, state = torch.zeros(1, 8, 4), torch.zeros(1, 2, 6, 5).mT
    for of_window, of_state, is_taken in (
        *((window, state, True), (None, state, False), (window, None, False), (window[..., 1:], state, False)),
        *((window, state[0], False), (window, state.contiguous(), False)),
    ):
        states = _transformers_layer.states_of(one(conv_states=[of_window], recurrent_states=[of_state]), 4)
        assert (states is not None) == is_taken


def test_with_block_restores_only_what_it_switched(calls):
    model = small_model()
    with use_flash_qla(model):
        with use_flash_qla(model) as inner:
            assert not inner.layers
        model(text(20))
        assert len(calls) == 1
    model(text(20))
    assert len(calls) == 1


@torch.no_grad()
def test_only_the_given_model_changes(calls):
    model, other = small_model(), small_model()
    use_flash_qla(model)
    other(text(20))
    assert not calls


def hook_like_accelerate(layer):
    layer._old_forward = layer.forward
    layer.forward = lambda *args, **kwargs: layer._old_forward(*args, **kwargs)


def unhook_like_accelerate(layer):
    layer.forward = layer.__dict__.pop("_old_forward")


@torch.no_grad()
@pytest.mark.parametrize("wrapped", ["before", "after", "while switched", "until switched"])
def test_layers_that_accelerate_has_wrapped(wrapped, calls):
    model = small_model()
    (layer,) = gated_delta_nets(model)
    before = dict(vars(layer))
    if wrapped in ("before", "until switched"):
        hook_like_accelerate(layer)
    use_flash_qla(model)
    if wrapped in ("after", "while switched"):
        hook_like_accelerate(layer)
    if wrapped == "until switched":
        unhook_like_accelerate(layer)
    model(text(20))
    assert len(calls) == 1
    if wrapped == "while switched":
        unhook_like_accelerate(layer)
    restore(model)
    # A bound forward would run this layer's weights in each of its copies.
    assert wrapped != "while switched" or vars(layer) == before
    model(text(20))
    assert len(calls) == 1


def test_restore_refuses_what_was_replaced_since():
    """An attribute, of older releases, or a class that others have made from the layer's."""
    model = small_model()
    (layer,) = gated_delta_nets(model)
    use_flash_qla(model)
    if "chunk_gated_delta_rule" in vars(layer):
        layer.chunk_gated_delta_rule = lambda *args, **kwargs: None
    else:
        layer.__class__ = type("Sharded", (type(layer),), {})
    with pytest.raises(RuntimeError, match=r"cannot restore the layer '.*linear_attn'.*replaced"):
        restore(model)


COPIES = {
    "replica": lambda layer: layer._replicate_for_data_parallel(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
}


def with_other_weights(layer, how):
    """A copy with parameters of its own, as nn.DataParallel gives them to its replicas."""
    copied = COPIES[how](layer)
    copied._parameters = {name: torch.nn.Parameter(0.5 * x) for name, x in layer._parameters.items()}
    copied._modules = {name: copy.deepcopy(module) for name, module in layer._modules.items()}
    for module in copied._modules.values():
        for x in module.parameters():
            x.data *= 0.5
    return copied


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("switched", ("before", "after"))
@torch.no_grad()
def test_copies_run_their_own_weights(how, switched, calls):
    """A copy of a switched layer, and the original beside it; restoring either leaves the other alone."""
    model = small_model()
    (layer,) = gated_delta_nets(model)
    hidden = torch.randn(1, 20, layer.hidden_size)
    expected_of_copy = with_other_weights(layer, "deepcopy")(hidden)
    assert not calls
    expected_of_layer = layer(hidden)
    if switched == "before":
        use_flash_qla(model)
        copied = with_other_weights(layer, how)
    else:
        copied = with_other_weights(layer, how)
        use_flash_qla(torch.nn.ModuleList([copied]))
        use_flash_qla(model)
    for module, expected in ((copied, expected_of_copy), (layer, expected_of_layer), (copied, expected_of_copy)):
        calls_before = len(calls)
        assert example.relative_error(module(hidden), expected) < FP32_TOLERANCE
        assert len(calls) == calls_before + 1
    assert [type(x) for x in copied.modules()] == [type(x) for x in layer.modules()]
    restore(layer)
    calls_before = len(calls)
    copied(hidden)
    assert len(calls) == calls_before + 1
    restore(copied)
    assert example.relative_error(copied(hidden), expected_of_copy) < FP32_TOLERANCE and len(calls) == calls_before + 1


class Mixin:
    """What FSDP and others put before a layer's class."""


@pytest.mark.parametrize("how", COPIES)
@torch.no_grad()
def test_copies_of_a_layer_whose_class_was_subclassed(how, calls, monkeypatch):
    """Others make a class from the switched one, as fully_shard does; a copy has that class and calls flash_qla."""
    model = small_model()
    (layer,) = gated_delta_nets(model)
    hidden = torch.randn(1, 20, layer.hidden_size)
    use_flash_qla(model)
    expected = layer(hidden)
    layer.__class__ = sharded = type("Sharded", (Mixin, type(layer)), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Sharded", sharded, raising=False)
    calls_before = len(calls)
    copied = COPIES[how](layer)
    copied._parameters, copied._modules = layer._parameters, layer._modules  # which a replica does not have yet
    assert type(copied) is sharded and torch.equal(copied(hidden), expected) and len(calls) == calls_before + 1


@torch.no_grad()
def test_replicas_of_a_model(calls):
    """Replicas of all modules, as nn.DataParallel creates them; the replicas find each other."""
    model = small_model()
    use_flash_qla(model)
    expected = model(text(20)).logits
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        replica._modules = {name: replicas[child] for name, child in module._modules.items()}
        for name, x in module._parameters.items():
            replica._parameters[name] = None if x is None else torch.nn.Parameter(x.clone())
    for x in model.parameters():
        x.data.fill_(float("nan"))
    calls_before = len(calls)
    assert torch.equal(replicas[model](text(20)).logits, expected)
    assert len(calls) == calls_before + 1


FSDP = """
import sys, torch, tempfile
sys.path.insert(0, {tests!r})
from test_transformers import example, gated_delta_nets, small_model, text, use_flash_qla
import flash_qla
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
torch.distributed.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
calls, original = [], flash_qla.gated_delta_net
flash_qla.gated_delta_net = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
expected = small_model()(text(20)).logits
for order in ("before", "after"):
    model = small_model()
    if order == "before":
        use_flash_qla(model)
    for layer in gated_delta_nets(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "after":
        use_flash_qla(model)
    calls.clear()  # the comparison before the switch
    logits = model(text(20), use_cache=False).logits
    assert len(calls) == 1
    assert example.relative_error(logits.detach(), expected.detach()) < 1e-5, order
    logits.square().sum().backward()
    assert all(x.grad.full_tensor().isfinite().all() for layer in gated_delta_nets(model) for x in layer.parameters())
print(len(calls))
"""


@pytest.mark.long
def test_layers_that_fsdp_has_sharded():
    """fully_shard makes a class of its own too, before or after; on the CPU."""
    assert run_python(FSDP.format(tests=str(Path(__file__).parent)), FLASH_QLA_QUIET="1").split()[-1] == "1"


SLOW_PATH = """
import sys, warnings
sys.path.insert(0, {tests!r})
from test_transformers import small_model, text, use_flash_qla
model = small_model()
with warnings.catch_warnings():
    warnings.simplefilter("error", UserWarning)  # and it would end the comparison
    use_flash_qla(model)
print("switched")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    model(text(5), use_cache=False)
print(sum("slow path" in str(x.message) for x in said))
"""


def test_the_comparison_does_not_say_that_the_cpu_is_slow():
    """The first call on the CPU says it."""
    lines = run_python(SLOW_PATH.format(tests=str(Path(__file__).parent)), FLASH_QLA_QUIET="").splitlines()
    assert lines[-2:] == ["switched", "1"]


@torch.no_grad()
def test_torch_compile(calls):
    """A compiled layer notices both switches. (Numbers are close, not equal: torch's matrix products may round
    differently with other alignments of the same data.)"""
    model = small_model()
    (layer,) = gated_delta_nets(model)
    compiled = torch.compile(layer, backend="eager")
    hidden = torch.randn(1, 70, layer.hidden_size)
    theirs = layer(hidden)
    torch.testing.assert_close(compiled(hidden), theirs)
    use_flash_qla(compiled)
    ours = layer(hidden)
    calls_before = len(calls)
    torch.testing.assert_close(compiled(hidden), ours)
    assert len(calls) == calls_before + 1
    restore(compiled)
    torch.testing.assert_close(compiled(hidden), theirs)
    assert len(calls) == calls_before + 1


@torch.no_grad()
def test_packed_sequences(calls):
    q, k = torch.randn(2, 1, 90, 2, 128).unbind()
    v = torch.randn(1, 90, 4, 128)
    g, beta = -torch.rand(1, 90, 4), torch.rand(1, 90, 4)
    common = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    offsets = torch.tensor([0, 30, 90])
    lengths = (torch.tensor(60), 60)  # a tensor is not read, which would wait for the GPU
    for max_length in lengths:
        o, state = chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, cu_seqlens=offsets, seq_idx=torch.zeros(1, 90), max_length_q=max_length, **common
        )
    assert [call.get("max_seqlen") for call in calls] == [None, 60]
    pieces = [
        chunk_gated_delta_rule(*(x[:, a:b] for x in (q, k, v)), g=g[:, a:b], beta=beta[:, a:b], **common)
        for a, b in ((0, 30), (30, 90))
    ]
    assert torch.equal(o, torch.cat([piece[0] for piece in pieces], dim=1))
    assert torch.equal(state, torch.cat([piece[1] for piece in pieces]))
    with pytest.raises(ValueError, match="seq_idx without cu_seq_lens_q"):
        chunk_gated_delta_rule(q, k, v, g=g, beta=beta, seq_idx=torch.zeros(1, 90))

    model = small_model()
    use_flash_qla(model)
    calls.clear()
    options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_k": 60, "use_cache": False}
    for max_length in lengths:
        model(text(90), max_length_q=max_length, **options)
    assert all(call["cu_seqlens"] is offsets for call in calls)
    assert [call["max_seqlen"] for call in calls] == [None, 60]
    with pytest.raises(ValueError, match="seq_idx without cu_seq_lens_q"):
        model(text(90), seq_idx=torch.zeros(1, 90), use_cache=False)


@all_models
@torch.no_grad()
def test_positions_that_restart_do_not_separate_sequences(name):
    """The model's own layers do not see position_ids. This notices a release whose layers do."""
    model = small_model(name)
    first, second = text(60).split([30, 30], dim=1)
    packed = {"input_ids": torch.cat([first, second], 1), "position_ids": torch.arange(30).repeat(2)[None]}
    theirs = model(**packed, use_cache=False).logits
    with use_flash_qla(model):
        ours = model(**packed, use_cache=False).logits
    assert example.relative_error(ours, theirs) < FP32_TOLERANCE
    assert example.relative_error(theirs[:, 30:], model(second).logits) > 1e-2


def test_keywords_that_ask_for_something_else_are_refused():
    x, gate = torch.randn(1, 4, 1, 8), torch.zeros(1, 4, 1)
    with pytest.raises(TypeError, match="transpose_state_layout"):
        chunk_gated_delta_rule(x, x, x, gate, gate, transpose_state_layout=True)
    with pytest.raises(RuntimeError, match="A_log is None"):
        chunk_gated_delta_rule(x, x, x, gate, gate, use_gate_in_kernel=True)


def test_unknown_release(monkeypatch):
    class NextGatedDeltaNet(torch.nn.Module):
        def forward(self, x):
            return self.kernels["gated_delta_rule"](x)

    model = small_model()
    before = dict(vars(gated_delta_nets(model)[0]))
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="9.1.0"))
    message = r"NextGatedDeltaNet, transformers 9.1.0.*'chunk_gated_delta_rule'.*'torch_chunk_gated_delta_rule'"
    message += f".*tested: {re.escape(TESTED_RELEASES)}"
    with pytest.raises(RuntimeError, match=message):
        use_flash_qla(torch.nn.ModuleList([model, NextGatedDeltaNet()]))
    assert TESTED_RELEASES in (Path(__file__).parent.parent / "docs/support.md").read_text()
    assert vars(gated_delta_nets(model)[0]) == before


def test_model_without_gated_delta_net():
    with pytest.raises(ValueError, match="Linear has no Gated DeltaNet layer"):
        use_flash_qla(torch.nn.Linear(2, 2))


def test_importing_flash_qla_does_not_import_transformers(tmp_path):
    code = "import sys, flash_qla, flash_qla.integrations.transformers as _; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)  # not in the checkout, which would hide it


@pytest.mark.long
def test_transformers_example():
    command = [sys.executable, "-W", "error::FutureWarning", EXAMPLES / "transformers_model.py", "--device=cpu"]
    command += ["--model=qwen3_5"]
    output = subprocess.run([*command, "--tokens=65", "--new-tokens=4"], check=True, text=True, capture_output=True)
    assert "Qwen3_5ForCausalLM: 3 linear of 4 layers, torch.float32" in output.stdout
    assert "4 of 4" in output.stdout
