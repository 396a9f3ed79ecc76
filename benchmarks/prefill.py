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

FlashInfer's function has `gathered`, and `pool` if it has state_indices.

The pool has twice as many slots as sequences, in fp32 or bf16; q and k are normalised. q, k and v are slices of one
tensor, as in forward.py, and FlashInfer's timed calls copy them, because its documentation asks for contiguous ones.
FlashInfer's states are in fp32.
Both packages are told the length of the longest sequence. Times are medians over replays of CUDA graphs. The calls take
turns, so that the clocks are the same for all.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import common
import torch
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
        self.inputs = common.make_inputs(self.H_k, self.H_v, self.lengths, self.head_dims)
        self.states = self.inputs.pop("initial_state").mT.to(self.state_dtype).contiguous()
        slots = torch.randperm(2 * N, generator=torch.Generator().manual_seed(0))[:N]
        self.slots = slots.to(common.DEVICE)
        # The slots of the checkpoints come after these.
        self.checkpoint_count = sum(length // CHECKPOINT_TOKENS for length in self.lengths)
        shape = (2 * N + self.checkpoint_count, *self.states.shape[1:])
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
    if case.checkpoint_count:
        calls["checkpoints"] = prefill(**checkpoints(CHECKPOINT_TOKENS))
        calls["blocks"] = prefill(**checkpoints(BLOCK_TOKENS))
    calls["invariant"] = prefill(batch_invariant=True)
    if case.checkpoint_count:
        calls["resumable"] = prefill(batch_invariant=True, **checkpoints(CHECKPOINT_TOKENS))
    return calls


def flashinfer_calls(case: Case) -> dict[str, Callable]:
    _, function = flashinfer_function()
    arguments = flashinfer_arguments(case.inputs)
    final_states = torch.empty_like(case.states)
    in_pool = {"initial_state": case.pool, "output_state": case.pool, "state_indices": case.slots.int()}

    def gathered(states: torch.Tensor):
        return function(**common.contiguous(arguments), initial_state=states, output_state=final_states)

    calls = {"gathered": lambda: case.gathered(gathered)[None]}
    if "state_indices" in inspect.signature(function).parameters:
        calls["pool"] = lambda: function(**common.contiguous(arguments), **in_pool)[0][None]
    return calls


CALLS = {"flash_qla": flash_qla_calls, "flashinfer": flashinfer_calls}


@torch.no_grad()
def median_ms(calls: dict[str, Callable], options) -> dict[str, float]:
    times = {way: [] for way in calls}
    for _ in range(ROUNDS):
        for way, call in calls.items():
            times[way] += common.time_graph(call, options.samples, options.sample_ms)
    return {way: statistics.median(x) for way, x in times.items()}


def cell_of(package: str, H_k: int, H_v: int, text: str, state_dtype: str, options) -> dict:
    lengths, dtype = common.parse_lengths(text), STATE_DTYPES[state_dtype]
    cell = {
        "package": package,
        "heads": f"{H_k}x{H_v}",
        **common.head_dims_field(options.head_dims),
        "sequences": text,
        "state_dtype": state_dtype,
        **common.qkv_field(),
    }
    try:
        cell["ms"] = median_ms(CALLS[package](Case(H_k, H_v, lengths, options.head_dims, dtype)), options)
    except Exception as error:
        if package == "flash_qla":
            raise
        cell["error"] = f"{type(error).__name__}: {error}"[:500]
    torch.cuda.synchronize()  # raises, and so ends this process, if an error has left CUDA unusable
    return cell


def measure(package: str, options) -> Iterator[dict]:
    for H_k, H_v in common.parse_heads(options.heads):
        for text in options.sequences.split(","):
            for state_dtype in options.state_dtypes.split(","):
                if package == "flashinfer" and state_dtype != "fp32":
                    continue
                cell = cell_of(package, H_k, H_v, text, state_dtype, options)
                times = cell.get("error") or ", ".join(f"{way} {ms:.4f} ms" for way, ms in cell["ms"].items())
                print(f"{package:>10} {common.heads_of(cell):>7} {text:>10} {state_dtype}: {times}", flush=True)
                yield cell


def report(cells: list[dict]) -> None:
    """prefill_gated_delta_rule compared with all other ways."""
    ways = []
    for cell in cells:
        for way, ms in cell.get("ms", {}).items():
            ours = (cell["package"], way) == ("flash_qla", "pool")
            ways.append(cell | {"package": "flash_qla" if ours else f"{cell['package']} {way}", "ms": ms})
    common.print_comparison(ways, "ms", lambda cell: (common.heads_of(cell), cell["sequences"], cell["state_dtype"]))


def make_parser() -> argparse.ArgumentParser:
    parser = common.argument_parser(__doc__.splitlines()[0], packages="flash_qla")
    parser.add_argument("--state-dtypes", default="fp32,bf16")
    sequences = "1x512,1x8192,4096x8,1024x8,256x32,ragged32"
    common.add_timing_arguments(parser, heads="2x8,16x32", sequences=sequences, samples=7)
    return parser


if __name__ == "__main__":
    common.run(make_parser(), measure, report)
