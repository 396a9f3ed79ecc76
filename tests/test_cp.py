"""Context parallelism over ranks: groups of processes on the CPU, and of GPUs, against the recurrence over all tokens
in one place. The file is long because its tests share what ranks have found."""

import dataclasses
import functools
import itertools
import time
from types import SimpleNamespace

import accuracy
import cp_ranks
import pytest
import reference
import torch
from cases import (
    ALL_GRADIENTS_OF,
    ALL_INSIDE,
    Case,
    activated,
    make_gradients,
    make_inputs,
    reference_gradients,
    reference_of,
)
from cp_ranks import LAYOUTS, parts_of, rows_of
from poison import poisoned
from ranks import on_gpus, outcomes_on_ranks, run_on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import flash_qla
from flash_qla import _C, _binary
from flash_qla.cp import CPContext, build_cp_context, exchange_halo, halo, passes
from flash_qla.cp.maps import fold

FP32, FP64 = torch.float32, torch.float64
WORLD_SIZES = (1, 2, 3, 4, 8)
GPUS = (2, 4)
SMALL = {"K": 16, "V": 24, "H_k": 1, "H_v": 2} | dict.fromkeys(
    ("dtype", "g_dtype", "beta_dtype", "initial_state", "dht"), FP64
)

# 240 tokens or 480 go on every number of ranks, in parts of 15 to 480.
CASES = (
    Case(lengths=(240,), **SMALL),
    Case(lengths=(480,), **SMALL, gate="zero", beta="two", state_v_first=True),
    Case(lengths=(7, 200, 33), **SMALL, gate="logsigmoid", cu_dtype=torch.int64),
    Case(lengths=(60, 0, 60, 0, 0, 60, 60, 0), **SMALL, gate="logsigmoid"),
    Case(lengths=(1,) * 20 + (219, 1), **SMALL, gate="tiny", scale=0.5),
    Case(lengths=(31, 209), **SMALL | {"initial_state": None, "dht": None}, gate="resets"),
    Case(
        lengths=(100, 140),
        **SMALL | {"dtype": FP32, "g_dtype": torch.float16, "initial_state": torch.bfloat16, "H_k": 2, "H_v": 4},
        **ALL_INSIDE,
        keys="raw",
        use_qk_l2norm_in_kernel=True,
    ),
    Case(lengths=(100, 140), **SMALL, use_gate_in_kernel=True, A_log=FP64, dt_bias=None, state_v_first=True),
    Case(lengths=(65, 370, 45), K=32, V=64, state_v_first=True, gate="logsigmoid"),
    Case(lengths=(65, 370, 45), K=32, V=16, dtype=torch.float16, gate="tiny", initial_state=None),
    # With padding, which may be all that a part or a rank has.
    Case(lengths=(7, 0, 150, 33), padding=50, **SMALL, gate="logsigmoid"),
    Case(lengths=(120,), padding=120, **SMALL | ALL_INSIDE, keys="raw", use_qk_l2norm_in_kernel=True),
    Case(lengths=(3, 0), padding=237, **SMALL, state_v_first=True),
)
ONE = CASES[0]

GPU_CASES = (
    Case(lengths=(2048,), gate="logsigmoid"),
    Case(lengths=(4096,), gate="zero", H_k=2, H_v=8, state_v_first=True),
    Case(lengths=(100, 1500, 448), gate="tiny", dtype=torch.float16),
    Case(lengths=(700, 1348), keys="raw", use_qk_l2norm_in_kernel=True, **ALL_INSIDE, g_dtype=torch.bfloat16),
    Case(lengths=(1, 63, 1984), K=96, V=192, H_k=3, H_v=3, beta="two", gate="logsigmoid"),
    Case(lengths=(300, 1000), padding=748, gate="logsigmoid"),
)


@functools.cache
def expected_of(case: Case) -> tuple[dict, reference.Gradients, torch.Tensor]:
    """The recurrence's outputs and gradients, of the sequences that have tokens, and its cumulative gates."""
    inputs, gradients = make_inputs(case, "cpu"), make_gradients(case, "cpu")
    outputs, grads = reference_of(inputs), reference_gradients(inputs, **gradients)
    some = [n for n, length in enumerate(case.lengths) if length]
    b = reference.chunk_cumsum(activated(inputs)["g"], inputs["cu_seqlens"])
    return (
        {"o": outputs.o, "final_state": outputs.final_state[some]},
        dataclasses.replace(grads, dh0=grads.dh0[some]),
        b,
    )


