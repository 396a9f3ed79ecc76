"""flash_qla.integrations.fla.fused_recurrent_gated_delta_rule, which needs no FLA, against the recurrence in fp64."""

import pytest
import reference
import torch
from accuracy import relative_error
from cases import Case, make_inputs, parametrize
from dispatched import Ran

from flash_qla.integrations.fla import fused_recurrent_gated_delta_rule

BARS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6, torch.float64: 1e-13}  # of o, by its dtype
STATE_BARS = {torch.float32: 1e-5, torch.float64: 1e-13}
FEW = {"H_k": 1, "H_v": 2, "K": 64, "V": 72}


def arguments_of(case: Case, device: str) -> dict:
    inputs = make_inputs(case, device)
    del inputs["auto_cp"]
    return inputs


@parametrize(
    # The op has all pairs of its options; these are the ways through the function.
    Case(T=1, **FEW, use_qk_l2norm_in_kernel=True, keys="raw", state_v_first=True),
    Case(T=1, **FEW, initial_state=None),
    Case(T=1, **FEW, initial_state=torch.bfloat16, dtype=torch.float16, g_dtype=torch.bfloat16),
    Case(B=3, T=5, **FEW, state_v_first=True, scale=0.3),
    Case(lengths=(1, 0, 6, 11), **FEW, cu_dtype=torch.int64, padding=3),
    Case(lengths=(0, 1, 0), **FEW),  # one token in all, and states that stay as they are
    Case(lengths=(4, 2), **FEW, state_v_first=True, initial_state=None),
    Case(B=2, T=3, **FEW, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
)
def test_function(case, device):
    inputs = arguments_of(case, device)
    before = None if inputs["initial_state"] is None else inputs["initial_state"].clone()
    with Ran() as ran:
        o, final_state = fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
    assert ran.ops == ["decode_gated_delta_rule"]
    expected = reference.gated_delta_rule(**inputs)
    assert o.dtype == case.dtype and final_state.dtype == torch.float32
    assert relative_error(o, expected.o) <= BARS[case.dtype]
    assert final_state.shape == expected.final_state.shape
    assert relative_error(final_state, expected.final_state) <= STATE_BARS[torch.float32]
    assert before is None or torch.equal(inputs["initial_state"], before)
    alone, nothing = fused_recurrent_gated_delta_rule(**inputs)
    assert torch.equal(alone, o) and nothing is None
    assert before is None or torch.equal(inputs["initial_state"], before)


@pytest.mark.parametrize("T", (1, 4))
def test_one_piece_after_the_other(T, device):
    """The final state of a call is the first of the next one."""
    inputs = arguments_of(Case(B=2, T=8, **FEW), device)
    tokens = {name: inputs.pop(name).split(T, 1) for name in ("q", "k", "v", "g", "beta")}
    expected = reference.gated_delta_rule(**inputs, **{name: torch.cat(x, 1) for name, x in tokens.items()})
    state, pieces = inputs.pop("initial_state"), []
    for i in range(8 // T):
        piece = {name: x[i] for name, x in tokens.items()}
        o, state = fused_recurrent_gated_delta_rule(**inputs, **piece, initial_state=state, output_final_state=True)
        pieces.append(o)
    assert relative_error(torch.cat(pieces, 1), expected.o) <= BARS[torch.bfloat16]
    assert relative_error(state, expected.final_state) <= STATE_BARS[torch.float32]


@pytest.mark.parametrize("missing", ("g", "beta"))
def test_without_gates(missing, device):
    """No decay, and step sizes of 1."""
    inputs = arguments_of(Case(T=3, **FEW), device)
    neutral = torch.zeros_like(inputs["g"]) if missing == "g" else torch.ones_like(inputs["beta"])
    expected = fused_recurrent_gated_delta_rule(**inputs | {missing: neutral}, output_final_state=True)
    del inputs[missing]
    actual = fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_states_with_gaps(device):
    inputs = arguments_of(Case(B=3, T=1, **FEW), device)
    expected = fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
    state = inputs["initial_state"]
    wider = torch.full((*state.shape[:3], state.shape[3] + 8), torch.nan, device=device)
    wider[..., : state.shape[3]] = state
    inputs["initial_state"] = wider[..., : state.shape[3]]
    actual = fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("v_first", (False, True))
def test_older_name_of_the_layout(v_first):
    inputs = arguments_of(Case(T=2, **FEW, state_v_first=v_first), "cpu")
    expected = fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
    del inputs["state_v_first"]
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        actual = fused_recurrent_gated_delta_rule(**inputs, transpose_state_layout=v_first, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("T", (1, 3))
def test_compile(T, device):
    """One graph, and the caller's state stays as it is."""
    torch._dynamo.reset()
    compiled = torch.compile(fused_recurrent_gated_delta_rule, fullgraph=True, backend="aot_eager")
    inputs = arguments_of(Case(B=2, T=T, **FEW), device)
    before = inputs["initial_state"].clone()
    expected = fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
    actual = compiled(**inputs, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    assert torch.equal(inputs["initial_state"], before)


def test_no_gradients():
    inputs = arguments_of(Case(T=2, **FEW), "cpu")
    inputs["q"].requires_grad_()
    o, _ = fused_recurrent_gated_delta_rule(**inputs)
    with pytest.raises(NotImplementedError, match="decode_gated_delta_rule is not implemented"):
        o.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"gk": torch.zeros(1)}, NotImplementedError, "gk is a tensor, expected None"),
        ({"gv": torch.zeros(1)}, NotImplementedError, "gv is a tensor, expected None"),
        ({"use_gate_in_kernel": True}, ValueError, "A_log is None, expected a tensor with use_gate_in_kernel"),
        ({"use_gate_in_kernel": True, "g": None}, ValueError, "g is None, expected a tensor"),
        ({"something": 1}, TypeError, "unexpected keyword argument 'something'"),
        ({"allow_neg_eigval": True}, RuntimeError, "allow_neg_eigval is True"),
        ({"state_v_first": True, "transpose_state_layout": True}, ValueError, "got both"),
        ({"initial_state": torch.zeros(3, 2, 64, 72)}, RuntimeError, "state_pool has 3 states, expected 1"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_errors(change, error, text):
    inputs = arguments_of(Case(T=1, **FEW), "cpu")
    with pytest.raises(error, match=text):
        fused_recurrent_gated_delta_rule(**inputs | change)
