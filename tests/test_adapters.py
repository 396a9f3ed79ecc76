"""Each argument of the functions for FLA, transformers and Megatron changes the op's call: that, and nothing else.

A row of a table has an argument, what it needs beside it, its value, and what changes in the call. Each argument of a
function has a row, so a new one fails until it has.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import pytest
import torch
from dispatched import Ran
from ranks import GroupOfOne

import flash_qla
from flash_qla.cp import build_cp_context
from flash_qla.integrations import fla, megatron, transformers

T, H_K, H_V, K, V = 6, 1, 2, 8, 16
NOTHING = {}
OF_GATE = {"A_log": torch.full((H_V,), -1.0), "dt_bias": torch.ones(H_V)}
GATE = {"use_gate_in_kernel": True} | OF_GATE
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
OFFSETS = torch.tensor([0, 1, T])
STATE = torch.rand(1, H_V, K, V)


def tokens(seed: int, count: int = T) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(1, count, *shape, generator=generator)

    return {"q": rand(H_K, K), "k": rand(H_K, K), "v": rand(H_V, V), "g": -rand(H_V), "beta": rand(H_V)}


OTHER = tokens(1)


@dataclasses.dataclass
class Row:
    argument: str
    value: object
    changes: dict  # arguments of the op -> their values; ...: any other value
    beside: dict = dataclasses.field(default_factory=dict)  # other arguments of both calls
    needs: dict = dataclasses.field(default_factory=dict)  # and of the one with the argument

    def __str__(self):
        return self.argument


def same(x: object, y: object) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.dtype == y.dtype and torch.equal(x, y)
    return type(x) is type(y) and x == y


def op_call(function: Callable, arguments: dict) -> dict:
    """The op's arguments by name, after the function's only call of an op."""
    with pytest.MonkeyPatch.context() as patch, Ran() as ran:
        patch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # or cu_seqlens_cpu would have no effect
        function(**arguments)
    (op,), (recorded,) = ran.ops, ran.arguments
    schema = getattr(torch.ops.flash_qla, op).default._schema.arguments
    return {"op": op} | {x.name: recorded.get(x.name, x.default_value) for x in schema}


def check(function: Callable, row: Row, base: dict) -> None:
    without = base | row.beside
    before, after = (op_call(function, x) for x in (without, without | row.needs | {row.argument: row.value}))
    changed = {name: x for name, x in after.items() if not same(x, before.get(name))}
    assert changed.keys() == row.changes.keys()
    assert all(x is ... or same(x, changed[name]) for name, x in row.changes.items()), changed


def parameters_of(*functions: Callable) -> set[str]:
    parameters = [x for function in functions for x in inspect.signature(function).parameters.values()]
    return {x.name for x in parameters if x.kind is not x.VAR_KEYWORD}


def of_tokens(names: dict[str, str]) -> list[Row]:
    """Rows of q, k, v, g and beta, by the function's names for them -> the op's."""
    return [Row(name, x, {op: x}) for (name, op), x in zip(names.items(), OTHER.values(), strict=True)]


TOKENS = dict(zip(OTHER, OTHER, strict=True))
# Of flash_qla.chunk_gated_delta_rule, under the same names
OPTIONS = [
    Row("scale", 0.3, {"scale": 0.3}),
    Row("initial_state", STATE, {"initial_state": STATE}),
    Row("output_final_state", True, {"output_final_state": True}),
    Row("use_qk_l2norm_in_kernel", True, {"use_qk_l2norm_in_kernel": True}),
    Row("cu_seqlens", OFFSETS, {"cu_seqlens": OFFSETS}),
]
ACTIVATIONS = [
    Row("use_gate_in_kernel", True, GATE, needs=OF_GATE),
    Row("A_log", torch.zeros(H_V), {"A_log": torch.zeros(H_V)}, GATE),
    Row("dt_bias", torch.zeros(H_V), {"dt_bias": torch.zeros(H_V)}, GATE),
    Row("use_beta_sigmoid_in_kernel", True, SIGMOID),
    Row("allow_neg_eigval", True, {"allow_neg_eigval": True}, SIGMOID),
]
LAYOUTS = [Row("state_v_first", True, {"state_v_first": True})]
IGNORED = [Row("chunk_indices", torch.tensor([[0, 0]]), NOTHING), Row("chunk_size", 64, NOTHING)]
KNOWN_LENGTHS = [Row("cu_seqlens_cpu", OFFSETS, {"max_seqlen": T - 1}, {"cu_seqlens": OFFSETS})]
CONTEXT = build_cp_context(OFFSETS, GroupOfOne())
CONTEXTS = [Row("cp_context", CONTEXT, {"cu_seqlens": CONTEXT.cu_seqlens})]

FLA = [
    *of_tokens(TOKENS),
    *(*OPTIONS, *ACTIVATIONS, *LAYOUTS, *IGNORED, *KNOWN_LENGTHS, *CONTEXTS),
    Row("transpose_state_layout", True, {"state_v_first": True}),
    Row("head_first", False, NOTHING),
]


@pytest.mark.filterwarnings("ignore:transpose_state_layout:DeprecationWarning")
@pytest.mark.parametrize("row", FLA, ids=str)
def test_fla(row):
    check(fla.chunk_gated_delta_rule, row, tokens(0))


def test_every_argument_of_fla():
    assert {x.argument for x in FLA} == parameters_of(fla.chunk_gated_delta_rule) | fla._KEYWORDS | {
        "transpose_state_layout"
    }


# The state is read from a copy, or from zeros, and is written there.
DECODED = {"q": "q", "k": "k", "v": "v", "g": "a", "beta": "b"}
RECURRENT = [
    *of_tokens(DECODED),
    Row("scale", 0.3, {"scale": 0.3}),
    Row("initial_state", STATE, {"state_pool": STATE}),
    Row("output_final_state", True, {"update_state": True, "state_pool": ...}),  # which the op then writes
    Row("use_qk_l2norm_in_kernel", True, {"use_qk_l2norm_in_kernel": True}),
    Row("use_gate_in_kernel", True, OF_GATE, needs=OF_GATE),
    Row("A_log", torch.zeros(H_V), {"A_log": torch.zeros(H_V)}, GATE),
    Row("dt_bias", torch.zeros(H_V), {"dt_bias": torch.zeros(H_V)}, GATE),
    Row("use_beta_sigmoid_in_kernel", True, SIGMOID),
    Row("allow_neg_eigval", True, {"allow_neg_eigval": True}, SIGMOID),
    *(
        Row(name, True, {"state_v_first": True, "state_pool": torch.zeros(1, H_V, V, K)})
        for name in ("state_v_first", "transpose_state_layout")
    ),
    Row("cu_seqlens", OFFSETS, {"cu_seqlens": OFFSETS, "state_pool": torch.zeros(2, H_V, K, V)}),
]


@pytest.mark.filterwarnings("ignore:transpose_state_layout:DeprecationWarning")
@pytest.mark.parametrize("row", RECURRENT, ids=str)
def test_recurrent_of_fla(row):
    check(fla.fused_recurrent_gated_delta_rule, row, tokens(0))


def test_every_argument_of_recurrent_of_fla():
    """gk and gv are refused (test_fla_decode.py)."""
    expected = parameters_of(fla.fused_recurrent_gated_delta_rule) | {"transpose_state_layout"}
    assert {x.argument for x in RECURRENT} == expected - {"gk", "gv"}


@pytest.mark.parametrize("state", (None, STATE), ids=("no state", "a state"))
def test_states_of_one_token(state):
    """With a state, one token's state goes to other memory; without, or with more tokens, to what was read."""
    arguments = tokens(0, 1) | {"initial_state": state, "output_final_state": True}
    call = op_call(fla.fused_recurrent_gated_delta_rule, arguments)
    assert call["update_state"] == (state is None) and (call["intermediate_states"] is None) == (state is None)
    assert state is None or call["state_pool"] is state


