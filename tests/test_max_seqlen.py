"""max_seqlen, the length of the longest sequence as the caller knows it. It chooses the kernels, and changes nothing
else."""

import importlib
import itertools

import pytest
import torch
from cases import (
    Case,
    backward_mode,
    check_backward,
    check_forward,
    equal,
    forward_mode,
    make_arguments,
    make_inputs,
    packed,
    parametrize,
)
from dispatched import Ran
from torch._dynamo.utils import counters

import flash_qla
from flash_qla import _C

LENGTHS = ((4096,) * 8, (28672, 4096), (16384, *[2048] * 8), (300, 20, 5000, 0, 64))
HEADS = ((2, 8), (8, 24), (16, 16), (16, 32), (16, 64))
# Right for the longest sequence, too short, too long and very long
MAX_SEQLENS = (3000, 64, 3500, 10**12)
CASES = tuple(
    Case(lengths=(100, 3000, 0, 65, 640), H_k=H_k, H_v=H_v, gate="logsigmoid", padding=10, max_seqlen=max_seqlen)
    for (H_k, H_v), max_seqlen in itertools.product(((1, 2), (8, 32)), MAX_SEQLENS)
)
# The functions are attributes of the package, under the names of some of its modules
functions = importlib.import_module("flash_qla.gated_delta_rule")


@pytest.mark.gpu
@parametrize(*CASES)
def test_wrong_numbers_are_no_errors(case):
    check_forward(case, "cuda")
    check_backward(case, "cuda")


@pytest.mark.gpu
@pytest.mark.hopper
def test_a_call_is_launched_for_it():
    """Its bits are those of the modes that the dispatch says for this length. Without it the modes are others."""
    case = Case(lengths=(320, 64, 64, 64), H_k=1, H_v=2, gate="logsigmoid")
    arguments = make_arguments(case, "cuda")
    gpu = _C.gpus()[torch.cuda.current_device()]
    card = {name: getattr(gpu, name) for name in ("sm_count", "sm_mhz", "memory_gb_s")}
    outputs = {}
    for max_seqlen in (320, None):
        shape = {"B": 1, "T": 512, "N": 4, "H_k": 1, "H_v": 2, "max_seqlen": max_seqlen or 0, **card}
        forward, backward = _C.forward_dispatch(**shape), _C.backward_dispatch(**shape)
        mode = {"value_tile": forward.value_tile, "segment_chunks": forward.segment_chunks, "fused": forward.fused}
        with forward_mode(**mode), backward_mode(backward.segment_chunks, backward.cut_above):
            expected = outputs_of(arguments)
        outputs[max_seqlen] = outputs_of(arguments | {"max_seqlen": max_seqlen})
        assert equal(outputs[max_seqlen], expected), max_seqlen
    assert not any(torch.equal(x, outputs[320][name]) for name, x in outputs[None].items())


def outputs_of(arguments: dict) -> dict:
    """o of the op, and a gradient of its backward."""
    inputs = {name: x for name, x in arguments.items() if name not in ("do", "dht")}
    o, _ = flash_qla.chunk_gated_delta_rule(**inputs)
    backward_arguments = arguments | {"g": None, "A": None, "g_raw": arguments["g"]}
    return {"o": o, "dk": flash_qla.chunk_gated_delta_rule_bwd(**backward_arguments)[1]}


def choices(H_k: int, H_v: int, lengths: tuple[int, ...], max_seqlen: int) -> list[tuple]:
    """Of both passes what a call launches."""
    shape = (1, sum(lengths), len(lengths), H_k, H_v)
    forward = _C.forward_dispatch(*shape, max_seqlen=max_seqlen)
    backward = _C.backward_dispatch(*shape, max_seqlen=max_seqlen)
    has_two_tiles = forward.long_tile != forward.value_tile
    return [
        (forward.segment_chunks, forward.cut_above, has_two_tiles),
        (backward.segment_chunks, backward.cut_above, 0),
    ]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_known_lengths_leave_no_choice_to_the_device(lengths):
    for heads in HEADS:
        for (segment_chunks, cut_above, has_two_tiles), unknown in zip(
            choices(*heads, lengths, max(lengths)), choices(*heads, lengths, 0), strict=True
        ):
            assert cut_above == has_two_tiles == 0 and segment_chunks < max(lengths) / 64, heads
            assert (unknown[1] > 0) == (unknown[0] > 0 or unknown[2]), heads


