"""Trials: calls of the ops, and what they have to give. `run` makes a trial's call over memory that holds NaN, again
with the same numbers in contiguous tensors, and once more with a NaN in one token if the trial says so. The first two
calls must give the same bits, every output must be as near to the formula as its arithmetic allows, and what does not
depend on the token or on the call must keep its bits.
tests/options.py has the options of trials. tests/fuzz.py draws trials at random, and tests/test_pairs.py runs those
that have every pair of options.

How near that is no constant says: where keys come again, or gates underflow, results are what is left of larger
numbers. So the expected outputs are made in several runs at once, by chunks, in fp64: one exact, one in which every
operand and result of a product is rounded as the kernels round, the others in which it is off by a random part of that.
What these runs differ by is what rounding does to this output of these inputs; the bar is a multiple.

The file is long because trials of all ops share inputs, expected outputs and comparison.
"""

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Callable

import begin_finish
import reference
import torch
from accuracy import FLOAT8, check as check_accuracy, not_measured
from cases import (
    ALL_GRADIENTS_OF,
    Case,
    backward_mode,
    check_zeros_of_A,
    compute_dtype,
    covered_tokens,
    cumulative_gates,
    forward_mode,
    gradient_dtype,
    make_arguments,
    make_inputs,
    restride,
    restride_tokens,
    run_autograd,
    run_backward,
    run_forwards,
    run_packed,
    shapes,
)
from poison import poisoned
from reference import CHUNK
from rounded_runs import HEAD_AXIS, Bars, Noise, expect
from unchanged import CallsThatFail

import flash_qla

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = ("chunk", "prefill", "decode", "decode_packed", "decode_buffered")
RUNS = 5  # exact, rounded, and three at random
BATCHES = 8  # batches of runs before an error counts
OFFSETS = (1, 2, 3, 4, 8)  # elements before a tensor in its storage
IN_PLACE = ("q", "k", "v", "do", "mixed_qkv")  # what a GPU reads in place; where they start the case's strides say
FAILING = 4  # one trial in so many is made again between calls that fail
NAN_IN = ("q", "k", "v", "g", "beta")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One of OPS, where "chunk" is both passes, whole and over ranks, and the options of the call."""

    op: str
    case: Case
    forward: dict = dataclasses.field(default_factory=dict)  # arguments of forward_mode
    backward: dict = dataclasses.field(default_factory=dict)  # arguments of backward_mode
    state_dtype: torch.dtype = FP32  # dtype of final states, or of the pool
    offsets: bool = False  # tensors that are not IN_PLACE do not start where their storage does
    strided: bool = False  # tables, states of their own and parameters have other strides
    nan: str | None = None  # the argument that holds a NaN in a last call
    # Both passes
    requires_grad: tuple[str, ...] = tuple(ALL_GRADIENTS_OF)  # inputs that require gradients
    with_sums: bool = True  # the backward gets g_cumsum and A
    map_sequences: str | None = None  # whose maps begin returns: "none", "last", "both"; None runs no begin
    # Pools
    index_dtype: torch.dtype | None = torch.int32  # of tables; None: each has its own
    null_index: int = -1
    gap: int = 0  # elements between the pool's slots
    # Which sequences have a slot: "all"; "some"; "none"; "all", and empty ones name those of others: "shared". "plain":
    # a state for each sequence, and no pool
    slots: str = "all"
    out: str | None = None  # memory for o: "contiguous", "misaligned", "heads_last"
    # Prefill
    every: int = 0  # tokens between checkpoints
    kept: str = "rows"  # where checkpoints go: to "rows" of a tensor, to "slots", to "few" of them or to "no_slots"
    other_slots: bool = False  # sequences start from slots that initial_state_indices names
    new_requests: bool = False  # some have no state yet, by has_initial_state
    with_h: bool = False
    batch_invariant: bool = False
    # Decoding
    style: str = "last"  # which states are kept, see STYLES
    default_sigmoid: bool = False  # use_beta_sigmoid_in_kernel is left out
    flat: bool = False  # one token of each sequence, without its dimension
    # Buffered decoding
    steps: int = 3  # of a backlog
    d_dtype: torch.dtype | None = None  # of d_cache and of k_cache; None: that of the arithmetic
    k_dtype: torch.dtype | None = None
    flush: int | None = None  # force_flush, where it is not 0; None leaves it out where no state is due

    def __str__(self):
        """The fields that differ from the defaults."""
        fields = [f for f in dataclasses.fields(self) if f.name not in ("op", "case")]
        values = {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) not in (f.default, {})}
        return ", ".join(
            [self.op, *(f"{name}={x}".replace("torch.", "") for name, x in values.items()), str(self.case)]
        )


# Calls


@dataclasses.dataclass
class Call:
    """A call of a trial, and what it has to give."""

    function: Callable[[dict], dict]  # outputs by name, of the arguments
    arguments: dict
    expected: dict  # the runs of outputs
    same: dict = dataclasses.field(default_factory=dict)  # the exact bits of other outputs
    # output -> of each of its states the sequence, and after how many of its tokens
    states_of: dict[str, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    mapped: list[int] = dataclasses.field(default_factory=list)  # the sequences of the maps

    def __call__(self, **changed) -> dict:
        return self.function(self.arguments | changed)

    def contiguous(self) -> dict:
        """The same numbers, each tensor contiguous and at the start of its memory."""
        arguments = {
            name: x.clone(memory_format=torch.contiguous_format)
            for name, x in self.arguments.items()
            if isinstance(x, torch.Tensor)
        }
        return self(**arguments, **({"strides": "contiguous"} if "strides" in self.arguments else {}))


def at_offset(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values and strides, so many elements after the start of a storage."""
    steps = zip(x.shape, x.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps) if x.numel() else 0
    before = torch.full((offset,), float("nan") if x.is_floating_point() else 1, device=x.device).to(x.dtype)
    memory = torch.cat([before, x.detach().as_strided((elements,), (1,), x.storage_offset())])
    return memory.as_strided(x.shape, x.stride(), offset)


