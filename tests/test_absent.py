"""Absent is not empty: an optional tensor without elements is there, although its data pointer is null."""

import itertools

import pytest
import test_decode
import test_prefill
import torch
from cases import Case, make_inputs
from test_prefill import check_pool, copied, of_modes

import flash_qla

LENGTHS = (200, 64, 0, 30)


def indices(*shape, device, dtype=torch.int32):
    return torch.zeros(*shape, dtype=dtype, device=device)


def prefill_arguments(device, lengths=LENGTHS):
    case = Case(lengths=lengths, **test_prefill.SIZES)
    return test_prefill.make_arguments(case, device=device)


@of_modes(*test_prefill.MODES)
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_no_columns_of_checkpoints(device, mode, dtype):
    """No checkpoint is kept: only the sequences' own slots are written."""
    arguments = prefill_arguments(device)
    table = indices(len(LENGTHS), 0, device=device, dtype=dtype)
    with test_prefill.in_mode(device, mode):
        o, before = None, copied(arguments["state_pool"])
        _, states = test_prefill.by_hand(arguments)
        o = flash_qla.prefill_gated_delta_rule(**arguments, checkpoint_every=64, checkpoint_indices=table)
    assert o.isfinite().all()
    check_pool(arguments["state_pool"], before, states)


@of_modes(*test_prefill.MODES)
def test_no_rows_of_checkpoints(device, mode):
    """Sequences that are too short to have any."""
    arguments = prefill_arguments(device, (63, 0, 30))
    checkpoints = arguments["state_pool"].new_empty(0, *arguments["state_pool"].shape[1:])
    with test_prefill.in_mode(device, mode):
        before = copied(arguments["state_pool"])
        _, states = test_prefill.by_hand(arguments)
        flash_qla.prefill_gated_delta_rule(**arguments, checkpoint_every=64, checkpoints=checkpoints)
    check_pool(arguments["state_pool"], before, states)


def test_no_sequences(device):
    """All tables are empty, and so may the pool be."""
    arguments = prefill_arguments(device, ())
    T = 5
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name] = arguments[name].new_ones(1, T, *arguments[name].shape[2:])
    arguments |= {"has_initial_state": torch.zeros(0, dtype=torch.bool, device=device)}
    for pool in (arguments["state_pool"], arguments["state_pool"][:0]):
        before = pool.clone()
        o = flash_qla.prefill_gated_delta_rule(
            **arguments | {"state_pool": pool},
            checkpoint_every=64,
            checkpoint_indices=indices(0, 0, device=device),
        )
        assert not o.any() and torch.equal(pool.nan_to_num(7), before.nan_to_num(7))

    inputs = make_inputs(Case(lengths=(), padding=T, **test_prefill.SIZES | {"dtype": arguments["q"].dtype}), device)
    assert inputs["initial_state"].numel() == 0
    o, state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert not o.any() and state.shape == inputs["initial_state"].shape


@pytest.mark.parametrize("slots", (0, 20))
def test_no_slot_in_an_empty_pool(device, slots):
    """Sequences without a slot, of a pool that may have none."""
    arguments = prefill_arguments(device)
    pool = arguments["state_pool"] = arguments["state_pool"][:slots]
    arguments["state_indices"].fill_(-1)
    before = pool.clone()
    o = flash_qla.prefill_gated_delta_rule(**arguments)
    assert not o.any() and torch.equal(pool, before)


DECODED = {
    "write_indices": lambda N, S, device: {"write_indices": indices(N, 0, device=device)},
    "parents": lambda N, S, device: {"parents": indices(N, 0, device=device), "update_state": False},
}


@pytest.mark.parametrize(("name", "T"), list(itertools.product(DECODED, (1, 3))))
@pytest.mark.parametrize("state_dtype", (torch.float32, torch.bfloat16), ids=str)
def test_decoding_with_tables_without_columns(device, name, T, state_dtype):
    """No state is written; tokens beyond the columns of parents follow one another."""
    case = test_decode.for_device(test_decode.Case(T=T, state_dtype=state_dtype), device)
    inputs = test_decode.make_inputs(case, device)
    expected = flash_qla.decode_gated_delta_rule(**inputs | {"state_pool": inputs["state_pool"].clone()})
    before = inputs["state_pool"].clone()
    o = flash_qla.decode_gated_delta_rule(**inputs, **DECODED[name](case.B, T, device))
    assert torch.equal(inputs["state_pool"], before)
    assert test_decode.relative_error(o, expected.double()) < test_decode.BARS[o.dtype]


@pytest.mark.parametrize("steps", (0, 3))
@pytest.mark.parametrize("T", (1, 3))
def test_decoding_with_no_room_for_states(device, steps, T):
    """Rows of no steps; no rows at all, and sequences that want none."""
    case = test_decode.for_device(test_decode.Case(T=T), device)
    inputs = test_decode.make_inputs(case, device)
    expected_pool = inputs["state_pool"].clone()
    expected = flash_qla.decode_gated_delta_rule(**inputs | {"state_pool": expected_pool})
    rows = 0 if steps else case.B
    states = inputs["state_pool"].new_empty(rows, steps, *inputs["state_pool"].shape[1:])
    state_rows = indices(case.B, device=device) - (1 if steps else 0)
    state_rows += torch.arange(case.B, device=device, dtype=torch.int32) * (0 if steps else 1)
    o = flash_qla.decode_gated_delta_rule(**inputs, intermediate_states=states, intermediate_indices=state_rows)
    assert test_decode.relative_error(inputs["state_pool"], expected_pool.double()) < test_decode.BARS[o.dtype]
    assert test_decode.relative_error(o, expected.double()) < test_decode.BARS[o.dtype]
