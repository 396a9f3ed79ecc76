"""All figures of the documents, in one call on one GPU.

    python benchmarks/all.py --out benchmarks/results
    python benchmarks/all.py --out DIR --packages flash_qla,flashinfer --sections forward,mixed --seconds 120
    python benchmarks/all.py --out DIR --peers-path DIR:DIR
    python benchmarks/all.py --out DIR --packages flash_qla,fla --sections ceilings,wide,wide_step,wide_decode

The results are one file, named after the card: h100.json or h200.json. It has the card, the driver, versions, the
commit, the date, and the cells of each section. benchmarks/report.py writes the tables of the documents from it.

Each section is one of this folder's benchmarks with fixed arguments. Each package runs its sections in one process,
flash_qla first. A package that cannot be imported is left out. A section may take its seconds, scaled to --seconds, and
the time that earlier sections have left. Then it stops, and keeps its cells. A section that fails, or ends its process,
is listed under "failed", and the next one runs. The exit status is 1 if a section failed, or if outputs of two packages
differ.

The peers compile their kernels at the first call. Before anything is timed they run their sections once without timing,
side by side, for COMPILE_SECONDS or for the time that --seconds leaves beside the sections.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.machinery
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forward
import torch
from common import FLA_BACKWARD, FLA_TRITON, OutOfTime, ceilings, environment, limited, package_environment

HEADS = "16x32,2x8,16x64,4x16,8x32,16x48"
SEQUENCES = "1x8192,1x32768,4096x8,8192x4,1x2048,1024x8,28672+4096,16384+16384"
OTHER_DIMS = {"30x30": "96x192", "16x32": "64x64", "8x8": "128x256", "6x6": "256x512"}  # heads of K x V


# Keys of more than 128 channels; the first are those of FLA's GatedDeltaNet layer
WIDE_DIMS = {"6x6": "256x512", "4x4": "256x256", "16x16": "256x256"}


def of_dims(dims: dict[str, str], command: str) -> list[str]:
    return [f"{command} --heads {heads} --head-dims {of_heads}" for heads, of_heads in dims.items()]


DECODE = "decode --heads 16x32,2x8,16x64,4x16 --batches 1,8,64,256 --tokens 1"
PLAIN = f"{DECODE} --keep plain --state-dtypes fp32"
DRAFTS = "decode --heads 16x32 --batches 1,64,256 --tokens 4"

# Section -> its benchmarks and their arguments
SECTIONS = {
    "ceilings": [],
    "forward": [
        f"forward --gates bench --variants op,contiguous,op_contiguous --heads {HEADS} --sequences {SEQUENCES}"
    ],
    "backward": ["backward --variants contiguous"],
    "decode": [DECODE],
    "plain": [PLAIN],
    "drafts": [f"{DRAFTS} --keep last", f"{DRAFTS} --keep every"],
    "options": [
        "forward --gates bench --variants nocp,l2norm,output_h,v_first,fp16,unknown --heads 16x32,2x8 "
        "--sequences 1x8192,4096x8,1024x8,ragged32"
    ],
    "mixed": ["forward --gates bench --variants op --heads 2x8,4x16,8x24,8x32 --sequences 16384+2048x8"],
    "prefill": ["prefill --sequences 1x8192,1024x8,256x32 --samples 5"],
    "head_dims": of_dims(OTHER_DIMS, "forward --gates bench --sequences 1x8192,4096x8"),
    "head_dims_step": of_dims(OTHER_DIMS, "backward --activations --sequences 1x8192,4096x8"),
    "wide": of_dims(WIDE_DIMS, "forward --gates bench --variants op --sequences 1x8192,4096x8,1024x8"),
    "wide_step": of_dims(WIDE_DIMS, "backward --sequences 1x8192,4096x8,1024x8"),
    "wide_decode": of_dims(WIDE_DIMS, "decode --keep plain --batches 1,8,64,256 --tokens 1 --state-dtypes fp32"),
    "dispatch": ["dispatch --heads 2x8,16x32 --sequences 1x8192,1024x8,4096x8,16384+2048x8"],
    "accuracy": ["peer_errors"],
    "host": ["host --processes 3 --batches 51"],
}


# Sections that run only if --sections names them: FLA takes minutes to compile and to tune itself.
ASKED = ("wide", "wide_step", "wide_decode")


@dataclasses.dataclass
class Process:
    """A package's sections, each with its seconds."""

    package: str
    sections: dict[str, float]
    changes: dict[str, str | None] = dataclasses.field(default_factory=dict)  # environment variables; None removes one