# transformers


def values_first(rows: list[Row]) -> list[Row]:
    """The same rows for functions that return a final state whose values are first in memory."""

    def changed(row: Row) -> Row:
        return dataclasses.replace(row, changes=row.changes | {"state_v_first": True})

    return [changed(row) if row.argument == "output_final_state" else row for row in rows]


NAMES = {"query": "q", "key": "k", "value": "v", "g": "g", "beta": "beta"}
BASE = dict(zip(NAMES, tokens(0).values(), strict=True))
TRANSFORMERS = [
    *of_tokens(NAMES),
    *(*OPTIONS, *ACTIVATIONS, *LAYOUTS, *IGNORED, *KNOWN_LENGTHS, *CONTEXTS),
    Row("auto_cp", False, {"auto_cp": False}),
    Row("state_dtype", torch.bfloat16, {"state_dtype": torch.bfloat16}),
    Row("max_seqlen", 3, {"max_seqlen": 3}, {"cu_seqlens": OFFSETS}),
    Row("max_length_q", 3, {"max_seqlen": 3}, {"cu_seqlens": OFFSETS}),
    *(Row(name, False, NOTHING) for name in ("head_first", "transpose_state_layout")),
    *(Row(name, True, NOTHING) for name in ("enable_fwd_cp_cache", "position_ids", "max_length_k")),
    Row("force_intra_cp", True, NOTHING, {"auto_cp": False}),
    Row("seq_idx", torch.zeros(1, T), NOTHING, {"cu_seqlens": OFFSETS}),
]


