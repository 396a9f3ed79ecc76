"""Shared by the benchmarks: inputs, timing, a process per package, and the description of the machine in the results.

Benchmarks run from a checkout: ground truth is the fp64 recurrence of tests/reference.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.metadata
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import record
import reference
from accuracy import relative_error

DEVICE = "cuda"  # the inputs' device; the benchmarks' tests set another
HEAD_DIMS = (128, 128)  # channels of a key or query, and of a value, by default

# The differentiable arguments, and the low-level backwards' names of their gradients, in the order of their results
GRADIENT_OF = {"q": "dq", "k": "dk", "v": "dv", "beta": "db", "g": "dg", "initial_state": "dh0"}
# The same with the parameters of the activations inside
ALL_GRADIENTS_OF = GRADIENT_OF | {"A_log": "dA_log", "dt_bias": "ddt_bias"}
INSIDE = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

# Environment of FLA's process; None takes a variable away. Its dispatch to other packages is switched off, except that
# one kernel of its backward is its TileLang version, as by default on Hopper: the Triton version refuses to run there.
FLA_TRITON = {"FLA_FLASH_QLA": "0", "FLA_TILELANG": "0", "FLA_DISABLE_BACKEND_DISPATCH": "1"}
FLA_BACKWARD = {"FLA_FLASH_QLA": "0", "FLA_TILELANG": "1", "FLA_DISABLE_BACKEND_DISPATCH": None}

# The highest rates measured on each card, FLOP/s and bytes/s. PyTorch's own copy reaches 2.44 TB/s on an H100.
CEILINGS = {
    "H100": {"matrix_rate": 796e12, "bandwidth": 3.01e12},
    "H200": {"matrix_rate": 796e12, "bandwidth": 4.28e12},
}
CHUNK = 64

# Variants with contiguous q, k and v -> the same calls with slices. Peers have the first one.
ON_CONTIGUOUS = {"contiguous": "default", "op_contiguous": "op"}


def parse_heads(text: str) -> list[tuple[int, int]]:
    """'16x32,2x8' is 16 query/key and 32 value heads, then 2 and 8."""
    return [tuple(int(n) for n in heads.split("x")) for heads in text.split(",")]


def parse_head_dims(text: str) -> tuple[int, int]:
    """'96x192' is keys of 96 channels and values of 192."""
    K, V = (int(n) for n in text.split("x"))
    return K, V


def head_dims_field(head_dims: tuple[int, int]) -> dict[str, str]:
    """The field of a cell; no field if the dimensions are HEAD_DIMS."""
    return {} if head_dims == HEAD_DIMS else {"head_dims": "{}x{}".format(*head_dims)}


def qkv_field(variant: str = "default") -> dict[str, str]:
    """The field of a cell that says how q, k and v lie in memory. Cells without the field had contiguous ones."""
    return {"qkv": "contiguous" if variant in ON_CONTIGUOUS else "slices"}


def heads_of(cell: dict) -> str:
    """A cell's heads, and their dimensions if it has the field: '16x32' or '16x32 of 96x192'."""
    return " of ".join(cell[name] for name in ("heads", "head_dims") if name in cell)


def parse_lengths(text: str) -> list[int]:
    """'1x8192' is one sequence of 8192 tokens, '4096x8' eight of 4096, '28672+4096' one of each, 'ragged32' 32 of
    log-uniform lengths, 32768 tokens in all."""
    lengths = []
    for part in text.split("+"):
        if part.startswith("ragged"):
            lengths += ragged_lengths(int(part.removeprefix("ragged")))
        else:
            a, _, b = part.partition("x")
            lengths += [int(b)] if a == "1" and b else [int(a)] * int(b or 1)
    return lengths


def longest_sequence(inputs: dict) -> int:
    """Tokens of the longest one. Packages that take this number from the caller get it."""
    return inputs["cu_seqlens"].diff().max().item()


def ragged_lengths(sequences: int, tokens: int = 32768) -> list[int]:
    """A fixed draw; the longest is at most 200 times the shortest."""
    draw = torch.rand(sequences, generator=torch.Generator().manual_seed(sequences))
    weights = (draw * math.log(200.0)).exp()
    lengths = (weights / weights.sum() * tokens).long().clamp_min(1).tolist()
    lengths[-1] += tokens - sum(lengths)
    return lengths