PROCESSES = [
    Process(
        "flash_qla",
        {"ceilings": 8, "forward": 40, "backward": 25, "decode": 20, "plain": 8, "drafts": 10, "options": 12}
        | {"mixed": 5, "prefill": 20, "head_dims": 8, "head_dims_step": 12, "wide": 8, "wide_step": 12}
        | {"wide_decode": 6, "dispatch": 15, "accuracy": 40, "host": 40},
    ),
    Process("flashinfer", {"forward": 30, "mixed": 5, "prefill": 8}),
    Process("flash_qla_jit", {"forward": 40, "backward": 30}),
    Process("fla", {"plain": 15, "forward": 35, "head_dims": 10}, FLA_TRITON),
    Process("vllm", {"decode": 20, "drafts": 10}, FLA_TRITON),
    Process("sglang", {"decode": 20, "drafts": 10}, FLA_TRITON),
    Process("attn_gym", {"decode": 20}),
    Process("fla", {"backward": 35, "accuracy": 35, "head_dims_step": 12}, FLA_BACKWARD),
    Process("fla", {"wide": 40, "wide_decode": 20, "wide_step": 150}, FLA_BACKWARD),
]
COMPILE_SECONDS = 60
COMPILE_JOBS = 5
START_SECONDS = 10  # a process imports, and starts CUDA
GRACE_SECONDS = 15  # for the cell that is measured when a section's time is over


# A package's process


def measure_section(package: str, name: str, seconds: float, more: list[str]) -> Iterator[dict]:
    """The section's cells; raises OutOfTime if its seconds end before its cells."""
    if name == "ceilings":
        yield ceilings()
    end = time.monotonic() + seconds
    for line in SECTIONS[name]:
        script, *arguments = shlex.split(line)
        module = importlib.import_module(script)
        options = module.make_parser().parse_args([*arguments, *more])
        yield from limited(module.measure(package, options), end - time.monotonic())


def measure(package: str, sections: dict[str, float], out: Path, compiling: bool = False) -> None:
    """One line of JSON for each cell, and one for each section's end. Time that a section leaves goes to the next."""
    end = time.monotonic()
    with out.open("a") as file:

        def write(**line) -> None:
            print(json.dumps(line), file=file, flush=True)

        for name, seconds in sections.items():
            write(section=name, begins=True)
            start = time.monotonic()
            end = max(end + seconds, start)
            outcome = {}
            try:
                more = ["--samples", "0"] if compiling else []
                for cell in measure_section(package, name, end - start, more):
                    write(section=name, cell=cell)
            except OutOfTime as error:
                outcome = {"failed": str(error)}
            except Exception as error:
                traceback.print_exc()
                outcome = {"failed": f"{type(error).__name__}: {error}"[:500]}
            write(section=name, seconds=round(time.monotonic() - start, 1), **outcome)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # raises, and so ends this process, if an error has left CUDA unusable
                torch.cuda.empty_cache()


# All processes


