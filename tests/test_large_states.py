"""States beyond the range of fp16, with fp16 tokens. Each value row of a state is linear in the same row of the values,
so each must have its digits, whatever the size of the others."""

import dataclasses

import pytest
import torch
from accuracy import BARS
from cases import Case, forward_mode, make_inputs, parametrize, reference_of
from poison import poisoned
from test_begin_finish import BEGIN, FINISH, by_name
from test_prefill import MODES as OF_KERNELS, of_modes

import flash_qla

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16
LARGEST = torch.finfo(FP16).max
CASE = Case(T=5, H_k=1, H_v=2, dtype=FP16, gate="logsigmoid", state_scale=2e6, state_v_first=True)
MODES = {"chosen": {}} | OF_KERNELS


def row_errors(actual: torch.Tensor, expected: torch.Tensor, dims: tuple[int, ...], least=0.0) -> float:
    """The largest relative error of a value row: norms over dims, which count as at least `least`. NaN if anything is
    NaN."""
    difference, norm = (torch.linalg.vector_norm(x, dim=dims) for x in (actual.double() - expected, expected))
    return (difference / norm.clamp_min(least)).max().item()


def check_o(o: torch.Tensor, expected: torch.Tensor, state: torch.Tensor, scale: float) -> None:
    """Rows that fp16 holds have its digits. Of the others, numbers are infinite exactly where they exceed the range, up
    to rounding. `state` is the first one, [N, H_v, V, K]: a product of its row with a query may be small by luck, but
    its error is not."""
    row = (scale * torch.linalg.vector_norm(state.double(), dim=-1) / state.shape[-1] ** 0.5).amax(0)
    sizes = expected.abs()
    fits = sizes.amax((0, 1)) < LARGEST / 2  # by head and value row
    if fits.any():
        assert row_errors(o[..., fits], expected[..., fits], (0, 1), row[fits]) < 2 * BARS[FP16]
    o, expected, sizes, slack = o[..., ~fits], expected[..., ~fits], sizes[..., ~fits], 16 * BARS[FP16] * row[~fits]
    assert o[sizes > LARGEST + slack].isinf().all() and not o.isnan().any()
    near = ((o.double() - expected).abs() <= slack + 0.01 * sizes) & o.isfinite()
    assert near[sizes < LARGEST - slack].all()


def check_state(state: torch.Tensor, expected: torch.Tensor) -> None:
    """Finite, and each value row, [..., V, K], has its digits."""
    assert row_errors(state, expected, (-1,)) < 4 * BARS[FP16]


def check(case: Case, inputs: dict, mode: dict) -> None:
    expected = reference_of(inputs)
    with forward_mode(**mode), poisoned(inputs["q"].device.type):
        o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
        _, _, low_level_o, h, low_level_state = flash_qla.chunk_gated_delta_rule_intermediates(
            **inputs, output_h=True, output_final_state=True
        )
    for x in (o, low_level_o):
        check_o(x, expected.o, inputs["initial_state"], case.scale)
    for x in (final_state, low_level_state):
        check_state(x, expected.final_state)
    # The state before each chunk is in fp16: what exceeds the range is infinite.
    sizes = expected.h.abs()
    slack = 16 * BARS[FP16] * sizes.mean(-1, keepdim=True)
    assert h[sizes > LARGEST + slack].isinf().all() and not h.isnan().any()
    assert h[sizes < LARGEST - slack].isfinite().all()


def with_rows_of_all_sizes(case: Case, device: str) -> dict:
    """The inputs with a state whose value rows have sizes from 0.01 up to the case's."""
    inputs = make_inputs(case, device)
    order = torch.randperm(case.V, generator=torch.Generator().manual_seed(7), device="cpu")
    sizes = torch.logspace(-8.3, 0, case.V)[order].to(device)
    inputs["initial_state"] *= sizes[:, None]
    return inputs