@functools.cache
def results_on(world_size: int, cases: tuple[Case, ...], device: str = "cpu") -> list[dict]:
    return run_on_ranks(world_size, cp_ranks.all_cases, list(cases), device, device=device)


def put_together(case: Case, layout: str, of_ranks: list[dict]) -> dict:
    """The tensors of all tokens and sequences from those of the ranks."""
    whole, total, world_size = {}, sum(case.lengths) + case.padding, len(of_ranks)
    some = [n for n, length in enumerate(case.lengths) if length]
    parts = [parts_of(total, world_size, rank, layout) for rank in range(world_size)]
    rows = [rows_of(case.lengths, x) for x in parts]
    for name in of_ranks[0]:
        tensors = [outputs[name] for outputs in of_ranks]
        if name in ("final_state", "dh0"):
            states = {}
            for x, of_rank in zip(tensors, rows, strict=True):
                for state, (n, begins, ends) in zip(x, of_rank, strict=True):
                    if ends if name == "final_state" else begins:
                        states[n] = state
                    elif name == "dh0":
                        assert not state.any()
            whole[name] = torch.stack([states[n] for n in some])
        elif name in ("dA_log", "ddt_bias"):
            whole[name] = torch.stack(tensors).sum(0)
        else:
            pieces = {}
            for x, of_rank in zip(tensors, parts, strict=True):
                lengths = [end - begin for begin, end in of_rank]
                pieces |= zip(of_rank, x.split(lengths, 1), strict=True)
            whole[name] = torch.cat([pieces[part] for part in sorted(pieces)], 1)
    return whole


def check(case: Case, layout: str, of_ranks: list[dict]) -> None:
    outputs, gradients, b = expected_of(case)
    actual = put_together(case, layout, [x[case, layout] for x in of_ranks])
    for x in (x for x in actual.values() if x.shape[:2] == outputs["o"].shape[:2]):
        assert not x[:, sum(case.lengths) :].any()
    name = f"{len(of_ranks)} ranks, {layout}, {case}"
    for output, x in outputs.items():
        accuracy.check(output, actual.pop(output), x, dtype=case.dtype, case=name)
    assert {"dq", "dk", "dv", "db", "dg"} <= actual.keys()
    accuracy.check_gradients(actual, gradients, dtype=case.dtype, case=name, g_cumsum=b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("device", "world_size", "case"),
    [
        *(("cpu", world_size, case) for world_size in WORLD_SIZES for case in CASES),
        *(on_gpus(world_size, case) for world_size in GPUS for case in GPU_CASES),
    ],
    ids=str,
)
def test_against_the_recurrence(device, world_size, case, layout):
    check(case, layout, results_on(world_size, CASES if device == "cpu" else GPU_CASES, device))


