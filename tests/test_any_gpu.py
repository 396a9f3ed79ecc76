"""On GPUs other than Hopper's, packages keep their own functions unless FLASH_QLA_ANY_GPU=1."""

import logging
import sys
import types

import pytest
import torch

from flash_qla.integrations import _engines, _gpus, transformers

OTHERS = ((8, 0), (8, 6), (8, 9), (10, 0), (11, 0), (12, 0))
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("capability", (*OTHERS, (9, 0)))
def test_which_gpus(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _gpus.keeps_theirs(CUDA) == (capability != (9, 0))
    assert not _gpus.keeps_theirs(CPU)
    monkeypatch.setenv("FLASH_QLA_ANY_GPU", "1")
    assert not _gpus.keeps_theirs(CUDA)


def theirs(x, scale=1.0):
    return "theirs"


def ours(x, scale=1.0):
    return "ours"


@pytest.fixture
def engine(monkeypatch):
    """An engine's module with flash_qla's function in place."""
    module = types.ModuleType("engine.layers")
    module.function, module.other = theirs, None
    monkeypatch.setitem(sys.modules, "engine.layers", module)
    replacement = _engines.Replacement(
        "engine 1.0", {"engine.layers": {"function": (ours,)}}, unchecked={"engine.layers": {"other": ours}}
    )
    replacement.use()
    replacement.use()  # changes nothing more
    yield module
    replacement.restore()
    assert module.function is theirs and module.other is None


def test_an_engine_keeps_its_function(engine, monkeypatch, caplog):
    x = torch.zeros(1)
    assert (engine.function(x), engine.function(x=x), engine.other(x)) == ("ours", "ours", "ours")
    monkeypatch.setattr(_engines, "keeps_theirs", lambda device: True)
    with caplog.at_level(logging.INFO, "engine.flash_qla"):
        assert (engine.function(x), engine.function(scale=2.0, x=x)) == ("theirs", "theirs")
    assert [record.getMessage() for record in caplog.records] == [f"engine runs its own function: {_gpus.REASON}"]
    assert engine.other(x) == "ours"  # the engine has none


def test_a_model_keeps_its_functions(monkeypatch, caplog):
    layer = torch.nn.Module()
    layer.chunk_gated_delta_rule = layer.recurrent_gated_delta_rule = theirs
    model = torch.nn.ModuleList([layer])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert transformers.use_flash_qla(model).layers == {}
    assert layer.chunk_gated_delta_rule is theirs and _gpus.REASON in caplog.text
    monkeypatch.setenv("FLASH_QLA_ANY_GPU", "1")
    with transformers.use_flash_qla(model) as switched:
        assert list(switched.layers) == ["0"] and layer.chunk_gated_delta_rule is transformers.chunk_gated_delta_rule
    assert layer.chunk_gated_delta_rule is theirs
