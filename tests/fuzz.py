"""Random calls of every op: `python tests/fuzz.py --seconds 60 --seed 0 [--cases 1000] [--jobs 4] [--device cuda]`.

It ends after so many seconds or cases; jobs are processes that share them, and the device. A seed and a number make a
trial, whatever the jobs: shapes, dtypes, gates, strides, storage offsets, layouts, tables and states without elements,
padding, modes of the dispatch. Each runs twice over memory that holds NaN and must give the same bits; every output
must be as near to the formula as its arithmetic allows. Some run once more with a NaN in one token: what does not
depend on this token must keep its bits.

How near that is no constant says: where keys come again, or gates underflow, results are what is left of larger
numbers. So the expected outputs are made in several runs at once, by chunks, in fp64: one exact, one in which every
operand and result of a product is rounded as the kernels round, the others in which it is off by a random part of that.
What these runs differ by is what rounding does to this output of these inputs; the bar is a multiple.

The file is long because trials of all ops share inputs, expected outputs and comparison.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import record
import reference
import torch
from accuracy import FLOAT8, check as check_accuracy, not_measured
from cases import (
    Case,
    backward_mode,
    covered_tokens,
    cumulative_gates,
    forward_mode,
    make_arguments,
    make_inputs,
    run_all,
)
from poison import poisoned
from reference import CHUNK
from rounded_runs import HEAD_AXIS, Bars, Noise, expect

import flash_qla

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPS = ("chunk", "prefill", "decode", "decode_packed", "decode_buffered")
RUNS = 5  # exact, rounded, and three at random
BATCHES = 8  # batches of runs before an error counts
OFFSETS = (1, 2, 3, 4, 8)  # elements before a tensor in its storage
NAN_IN = ("q", "k", "v", "g", "beta")
NARROW_KEYS_8 = (1, 2, 7, 8, 12, 16, 16, 16)  # key channels on a GPU, in eighths; all that decode_buffered takes
KEYS_8 = (*NARROW_KEYS_8, 17, 24, 32)
KEYS_AND_BETAS = (
    *(("unit", beta) for beta in ("sigmoid", "two", "0", "2")),
    *((keys, beta) for keys in ("repeated", "alike") for beta in ("sigmoid", "two", "1")),
    ("long", "stable"),
    ("zero", "sigmoid"),
)
GATES = ("softplus", "logsigmoid", "near_threshold", "tiny", "underflow", "zero", "resets", "hard_resets", "extreme")
KEPT_BYTES = 4 << 30  # bytes of the device's memory that are kept from case to case


@dataclasses.dataclass(frozen=True)
class Trial:
    op: str
    case: Case
    forward: dict  # arguments of forward_mode
    backward: dict  # arguments of backward_mode
    state_dtype: torch.dtype  # dtype of final states, or of the pool
    empty: bool = False  # optional tables and states have no elements
    offsets: bool = False  # tensors do not start where their storage does
    padding: bool = False  # empty sequences name slots that others use
    nan: str | None = None  # the argument that holds a NaN in a last call


def draw(seed: int, number: int, device: str) -> Trial:
    r = random.Random(f"{seed}/{number}")
    op = r.choices(OPS, (6, 2, 1, 1, 1))[0]
    gpu, decodes = device == "cuda", op.startswith("decode")
    floats = (BF16, FP16) if gpu else (BF16, FP16, FP32, FP64)

    def length():
        if decodes:
            return r.randint(0, 8)
        return r.choice((0, 1, r.randint(2, 62), 63, 64, 65, r.randint(66, 300), r.randint(66, 2000 if gpu else 300)))

    lengths = r.choice((None, tuple(length() for _ in range(r.choice((0, 1, 1, 2, 3, 6, 12))))))
    B, T = (r.randint(1, 3), length()) if lengths is None else (1, 0)
    longest, N = (T, B) if lengths is None else (max(lengths, default=0), len(lengths))
    most_heads = max(1, (16384 if gpu else 1024) // max(1, N * (longest + CHUNK)))
    H_k = r.randint(1, min(8, most_heads))
    keys, beta = r.choice(KEYS_AND_BETAS)
    l2norm, inside = keys not in ("long",) and r.random() < 0.4, r.random() < 0.5
    if inside and keys == "long":
        keys, beta = "unit", "sigmoid"
    case = Case(
        B=B,
        T=T,
        lengths=lengths,
        padding=0 if lengths is None else r.choice((0, 0, 1, 65)),
        H_k=H_k,
        H_v=H_k * r.randint(1, max(1, min(8, most_heads // H_k))),
        K=8 * r.choice(KEYS_8 if op != "decode_buffered" else NARROW_KEYS_8)
        if gpu
        else r.choice((1, 3, 8, 16, 33, 64, 96)),
        V=8 * r.choice((1, 3, 8, 16, 16, 16, 24, 32, 64)) if gpu else r.choice((1, 5, 8, 16, 33, 64, 96)),
        dtype=r.choice(floats),
        gate=r.choice(GATES),
        keys="raw" if l2norm and keys == "unit" else keys,
        beta=beta,
        g_dtype=r.choice((BF16, FP16, FP32, FP64)),
        beta_dtype=r.choice((BF16, FP16, FP32, FP64)),
        initial_state=r.choice((None, BF16, FP16, FP32, FP64)),
        state_scale=r.choice((0.5, 0.5, 30)),
        cu_dtype=r.choice((torch.int32, torch.int64)),
        state_v_first=op in ("prefill", "decode_buffered") or r.random() < 0.5,
        scale=r.choice((None, None, 1.0, 0.25)),
        use_qk_l2norm_in_kernel=l2norm,
        use_gate_in_kernel=r.random() < 0.4,
        A_log=r.choice((BF16, FP16, FP32, FP64)),
        dt_bias=r.choice((None, BF16, FP16, FP32, FP64)),
        use_beta_sigmoid_in_kernel=inside,
        allow_neg_eigval=inside and (beta in ("two", "2") or r.random() < 0.3),
        auto_cp=r.random() < 0.8,
        strides=r.choice(("contiguous", "contiguous", "heads_first", "packed", "reversed_dims")),
        do_strides=r.choice(("contiguous", "heads_first", "packed", "reversed_dims", "expanded")),
        dht=r.choice((None, BF16, FP16, FP32, FP64)),
        seed=r.randrange(2**31),
    )
    segments = {"segment_chunks": r.choice((0, 1, 2, 5, 16))}
    tiles = {"value_tile": r.choice((64, 128)), **segments}
    if segments["segment_chunks"] and r.random() < 0.5:
        segments["cut_above"] = tiles["cut_above"] = segments["segment_chunks"] + r.choice((0, 1, 20))
        tiles |= r.choice(({"whole_tile": 0}, {"whole_tile": 64}, {"whole_tile": 128}, {"fused": 1}))
    if tiles == {"value_tile": 64, "segment_chunks": 0} and r.random() < 0.5:
        tiles |= {"cut_above": r.choice((1, 2, 5, 20))} | r.choice(({"whole_tile": 128}, {"fused": 1}))
    if segments["segment_chunks"] and tiles["value_tile"] == 128 and "whole_tile" not in tiles and r.random() < 0.5:
        tiles |= {"fused_segments": 1}
    if case.K > 128:  # one tile, and no fused kernel
        tiles = segments | {"value_tile": 128}
    forward = r.choice(({}, {}, tiles, tiles, {"value_tile": 128, "segment_chunks": 0, "fused": int(case.K <= 128)}))
    state_dtypes = (BF16, FP16, FP32) if gpu and op != "chunk" else (BF16, FP16, FP32, FP64)
    if op in ("prefill", "decode", "decode_packed"):
        state_dtypes += FLOAT8
    state_dtype = r.choice(state_dtypes)
    if gpu and state_dtype in FLOAT8:
        case = dataclasses.replace(case, K=-(-case.K // 16) * 16, state_v_first=True)
    trial = Trial(
        op,
        case,
        forward,
        r.choice(({}, segments)),
        state_dtype,
        empty=r.random() < 0.2,
        offsets=r.random() < 0.4,
        padding=r.random() < 0.5,
        nan=r.choice((*NAN_IN, *[None] * 10)),
    )
    if trial.empty and op == "chunk":  # one offset, and no state
        trial = dataclasses.replace(trial, case=dataclasses.replace(case, B=1, T=0, lengths=()))
    if not decodes:  # the right number, or a wrong one
        max_seqlen = r.choice((None, longest, longest, longest + 100, longest // 4, 0))
        trial = dataclasses.replace(trial, case=dataclasses.replace(trial.case, max_seqlen=max_seqlen))
    return trial


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

    def __call__(self, **changed) -> dict:
        return self.function(self.arguments | changed)


def at_offset(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values and strides, so many elements after the start of a storage."""
    steps = zip(x.shape, x.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps) if x.numel() else 0
    before = torch.full((offset,), float("nan") if x.is_floating_point() else 1, device=x.device).to(x.dtype)
    memory = torch.cat([before, x.detach().as_strided((elements,), (1,), x.storage_offset())])
    return memory.as_strided(x.shape, x.stride(), offset)


