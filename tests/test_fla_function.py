"""FLA's functions on flash_qla, which programs import in FLA's place. They need no FLA."""

import published_ranks
import pytest
import torch
from cases import Case, make_inputs
from ranks import run_on_ranks
from subprocesses import run_python

import flash_qla
from flash_qla.integrations.fla import chunk_gated_delta_rule

TENSORS = ("q", "k", "v", "g", "beta")
PACKED = Case(lengths=(70, 0, 3), state_v_first=True)


def inputs_of(case: Case) -> tuple[list[torch.Tensor], dict]:
    inputs = make_inputs(case, "cpu")
    del inputs["auto_cp"]
    return [inputs.pop(name) for name in TENSORS], inputs


def assert_same(found, expected):
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_by_position():
    """In FLA's order, in which activations and the layout come earlier than in flash_qla's."""
    tensors, options = inputs_of(PACKED)
    h0, offsets = options["initial_state"], options["cu_seqlens"]
    expected = flash_qla.chunk_gated_delta_rule(
        *tensors, scale=0.3, initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=True, cu_seqlens=offsets,
    )  # fmt: skip
    indices = torch.tensor([[0, 0], [0, 1], [2, 0]])
    found = chunk_gated_delta_rule(
        *tensors, 0.3, h0, True, True, True, True, True, offsets, offsets.cpu(), indices, None, chunk_size=64
    )
    assert_same(found, expected)


def test_final_state_is_none_by_default():
    tensors, _ = inputs_of(Case(T=5))
    assert chunk_gated_delta_rule(*tensors)[1] is None


def test_gate():
    """A_log and dt_bias count with use_gate_in_kernel, and are ignored without, as in FLA."""
    tensors, _ = inputs_of(Case(T=5))
    gate = {"A_log": torch.zeros(4), "dt_bias": torch.ones(4)}
    expected = flash_qla.chunk_gated_delta_rule(*tensors, use_gate_in_kernel=True, **gate)
    assert torch.equal(chunk_gated_delta_rule(*tensors, use_gate_in_kernel=True, **gate)[0], expected[0])
    expected = flash_qla.chunk_gated_delta_rule(*tensors)
    assert torch.equal(chunk_gated_delta_rule(*tensors, **gate)[0], expected[0])


@pytest.mark.parametrize("v_first", (False, True))
def test_older_name_of_the_layout(v_first):
    tensors, options = inputs_of(Case(T=5, K=64, state_v_first=v_first))
    expected = flash_qla.chunk_gated_delta_rule(*tensors, **options, output_final_state=True)
    del options["state_v_first"]
    with pytest.warns(DeprecationWarning, match="older name of state_v_first"):
        found = chunk_gated_delta_rule(*tensors, **options, transpose_state_layout=v_first, output_final_state=True)
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    (
        ({"chunk_size": 32}, TypeError, "chunk_size is 32, expected 64"),
        ({"head_first": True}, TypeError, "head_first is True, expected False"),
        ({"no_such_keyword": None}, TypeError, "unexpected keyword argument 'no_such_keyword'"),
        ({"state_v_first": True, "transpose_state_layout": True}, ValueError, "expected one of state_v_first and"),
        ({"use_gate_in_kernel": True}, RuntimeError, "A_log is None"),
        ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens is of type list; pass a tensor"),
    ),
    ids=str,
)
def test_what_is_refused(arguments, error, message):
    tensors, _ = inputs_of(Case(T=5))
    with pytest.raises(error, match=message):
        chunk_gated_delta_rule(*tensors, **arguments)


def test_context():
    for same, chain, unknown in run_on_ranks(2, published_ranks.fla_contexts):
        assert same
        assert "use_tf32x3_affine_chain is False, expected True" in chain
        assert "unexpected keyword argument 'no_such_keyword'" in unknown


def test_without_fla():
    code = """
import sys
sys.modules["fla"] = None  # an import of it fails
from flash_qla.integrations import fla
try:
    fla.use_flash_qla()
except ImportError as error:
    print(error)
"""
    assert "fla" in run_python(code)
