"""FLA's GatedDeltaNet layer decoding one token after its cache's, against the formula in float64.

FLA's own step is made of Triton kernels, which a CPU does not have.
"""

import copy
import io
import pickle

import pytest
import torch
from accuracy import relative_error
from dispatched import Ran
from test_fla import as_on_hopper, change_hook, change_norm, integration, layer_inputs, whole_layer
from test_region import formula
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_qla
from flash_qla.integrations import _fla_layer as fla_layer, _layers

utils = pytest.importorskip("fla.models.utils", reason="FLA's models (flash-linear-attention) are not installed")
__all__ = ["as_on_hopper", "integration"]  # fixtures
OP, BAR = "decode_gated_delta_net", 2e-2
PREFILL, STEPS = 70, 4


def expected(layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y of all tokens, the state after them and the windows' inputs, by the plain formula of the region in fp64."""
    inputs = [getattr(layer, f"{part}_proj")(x) for part in "qkv"]
    layer, x = copy.deepcopy(layer).double(), x.double()
    convolutions = [getattr(layer, f"{part}_conv1d") for part in "qkv"]
    bias = torch.cat([y.bias for y in convolutions]) if layer.conv_bias else None
    weights = torch.cat([y.weight[:, 0] for y in convolutions]), bias, layer.o_norm.weight
    mixed = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    z = layer.g_proj(x).unflatten(-1, (layer.num_v_heads, -1))
    y, states, _ = formula(
        mixed, z, layer.a_proj(x), layer.b_proj(x), *weights, layer.A_log, layer.dt_bias, layer.num_heads,
        layer.head_k_dim, norm_eps=layer.o_norm.eps, allow_neg_eigval=layer.allow_neg_eigval, state_v_first=True,
        norm_activation="sigmoid" if layer.o_norm.activation == "sigmoid" else "silu",
    )  # fmt: skip
    return layer.o_proj(y.flatten(-2)), states, inputs


def randomized(device: str, **sizes):
    """A layer in eval mode; each of its parameters matters."""
    layer = whole_layer(device, **sizes).eval()
    generator = torch.Generator().manual_seed(2)
    for name, x in layer.named_parameters():
        if name == "o_norm.weight" or name.endswith("bias"):
            x.data.copy_(torch.randn(x.shape, generator=generator))
    return layer


def prefilled(layer, x: torch.Tensor):
    cache = utils.Cache()
    with torch.no_grad():
        y, _, _ = layer(x, past_key_values=cache, use_cache=True)
    return y, cache


WHOLE = {
    "plain": {},
    "bias, sigmoid, W = 3": {"output_gate_activation": "sigmoid", "conv_bias": True, "conv_size": 3},
    "other numbers": {"num_v_heads": 2, "allow_neg_eigval": True, "norm_eps": 0.1, "conv_bias": True},
}


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode), ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", WHOLE)
def test_steps(name, mode, device, integration, caplog):
    """One op each, and FLA's cache after them: windows of W inputs, the state, and the number of tokens."""
    fla_layer._say.cache_clear()
    layer = randomized(device, **WHOLE[name])
    x = layer_inputs("batch", device)[0][:, : PREFILL + STEPS]
    y, cache = prefilled(layer, x[:, :PREFILL])
    with mode(), Ran() as ran, caplog.at_level("INFO", "fla.flash_qla"):
        outputs = [y]
        for token in x[:, PREFILL:].split(1, 1):
            y, attentions, returned_cache = layer(token, past_key_values=cache, use_cache=True)
            outputs.append(y)
            assert returned_cache is cache and attentions is None
    assert ran.ops == [OP] * STEPS and caplog.messages == ["flash_qla runs decoding as one op of GatedDeltaNet"]
    reference, states, inputs = expected(layer, x)
    for actual, y in zip(
        torch.cat(outputs, 1)[:, PREFILL:].split(1, 1), reference[:, PREFILL:].split(1, 1), strict=True
    ):
        assert relative_error(actual, y) < BAR
    for window, of_projection in zip(cache[0]["conv_state"], inputs, strict=True):
        assert torch.equal(window, of_projection[:, -layer.conv_size :].mT)
    assert relative_error(cache[0]["recurrent_state"], states) < BAR and cache.get_seq_length() == PREFILL + STEPS


