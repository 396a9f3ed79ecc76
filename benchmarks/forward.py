"""Forward time of flash_qla and of FLA's Triton kernels on one GPU, same inputs, one process per package.

    python benchmarks/forward.py --out benchmarks/results/forward_h200.json
    python benchmarks/forward.py --heads 16x32,2x8 --sequences 1x8192,4096x8 --packages flash_qla

Inputs: packed bf16 sequences of head dimension 128, L2-normalised q and k, g = logsigmoid(randn) / 16 with a quarter of
the heads at exactly 0, beta = sigmoid(randn), an fp32 initial state; the final state is returned. Time: median over
samples, each the replay of a CUDA graph that holds several calls. Error: relative L2 against the fp64 recurrence on a
short batch, so that what is timed is known to be right. FLA (package fla-core) is optional; its dispatch to other
packages is switched off.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
FLA_TRITON = {"FLA_FLASH_QLA": "0", "FLA_TILELANG": "0", "FLA_DISABLE_BACKEND_DISPATCH": "1"}

# Measured on an H200: dense bf16 matrix rate and copy bandwidth. The floor of a forward is the larger of its matrix
# work at the one (164 kFLOP per token and value head) and its inputs and outputs at the other.
MATRIX_RATE, BANDWIDTH = 796e12, 4.28e12


def parse_lengths(text: str) -> list[int]:
    """'1x8192' is one sequence of 8192 tokens, '4096x8' eight of 4096, '28672+4096' one of each."""
    lengths = []
    for part in text.split("+"):
        a, _, b = part.partition("x")
        lengths += [int(b)] if a == "1" and b else [int(a)] * int(b or 1)
    return lengths


def make_inputs(H_k: int, H_v: int, lengths: list[int], seed: int = 0):
    import torch
    import torch.nn.functional as F

    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    T = sum(lengths)
    q, k = (F.normalize(randn(1, T, H_k, HEAD_DIM), dim=-1).bfloat16() for _ in range(2))
    g = F.logsigmoid(randn(1, T, H_v)) / 16
    g[..., torch.randperm(H_v, generator=torch.Generator().manual_seed(seed))[: H_v // 4]] = 0
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return {
        "q": q,
        "k": k,
        "v": randn(1, T, H_v, HEAD_DIM).bfloat16(),
        "g": g,
        "beta": randn(1, T, H_v).sigmoid(),
        "initial_state": randn(len(lengths), H_v, HEAD_DIM, HEAD_DIM),
        "cu_seqlens": offsets.to(device="cuda", dtype=torch.int64),
    }


def recurrence(q, k, v, g, beta, initial_state, cu_seqlens):
    """(o, final_state) in fp64, for sequences of one length."""
    import torch

    N, H_v = initial_state.shape[:2]
    q, k, v, g, beta = (x[0].double().unflatten(0, (N, -1)) for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(H_v // x.shape[2], 2) for x in (q, k))
    S, o = initial_state.double(), []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        error = v[:, t] - torch.einsum("nhk,nhkv->nhv", k[:, t], S)
        S = S + torch.einsum("nhk,nhv->nhkv", k[:, t], error * beta[:, t, :, None])
        o.append(torch.einsum("nhk,nhkv->nhv", q[:, t], S) * SCALE)
    return torch.stack(o, 1).flatten(0, 1)[None], S


def time_graph(call, samples: int, sample_ms: float) -> list[float]:
    """Milliseconds a call, one figure a sample."""
    import torch

    def elapsed(run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    calls = max(1, min(100, math.ceil(sample_ms / max(elapsed(call), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    for _ in range(max(1, round(20 / sample_ms))):  # the clocks rise under load
        graph.replay()
    return sorted(elapsed(graph.replay) / calls for _ in range(samples))


def measure(package: str, heads: list[tuple[int, int]], sequences: list[str], options) -> list[dict]:
    import torch

    if package == "flash_qla":
        from flash_qla import __version__, chunk_gated_delta_rule
    else:
        from fla import __version__
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def forward(inputs):
        with torch.no_grad():
            return chunk_gated_delta_rule(**inputs, scale=SCALE, output_final_state=True)

    cells = []
    for H_k, H_v in heads:
        for text in sequences:
            lengths = parse_lengths(text)
            inputs = make_inputs(H_k, H_v, lengths)
            times = time_graph(lambda inputs=inputs: forward(inputs), options.samples, options.sample_ms)
            tokens = sum(lengths)
            matrix = 164e3 * tokens * H_v / MATRIX_RATE
            traffic = tokens * (4 * HEAD_DIM * H_k + 4 * HEAD_DIM * H_v + 8 * H_v) / BANDWIDTH
            cell = {
                "package": package,
                "version": __version__,
                "heads": f"{H_k}x{H_v}",
                "sequences": text,
                "ms": statistics.median(times),
                "ms_min": times[0],
                "ms_max": times[-1],
                "floor_ms": max(matrix, traffic) * 1e3,
            }
            cells.append(cell)
            print(
                f"{package:>10} {cell['heads']:>6} {text:>12} {cell['ms']:8.4f} ms [{times[0]:.4f}, {times[-1]:.4f}]",
                flush=True,
            )
            del inputs
            torch.cuda.empty_cache()

    # Last: FLA tunes itself on the first problem of each head count, which shall not be a small one.
    for H_k, H_v in heads:
        check = make_inputs(H_k, H_v, [256] * 4, seed=1)
        errors = {}
        for name, got, wanted in zip(("o", "final_state"), forward(check), recurrence(**check), strict=True):
            errors[name] = ((got.double() - wanted).norm() / wanted.norm()).item()
        print(
            f"{package:>10} {H_k:>3}x{H_v:<2} errors: o {errors['o']:.2e}, state {errors['final_state']:.2e}",
            flush=True,
        )
        for cell in cells:
            if cell["heads"] == f"{H_k}x{H_v}":
                cell["relative_error"] = errors
    return cells


def environment() -> dict:
    import torch

    query = "--query-gpu=name,driver_version,clocks.max.sm,power.limit"
    smi = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True)

    return {
        "time": time.strftime("%F %T %Z"),
        "gpu": smi.stdout.strip(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "commit": os.environ.get("COMMIT")
        or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }


def print_ratios(cells: list[dict]) -> None:
    by_cell: dict[tuple, dict] = {}
    for cell in cells:
        by_cell.setdefault((cell["heads"], cell["sequences"]), {})[cell["package"]] = cell
    for (heads, sequences), found in by_cell.items():
        if "flash_qla" not in found:
            continue
        ours = found["flash_qla"]
        line = f"{heads:>6} {sequences:>12}  {ours['ms']:.4f} ms, {ours['floor_ms'] / ours['ms']:.0%} of the floor"
        if "fla" in found:
            line += f", {found['fla']['ms'] / ours['ms']:.2f}x FLA ({found['fla']['ms']:.4f} ms)"
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="16x32,2x8,16x64", help="query/key x value heads")
    parser.add_argument("--sequences", default="1x8192,4096x8,1x32768,1024x8", help=parse_lengths.__doc__)
    parser.add_argument("--packages", default="flash_qla,fla")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--sample-ms", type=float, default=4.0, help="length of a sample")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--measure", metavar="PACKAGE", help="measure this package in this process")
    options = parser.parse_args()

    if options.measure:
        heads = [tuple(int(n) for n in text.split("x")) for text in options.heads.split(",")]
        cells = measure(options.measure, heads, options.sequences.split(","), options)
        with open(options.out, "w") as file:
            json.dump(cells, file)
        return 0

    cells = []
    for package in options.packages.split(","):
        with tempfile.NamedTemporaryFile("r", suffix=".json") as part:
            command = [sys.executable, __file__, "--measure", package, "--out", part.name]
            for name in ("heads", "sequences", "samples", "sample_ms"):
                command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
            subprocess.run(command, env=os.environ | FLA_TRITON, check=True)
            cells += json.load(part)
    print_ratios(cells)
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"environment": environment(), "cells": cells}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