@of_modes(*MODES)
@pytest.mark.parametrize("scale", (2.0**-11, 1.0), ids=("in_range", "beyond"))
@pytest.mark.parametrize("T", (5, 300))
def test_forward(device, mode, T, scale):
    case = dataclasses.replace(CASE, T=T, scale=scale)
    check(case, make_inputs(case, device), MODES.get(mode, {}))


@of_modes(*MODES)
@parametrize(
    dataclasses.replace(CASE, T=200),
    dataclasses.replace(CASE, lengths=(70, 0, 130), padding=3),
    dataclasses.replace(CASE, T=200, use_qk_l2norm_in_kernel=True, keys="raw"),
    dataclasses.replace(CASE, T=130, beta="two", gate="zero"),
)
def test_rows_of_all_sizes(device, mode, case):
    case = dataclasses.replace(case, scale=2.0**-9)
    check(case, with_rows_of_all_sizes(case, device), MODES.get(mode, {}))


@of_modes(*MODES)
@pytest.mark.parametrize("token", (3, 70))
def test_reset(device, mode, token):
    """Values have their digits where nothing of the state is left, in the same chunk and later."""
    case = dataclasses.replace(CASE, T=200, scale=1.0)
    inputs = with_rows_of_all_sizes(case, device)
    inputs["g"][:, token] = -torch.inf
    expected = reference_of(inputs)
    with forward_mode(**MODES.get(mode, {})):
        o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    check_state(final_state, expected.final_state)
    assert row_errors(o[:, token:], expected.o[:, token:], (0, 1)) < 2 * BARS[FP16]


@of_modes("chosen", "cut")
def test_wide_keys(device, mode):
    case = dataclasses.replace(CASE, T=200, H_v=1, K=200, scale=2.0**-9)
    inputs = with_rows_of_all_sizes(case, device)
    check(case, inputs, MODES.get(mode, {}) | ({"value_tile": 128} if MODES.get(mode, {}) else {}))


@of_modes("fused", "narrow", "cut", "fused_segments")
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_prefill(device, mode, dtype):
    """Of a pool, with checkpoints."""
    case = dataclasses.replace(CASE, lengths=(70, 5, 200), scale=2.0**-9)
    inputs = with_rows_of_all_sizes(case, device)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    pool = torch.zeros(6, case.H_v, case.V, case.K, dtype=dtype, device=device)
    pool[slots.long()] = inputs.pop("initial_state").to(dtype)
    del inputs["state_v_first"], inputs["auto_cp"]
    kept = torch.full((4, *pool.shape[1:]), float("nan"), dtype=dtype, device=device)
    before = pool[slots.long()].clone()
    expected = reference_of(inputs | {"initial_state": before, "state_v_first": True})
    with forward_mode(**MODES.get(mode, {})):
        o = flash_qla.prefill_gated_delta_rule(
            **inputs, state_pool=pool, state_indices=slots, checkpoint_every=64, checkpoints=kept
        )
    check_o(o, expected.o, before, case.scale)
    rounding = torch.finfo(dtype).eps
    h = expected.h[0, [1, 4, 5, 6]]  # chunks: 2 of the first sequence, 1 of the second, 4 of the third
    for state, exact in ((pool[slots.long()], expected.final_state), (kept, h)):
        assert row_errors(state, exact, (-1,)) < 4 * BARS[FP16] + rounding


@pytest.mark.parametrize("segments", (-1, 1, 2))
def test_maps(device, segments):
    """Z of a whole sequence, composed of its segments', as ranks exchange it."""
    case = dataclasses.replace(CASE, T=200, scale=2.0**-9)
    inputs = with_rows_of_all_sizes(case, device)
    expected = reference_of(inputs)
    with forward_mode(segment_chunks=segments):
        arguments = inputs | {"output_final_state": True, "map_sequences": [0]}
        maps, workspace, o = by_name(BEGIN[0], arguments)
        final_state = by_name(FINISH[0], arguments | {"workspace": workspace, "o": o})
    check_o(o, expected.o, inputs["initial_state"], case.scale)
    check_state(final_state, expected.final_state)
    check_state(maps[:, :, : case.V], expected.final_state)