def slices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """q, k and v as every model hands them over: slices of one tensor [1, T, 2 H_k K + H_v V], which a convolution has
    written."""
    tensors = {"q": q, "k": k, "v": v}
    mixed = torch.cat([x.flatten(-2) for x in tensors.values()], -1)
    parts = mixed.split([math.prod(x.shape[-2:]) for x in tensors.values()], -1)
    return {name: part.unflatten(-1, x.shape[-2:]) for (name, x), part in zip(tensors.items(), parts, strict=True)}


def contiguous(arguments: dict) -> dict:
    """The same arguments with contiguous q, k and v. A tensor that is contiguous already is not copied."""
    return arguments | {name: arguments[name].contiguous() for name in ("q", "k", "v")}


def make_inputs(
    H_k: int,
    H_v: int,
    lengths: list[int],
    head_dims: tuple[int, int],
    seed: int = 0,
    normalize: bool = True,
    gradients: bool = False,
    gate: str = "bench",
):
    """Arguments of chunk_gated_delta_rule; with `gradients` also do and dht, those of its two results. q, k and v are
    `slices`.

    Args:
        head_dims: K and V.
        gate: "bench" is logsigmoid(randn) / 16, and exactly 0 for a quarter of the heads; "trained" is
            -a softplus(randn / 2 + 1) with a of each head from [0, 16], the first 0 and the last 16.
    """
    K, V = head_dims
    generator = torch.Generator(DEVICE).manual_seed(seed)
    of_heads = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=dtype)

    def query_or_key():
        x = randn(1, T, H_k, K)
        return (F.normalize(x, dim=-1) if normalize else x).bfloat16()

    T = sum(lengths)
    if gate == "bench":
        g = F.logsigmoid(randn(1, T, H_v)) / 16
        g[..., torch.randperm(H_v, generator=of_heads)[: H_v // 4]] = 0
    elif gate == "trained":
        a = 16 * torch.rand(H_v, generator=of_heads)
        a[0], a[-1] = 0, 16
        g = -a.to(DEVICE) * F.softplus(randn(1, T, H_v) / 2 + 1)
    else:
        raise ValueError(f"gate is {gate!r}, expected 'bench' or 'trained'")
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    q, k = query_or_key(), query_or_key()
    v = randn(1, T, H_v, V, dtype=torch.bfloat16)  # gigabytes: no copy of another dtype
    inputs = {
        **slices(q, k, v),
        "g": g,
        "beta": randn(1, T, H_v).sigmoid(),
        "scale": K**-0.5,
        "initial_state": randn(len(lengths), H_v, K, V),
        "cu_seqlens": offsets.to(device=DEVICE, dtype=torch.int64),
    }
    if not gradients:
        return inputs
    return inputs, {
        "do": randn(1, T, H_v, V, dtype=torch.bfloat16),
        "dht": randn(len(lengths), H_v, K, V) / 8,
    }


def raw_tensors(T: int, H_v: int) -> dict[str, torch.Tensor]:
    """The arguments that INSIDE needs: raw g and beta in bf16, and the parameters of the gate. Decay is slow."""
    generator = torch.Generator(DEVICE).manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=DEVICE)

    return {
        "g": randn(1, T, H_v).bfloat16(),
        "beta": randn(1, T, H_v).bfloat16(),
        "A_log": (torch.rand(H_v, generator=generator, device=DEVICE) / 8 + 1e-3).log(),
        "dt_bias": randn(H_v),
    }


def three_digits(x: float) -> float:
    """x rounded to three digits, like the matrix work in stored results."""
    return float(f"{x:.3g}")


@functools.cache
def ceilings() -> dict[str, float]:
    """The card's dense bf16 matrix rate (FLOP/s) and its copy bandwidth (bytes/s, read and written)."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
    return CEILINGS["H200" if "H200" in name else "H100"]


def floor_ms(tokens: int, flop: float, traffic: float) -> float:
    """The longer of the matrix work and the traffic of inputs and outputs, both given per token, at the ceilings."""
    rates = ceilings()
    return max(tokens * flop / rates["matrix_rate"], tokens * traffic / rates["bandwidth"]) * 1e3


def geometric_mean(figures: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, figures)))


def time_graph(call, samples: int, sample_ms: float) -> list[float]:
    """Milliseconds a call, one figure a sample, ascending. A sample is the replay of a CUDA graph of several calls.
    With no samples a call is only made, so that its package compiles."""
    if samples == 0:
        call()
        torch.cuda.synchronize()
        return [math.nan]

    def capture(calls: int):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        graph.replay()  # the first one also uploads the graph
        return graph

    def elapsed(graph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    for _ in range(3):
        call()
    # A graph also decides how many calls a sample has, because some packages wait for Python outside of a graph.
    graph = capture(1)
    once = max(elapsed(graph), 1e-3)
    calls = max(1, min(100, math.ceil(sample_ms / once)))
    if calls > 1:
        graph = capture(calls)
    for _ in range(max(1, round(20 / (calls * once)))):  # the clocks rise under load
        graph.replay()
    return sorted(elapsed(graph) / calls for _ in range(samples))


def workspace(call) -> tuple[object, int]:
    """The call's results, and the bytes that it takes from torch's allocator beyond them."""
    call()  # compiles, and allocates memory that is kept from call to call
    torch.cuda.synchronize()
    gc.collect()  # or what it frees during the call counts
    torch.cuda.reset_peak_memory_stats()
    results = call()
    return results, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


@torch.no_grad()
def forward_errors(arguments: dict, o: torch.Tensor, final_state: torch.Tensor) -> dict[str, float]:
    """Relative L2 errors of the results of chunk_gated_delta_rule(**arguments)."""
    expected = reference.gated_delta_rule(**arguments)
    return {
        "o": relative_error(o, expected.o),
        "final_state": relative_error(final_state, expected.final_state),
    }


@torch.no_grad()
def gradient_errors(arguments: dict, output_gradients: dict, gradients) -> dict[str, float]:
    """Relative L2 errors of `gradients`, of chunk_gated_delta_rule(**arguments), in the order of ALL_GRADIENTS_OF."""
    of_formula = {name: x for name, x in arguments.items() if name != "max_seqlen"}
    expected = reference.gated_delta_rule_bwd(**of_formula, **output_gradients)
    names = [gradient for name, gradient in ALL_GRADIENTS_OF.items() if name in arguments]
    return {name: relative_error(x, getattr(expected, name)) for name, x in zip(names, gradients, strict=True)}


def spread(times: list[float], prefix: str = "") -> dict[str, float]:
    return {f"{prefix}ms": statistics.median(times), f"{prefix}ms_min": times[0], f"{prefix}ms_max": times[-1]}


def environment() -> dict:
    return {"time": time.strftime("%F %T %Z"), **record.machine(), "triton": version_of("triton")}


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def argument_parser(description: str, packages: str = "flash_qla,fla") -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--packages", default=packages)
    parser.add_argument("--package-path", metavar="DIR", help="where flash_qla is, if it is not installed")
    parser.add_argument("--peers-path", metavar="DIR", help="where the other packages are, if they are not installed")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--measure", metavar="PACKAGE", help="measure this package in this process")
    return parser


def add_head_dims_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--head-dims", type=parse_head_dims, default=HEAD_DIMS, metavar="KxV", help="key x value channels of each head"
    )


def add_timing_arguments(parser: argparse.ArgumentParser, heads: str, sequences: str, samples: int = 11) -> None:
    parser.add_argument("--heads", default=heads, help="query/key x value heads")
    add_head_dims_argument(parser)
    parser.add_argument("--sequences", default=sequences, help=parse_lengths.__doc__)
    parser.add_argument("--samples", type=int, default=samples)
    parser.add_argument("--sample-ms", type=float, default=4.0, help="length of a sample")
    add_kernels_argument(parser)


def add_kernels_argument(parser: argparse.ArgumentParser) -> None:
    kernels = "of flash_qla on a Hopper GPU; portable: those that every GPU from Ampere on has"
    parser.add_argument("--kernels", choices=("device", "portable"), default="device", help=kernels)


def run(
    parser: argparse.ArgumentParser, measure: Callable, report: Callable, fla_environment: dict | None = None
) -> None:
    """Measure every package in a process of its own, report on all and write the results.

    The report names a package that fails, with its exit status. The cells that it measured before count.

    Args:
        measure: (package, options) -> dicts, one a cell; runs in the package's process.
        report: prints the results: takes the cells of all packages.
        fla_environment: environment variables to set, or with None to remove.
    """
    options = parser.parse_args()
    if getattr(options, "device", "cuda") == "cuda" and not torch.cuda.is_available():
        parser.error("this needs a GPU, and torch sees no CUDA device")
    if options.measure:
        with open(options.out, "w") as file:
            for cell in measure_cells(measure, options.measure, options):
                print(json.dumps(cell), file=file, flush=True)
        return

    cells, failed = [], []
    for package in options.packages.split(","):
        with tempfile.NamedTemporaryFile("r", suffix=".json") as part:
            # The last one of an option that is given twice counts.
            command = [sys.executable, *sys.argv, "--measure", package, "--out", part.name]
            start = time.monotonic()
            process = subprocess.run(command, env=package_environment(package, options, fla_environment))
            measured = [json.loads(line) for line in part]
        print(f"{package}: {len(measured)} cells in {time.monotonic() - start:.0f} s", flush=True)
        cells += measured
        if process.returncode:
            failed.append(f"{package} failed (exit status {process.returncode})")
        if options.out:  # after each package, because the next one may run out of time
            write_results(options.out, cells)
    report(cells)
    if failed:
        sys.exit("; ".join(failed))


def measure_cells(measure: Callable, package: str, options: argparse.Namespace) -> Iterator[dict]:
    """The cells of measure(package, options), in this process, by the kernels that the options name."""
    if package != "flash_qla" or getattr(options, "kernels", "device") == "device":
        yield from measure(package, options)
        return
    from flash_qla.testing import forced_dispatch

    with forced_dispatch(kernels=options.kernels):
        for cell in measure(package, options):
            yield cell | {"kernels": options.kernels}


def package_environment(package: str, options: argparse.Namespace, changes: dict | None) -> dict[str, str]:
    variables = os.environ | (changes or {})
    path = options.package_path if package == "flash_qla" else options.peers_path
    if path:
        # The published FlashQLA is imported as flash_qla too: first where it is measured, last with other packages.
        paths = [path, variables.get("PYTHONPATH")]
        is_first = package in ("flash_qla", "flash_qla_jit")
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths if is_first else reversed(paths)))
    return {name: value for name, value in variables.items() if value is not None}


def write_results(path: str | Path, cells: list[dict]) -> None:
    """JSON with one cell a line."""
    lines = ",\n".join(json.dumps(cell) for cell in cells)
    Path(path).write_text(f'{{"environment": {json.dumps(environment(), indent=1)},\n"cells": [\n{lines}\n]}}\n')


def add_results(path: str | Path, cells: list[dict], key: tuple[str, ...]) -> None:
    """Cells of the same commit that were measured before stay in the file, unless they were measured again."""
    before = json.loads(Path(path).read_text()) if Path(path).exists() else {"environment": {}, "cells": []}
    same = before["environment"].get("commit") == environment()["commit"]
    kept = [*(before["cells"] if same else []), *cells]
    write_results(path, list({tuple(map(cell.get, key)): cell for cell in kept}.values()))


@contextlib.contextmanager
def killed_at_end(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """The process, which began a session, and those that it has started."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def print_comparison(cells: Iterable[dict], field: str, key: Callable[[dict], tuple], floor: str = "") -> None:
    """A line for each key: flash_qla's figure, the part of the floor, and the other packages' figures over its own; of
    several functions of a package the fastest one. Then the geometric means."""
    best_of_group: dict[tuple, dict[str, dict]] = {}
    for cell in (cell for cell in cells if field in cell):
        best = best_of_group.setdefault(key(cell), {})
        if cell["package"] not in best or cell[field] < best[cell["package"]][field]:
            best[cell["package"]] = cell
    ratios: dict[str, dict[str, float]] = {}
    for group, best in best_of_group.items():
        if "flash_qla" not in best:
            continue
        ours, name = best.pop("flash_qla"), " ".join(map(str, group))
        line = f"{name:>32} {ours[field]:10.4f}"
        if floor:
            line += f" {ours[floor] / ours[field]:5.0%} of the floor"
        for package, cell in best.items():
            ratios.setdefault(package, {})[name] = cell[field] / ours[field]
            line += f"  {package} {cell[field] / ours[field]:.2f}x"
        print(line)
    for package, of_package in ratios.items():
        least, below = min(of_package, key=of_package.get), sum(ratio < 1 for ratio in of_package.values())
        print(
            f"{package} over flash_qla, {field}: geometric mean {geometric_mean(of_package.values()):.3f}, "
            f"least {of_package[least]:.2f} ({least}), {below} of {len(of_package)} below 1"
        )
