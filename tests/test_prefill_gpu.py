"""The prefill on a pool of states: what only a GPU does."""

import re
from pathlib import Path

import pytest
import torch
import trials
from cases import Case, forward_mode
from subprocesses import run_python
from test_prefill import (
    BF16,
    E5M2,
    FP16,
    FP32,
    FP64,
    LENGTHS,
    MODES,
    SIZES,
    SLOTS,
    can_fuse,
    check_pool,
    copied,
    in_mode,
    indices,
    make_arguments,
    rows,
)

from flash_qla import _C, prefill_gated_delta_rule

pytestmark = pytest.mark.gpu


def on_gpu(arguments: dict) -> dict:
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("mode", MODES)
def test_indices_outside(mode):
    """A sequence with an index outside has no slot; such a checkpoint is not kept."""
    arguments = make_arguments(Case(**SIZES, **LENGTHS), device="cuda")
    slots = [3, SLOTS, -2, 2**31 - 1, 5, 8]
    table = torch.tensor([[SLOTS], [-7], [2**40], [0], [1], [-(2**40)]])
    arguments |= {"state_indices": indices(*slots), "null_index": -5, "checkpoint_every": 64}
    arguments |= {"checkpoint_indices": table}
    arguments = on_gpu(arguments)
    before = copied(arguments["state_pool"])
    with in_mode("cuda", mode):
        o = prefill_gated_delta_rule(**arguments)
    pool = arguments["state_pool"]
    check_pool(pool, before, {slot: pool[slot] for slot in (3, 5, 8)})
    assert o.isfinite().all()
    for n in (1, 2, 3):
        assert not rows(arguments, o, n).any()


@pytest.mark.parametrize("every", (64, 50))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offsets", [(0, 90, 50), (30, 20, 10), (-4, 20, 50), (0, 20, 999)], ids=str)
def test_hostile_offsets(mode, offsets, every):
    arguments = make_arguments(Case(**SIZES, lengths=(20, 63)), device="cuda")
    before = copied(arguments["state_pool"])
    kept = torch.zeros(3, *before.shape[1:], device="cuda")
    clipped = indices(0, *offsets[1:]).clamp(0, 83).cummax(0).values  # the first sequence begins at 0
    with in_mode("cuda", mode):
        o = prefill_gated_delta_rule(
            **arguments | {"cu_seqlens": indices(*offsets).cuda(), "checkpoint_every": every, "checkpoints": kept[1:2]}
        )
        expected = arguments | {"cu_seqlens": clipped.cuda(), "state_pool": copied(before)}
        if every % 64:  # the same chunks
            expected |= {"checkpoint_every": every, "checkpoint_indices": torch.zeros(2, 0, dtype=torch.int32).cuda()}
        assert torch.equal(o, prefill_gated_delta_rule(**expected))
    pool = arguments["state_pool"]
    assert torch.equal(pool, expected["state_pool"])
    check_pool(pool, before, {slot: pool[slot] for slot in arguments["state_indices"].tolist()})
    assert not kept[0].any() and not kept[2].any()


CHECKED = """
import sys
sys.path.insert(0, {tests!r})
from test_prefill import *

for change, texts in WRONG_CONTENTS:
    arguments = make_arguments(Case(**SIZES, lengths=(70, 3)), device="cuda")
    change = {{name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in change.items()}}
    try:
        prefill_gated_delta_rule(**arguments | change)
    except RuntimeError as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(f"{{texts}} was not reported")
"""


def test_wrong_contents_are_reported():
    """FLASH_QLA_CHECK=1: as on the CPU. In a process of its own, which reads the switch at its start."""
    run_python(CHECKED.format(tests=str(Path(__file__).parent)), FLASH_QLA_CHECK="1")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"state_pool": torch.zeros(4, 4, 24, 16, dtype=FP64)}, "state_pool has dtype float64, expected float32"),
        (
            {"checkpoint_every": 64, "checkpoints": torch.zeros(4, 4, 24, 16, dtype=FP64)},
            "checkpoints has dtype float64, expected float32",
        ),
    ],
    ids=str,
)
def test_not_on_the_gpu(change, text):
    arguments = make_arguments(Case(**SIZES, lengths=(70, 3)), device="cuda") | on_gpu(change)
    with pytest.raises(RuntimeError, match=re.escape(text)):
        prefill_gated_delta_rule(**arguments)


