"""Time of the activations of gate and beta on one GPU: flash_qla's calls with raw bf16 tensors, beside the same calls
with activated gates and betas, and beside calls whose gates torch computes.

    python benchmarks/activations.py --out FILE.json

  ready    fp32 gates and betas, the numbers that the activations inside compute
  inside   raw bf16 g and beta, A_log and dt_bias in fp32
  torch    raw bf16 g and beta, which each call activates in torch; not for the low-level functions

The benchmark times the op, the two low-level functions and a training step, as medians over replays of CUDA graphs. q
and k are normalised, and q, k and v are slices of one tensor, as in forward.py. The three take turns in a changing
order, because at the power limit a call is faster after a call that took less power.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from common import (
    INSIDE,
    add_timing_arguments,
    argument_parser,
    geometric_mean,
    head_dims_field,
    heads_of,
    make_inputs,
    parse_heads,
    parse_lengths,
    qkv_field,
    raw_tensors,
    run,
    time_graph,
)

from flash_qla import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

ROUNDS = 6


def activated(raw: dict) -> dict:
    g = -raw["A_log"].exp() * F.softplus(raw["g"].float() + raw["dt_bias"])
    return {"g": g, "beta": raw["beta"].float().sigmoid()}


def backward_call(arguments: dict, output_gradients: dict, g_raw: dict):
    g_cumsum, A, *_ = chunk_gated_delta_rule_fwd(**arguments)
    saved = arguments | {"g": g_cumsum, "A": A} | g_raw
    return lambda: chunk_gated_delta_rule_bwd(**saved, **output_gradients)


def step_call(arguments: dict, output_gradients: dict, activate: bool):
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    leaves = {name: arguments[name].detach().requires_grad_() for name in names if name in arguments}
    gradients = tuple(output_gradients.values())

    def call():
        given = arguments | leaves
        if activate:
            given = without_parameters(given | activated(given))
        outputs = chunk_gated_delta_rule(**given, output_final_state=True)
        return torch.autograd.grad(outputs, list(leaves.values()), gradients)

    return call


def without_parameters(arguments: dict) -> dict:
    return {name: x for name, x in arguments.items() if name not in ("A_log", "dt_bias")}


def calls_of(H_k: int, H_v: int, lengths: list[int], head_dims: tuple[int, int]) -> dict[str, dict]:
    """Name of the timed function -> ready, inside or torch -> the call."""
    common, output_gradients = make_inputs(H_k, H_v, lengths, head_dims, gradients=True)
    common = {name: x for name, x in common.items() if name not in ("g", "beta")}
    raw = raw_tensors(sum(lengths), H_v)
    ready, inside = common | activated(raw), common | raw | INSIDE
    in_torch = common | raw

    def op(arguments: dict):
        return lambda: chunk_gated_delta_rule(**arguments, output_final_state=True)

    return {
        "op": {
            "ready": op(ready),
            "inside": op(inside),
            "torch": lambda: op(without_parameters(in_torch | activated(in_torch)))(),
        },
        "fwd": {
            "ready": lambda: chunk_gated_delta_rule_fwd(**ready),
            "inside": lambda: chunk_gated_delta_rule_fwd(**inside),
        },
        "bwd": {
            "ready": backward_call(ready, output_gradients, {}),
            "inside": backward_call(inside, output_gradients, {"g_raw": raw["g"]}),
        },
        "step": {
            "ready": step_call(ready, output_gradients, False),
            "inside": step_call(inside, output_gradients, False),
            "torch": step_call(in_torch, output_gradients, True),
        },
    }


def median_ms(calls: dict, with_gradients: bool, options) -> dict[str, float]:
    times = {way: [] for way in calls}
    orders = itertools.cycle(itertools.permutations(calls))
    with torch.set_grad_enabled(with_gradients):
        for order in itertools.islice(orders, ROUNDS):  # all orders of three
            for way in order:
                times[way] += time_graph(calls[way], options.samples, options.sample_ms)
    return {way: statistics.median(x) for way, x in times.items()}


def measure(package: str, options) -> Iterator[dict]:
    for H_k, H_v in parse_heads(options.heads):
        for text in options.sequences.split(","):
            for what, calls in calls_of(H_k, H_v, parse_lengths(text), options.head_dims).items():
                cell = {"heads": f"{H_k}x{H_v}", "sequences": text, **head_dims_field(options.head_dims)}
                cell |= {**qkv_field(), "timed": what, "ms": median_ms(calls, what == "step", options)}
                times = ", ".join(f"{way} {x:.4f} ms" for way, x in cell["ms"].items())
                print(f"{heads_of(cell):>7} {text:>10} {what:>5}: {times}", flush=True)
                yield cell


def report(cells: list[dict]) -> None:
    ratios: dict[str, list[float]] = {}
    for cell in cells:
        ratios.setdefault(cell["timed"], []).append(cell["ms"]["inside"] / cell["ms"]["ready"])
    for what, found in ratios.items():
        print(
            f"{what:>5}: inside over ready {geometric_mean(found):.3f} in the geometric mean, {max(found):.3f} at most"
        )


def make_parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__.splitlines()[0], packages="flash_qla")
    add_timing_arguments(parser, heads="2x8,16x32,16x64", sequences="1x2048,1x8192,1024x8,4096x8,ragged32", samples=7)
    return parser


if __name__ == "__main__":
    run(make_parser(), measure, report)
