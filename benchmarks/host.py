"""Host time of flash_qla: CPU time of a call.

    python benchmarks/host.py --out FILE.json
    python benchmarks/host.py --device cpu
    python benchmarks/host.py --heads 2x8 --tokens 512

A call, or a training step (forward and torch.autograd.grad, l2norm inside): wall time of the calling thread, median
over batches. A batch is several calls in a row without synchronisation. The sequence is so short, and the calls are so
few, that the GPU's queue never fills. For scale, torch.add on four elements, and torch's own step of x + 1. Arguments:
one packed bf16 sequence, an initial state, the final state returned.
On the CPU the inputs have no tokens and no sequences, so that only the code around the arithmetic is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from common import add_head_dims_argument, argument_parser, parse_heads, run

# Calls in a batch. The GPU's queue holds about a thousand launches; a launch waits if the queue is full.
CALLS = 50


def make_arguments(options) -> dict:
    """Arguments of chunk_gated_delta_rule, which chunk_gated_delta_rule_fwd takes too."""
    [(H_k, H_v)] = parse_heads(options.heads)
    K, V = options.head_dims
    lengths = [options.tokens] if options.device == "cuda" else []
    T, N = sum(lengths), len(lengths)

    def rand(*shape, dtype=torch.bfloat16):
        return torch.rand(shape, device=options.device).to(dtype)

    return {
        "q": rand(1, T, H_k, K) * K**-0.5,
        "k": rand(1, T, H_k, K) * K**-0.5,
        "v": rand(1, T, H_v, V),
        "g": -rand(1, T, H_v, dtype=torch.float32),
        "beta": rand(1, T, H_v, dtype=torch.float32),
        "initial_state": rand(N, H_v, K, V, dtype=torch.float32),
        "cu_seqlens": torch.tensor([0, *lengths], device=options.device).cumsum(0),
        "output_final_state": True,
    }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_calls(call: Callable, device: str, batches: int) -> dict[str, float]:
    """Microseconds a call, not counting what the GPU does after it."""
    times = []
    for _ in range(batches + 1):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    times = sorted(times[1:])  # the first batch warms up
    return {"us": statistics.median(times), "us_min": times[0], "us_max": times[-1]}


def make_calls(arguments: dict) -> dict[str, Callable]:
    import flash_qla

    functions = {
        "torch.ops chunk_gated_delta_rule": torch.ops.flash_qla.chunk_gated_delta_rule,
        "torch.ops chunk_gated_delta_rule_fwd": torch.ops.flash_qla.chunk_gated_delta_rule_fwd,
        "flash_qla.chunk_gated_delta_rule": flash_qla.chunk_gated_delta_rule,
    }
    x = torch.ones(4, device=arguments["q"].device)
    calls = {"torch.add": lambda: torch.add(x, x)}
    tensors = [arguments.pop(name) for name in ("q", "k", "v", "g", "beta")]
    for name, function in functions.items():
        calls[name] = lambda function=function: function(*tensors, **arguments)
        calls[f"{name}, l2norm"] = lambda function=function: function(
            *tensors, **arguments, use_qk_l2norm_in_kernel=True
        )
    return calls


def make_steps(arguments: dict) -> dict[str, Callable]:
    """Training steps: the gradients of all inputs from the gradient of o."""
    import flash_qla

    names = ("q", "k", "v", "g", "beta")
    inputs = [arguments[name].requires_grad_() for name in names]
    grad_o = torch.rand_like(arguments["v"])
    x = torch.ones(4, device=grad_o.device)
    leaf = x.clone().requires_grad_()

    def step():
        o, _ = flash_qla.chunk_gated_delta_rule(
            *inputs, cu_seqlens=arguments["cu_seqlens"], use_qk_l2norm_in_kernel=True
        )
        torch.autograd.grad(o, inputs, grad_o)

    return {
        "step of x + 1": lambda: torch.autograd.grad(leaf + 1, leaf, x),
        "step of flash_qla.chunk_gated_delta_rule, l2norm": step,
    }


def measure_calls(options) -> Iterator[dict]:
    # Outside of inference_mode the call goes through autograd, even without work for it.
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            calls = make_calls(make_arguments(options))
            times_of_calls = {name: time_calls(call, options.device, options.batches) for name, call in calls.items()}
        yield from ({"mode": mode.__name__, "call": name, **times} for name, times in times_of_calls.items())
    for name, step in make_steps(make_arguments(options)).items():
        yield {"mode": "step", "call": name, **time_calls(step, options.device, options.batches)}


def measure(package: str, options) -> Iterator[dict]:
    for cell in measure_calls(options):
        print(line_of(cell), flush=True)
        yield cell


def line_of(cell: dict) -> str:
    return f"{cell['mode']:>14}  {cell['call']:<48} {cell['us']:7.2f} us [{cell['us_min']:.2f}, {cell['us_max']:.2f}]"


def make_parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__.splitlines()[0], packages="flash_qla")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--heads", default="16x32", help="query/key x value heads")
    add_head_dims_argument(parser)
    parser.add_argument("--tokens", type=int, default=64, help="length of the sequence, on the GPU")
    parser.add_argument("--batches", type=int, default=101)
    return parser


if __name__ == "__main__":
    run(make_parser(), measure, lambda cells: None)
