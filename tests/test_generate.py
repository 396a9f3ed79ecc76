"""generate() of transformers models whose layers decode in flash_qla: the tokens of the unpatched model, in fp32, on
small random models."""

import importlib.util
import inspect

import pytest
import torch
from dispatched import Ran

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from test_transformers import example, gated_delta_nets, import_models_without_fla, small_model, text  # noqa: E402

from flash_qla.integrations.transformers import recurrent_gated_delta_rule, use_flash_qla  # noqa: E402

NEW = 12  # tokens
DECODING, BY_PARTS = "decode_gated_delta_net", "decode_gated_delta_rule"
QWEN4_EXP = {
    **example.SIZES,
    **example.EXPERTS,
    "hc_count": 2,
    "hc_lowrank": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS = dict(example.MODELS)
if importlib.util.find_spec("transformers.models.qwen4_exp"):
    import_models_without_fla(["qwen4_exp"])
    MODELS["qwen4_exp"] = ("Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", QWEN4_EXP)
all_models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def with_all_models(monkeypatch):
    monkeypatch.setattr(example, "MODELS", MODELS)


def generate(model, tokens, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    with torch.no_grad():
        return model.generate(tokens, **options)


def check(model, tokens, decodes=DECODING, **options):
    """The same tokens; if the layers decode, then each linear layer by this op in each step after the prefill."""
    torch.manual_seed(3)
    expected = generate(model, tokens, **options)
    with use_flash_qla(model), Ran() as ran:
        torch.manual_seed(3)
        actual = generate(model, tokens, **options)
    assert torch.equal(actual, expected)
    if decodes:
        steps = actual.shape[1] - tokens.shape[1] - 1
        assert ran.ops.count(decodes) == steps * len(gated_delta_nets(model))
    return actual


@all_models
@pytest.mark.parametrize("cache", ("dynamic", "static"))
def test_greedy(name, cache):
    """A static cache compiles nothing on the CPU. Older releases have none for linear layers."""
    model, tokens = small_model(name), text(40)
    if cache == "static":
        try:
            generate(model, tokens, cache_implementation=cache)
        except KeyError as error:
            pytest.skip(f"transformers {transformers.__version__} has no static cache for {name}: {error!r}")
    check(model, tokens, cache_implementation=cache)


@all_models
def test_left_padded_batch(name):
    tokens = text(30, rows=3)
    mask = torch.ones_like(tokens)
    mask[0, :11] = mask[2, :3] = 0
    check(small_model(name), tokens, attention_mask=mask)


@all_models
def test_sampling(name):
    check(small_model(name), text(30, rows=2), do_sample=True, temperature=0.8, top_k=20)


@all_models
def test_beams(name):
    check(small_model(name), text(20), num_beams=3, decodes=None)


@all_models
def test_a_hook_on_a_part(name):
    """The layer's own forward then calls flash_qla's functions, on states that have their values first in memory."""
    model = small_model(name)
    (layer,) = gated_delta_nets(model)
    norm = getattr(layer, "norm", None) or layer.o_norm
    norm.register_forward_hook(lambda module, inputs, output: 0.5 * output)
    check(model, text(20), decodes=BY_PARTS)


def test_a_cache_that_is_reset():
    """As a static cache between two texts: the same addresses, and no state."""
    model = small_model()
    with torch.no_grad(), use_flash_qla(model):
        out, _ = example.prefill(model, text(20))
        cache = example.cache_of(model, out)
        if not hasattr(cache, "layers"):
            pytest.skip(f"transformers {transformers.__version__} has another cache")
        (layer,) = gated_delta_nets(model)
        hidden = torch.randn(1, 1, layer.hidden_size)
        argument = "cache" if "cache" in inspect.signature(layer.forward).parameters else "cache_params"
        with Ran() as ran:
            layer(hidden, **{argument: cache})
            cache.reset()
            again = layer(hidden, **{argument: cache})
        assert ran.ops == [DECODING, "gated_delta_net"]
        torch.testing.assert_close(again, layer(hidden))


@all_models
def test_compiled_decoding(name):
    """A step of decoding is one graph, and gives what it gives without compilation."""
    torch._dynamo.reset()
    model = small_model(name)
    use_flash_qla(model)
    (layer,) = gated_delta_nets(model)
    with torch.no_grad():
        out, _ = example.prefill(model, text(20))
        cache = example.cache_of(model, out)
        if not hasattr(cache, "layers"):
            pytest.skip(f"transformers {transformers.__version__} has another cache for {name}")
        index, hidden = layer.layer_idx, torch.randn(1, 1, layer.hidden_size)
        argument = "cache" if "cache" in inspect.signature(layer.forward).parameters else "cache_params"
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        results = []
        for run in (layer, compiled):
            state = cache.layers[index].recurrent_states
            states = list(state.values()) if isinstance(state, dict) else [state]
            convolutions = cache.layers[index].conv_states
            convolutions = list(convolutions.values()) if isinstance(convolutions, dict) else [convolutions]
            before = [x.clone() for x in (*states, *convolutions) if x is not None]
            o = run(hidden, **{argument: cache})
            results.append((o, *(x.clone() for x in (*states, *convolutions) if x is not None)))
            for x, y in zip((x for x in (*states, *convolutions) if x is not None), before, strict=True):
                x.copy_(y)
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


def test_one_token_with_gradients():
    """Gradients flow through a step from a cached state, as in the model's own function."""
    q, k = torch.randn(2, 1, 1, 2, 16, requires_grad=True)
    v, g, beta = torch.randn(1, 1, 2, 8, requires_grad=True), -torch.rand(1, 1, 2), torch.rand(1, 1, 2)
    state = torch.randn(1, 2, 16, 8, requires_grad=True)
    arguments = {"g": g, "beta": beta, "initial_state": state, "output_final_state": True}
    with Ran() as ran:
        o, final_state = recurrent_gated_delta_rule(q, k, v, **arguments, position_ids=None)
        gradients = torch.autograd.grad(o.sum() + final_state.sum(), (v, state))
    assert BY_PARTS not in ran.ops and all(x.any() for x in gradients)
    with torch.no_grad(), Ran() as ran:
        without, states = recurrent_gated_delta_rule(q, k, v, **arguments)
    assert ran.ops == [BY_PARTS]
    torch.testing.assert_close(without, o)
    torch.testing.assert_close(states, final_state)