@pytest.mark.parametrize(("device", "world_size"), [*map(on_gpus, GPUS)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_a_cuda_graph(device, world_size, layout):
    run_on_ranks(world_size, cp_ranks.captured, GPU_CASES[2], layout, device=device)


@pytest.mark.parametrize("world_size", (2, 3))
def test_states_between_ranks(world_size):
    run_on_ranks(world_size, cp_ranks.states_between_ranks, ONE)


def test_a_group_of_some_ranks():
    """The tokens are split among the ranks of the group that build_cp_context was given."""
    alone, *of_ranks = run_on_ranks(3, cp_ranks.in_a_group_of_the_last_two, ONE)
    assert alone is None
    check(ONE, "contiguous", of_ranks)


def test_what_may_be_left_out():
    run_on_ranks(2, cp_ranks.partly, ONE)


# It parts forward and backward as Inductor does, which moves what it can from one to the other.
BACKEND = "aot_eager_decomp_partition"


# One of three ranks has a sequence of its own.
OF_ITS_OWN = Case(lengths=(160, 80), **SMALL)


ON_BOTH = pytest.mark.parametrize(
    ("device", "world_size", "case"), [("cpu", 3, ONE), *(on_gpus(n, GPU_CASES[0]) for n in GPUS)], ids=str
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "world_size", "case"),
    [
        *(("cpu", 2, CASES[2]), ("cpu", 3, OF_ITS_OWN), ("cpu", 3, CASES[-2])),
        *(on_gpus(n, GPU_CASES[2]) for n in GPUS),
    ],
    ids=str,
)
def test_compiled(device, world_size, case):
    run_on_ranks(world_size, cp_ranks.compiled, case, device, BACKEND, device=device)


@pytest.mark.long
@pytest.mark.parametrize("backend", [BACKEND, "inductor"])
@pytest.mark.parametrize(
    ("device", "world_size", "totals", "sizes"),
    [("cpu", 2, (240, 480, 100), SMALL), *(on_gpus(n, (2048, 4096, 1000), {"gate": "logsigmoid"}) for n in GPUS)],
    ids=str,
)
def test_compiled_for_other_lengths(device, world_size, totals, sizes, backend):
    cases = [Case(lengths=(total // 4, total - total // 4), **sizes) for total in totals]
    run_on_ranks(world_size, cp_ranks.compiled_for_other_lengths, cases, device, backend, device=device)


@pytest.mark.parametrize("backend", [None, pytest.param(BACKEND, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("device", "world_size", "cases"), [("cpu", 3, [ONE, OF_ITS_OWN]), *(on_gpus(n, GPU_CASES[:1]) for n in GPUS)]
)
def test_gradients_that_are_none(device, world_size, cases, backend):
    """No rank leaves the others waiting."""
    run_on_ranks(world_size, cp_ranks.gradients_that_are_none, cases, device, backend, device=device, timeout=40)


@pytest.mark.skipif(torch.__version__.startswith("2.10."), reason="PyTorch 2.10's partitioner fails on it")
@ON_BOTH
def test_compiled_halo(device, world_size, case):
    run_on_ranks(world_size, cp_ranks.compiled_halo, case, device, BACKEND, device=device)


@pytest.mark.parametrize(("device", "world_size"), [("cpu", 1), ("cpu", 3), ("cpu", 8), *map(on_gpus, GPUS)])
def test_halos(device, world_size):
    """Also halos of one token, and those from several parts, of down to one token each."""
    batches = [((240,), 0), ((7, 0, 200, 33), 0), ((1,) * 20 + (219, 1), 0), ((7, 150), 83), ((30,), 210)]
    batches.append(((2 * world_size,), 0))
    run_on_ranks(world_size, cp_ranks.halos, batches, (1, 2, 4, 20), device, device=device)


@ON_BOTH
def test_a_convolution_before_it(device, world_size, case):
    run_on_ranks(world_size, cp_ranks.convolved, case, 4, device, device=device)


ACROSS_BORDERS, FEW_TOKENS = {"lengths": (50, 1, 2, 3, 61, 1), "padding": 2}, {"lengths": (2, 7), "padding": 15}


@pytest.mark.parametrize(
    ("device", "world_size", "sequences"),
    [
        *(("cpu", world_size, x) for world_size in (2, 3) for x in (ACROSS_BORDERS, FEW_TOKENS)),
        *(on_gpus(world_size, ACROSS_BORDERS) for world_size in GPUS),  # gates of few tokens cancel in 16 bits
    ],
    ids=str,
)
def test_region(device, world_size, sequences):
    """Also sequences shorter than the convolution, at the borders of ranks, and ranks with padding alone."""
    sizes = {"H_k": 1, "H_v": 2, "K": 16, "V": 24, "dtype": torch.float64 if device == "cpu" else torch.bfloat16}
    run_on_ranks(world_size, cp_ranks.region, Case(**sequences, **sizes), device, device=device)


# One process that plays all ranks, which is how one GPU can


class Played(Exception):
    """A rank's turn ends where it would wait for the others."""


class OneProcess:
    """The all-gather of ranks that are played one after the other: first up to what each gives, then with all of it."""

    def __init__(self, monkeypatch):
        self.rows_of_ranks, self.all = [], None
        for module in (halo, passes):
            monkeypatch.setattr(module, "start_gather", self.gather)

    def gather(self, rows: torch.Tensor, context: CPContext, for_backward: bool = False) -> torch.Tensor:
        if self.all is None:
            self.rows_of_ranks.append(rows)
            raise Played
        return self.all

    def play(self, calls: list) -> list:
        self.rows_of_ranks, self.all = [], None
        for call in calls:
            with pytest.raises(Played):
                call(True)
        self.all = torch.cat(self.rows_of_ranks)
        return [call(False) for call in calls]


def step_of_ranks(ranks: OneProcess, local: list[tuple[dict, dict]]) -> list[dict]:
    """Outputs and gradients of each rank, of its inputs and the gradients of its outputs."""
    forward_results = ranks.play([lambda first, inputs=inputs: cp_ranks.run_forward(inputs) for inputs, _ in local])
    return ranks.play(
        [
            lambda first, outputs=outputs, gradients=gradients: cp_ranks.run_backward(*outputs, gradients, first)
            for outputs, (_, gradients) in zip(forward_results, local, strict=True)
        ]
    )


PLAYED = (
    CASES[2],
    CASES[6],
    Case(lengths=(480,), H_k=1, H_v=2, gate="logsigmoid"),
    Case(lengths=(100, 30, 350), H_k=1, H_v=2, V=64, gate="tiny", dtype=torch.float16, state_v_first=True),
    Case(lengths=(70, 410), H_k=1, H_v=1, K=64, keys="raw", use_qk_l2norm_in_kernel=True, **ALL_INSIDE),
    Case(lengths=(100, 0, 130), padding=250, H_k=1, H_v=2, gate="logsigmoid"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", PLAYED, ids=str)
@pytest.mark.parametrize("world_size", (2, 5))
def test_ranks_in_one_process(device, monkeypatch, world_size, case, layout):
    if device == "cuda" and case.dtype not in (torch.bfloat16, torch.float16):
        pytest.skip("the GPU has bf16 and fp16")
    ranks = OneProcess(monkeypatch)
    groups = [Group(number=rank, world_size=world_size) for rank in range(world_size)]
    local = [cp_ranks.local_case(case, layout, device, group=group) for group in groups]
    with poisoned(device):
        results = step_of_ranks(ranks, local)
        with torch.inference_mode():
            again = ranks.play(
                [
                    lambda first, inputs=inputs: flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
                    for inputs, _ in local
                ]
            )
    for outputs, (o, final_state) in zip(results, again, strict=True):
        assert device == "cuda" or (torch.equal(outputs["o"], o) and torch.equal(outputs["final_state"], final_state))
    check(case, layout, [{(case, layout): {name: x.cpu() for name, x in of_rank.items()}} for of_rank in results])


def test_a_loss_on_the_state_where_a_sequence_goes_on(monkeypatch):
    """The final state of such a rank is the state after its last token; a gradient of it reaches all ranks before."""
    ranks, groups = OneProcess(monkeypatch), [Group(number=rank, world_size=3) for rank in range(3)]
    local = [cp_ranks.local_case(ONE, "contiguous", "cpu", group=group) for group in groups]
    for seed, (_, gradients) in enumerate(local):
        gradients["dht"] = torch.randn(gradients["dht"].shape, generator=torch.Generator().manual_seed(seed)).double()
    results = step_of_ranks(ranks, local)
    whole = {
        name: x for name, x in make_inputs(ONE, "cpu").items() if name not in ("cu_seqlens", "q", "k", "v", "g", "beta")
    }
    leaves = [
        {name: inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")} for inputs, _ in local
    ]
    state, loss = whole.pop("initial_state"), 0.0
    for tokens, (_, gradients) in zip(leaves, local, strict=True):
        o, state = flash_qla.chunk_gated_delta_rule(**whole | tokens, initial_state=state, output_final_state=True)
        loss = loss + (o * gradients["do"]).sum() + (state * gradients["dht"]).sum()
    loss.backward()
    for tokens, outputs in zip(leaves, results, strict=True):
        for name, x in tokens.items():
            torch.testing.assert_close(outputs[ALL_GRADIENTS_OF[name]], x.grad, rtol=1e-9, atol=1e-9)


def test_what_is_negligible_is_dropped():
    """Maps whose M has a norm below 2^-24 keep nothing of an older state, however large; in fp64 they keep it."""
    V, K = 8, 16
    maps = torch.randn(3, 2, V + K, K, generator=torch.Generator().manual_seed(0))
    maps[0] *= 2.0**30
    for head, norm in enumerate((0.99 * 2.0**-24, 1.01 * 2.0**-24)):
        maps[1, head, V:] = norm / K**0.5 * torch.eye(K)
    Z, M = maps.double().tensor_split([V], 2)
    state = Z[0] @ M[1] + Z[1]
    exact = state @ M[2] + Z[2]
    state[0] = Z[1, 0]
    torch.testing.assert_close(fold(maps, len(maps), V), (state @ M[2] + Z[2]).float())
    torch.testing.assert_close(fold(maps.double(), len(maps), V), exact, rtol=1e-13, atol=1e-13)


# Errors


def test_other_tokens_than_the_context_says():
    for outcome in outcomes_on_ranks(2, cp_ranks.wrong_tokens, ONE):
        assert outcome["error"].startswith("ValueError: q has shape [1, 119, 1, 16], expected [1, 120, ...]")


@pytest.mark.parametrize(("how", "timeout"), [("dies", 30), ("does not come", 2)])
def test_a_rank_is_missing(how, timeout):
    start = time.monotonic()
    first, _ = outcomes_on_ranks(2, cp_ranks.without_rank_1, ONE, how, timeout=timeout)
    assert "error" in first, first
    assert time.monotonic() - start < 30


def test_other_heads_on_one_rank():
    """gloo notices it in one process, which it ends; the other finds out in the next collective, if not before."""
    outcomes = outcomes_on_ranks(2, cp_ranks.other_heads_on_rank_1, ONE, "0", timeout=5)
    assert {} in outcomes and all("result" not in outcome for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    ("device", "world_size", "case", "sizes", "dtype"),
    [("cpu", 2, ONE, "40, 16", torch.float64), on_gpus(2, GPU_CASES[0], "256, 128", torch.float32)],
    ids=str,
)
def test_other_heads_that_are_checked(device, world_size, case, sizes, dtype):
    arguments = (case, "1", device)
    shapes = ", ".join(f"((1, {H_v}, {sizes}), {dtype}, False)" for H_v in (case.H_v, 2 * case.H_v))
    for outcome in outcomes_on_ranks(world_size, cp_ranks.other_heads_on_rank_1, *arguments, device=device, timeout=5):
        assert f"[{shapes}]" in outcome["error"], outcome


@pytest.mark.parametrize(
    ("device", "world_size", "case", "dtypes"),
    [("cpu", 2, ONE, (FP64, FP64)), on_gpus(2, GPU_CASES[0], (FP32, torch.bfloat16))],
    ids=str,
)
def test_gradients_on_one_rank(device, world_size, case, dtypes):
    for function, dtype in zip(("chunk_gated_delta_rule", "exchange_halo"), dtypes, strict=True):
        arguments = (case, function, device)
        for outcome in outcomes_on_ranks(world_size, cp_ranks.gradients_on_one_rank, *arguments, device=device):
            assert "or in whether they need gradients" in outcome["error"], outcome
            assert f"{dtype}, False), (" in outcome["error"] and f"{dtype}, True)]" in outcome["error"]


# Contexts


class Group(SimpleNamespace):
    """The part of a process group that a context uses."""

    group_name = "ranks"

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.world_size


LENGTHS = [case.lengths for case in CASES if not case.padding]
LENGTHS += [(48,), (1,) * 48, (0, 47, 0, 1, 0), (15, 15, 1, 14, 3)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_a_rank_holds(world_size, layout):
    for lengths in LENGTHS:
        total, offsets = sum(lengths), list(itertools.accumulate(lengths, initial=0))
        all_parts = sorted(part for rank in range(world_size) for part in parts_of(total, world_size, rank, layout))
        for rank in range(world_size):
            context = build_cp_context(
                torch.tensor(offsets), Group(number=rank, world_size=world_size), 4, layout=layout
            )
            parts = parts_of(total, world_size, rank, layout)
            rows = rows_of(lengths, parts)
            assert context.sequences == tuple(n for n, _, _ in rows) and context.num_seqs == len(rows)
            ends = itertools.accumulate(
                len([t for t in range(offsets[n], offsets[n + 1]) if begin <= t < end])
                for begin, end in parts
                for n, _, _ in rows_of(lengths, [(begin, end)])
            )
            assert context.cu_seqlens.tolist() == context.cu_seqlens_cpu.tolist() == [0, *ends]
            assert context.cu_seqlens.dtype == torch.int32 and context.conv1d_kernel_size == 4
            of_parts = []
            for begin, end in parts:
                (first, begins, _), (last, _, ends) = (rows_of(lengths, [(begin, end)])[i] for i in (0, -1))
                before = [x for x in all_parts if x[0] < begin and any(n == first for n, _, _ in rows_of(lengths, [x]))]
                later = [x for x in all_parts if x[0] > begin and any(n == last for n, _, _ in rows_of(lengths, [x]))]
                of_parts.append((len(before), len(later), begins, ends, begin - offsets[first]))
            names = ("pre_num_ranks", "post_num_ranks", "is_first_rank", "is_last_rank", "pre_num_conv_tokens")
            if layout == "contiguous":
                assert tuple(getattr(context, name) for name in names) == of_parts[0]
            else:
                by_part = [name.removesuffix("_rank") + "_by_part" for name in names]
                assert [getattr(context, name) for name in by_part] == list(zip(*of_parts, strict=True))
                assert context.part_len == parts[0][1] - parts[0][0]
                assert context.front_num_seqs == len(rows_of(lengths, parts[:1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_rank_holds_of_padding(layout):
    """The last rank or the last part of the first one, and more, have no tokens of a sequence."""
    offsets, group = torch.tensor([0, 3, 5]), SimpleNamespace(size=lambda: 3, group_name="ranks")
    contexts = []
    for number in range(3):
        group.rank = lambda number=number: number
        contexts.append(build_cp_context(offsets, group, layout=layout, num_tokens=12))
    expected = {"contiguous": [[0, 3, 4], [0, 1], [0]], "zigzag": [[0, 2], [0, 1, 2], [0, 1]]}[layout]
    assert [x.cu_seqlens.tolist() for x in contexts] == expected
    assert [x.num_tokens for x in contexts] == [4, 4, 4]
    if layout == "contiguous":
        assert [x.post_num_ranks for x in contexts] == [1, 0, 0]
        assert [x.pre_num_ranks for x in contexts] == [0, 1, 0]
        assert [x.is_last_rank for x in contexts] == [False, True, True]
    else:
        assert [x.post_num_ranks_by_part for x in contexts] == [(1, 0), (1, 0), (0, 0)]
        assert [x.pre_num_conv_tokens_by_part for x in contexts] == [(0, 0), (2, 0), (1, 0)]


@pytest.mark.parametrize(
    ("offsets", "options", "message"),
    [
        ([0, 7], {}, "7 tokens, expected a positive multiple of 2, contiguous; with padding pass num_tokens"),
        ([0, 6], {"layout": "zigzag"}, "6 tokens, expected a positive multiple of 4"),
        ([0, 0], {}, "0 tokens"),
        ([0, 5], {"num_tokens": 7}, "num_tokens is 7, expected a positive multiple of 2, contiguous, at least 5"),
        ([0, 5], {"num_tokens": 4}, "num_tokens is 4, expected .* at least 5"),
        ([0, 0], {"num_tokens": 0}, "num_tokens is 0, expected a positive multiple"),
        ([0, 5, 4], {}, "expected offsets that begin with 0 and do not decrease"),
        ([1, 4], {}, "expected offsets that begin with 0"),
        ([0, 4], {"layout": "striped"}, "layout is 'striped', expected 'contiguous' or 'zigzag'"),
    ],
)
def test_contexts_that_are_refused(offsets, options, message):
    with pytest.raises(ValueError, match=message):
        build_cp_context(torch.tensor(offsets), Group(number=0, world_size=2), **options)


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_cpu"])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (torch.tensor([0.0, 4.0]), ValueError, r"is torch.float32 of shape \[2\], expected \[N \+ 1\], int32 or int64"),
        (torch.tensor([[0, 4]]), ValueError, r"is torch.int64 of shape \[1, 2\], expected \[N \+ 1\]"),
        ([0.0, 4.0], TypeError, r"is of type list; pass a tensor \[N \+ 1\], .* because the kernels read"),
    ],
)
def test_offsets_that_are_refused(name, wrong, error, message):
    offsets = dict.fromkeys(("cu_seqlens", "cu_seqlens_cpu"), torch.tensor([0, 4]))
    with pytest.raises(error, match=f"^{name} {message}"):
        build_cp_context(**offsets | {name: wrong}, group=Group(number=0, world_size=1))
    with pytest.raises(error, match=f"^{name} {message}"):
        CPContext(group=None, **offsets | {name: wrong})


def test_no_group():
    with pytest.raises(ValueError, match="group is None"):
        build_cp_context(torch.tensor([0, 4]))


def test_a_context_with_flas_fields():
    """A context of another class, with FLA's fields and more. Without a group it is that of one rank."""
    case = CASES[2]
    inputs = make_inputs(case, "cpu")
    cu_seqlens = inputs.pop("cu_seqlens")
    context = build_cp_context(cu_seqlens, Group(number=0, world_size=1))
    fields = {field.name: getattr(context, field.name) for field in dataclasses.fields(CPContext)}
    del fields["sequences"], fields["num_tokens"]
    theirs = SimpleNamespace(**fields | {"group": None, "pre_num_ranks_dev": None})
    actual = flash_qla.chunk_gated_delta_rule(**inputs, cp_context=theirs, output_final_state=True)
    expected = flash_qla.chunk_gated_delta_rule(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_contexts_that_do_not_do():
    case = CASES[2]
    inputs = make_inputs(case, "cpu")
    context = build_cp_context(inputs.pop("cu_seqlens"), Group(number=0, world_size=1))
    with pytest.raises(ValueError, match="cu_seqlens_cpu"):
        dataclasses.replace(context, cu_seqlens_cpu=None)
    with pytest.raises(TypeError, match="cp_context is of type object, expected a CPContext"):
        flash_qla.chunk_gated_delta_rule(**inputs, cp_context=object())
    with pytest.raises(ValueError, match="v has 3 dimensions, expected 4"):
        flash_qla.chunk_gated_delta_rule(**inputs | {"v": inputs["v"][..., 0]}, cp_context=context)
    with pytest.raises(ValueError, match="conv1d_kernel_size"):
        exchange_halo(inputs["q"], context)
    with pytest.raises(ValueError, match=r"x has shape \[2, 120, .*expected \[1, 240"):
        exchange_halo(inputs["q"].view(2, 120, 16), context)


def alone(inputs: dict) -> dict:
    """Inputs of one rank that has both parts, and so goes the way of several ranks."""
    context = build_cp_context(inputs["cu_seqlens"], Group(number=0, world_size=1), 4, layout="zigzag")
    return inputs | {"cu_seqlens": None, "initial_state": None, "cp_context": context}


def test_another_default_device():
    inputs = make_inputs(CASES[2], "cpu")
    v = inputs["v"].requires_grad_()

    def results():
        arguments = alone(inputs)
        o, final_state = flash_qla.chunk_gated_delta_rule(**arguments, output_final_state=True)
        halo = exchange_halo(v, arguments["cp_context"])
        (dv,) = torch.autograd.grad(o.sum() + final_state.sum() + halo.sum(), v)
        return arguments["cp_context"].cu_seqlens, o, final_state, halo, dv

    expected = results()
    with torch.device("meta"):
        actual = results()
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("state_dtype", [torch.int32, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("of_ranks", [False, True])
def test_state_dtypes_that_are_refused(of_ranks, requires_grad, state_dtype):
    inputs = make_inputs(CASES[2], "cpu")
    inputs["v"].requires_grad_(requires_grad)
    with pytest.raises(RuntimeError, match=r"state_dtype is .*, expected bfloat16, float16, float32 or float64"):
        flash_qla.chunk_gated_delta_rule(**alone(inputs) if of_ranks else inputs, state_dtype=state_dtype)


@pytest.mark.parametrize(
    "transformed",
    [
        torch.func.grad,
        torch.func.jacrev,
        lambda f: lambda x: torch.func.vjp(f, x),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
        lambda f: lambda x: torch.vmap(f)(x[None]),
    ],
    ids=["grad", "jacrev", "vjp", "jvp", "vmap"],
)
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "exchange_halo"])
def test_transforms_are_refused(function, transformed):
    inputs = alone(make_inputs(CASES[2], "cpu"))

    def loss(v):
        if function == "exchange_halo":
            return exchange_halo(v, inputs["cp_context"]).sum()
        return flash_qla.chunk_gated_delta_rule(**inputs | {"v": v})[0].sum()

    with pytest.raises(NotImplementedError, match=f"{function} .*exchanges tensors between ranks.* torch.func"):
        transformed(loss)(inputs["v"])


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_the_workspace_of_a_trace(monkeypatch, op):
    """It is that of the call, with each of the options that decide about it."""
    monkeypatch.setattr(_binary, "card", lambda _: _C.cards()["H200"])
    begin = getattr(torch.ops.flash_qla, f"gated_delta_rule_{op}_begin")
    names, sizes = {x.name for x in begin.default._schema.arguments}, set()
    of_gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(4)}
    of_beta, l2norm, whole = {"use_beta_sigmoid_in_kernel": True}, {"use_qk_l2norm_in_kernel": True}, {"auto_cp": False}
    for case, options in itertools.product(
        (Case(lengths=(9000, 700, 300), H_k=2, H_v=4, K=160), Case(T=10000, H_k=2, H_v=4)),
        ({}, of_gate, of_beta, of_gate | of_beta, l2norm, whole, l2norm | of_beta | whole),
    ):
        arguments = make_inputs(case, "cpu") | make_gradients(case, "cpu") | {"map_sequences": [0]}
        arguments |= {"g_raw": arguments["g"], "g": None} if op == "backward" else {}
        arguments |= {"auto_cp": True, "use_qk_l2norm_in_kernel": False} | options
        op_arguments = {name: arguments[name] for name in names & arguments.keys()}
        with FakeTensorMode():
            fakes = {
                name: torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x
                for name, x in op_arguments.items()
            }
            workspace_bytes = begin(**fakes)[1].shape[0]
        shape = {"B": 1, "T": 10000, "N": len(case.lengths or (0,)), "H_k": 2, "H_v": 4, "K": case.K, "V": case.V}
        shape |= {"varlen": bool(case.lengths), "auto_cp": arguments["auto_cp"], "over_ranks": True}
        shape |= {"use_qk_l2norm": arguments["use_qk_l2norm_in_kernel"]} | _C.cards()["H200"]
        if op == "backward":
            shape["activations"] = bool({"use_gate_in_kernel", "use_beta_sigmoid_in_kernel"} & options.keys())
        assert workspace_bytes == getattr(_C, f"{op}_dispatch")(**shape).workspace_bytes, (case, options)
        sizes.add(workspace_bytes)
    assert len(sizes) > (2 if op == "forward" else 4)  # the options matter


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_a_symbolic_number_of_tokens_stays_symbolic(monkeypatch, op):
    """The size of a GPU's workspace comes from a dispatch that takes numbers only."""
    monkeypatch.setattr(_binary, "card", lambda _: _C.cards()["H200"])
    begin, T = getattr(torch.ops.flash_qla, f"gated_delta_rule_{op}_begin"), 600
    case = Case(lengths=(100, 500), H_k=1, H_v=2)
    arguments = make_inputs(case, "cpu") | make_gradients(case, "cpu") | {"map_sequences": [1]}
    names = {x.name for x in begin.default._schema.arguments}

    def workspace(of_tokens):
        def fake(x):
            if not isinstance(x, torch.Tensor):
                return x
            sizes = [of_tokens if size == T else DimDynamic.STATIC for size in x.shape]
            like = mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
            return torch.empty(like.shape, dtype=x.dtype, device="cuda")

        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fakes = {name: fake(arguments[name]) for name in names & arguments.keys()}
            buffer = begin(**fakes)[1]
        symbolic = of_tokens is not DimDynamic.STATIC
        assert isinstance(buffer.shape[0], torch.SymInt) == symbolic
        assert (str(fakes["q"].shape[1]) != str(T)) == symbolic, "a guard has fixed it"
        return buffer

    dispatch = getattr(_C, f"{op}_dispatch")(1, T, 2, 1, 2, over_ranks=True, **_C.cards()["H200"])
    assert workspace(DimDynamic.STATIC).shape == (dispatch.workspace_bytes,)
    workspace(DimDynamic.DUCK)


def test_double_backward():
    inputs = alone(make_inputs(CASES[2], "cpu"))
    v = inputs["v"].requires_grad_()
    o, _ = flash_qla.chunk_gated_delta_rule(**inputs)
    (dv,) = torch.autograd.grad(o.square().sum(), v, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dv.sum().backward()


def test_autocast():
    """q, k and v come to its dtype before the maps are made, too."""
    case = dataclasses.replace(CASES[2], dtype=FP32)
    inputs = alone(make_inputs(case, "cpu"))
    cast = {name: inputs[name].bfloat16() for name in ("q", "k", "v")}
    expected, _ = flash_qla.chunk_gated_delta_rule(**inputs | cast)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = flash_qla.chunk_gated_delta_rule(**inputs)
    assert torch.equal(o, expected)
