"""The launches of a call on a GPU. The host decides from shapes alone, so the tests need no GPU. The file is long
because every choice is tested over the same shapes."""

import concurrent.futures
import itertools
import math
import random
import re

import choices
import pytest
from cases import backward_mode, forward_mode
from subprocesses import run_python

from flash_qla import _C
from flash_qla._layout import CHUNK
from flash_qla.testing import forced_dispatch

INSTANCE_DIMS = (128, 256)  # K of the instances: a key is padded to the next
TILE = 128  # value rows: those of states that only kernels read are whole ones
TILES = (64, 128)
HEADS = ((1, 1), (1, 2), (2, 8), (16, 16), (8, 24), (4, 64), (16, 64))
DENSE = tuple({"B": B, "T": T, "N": B, "varlen": False} for B, T in ((1, 1), (1, 2048), (3, 100), (2, 65536), (64, 64)))
VARLEN = tuple(
    {"B": 1, "T": T, "N": N, "varlen": True} for T, N in ((1, 1), (512, 1), (32768, 1), (32768, 8), (9000, 40), (7, 99))
)
HEAD_DIMS = ({}, {"K": 96, "V": 192}, {"K": 8, "V": 64}, {"V": 512}, {"K": 136, "V": 64}, {"K": 256, "V": 512})
SHAPES = tuple(
    {**sizes, "H_k": H_k, "H_v": H_v, **head_dims}
    for (sizes, (H_k, H_v)), head_dims in itertools.product(itertools.product((*DENSE, *VARLEN), HEADS), HEAD_DIMS)
)


def instance_K(shape: dict) -> int:
    return next(K for K in INSTANCE_DIMS if shape.get("K", 128) <= K)


def is_wide(shape: dict) -> bool:
    """Wide keys have one value tile and no fused kernel. Their backward has two kernels in the place of one."""
    return instance_K(shape) > 128


