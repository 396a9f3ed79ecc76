"""Packed sequences in transformers' models: all layers keep them apart, with flash_qla.

The reference is each sequence by itself in the model's own torch code.
"""

import inspect
import logging
import sys
import textwrap

import pytest
import torch
from dispatched import Ran
from test_transformers import BF16_RATIO, FP32_TOLERANCE, all_models, example, mean_error, small_model, text
from transformers import DataCollatorWithFlattening

from flash_qla.integrations import _transformers_layer
from flash_qla.integrations.transformers import _with_flash_qla, causal_conv1d, use_flash_qla

LENGTHS = (70, 1, 65, 4)


def sequences(lengths=LENGTHS) -> list[dict]:
    tokens = text(sum(lengths))[0].split(lengths)
    return [{"input_ids": x.tolist()} for x in tokens]


def packed(device: str, **options) -> dict:
    """The batch of transformers' collator: all sequences in one row."""
    collator = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True, **options)
    batch = collator(sequences())
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def gradients(model, batches: list[dict]) -> dict:
    """The logits of all batches, one after the other, and the gradients of the sum of their losses, by name."""
    model.train()
    model.zero_grad()
    logits = []
    for batch in batches:
        out = model(**batch, use_cache=False)
        logits.append(out.logits[0])
        targets = batch.get("labels", batch["input_ids"])[0, 1:]
        loss = torch.nn.functional.cross_entropy(out.logits[0, :-1].float(), targets, reduction="sum")
        if targets.numel():
            loss.backward()
    return {"logits": torch.cat(logits).detach()} | {name: x.grad for name, x in model.named_parameters()}


def one_by_one(device: str) -> list[dict]:
    return [{"input_ids": torch.tensor([x["input_ids"]], device=device)} for x in sequences()]


@all_models
@pytest.mark.parametrize("seq_idx", (False, True))
def test_packed_training(name, seq_idx, device):
    """Logits and all gradients of a packed batch are those of its sequences."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = small_model(name, device=device, dtype=dtype)
    with use_flash_qla(model):
        ours = gradients(model, [packed(device, return_seq_idx=seq_idx)])
        ours = {key: x.clone() for key, x in ours.items()}
    theirs = gradients(model, one_by_one(device))
    if dtype == torch.float32:
        assert max(example.relative_error(ours[key], x) for key, x in theirs.items()) < FP32_TOLERANCE
        return
    theirs = {key: x.clone() for key, x in theirs.items()}
    exact = gradients(model.float(), one_by_one(device))
    for keys in (["logits"], [key for key in exact if key != "logits"]):
        part = {key: exact[key] for key in keys}
        our_error, their_error = (mean_error(x, part) for x in (ours, theirs))
        assert our_error < BF16_RATIO * their_error, f"{our_error:.2e} from fp32, torch {their_error:.2e}"


def test_packed_sequences_do_not_continue_a_cache():
    """Then the convolution has rows of earlier tokens before the first sequence."""
    x, keywords = torch.randn(1, 8, 5 + 3), {"cu_seq_lens_q": torch.tensor([0, 2, 5])}
    for name in ("seq_idx", "position_ids"):
        with pytest.raises(ValueError, match="use_cache=False"):
            causal_conv1d(None, x, torch.randn(8, 4), **keywords, **{name: torch.zeros(1, 5)})


def test_other_convolutions():
    """A width that flash_qla.causal_conv1d does not have, or another activation, stays with the model's function."""
    calls = []

    def model_function(*args, **kwargs):
        calls.append(kwargs)
        return args[0]

    x = torch.randn(1, 8, 5)
    for weight, activation in ((torch.randn(8, 5), "silu"), (torch.randn(8, 4), "gelu")):
        assert causal_conv1d(model_function, x, weight, None, activation=activation, seq_idx=None) is x
    assert calls == [{"activation": activation, "seq_idx": None} for activation in ("silu", "gelu")]


@pytest.mark.parametrize("of_autocast", (None, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(
    ("dtype", "of_weight"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float32)],
    ids=str,
)
def test_a_convolution_returns_its_inputs_dtype(dtype, of_weight, of_autocast):
    """As the model's function does, whatever the dtypes of the weight and of autocast."""
    x, weight = torch.randn(1, 8, 5, dtype=dtype), torch.randn(8, 4, dtype=of_weight)
    with torch.autocast("cpu", of_autocast, enabled=of_autocast is not None):
        y = causal_conv1d(None, x, weight)
    exact = torch.nn.functional.conv1d(x.double(), weight.double()[:, None], padding=3, groups=8)[..., :5]
    assert y.dtype == dtype and example.relative_error(y, exact) < 1e-2


def test_a_convolution_that_something_has_replaced():
    """It stays; the one of the model's module does not."""
    for of in ("model", "elsewhere"):
        module = {"__name__": "model", "torch_chunk_gated_delta_rule": None, "causal_conv1d_fn": lambda x: "own"}
        module["causal_conv1d_fn"].__module__ = of
        exec("def forward(x): return causal_conv1d_fn, torch_chunk_gated_delta_rule", module)
        called, _ = _with_flash_qla(module["forward"])(None)
        assert (called is module["causal_conv1d_fn"]) == (of == "elsewhere")


HOOKED = {
    "a hook": lambda layer: layer.conv1d.register_forward_hook(lambda module, inputs, output: 2 * output),
    "another convolution": lambda layer: setattr(layer, "conv1d", Doubled(layer.conv1d)),
    "a hook of the norm": lambda layer: layer.norm.register_forward_pre_hook(lambda module, inputs: None),
}


class Doubled(torch.nn.Module):
    """As an adapter wraps a part."""

    def __init__(self, convolution: torch.nn.Conv1d):
        super().__init__()
        self.convolution, self.kernel_size = convolution, convolution.kernel_size
        self.weight, self.bias = torch.nn.Parameter(2 * convolution.weight.detach()), convolution.bias


@pytest.mark.parametrize("change", HOOKED)
def test_parts_of_another_kind(change, caplog, monkeypatch):
    """The op does not run where a part has a hook or is another one: the layer computes as without flash_qla."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level("INFO", "transformers.flash_qla")
    _transformers_layer._say.cache_clear()
    model, tokens = small_model(), text(70)
    (layer,) = [x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet")]
    with use_flash_qla(model):
        HOOKED[change](layer)
        with Ran() as ran, torch.no_grad():
            ours = model(tokens, use_cache=False).logits
    assert "gated_delta_net" not in ran.ops and "causal_conv1d" in ran.ops
    theirs = model(tokens, use_cache=False).logits
    assert example.relative_error(ours, theirs.detach()) < FP32_TOLERANCE
    assert "by parts: its " + ("norm" if "norm" in change else "convolution") in caplog.text


def test_another_formula_of_the_layer():
    """A release whose forward computes something else keeps it."""
    model = small_model()
    (layer,) = [x for x in model.modules() if type(x).__name__.endswith("GatedDeltaNet")]
    original = type(layer)
    namespace = {}
    source = textwrap.dedent(inspect.getsource(original.forward)).replace("b.sigmoid()", "b.sigmoid() * 0.5")
    exec(source, vars(sys.modules[original.__module__]), namespace)
    layer.__class__ = type(original.__name__, (original,), {**namespace, "__module__": original.__module__})
    tokens = text(70)
    theirs = model(tokens, use_cache=False).logits.detach()
    with use_flash_qla(model), Ran() as ran, torch.no_grad():
        ours = model(tokens, use_cache=False).logits
    assert "gated_delta_net" not in ran.ops and example.relative_error(ours, theirs) < FP32_TOLERANCE