def test_equal_sequences_are_as_rows():
    """With max_seqlen, B packed sequences of T tokens are launched as [B, T] without cu_seqlens."""
    for (H_k, H_v), B, T in itertools.product(HEADS, (2, 4, 8), (256, 1000, 4096)):
        for ask in (_C.forward_dispatch, _C.backward_dispatch):
            packed = ask(1, B * T, B, H_k, H_v, max_seqlen=T)
            rows = ask(B, T, B, H_k, H_v, varlen=False)
            assert packed.segment_chunks == rows.segment_chunks and packed.predicted_us == rows.predicted_us


def test_one_long_sequence_is_cut_and_short_ones_are_not():
    tokens, N = 32768, 9
    assert _C.forward_dispatch(1, tokens, N, 4, 16, max_seqlen=16384).segment_chunks > 0
    assert _C.forward_dispatch(1, tokens, N, 4, 16, max_seqlen=tokens // N + 1).segment_chunks == 0
    # More than T is T
    longest = (_C.forward_dispatch(1, tokens, N, 4, 16, max_seqlen=x) for x in (tokens, 10**12))
    assert len({x.segment_chunks for x in longest}) == 1


@pytest.fixture
def passed_max_seqlens(monkeypatch):
    """The last argument of each op that chunk_gated_delta_rule calls; None if it leaves it out."""
    max_seqlens = []
    original = functions.autograd.call

    def recorded(op, *args):
        names = [x.name for x in op.default._schema.arguments]
        max_seqlens.append(dict(zip(names, args, strict=False)).get("max_seqlen"))
        return original(op, *args)

    monkeypatch.setattr(functions.autograd, "call", recorded)
    return max_seqlens


def test_offsets_on_the_cpu_give_it(passed_max_seqlens):
    inputs = make_inputs(Case(lengths=(5, 70, 0), H_k=1, H_v=2, K=16, V=8), "cpu")
    offsets = inputs["cu_seqlens"]
    flash_qla.chunk_gated_delta_rule(**inputs)
    others = (None, offsets.tolist(), offsets[:1], offsets.expand(2, -1), offsets.to("meta"))
    for cu_seqlens_cpu in (offsets, *others, offsets.as_subclass(type("Offsets", (torch.Tensor,), {}))):
        flash_qla.chunk_gated_delta_rule(**inputs, cu_seqlens_cpu=cu_seqlens_cpu)
    flash_qla.chunk_gated_delta_rule(**inputs, cu_seqlens_cpu=offsets, max_seqlen=71)
    flash_qla.chunk_gated_delta_rule(**inputs, cu_seqlens_cpu=torch.tensor([9, 5]))
    assert passed_max_seqlens == [None, 70, *(None,) * 6, 71, 0]


@torch.no_grad()
def test_a_compiled_call_takes_any_number():
    """And offsets on the CPU are no graph break."""
    inputs = make_inputs(Case(lengths=(5, 70, 0), H_k=1, H_v=2, K=16, V=8), "cpu")
    torch._dynamo.reset()
    counters.clear()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def call(inputs, **more):
        return flash_qla.chunk_gated_delta_rule(**inputs, **more)[0]

    expected = call(inputs, cu_seqlens_cpu=inputs["cu_seqlens"])
    for number in (70, 100, 3000):
        assert torch.equal(call(inputs, max_seqlen=number), expected)
    assert counters["stats"]["unique_graphs"] == 2


def test_the_backward_is_called_with_it():
    inputs = make_inputs(Case(lengths=(5, 70, 0), H_k=1, H_v=2, K=16, V=8, dtype=torch.float32), "cpu")
    inputs["v"].requires_grad_()
    with Ran() as ran:
        flash_qla.chunk_gated_delta_rule(**inputs, max_seqlen=70)[0].sum().backward()
    assert [x["max_seqlen"] for x in ran.arguments] == [70, 70]


def test_the_packed_function_passes_it_on():
    inputs = make_inputs(Case(lengths=(5, 70, 0), H_k=1, H_v=2, K=16, V=8, dtype=torch.float32), "cpu")
    arguments = packed(inputs)
    arguments["mixed_qkv"].requires_grad_()
    with Ran() as ran:
        flash_qla.chunk_gated_delta_rule_packed(**arguments, max_seqlen=70)[0].sum().backward()
    assert [x["max_seqlen"] for x in ran.arguments] == [70, 70]
