"""The modes on the GPU: of the forward each value tile, with and without context parallelism, by segments of one and
more chunks, and in one kernel; of the backward those segments. All have the bars of the other tests; each reference is
made once for all modes that it is compared with. The file is long because tests of all modes share these references."""

import dataclasses
import functools
import itertools
import math
import random

import accuracy
import pytest
import test_gpu_execution as execution
import torch
import torch.nn.functional as F
from cases import (
    TINY,
    Case,
    backward_mode,
    check_backward,
    check_gradients,
    check_outputs,
    equal,
    expected_outputs,
    forward_mode,
    make_gradients,
    make_inputs,
    reference_gradients,
    run_backward,
    run_forward,
    run_forwards,
)
from poison import poisoned

import flash_qla

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
FUSED = (128, 0, 1)
FUSED_SEGMENTS = {n: (128, n, 1) for n in (1, 2, 5, 16)}  # the one kernel, with segments of n chunks
# (value_tile, segment_chunks, perhaps fused)
MODES = (*itertools.product((64, 128), (0, 1, 2, 5, 16)), FUSED, *FUSED_SEGMENTS.values())
SKIPPED_BELOW = -24  # log2 of the bound on a map below which it is left out, kNegligible in maps/segments.cuh


def each_mode(*modes):
    def name(mode):
        if mode == FUSED:
            return "fused"
        return ("fused" if len(mode) == 3 else "tile{}").format(*mode) + "_segment{1}".format(*mode)

    return pytest.mark.parametrize("mode", modes, ids=name)


def each(*cases: Case):
    return pytest.mark.parametrize("case", cases, ids=str)


@functools.lru_cache(maxsize=1)  # pytest goes through the modes of a case before it takes the next one
def inputs_and_reference(case: Case) -> tuple[dict, dict]:
    inputs = make_inputs(case, "cuda")
    return inputs, expected_outputs(inputs)


def check_mode(case: Case, mode: tuple[int, ...]):
    inputs, expected = inputs_and_reference(case)
    with forward_mode(*mode):
        check_outputs(case, inputs, expected, f"{case}, mode {mode}")


# Against the recurrence

LONG = Case(T=2111, H_k=1, H_v=4)
MIXED = Case(
    lengths=(0, 1, 63, 64, 65, 2085, 0, 330, 640, 0), padding=70, H_k=2, H_v=4, gate="logsigmoid", state_v_first=True
)


@each_mode(*MODES)
@each(LONG, MIXED)
def test_every_mode(mode, case):
    check_mode(case, mode)


@each_mode((64, 2), (128, 5), FUSED, FUSED_SEGMENTS[2])
@each(
    *(Case(B=2, T=650, H_v=4, gate=gate) for gate in ("zero", "tiny", "underflow", "logsigmoid", "resets")),
    *(Case(lengths=(650, 300), gate=gate, dtype=FP16) for gate in ("zero", "underflow", "logsigmoid", "softplus")),
)
def test_gates(mode, case):
    check_mode(case, mode)


@each_mode((64, 1), (128, 2), FUSED, FUSED_SEGMENTS[1])
@each(
    Case(T=390, H_k=1, H_v=1, initial_state=None, dtype=FP16),
    Case(B=3, T=257, H_k=3, H_v=3, initial_state=BF16, state_v_first=True, gate="logsigmoid"),
    Case(lengths=(400, 0, 129), H_k=2, H_v=16, initial_state=None, cu_dtype=torch.int64, gate="tiny", scale=-0.3),
    Case(lengths=(330, 0, 65), padding=4, keys="raw", use_qk_l2norm_in_kernel=True, gate="logsigmoid"),
    Case(B=2, T=330, keys="raw", use_qk_l2norm_in_kernel=True, dtype=FP16, state_v_first=True, H_k=1, H_v=3),
    Case(T=330, keys="long", beta="stable", gate="zero"),
    Case(T=200, keys="zero", use_qk_l2norm_in_kernel=True, dtype=FP16),
    Case(T=330, keys="repeated", gate="zero", strides="heads_first"),
    Case(T=330, beta="two", gate="logsigmoid", dtype=FP16, strides="gaps"),
    Case(lengths=TINY, H_k=1, H_v=2, padding=9),
    Case(lengths=(0, 0, 0), padding=65),
    Case(lengths=(), padding=3),
    Case(T=0),
)
def test_arguments(mode, case):
    check_mode(case, mode)


