"""Time of the prefill with a pool of states, on one GPU.

    python benchmarks/prefill.py --out FILE.json

  op           chunk_gated_delta_rule on gathered states, without writing its final states back
  gathered     torch gathers the states from the pool, the op, torch writes its final states back
  pool         prefill_gated_delta_rule
  checkpoints  the same, with the states after every 256 tokens kept in slots of the pool
  blocks       the same after every 528 tokens, no multiple of 64: chunks begin anew there, and no sequence is cut
  invariant    prefill_gated_delta_rule with batch_invariant
  resumable    invariant and checkpoints: the state is also rounded to the pool's dtype at checkpoints

The pool has twice as many slots as sequences, in fp32 or bf16; q and k are normalised. Times are medians over replays
of CUDA graphs. The calls take turns, so that the clocks are the same for all. The cost of checkpoints is also a rate:
the bytes that they write over the time that they add.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator

import common
import torch
from common import (
    add_timing_arguments,
    argument_parser,
    geometric_mean,
    head_dims_field,
    heads_of,
    make_inputs,
    parse_heads,
    parse_lengths,
    run,
    time_graph,
)

from flash_qla import chunk_gated_delta_rule, prefill_gated_delta_rule

ROUNDS = 3
CHECKPOINT_TOKENS = 256
BLOCK_TOKENS = 528  # a block of vLLM's
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def calls_of(
    H_k: int, H_v: int, lengths: list[int], head_dims: tuple[int, int], state_dtype: torch.dtype
) -> dict[str, Callable]:
    inputs = make_inputs(H_k, H_v, lengths, head_dims)
    states = inputs.pop("initial_state").mT.to(state_dtype).contiguous()
    slots = torch.randperm(2 * len(lengths), generator=torch.Generator().manual_seed(0))[: len(lengths)]
    slots = slots.to(common.DEVICE)
    # The slots of the checkpoints come after these.
    kept = sum(length // CHECKPOINT_TOKENS for length in lengths)
    pool = torch.zeros((2 * len(lengths) + kept, *states.shape[1:]), dtype=state_dtype, device=common.DEVICE)
    pool[slots] = states

    def checkpoints(every: int) -> dict:
        """Arguments that keep them: a row for each sequence, as long as the longest needs."""
        blocks = [length // every for length in lengths]
        table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
        table[torch.arange(max(blocks)) < torch.tensor(blocks)[:, None]] = torch.arange(
            2 * len(lengths), 2 * len(lengths) + sum(blocks), dtype=torch.int32
        )
        return {"checkpoint_every": every, "checkpoint_indices": table.to(common.DEVICE)}

    def op(states: torch.Tensor):
        options = {"initial_state": states, "state_v_first": True, "state_dtype": state_dtype}
        return chunk_gated_delta_rule(**inputs, **options, output_final_state=True)

    def gathered():
        o, final_states = op(pool[slots])
        pool[slots] = final_states
        return o

    def prefill(**options):
        return lambda: prefill_gated_delta_rule(**inputs, state_pool=pool, state_indices=slots, **options)

    calls = {"op": lambda: op(states)[0], "gathered": gathered, "pool": prefill()}
    if kept:
        calls["checkpoints"] = prefill(**checkpoints(CHECKPOINT_TOKENS))
        calls["blocks"] = prefill(**checkpoints(BLOCK_TOKENS))
    calls["invariant"] = prefill(batch_invariant=True)
    if kept:
        calls["resumable"] = prefill(batch_invariant=True, **checkpoints(CHECKPOINT_TOKENS))
    return calls


@torch.no_grad()
def median_ms(calls: dict[str, Callable], options) -> dict[str, float]:
    times = {way: [] for way in calls}
    for _ in range(ROUNDS):
        for way, call in calls.items():
            times[way] += time_graph(call, options.samples, options.sample_ms)
    return {way: statistics.median(x) for way, x in times.items()}


def cell_of(H_k: int, H_v: int, text: str, state_dtype: str, options) -> dict:
    lengths, dtype = parse_lengths(text), STATE_DTYPES[state_dtype]
    ms = median_ms(calls_of(H_k, H_v, lengths, options.head_dims, dtype), options)
    checkpoints = sum(length // CHECKPOINT_TOKENS for length in lengths)
    return {
        "heads": f"{H_k}x{H_v}",
        **head_dims_field(options.head_dims),
        "sequences": text,
        "state_dtype": state_dtype,
        "ms": ms,
        "checkpoint_bytes": checkpoints * H_v * math.prod(options.head_dims) * dtype.itemsize,
    }


def line_of(cell: dict) -> str:
    ms = cell["ms"]
    line = f"{heads_of(cell):>7} {cell['sequences']:>10} {cell['state_dtype']}: op {ms['op']:.4f} ms; over it "
    line += ", ".join(f"{way} {x / ms['op']:.3f}" for way, x in ms.items() if way != "op")
    if (added := ms.get("checkpoints", 0) - ms["pool"]) > 0:
        line += f"; checkpoints at {cell['checkpoint_bytes'] / added / 1e6:.0f} GB/s"
    return line


def measure(package: str, options) -> Iterator[dict]:
    for H_k, H_v in parse_heads(options.heads):
        for text in options.sequences.split(","):
            for state_dtype in options.state_dtypes.split(","):
                cell = cell_of(H_k, H_v, text, state_dtype, options)
                print(line_of(cell), flush=True)
                yield cell


def report(cells: list[dict]) -> None:
    for way in ("gathered", "pool", "invariant"):
        ratios = [cell["ms"][way] / cell["ms"]["op"] for cell in cells]
        print(f"{way} over the op: {geometric_mean(ratios):.3f} in the geometric mean, {max(ratios):.3f} at most")


def make_parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__.splitlines()[0], packages="flash_qla")
    parser.add_argument("--state-dtypes", default="fp32,bf16")
    sequences = "1x512,1x8192,4096x8,1024x8,256x32,ragged32"
    add_timing_arguments(parser, heads="2x8,16x32", sequences=sequences, samples=7)
    return parser


if __name__ == "__main__":
    run(make_parser(), measure, report)