def test_misaligned_slots():
    pool = torch.zeros(4, 4 * 24 * 16 + 1, device="cuda")[:, 1:].unflatten(1, (4, 24, 16))
    arguments = make_arguments(Case(**SIZES, lengths=(70, 3)), device="cuda") | {"state_pool": pool}
    with pytest.raises(RuntimeError, match="state_pool has states that do not start at multiples of 16 bytes"):
        prefill_gated_delta_rule(**arguments)


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("options", "every"),
    [
        ({}, 0),
        ({"batch_invariant": True}, 0),
        ({"float8": True}, 0),
        ({"checkpoint_every": 64}, 64),
        ({"checkpoint_every": 100, "resumable": True}, 100),
    ],
    ids=str,
)
def test_kernels_are_those_reported(options, every):
    """forward_dispatch, called with the options of a prefill, says whether the fused kernel runs."""
    arguments = make_arguments(
        Case(lengths=(512,) * 8, H_k=16, H_v=32, dtype=BF16), E5M2 if "float8" in options else FP32, device="cuda"
    )
    arguments["batch_invariant"] = "batch_invariant" in options
    if every:
        kept = arguments["state_pool"].new_empty(8 * (512 // every), *arguments["state_pool"].shape[1:])
        arguments |= {"checkpoint_every": every, "checkpoints": kept}
    gpu = _C.gpus()[torch.cuda.current_device()]
    card = {name: getattr(gpu, name) for name in ("sm_count", "sm_mhz", "memory_gb_s")}
    dispatch = _C.forward_dispatch(1, 4096, 8, 16, 32, **options, **card)
    assert dispatch.fused == (options in ({}, {"checkpoint_every": 64}))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        prefill_gated_delta_rule(**arguments)
        torch.cuda.synchronize()
    launched = {event.name for event in profile.events()} & {kernel.name for kernel in _C.kernels()}
    assert launched and any(name.startswith("fused_forward") for name in launched) == dispatch.fused, launched


@pytest.mark.parametrize("fused", (0, 1))
@pytest.mark.parametrize("lengths", ((400, 300, 64), (400, 64, 100)), ids=str)
def test_the_longest_sequence_has_no_slot(fused, lengths):
    """It is long all the same, so the device cuts those of the others that are longer than a segment."""
    arguments = make_arguments(Case(**SIZES | {"dtype": BF16, "K": 128, "V": 128}, lengths=lengths), device="cuda")
    arguments["state_indices"][0] = -1

    def run(**mode):
        pool = copied(arguments["state_pool"])
        with forward_mode(**mode):
            o = prefill_gated_delta_rule(**arguments | {"state_pool": pool})
        return o, pool

    mode = {"value_tile": 128, "segment_chunks": 2, "fused": fused}
    assert all(map(torch.equal, run(**mode, cut_above=3), run(**mode)))


@pytest.mark.parametrize("every", (64, 48))
@pytest.mark.parametrize("mode", MODES)
def test_graph(mode, every):
    """Captured, and replayed with other lengths and slots."""
    case = Case(**SIZES | {"dtype": BF16, "K": 128, "V": 128}, lengths=(70, 3, 130), padding=9)
    options = {"pool_dtype": BF16, "index_dtype": torch.int64, "device": "cuda"}

    def arguments_of(lengths, slots, has_state):
        of_pool = make_arguments(case, **options)["state_pool"]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        return make_arguments(case, **options) | {
            "state_pool": of_pool,
            "cu_seqlens": offsets.to(torch.int32).cuda(),
            "state_indices": torch.tensor(slots).cuda(),
            "initial_state_indices": torch.tensor([8 if slot == 3 else slot for slot in slots]).cuda(),
            "has_initial_state": torch.tensor(has_state).cuda(),
            "checkpoint_every": every,
            "checkpoint_indices": torch.tensor([[19, 18], [17, 16], [15, 14]]).cuda(),
        }

    calls = [((70, 3, 130), (1, 2, 3), (True, True, False)), ((0, 203, 0), (4, -1, 0), (False, True, True))]
    calls.append(((1, 64, 138), (5, 6, 7), (True, False, True)))
    with in_mode("cuda", mode):
        captured = arguments_of(*calls[0])
        for name in ("q", "k", "v", "g", "beta"):
            captured[name] = captured[name].nan_to_num()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # a first call prepares the kernels
            prefill_gated_delta_rule(**captured | {"state_pool": copied(captured["state_pool"])})
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = prefill_gated_delta_rule(**captured, out=torch.empty_like(captured["v"]))
        for call in calls:
            later = arguments_of(*call)
            for name, x in later.items():
                if name in ("q", "k", "v", "g", "beta"):
                    later[name] = x.nan_to_num()
                if isinstance(x, torch.Tensor):
                    captured[name].copy_(later[name])
            graph.replay()
            assert torch.equal(o, prefill_gated_delta_rule(**later))
            assert torch.equal(captured["state_pool"], later["state_pool"])


@pytest.mark.whole_card
@pytest.mark.parametrize("every", (0, 256, 50))
@pytest.mark.parametrize("pool_dtype", (FP32, FP16, E5M2), ids=str)
def test_many(pool_dtype, every):
    """A full card, several pieces of work a CTA: the results of the formula, and the same bits a second time."""
    case = Case(**SIZES | {"dtype": BF16, "K": 128, "V": 128}, lengths=(300,) * 18, H_k=4, H_v=32)
    for mode, forward in MODES.items():
        if can_fuse(pool_dtype) or "fused" not in mode:
            trials.run(trials.Trial("prefill", case, forward, state_dtype=pool_dtype, every=every), "cuda")