def test_padding(device, integration):
    """A sequence whose token is padding keeps its windows and state, and has zeros."""
    layer = randomized(device)
    x = layer_inputs("batch", device)[0][:, : PREFILL + 1]
    _, cache = prefilled(layer, x[:, :PREFILL])
    _, whole = prefilled(layer, x[:, :PREFILL])
    before = [y.clone() for y in (*cache[0]["conv_state"], cache[0]["recurrent_state"])]
    mask = torch.ones(2, PREFILL + 1, dtype=torch.int64, device=device)
    with torch.no_grad():
        reference, _, _ = layer(x[:, PREFILL:], mask, whole, use_cache=True)
        assert torch.equal(
            reference, layer(x[:, PREFILL:], None, prefilled(layer, x[:, :PREFILL])[1], use_cache=True)[0]
        )
        mask[1, -1] = 0
        y, _, _ = layer(x[:, PREFILL:], mask, cache, use_cache=True)
    assert torch.equal(y[0], reference[0]) and not y[1].any()
    after = (*cache[0]["conv_state"], cache[0]["recurrent_state"])
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[1], new[1]) and not torch.equal(old[0], new[0])


@torch.no_grad()
def test_after_a_padded_prefill(device, integration):
    """The cache goes on from each row's own tokens, as if the row were alone, and is as long as a row with padding."""
    layer, cache = randomized(device), utils.Cache()
    x, arguments = layer_inputs("padded", device)
    mask, T = arguments["attention_mask"], x.shape[1]
    for begin, end in ((0, T - 1), (T - 1, T)):
        y, _, _ = layer(x[:, begin:end], mask[:, :end], cache, use_cache=True)
        assert cache.get_seq_length() == end
    for row, of_row, actual in zip(x, mask, y, strict=True):
        assert relative_error(actual, expected(layer, row[of_row][None])[0][0, -1:]) < BAR


def reordered(cache):
    cache.reorder_cache(torch.tensor([1, 0]))
    return cache


def rebuilt(cache):
    """As helpers that map a function over nested tuples build them."""
    states = [y | {"conv_state": type(y["conv_state"])(x.clone() for x in y["conv_state"])} for y in cache]
    return utils.Cache.from_legacy_cache([y | {"recurrent_state": y["recurrent_state"].clone()} for y in states])


def pickled(cache):
    return pickle.loads(pickle.dumps(cache))


def saved(cache):
    memory = io.BytesIO()
    torch.save(cache.to_legacy_cache(), memory)
    memory.seek(0)
    return utils.Cache.from_legacy_cache(torch.load(memory, weights_only=True))


@pytest.mark.parametrize("change", (reordered, copy.deepcopy, rebuilt, pickled, saved), ids=lambda x: x.__name__)
def test_a_changed_cache(change, integration):
    """Beams and copies have windows of their own, which later tokens write, and a copied cache is not written."""
    layer = randomized("cpu")
    x = layer_inputs("batch", "cpu")[0][:, : PREFILL + 3]
    y, cache = prefilled(layer, x[:, :PREFILL])
    with torch.no_grad():
        layer(x[:, PREFILL : PREFILL + 1], past_key_values=cache, use_cache=True)
        before = (*cache[0]["conv_state"], cache[0]["recurrent_state"])
        copies = [y.clone() for y in before]
        other = change(cache)
        if change is reordered:
            x = x.flip(0)
        for token in x[:, PREFILL + 1 :].split(1, 1):
            y, _, _ = layer(token, past_key_values=other, use_cache=True)
    for old, new in zip(copies, before, strict=True):
        assert torch.equal(old, new)
    reference, states, inputs = expected(layer, x)
    assert relative_error(y, reference[:, -1:]) < BAR and relative_error(other[0]["recurrent_state"], states) < BAR
    for window, of_projection in zip(other[0]["conv_state"], inputs, strict=True):
        assert torch.equal(window, of_projection[:, -layer.conv_size :].mT)