def every_third(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, each the first of three in memory."""
    return x.repeat_interleave(3, -1)[..., ::3] if x.numel() else x


def moved(trial: Trial, arguments: dict) -> dict:
    """The arguments at other storage offsets, and those without tokens with other strides, if the trial has them."""
    r = random.Random(trial.case.seed + 1)
    copies = {}
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            if trial.strided and name in ("initial_state", "dht"):
                x = x.mT.contiguous().mT
            elif trial.strided and (name in ("A_log", "dt_bias") or not x.is_floating_point()):
                x = every_third(x)
            x = at_offset(x, r.choice(OFFSETS)) if trial.offsets and name not in IN_PLACE else x
        copies[name] = x
    return copies


# Both passes


def chunk(trial: Trial, device: str, noises: tuple) -> Call:
    case = trial.case
    arguments = make_arguments(case, device)
    of_backward = {name: arguments[name] for name in ("do", "dht")}
    inputs = {name: x for name, x in arguments.items() if name not in of_backward}
    N = shapes(case)[2]
    mapped = {"last": [N - 1], "both": [0, N - 1]}.get(trial.map_sequences, []) if N else []

    def run(arguments):
        of_backward = {name: arguments[name] for name in ("do", "dht")}
        inputs = {name: x for name, x in arguments.items() if name not in of_backward}
        rounded = {"output_final_state": True, "state_dtype": trial.state_dtype}
        with forward_mode(**trial.forward), backward_mode(**trial.backward):
            outputs = run_forwards(inputs)
            outputs["rounded final_state"] = flash_qla.chunk_gated_delta_rule(**inputs, **rounded)[1]
            *_, state = flash_qla.chunk_gated_delta_rule_intermediates(**inputs, **rounded)
            outputs["low-level rounded final_state"] = state
            sums = moved(trial, {name: outputs[name] for name in ("g_cumsum", "A")}) if trial.with_sums else {}
            outputs |= run_backward(inputs, **of_backward, intermediates=tuple(sums.values()) or None)
            used = of_backward | ({"do": None} if case.do_strides == "unused" else {})
            of_state = {} if arguments["dht"] is None else {"state_dtype": arguments["dht"].dtype}
            of_autograd = run_autograd(inputs, **used, of=trial.requires_grad, **of_state)
            outputs |= {f"autograd's {name}": x for name, x in of_autograd.items()}
            if case.strides == "slices":
                outputs |= {f"packed {name}": x for name, x in run_packed(inputs, **of_backward).items()}
            if trial.map_sequences is not None:
                of_ranks, *maps = begin_finish.run_begin_finish(arguments | {"state_dtype": trial.state_dtype}, mapped)
                outputs |= {f"over ranks: {name}": x for name, x in of_ranks.items()}
                outputs["over ranks: rounded final_state"] = outputs.pop("over ranks: final_state")
                for way, x in zip(("", "reverse "), maps, strict=True) if mapped else ():
                    outputs |= {f"{way}Z": x[:, :, : case.V], f"{way}M": x[:, :, case.V :]}
        return outputs

    expected = expect(inputs, *noises, **of_backward)
    carried = [expected["states"][0], torch.zeros(1, 1, 1) if arguments["dht"] is None else arguments["dht"].double()]
    expected |= {"g_cumsum": cumulative_gates(inputs), "carried": carried}
    if mapped:
        expected["carried"].append(torch.eye(case.K)[None, None])
        wide = begin_finish.with_identities(begin_finish.of_sequences(arguments, mapped))
        maps = expect(
            {name: x for name, x in wide.items() if name not in of_backward}, *noises, wide["do"], wide["dht"]
        )
        for way, name in (("", "final_state"), ("reverse ", "dh0")):
            x = maps[name]
            expected |= {f"{way}Z": x[..., : case.V, :], f"{way}M": x[..., case.V :, :]}
    return Call(run, moved(trial, arguments), expected, mapped=mapped)


# Pools


class Pool:
    """Slots of states, NaN between them, and which are written with what: of which sequence, after how many tokens."""

    def __init__(self, trial: Trial, slots: int, device: str, r: random.Random):
        case, generator = trial.case, torch.Generator().manual_seed(trial.case.seed)
        self.shape = (case.H_v, *((case.V, case.K) if case.state_v_first else (case.K, case.V)))
        self.size = case.H_v * case.V * case.K
        states = case.state_scale * torch.randn(slots, self.size, generator=generator, dtype=FP64)
        gap = torch.full((slots, trial.gap), torch.nan, dtype=FP64)
        self.rows = torch.cat([states, gap], 1).to(device, trial.state_dtype)
        # States on a GPU begin at multiples of 16 bytes
        offsets = [x for x in (*OFFSETS, 16) if device == "cpu" or x * trial.state_dtype.itemsize % 16 == 0]
        self.offset = r.choice(offsets) if trial.offsets else 0
        self.written: dict[int, torch.Tensor] = {}  # slot -> state in each run
        self.states_of: dict[int, tuple[int, int]] = {}

    def write(self, slot: int, state: torch.Tensor, n: int, tokens: int) -> None:
        self.written[slot], self.states_of[slot] = state, (n, tokens)

    def states(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, : self.size].unflatten(1, self.shape)

    def outputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The written states, and all else."""
        written = list(self.written)
        rest = rows.clone()
        rest[written, : self.size] = 0
        return self.states(rows)[written], (rest.float() if rest.dtype in FLOAT8 else rest).nan_to_num(123)

    def expected(self, runs: int) -> torch.Tensor:
        return (
            torch.stack(list(self.written.values()), 1) if self.written else self.rows.new_zeros(runs, 0, *self.shape)
        )


def on_pools(
    trial: Trial, function, arguments: dict, pools: dict[str, Pool], runs: torch.Tensor, rows_of_steps=None
) -> Call:
    def run(arguments):
        fresh = {name: at_offset(pool.rows, pool.offset) for name, pool in pools.items()}
        views = {name: pool.states(fresh[name]) for name, pool in pools.items()}
        if rows_of_steps and "intermediate_states" in views:
            views["intermediate_states"] = views["intermediate_states"].unflatten(0, rows_of_steps)
        result = function(**arguments, **views)
        outputs = result if isinstance(result, dict) else {"o": result}
        for name, pool in pools.items():
            outputs[f"states of {name}"], outputs[f"rest of {name}"] = pool.outputs(fresh[name])
        return outputs

    return Call(
        run,
        moved(trial, arguments),
        {"o": runs} | {f"states of {name}": pool.expected(len(runs)) for name, pool in pools.items()},
        {f"rest of {name}": pool.outputs(pool.rows)[1] for name, pool in pools.items()},
        {f"states of {name}": list(pool.states_of.values()) for name, pool in pools.items()},
    )


def into_memory(trial: Trial, function, like: torch.Tensor):
    """The function with the trial's `out`, between numbers that stay."""
    if trial.out is None:
        return function

    def run(**arguments):
        offset = 3 if trial.out == "misaligned" else 16
        around = torch.full((like.numel() + 2 * offset,), torch.nan, dtype=like.dtype, device=like.device)
        out = around[offset : offset + like.numel()]
        heads_last = (*like.shape[:2], *like.shape[:1:-1])
        out = out.view(heads_last).transpose(2, 3) if trial.out == "heads_last" else out.view(like.shape)
        result = function(**arguments, out=out)
        o = result["o"] if isinstance(result, dict) else result
        assert o is out, "another tensor than out is returned"
        o = out.clone(memory_format=torch.contiguous_format)
        out.fill_(torch.nan)
        assert around.isnan().all(), "memory around out was written"
        return result | {"o": o} if isinstance(result, dict) else o

    return run


def lengths_of(case: Case) -> list[int]:
    return [case.T] * case.B if case.lengths is None else list(case.lengths)


def padding_rows(trial: Trial, named: list[int], null: int) -> dict[int, int]:
    """Row -> slot for the trial's padding, its empty sequences: the slot of another, non-empty sequence if there is
    one."""
    lengths = lengths_of(trial.case)
    occupied = [slot for slot, length in zip(named, lengths, strict=True) if length and slot > null]
    empty = [n for n, length in enumerate(lengths) if length == 0]
    return {n: occupied[n % len(occupied)] for n in empty} if trial.slots == "shared" and occupied else {}


def index_dtype(trial: Trial, r: random.Random) -> torch.dtype:
    """The dtype of the next table."""
    return trial.index_dtype or r.choice((torch.int32, torch.int64))


def have_slots(trial: Trial, r: random.Random) -> list[bool]:
    """Whether each sequence has a slot. Where some have, one that has none has tokens, and others come after it."""
    lengths = lengths_of(trial.case)
    some = [n for n, length in enumerate(lengths) if length]
    without = r.choice(some[:-1] or [None])
    if trial.slots == "some":
        return [n != without and r.random() < 0.9 for n in range(len(lengths))]
    return [trial.slots != "none"] * len(lengths)


def prefill(trial: Trial, device: str, noises: tuple) -> Call:
    case, r = trial.case, random.Random(trial.case.seed)
    inputs = make_inputs(case, device)
    lengths = lengths_of(case)
    N, every, null = len(lengths), trial.every, trial.null_index
    counts = [length // every if every else 0 for length in lengths]
    pool = Pool(trial, null + N + sum(counts) + 5, device, r)
    slots = r.sample(range(null + 1, len(pool.rows)), N + sum(counts) + 2)
    final_slots, checkpoint_slots, unused = slots[:N], slots[N:-2], slots[-2:]
    real = have_slots(trial, r)
    has_state = [not trial.new_requests or r.random() < 0.6 for _ in lengths]
    indices = [slot if is_real else null - r.choice((0, 2)) for slot, is_real in zip(final_slots, real, strict=True)]
    padding = padding_rows(trial, indices, null)
    for n, slot in padding.items():  # which read a state, and leave it to the other
        final_slots[n] = indices[n] = slot
        has_state[n] = real[n] = True

    def table(values) -> torch.Tensor:
        return torch.tensor(values, dtype=index_dtype(trial, r), device=device)

    arguments = {name: x for name, x in inputs.items() if name not in ("initial_state", "state_v_first", "auto_cp")}
    arguments |= {"state_indices": table(indices), "null_index": null, "batch_invariant": trial.batch_invariant}
    first = list(final_slots)
    if trial.other_slots:  # which several sequences share
        first = [r.choice(unused if n in padding else [*unused, null, final_slots[n]]) for n in range(N)]
        arguments["initial_state_indices"] = table(first)
    if trial.new_requests:
        arguments["has_initial_state"] = torch.tensor(has_state, dtype=torch.bool, device=device)
    starts = [slot > null and known for slot, known in zip(first, has_state, strict=True)]
    for slot in set(final_slots) - {first[n] for n in range(N) if starts[n]}:  # what no sequence reads may be anything
        pool.rows[slot, : pool.size] = torch.nan
    states = pool.states(pool.rows)[first].double()
    states = states.where(torch.tensor(starts, dtype=torch.bool, device=device)[:, None, None, None], 0)
    rounds = trial.state_dtype if trial.batch_invariant and every else None
    runs = expect(inputs | {"initial_state": states, "state_v_first": True}, *noises, run=every, rounds=rounds)

    pools, checkpoint_pool, columns = {"state_pool": pool}, pool, max(counts, default=0) + 1
    if every:
        arguments["checkpoint_every"] = every
        if trial.kept == "rows":
            rows = sum(counts) + 1 if any(itertools.compress(counts, real)) else 0
            checkpoint_pool = pools["checkpoints"] = Pool(trial, rows, device, r)
        else:
            columns = {"slots": columns, "few": max(0, columns - 2), "no_slots": 0}[trial.kept]
            checkpoints = torch.full((N, columns), null, dtype=index_dtype(trial, r))
    number, offset = 0, 0
    for n, length in enumerate(lengths):
        is_unchanged = length == 0 and starts[n]
        if real[n] and not is_unchanged:
            pool.write(final_slots[n], runs["final_state"][:, n], n, length)
        elif not real[n]:
            runs["o"].flatten(1, 2)[:, offset : offset + length] = 0
        for j in range(min(counts[n], columns)):
            if trial.kept != "rows":
                checkpoints[n, j] = checkpoint_slots[number + j]
            if real[n]:
                slot, tokens = number + j if trial.kept == "rows" else checkpoint_slots[number + j], (j + 1) * every
                checkpoint_pool.write(slot, runs["states"][:, n, (j + 1) * -(-every // CHUNK)], n, tokens)
        number, offset = number + counts[n], offset + length
    if every and trial.kept != "rows":
        arguments["checkpoint_indices"] = checkpoints.to(device)
    function = into_memory(trial, flash_qla.prefill_gated_delta_rule, inputs["v"])
    if trial.with_h:
        function = into_memory(trial, prefill_with_h, inputs["v"])

    def run(**arguments):
        with forward_mode(**trial.forward):
            return function(**arguments)

    call = on_pools(trial, run, arguments, pools, runs["o"])
    call.expected["carried"] = [runs["states"][0]]
    if trial.with_h:
        by_chunk, chunk = runs["h"].flatten(1, 2), 0
        for is_real, length in zip(real, lengths, strict=True):
            end = chunk - -length // CHUNK
            if not is_real:
                by_chunk[:, chunk:end] = 0
            chunk = end
        call.expected["h"] = runs["h"]
    return call


def prefill_with_h(q, v, state_indices, cu_seqlens=None, **others) -> dict:
    (B, T, _, K), N = q.shape, len(state_indices)
    chunks = (T + CHUNK - 1 if cu_seqlens is None else T + (CHUNK - 1) * N) // CHUNK
    h = torch.full((B, chunks, *v.shape[2:], K), torch.nan, dtype=q.dtype, device=q.device)
    arguments = {"q": q, "v": v, "state_indices": state_indices, "cu_seqlens": cu_seqlens, "h": h, **others}
    return {"o": flash_qla.prefill_gated_delta_rule(**arguments), "h": h}


# The states that a decoding keeps. "last": the last one. "slots", "accepted" (with num_accepted_tokens), "no_slots" (a
# table without columns): each in a slot. Others: each in a row beside the pool, in "given_rows" (with
# intermediate_indices), in a tensor without rows or steps; of a tree of tokens, or of a table of parents without
# columns.
STYLES = (
    *("last", "slots", "accepted", "no_slots", "rows", "given_rows", "no_rows", "no_steps"),
    *("tree", "given_rows_of_tree", "no_parents", "no_steps_of_tree"),
)


class Buffered:
    """decode_gated_delta_rule by decode_gated_delta_rule_buffered, step by step. A sequence that has ended has no slot.
    States that are written on the way must not be rounded: only the last one of a pool of fewer bits is written."""

    def __init__(self, trial: Trial, slots: int, r: random.Random):
        case, lengths = trial.case, lengths_of(trial.case)
        self.lengths, self.trial = torch.tensor(lengths, dtype=torch.int64), trial
        exact = compute_dtype(case)
        self.flushes = torch.zeros(len(lengths), max(lengths, default=0), dtype=index_dtype(trial, r))
        self.dtypes = [index_dtype(trial, r) for _ in range(2)]
        for n, length in enumerate(lengths):
            for t in range(length):
                is_due = t == length - 1 or (trial.state_dtype == exact and trial.flush and r.random() < 0.3)
                self.flushes[n, t] = (trial.flush or 1) if is_due else 0
        dtypes = {"d_cache": trial.d_dtype or exact, "k_cache": trial.k_dtype or exact, "g_cache": exact}
        heads = {"d_cache": (case.H_v, case.V), "k_cache": (case.H_k, case.K), "g_cache": (case.H_v,)}
        self.backlog = {name: ((head, trial.steps, *dim), dtypes[name]) for name, (head, *dim) in heads.items()}
        self.slots = slots

    def make_backlog(self, device: str) -> dict:
        backlog = {}
        for name, (shape, dtype) in self.backlog.items():
            size = math.prod(shape)
            gap = -size % (16 // dtype.itemsize) + self.trial.gap  # slots on a GPU begin at multiples of 16 bytes
            memory = torch.full((self.slots, size + gap), float("nan"), dtype=dtype, device=device)
            backlog[name] = memory[:, :size].unflatten(1, shape)
        return backlog

    def __call__(self, q, k, v, a, b, state_indices, cu_seqlens, strides, **others) -> torch.Tensor:
        device, o, trial = q.device, v.new_zeros(v.shape), self.trial
        backlog = self.make_backlog(device)
        if state_indices is None:
            state_indices = torch.arange(len(self.lengths), device=device)
        lengths = self.lengths.to(device)
        starts = torch.cat([lengths.new_zeros(1), lengths]).cumsum(0)[:-1]
        write_pos = torch.zeros_like(lengths, dtype=self.dtypes[0])
        used = torch.zeros(self.slots, dtype=torch.bool, device=device)
        for t, flushes in enumerate(self.flushes.to(device).unbind(1)):
            live = lengths > t
            rows = torch.where(live, starts + t, 0)
            token = {name: x.flatten(0, 1)[rows, None] for name, x in zip("qkvab", (q, k, v, a, b), strict=True)}
            token = restride_tokens(token, strides)
            slots = torch.where(live, state_indices, -1).to(self.dtypes[1])
            used[slots[slots > others["null_index"]].long()] = True
            step = {
                "write_pos": write_pos,
                "force_flush": None if trial.flush is None and not flushes.any() else flushes,
            }
            tables = {name: x for name, x in step.items() if x is not None} | {"state_indices": slots}
            tables = {name: every_third(x) if trial.strided else x for name, x in tables.items()}
            function = into_memory(trial, flash_qla.decode_gated_delta_rule_buffered, token["v"])
            step_o = function(**token, **backlog, **others, **{"force_flush": None} | tables)
            o.flatten(0, 1)[rows[live]] = step_o[live, 0]
            write_pos = torch.where(flushes != 0, 0, (write_pos + 1) % trial.steps)
        for name, x in backlog.items():
            assert x[~used].isnan().all(), f"{name} was written where no sequence has its slot"
            around = x.as_strided((self.slots, x.stride(0)), (x.stride(0), 1))
            assert around[:, x.shape[1:].numel() :].isnan().all(), f"{name} was written between its slots"
        return o


def decode(trial: Trial, device: str, noises: tuple) -> Call:
    """Each token as the last one of a sequence of its own, after its ancestors if it is in a tree."""
    case, r = trial.case, random.Random(trial.case.seed)
    inputs = make_inputs(case, device)
    lengths = lengths_of(case)
    buffered, style, plain = trial.op == "decode_buffered", trial.style, trial.slots == "plain"
    N, S = len(lengths), max(1, *lengths, 1)
    null = -1 if plain else trial.null_index
    pool = Pool(trial, N if plain else null + N * S + 4, device, r)
    pools = {"state_pool": pool}
    if plain:
        slots = torch.arange(N)[:, None].expand(N, S)
    else:
        slots = torch.tensor(r.sample(range(null + 1, len(pool.rows)), N * S), dtype=torch.int64).reshape(N, S)
        if trial.slots == "some":  # neither have all entries of a sequence's row
            slots[torch.rand(N, S, generator=torch.Generator().manual_seed(case.seed)) < 0.1] = null
        for n, has_slot in enumerate(have_slots(trial, r)):
            if not has_slot:
                slots[n] = null - r.choice((0, 2))
        for n, slot in padding_rows(trial, slots[:, 0].tolist(), null).items():
            slots[n] = slot
    arguments = {name: inputs[name] for name in ("scale", "use_qk_l2norm_in_kernel", "cu_seqlens")}
    arguments |= {"a": inputs["g"], "b": inputs["beta"], "null_index": null}
    arguments |= {name: inputs.get(name) for name in ("A_log", "dt_bias")}
    arguments |= {name: getattr(case, name) for name in ("use_beta_sigmoid_in_kernel", "allow_neg_eigval")}
    if trial.default_sigmoid:
        assert case.use_beta_sigmoid_in_kernel == case.use_gate_in_kernel
        del arguments["use_beta_sigmoid_in_kernel"]
    arguments |= {"state_indices": None if plain else slots[:, 0], "state_v_first": case.state_v_first}
    starts = slots[:, 0].tolist()
    in_tree = style.endswith("tree")
    parents = [[r.randint(-1, t - 1) if in_tree else t - 1 for t in range(S)] for _ in lengths]
    rows, rows_of_steps = list(range(N)), None
    if style in ("slots", "accepted", "no_slots"):
        arguments |= {"state_indices": slots, "write_indices": slots[:, :0] if style == "no_slots" else slots}
        if style == "accepted":
            accepted = [r.randint(1, S) for _ in lengths]
            arguments["num_accepted_tokens"] = torch.tensor(accepted)
            starts = [slots[n, a - 1].item() for n, a in enumerate(accepted)]
    elif style != "last":
        rows_of_steps = 0 if style == "no_rows" else N + 1, 0 if style.startswith("no_steps") else S
        step_states = pools["intermediate_states"] = Pool(trial, math.prod(rows_of_steps), device, r)
        step_states.rows = step_states.rows[:, : step_states.size]
        arguments["update_state"] = False
        if style == "no_rows" or style.startswith("given_rows"):
            row_probability = 0 if style == "no_rows" else 0.8
            rows = [row if r.random() < row_probability else -1 for row in r.sample(range(N + 1), N)]
            arguments["intermediate_indices"] = torch.tensor(rows)
        if style == "no_parents":  # tokens beyond the columns come after the one before
            arguments["parents"] = torch.empty(N, 0)
        elif in_tree:
            arguments["parents"] = torch.tensor(parents).reshape(N, S)
    for name in ("state_indices", "write_indices", "num_accepted_tokens", "intermediate_indices", "parents"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name].to(device, index_dtype(trial, r))

    paths, ends, offset = [], [], 0  # rows of tokens; (sequence, token, row)
    for n, length in enumerate(lengths):
        for t in range(length if starts[n] > null else 0):
            path, at = [], t
            while at >= 0:
                path, at = [offset + at, *path], parents[n][at]
            paths.append(path)
            ends.append((n, t, offset + t))
        offset += length
    gathered = torch.tensor(list(itertools.chain(*paths)), dtype=torch.int64, device=device)
    tokens = {name: inputs[name].flatten(0, 1)[gathered][None] for name in ("q", "k", "v", "g", "beta")}
    states = pool.states(pool.rows)[[starts[n] for n, _, _ in ends]].double()
    offsets = torch.tensor([0, *map(len, paths)]).cumsum(0)
    states = {"initial_state": states, "state_v_first": case.state_v_first}
    runs = expect(inputs | tokens | states | {"cu_seqlens": offsets}, *noises)

    o = runs["o"].new_zeros(len(runs["o"]), *inputs["v"].shape)
    o.flatten(1, 2)[:, [row for _, _, row in ends]] = runs["o"][:, 0, offsets[1:] - 1]
    for i, (n, t, _) in enumerate(ends):
        state = runs["final_state"][:, i]
        if style == "last" and t == lengths[n] - 1:
            pool.write(starts[n], state, n, t + 1)
        elif style in ("slots", "accepted") and slots[n, t] > null:
            pool.write(slots[n, t].item(), state, n, t + 1)
        elif rows_of_steps and rows_of_steps[1] and rows[n] >= 0:
            step_states.write(rows[n] * S + t, state, n, t + 1)
    if trial.op != "decode_packed":
        arguments |= {name: inputs[name] for name in ("q", "k", "v")}
        if buffered:
            del arguments["state_v_first"]
            arguments["strides"] = case.strides
            return on_pools(trial, Buffered(trial, len(pool.rows), r), arguments, pools, o)
        function = into_memory(trial, flash_qla.decode_gated_delta_rule, inputs["v"])
        return on_pools(trial, function, arguments, pools, o, rows_of_steps)
    arguments["mixed_qkv"] = torch.cat([inputs[name].flatten(2) for name in ("q", "k", "v")], -1)
    arguments["mixed_qkv"] = restride(arguments["mixed_qkv"], case.strides)
    if trial.flat:
        arguments |= {name: arguments[name][:, 0] for name in ("mixed_qkv", "a", "b")}
    function = into_memory(trial, flash_qla.decode_gated_delta_rule_packed, inputs["v"])
    return on_pools(trial, function, arguments, pools, o, rows_of_steps)


# A NaN in one token


@dataclasses.dataclass(frozen=True)
class Token:
    """Where a NaN is: in the q, k, v, g or beta of one token and head."""

    tensor: str
    b: int
    t: int  # token, in the rows of b
    n: int  # sequence
    position: int  # place of the token in the sequence
    head: int  # head of H_k for q and k, else of H_v


def draw_token(trial: Trial) -> Token | None:
    """None if there is no token."""
    case, r = trial.case, random.Random(trial.case.seed + 2)
    lengths = lengths_of(case)
    some = [n for n, length in enumerate(lengths) if length]
    if not some:
        return None
    n = r.choice(some)
    position = r.randrange(lengths[n])
    b, t = (n, position) if case.lengths is None else (0, sum(lengths[:n]) + position)
    return Token(trial.nan, b, t, n, position, r.randrange(case.H_k if trial.nan in ("q", "k") else case.H_v))


def with_nan(trial: Trial, arguments: dict, token: Token) -> dict:
    """The argument that holds the NaN, by name."""
    case, name, at, head = trial.case, token.tensor, (token.b, token.t), token.head
    if trial.op.startswith("decode"):
        name = {"g": "a", "beta": "b"}.get(name, name)
    if trial.op == "decode_packed" and name in ("q", "k", "v"):
        first = {"q": 0, "k": case.H_k * case.K, "v": 2 * case.H_k * case.K}[name]
        name, head = "mixed_qkv", first + head * (case.V if name == "v" else case.K)
    x = arguments[name]
    at = (*at[: 1 if x.dim() == 2 else 2], head)  # without T for one token of each sequence
    x = at_offset(x, x.storage_offset())
    x[at if x.dim() == len(at) else (*at, 0)] = torch.nan
    return {name: x}


def may_change(trial: Trial, call: Call, name: str, x: torch.Tensor, token: Token, device: str) -> torch.Tensor:
    """Which elements of an output may be others with a NaN in this token. On a GPU these begin with its chunk, or with
    its sequence in decoding."""
    case, tensor = trial.case, name_of_tensor(name)
    group = case.H_v // case.H_k
    if token.tensor in ("q", "k"):
        key, values = token.head, slice(token.head * group, (token.head + 1) * group)
    else:
        key, values = token.head // group, token.head
    if device == "cpu" or trial.op == "decode_buffered":
        shared = 1
    else:
        shared = max(1, *lengths_of(case)) if trial.op.startswith("decode") else CHUNK
    run = call.arguments.get("checkpoint_every") or CHUNK  # chunks begin anew after so many tokens
    least = token.position - token.position % run % shared  # the first token that may be another
    begin = token.t - token.position
    end = begin + lengths_of(case)[token.n]
    changed = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if tensor.startswith("states of"):
        for i, (n, tokens) in enumerate(call.states_of[tensor]):
            changed[i, values] = n == token.n and tokens > least
    elif tensor == "h":
        starts = reference.Layout.of(case.B, case.T, call.arguments["cu_seqlens"]).chunk_starts
        chunks = slice(starts[token.n] + least // CHUNK + 1, starts[token.n] + -(-(end - begin) // CHUNK))
        changed.flatten(0, 1)[chunks, values] = True
    elif tensor.endswith(("Z", "M")):
        changed[[n == token.n for n in call.mapped], values] = True
    elif tensor in ("final_state", "dh0"):
        changed[token.n, values] = True
    elif tensor in ("dA_log", "ddt_bias"):
        changed[values] = True
    elif tensor in ("o", "A", "g_cumsum"):
        changed[token.b, begin + least : end, values] = True
    elif tensor in ("dq", "dk", "dv", "db", "dg"):
        changed[token.b, begin:end, key if tensor in ("dq", "dk") else values] = True
    return changed


def check_containment(trial: Trial, call: Call, clean: dict, device: str, spoil) -> None:
    """A NaN in one token changes only results that depend on the token."""
    token = draw_token(trial)
    if token is None:
        return
    with poisoned(device):
        outputs = spoil(call(**with_nan(trial, call.arguments, token)))
    for name, x in outputs.items():
        changed = may_change(trial, call, name, x, token, device)
        others = (y.where(~changed, 0) for y in (x, clean[name]))
        assert torch.equal(*map(bits, others)), f"{name} has other bits where nothing depends on the NaN in {token}"


# How near it must be


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits as integers, because nan is not equal to nan."""
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8) if x.numel() else x


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """The bytes of its storage, between its elements, too."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def name_of_tensor(name: str) -> str:
    """The name of an output without the names of functions and calls."""
    for prefix in ("low-level ", "autograd's ", "packed ", "over ranks: ", "rounded "):
        name = name.removeprefix(prefix)
    return name.removesuffix(" without h")


def check_dtypes(trial: Trial, arguments: dict, outputs: dict) -> None:
    """Each output has its dtype, and is contiguous unless it is a view."""
    case = trial.case
    of_states = trial.state_dtype if trial.op != "chunk" else compute_dtype(case)
    for name, x in outputs.items():
        tensor = name_of_tensor(name)
        if name.startswith("rest of"):
            continue
        if name.startswith("autograd's"):
            (argument,) = (a for a, gradient in ALL_GRADIENTS_OF.items() if gradient == tensor)
            expected = arguments[argument].dtype
        elif "rounded" in name:
            expected = trial.state_dtype
        elif tensor in ("o", "A", "h"):
            expected = case.dtype
        elif tensor.startswith("d"):
            expected = gradient_dtype(case, tensor)
        else:
            expected = of_states
        assert x.dtype == expected, f"{name} is {x.dtype}, expected {expected}"
        is_view = tensor.endswith(("Z", "M")) or tensor == "h" or tensor.startswith("states of")
        assert is_view or name.startswith(("autograd's", "packed")) or x.is_contiguous(), (
            f"{name} has strides {x.stride()}"
        )


@reference.one_thread()
def run(trial: Trial, device: str, spoil=None, batches: int = BATCHES) -> dict[str, float]:
    """The errors of a trial over their bars, by output. spoil takes the outputs of a call and returns others, whose
    errors are not measured."""
    with not_measured() if spoil else contextlib.nullcontext():
        return check_trial(trial, device, spoil or dict, batches)


def check_trial(trial: Trial, device: str, spoil, batches: int) -> dict[str, float]:
    case = trial.case
    compute = FP64 if case.dtype == FP64 else FP32
    is_exact = device == "cpu" and trial.d_dtype in (None, compute)  # d_cache may round what the arithmetic does not
    operands = compute if is_exact else case.dtype

    def make(batch: int) -> tuple[Call, Noise]:
        noise, noise_of_sums = (
            Noise(dtype, device, RUNS, case.seed + 2 * batch + i) for i, dtype in enumerate((operands, compute))
        )
        build = {"chunk": chunk, "prefill": prefill}.get(trial.op, decode)
        return build(trial, device, (noise, noise_of_sums)), noise

    longest = max(lengths_of(case), default=0)
    segments = -(-longest // CHUNK)  # at most, of a chunk each
    call, noise = make(0)
    before = {name: memory_of(x).clone() for name, x in call.arguments.items() if isinstance(x, torch.Tensor)}
    with poisoned(device):
        first, second = spoil(call()), spoil(call.contiguous())
    for name, x in before.items():
        assert torch.equal(x, memory_of(call.arguments[name])), f"{name} was written"
    check_dtypes(trial, call.arguments, first)
    for name, x in first.items():
        assert torch.equal(bits(x), bits(second[name])), f"a second run, on contiguous tensors, differs in {name}"
    del second
    if trial.case.seed % FAILING == 0:
        with CallsThatFail(random.Random(trial.case.seed)), poisoned(device):
            third = spoil(call())
        for name, x in first.items():
            assert torch.equal(bits(x), bits(third[name])), f"calls that failed changed {name}"
        del third
    norms = [x.norm(dim=(-2, -1)).max().item() if x.numel() else 0 for x in call.expected.get("carried", ())]
    carried = {"dg": math.prod(norms[:2])}  # of the first state and the gradient of the last
    bars: dict[str, Bars] = {}
    for name, x in first.items():
        tensor = name_of_tensor(name)
        if name in call.same:
            assert torch.equal(x, call.same[name]), f"{name} was written"
        elif tensor == "g_cumsum":
            check_accuracy(tensor, x, call.expected[tensor], dtype=case.dtype, case=f"{name}, {case}")
        elif tensor not in bars:
            if tensor == "A":
                check_zeros_of_A(x, call.arguments["cu_seqlens"])
            bars[tensor] = Bars(tensor, call.expected[tensor], noise, call.expected.get(f"on the way to {tensor}"))
        padding = x[:, covered_tokens(case) :] if HEAD_AXIS.get(tensor, -3) > -3 and x.dim() > 2 else x[:0]
        assert not padding.any(), f"{name} is not zero where no sequence is"
    if trial.nan:
        check_containment(trial, call, first, device, spoil)
    call.expected.clear()  # it is large

    def errors() -> dict[str, float]:
        largest = dict.fromkeys(bars, 0.0)
        for name, x in first.items():
            tensor = name_of_tensor(name)
            if tensor in bars:
                largest[tensor] = max(
                    largest[tensor],
                    bars[tensor].check(x, compute, segments, carried.get(tensor, max(norms, default=0))),
                )
        return largest

    ratios = errors()
    if batches > 1 and not max(ratios.values()) <= 1:  # perhaps by the luck of so few runs
        for batch in range(1, batches):
            expected = make(batch)[0].expected
            for tensor, bar in bars.items():
                bar.add(expected[tensor])
            del expected
        ratios = errors()
    wrong = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
    assert not wrong, f"errors over their bars: {wrong}"
    return ratios
