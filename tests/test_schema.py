"""The public functions and the schemas of the ops say the same: what is written down twice is compared here."""

import inspect
from types import SimpleNamespace
from typing import Literal, get_type_hints
from unittest.mock import sentinel

import pytest
import torch

import flash_qla
from flash_qla.ops import schemas

OPS = (
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_fwd",
    "chunk_gated_delta_rule_bwd",
    "prefill_gated_delta_rule",
    "decode_gated_delta_rule",
    "decode_gated_delta_rule_packed",
    "decode_gated_delta_rule_buffered",
    "gated_rms_norm",
    "decode_gated_delta_net",
)
REGIONS = ("gated_delta_net", "prefill_gated_delta_net")  # whose functions give z its heads

# Functions of other names than their ops
FUNCTIONS = {"chunk_gated_delta_rule_fwd": "chunk_gated_delta_rule_intermediates"}
# Parameters of the functions that the ops do not have
EXTRA = ("head_first", "cp_context", "others", "cp_cache", "enable_fwd_cp_cache", "force_intra_cp")
HINTS = {
    "Tensor": torch.Tensor,
    "Optional[Tensor]": torch.Tensor | None,
    "Optional[float]": float | None,
    "Optional[ScalarType]": torch.dtype | None,
    "bool": bool,
    "float": float,
    "str": Literal["silu", "sigmoid"],
    "Optional[bool]": bool | None,
    "int": int,
    "Optional[int]": int | None,  # a SymInt?
}


def schema_of(op: str):
    return getattr(torch.ops.flash_qla, op).default._schema


def function_of(op: str):
    return getattr(flash_qla, FUNCTIONS.get(op, op))


def parameters_of(op: str) -> list[inspect.Parameter]:
    parameters = inspect.signature(function_of(op)).parameters.values()
    return [x for x in parameters if x.name not in EXTRA]


@pytest.mark.parametrize("op", (*OPS, *REGIONS))
def test_signatures(op):
    """Names, their order, defaults and types."""
    hints = get_type_hints(function_of(op))
    expected = [
        (x.name, x.default_value if x.has_default_value() else inspect.Parameter.empty, HINTS[str(x.real_type)])
        for x in schema_of(op).arguments
    ]
    assert [(x.name, x.default, hints[x.name]) for x in parameters_of(op)] == expected


@pytest.mark.parametrize("op", OPS)
def test_functions_pass_their_arguments_on(op, monkeypatch):
    """Each in its own place."""
    arguments = {x.name: getattr(sentinel, x.name) for x in parameters_of(op)}
    results = tuple(getattr(sentinel, x.name) for x in schema_of(op).returns)
    calls = []

    def record(*args):
        calls.append(args)
        return results

    monkeypatch.setattr(torch.ops, "flash_qla", SimpleNamespace(**{op: record}))
    assert function_of(op)(**arguments) == arguments.get("out", results)
    assert calls == [tuple(arguments.values())]


def test_the_backward_has_all_its_arguments():
    """The arguments come from the forward's call by their names, or from its results and their gradients; g_raw is the
    forward's g."""
    forward, backward = ({x.name for x in schema_of(op).arguments} for op in OPS[1:3])
    assert backward - forward == {"A", "do", "dht", "g_raw"}
    assert {x.name for x in schema_of(OPS[0]).arguments} <= forward


@pytest.mark.parametrize("op", OPS)
def test_defaults_that_the_dispatcher_leaves_out(op):
    call = schemas.call_of(getattr(torch.ops.flash_qla, op).default)
    required = [x.name for x in schema_of(op).arguments if not x.has_default_value()]
    defaults = [x.default_value for x in schema_of(op).arguments if x.has_default_value()]
    assert call(*required) == (*required, *defaults)
    with pytest.raises(TypeError):
        call(*required[1:])