@pytest.mark.parametrize("row", values_first(TRANSFORMERS), ids=str)
def test_transformers(row):
    check(transformers.chunk_gated_delta_rule, row, BASE)


def test_every_argument_of_transformers():
    """Those of flash_qla's function, and the keywords of the model that it knows or drops."""
    known = transformers._KEYWORDS - set(TOKENS)
    of_model = {"max_length_q", "max_length_k", "position_ids", "seq_idx"}
    assert {x.argument for x in TRANSFORMERS} == parameters_of(transformers.chunk_gated_delta_rule) | known | of_model


DECODED_NAMES = dict(zip(NAMES, DECODED.values(), strict=True))
STEP = [
    *of_tokens(DECODED_NAMES),
    *(x for x in RECURRENT if x.argument not in DECODED),
    *(Row(name, None, NOTHING) for name in ("gk", "gv")),
    *(Row(name, True, NOTHING) for name in ("position_ids", "max_length_q")),
]


@pytest.mark.parametrize("row", values_first([x for x in STEP if x.argument != "transpose_state_layout"]), ids=str)
def test_recurrent_of_transformers(row):
    check(transformers.recurrent_gated_delta_rule, row, BASE)


def test_every_argument_of_recurrent_of_transformers():
    known = transformers._RECURRENT_KEYWORDS - set(TOKENS) | parameters_of(transformers.recurrent_gated_delta_rule)
    assert {x.argument for x in STEP} == known | {"transpose_state_layout", "position_ids", "max_length_q"}


@pytest.mark.parametrize("name", (*NAMES, "initial_state"))
def test_a_step_with_a_gradient_of_one_tensor(name):
    """The state alone, too. Such a step goes to the function that has a derivative."""
    arguments = BASE | {"initial_state": STATE, "output_final_state": True}
    leaf = arguments[name].clone().requires_grad_()
    with Ran() as ran:
        o, state = transformers.recurrent_gated_delta_rule(**arguments | {name: leaf})
        (gradient,) = torch.autograd.grad(o.sum() + state.sum(), leaf)
    assert ran.ops == ["chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd"] and gradient.any()
    with torch.no_grad(), Ran() as ran:
        transformers.recurrent_gated_delta_rule(**arguments | {name: leaf})
    assert ran.ops == ["decode_gated_delta_rule"]


# Megatron

MEGATRON = [*of_tokens(TOKENS), *OPTIONS[1:], Row("chunk_size", 64, NOTHING)]


@pytest.mark.parametrize("row", MEGATRON, ids=str)
def test_megatron(row):
    check(megatron.torch_chunk_gated_delta_rule, row, tokens(0))


def test_every_argument_of_megatron():
    assert {x.argument for x in MEGATRON} == parameters_of(megatron.torch_chunk_gated_delta_rule)


def test_convolution_of_megatron():
    """Every argument reaches flash_qla.causal_conv1d."""
    x, weight, bias, window = torch.rand(1, T, 3), torch.rand(3, 4), torch.rand(3), torch.rand(2, 3, 3)
    options = {"activation": "silu", "initial_state": window, "output_final_state": True, "cu_seqlens": OFFSETS}
    actual, expected = (f(x, weight, bias, **options) for f in (megatron.causal_conv1d, flash_qla.causal_conv1d))
    assert all(map(torch.equal, actual, expected))


def test_norm_of_megatron():
    x = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(megatron.l2norm(x, eps=11.0), x / 6)
