"""The modes on the GPU: of the forward each value tile, with and without context parallelism, by segments of one and
more chunks, and in one kernel; of the backward those segments. All have the bars of the other tests; each reference is
made once for all modes that it is compared with. The file is long because tests of all modes share these references."""

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
    Case,
    backward_mode,
    check_gradients,
    check_outputs,
    equal,
    expected_outputs,
    forward_mode,
    make_arguments,
    make_gradients,
    make_inputs,
    reference_gradients,
    run_all,
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


GATES = (
    *(Case(B=2, T=650, H_v=4, gate=gate) for gate in ("zero", "tiny", "underflow", "logsigmoid", "resets")),
    *(Case(lengths=(650, 300), gate=gate, dtype=FP16) for gate in ("zero", "underflow", "logsigmoid", "softplus")),
)


@each_mode((64, 2), (128, 5), FUSED, FUSED_SEGMENTS[2])
@each(*GATES)
def test_gates(mode, case):
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


# Changes that a mode may make


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


def forward_of(inputs: dict) -> dict:
    """The op alone, which may run fused kernels that the low-level function does not have."""
    with poisoned("cuda"):
        o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    return {"o": o, "final_state": final_state}


@pytest.mark.parametrize(("value_tile", "fused"), ((64, 0), (128, 0), (128, 1)))
@pytest.mark.parametrize(
    "case",
    (
        Case(lengths=(2560, 197, 1, 0, 768), padding=66, H_k=1, H_v=2),
        Case(lengths=(0, 330), padding=66, H_k=1, H_v=2, dtype=FP16),
        Case(lengths=(640,) * 256 + (1900,), H_k=1, H_v=2, cu_dtype=torch.int64),  # two steps of the plan
        Case(lengths=(64,) * 256 + (330,), H_k=1, H_v=2, use_qk_l2norm_in_kernel=True),
    ),
    ids=str,
)
def test_device_cuts_where_a_sequence_is_long(case, value_tile, fused):
    """The bits are those of segments or of whole sequences, whichever it takes."""
    inputs = make_inputs(case, "cuda")
    longest = -(-max(case.lengths) // 64)
    run = forward_of if fused else run_forwards
    with forward_mode(value_tile, 3, fused):
        cut = run(inputs)
    with forward_mode(value_tile, 0, fused):
        uncut = run(inputs)
    assert not torch.equal(cut["o"], uncut["o"])  # or nothing here would test anything
    for cut_above, expected in ((3, cut), (longest - 1, cut), (longest, uncut), (10**6, uncut)):
        with forward_mode(value_tile, 3, fused, cut_above=cut_above):
            assert all(equal(run(inputs), expected) for _ in range(3)), cut_above


@pytest.mark.hopper
@pytest.mark.parametrize("segment_chunks", (0, 3))
@pytest.mark.parametrize(("value_tile", "long_tile"), ((64, 128), (128, 64)))
def test_device_picks_the_tile(value_tile, long_tile, segment_chunks):
    """Of two launches one does a long batch, and the other one another batch."""
    case = Case(lengths=(330, 97, 1, 0), padding=66, H_k=1, H_v=2)
    inputs = make_inputs(case, "cuda")
    with forward_mode(long_tile, segment_chunks):
        as_long = run_forwards(inputs)
    with forward_mode(value_tile, 0):
        as_another = run_forwards(inputs)
    for cut_above, expected in ((5, as_long), (6, as_another)):
        with forward_mode(value_tile, segment_chunks, cut_above=cut_above, long_tile=long_tile), poisoned("cuda"):
            assert all(equal(run_forwards(inputs), expected) for _ in range(3)), cut_above


@pytest.mark.hopper
def test_the_cost_model_decides():
    from flash_qla import _C

    case = Case(T=8192, H_k=1, H_v=2)
    arguments = make_arguments(case, "cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    forward, backward = (
        ask(1, 8192, 1, 1, 2, sm_count=sms, varlen=False) for ask in (_C.forward_dispatch, _C.backward_dispatch)
    )
    assert forward.segment_chunks > 0 and backward.segment_chunks > 0
    with (
        forward_mode(forward.value_tile, forward.segment_chunks, int(forward.fused)),
        backward_mode(backward.segment_chunks),
    ):
        expected = run_low_level(arguments)
    assert equal(run_low_level(arguments), expected)
    whole = run_low_level(arguments | {"auto_cp": False})
    assert not torch.equal(whole["o"], expected["o"]) and not torch.equal(whole["dk"], expected["dk"])


def run_low_level(arguments: dict) -> dict:
    """All outputs of the forward, and gradients from its own sums."""
    gradients = {name: arguments[name] for name in ("do", "dht")}
    inputs = {name: x for name, x in arguments.items() if name not in gradients}
    outputs = run_forwards(inputs)
    return outputs | run_backward(inputs, **gradients, intermediates=(outputs["g_cumsum"], outputs["A"]))


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
    """Heads that forget everything in some chunks (e^-64) and nothing in the others, in both passes."""
    n = mode[1]
    T = (2 * n + 1) * 64
    strong = (
        (),  # exact maps throughout
        (n + 2,),  # the second segment's third chunk
        (n - 1, 2 * n - 1),  # the first and the second segment's last ones
        (0, n),  # their first ones
        (2 * n,),  # the last one
        range(T // 64),
    )
    case = Case(T=T, H_k=1, H_v=len(strong), gate="zero")
    inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
    for head, chunks in enumerate(strong):
        for chunk in chunks:
            inputs["g"][:, 64 * chunk : 64 * (chunk + 1), head] = -1
    name = f"{case}, strong gates in some chunks"
    with forward_mode(*mode), backward_mode(n):
        check_outputs(case, inputs, expected_outputs(inputs), name)
        check_gradients(case, inputs, gradients, reference_gradients(inputs, **gradients), name)


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
    with forward_mode(*mode), backward_mode(mode[1]):
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
    with forward_mode(*mode), backward_mode(mode[1]):
        arguments = make_arguments(Case(lengths=batches[0]), "cuda")
        graph, outputs = execution.capture(arguments)
        for seed, lengths in enumerate(batches):
            gate = ("softplus", "logsigmoid", "zero")[seed % 3]
            padding = sum(batches[0]) - sum(lengths)
            others = make_arguments(Case(lengths=lengths, padding=padding, seed=seed, gate=gate), "cuda")
            for name, x in others.items():
                if isinstance(x, torch.Tensor):
                    arguments[name].copy_(x)
            assert equal(execution.replay(graph, outputs), run_all(others)), lengths


# The backward


@functools.lru_cache(maxsize=1)
def backward_and_reference(case: Case) -> tuple:
    inputs, gradients = make_inputs(case, "cuda"), make_gradients(case, "cuda")
    return inputs, gradients, reference_gradients(inputs, **gradients)


def check_backward_mode(case: Case, segment_chunks: int):
    with backward_mode(segment_chunks):
        check_gradients(case, *backward_and_reference(case), f"{case}, backward by {segment_chunks}")


@pytest.mark.parametrize("segment_chunks", (1, 2, 5))
@each(MIXED, *GATES)
def test_backward_gates(case, segment_chunks):
    check_backward_mode(case, segment_chunks)


def test_backward_of_more_sequences_than_one_step_of_the_plan():
    lengths = tuple(random.Random(0).choices((0, 1, 64, 130, 200), k=300))
    check_backward_mode(Case(lengths=lengths, H_k=1, H_v=1, gate="logsigmoid", padding=1), 2)


def test_backward_of_more_scans_than_ctas():
    check_backward_mode(SCANS, 1)


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
    for segment_chunks, results in ((0, whole), (5, cut)):
        with backward_mode(segment_chunks):
            results.append(run_backward(inputs, **gradients, intermediates=saved))
    assert not equal(whole[0], cut[0])
    for cut_above, expected in ((1, cut), (39, cut), (40, whole), (10**6, whole)):
        with backward_mode(5, cut_above=cut_above):
            assert equal(run_backward(inputs, **gradients, intermediates=saved), expected[0]), cut_above