def test_the_windows_stay_in_one_tensor(integration):
    layer = randomized("cpu")
    x = layer_inputs("batch", "cpu")[0]
    _, cache = prefilled(layer, x[:, :PREFILL])
    memory = set()
    with torch.no_grad():
        for token in x[:, PREFILL:].split(1, 1):
            layer(token, past_key_values=cache, use_cache=True)
            tensors = (*cache[0]["conv_state"], cache[0]["recurrent_state"])
            memory.add(tuple(y.untyped_storage().data_ptr() for y in tensors))
    ((q, k, v, _),) = memory
    assert q == k == v


@pytest.mark.parametrize("mode", (torch.inference_mode, torch.enable_grad), ids=lambda x: x.__name__)
def test_a_prefill_in_another_mode(mode, integration):
    layer, cache = randomized("cpu"), utils.Cache()
    x = layer_inputs("batch", "cpu")[0][:, : PREFILL + 2]
    with mode():
        layer(x[:, :PREFILL], past_key_values=cache, use_cache=True)
        state = cache[0]["recurrent_state"]
        assert state.is_inference() or state.requires_grad
    with torch.no_grad():
        for token in x[:, PREFILL:].split(1, 1):
            y, _, _ = layer(token, past_key_values=cache, use_cache=True)
    assert relative_error(y, expected(layer, x)[0][:, -1:]) < BAR


def test_after_a_step_on_fake_tensors(integration):
    """As an estimate of a step's memory runs one: nothing of it stays."""
    _layers._arange.cache_clear()
    layer = randomized("cpu")
    x = layer_inputs("batch", "cpu")[0][:, : PREFILL + 1]
    (_, cache), (_, other) = (prefilled(layer, x[:, :PREFILL]) for _ in range(2))
    with torch.no_grad(), Ran() as ran, FakeTensorMode(allow_non_fake_inputs=True) as fake:
        layer(fake.from_tensor(x[:, PREFILL:]), past_key_values=other, use_cache=True)
    with torch.no_grad():
        y, _, _ = layer(x[:, PREFILL:], past_key_values=cache, use_cache=True)
    assert ran.ops == [OP] and relative_error(y, expected(layer, x)[0][:, -1:]) < BAR


def change_bias(layer):
    layer.k_conv1d.bias = torch.nn.Parameter(torch.zeros(128, dtype=torch.bfloat16))


def change_taps(layer):
    layer.k_conv1d = type(layer.k_conv1d)(128, 3).to(torch.bfloat16)


def change_dtype(layer):
    layer.v_conv1d.half()


def change_activation(layer):
    layer.q_conv1d.activation = None


def change_weight(layer):
    layer.o_norm.weight = None


CHANGES = (
    (change_hook, "q_conv1d is hooked"),
    (change_norm, "o_norm is a RMSNorm, not a FusedRMSNormGated"),
    (change_bias, "its convolutions differ in taps, bias or dtype"),
    (change_taps, "its convolutions differ in taps, bias or dtype"),
    (change_dtype, "v_conv1d is of torch.float16 on torch.bfloat16"),
    (change_activation, "a convolution's activation is not silu"),
    (change_weight, "o_norm is without a weight"),
)


@pytest.mark.parametrize(("change", "why"), CHANGES, ids=lambda x: getattr(x, "__name__", ""))
def test_layers_of_other_parts(change, why, integration, monkeypatch, caplog):
    """FLA's own forward decodes, and the log says why."""
    layer = randomized("cpu")
    x = layer_inputs("batch", "cpu")[0][:, : PREFILL + 1]
    _, cache = prefilled(layer, x[:, :PREFILL])
    change(layer)
    fla_layer._say.cache_clear()
    monkeypatch.setattr(fla_layer, "_their_forward", lambda *arguments, **named: "theirs")
    with torch.no_grad(), caplog.at_level("INFO", "fla.flash_qla"):
        assert layer(x[:, PREFILL:], past_key_values=cache, use_cache=True) == "theirs"
    assert caplog.messages == [f"flash_qla runs the delta rule alone ({why}) of GatedDeltaNet"]


