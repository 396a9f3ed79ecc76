"""A decode step of vLLM with its own Gated DeltaNet kernels and with flash_qla's: GPU time by kernel, and wall time.

    python benchmarks/decode_steps.py --out FILE.json
    python benchmarks/decode_steps.py --requests 1,8,64 --layers 8

The model and its options are those of generation.py; decoding is in CUDA graphs. Two processes load it, one for each
kind of kernels, and take turns, so that the card is in the same state for both. A step's time comes from two
generations from the same prompts, one FEW and one MANY tokens long: their difference, over the difference of the
tokens. What comes before decoding cancels. Wall times are taken in samples, GPU times by torch's profiler.

A cell has the GPU time of each kernel in a step. Those of the Gated DeltaNet layers, between their projections, are
known by their names (GDN).
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import time
from collections import Counter

import generation
import torch
from common import write_results

FEW, MANY = 16, 48  # tokens
PROMPT_TOKENS = 32
# vLLM's layers also copy slices of bf16 elements, which no other part of the model does.
GDN = re.compile(
    r"conv1d|delta_rule|gdn|qkvzba|decode_region|layer_norm_fwd|rms_norm_gated"
    r"|elementwise_kernel<128, 4, .*direct_copy_kernel.*c10::BFloat16",
    re.IGNORECASE,
)


def kernel_times(engine, prompts: list[list[int]], tokens: int) -> Counter:
    """Kernel -> microseconds of a generation."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        engine.generate(prompts, tokens)
        torch.cuda.synchronize()
    times = Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time_total
    return times


def profiled_step(engine, prompts: list[list[int]]) -> dict[str, float]:
    """Kernel -> microseconds of a step, the longest first."""
    few, many = (kernel_times(engine, prompts, tokens) for tokens in (FEW, MANY))
    step = {name: (many[name] - few[name]) / (MANY - FEW) for name in many}
    return {name: round(us, 3) for name, us in sorted(step.items(), key=lambda x: -x[1]) if us > 0.05}


def timed_step(engine, prompts: list[list[int]]) -> float:
    """Seconds of a step."""
    seconds = []
    for tokens in (FEW, MANY):
        start = time.perf_counter()
        engine.generate(prompts, tokens)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / (MANY - FEW)


def serve(connection, options: argparse.Namespace, ours: bool) -> None:
    """An engine's process: answers (function, number of requests) until it is ended."""
    from generation_vllm import Engine

    engine = Engine(options, "graphs", ours)
    connection.send(engine.version)
    functions = {"time": timed_step, "profile": profiled_step}
    while True:
        name, requests = connection.recv()
        prompts = generation.make_prompts(requests, (PROMPT_TOKENS, PROMPT_TOKENS), seed=requests)
        connection.send(functions[name](engine, prompts))


def measure(options: argparse.Namespace) -> list[dict]:
    context = multiprocessing.get_context("spawn")
    connections, processes = {}, []
    for package in ("own", "flash_qla"):
        connections[package], connection = context.Pipe()
        processes.append(context.Process(target=serve, args=(connection, options, package == "flash_qla")))
        processes[-1].start()
        connection.close()  # so that an engine that ends early is an error here
    try:
        return measure_engines(connections, options)
    finally:
        for process in processes:
            process.terminate()


def measure_engines(connections: dict, options: argparse.Namespace) -> list[dict]:
    cells = []
    versions = {package: connection.recv() for package, connection in connections.items()}

    def ask(package: str, name: str, requests: int):
        connections[package].send((name, requests))
        return connections[package].recv()

    for requests in map(int, options.requests.split(",")):
        samples = {package: [] for package in connections}
        for _ in range(options.samples + 1):
            for package in connections:
                samples[package].append(ask(package, "time", requests))
        for package in connections:
            kernels = ask(package, "profile", requests)
            about = {name: getattr(options, name) for name in ("architecture", "layers", "states")}
            cells.append(
                {"package": package, "engine": "vllm", "version": versions[package], **about, "requests": requests}
                | {"ms": [round(1e3 * x, 4) for x in sorted(samples[package][1:])]}  # the first one warms up
                | {"gpu_us": round(sum(kernels.values()), 1), "gdn_us": round(sum_of_layers(kernels), 1)}
                | {"kernels": kernels}
            )
            if options.out:
                write_results(options.out, cells)
    return cells


def sum_of_layers(kernels: dict[str, float]) -> float:
    return sum(us for name, us in kernels.items() if GDN.search(name))


def report(cells: list[dict]) -> None:
    for cell in cells:
        ms = statistics.median(cell["ms"])
        print(f"{cell['package']:>10} {cell['requests']:3} requests: step {ms:.3f} ms ({cell['ms'][0]:.3f} to ", end="")
        print(f"{cell['ms'][-1]:.3f}), GPU {cell['gpu_us']:.0f} us, Gated DeltaNet layers {cell['gdn_us']:.1f} us")
        for name, us in cell["kernels"].items():
            print(f"    {'GDN' if GDN.search(name) else '   '} {us:8.2f} us  {name[:100]}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="1,8,64")
    generation.add_engine_arguments(parser, layers=8, samples=10, memory=0.3)
    parser.add_argument("--out", help="JSON file for the results")
    return parser


if __name__ == "__main__":
    report(measure(make_parser().parse_args()))