@each_mode((64, 1), (128, 2), FUSED, FUSED_SEGMENTS[1])
@each(
    Case(
        lengths=tuple(random.Random(0).choices((0, 1, 64, 130, 200), k=600)), H_k=1, H_v=1, gate="logsigmoid", padding=1
    ),
    # The first step's sequences without tokens are the first pieces of half of the CTAs.
    Case(lengths=(0,) * 200 + (70,) * 100, H_k=1, H_v=1),
)
def test_more_sequences_than_one_step_of_the_plan(mode, case):
    """chunk_plan cuts 256 sequences a step; the numbers of their segments go on from step to step."""
    check_mode(case, mode)


@each_mode((64, 0), (128, 0), (64, 1), (128, 2), FUSED, FUSED_SEGMENTS[1])
@each(
    Case(lengths=tuple(random.Random(1).choices((0, 1, 64, 65, 130, 200), k=100)), H_k=2, H_v=8, gate="logsigmoid"),
    Case(lengths=(3, 700, 0, 64, 129) * 12, H_k=4, H_v=12, dtype=FP16, state_v_first=True),
    Case(lengths=(70,) * 50, H_k=8, H_v=8, initial_state=None, padding=2),
)
def test_more_work_than_ctas(mode, case):
    """CTAs then go through several segments and heads, those of chunk_forward with states arriving ahead, those of
    fused_forward with the next ones' matrices made in the last ones' steps."""
    check_mode(case, mode)


# Without decay all cut sequences need their maps.
SCANS = Case(lengths=(130, 1, 70) * 14, H_k=1, H_v=1, gate="zero", padding=1)


@each_mode((64, 1), (128, 1), FUSED_SEGMENTS[1])
def test_more_scans_than_ctas(mode):
    """A CTA of segment_scan then goes on to its next cut sequence, past those that are not cut."""
    check_mode(SCANS, mode)


@pytest.mark.parametrize("value_tile", (64, 128))
@each(
    Case(lengths=(300, 0, 65), padding=3, gate="logsigmoid"),
    Case(T=200, keys="raw", use_qk_l2norm_in_kernel=True, dtype=FP16, H_k=1, H_v=2),
)
def test_autograd(case, value_tile):
    """The backward takes what this forward saved; o is that of a call without gradients."""
    with forward_mode(value_tile, 2):
        check_backward(case, "cuda")
        inputs = make_inputs(case, "cuda")
        outputs = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
        leaves = {name: inputs[name].clone().requires_grad_() for name in ("q", "v", "g", "initial_state")}
        with_grad = flash_qla.chunk_gated_delta_rule(**{**inputs, **leaves}, output_final_state=True)
        assert all(x.requires_grad and torch.equal(x, y) for x, y in zip(with_grad, outputs, strict=True))


# Changes that a mode may make


@pytest.mark.parametrize("value_tile", (64, 128))
def test_same_bits_every_time(value_tile):
    inputs = make_inputs(MIXED, "cuda")
    for mode in (mode for mode in MODES if mode[0] == value_tile):
        with forward_mode(*mode):
            expected = run_forwards(inputs)
            assert all(equal(run_forwards(inputs), expected) for _ in range(5))