def chunks_of(tokens: int) -> int:
    return -(-tokens // CHUNK)


def tiles_of(shape: dict, tile: int = TILE) -> int:
    return -(-shape.get("V", 128) // tile)


def chunk_slots(shape: dict) -> int:
    """The most chunks: with cu_seqlens each sequence may end in a partial one, and so may the padding."""
    B, T, N = shape["B"], shape["T"], shape["N"]
    return (T + (CHUNK - 1) * (N + 1)) // CHUNK if shape["varlen"] else B * chunks_of(T)


def lengths_of(shape: dict, generator: random.Random) -> list[int]:
    """Lengths of sequences that fit, few long ones or many short ones."""
    if not shape["varlen"]:
        return [shape["T"]] * shape["B"]
    weights = [generator.random() ** generator.choice((0, 1, 8)) for _ in range(shape["N"])]
    return [int(shape["T"] * weight / sum(weights)) for weight in weights]


def segments_of(lengths: list[int], segment_chunks: int) -> int:
    """Segments as chunk_plan cuts them: an empty sequence is a segment too."""
    return sum(max(1, -(-chunks_of(length) // segment_chunks)) for length in lengths)


def launch_of(decision: _C.ForwardDispatch) -> dict:
    """The decision without the prediction."""
    return {name: getattr(decision, name) for name in decision.__match_args__ if name != "predicted_us"}


# Answers


def test_choices_are_those_on_record():
    """After a change of the cost model `python tests/choices.py` writes them again."""
    expected = choices.recorded()
    assert {row["pass"] for row in expected} == {*choices.OPTIONS}
    for before in expected:
        now = choices.choice_again(before)
        before_us, now_us = (float(row.pop("predicted_us")) for row in (before, now))
        assert before == now
        assert now_us == pytest.approx(before_us, rel=2e-3), before


@pytest.mark.parametrize("auto_cp", (True, False))
def test_fields_belong_together(auto_cp):
    generator = random.Random(0)
    for shape in SHAPES:
        decision = _C.forward_dispatch(**shape, auto_cp=auto_cp)
        assert decision.value_tile in TILES
        assert not is_wide(shape) or (decision.value_tile, decision.fused) == (128, 0), shape
        assert not decision.fused or decision.value_tile == 128, shape
        has_two = decision.long_tile != decision.value_tile
        assert not has_two or (not decision.fused and decision.long_tile in TILES), shape
        heads, group = decision.heads_per_cta, shape["H_v"] // shape["H_k"]
        assert 1 <= heads <= 4 and group % heads == 0, shape
        assert heads == 1 or chunk_slots(shape) * shape["H_v"] // heads >= 132, shape
        tiles = decision.segments * shape["H_v"] * tiles_of(shape, decision.value_tile)
        assert decision.ctas == min(tiles, shape.get("sm_count", 132)), shape
        assert math.isfinite(decision.predicted_us) and decision.predicted_us > 0
        if shape["N"] == 1 or not shape["varlen"]:
            assert decision.cut_above == 0 and not has_two, shape  # the host knows
        else:
            assert (decision.cut_above > 0) == (decision.segment_chunks > 0 or has_two), shape
            assert decision.segment_chunks <= decision.cut_above, shape
        assert decision.cut_above < max(shape["N"] * chunks_of(shape["T"]), 1), shape
        if decision.segment_chunks == 0:
            assert decision.segments == shape["N"], shape
            continue
        assert auto_cp and decision.segment_chunks > 0
        for _ in range(10):
            needed = segments_of(lengths_of(shape, generator), decision.segment_chunks)
            assert needed <= decision.segments, shape


@pytest.mark.parametrize("segment_chunks", (1, 2, 5, 16))
def test_segment_slots_are_enough(segment_chunks):
    """The slots suffice for all cu_seqlens. Without cu_seqlens the number is known."""
    generator = random.Random(segment_chunks)
    with forward_mode(segment_chunks=segment_chunks):
        for shape in SHAPES:
            decision = _C.forward_dispatch(**shape)
            assert decision.segment_chunks == segment_chunks
            if not shape["varlen"]:
                assert decision.segments == segments_of(lengths_of(shape, generator), segment_chunks), shape
                continue
            for _ in range(20):
                assert segments_of(lengths_of(shape, generator), segment_chunks) <= decision.segments, shape
            assert decision.segments <= shape["N"] + chunk_slots(shape) // segment_chunks, shape


def workspace_of(*regions: int) -> int:
    """Bytes of the regions, each of which begins at a multiple of 256."""
    return sum(-(-size // 256) * 256 for size in regions)


def tables_of(shape: dict, segments: int) -> tuple[int, ...]:
    """The plan's: sequences, chunks, segments, whether the batch is long, and what is drawn."""
    return 4 * 6 * shape["N"], 4 * 3 * chunk_slots(shape), 4 * 8 * segments, 4, 4


def test_workspace_is_what_the_kernels_need():
    for shape, segment_chunks in itertools.product(SHAPES, (-1, 0, 2)):
        with forward_mode(segment_chunks=segment_chunks):
            decision = _C.forward_dispatch(**shape)
        regions = list(tables_of(shape, decision.segments)) if decision.planned else []
        H_v, K, chunks = shape["H_v"], instance_K(shape), chunk_slots(shape)
        if not (decision.fused and decision.segment_chunks == 0):
            # Gates; the gated inverse and the attention, of each ten of the sixteen blocks of 16 x 16.
            regions += [chunks * H_v * 5 * CHUNK * 4, chunks * H_v * 2 * 10 * 16 * 16 * 2]
        if decision.segment_chunks:
            # The state before it; its map in two parts; whether it is skipped.
            of_segment = tiles_of(shape) * TILE * K * 4, 2 * K * K * 2, 4
            regions += [decision.segments * H_v * size for size in of_segment]
        if decision.fused and decision.segment_chunks:  # what the segments remember, and which heads need maps
            regions += [4 * decision.segments * H_v, 4 * shape["N"] * H_v]
        assert decision.workspace_bytes == workspace_of(*regions), shape


def test_default_arguments():
    assert _C.forward_dispatch(1, 32768, 1, 2, 8) == _C.forward_dispatch(
        B=1, T=32768, N=1, H_k=2, H_v=8, sm_count=132, auto_cp=True, varlen=True, K=128, V=128
    )


# Decisions


@pytest.mark.parametrize("varlen", (True, False))
def test_context_parallelism_is_for_few_heads_and_long_sequences(varlen):
    def segment_chunks(B, T, N, H_k, H_v):
        return _C.forward_dispatch(B, T, N, H_k, H_v, varlen=varlen).segment_chunks

    assert segment_chunks(1, 32768, 1, 2, 8) > 0
    assert segment_chunks(1, 131072, 1, 1, 1) > 0
    assert segment_chunks(*((1, 32768, 8) if varlen else (8, 4096, 8)), 16, 64) == 0  # the card is full
    assert segment_chunks(1, 64, 1, 2, 8) == 0  # nothing to split


def test_device_is_left_the_choice_where_one_sequence_may_be_long():
    """Eight sequences of 4096 tokens need no segments on these heads, one of 24576 among seven short ones does."""
    decision = _C.forward_dispatch(1, 32768, 8, 2, 8)
    assert 4096 // CHUNK < decision.cut_above < 24576 // CHUNK
    without = _C.forward_dispatch(8, 4096, 8, 2, 8, varlen=False)
    assert without.segment_chunks == 0
    # The offer costs little if all sequences are equal.
    assert _C.forward_dispatch(1, 32768, 8, 2, 8).predicted_us < 1.2 * without.predicted_us


def test_device_is_left_the_choice_of_a_tile():
    """Two equal sequences are fastest in narrow tiles; if one has nearly all tokens, wide ones over splits are."""
    card = _C.cards()["H200"]
    decision = _C.forward_dispatch(1, 32768, 2, 16, 32, **card)
    assert (decision.value_tile, decision.long_tile) == (64, 128) and decision.segment_chunks > 0
    assert 16384 // CHUNK < decision.cut_above < 28672 // CHUNK
    known = _C.forward_dispatch(1, 32768, 2, 16, 32, max_seqlen=16384, **card)
    assert (known.value_tile, known.long_tile, known.segment_chunks) == (64, 64, 0)
    without = _C.forward_dispatch(1, 32768, 2, 16, 32, over_ranks=True, **card)
    assert without.value_tile == without.long_tile
    with forced_dispatch(forward={"segment_chunks": 64}):  # every batch is long then
        forced = _C.forward_dispatch(1, 32768, 2, 16, 32, **card)
    assert forced.value_tile == forced.long_tile
    with forced_dispatch(forward={"value_tile": 64, "long_tile": 128, "cut_above": 300}):
        whole = _C.forward_dispatch(1, 32768, 2, 16, 32, auto_cp=False, **card)
        one = _C.forward_dispatch(1, 32768, 2, 16, 32, max_seqlen=16384, auto_cp=False, **card)
    assert (whole.long_tile, whole.segment_chunks, whole.cut_above) == (128, 0, 300)
    assert (one.long_tile, one.cut_above) == (64, 0)


@pytest.mark.parametrize("portable", (False, True))
@pytest.mark.parametrize("dispatch", (_C.forward_dispatch, _C.backward_dispatch), ids=("forward", "backward"))
def test_only_sequences_that_fit_are_considered(dispatch, portable):
    """Maps for each of many short sequences are not reserved for one that is longer than all tokens."""
    for (T, N), (H_k, H_v) in itertools.product(((318, 256), (487, 256), (1551, 256), (19645, 4096)), HEADS):
        decision = dispatch(1, T, N, H_k, H_v, portable=portable)
        assert max(decision.segment_chunks, decision.cut_above) < chunks_of(T), (T, N, H_k, H_v)


def test_calls_of_ranks_cut_whatever_can_be_cut():
    """They always cut, for maps of whole sequences, and run two kernels. auto_cp=False leaves sequences whole."""
    for shape in SHAPES:
        for function in (_C.forward_dispatch, _C.backward_dispatch):
            decision = function(**shape, over_ranks=True)
            chunks = chunks_of(shape["B"] * shape["T"]) // shape["N"]
            assert decision.cut_above == 0 and (chunks < 4 or decision.segment_chunks > 0), shape
            without = function(**shape, over_ranks=True, auto_cp=False)
            assert decision.workspace_bytes > without.workspace_bytes or chunks < 4
            assert without.segment_chunks == 0
        assert not _C.forward_dispatch(**shape, over_ranks=True).fused


def test_context_parallelism_gives_every_sm_work():
    without = _C.forward_dispatch(1, 32768, 1, 2, 8, auto_cp=False)
    decision = _C.forward_dispatch(1, 32768, 1, 2, 8)
    assert without.ctas <= 16 and decision.ctas > 66
    assert decision.predicted_us < without.predicted_us / 2


@pytest.mark.parametrize("dispatch", (_C.forward_dispatch, _C.backward_dispatch), ids=("forward", "backward"))
def test_auto_cp_never_predicts_slower(dispatch):
    for shape in SHAPES:
        decision, without = (dispatch(**shape, auto_cp=auto_cp) for auto_cp in (True, False))
        assert decision.predicted_us <= without.predicted_us, shape


def test_calls_without_a_plan():
    """The op has none if one kernel does all, and each CTA has one piece of work."""
    decisions = {}
    for N in (1, 4, 16, 17, 32, 33):
        with forced_dispatch(forward={"fused": True, "segment_chunks": 0}):
            decisions[N] = _C.forward_dispatch(1, 64 * N, N, 2, 8, varlen=True)
        assert decisions[N].fused and decisions[N].planned == (8 * N > 132), N  # SMs
        assert (decisions[N].workspace_bytes == 0) == (not decisions[N].planned), N
    for N in (32, 33):  # a warp sorts 32 sequences
        assert _C.forward_dispatch(1, 64 * N, N, 2, 4, varlen=True).planned == (N > 32), N
    assert not _C.forward_dispatch(1, 64, 1, 2, 8).planned
    for option in ({"low_level": True}, {"checkpoint_every": 64}):  # chunks that begin anew are the plan's to find
        assert _C.forward_dispatch(1, 64, 1, 2, 8, **option).planned, option
    assert _C.forward_dispatch(1, 32768, 1, 2, 8).planned


def test_more_tokens_take_longer():
    lengths = (64, 512, 2048, 8192, 32768, 131072)
    for (H_k, H_v), N, auto_cp in itertools.product(HEADS, (1, 4), (True, False)):
        decisions = [_C.forward_dispatch(1, T * N, N, H_k, H_v, auto_cp=auto_cp) for T in lengths]
        # One kernel needs less memory than two, and none without a plan, so memory is compared within each path.
        paths = ([row for row in decisions if row.planned and row.fused == fused] for fused in (False, True))
        for values in ([x.predicted_us for x in decisions], *([x.workspace_bytes for x in path] for path in paths)):
            assert all(before < after for before, after in itertools.pairwise(values)), values
        every_chunk = [_C.forward_dispatch(1, T, 1, H_k, H_v, auto_cp=auto_cp) for T in range(64, 64 * 200, 64)]
        assert all(x.predicted_us <= y.predicted_us for x, y in itertools.pairwise(every_chunk))


def test_more_sms_are_never_slower():
    for shape in SHAPES:
        predicted = [_C.forward_dispatch(**shape, sm_count=count).predicted_us for count in (33, 66, 132, 264)]
        assert predicted == sorted(predicted, reverse=True), shape
    long = [_C.forward_dispatch(1, 131072, 1, 2, 8, sm_count=count).predicted_us for count in (66, 132)]
    assert long[1] < long[0]


# Dependence

CALLS = [{**shape, "auto_cp": auto_cp} for shape in SHAPES for auto_cp in (True, False)]
PRINT_ALL = f"""
import torch
from flash_qla import _C
for call in {CALLS}:
    print(_C.forward_dispatch(**call))
assert not torch.cuda.is_initialized()
"""


def test_depends_on_its_arguments_alone():
    """Neither on earlier calls nor on the process or a GPU."""
    expected = [_C.forward_dispatch(**call) for call in CALLS]
    order = random.Random(0).sample(range(len(CALLS)), len(CALLS))
    assert all(_C.forward_dispatch(**CALLS[i]) == expected[i] for i in order)
    output = run_python(PRINT_ALL, CUDA_VISIBLE_DEVICES="")
    assert output.splitlines() == [str(row) for row in expected]


# The override


@pytest.mark.parametrize("value_tile", TILES)
@pytest.mark.parametrize("segment_chunks", (0, 1, 2, 5, 16, 1000))
def test_override(value_tile, segment_chunks):
    before = [_C.forward_dispatch(**shape) for shape in SHAPES]
    with forced_dispatch(forward={"value_tile": value_tile, "segment_chunks": segment_chunks}):
        for shape in SHAPES:
            if is_wide(shape) and value_tile == 64:
                continue
            decision = _C.forward_dispatch(**shape)
            assert (decision.value_tile, decision.segment_chunks) == (value_tile, segment_chunks)
            assert math.isfinite(decision.predicted_us) and decision.predicted_us > 0, (shape, decision)
            without = _C.forward_dispatch(**shape, auto_cp=False)
            assert (without.value_tile, without.segment_chunks) == (value_tile, 0)
            assert without.segments == shape["N"]
    assert [_C.forward_dispatch(**shape) for shape in SHAPES] == before


def test_options_of_a_prefill():
    """What each rules out, where a call without it would be fused or cut; what cannot be raises."""
    fused, cut = (1, 8 * 4096, 8, 16, 32), (1, 32768, 1, 2, 8)
    assert _C.forward_dispatch(*fused).fused and _C.forward_dispatch(*cut).segment_chunks > 0
    checkpoints = {"checkpoint_every": 100, "resumable": True}
    for option in ({"batch_invariant": True}, checkpoints, {"float8": True}):
        assert not _C.forward_dispatch(*fused, **option).fused
        segment_chunks = _C.forward_dispatch(*cut, **option).segment_chunks
        assert (segment_chunks > 0) == ("float8" in option), option
    without, decision = (_C.forward_dispatch(*fused, checkpoint_every=x) for x in (0, 64))
    assert decision.fused and decision.workspace_bytes > without.workspace_bytes  # for chunks that begin at checkpoints
    wrong = (
        ({"checkpoint_every": -1}, "checkpoint_every is -1, expected at least 0"),
        ({"resumable": True}, "resumable is 1, expected False without checkpoint_every"),
        ({"checkpoint_every": 100}, "resumable is 0, expected True with checkpoint_every 100"),
    )
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            _C.forward_dispatch(*fused, **options)


def test_override_of_the_fused_kernel():
    """It serves calls without h, with keys of up to 128 channels. Without the override the faster path runs."""
    for shape in SHAPES:
        with forced_dispatch(forward={"fused": True}):
            fused = _C.forward_dispatch(**shape)
            assert fused.fused == (not is_wide(shape)), shape
            assert not _C.forward_dispatch(**shape, low_level=True, output_h=True).fused
            for low_level in (False, True):
                in_bf16, in_fp16 = (
                    _C.forward_dispatch(**shape, low_level=low_level, fp16=x, auto_cp=False) for x in (False, True)
                )
                assert in_bf16.fused == fused.fused and launch_of(in_bf16) == launch_of(in_fp16), shape
        with forced_dispatch(forward={"fused": False}):
            unfused = _C.forward_dispatch(**shape)
            assert not unfused.fused
            low_level = _C.forward_dispatch(**shape, low_level=True)  # which writes A, too
        assert unfused.predicted_us < low_level.predicted_us, shape
        assert launch_of(unfused) == launch_of(low_level), shape
        decision = _C.forward_dispatch(**shape)
        assert decision == (fused if fused.predicted_us <= unfused.predicted_us else unfused), shape


@pytest.mark.parametrize("low_level", (False, True))
def test_the_fused_kernel_takes_longer_in_fp16(low_level):
    """Its inverse has factors of two TF32 parts."""
    with forced_dispatch(forward={"fused": True}):
        in_bf16, in_fp16 = (
            _C.forward_dispatch(1, 32768, 8, 16, 32, low_level=low_level, fp16=fp16).predicted_us
            for fp16 in (False, True)
        )
    assert 1.1 * in_bf16 < in_fp16 < 1.3 * in_bf16


@pytest.mark.parametrize("slow", ({"K": 136}, {"K": 256}, {"portable": True}, {"K": 256, "portable": True}), ids=str)
def test_the_scan_takes_longer_with_wide_keys_and_by_portable_kernels(slow):
    """Each segment of a chunk is one more step of the scan."""

    def steps_us(**shape):
        with forward_mode(segment_chunks=1):
            first, last = (_C.forward_dispatch(1, CHUNK * n, 1, 1, 1, **shape).predicted_us for n in (20, 40))
        return last - first

    assert 3 * steps_us() < steps_us(**slow) < 5 * steps_us()


def test_the_fused_kernel_is_for_full_cards_and_short_sequences():
    def fused(card, T, N, *heads, **arguments):
        return _C.forward_dispatch(1, T, N, *heads, **arguments, **_C.cards()[card]).fused

    assert fused("H100 SXM", 32768, 8, 16, 16) and fused("H100 SXM", 32768, 8, 16, 32)
    assert fused("H100 SXM", 32768, 8, 16, 16, use_qk_l2norm=True)
    for card in ("H100 SXM", "H200"):
        assert not fused(card, 512, 1, 16, 16) and not fused(card, 2048, 1, 16, 16)
        assert fused(card, 100, 2, 2, 4) and fused(card, 64, 1, 16, 64)
    assert not fused("H200", 32768, 4, 16, 64)


def test_override_of_the_fused_kernel_for_segments():
    """It serves the calls that the fused kernel serves, and the device may cut nothing. Others are cut without it."""
    for shape in SHAPES:
        for cut_above in (0, 9):
            mode = {"segment_chunks": 4, "fused": True, "cut_above": cut_above}
            with forced_dispatch(forward=mode):
                decision = _C.forward_dispatch(**shape)
                unfused = _C.forward_dispatch(**shape, output_h=True)
                whole = _C.forward_dispatch(**shape, auto_cp=False)
            assert decision.fused == whole.fused == (not is_wide(shape)), shape
            assert (decision.segment_chunks, decision.cut_above) == (4, cut_above)
            assert not unfused.fused and unfused.segment_chunks == 4, shape
            assert whole.segment_chunks == 0, shape


def test_the_fused_kernel_takes_segments_where_a_head_is_no_group_of_four():
    for H_k, H_v, expected in ((16, 16, True), (16, 32, True), (2, 8, False)):
        decision = _C.forward_dispatch(1, 32768, 1, H_k, H_v, **_C.cards()["H100 SXM"])
        assert decision.fused == expected and decision.segment_chunks > 0, (H_k, H_v)


def test_a_slower_memory_favours_the_fused_kernel():
    """The matrices of a group of four cross the memory of an H200 in less time than the fused kernel computes them."""
    shape = (1, 32768, 8, 16, 64)
    fused = {name: _C.forward_dispatch(*shape, **card).fused for name, card in _C.cards().items()}
    assert fused["H100 SXM"] and fused["H100 PCIe"] and not fused["H200"] and not fused["H20"]
    slower = _C.forward_dispatch(*shape, **_C.cards()["H200"] | {"memory_gb_s": 3352})
    assert slower == _C.forward_dispatch(*shape, **_C.cards()["H100 SXM"])


def test_override_of_one_leaves_the_other_to_the_cost_model():
    shape = (1, 32768, 1, 2, 8)
    decided = _C.forward_dispatch(*shape)
    for value_tile in TILES:
        with forced_dispatch(forward={"value_tile": value_tile}):
            decision = _C.forward_dispatch(*shape)
        assert decision.value_tile == value_tile and decision.segment_chunks > 0
        assert decision.predicted_us >= decided.predicted_us
    with forced_dispatch(forward={"segment_chunks": 0}):
        assert _C.forward_dispatch(*shape) == _C.forward_dispatch(*shape, auto_cp=False)
    with forced_dispatch(forward={"segment_chunks": decided.segment_chunks}):
        assert _C.forward_dispatch(*shape) == decided


# The backward


L2NORM = {"use_qk_l2norm": True}
NORMS = ({}, L2NORM, L2NORM | {"fp16": True}, {"fp16": True}, L2NORM)  # each shape of head dimensions meets all


@pytest.mark.parametrize("segment_chunks", (-1, 0, 1, 5))
def test_backward_segments_and_workspace(segment_chunks):
    generator = random.Random(0)
    for plain, norm in zip(SHAPES, itertools.cycle(NORMS)):
        shape = plain | norm
        with backward_mode(segment_chunks):
            decision = _C.backward_dispatch(**shape)
        assert math.isfinite(decision.predicted_us) and decision.predicted_us > 0
        assert segment_chunks in (-1, decision.segment_chunks)
        if decision.segment_chunks == 0:
            assert decision.segments == shape["N"] and decision.cut_above == 0, shape
        else:
            for _ in range(10):
                needed = segments_of(lengths_of(shape, generator), decision.segment_chunks)
                assert needed <= decision.segments <= shape["N"] + chunk_slots(shape) // decision.segment_chunks, shape
        if segment_chunks == -1 and decision.segment_chunks > 0 and shape["varlen"] and shape["N"] > 1:
            assert decision.segment_chunks <= decision.cut_above < shape["N"] * chunks_of(shape["T"]), shape
        rows, K, H_v, chunks = tiles_of(shape) * TILE, instance_K(shape), shape["H_v"], chunk_slots(shape)
        normalize = shape.get("use_qk_l2norm", False)
        inside = normalize and not is_wide(shape) and not shape.get("fp16", False)  # no kernels for the l2norm alone
        regions = [*tables_of(shape, decision.segments)]
        # Two tables of gates; L and P, of each ten of the sixteen blocks of 16 x 16.
        regions += [chunks * H_v * size * CHUNK * 4 for size in (5, 5 + 2 * inside)] + [chunks * H_v * 2 * 10 * 256 * 2]
        tokens = shape["B"] * shape["T"]
        if is_wide(shape):  # dS'; V_new and U
            regions += [chunks * H_v * K * rows * 2, *[tokens * H_v * shape.get("V", 128) * 2] * 2]
        regions.append(chunks * K // 128 * shape["H_k"] * 4)  # how many heads have added to dq and dk
        if normalize and not inside:  # normalized queries and keys, and by which factors
            regions += [2 * tokens * shape["H_k"] * size for size in (shape.get("K", 128) * 2, 4)]
        h, maps = chunks * H_v * K * rows * 2, 0
        if decision.segment_chunks:  # the state before it, the gradient after it; its skips; its map in two parts
            regions += [decision.segments * H_v * size for size in (rows * K * 4, rows * K * 4, 4, 4)]
            maps = decision.segments * H_v * 2 * K * K * 2
        regions.append(max(h, maps))  # in one place
        # dg and dbeta of each tile or, with wide keys, of each half of the channels; a chunk's part of dA_log and
        # ddt_bias; counters.
        count = K // 128 if is_wide(shape) else tiles_of(shape)
        parts = [*[count * tokens * H_v * 4] * 2, chunks * H_v * 2 * 4, -(-H_v // 8) * 4]
        assert decision.workspace_bytes == workspace_of(*regions, *(parts if count > 1 else [])), shape
        with backward_mode(segment_chunks):
            inside = _C.backward_dispatch(**shape, activations=True)
        assert inside.workspace_bytes == workspace_of(*regions, *parts), shape


@pytest.mark.parametrize("varlen", (True, False))
def test_context_parallelism_of_the_backward(varlen):
    def segment_chunks(B, T, N, H_k, H_v, **arguments):
        return _C.backward_dispatch(B, T, N, H_k, H_v, varlen=varlen, **arguments).segment_chunks

    assert segment_chunks(1, 32768, 1, 4, 8) > 0
    assert segment_chunks(1, 8192, 1, 16, 32) > 0
    assert segment_chunks(1, 32768, 1, 4, 8, auto_cp=False) == 0
    assert segment_chunks(1, 64, 1, 2, 8) == 0
    if not varlen:
        assert segment_chunks(8, 4096, 8, 16, 64) == 0  # the card is full


def test_last_segments_of_sequences_take_turns_too():
    """48 heads of four sequences on 132 SMs. Segments of 43 chunks: 384 whole ones in three turns, then 192 last ones,
    of which 12 fit the third turn, in two more. Segments of 64: 384 in three turns."""
    predicted = {}
    for segment_chunks in (43, 64):
        with forced_dispatch(backward={"segment_chunks": segment_chunks}):
            predicted[segment_chunks] = _C.backward_dispatch(1, 32768, 4, 16, 48, max_seqlen=8192).predicted_us
    assert predicted[43] > predicted[64]
    assert _C.backward_dispatch(1, 32768, 4, 16, 48, max_seqlen=8192).segment_chunks == 64


def test_override_of_the_backward():
    before = [_C.backward_dispatch(**shape) for shape in SHAPES]
    forward = [_C.forward_dispatch(**shape) for shape in SHAPES]
    for segment_chunks, cut_above in ((0, 0), (1, 0), (5, 0), (5, 9), (1000, 0)):
        with forced_dispatch(backward={"segment_chunks": segment_chunks, "cut_above": cut_above}):
            for shape in SHAPES:
                decision = _C.backward_dispatch(**shape)
                assert (decision.segment_chunks, decision.cut_above) == (segment_chunks, cut_above)
                assert _C.backward_dispatch(**shape, auto_cp=False).segment_chunks == 0
            assert [_C.forward_dispatch(**shape) for shape in SHAPES] == forward
    assert [_C.backward_dispatch(**shape) for shape in SHAPES] == before


# Scopes


def segment_chunks_of_both() -> tuple[int, int]:
    shape = (1, 65536, 1, 2, 8)
    return _C.forward_dispatch(*shape).segment_chunks, _C.backward_dispatch(*shape).segment_chunks


def test_scopes_nest_and_restore_what_was_in_force():
    decided = segment_chunks_of_both()
    assert decided not in ((3, 5), (7, 5))
    with forced_dispatch(forward={"segment_chunks": 3}, backward={"segment_chunks": 5}):
        with forced_dispatch(forward={"segment_chunks": 7}):  # and keeps the backward's
            assert segment_chunks_of_both() == (7, 5)
            with forced_dispatch(forward={}):
                assert segment_chunks_of_both() == (decided[0], 5)
            with forced_dispatch(forward={"value_tile": 64}):  # a mode is a whole one: nothing of the outer stays
                assert segment_chunks_of_both()[0] != 7
            assert segment_chunks_of_both() == (7, 5)
        assert segment_chunks_of_both() == (3, 5)
    assert segment_chunks_of_both() == decided


def test_scopes_keep_the_choice_of_kernels():
    def are_portable() -> bool:
        return _C.exchange_overrides(None, None, None)[2]

    before = are_portable()
    with forced_dispatch(kernels="portable"):
        with forced_dispatch(forward={"segment_chunks": 3}):
            assert are_portable()
            with forced_dispatch(kernels="device"):
                assert not are_portable()
            assert are_portable()
        assert are_portable()
    assert are_portable() == before


def test_scopes_end_by_exceptions_too():
    decided = segment_chunks_of_both()
    with forced_dispatch(forward={"segment_chunks": 3}, backward={"segment_chunks": 5}):
        with pytest.raises(KeyError), forced_dispatch(forward={"segment_chunks": 7}):
            raise KeyError
        for wrong in ({"segment_chunks": -2}, {"cut_above": 5}):  # the forward's is not set either
            with pytest.raises(ValueError), forced_dispatch(forward={"segment_chunks": 7}, backward=wrong):
                pass
        with pytest.raises(TypeError), forced_dispatch(forward={"segment_chunk": 7}):
            pass
        assert segment_chunks_of_both() == (3, 5)
    assert segment_chunks_of_both() == decided


def test_scopes_hold_in_other_threads():
    """Autograd runs the backward of GPU tensors in a thread of its own."""
    modes = {"forward": {"segment_chunks": 3}, "backward": {"segment_chunks": 5}}
    with forced_dispatch(**modes), concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(segment_chunks_of_both).result() == (3, 5)


# Shapes that no call has. An integer division by zero would end the process, so these run in a separate one.


def check_errors(calls: dict[str, tuple[str, int]]):
    """Each call raises a ValueError that says which argument is wrong, then what it is, then what was expected."""
    code = f"""
import flash_qla
from flash_qla import _C
def enter(**modes):
    with flash_qla.testing.forced_dispatch(**modes):
        pass
for call in {list(calls)}:
    try:
        print("returned", eval(call), flush=True)
    except ValueError as error:
        print(error, flush=True)
print(_C.forward_dispatch(1, 2048, 1, 2, 8))
"""
    *lines, last = run_python(code).splitlines()
    for line, (name, value) in zip(lines, calls.values(), strict=True):
        assert re.search(rf"\b{name.split()[-1]} (is|=) {value}, expected ", line), line
    assert last == str(_C.forward_dispatch(1, 2048, 1, 2, 8))  # nothing of it stays


def test_override_takes_known_modes_only():
    wrong = [("value_tile", tile) for tile in (1, 32, 96, 256, -64)]
    wrong += [("segment_chunks", chunks) for chunks in (-2, 2**31 // CHUNK)]  # tokens are counted in 32 bits
    wrong += [("fused", fused) for fused in (-2, 2)] + [("value_tile=64, fused", 1)]
    wrong += [(f"{other}cut_above", 5) for other in ("", "segment_chunks=0, ", "value_tile=64, ", "fused=1, ")]
    wrong += [("segment_chunks=5, cut_above", chunks) for chunks in (-1, 2**31 // CHUNK)]
    wrong += [(f"{other}long_tile", 64) for other in ("", "value_tile=128, ", "cut_above=5, segment_chunks=2, ")]
    wrong += [("value_tile=128, cut_above=5, long_tile", 96), ("fused=1, value_tile=128, cut_above=5, long_tile", 64)]
    check_errors({f"enter(forward=dict({name}={value}))": (name, value) for name, value in wrong})
    wrong = [("segment_chunks", -2), ("segment_chunks", 2**31 // CHUNK), ("cut_above", 5)]
    wrong += [("value_tile", 64), ("long_tile", 64), ("fused", 0)]  # it has none
    check_errors({f"enter(backward=dict({name}={value}))": (name, value) for name, value in wrong})


def test_impossible_shapes():
    good = {"B": 1, "T": 2048, "N": 1, "H_k": 2, "H_v": 8, "sm_count": 132}
    wrong = (("B", -1), ("T", -1), ("N", 0), ("H_k", 0), ("H_v", 0), ("H_v", 3), ("sm_count", 0))
    wrong += (("K", 0), ("K", 4), ("K", 264), ("V", 0), ("V", 100), ("V", 520))
    for dispatch in ("forward_dispatch", "backward_dispatch"):
        check_errors({f"_C.{dispatch}(**{good | {name: value}})": (name, value) for name, value in wrong})


def test_no_tokens():
    decision = _C.forward_dispatch(1, 0, 1, 2, 8)
    assert decision.segment_chunks == 0 and decision.workspace_bytes >= 0
