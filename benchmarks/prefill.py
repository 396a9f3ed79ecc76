"""Time of the prefill with a pool of states, on one GPU.

    python benchmarks/prefill.py --out FILE.json
    python benchmarks/prefill.py --packages flash_qla,flashinfer --out FILE.json

  op           chunk_gated_delta_rule on gathered states, without writing its final states back
  gathered     torch gathers the states from the pool, the op, torch writes its final states back
  pool         prefill_gated_delta_rule
  checkpoints  the same, with the states after every 256 tokens kept in slots of the pool
  blocks       the same after every 528 tokens, no multiple of 64: chunks begin anew there, and no sequence is cut
  invariant    prefill_gated_delta_rule with batch_invariant
  resumable    invariant and checkpoints: the state is also rounded to the pool's dtype at checkpoints

FlashInfer's function has `gathered`, and `pool` with its state_indices.

The pool has twice as many slots as sequences, in fp32 or bf16; q and k are normalised. q, k and v are slices of one
tensor, as in forward.py, and FlashInfer's timed calls copy them, because its documentation asks for contiguous ones.
Both packages are told the length of the longest sequence. Times are medians over replays of CUDA graphs. The calls take
turns, so that the clocks are the same for all. The cost of checkpoints is also a rate: the bytes that they write over
the time that they add.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import common
import torch
from common import (
    add_timing_arguments,
    argument_parser,
    contiguous,
    geometric_mean,
    head_dims_field,
    heads_of,
    make_inputs,
    parse_heads,
    parse_lengths,
    qkv_field,
    run,
    time_graph,
)
from forward import flashinfer_arguments, flashinfer_function

ROUNDS = 3
CHECKPOINT_TOKENS = 256
BLOCK_TOKENS = 528  # a block of vLLM's
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Case:
    """Inputs without states, the sequences' states [N, H_v, V, K], and a pool that has them at `slots`."""

    H_k: int
    H_v: int
    lengths: list[int]
    head_dims: tuple[int, int]
    state_dtype: torch.dtype

    def __post_init__(self):
        N = len(self.lengths)
        self.inputs = make_inputs(self.H_k, self.H_v, self.lengths, self.head_dims)
        self.states = self.inputs.pop("initial_state").mT.to(self.state_dtype).contiguous()
        slots = torch.randperm(2 * N, generator=torch.Generator().manual_seed(0))[:N]
        self.slots = slots.to(common.DEVICE)
        # The slots of the checkpoints come after these.
        self.kept = sum(length // CHECKPOINT_TOKENS for length in self.lengths)
        shape = (2 * N + self.kept, *self.states.shape[1:])
        self.pool = torch.zeros(shape, dtype=self.state_dtype, device=common.DEVICE)
        self.pool[self.slots] = self.states

    def gathered(self, function: Callable) -> torch.Tensor:
        """o, with function(states) -> (o, final states) on states that torch gathers and puts back."""
        o, self.pool[self.slots] = function(self.pool[self.slots])
        return o


def flash_qla_calls(case: Case) -> dict[str, Callable]:
    from flash_qla import chunk_gated_delta_rule, prefill_gated_delta_rule

    lengths, pool, slots = case.lengths, case.pool, case.slots
    inputs = case.inputs | {"max_seqlen": max(lengths)}

    def checkpoints(every: int) -> dict:
        """Arguments that keep them: a row for each sequence, as long as the longest needs."""
        blocks = [length // every for length in lengths]
        table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
        table[torch.arange(max(blocks)) < torch.tensor(blocks)[:, None]] = torch.arange(
            2 * len(lengths), 2 * len(lengths) + sum(blocks), dtype=torch.int32
        )
        return {"checkpoint_every": every, "checkpoint_indices": table.to(common.DEVICE)}

    def op(states: torch.Tensor):
        options = {"initial_state": states, "state_v_first": True, "state_dtype": case.state_dtype}
        return chunk_gated_delta_rule(**inputs, **options, output_final_state=True)

    def prefill(**options):
        return lambda: prefill_gated_delta_rule(**inputs, state_pool=pool, state_indices=slots, **options)

    calls = {"op": lambda: op(case.states)[0], "gathered": lambda: case.gathered(op), "pool": prefill()}
    if case.kept:
        calls["checkpoints"] = prefill(**checkpoints(CHECKPOINT_TOKENS))
        calls["blocks"] = prefill(**checkpoints(BLOCK_TOKENS))
    calls["invariant"] = prefill(batch_invariant=True)
    if case.kept:
        calls["resumable"] = prefill(batch_invariant=True, **checkpoints(CHECKPOINT_TOKENS))
    return calls


def flashinfer_calls(case: Case) -> dict[str, Callable]:
    _, function = flashinfer_function()
    arguments = flashinfer_arguments(case.inputs)
    final_states = torch.empty_like(case.states)
    in_pool = {"initial_state": case.pool, "output_state": case.pool, "state_indices": case.slots.int()}

    def gathered(states: torch.Tensor):
        return function(**contiguous(arguments), initial_state=states, output_state=final_states)

    return {
        "gathered": lambda: case.gathered(gathered)[None],
        "pool": lambda: function(**contiguous(arguments), **in_pool)[0][None],
    }


CALLS = {"flash_qla": flash_qla_calls, "flashinfer": flashinfer_calls}


@torch.no_grad()
def median_ms(calls: dict[str, Callable], options) -> dict[str, float]:
    times = {way: [] for way in calls}
    for _ in range(ROUNDS):
        for way, call in calls.items():
            times[way] += time_graph(call, options.samples, options.sample_ms)
    return {way: statistics.median(x) for way, x in times.items()}


def cell_of(package: str, H_k: int, H_v: int, text: str, state_dtype: str, options) -> dict:
    lengths, dtype = parse_lengths(text), STATE_DTYPES[state_dtype]
    ms = median_ms(CALLS[package](Case(H_k, H_v, lengths, options.head_dims, dtype)), options)
    checkpoints = sum(length // CHECKPOINT_TOKENS for length in lengths)
    return {
        "package": package,
        "heads": f"{H_k}x{H_v}",
        **head_dims_field(options.head_dims),
        "sequences": text,
        "state_dtype": state_dtype,
        **qkv_field(),
        "ms": ms,
        "checkpoint_bytes": checkpoints * H_v * math.prod(options.head_dims) * dtype.itemsize,
    }


def line_of(cell: dict) -> str:
    ms = cell["ms"]
    line = f"{cell['package']:>10} {heads_of(cell):>7} {cell['sequences']:>10} {cell['state_dtype']}: "
    line += f"pool {ms['pool']:.4f} ms; over it "
    line += ", ".join(f"{way} {x / ms['pool']:.3f}" for way, x in ms.items() if way != "pool")
    if (added := ms.get("checkpoints", 0) - ms["pool"]) > 0:
        line += f"; checkpoints at {cell['checkpoint_bytes'] / added / 1e6:.0f} GB/s"
    return line


def measure(package: str, options) -> Iterator[dict]:
    for H_k, H_v in parse_heads(options.heads):
        for text in options.sequences.split(","):
            for state_dtype in options.state_dtypes.split(","):
                cell = cell_of(package, H_k, H_v, text, state_dtype, options)
                print(line_of(cell), flush=True)
                yield cell


def report(cells: list[dict]) -> None:
    ours = {key_of(cell): cell["ms"] for cell in cells if cell["package"] == "flash_qla"}
    for way in ("gathered", "pool", "invariant"):
        if ratios := [ms[way] / ms["op"] for ms in ours.values()]:
            print(f"{way} over the op: {geometric_mean(ratios):.3f} in the geometric mean, {max(ratios):.3f} at most")
    theirs = {key_of(cell): cell["ms"] for cell in cells if cell["package"] == "flashinfer"}
    for way in ("gathered", "pool"):
        if ratios := [ms[way] / ours[key]["pool"] for key, ms in theirs.items() if key in ours]:
            print(f"FlashInfer's {way} over our pool: {geometric_mean(ratios):.3f}, {min(ratios):.3f} at least")


def key_of(cell: dict) -> tuple:
    return heads_of(cell), cell["sequences"], cell["state_dtype"]


def make_parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__.splitlines()[0], packages="flash_qla")
    parser.add_argument("--state-dtypes", default="fp32,bf16")
    sequences = "1x512,1x8192,4096x8,1024x8,256x32,ragged32"
    add_timing_arguments(parser, heads="2x8,16x32", sequences=sequences, samples=7)
    return parser


if __name__ == "__main__":
    run(make_parser(), measure, report)