@contextlib.contextmanager
def killed_at_end(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """The process and those that it has started."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_process(process: Process, sections: dict[str, float], seconds: float, out: Path, options, *more: str) -> str:
    """The reason why the process ended early; empty if it did not."""
    command = [sys.executable, __file__, "--measure", process.package, "--out", str(out)]
    command += ["--sections", json.dumps(sections), *more]
    variables = package_environment(process.package, options, process.changes)
    if "--compile" in more:
        variables["FLA_CACHE_RESULTS"] = "0"  # FLA's tuning, here disturbed by the other processes
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} if "--compile" in more else {}
    with killed_at_end(subprocess.Popen(command, env=variables, start_new_session=True, **output)) as running:
        try:
            status = running.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
    return f"the process ended with status {status}" if status else ""


def importable(package: str, options) -> bool:
    """Whether the package would be found; nothing is imported. FlashQLA has flash_qla's import name."""
    if package == "flash_qla":
        return True
    paths = options.peers_path.split(os.pathsep) if options.peers_path else []
    if package == "flash_qla_jit":
        return importlib.machinery.PathFinder.find_spec("flash_qla", paths) is not None
    names = ("fi_aot", "flashinfer") if package == "flashinfer" else (package,)
    return any(importlib.machinery.PathFinder.find_spec(name, [*paths, *sys.path]) for name in names)


def compile_peers(processes: list[Process], seconds: float, options) -> None:
    """Run the sections of all processes once, side by side. A section that fails, or takes longer, compiles when it is
    timed."""
    end = time.monotonic() + seconds

    def run(process: Process) -> None:
        left = end - time.monotonic()
        sections = {name: left for name in process.sections if name != "accuracy"}
        if left > START_SECONDS:
            with tempfile.TemporaryDirectory() as folder:
                run_process(process, sections, left, Path(folder, "cells"), options, "--compile")

    with ThreadPoolExecutor(COMPILE_JOBS) as pool:
        list(pool.map(run, processes))


def split_time(processes: list[Process], seconds: float, compiles: bool) -> tuple[float, float]:
    """Seconds to compile, at most, and the factor of the sections' seconds. What the sections leave is to compile."""
    available = seconds - GRACE_SECONDS
    planned = sum(START_SECONDS + sum(process.sections.values()) for process in processes)
    compiling = max(COMPILE_SECONDS, available - planned) if compiles else 0
    scale = min(1, available / (planned + compiling))
    return compiling * scale, scale


def merge(lines: list[dict], package: str, results: dict, sections: dict[str, float], ended: str) -> dict[str, float]:
    """Adds a process's output to the results. Returns the sections that the process has not begun."""
    left = dict(sections)
    for line in lines:
        name = line["section"]
        section = results.setdefault(name, {"seconds": {}, "failed": {}, "cells": []})
        left.pop(name, None)
        if "begins" in line:
            section["failed"][package] = ended or "the process ended"  # until the process reports the section's end
        elif "cell" in line:
            section["cells"].append(line["cell"])
        else:
            section["seconds"][package] = line["seconds"]
            section["failed"].pop(package)
            if "failed" in line:
                section["failed"][package] = line["failed"]
            errors = [cell["error"] for cell in section["cells"] if cell.get("package") == package and "error" in cell]
            if errors:
                section["failed"].setdefault(package, f"{len(errors)} cells, the first one: {errors[0]}")
    return left


def measure_process(process: Process, end: float, results: dict, options) -> None:
    """Measure the sections in a process. If a section ends it, another process continues after that section."""
    sections = process.sections
    while sections:
        left = end - time.monotonic()
        if left < START_SECONDS:
            for name in sections:
                section = results.setdefault(name, {"seconds": {}, "failed": {}, "cells": []})
                section["failed"][process.package] = "out of time"
            return
        scale = left / (START_SECONDS + sum(sections.values()))
        sections = {name: seconds * scale for name, seconds in sections.items()}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "cells")
            ended = run_process(process, sections, left + GRACE_SECONDS, out, options)
            lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        began = merge(lines, process.package, results, sections, ended)
        if began == sections:  # no section has begun
            for name in sections:
                section = results.setdefault(name, {"seconds": {}, "failed": {}, "cells": []})
                section["failed"][process.package] = ended or "no section began"
            return
        sections = began