def moved(trial: Trial, arguments: dict) -> dict:
    """The arguments, at other storage offsets if the trial has them."""
    r = random.Random(trial.case.seed + 1)
    return {
        name: at_offset(x, r.choice(OFFSETS)) if trial.offsets and isinstance(x, torch.Tensor) else x
        for name, x in arguments.items()
    }


def chunk(trial: Trial, device: str, noises: tuple) -> Call:
    arguments = make_arguments(trial.case, device)
    inputs = {name: x for name, x in arguments.items() if name not in ("do", "dht")}

    def run(arguments):
        inputs = {name: x for name, x in arguments.items() if name not in ("do", "dht")}
        with forward_mode(**trial.forward), backward_mode(**trial.backward):
            options = {"output_final_state": True, "state_dtype": trial.state_dtype}
            _, state = flash_qla.chunk_gated_delta_rule(**inputs, **options)
            outputs = run_all(arguments, lambda intermediates: moved(trial, intermediates))
            return {**outputs, "rounded final_state": state}

    expected = expect(inputs, *noises, arguments["do"], arguments["dht"])
    carried = [expected["states"][0], torch.zeros(1, 1, 1) if arguments["dht"] is None else arguments["dht"].double()]
    expected |= {"g_cumsum": cumulative_gates(inputs), "carried": carried}
    return Call(run, moved(trial, arguments), expected)


