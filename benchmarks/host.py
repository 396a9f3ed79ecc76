"""Host time of flash_qla: CPU time of a call, of the import, and of the first call of a process.

    python benchmarks/host.py --out FILE.json
    python benchmarks/host.py --device cpu
    python benchmarks/host.py --heads 2x8 --tokens 512

A call, or a training step (forward and torch.autograd.grad, l2norm inside): wall time of the calling thread, median
over batches. A batch is several calls in a row without synchronisation. The sequence is so short, and the calls are so
few, that the GPU's queue never fills. For scale, torch.add on four elements, and torch's own step of x + 1. Arguments:
one packed bf16 sequence, an initial state, the final state returned.

Import and first call: a new process each time, median. The import is timed after torch's import. The first call is
timed after a kernel of torch has run and the inputs exist, up to the next synchronization, so the start of CUDA does
not count. On the CPU the inputs have no tokens and no sequences, so that only the code around the arithmetic is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from common import add_head_dims_argument, argument_parser, parse_heads, run, spread

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
            found = {name: time_calls(call, options.device, options.batches) for name, call in calls.items()}
        yield from ({"mode": mode.__name__, "call": name, **times} for name, times in found.items())
    for name, step in make_steps(make_arguments(options)).items():
        yield {"mode": "step", "call": name, **time_calls(step, options.device, options.batches)}


def measure_first_calls(options) -> dict[str, float]:
    import flash_qla

    arguments = make_arguments(options)
    times = []
    with torch.no_grad():
        for _ in range(2):
            synchronize(options.device)
            start = time.perf_counter()
            flash_qla.chunk_gated_delta_rule(**arguments)
            synchronize(options.device)
            times.append((time.perf_counter() - start) * 1e3)
    return {"first_call_ms": times[0], "second_call_ms": times[1]}


IMPORT = """
import json, time, torch
start = time.perf_counter()
import flash_qla
print(json.dumps({"import_ms": (time.perf_counter() - start) * 1e3}))
"""


def in_process(*arguments: str) -> dict:
    # The process runs in this folder, because `-c` imports from the current one, and the checkout's flash_qla/ may hold
    # no library.
    folder = Path(__file__).parent
    found = subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE, cwd=folder).stdout
    return json.loads(found.splitlines()[-1])


def measure(package: str, options) -> Iterator[dict]:
    for cell in measure_calls(options):
        print(line_of(cell), flush=True)
        yield cell
    dims = "{}x{}".format(*options.head_dims)
    arguments = ["--device", options.device, "--heads", options.heads, "--head-dims", dims, "--tokens", options.tokens]
    first_calls = [str(Path(__file__).resolve()), *map(str, arguments), "--first-calls"]
    runs = [in_process("-c", IMPORT) | in_process(*first_calls) for _ in range(options.processes)]
    for name in runs[0] if runs else ():
        times = sorted(run[name] for run in runs)
        cell = {"mode": "process", "call": name, **spread(times)}
        print(line_of(cell), flush=True)
        yield cell


def line_of(cell: dict) -> str:
    unit = "us" if "us" in cell else "ms"
    median, least, most = (cell[unit + suffix] for suffix in ("", "_min", "_max"))
    return f"{cell['mode']:>14}  {cell['call']:<48} {median:7.2f} {unit} [{least:.2f}, {most:.2f}]"


def make_parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__.splitlines()[0], packages="flash_qla")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--heads", default="16x32", help="query/key x value heads")
    add_head_dims_argument(parser)
    parser.add_argument("--tokens", type=int, default=64, help="length of the sequence, on the GPU")
    parser.add_argument("--batches", type=int, default=101)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--first-calls", action="store_true", help="time this process's first two calls")
    return parser


if __name__ == "__main__":
    options = make_parser().parse_args()
    if options.first_calls:
        print(json.dumps(measure_first_calls(options)))
    else:
        run(make_parser(), measure, lambda cells: None)