@pytest.mark.parametrize("value_tile", (64, 128))
def test_without_auto_cp_there_is_none(value_tile):
    """Whatever else was asked for. What precedes the second segment is the same in any case."""
    inputs = make_inputs(LONG, "cuda")
    with forward_mode(value_tile, 0):
        expected = run_forwards(inputs)
    for segment_chunks in (1, 5, -1):
        with forward_mode(value_tile, segment_chunks):
            assert equal(run_forwards({**inputs, "auto_cp": False}), expected)
    with forward_mode(value_tile, 5):
        actual = run_forwards(inputs)
    assert all(torch.equal(actual[name], expected[name]) for name in ("g_cumsum", "A"))
    assert torch.equal(actual["o"][:, :320], expected["o"][:, :320])
    assert torch.equal(actual["h"][:, :5], expected["h"][:, :5])
    assert not torch.equal(actual["o"][:, 320:], expected["o"][:, 320:])  # or nothing here would test anything


@pytest.mark.parametrize("value_tile", (64, 128))
@pytest.mark.parametrize("lengths", ((2560, 197, 1, 0, 768), (640,) * 256 + (1900,)))  # one step of the plan, two
def test_device_cuts_where_a_sequence_is_long(value_tile, lengths):
    """The bits are those of the mode that it takes, whatever cu_seqlens' dtype."""
    inputs = make_inputs(Case(lengths=lengths, H_k=1, H_v=2), "cuda")
    longest = -(-max(lengths) // 64)
    with forward_mode(value_tile, 0):
        whole = run_forwards(inputs)
    with forward_mode(value_tile, 5):
        cut = run_forwards(inputs)
    assert not torch.equal(whole["o"], cut["o"])  # or nothing here would test anything
    for dtype in (torch.int32, torch.int64):
        inputs["cu_seqlens"] = inputs["cu_seqlens"].to(dtype)
        for cut_above, expected in ((1, cut), (longest - 1, cut), (longest, whole), (10**6, whole)):
            with forward_mode(value_tile, 5, cut_above=cut_above):
                assert equal(run_forwards(inputs), expected), (dtype, cut_above)


@pytest.mark.parametrize("case", (Case(dtype=FP16), Case(use_qk_l2norm_in_kernel=True)))
@pytest.mark.parametrize("lengths", ((2560, 197, 1, 0, 768), (0, 330), (64,) * 256 + (330, 0)))  # two steps of the plan
def test_device_cuts_for_the_one_kernel(case, lengths):
    """Where it cuts nothing, the bits are those of whole sequences."""
    inputs = make_inputs(dataclasses.replace(case, lengths=lengths, padding=66, H_k=1, H_v=2), "cuda")
    longest = -(-max(lengths) // 64)

    def run():
        with poisoned("cuda"):
            o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
        return {"o": o, "final_state": final_state}

    with forward_mode(128, 3, 1):
        cut = run()
    with forward_mode(128, 0, 1):
        whole = run()
    assert not equal(cut, whole)
    for cut_above, expected in ((3, cut), (longest - 1, cut), (longest, whole), (10**6, whole)):
        with forward_mode(128, 3, 1, cut_above=cut_above):
            assert all(equal(run(), expected) for _ in range(3)), cut_above


def test_the_cost_model_decides():
    from flash_qla import _C

    inputs = make_inputs(Case(T=8192, H_k=1, H_v=2), "cuda")
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    found = _C.forward_dispatch(1, 8192, 1, 1, 2, sm_count=sm_count, varlen=False)
    assert found.segment_chunks > 0
    with forward_mode(found.value_tile, found.segment_chunks, int(found.fused)):
        expected = run_forwards(inputs)
    assert equal(run_forwards(inputs), expected)
    assert not equal(run_forwards({**inputs, "auto_cp": False}), expected)


# The shortcut that the gates allow: what a map with a bound below 2^-24 brings from before it is left out


def log2_to_gate(bits: float, tokens: int) -> float:
    return bits * math.log(2) / tokens


AROUND = tuple((chunks, SKIPPED_BELOW + side / 2) for chunks in (1, 2, 5) for side in (-1, 1))


def inputs_around_the_threshold(case: Case) -> dict:
    """Head h decays evenly, by 2^AROUND[h][1] over AROUND[h][0] chunks; tokens after the first segment of five chunks
    see that part of the initial state."""
    inputs = make_inputs(case, "cuda")
    gates = [log2_to_gate(bits, 64 * chunks) for chunks, bits in AROUND]
    inputs["g"] = torch.tensor(gates, device="cuda").expand(case.B, case.T, -1).contiguous()
    return inputs


CUT = {"tile64": (64, 5), "tile128": (128, 5), "fused": FUSED_SEGMENTS[5]}  # modes with segments of five chunks


@pytest.mark.parametrize("mode", CUT.values(), ids=CUT)
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_gates_around_the_threshold(dtype, mode):
    """The state is a thousand times as large as its remainder: o and the final state do not show the drop, and differ
    from the exact path by 2^-20 of that state."""
    case = Case(T=1000, H_k=1, H_v=len(AROUND), state_scale=1000, dtype=dtype)
    inputs = inputs_around_the_threshold(case)
    expected = expected_outputs(inputs)
    before = inputs["initial_state"].double().norm(dim=(-2, -1)).flatten()  # of each head
    name = f"{case}, gates around the threshold, mode {mode}"
    with forward_mode(*mode):
        check_outputs(case, inputs, expected, name)
        actual = run_forwards(inputs)
        exact = run_forwards({**inputs, "auto_cp": False})
    # The later segments by themselves, where no number is large.
    accuracy.check("o", actual["o"][:, 320:], expected["o"][:, 320:], dtype=dtype, case=name)
    accuracy.check("h", actual["h"][:, 5:], expected["h"][:, 5:], dtype=dtype, case=name)
    difference = {x: (actual[x].double() - exact[x].double())[0] for x in ("o", "h", "final_state")}
    assert (difference["final_state"].norm(dim=(-2, -1)) <= 2**-20 * before).all()
    assert (difference["h"].norm(dim=(-2, -1)) <= 2**-20 * before).all()
    assert (difference["o"].norm(dim=-1) <= 2**-20 * before).all()  # o is shorter than S by |q| scale < 1


@pytest.mark.parametrize("mode", CUT.values(), ids=CUT)
@pytest.mark.parametrize("keys", ("unit", "raw"))
def test_what_is_left_out(keys, mode):
    """With v = 0 all outputs come from the initial state. It is zero after the first segment if and only if the last
    chunks' bound is below the threshold; with the l2norm the bound is that of the normalized keys."""
    case = Case(T=650, H_k=1, H_v=len(AROUND), keys=keys, use_qk_l2norm_in_kernel=keys == "raw")
    inputs = inputs_around_the_threshold(case)
    inputs["v"].zero_()
    expected = expected_outputs(inputs)
    with forward_mode(*mode):
        actual = run_forwards(inputs)
    for head, (chunks, bits) in enumerate(AROUND):
        left = actual["o"][:, 320:, head]
        if bits * 5 / chunks < SKIPPED_BELOW:
            assert not left.any() and not actual["final_state"][:, head].any(), (chunks, bits)
        else:
            error = accuracy.relative_error(left, expected["o"][:, 320:, head])
            assert error < 2 * accuracy.BF16_BAR, (chunks, bits, error)


# 40: more than the warp looks at in one go
@each_mode((64, 5), (64, 40), FUSED_SEGMENTS[5], (128, 40, None, 1))
def test_each_head_and_segment_decides_for_itself(mode):
    """Heads that forget everything in some chunks (e^-64) and nothing in the others."""
    n = mode[1]
    T = (2 * n + 1) * 64
    strong = (
        (),  # exact maps throughout
        (n + 2,),  # the second segment's third chunk
        (n - 1, 2 * n - 1),  # the first and the second segment's last ones
        (0, n),  # their first ones
        range(T // 64),
    )
    case = Case(T=T, H_k=1, H_v=len(strong), gate="zero")
    inputs = make_inputs(case, "cuda")
    for head, chunks in enumerate(strong):
        for chunk in chunks:
            inputs["g"][:, 64 * chunk : 64 * (chunk + 1), head] = -1
    with forward_mode(*mode):
        check_outputs(case, inputs, expected_outputs(inputs), f"{case}, strong gates in some chunks")


# The kernels of maps compute short maps after long ones if there are more maps than SMs.
MORE_MAPS_THAN_SMS = each(*(Case(T=10 * 64, H_k=1, H_v=8, gate="zero", **dims) for dims in ({}, {"K": 256, "V": 192})))


def with_short_maps(inputs: dict) -> dict:
    """Every other head forgets everything in each chunk (e^-64)."""
    inputs["g"][..., ::2] = -1
    return inputs


@MORE_MAPS_THAN_SMS
def test_more_maps_than_sms(case):
    inputs = with_short_maps(make_inputs(case, "cuda"))
    with forward_mode(128, 1):
        check_outputs(case, inputs, expected_outputs(inputs), f"{case}, short maps of every other head")


@pytest.mark.parametrize("mode", CUT.values(), ids=CUT)
def test_bound_knows_the_length_of_the_keys(mode):
    """Every eighth token has beta = 2 and the same key, |k|^2 = 1.9: along it the state is multiplied by 1 - 3.8, which
    the gates undo. They alone would make a segment's map negligible, 2^-59, but along that key it is a reflection."""
    case = Case(T=2 * 320 + 40, H_k=1, H_v=2, state_scale=5)
    inputs = make_inputs(case, "cuda")
    key = math.sqrt(1.9) * F.normalize(inputs["k"][0, 0, 0].double(), dim=0)
    turns = torch.arange(case.T, device="cuda") % 8 == 7
    inputs["k"][:, turns] = key.to(BF16)
    inputs["beta"][:] = torch.where(turns[:, None], 2.0, 0.0)
    growth = 2 * key.to(BF16).double().square().sum().item() - 1
    assert abs(growth - 2.8) < 0.03
    inputs["g"].fill_(-math.log(growth) / 8)
    expected = expected_outputs(inputs)
    assert expected["final_state"].norm() > 0.05 * inputs["initial_state"].norm()
    errors = {}
    for auto_cp in (True, False):
        with forward_mode(*mode):
            actual = run_forwards({**inputs, "auto_cp": auto_cp})
        errors[auto_cp] = {x: accuracy.relative_error(actual[x], expected[x]) for x in ("o", "h", "final_state")}
    # Errors grow like the state, by 2.8 within a few tokens, with segments or without; leaving the map out is wrong by
    # 0.5 and more.
    for name, error in errors[True].items():
        assert error < 2 * max(errors[False][name], accuracy.BF16_BAR), (name, errors)
        assert error < 0.1, (name, errors)


# Execution: the same tests, with segments


@each_mode((64, 2), (128, 1), FUSED, FUSED_SEGMENTS[2])
def test_streams_and_synchronisation(mode):
    with forward_mode(*mode):
        execution.test_runs_on_the_current_stream()
        for case in (execution.VARLEN, Case(B=2, T=300, state_v_first=True)):
            execution.test_no_host_synchronisation(case)
            execution.test_same_bits_every_time(case)


@each_mode((128, 1), FUSED, FUSED_SEGMENTS[1])
@pytest.mark.parametrize("offsets", execution.BAD_OFFSETS, ids=str)
def test_bad_offsets_are_confined(offsets, mode):
    with forward_mode(*mode):
        execution.test_bad_offsets_are_confined(offsets, segment_chunks=1)


@each_mode((64, 2), (128, 1), FUSED, FUSED_SEGMENTS[2])
def test_graph_replay_with_other_inputs_and_cu_seqlens(mode):
    """How many segments a sequence has, and which of them need a map, is found out in each replay."""
    batches = (
        (300, 65, 0, 7, 500),
        (872, 0, 0, 0, 0),
        (0, 0, 0, 0, 872),
        (0, 0, 0, 0, 0),
        (128, 129, 127, 1, 400),
        (300, 65, 0, 7, 500),
    )
    arguments = make_inputs(Case(lengths=batches[0]), "cuda")
    with forward_mode(*mode):
        graph, outputs = execution.capture(arguments, run_forwards)
    for seed, lengths in enumerate(batches):
        gate = ("softplus", "logsigmoid", "zero")[seed % 3]
        case = Case(lengths=lengths, padding=sum(batches[0]) - sum(lengths), seed=seed, gate=gate)
        inputs = make_inputs(case, "cuda")
        for name, x in inputs.items():
            if isinstance(x, torch.Tensor):
                arguments[name].copy_(x)
        actual = execution.replay(graph, outputs)
        with forward_mode(*mode):
            assert equal(actual, run_forwards(inputs)), lengths
        if seed in (1, 4):
            expected = expected_outputs(inputs)
            for name in ("o", "h", "final_state"):
                accuracy.check(name, actual[name], expected[name], dtype=BF16, case=f"graph, {case}")


# The backward

SEGMENTS = (1, 2, 5)  # chunks


def each_segment(*lengths: int):
    return pytest.mark.parametrize("segment_chunks", lengths or SEGMENTS)


@functools.lru_cache(maxsize=1)
def backward_and_reference(case: Case) -> tuple:
    inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
    return inputs, gradients, reference_gradients(inputs, **gradients)


def check_backward_mode(case: Case, segment_chunks: int):
    with backward_mode(segment_chunks):
        check_gradients(case, *backward_and_reference(case), f"{case}, backward by {segment_chunks}")


@each_segment()
@each(
    *(Case(B=2, T=650, H_v=4, gate=gate) for gate in ("zero", "tiny", "underflow", "logsigmoid", "resets")),
    *(Case(lengths=(650, 300), gate=gate, dtype=FP16) for gate in ("zero", "underflow", "logsigmoid", "softplus")),
)
def test_backward_gates(case, segment_chunks):
    check_backward_mode(case, segment_chunks)


@each_segment()
@each(
    MIXED,
    Case(T=390, H_k=1, H_v=1, initial_state=None, dtype=FP16),
    Case(T=390, H_k=1, H_v=1, dht=None, gate="zero"),
    Case(B=3, T=257, H_k=3, H_v=3, initial_state=BF16, state_v_first=True, gate="logsigmoid"),
    Case(lengths=(400, 0, 129), H_k=2, H_v=16, initial_state=None, cu_dtype=torch.int64, gate="tiny", scale=-0.3),
    Case(lengths=(330, 0, 65), padding=4, keys="raw", use_qk_l2norm_in_kernel=True, gate="logsigmoid"),
    Case(T=330, keys="long", beta="stable", gate="zero"),
    Case(T=330, keys="long", beta="stable", gate="logsigmoid", dtype=FP16),
    Case(T=330, beta="two", gate="logsigmoid", dtype=FP16, strides="gaps"),
    Case(lengths=TINY, H_k=1, H_v=2, padding=9),
)
def test_backward_arguments(case, segment_chunks):
    check_backward_mode(case, segment_chunks)


@each_segment(2)
def test_backward_of_more_sequences_than_one_step_of_the_plan(segment_chunks):
    lengths = tuple(random.Random(0).choices((0, 1, 64, 130, 200), k=300))
    check_backward_mode(Case(lengths=lengths, H_k=1, H_v=1, gate="logsigmoid", padding=1), segment_chunks)


@each_segment(1)
def test_backward_of_more_scans_than_ctas(segment_chunks):
    check_backward_mode(SCANS, segment_chunks)


@each_segment(5, 40)  # 40: more than the warp looks at in one go
def test_each_head_and_segment_of_the_backward_decides_for_itself(segment_chunks):
    """Heads that forget everything in some chunks (e^-64) and nothing in the others."""
    n = segment_chunks
    T = (2 * n + 1) * 64
    strong = ((), (n + 2,), (n - 1, 2 * n - 1), (0, n), (2 * n,), range(T // 64))
    case = Case(T=T, H_k=1, H_v=len(strong), gate="zero")
    inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
    for head, chunks in enumerate(strong):
        for chunk in chunks:
            inputs["g"][:, 64 * chunk : 64 * (chunk + 1), head] = -1
    with backward_mode(segment_chunks):
        expected = reference_gradients(inputs, **gradients)
        check_gradients(case, inputs, gradients, expected, f"{case}, strong gates in some chunks")


@MORE_MAPS_THAN_SMS
def test_more_maps_of_the_backward_than_sms(case):
    inputs, gradients = with_short_maps(make_inputs(case, "cuda")), make_gradients(case, "cuda")
    with backward_mode(1):
        expected = reference_gradients(inputs, **gradients)
        check_gradients(case, inputs, gradients, expected, f"{case}, short maps of every other head")


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_backward_gates_around_the_threshold(dtype):
    """The gradient is a thousand times as large as its remainder: the difference from the exact path is 2^-20 of the
    gradient."""
    case = Case(T=1000, H_k=1, H_v=len(AROUND), dtype=dtype)
    inputs, gradients = inputs_around_the_threshold(case), make_gradients(case, "cuda")
    gradients["dht"] *= 1000
    with backward_mode(5):
        actual = run_backward(inputs, **gradients)
        exact = run_backward({**inputs, "auto_cp": False}, **gradients)
        check_gradients(case, inputs, gradients, reference_gradients(inputs, **gradients), f"{case}, around")
    norm_after = gradients["dht"].double().norm(dim=(-2, -1)).flatten()
    difference = actual["dh0"].double() - exact["dh0"].double()
    assert (difference.norm(dim=(-2, -1)) <= 2**-20 * norm_after).all()


def test_what_the_backward_leaves_out():
    """With do = 0 all gradients come from the gradient of the final state. It is zero before the last segment if and
    only if the first chunks' bound is below the threshold."""
    case = Case(T=640, H_k=1, H_v=len(AROUND))
    inputs, gradients = inputs_around_the_threshold(case), make_gradients(case, "cuda")
    gradients["do"].zero_()
    expected = reference_gradients(inputs, **gradients)
    with backward_mode(5):
        actual = run_backward(inputs, **gradients)
    for head, (chunks, bits) in enumerate(AROUND):
        left = actual["dv"][:, :320, head]
        if bits * 5 / chunks < SKIPPED_BELOW:
            assert not left.any() and not actual["dh0"][:, head].any(), (chunks, bits)
        else:
            error = accuracy.relative_error(left, expected.dv[:, :320, head])
            assert error < 2 * accuracy.BF16_BAR, (chunks, bits, error)


def test_growth_at_one_end_of_a_segment():
    """A chunk with a bound of 2^-26 and, at the segment's other end, one with 2^5, from keys of length 1.3 with
    beta = 2, along which the state is multiplied by 1 - 3.4: then only one direction leaves the map out."""
    case = Case(T=4 * 320, H_k=1, H_v=3)
    inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
    inputs["g"].fill_(-1e-3)
    inputs["beta"] *= 0.5
    for head, (strong, long) in enumerate(((0, 4), (4, 0), (2, 2))):  # chunks of each segment
        for segment in range(4):
            chunk = 5 * segment
            inputs["g"][:, 64 * (chunk + strong) : 64 * (chunk + strong) + 18, head] = -1
            tokens = slice(64 * (chunk + long) + 40, 64 * (chunk + long) + 44)
            inputs["beta"][:, tokens, head] = 2
            inputs["k"][:, tokens] *= 1.3
    with backward_mode(5):
        check_gradients(case, inputs, gradients, reference_gradients(inputs, **gradients), f"{case}, growth")


def test_backward_has_the_same_bits_every_time():
    inputs, gradients = make_inputs(MIXED, "cuda"), make_gradients(MIXED, "cuda")
    saved = run_forward(inputs)[:2]
    for segment_chunks in (0, 1, 2, 5, 16):
        with backward_mode(segment_chunks):
            expected = run_backward(inputs, **gradients, intermediates=saved)
            assert all(equal(run_backward(inputs, **gradients, intermediates=saved), expected) for _ in range(5))


def test_backward_without_auto_cp():
    """Whatever else was asked for."""
    inputs, gradients = make_inputs(LONG, "cuda"), make_gradients(LONG, "cuda")
    saved = run_forward(inputs)[:2]
    with backward_mode(0):
        expected = run_backward(inputs, **gradients, intermediates=saved)
    for segment_chunks in (1, 5, -1):
        with backward_mode(segment_chunks):
            actual = run_backward({**inputs, "auto_cp": False}, **gradients, intermediates=saved)
            assert equal(actual, expected)
    with backward_mode(5):
        actual = run_backward(inputs, **gradients, intermediates=saved)
    assert not equal(actual, expected)  # or nothing here would test anything


def test_device_cuts_the_backward_where_a_sequence_is_long():
    case = Case(lengths=(2560, 197, 1, 0, 768), H_k=1, H_v=2)
    inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
    saved = run_forward(inputs)[:2]
    whole, cut = [], []
    for segment_chunks, found in ((0, whole), (5, cut)):
        with backward_mode(segment_chunks):
            found.append(run_backward(inputs, **gradients, intermediates=saved))
    assert not equal(whole[0], cut[0])
    for cut_above, expected in ((1, cut), (39, cut), (40, whole), (10**6, whole)):
        with backward_mode(5, cut_above=cut_above):
            assert equal(run_backward(inputs, **gradients, intermediates=saved), expected[0]), cut_above


def test_the_cost_model_decides_on_the_backward():
    from flash_qla import _C

    case = Case(T=8192, H_k=1, H_v=2)
    inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
    saved = run_forward(inputs)[:2]
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    found = _C.backward_dispatch(1, 8192, 1, 1, 2, sm_count=sm_count, varlen=False)
    assert found.segment_chunks > 0
    with backward_mode(found.segment_chunks):
        expected = run_backward(inputs, **gradients, intermediates=saved)
    assert equal(run_backward(inputs, **gradients, intermediates=saved), expected)


@each_segment(1, 2)
def test_graph_replay_of_the_backward(segment_chunks):
    """How many segments a sequence has, and which of them need a map, is found out in each replay."""
    batches = ((300, 65, 0, 7, 500), (872, 0, 0, 0, 0), (0, 0, 0, 0, 872), (0, 0, 0, 0, 0), (128, 129, 127, 1, 400))
    tokens = sum(batches[0])

    def arguments_of(seed, lengths):
        gate = ("softplus", "logsigmoid", "zero")[seed % 3]
        case = Case(lengths=lengths, padding=tokens - sum(lengths), seed=seed, gate=gate)
        inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
        g_cumsum, A = run_forward(inputs)[:2]
        return {**inputs, **gradients, "g": g_cumsum, "A": A}

    def run(arguments):
        return dict(enumerate(flash_qla.chunk_gated_delta_rule_bwd(**arguments)))

    with backward_mode(segment_chunks):
        arguments = arguments_of(0, batches[0])
        graph, outputs = execution.capture(arguments, run)
        for seed, lengths in enumerate(batches):
            actual_arguments = arguments_of(seed, lengths)
            for name, x in actual_arguments.items():
                if isinstance(x, torch.Tensor):
                    arguments[name].copy_(x)
            assert equal(execution.replay(graph, outputs), run(actual_arguments)), lengths