class Pool:
    """Slots of states, NaN between them, and which are written with what: of which sequence, after how many tokens."""

    def __init__(self, trial: Trial, slots: int, device: str, r: random.Random):
        case, generator = trial.case, torch.Generator().manual_seed(trial.case.seed)
        self.shape = (case.H_v, *((case.V, case.K) if case.state_v_first else (case.K, case.V)))
        self.size = case.H_v * case.V * case.K
        states = case.state_scale * torch.randn(slots, self.size, generator=generator, dtype=FP64)
        step = max(1, 2 // trial.state_dtype.itemsize)
        gap = step * r.choice(
            (0, 0, 8, 104 if device == "cuda" else 100)
        )  # slots on a GPU begin at multiples of 16 bytes
        gap = torch.full((slots, gap), torch.nan, dtype=FP64)
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


def lengths_of(case: Case) -> list[int]:
    return [case.T] * case.B if case.lengths is None else list(case.lengths)


def padding_rows(trial: Trial, named: list[int], null: int) -> dict[int, int]:
    """Row -> slot for the trial's padding, its empty sequences: the slot of another, non-empty sequence if there is
    one."""
    lengths = lengths_of(trial.case)
    taken = [slot for slot, length in zip(named, lengths, strict=True) if length and slot > null]
    empty = [n for n, length in enumerate(lengths) if length == 0]
    return {n: taken[n % len(taken)] for n in empty} if trial.padding and taken else {}


def prefill(trial: Trial, device: str, noises: tuple) -> Call:
    case, r = trial.case, random.Random(trial.case.seed)
    inputs = make_inputs(case, device)
    lengths = lengths_of(case)
    N, every, in_slots, null = len(lengths), r.choice((0, 64, 128, 16, 50, 200)), r.random() < 0.5, r.choice((-1, 0))
    counts = [length // every if every else 0 for length in lengths]
    pool = Pool(trial, N + sum(counts) + 5, device, r)
    slots = r.sample(range(null + 1, len(pool.rows)), N + sum(counts) + 2)
    own, others, unused = slots[:N], slots[N:-2], slots[-2:]
    real = [r.random() < 0.85 for _ in lengths]
    has_state = [r.random() < 0.7 for _ in lengths]
    indices = [slot if is_real else null - r.choice((0, 2)) for slot, is_real in zip(own, real, strict=True)]
    padding = padding_rows(trial, indices, null)
    for n, slot in padding.items():  # which read a state, and leave it to the other
        own[n] = indices[n] = slot
        has_state[n] = real[n] = True
    index_dtype = r.choice((torch.int32, torch.int64))
    arguments = {name: x for name, x in inputs.items() if name not in ("initial_state", "state_v_first", "auto_cp")}
    arguments |= {"state_indices": torch.tensor(indices, dtype=index_dtype, device=device), "null_index": null}
    first = list(own)
    if r.random() < 0.5:  # slots that several sequences share
        first = [r.choice(unused if n in padding else [*unused, null, own[n]]) for n in range(N)]
        arguments["initial_state_indices"] = torch.tensor(first, dtype=index_dtype, device=device)
    states = pool.states(pool.rows)[first].double()
    states = states * torch.tensor([slot > null for slot in first], device=device)[:, None, None, None]
    if r.random() < 0.5:
        mask = arguments["has_initial_state"] = torch.tensor(has_state, dtype=torch.bool, device=device)
        states = states * mask[:, None, None, None]
    else:
        has_state = [True] * N
    runs = expect(inputs | {"initial_state": states, "state_v_first": True}, *noises, run=every if every % CHUNK else 0)

    pools, kept = {"state_pool": pool}, pool
    if every:
        arguments["checkpoint_every"] = every
        if in_slots:
            columns = 0 if trial.empty else max(counts, default=0) + r.choice((0, 1))
            table = torch.full((N, columns), null, dtype=index_dtype)
        else:
            rows = 0 if trial.empty and not any(itertools.compress(counts, real)) else sum(counts) + 1
            kept = pools["checkpoints"] = Pool(trial, rows, device, r)
    number, offset = 0, 0
    for n, length in enumerate(lengths):
        is_unchanged = length == 0 and has_state[n] and first[n] > null
        if real[n] and not is_unchanged:
            pool.write(own[n], runs["final_state"][:, n], n, length)
        elif not real[n]:
            runs["o"].flatten(1, 2)[:, offset : offset + length] = 0
        for j in range(counts[n] if not in_slots else min(counts[n], table.shape[1]) if every else 0):
            if in_slots:
                table[n, j] = others[number + j]
            if real[n]:
                slot, tokens = others[number + j] if in_slots else number + j, (j + 1) * every
                kept.write(slot, runs["states"][:, n, (j + 1) * -(-every // CHUNK)], n, tokens)
        number, offset = number + counts[n], offset + length
    if every and in_slots:
        arguments["checkpoint_indices"] = table.to(device)
    with_h = every % CHUNK == 0 and r.random() < 0.5
    function = prefill_with_h if with_h else flash_qla.prefill_gated_delta_rule
    call = on_pools(trial, function, arguments, pools, runs["o"])
    call.expected["carried"] = [runs["states"][0]]
    if with_h:
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


# The states that a decoding keeps, and the tensors that may have no elements; "steps" are those of intermediate_states
STYLES = {
    "last": (),
    "slots": ("write_indices",),
    "rows": ("intermediate_states", "steps"),
    "tree": ("parents", "steps"),
}


class Buffered:
    """decode_gated_delta_rule by decode_gated_delta_rule_buffered, step by step. A sequence that has ended has no slot.
    The states that are written on the way are not rounded, so that only the last one counts."""

    def __init__(self, trial: Trial, slots: int, r: random.Random):
        case, lengths = trial.case, lengths_of(trial.case)
        self.lengths = torch.tensor(lengths, dtype=torch.int64)
        exact = FP64 if case.dtype == FP64 else FP32
        self.steps = r.choice((1, 2, 3, 5, 32)) if trial.state_dtype == exact else 32
        self.flushes = torch.zeros(len(lengths), max(lengths, default=0), dtype=torch.int64)
        for n, length in enumerate(lengths):
            for t in range(length):
                self.flushes[n, t] = t == length - 1 or (trial.state_dtype == exact and r.random() < 0.2)
        dtypes = {"d_cache": exact, "k_cache": r.choice((exact, case.dtype)), "g_cache": exact}
        heads = {"d_cache": (case.H_v, case.V), "k_cache": (case.H_k, case.K), "g_cache": (case.H_v,)}
        self.backlog = {name: ((slots, head, self.steps, *dim), dtypes[name]) for name, (head, *dim) in heads.items()}

    def __call__(self, q, k, v, a, b, state_indices, cu_seqlens, **others) -> torch.Tensor:
        device, o = q.device, v.new_zeros(v.shape)
        backlog = {
            name: torch.full(shape, torch.nan, dtype=dtype, device=device)
            for name, (shape, dtype) in self.backlog.items()
        }
        lengths = self.lengths.to(device)
        starts = torch.cat([lengths.new_zeros(1), lengths]).cumsum(0)[:-1]
        write_pos = torch.zeros_like(lengths, dtype=state_indices.dtype)
        for t, flushes in enumerate(self.flushes.to(device).unbind(1)):
            live = lengths > t
            rows = torch.where(live, starts + t, 0)
            token = {name: x.flatten(0, 1)[rows, None] for name, x in zip("qkvab", (q, k, v, a, b), strict=True)}
            slots = torch.where(live, state_indices, -1)
            step = {"write_pos": write_pos, "force_flush": flushes if flushes.any() else None}
            found = flash_qla.decode_gated_delta_rule_buffered(
                **token, state_indices=slots, **backlog, **step, **others
            )
            o.flatten(0, 1)[rows[live]] = found[live, 0]
            write_pos = torch.where(flushes != 0, 0, (write_pos + 1) % self.steps)
        return o


def decode(trial: Trial, device: str, noises: tuple) -> Call:
    """Each token as the last one of a sequence of its own, after its ancestors if it is in a tree."""
    case, r = trial.case, random.Random(trial.case.seed)
    inputs = make_inputs(case, device)
    lengths = lengths_of(case)
    buffered = trial.op == "decode_buffered"
    style = "last" if buffered else r.choice([x for x in STYLES if STYLES[x] or not trial.empty])
    empty = r.choice(STYLES[style]) if STYLES[style] and trial.empty else ""
    plain = style != "slots" and not buffered and r.random() < 0.3  # a state for each sequence, and no pool
    N, S = len(lengths), max(1, *lengths, 1)
    null, index_dtype = -1 if plain else r.choice((-1, 0)), r.choice((torch.int32, torch.int64))
    pool = Pool(trial, N if plain else N * S + 3, device, r)
    pools = {"state_pool": pool}
    if plain:
        slots = torch.arange(N)[:, None].expand(N, S)
    else:
        slots = torch.tensor(r.sample(range(null + 1, len(pool.rows)), N * S)).reshape(N, S)
        slots[torch.rand(N, S, generator=torch.Generator().manual_seed(case.seed)) < 0.1] = null
        for n, slot in padding_rows(trial, slots[:, 0].tolist(), null).items():
            slots[n] = slot
    arguments = {name: inputs[name] for name in ("scale", "use_qk_l2norm_in_kernel", "cu_seqlens")}
    arguments |= {"a": inputs["g"], "b": inputs["beta"], "null_index": null}
    arguments |= {name: inputs.get(name) for name in ("A_log", "dt_bias")}
    arguments |= {name: getattr(case, name) for name in ("use_beta_sigmoid_in_kernel", "allow_neg_eigval")}
    arguments |= {"state_indices": None if plain else slots[:, 0], "state_v_first": case.state_v_first}
    starts = slots[:, 0].tolist()
    parents = [[t - 1 if style != "tree" else r.randint(-1, t - 1) for t in range(S)] for _ in lengths]
    rows, rows_of_steps = list(range(N)), None
    if style == "slots":
        arguments |= {"state_indices": slots, "write_indices": slots[:, :0] if empty else slots}
        if r.random() < 0.7:
            accepted = [r.randint(1, S) for _ in lengths]
            arguments["num_accepted_tokens"] = torch.tensor(accepted, dtype=index_dtype)
            starts = [slots[n, a - 1].item() for n, a in enumerate(accepted)]
    elif style != "last":
        rows_of_steps = 0 if empty == "intermediate_states" else N + 1, 0 if empty == "steps" else S
        kept = pools["intermediate_states"] = Pool(trial, math.prod(rows_of_steps), device, r)
        kept.rows = kept.rows[:, : kept.size]
        arguments["update_state"] = False
        if empty == "intermediate_states" or r.random() < 0.5:
            kept_at_all = 0 if empty == "intermediate_states" else 0.8
            rows = [row if r.random() < kept_at_all else -1 for row in r.sample(range(N + 1), N)]
            arguments["intermediate_indices"] = torch.tensor(rows, dtype=index_dtype)
        if empty == "parents":  # tokens beyond the columns come after the one before
            parents = [list(range(-1, S - 1)) for _ in lengths]
            arguments["parents"] = torch.empty(N, 0, dtype=index_dtype)
        elif style == "tree":
            arguments["parents"] = torch.tensor(parents, dtype=index_dtype).reshape(N, S)
    for name in ("state_indices", "write_indices", "num_accepted_tokens", "intermediate_indices", "parents"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name].to(device, index_dtype)

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
        elif style == "slots" and not empty and slots[n, t] > null:
            pool.write(slots[n, t].item(), state, n, t + 1)
        elif style in ("rows", "tree") and empty != "steps" and rows[n] >= 0:
            kept.write(rows[n] * S + t, state, n, t + 1)
    if trial.op != "decode_packed":
        arguments |= {name: inputs[name] for name in ("q", "k", "v")}
        if buffered:
            del arguments["state_v_first"]
            return on_pools(trial, Buffered(trial, len(pool.rows), r), arguments, pools, o)
        function = into_memory(trial, flash_qla.decode_gated_delta_rule, inputs["v"], r)
        return on_pools(trial, function, arguments, pools, o, rows_of_steps)
    arguments["mixed_qkv"] = torch.cat([inputs[name].flatten(2) for name in ("q", "k", "v")], -1)
    if case.lengths is None and case.T == 1 and r.random() < 0.5:
        arguments |= {name: arguments[name][:, 0] for name in ("mixed_qkv", "a", "b")}
    function = into_memory(trial, flash_qla.decode_gated_delta_rule_packed, inputs["v"], r)
    return on_pools(trial, function, arguments, pools, o, rows_of_steps)


def into_memory(trial: Trial, function, like: torch.Tensor, r: random.Random):
    """The function, perhaps with `out`: memory at some offset, contiguous or with the heads last."""
    if r.random() < 0.6:
        return function
    offset, heads_last = r.choice((0, *OFFSETS)), r.random() < 0.3

    def run(**arguments):
        out = at_offset(torch.full(like.shape, torch.nan, dtype=like.dtype, device=like.device), offset)
        out = out.movedim(2, -1).contiguous().movedim(-1, 2) if heads_last else out
        return function(**arguments, out=out)

    return run


# A NaN in one token


@dataclasses.dataclass(frozen=True)
class Token:
    """Where a NaN is: in the q, k, v, g or beta of one token and head."""

    tensor: str
    b: int
    t: int  # token, in the rows of b
    n: int  # sequence
    place: int  # place of the token in the sequence
    head: int  # head of H_k for q and k, else of H_v


def draw_token(trial: Trial) -> Token | None:
    """None if there is no token."""
    case, r = trial.case, random.Random(trial.case.seed + 2)
    lengths = lengths_of(case)
    some = [n for n, length in enumerate(lengths) if length]
    if not some:
        return None
    n = r.choice(some)
    place = r.randrange(lengths[n])
    b, t = (n, place) if case.lengths is None else (0, sum(lengths[:n]) + place)
    return Token(trial.nan, b, t, n, place, r.randrange(case.H_k if trial.nan in ("q", "k") else case.H_v))


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
    least = token.place - token.place % run % shared  # the first token that may be another
    begin = token.t - token.place
    end = begin + lengths_of(case)[token.n]
    changed = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if tensor.startswith("states of"):
        for i, (n, tokens) in enumerate(call.states_of[tensor]):
            changed[i, values] = n == token.n and tokens > least
    elif tensor == "h":
        starts = reference.Layout.of(case.B, case.T, call.arguments["cu_seqlens"]).chunk_starts
        own = slice(starts[token.n] + least // CHUNK + 1, starts[token.n] + -(-(end - begin) // CHUNK))
        changed.flatten(0, 1)[own, values] = True
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


def name_of_tensor(name: str) -> str:
    """The name of an output without the names of functions and calls."""
    for prefix in ("low-level ", "autograd's ", "rounded "):
        name = name.removeprefix(prefix)
    return name.removesuffix(" without h")


@reference.one_thread()
def run(trial: Trial, device: str, spoil=None, batches: int = BATCHES) -> dict[str, float]:
    """The errors of a trial over their bars, by output. spoil takes the outputs of a call and returns others, whose
    errors are not measured."""
    with not_measured() if spoil else contextlib.nullcontext():
        return check_trial(trial, device, spoil or dict, batches)


def check_trial(trial: Trial, device: str, spoil, batches: int) -> dict[str, float]:
    case = trial.case
    compute = FP64 if case.dtype == FP64 else FP32
    operands = case.dtype if device == "cuda" else compute

    def make(batch: int) -> tuple[Call, Noise]:
        noise, noise_of_sums = (
            Noise(dtype, device, RUNS, case.seed + 2 * batch + i) for i, dtype in enumerate((operands, compute))
        )
        build = {"chunk": chunk, "prefill": prefill}.get(trial.op, decode)
        return build(trial, device, (noise, noise_of_sums)), noise

    longest = max(lengths_of(case), default=0)
    segments = -(-longest // CHUNK)  # at most, of a chunk each
    call, noise = make(0)
    with poisoned(device):
        first, second = (spoil(call()) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(bits(x), bits(second[name])), f"another run gave other bits of {name}"
    del second
    carried = max((x.norm(dim=(-2, -1)).max().item() for x in call.expected.get("carried", ()) if x.numel()), default=0)
    bars: dict[str, Bars] = {}
    for name, x in first.items():
        tensor = name_of_tensor(name)
        if name in call.same:
            assert torch.equal(x, call.same[name]), f"{name} was written"
        elif tensor == "g_cumsum":
            check_accuracy(tensor, x, call.expected[tensor], dtype=case.dtype, case=f"{name}, {case}")
        elif tensor not in bars:
            bars[tensor] = Bars(tensor, call.expected[tensor], noise, call.expected.get(f"on the way to {tensor}"))
        padding = x[:, covered_tokens(case) :] if HEAD_AXIS.get(tensor, -3) > -3 and x.dim() > 2 else x[:0]
        assert not padding.any(), f"{name} is not zero where no sequence is"
    if trial.nan:
        check_containment(trial, call, first, device, spoil)
    call.expected.clear()  # it is large

    def errors() -> dict[str, float]:
        found = dict.fromkeys(bars, 0.0)
        for name, x in first.items():
            tensor = name_of_tensor(name)
            if tensor in bars:
                found[tensor] = max(found[tensor], bars[tensor].check(x, compute, segments, carried))
        return found

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


# Many trials


@dataclasses.dataclass(frozen=True)
class Result:
    number: int
    op: str = ""
    ratios: dict | None = None  # None where the device has no such op yet
    failure: str | None = None


def run_when_there_is_memory(trial: Trial, given: argparse.Namespace) -> dict[str, float]:
    for _ in range(30 if given.jobs > 1 else 0):  # while others may have it
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return run(trial, given.device)
        torch.cuda.empty_cache()
        time.sleep(1)
    return run(trial, given.device)


def results(given: argparse.Namespace, job: int = 0):
    """The results of a job's trials, up to the first failure, or all with --keep-going."""
    last = math.inf if given.cases is None else given.cases
    for number in itertools.count(job, given.jobs) if given.case is None else (given.case,):
        if given.case is None and (number >= last or time.monotonic() > given.end):
            return
        trial = draw(given.seed, number, given.device)
        try:
            yield Result(number, trial.op, run_when_there_is_memory(trial, given))
        except Exception as error:
            missing = "not supported on the GPU yet" in str(error)
            yield Result(number, trial.op, None, None if missing else f"{trial}\n{type(error).__name__}: {error}")
            if not missing and not given.keep_going:
                return
        if given.device == "cuda" and torch.cuda.memory_reserved() > KEPT_BYTES:  # others need some, too
            torch.cuda.empty_cache()


def work(given: argparse.Namespace, job: int, sender) -> None:
    torch.set_num_threads(1)
    for result in results(given, job):
        sender.send(result)


def results_of_jobs(given: argparse.Namespace):
    """The same of all jobs, each a process, in the order of arrival."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes
    context = multiprocessing.get_context("spawn")
    running, processes = {}, []  # receiver -> process, number it is at
    try:
        for job in range(given.jobs):
            receiver, sender = context.Pipe(duplex=False)
            processes.append(context.Process(target=work, args=(given, job, sender), daemon=True))
            processes[-1].start()
            sender.close()
            running[receiver] = processes[-1], job
        while running:
            for receiver in multiprocessing.connection.wait(list(running)):
                process, number = running.pop(receiver)
                try:
                    result = receiver.recv()
                except EOFError:
                    process.join()
                    if process.exitcode:
                        trial = draw(given.seed, number, given.device)
                        yield Result(number, failure=f"{trial}\nits process ended with {process.exitcode}")
                    continue
                running[receiver] = process, result.number + given.jobs
                yield result
    finally:
        for process in processes:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, help="at most so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="after a failure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this one only, as a failure says it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", metavar="FILE", help="add the machine and the counts to this file")
    given = parser.parse_args()
    begin = time.monotonic()
    given.end = begin + given.seconds
    worst, count, missing, failures = {}, Counter(), Counter(), []
    for result in results(given) if given.jobs == 1 or given.case is not None else results_of_jobs(given):
        if result.failure is not None:
            again = f"python tests/fuzz.py --seed {given.seed} --case {result.number} --device {given.device}"
            print(result.failure, again, sep="\n", flush=True)
            failures.append(again)
            if given.keep_going:
                continue
            break
        (missing if result.ratios is None else count)[result.op] += 1
        for name, ratio in (result.ratios or {}).items():
            worst[name] = max(worst.get(name, (0.0, 0)), (ratio, result.number))
    seconds = time.monotonic() - begin
    if given.record:
        cases = f" --cases {given.cases}" if given.cases else ""
        what = f"`tests/fuzz.py --seed {given.seed}{cases}`"
        record.append(given.record, what, count.total(), missing.total(), failures)
    if failures and not given.keep_going:
        return 1
    of = "" if given.cases is None or given.case is not None else f" of {given.cases}"
    failed = f" and {len(failures)} that failed" if failures else ""
    print(f"{count.total()}{of} cases in {seconds:.0f} s right{failed}: {dict(sorted(count.items()))}")
    if missing:
        print(f"not run, as {given.device} has no such op yet: {dict(sorted(missing.items()))}")
    for name, (ratio, number) in sorted(worst.items()):
        print(f"{name:30} at most {ratio:.2f} of its bar, in case {number}")
    return min(len(failures), 1)


if __name__ == "__main__":
    sys.exit(main())
