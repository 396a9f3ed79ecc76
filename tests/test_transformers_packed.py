"""Packed sequences in transformers' models: all layers keep them apart, with flash_qla and a convolution by
causal-conv1d. On the CPU a stand-in takes the package's place.

The reference is each sequence by itself in the model's own torch code.
"""

import importlib
import sys

import convolution
import pytest
import torch
from test_transformers import BF16_RATIO, FP32_TOLERANCE, all_models, example, mean_error, small_model, text
from transformers import DataCollatorWithFlattening

from flash_qla.integrations.transformers import use_flash_qla

LENGTHS = (70, 1, 65, 4)


def import_again(name: str):
    """The module of a model, imported once more, so that it looks for the packages that can be imported now."""
    path = f"transformers.models.{name}.modeling_{name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, path)
        patch.setitem(sys.modules, "fla", None)
        return importlib.import_module(path)


def with_convolution(model, device: str, monkeypatch):
    """The same model, with the convolution of causal-conv1d in its layers."""
    if device == "cpu":
        monkeypatch.setitem(sys.modules, "causal_conv1d", convolution.package())
    else:
        pytest.importorskip("causal_conv1d", reason="causal-conv1d is not installed")
    name = type(model).__module__.rpartition("modeling_")[2]
    packed = getattr(import_again(name), type(model).__name__)(model.config)
    packed.load_state_dict(model.state_dict())
    return packed.to(device, model.dtype)


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
def test_packed_training(name, device, monkeypatch):
    """Logits and all gradients of a packed batch are those of its sequences."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = small_model(name, device=device, dtype=dtype)
    ours = with_convolution(model, device, monkeypatch)
    use_flash_qla(ours)
    found = gradients(ours, [packed(device, return_seq_idx=True)])
    own = gradients(model, one_by_one(device))
    if dtype == torch.float32:
        assert max(example.relative_error(found[key], x) for key, x in own.items()) < FP32_TOLERANCE
        return
    exact = gradients(model.float(), one_by_one(device))
    for keys in (["logits"], [key for key in exact if key != "logits"]):
        part = {key: exact[key] for key in keys}
        our_error, own_error = (mean_error(x, part) for x in (found, own))
        assert our_error < BF16_RATIO * own_error, f"{our_error:.2e} from fp32, torch {own_error:.2e}"


def test_without_causal_conv1d():
    """transformers says what to install."""
    model = small_model()
    use_flash_qla(model)
    with pytest.raises(ValueError, match=r"causal.conv1d"):
        model(**packed("cpu", return_seq_idx=True), use_cache=False)
