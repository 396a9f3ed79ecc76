"""Decoding from a pool of states: what only a GPU does."""

import re
from pathlib import Path

import pytest
import torch
from subprocesses import run_python
from test_decode import (
    BF16,
    E4M3,
    E5M2,
    FP32,
    FP64,
    WRONG_CONTENTS,
    Case,
    check,
    for_device,
    indices,
    make_inputs,
    moved,
    states_after_tokens,
)

from flash_qla import decode_gated_delta_rule

pytestmark = pytest.mark.gpu


def filled(inputs: dict) -> tuple[dict, torch.Tensor]:
    """The inputs, the pool being the middle of a tensor whose other slots have to stay as they are."""
    pool = inputs["state_pool"]
    wider = torch.cat([pool] * 3)
    return inputs | {"state_pool": wider[len(pool) : 2 * len(pool)]}, wider


@pytest.mark.parametrize("change", [x for x, _ in WRONG_CONTENTS], ids=lambda x: " ".join(x))
def test_nothing_is_touched_outside(change):
    """A sequence with an index outside has no slot, and the others are right."""
    inputs, wider = filled(make_inputs(for_device(Case(T=2), "cuda"), "cuda"))
    before = wider.clone()
    o = decode_gated_delta_rule(**inputs | moved(change, "cuda"))
    assert o.isfinite().all()
    assert torch.equal(wider[:40], before[:40]) and torch.equal(wider[80:], before[80:])
    if not set(change) - {"state_indices", "null_index"}:
        outside = [n for n, slot in enumerate(change["state_indices"].tolist()) if not 0 <= slot < 40]
        assert not o[outside].any()


def test_more_tokens_than_columns():
    """A token beyond the columns of write_indices leaves no state. The next row belongs to an empty sequence."""
    inputs = make_inputs(for_device(Case(lengths=(3, 0)), "cuda"), "cuda")
    inputs["state_indices"] = indices(5, 6).cuda()
    before = inputs["state_pool"].clone()
    expected, states = states_after_tokens(inputs)
    o = decode_gated_delta_rule(**inputs | {"write_indices": torch.stack([indices(1, 2), indices(3, 4)]).cuda()})
    check(inputs, {1: states[0][1], 2: states[0][2]}, o, expected, before)


@pytest.mark.parametrize("offsets", [(0, 9, 5), (3, 2, 1), (-4, 2, 5), (0, 2, 99)], ids=str)
def test_hostile_offsets(offsets):
    inputs, wider = filled(make_inputs(for_device(Case(lengths=(2, 3)), "cuda"), "cuda"))
    before = wider.clone()
    decode_gated_delta_rule(**inputs | {"cu_seqlens": indices(*offsets).cuda()})
    assert torch.equal(wider[:40], before[:40]) and torch.equal(wider[80:], before[80:])


CHECKED = """
import sys
sys.path.insert(0, {tests!r})
from test_decode import *

for change, texts in WRONG_CONTENTS:
    inputs = make_inputs(for_device(Case(T=2), "cuda"), "cuda")
    try:
        decode_gated_delta_rule(**inputs | moved(change, "cuda"))
    except RuntimeError as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(f"{{texts}} was not reported")
"""


def test_wrong_contents_are_reported():
    """FLASH_QLA_CHECK=1: as on the CPU. In a process of its own, which reads the switch at its start."""
    run_python(CHECKED.format(tests=str(Path(__file__).parent)), FLASH_QLA_CHECK="1")


@pytest.mark.parametrize(
    ("case", "change", "text"),
    [
        (Case(dtype=FP32), {}, "q has dtype float32, expected bfloat16 or float16 on a GPU"),
        (Case(dtype=BF16, K=264), {}, "q has head dimension K = 264"),
        (Case(dtype=BF16, V=20), {}, "v has head dimension V = 20"),
        (Case(dtype=BF16, state_dtype=FP64), {}, "state_pool has dtype float64, expected float32, bfloat16, float16"),
        (Case(dtype=BF16, state_dtype=E4M3, K=24), {}, "state_pool has 8 bits and states of K = 24 channels"),
        (Case(dtype=BF16, state_dtype=E5M2, v_first=False), {}, "state_v_first is False on a state_pool of 8 bits"),
        (
            Case(dtype=BF16, state_dtype=E5M2),
            {"intermediate_states": torch.zeros(3, 1, 4, 24, 16, dtype=E4M3)},
            "intermediate_states has dtype float8_e4m3fn, expected float8_e5m2",
        ),
        (Case(dtype=BF16, gap=2), {}, "state_pool has states that do not start at multiples of 16 bytes"),
        (
            Case(dtype=BF16),
            {"intermediate_states": torch.zeros(3, 1, 4, 24, 16, dtype=BF16)},
            "intermediate_states has dtype bfloat16, expected float32",
        ),
    ],
    ids=str,
)
def test_not_on_the_gpu(case, change, text):
    inputs = make_inputs(case, "cuda") | moved(change, "cuda")
    before = inputs["state_pool"].clone()
    with pytest.raises(RuntimeError, match=re.escape(text)):
        decode_gated_delta_rule(**inputs)
    assert torch.equal(inputs["state_pool"], before)


def test_most_sequences_and_the_largest_state():
    """The limits of a grid's dimensions and of 32 bits, with tensors that have no memory."""

    def zeros(*shape, dtype=BF16):
        return torch.zeros((), dtype=dtype, device="cuda").expand(*shape)

    def decode(N, H_v, V, K):
        gates, slots = zeros(N, 1, H_v), zeros(N, dtype=torch.int32)
        q, pool = zeros(N, 1, 1, K), torch.zeros(0, H_v, V, K, device="cuda")
        decode_gated_delta_rule(q, q, zeros(N, 1, H_v, V), gates, gates, zeros(H_v), None, pool, slots)

    for sizes, text in (
        ((65536, 1, 8, 8), "q has 65536 sequences, expected at most 65535 on a GPU"),
        ((1, 65536, 8, 8), "v has 65536 heads, expected at most 65535 on a GPU"),
        ((1, 32768, 512, 128), "state_pool has states of 2147483648 elements, expected at most 2147483647"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            decode(*sizes)


@pytest.mark.parametrize("V", [128, 136])  # half of a tile may lie outside
@pytest.mark.parametrize(
    ("state_dtype", "T", "B"),
    [(BF16, 4, 64), *((dtype, T, B) for dtype in (FP32, BF16, E4M3) for T in (1, 4) for B in (16, 24))],
)
def test_many(state_dtype, T, B, V):
    """A full card; of some sizes two CTAs share a tile of the last sequences. The same bits a second time, and of the
    last sequence alone."""
    inputs = make_inputs(
        Case(B=B, T=T, H_k=4, H_v=16, K=128, V=V, dtype=BF16, state_dtype=state_dtype, slots=80), "cuda"
    )
    before = inputs["state_pool"].clone()
    expected, states = states_after_tokens(inputs)
    o = decode_gated_delta_rule(**inputs)
    slots = inputs["state_indices"].tolist()
    check(inputs, {slot: s[-1] for slot, s in zip(slots, states, strict=True)}, o, expected, before)
    last = {name: inputs[name][-1:] for name in ("q", "k", "v", "a", "b", "state_indices")}
    assert torch.equal(decode_gated_delta_rule(**inputs | last | {"state_pool": before.clone()}), o[-1:])
    assert torch.equal(decode_gated_delta_rule(**inputs | {"state_pool": before}), o)
    assert torch.equal(before, inputs["state_pool"])