def test_other_calls_are_theirs(integration, monkeypatch):
    layer = randomized("cpu")
    x = layer_inputs("batch", "cpu")[0][:, : PREFILL + 2]
    _, cache = prefilled(layer, x[:, :PREFILL])
    before = [y.clone() for y in (*cache[0]["conv_state"], cache[0]["recurrent_state"])]
    monkeypatch.setattr(fla_layer, "_their_forward", lambda *arguments, **named: "theirs")
    token, options = x[:, PREFILL : PREFILL + 1], {"past_key_values": cache, "use_cache": True}
    with torch.no_grad():
        assert layer(x[:, PREFILL:], **options) == "theirs"  # two tokens
        assert layer(token) == layer(token, past_key_values=utils.Cache(), use_cache=True) == "theirs"
        assert layer(token, **options | {"use_cache": False}) == "theirs"
        assert layer(token[:1], **options, cu_seqlens=torch.tensor([0, 1])) == "theirs"
        assert layer(token[:1], **options) == "theirs"  # another batch
        assert torch.compile(layer, backend="eager")(token, **options) == "theirs"
        for windows in (None, tuple(y.float() for y in cache[0]["conv_state"])):
            other = copy.deepcopy(cache)
            other[0]["conv_state"] = windows
            assert layer(token, past_key_values=other, use_cache=True) == "theirs"
        layer.train()
        assert layer(token, **options) == "theirs"
        layer.eval()
    assert layer(token, **options) == "theirs"  # with gradients
    for old, new in zip(before, (*cache[0]["conv_state"], cache[0]["recurrent_state"]), strict=True):
        assert torch.equal(old, new)


@torch.no_grad()
def test_calls_without_a_cache(integration, monkeypatch):
    """FLA decodes few tokens, and any number in its other mode, but not while it trains."""
    layer, x = randomized("cpu"), layer_inputs("batch", "cpu")[0]
    monkeypatch.setattr(fla_layer, "_their_forward", lambda *arguments, **named: "theirs")
    for mode, training, T, is_theirs in (
        *(("chunk", False, 64, True), ("chunk", False, 65, False), ("chunk", True, 64, False)),
        ("fused_recurrent", False, 65, True),
    ):
        layer.mode = mode
        layer.train(training)
        assert (layer(x[:, :T]) == "theirs") == is_theirs


def test_windows_of_a_tensor_in_another_order():
    """Only the parts of a tensor in their order are that tensor."""
    whole = torch.randn(2, 8, 4)
    parts = whole.split([2, 2, 4], 1)
    assert torch.equal(fla_layer._as_one_tensor(parts), whole)
    for windows in ((parts[1], parts[0], parts[2]), (parts[0].clone(), *parts[1:])):
        merged, _ = fla_layer._merged(windows)
        assert torch.equal(merged, torch.cat(windows, 1))


@torch.no_grad()
def test_activations_of_the_convolutions(integration, monkeypatch):
    """Each has its own."""
    layer, activations = randomized("cpu"), []
    change_activation(layer)
    original = flash_qla.causal_conv1d

    def recorded(*arguments, **named):
        activations.append(named["activation"])
        return original(*arguments, **named)

    monkeypatch.setattr(flash_qla, "causal_conv1d", recorded)
    layer(layer_inputs("batch", "cpu")[0])
    assert activations == [None, "silu", "silu"]


@pytest.mark.gpu
@torch.no_grad()
def test_beside_fla(integration):
    """FLA's own kernels go on from flash_qla's cache, and flash_qla from theirs."""
    layer = randomized("cuda")
    x = layer_inputs("batch", "cuda")[0][:, : PREFILL + STEPS]
    _, cache = prefilled(layer, x[:, :PREFILL])
    outputs = []
    for n, token in enumerate(x[:, PREFILL:].split(1, 1)):
        forward = layer.forward if n % 2 == 0 else lambda *a, **b: fla_layer._their_forward(layer, *a, **b)
        outputs.append(forward(token, past_key_values=cache, use_cache=True)[0])
    assert relative_error(torch.cat(outputs, 1), expected(layer, x)[0][:, PREFILL:]) < 5e-2