def name_of_card(gpu: str) -> str:
    """'NVIDIA H100 80GB HBM3' is h100."""
    return next((word for word in gpu.lower().split() if word.startswith("h") and word[1:].isdigit()), "gpu")


def write(path: Path, results: dict, begin: dict, seconds: float) -> None:
    found = begin | {"seconds": round(seconds), "versions": versions_of(results)}
    parts = []
    for name, section in results.items():
        stored = ({key: x for key, x in cell.items() if key != "sketches"} for cell in section["cells"])
        cells = ",\n".join(map(json.dumps, stored))
        head = json.dumps({key: section[key] for key in ("seconds", "failed")})
        parts.append(f'{json.dumps(name)}: {head[:-1]}, "cells": [\n{cells}\n]}}')
    path.write_text(f'{{"environment": {json.dumps(found, indent=1)},\n"sections": {{\n' + ",\n".join(parts) + "\n}}\n")


def cells_of(results: dict, section: str) -> list[dict]:
    return results.get(section, {}).get("cells", [])


def failures(results: dict) -> list[str]:
    return [f"{name}, {package}: {why}" for name, found in results.items() for package, why in found["failed"].items()]


def versions_of(results: dict) -> dict[str, str]:
    cells = [cell for section in results.values() for cell in section["cells"]]
    return {cell["package"]: cell["version"] for cell in cells if "version" in cell}


def main(options) -> int:
    start = time.monotonic()
    chosen = options.sections.split(",") if options.sections else [name for name in SECTIONS if name not in ASKED]
    packages = options.packages.split(",") if options.packages else [process.package for process in PROCESSES]
    processes = [
        dataclasses.replace(process, sections={x: s for x, s in process.sections.items() if x in chosen})
        for process in PROCESSES
        if process.package in packages and importable(process.package, options)
    ]
    processes = [process for process in processes if process.sections]
    peers = [process for process in processes if process.package != "flash_qla"]
    compiling, scale = split_time(processes, options.seconds, compiles=bool(peers) and not options.no_compile)
    begin = environment()
    path = Path(options.out, f"{name_of_card(begin['gpu'] or '')}.json")
    if not begin["commit"]:
        print("The commit is unknown: there is no git checkout, and COMMIT is not set", flush=True)
    if compiling:
        compile_peers([*peers[2:], *peers[:2]], compiling, options)
        print(f"The peers compiled for {time.monotonic() - start:.0f} s", flush=True)

    results: dict[str, dict] = {}
    end = start + compiling
    for process in processes:
        end += (START_SECONDS + sum(process.sections.values())) * scale
        measure_process(process, end, results, options)
        print(f"{process.package}: {time.monotonic() - start:.0f} s of {options.seconds:.0f}", flush=True)
        write(path, results, begin, time.monotonic() - start)  # after each process, because the call may be interrupted
    disagree = [line for line in forward.report_outputs(cells_of(results, "forward")) if "DISAGREEMENT" in line]
    failed = [*disagree, *failures(results)]
    print("\n".join([f"{path} in {time.monotonic() - start:.0f} s", *(f"FAILED: {line}" for line in failed)]))
    return 1 if failed else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"), help="folder of the results")
    parser.add_argument("--seconds", type=float, default=540, help="for all")
    parser.add_argument("--sections", help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--packages", help="some of " + ", ".join(dict.fromkeys(x.package for x in PROCESSES)))
    parser.add_argument("--package-path", metavar="DIR", help="where flash_qla is, if it is not installed")
    parser.add_argument("--peers-path", metavar="DIR", help="where the peers are, if they are not installed")
    parser.add_argument("--no-compile", action="store_true", help="do not run the peers before they are timed")
    parser.add_argument("--measure", metavar="PACKAGE", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    options = make_parser().parse_args()
    if options.measure:
        measure(options.measure, json.loads(options.sections), Path(options.out), options.compile)
    elif not torch.cuda.is_available():
        sys.exit("This needs a GPU, and torch sees no CUDA device")
    else:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        sys.exit(main(options))
