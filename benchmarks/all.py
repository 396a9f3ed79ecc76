"""All figures of the documents, on one GPU, in as many calls as it takes.

    python benchmarks/all.py --compile                             # the peers' kernels, side by side; optional
    python benchmarks/all.py --out benchmarks/results              # until --seconds are over; again: what is missing
    python benchmarks/all.py --out DIR --packages flash_qla,flashinfer --sections forward --peers-path DIR:DIR

The results are one file, named after the card: h100.json or h200.json. It has the card, the driver, versions, the
commit, the date, and the cells of each section. benchmarks/report.py writes the tables of the documents from it.

Each section is one of this folder's benchmarks with fixed arguments. Each package runs its sections in one process,
flash_qla first. A package that cannot be imported is left out. A section that fails, or ends its process, is listed
under "failed", and the next one runs. Another call on the same commit and card measures the sections that a package has
not finished, and keeps the others. Peers compile their kernels at the first call, so a section may end in time only
when it runs again. The exit status is 1 if a section failed or is missing, or if outputs of two packages differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.machinery
import json
import os
import shlex
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
from common import (
    FLA_BACKWARD,
    FLA_TRITON,
    ceilings,
    environment,
    killed_at_end,
    measure_cells,
    package_environment,
)

HEADS = "16x32,2x8,16x64,4x16,8x32,16x48"
SEQUENCES = "1x8192,1x32768,4096x8,8192x4,1x2048,1024x8,28672+4096,16384+16384"
DECODE = "decode --heads 16x32,2x8,16x64,4x16 --batches 1,8,64,256 --tokens 1"
PORTABLE = "--kernels portable --heads 2x8,8x32,16x32,16x64 --sequences 1x8192,1x32768,4096x8,1024x8"
DRAFTS = "decode --heads 16x32 --batches 1,64,256 --tokens 4"
# Keys of more than 128 channels; the first are those of FLA's GatedDeltaNet layer
WIDE = ("--heads 6x6 --head-dims 256x512", "--heads 4x4 --head-dims 256x256", "--heads 16x16 --head-dims 256x256")
WIDE_SEQUENCES = "--sequences 1x8192,4096x8,1024x8"

# Section -> its benchmarks and their arguments
SECTIONS = {
    "ceilings": [],
    "forward": [
        f"forward --gates bench --variants op,contiguous,op_contiguous --heads {HEADS} --sequences {SEQUENCES}"
    ],
    "backward": ["backward --variants contiguous"],
    "region": ["region --heads 2x8,4x16,16x32,16x64 --sequences 1x8192,1x32768,4096x8"],
    "decode": [DECODE],
    "decode_region": ["decode_region"],
    "drafts_region": ["decode_region --tokens 4 --batches 1,8,64"],
    "plain": [f"{DECODE} --keep plain --state-dtypes fp32"],
    "drafts": [f"{DRAFTS} --keep last", f"{DRAFTS} --keep every"],
    "portable": [f"forward {PORTABLE} --gates bench --variants op"],
    "portable_step": [f"backward {PORTABLE}"],
    "portable_decode": [f"{DECODE} --state-dtypes fp32", f"{DECODE} --state-dtypes fp32 --kernels portable"],
    "prefill": ["prefill --sequences 1x8192,1024x8,256x32 --samples 5"],
    "wide": [f"forward --gates bench --variants op {WIDE_SEQUENCES} {x}" for x in WIDE],
    "wide_step": [f"backward {WIDE_SEQUENCES} {x}" for x in WIDE],
    "dispatch": ["dispatch --heads 2x8,16x32 --sequences 1x2048,1x8192,1024x8,4096x8,16384+2048x8"],
    "dispatch_unknown": [
        "dispatch --unknown --heads 2x8,16x32,16x64 --sequences 1024x8,4096x8,16384+2048x8,28672+4096"
    ],
    "accuracy": ["peer_errors"],
    "layers": ["layers"],
    "host": ["host --batches 51"],
}
START_SECONDS = 10  # a process imports, and starts CUDA


@dataclasses.dataclass
class Process:
    package: str
    sections: list[str]
    changes: dict[str, str | None] = dataclasses.field(default_factory=dict)  # environment variables; None removes one


PROCESSES = [
    Process("flash_qla", list(SECTIONS)),
    Process("flashinfer", ["forward", "prefill"]),
    Process("flash_qla_jit", ["forward", "backward"]),
    Process("fla", ["plain", "forward", "portable"], FLA_TRITON),
    Process("vllm", ["decode", "drafts"], FLA_TRITON),
    Process("sglang", ["decode", "drafts"], FLA_TRITON),
    Process("attn_gym", ["decode"]),
    Process(
        "fla",
        ["backward", "portable_step", "region", "decode_region", "accuracy", "wide", "wide_step", "layers"],
        FLA_BACKWARD,
    ),
]


# A package's process


def measure_section(package: str, name: str, more: list[str]) -> Iterator[dict]:
    if name == "ceilings":
        yield ceilings()
    for line in SECTIONS[name]:
        script, *arguments = shlex.split(line)
        module = importlib.import_module(script)
        yield from measure_cells(module.measure, package, module.make_parser().parse_args([*arguments, *more]))


def measure(package: str, sections: list[str], out: Path, more: list[str]) -> None:
    """A line of JSON where a section begins, one for each cell, and one for the section's end."""
    with out.open("a") as file:

        def write(**line) -> None:
            print(json.dumps(line), file=file, flush=True)

        for name in sections:
            write(section=name, begins=True)
            start = time.monotonic()
            outcome = {}
            try:
                for cell in measure_section(package, name, more):
                    write(section=name, cell=cell)
            except Exception as error:
                traceback.print_exc()
                outcome = {"failed": f"{type(error).__name__}: {error}"[:500]}
            write(section=name, seconds=round(time.monotonic() - start, 1), **outcome)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # raises, and so ends this process, if an error has left CUDA unusable
                torch.cuda.empty_cache()


# All processes


def run_process(process: Process, sections: list[str], seconds: float, out: Path, options, *more: str) -> str:
    """The reason why the process ended early; empty if it did not."""
    command = [sys.executable, __file__, "--measure", process.package, "--out", str(out)]
    command += ["--sections", ",".join(sections), *more]
    variables = package_environment(process.package, options, process.changes)
    if "--compile" in more:
        variables["FLA_CACHE_RESULTS"] = "0"  # FLA's tuning, here disturbed by the other processes
    with killed_at_end(subprocess.Popen(command, env=variables, start_new_session=True)) as running:
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


def merge(lines: list[dict], package: str, results: dict, ended: str) -> None:
    """Adds a process's output to the results, in place of what the package had in these sections."""
    for line in lines:
        section = results.setdefault(line["section"], {"seconds": {}, "failed": {}, "cells": []})
        if "begins" in line:
            section["cells"] = [cell for cell in section["cells"] if cell.get("package", "flash_qla") != package]
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


def is_done(results: dict, name: str, package: str) -> bool:
    section = results.get(name, {"seconds": {}, "failed": {}})
    return package in section["seconds"] and package not in section["failed"]


def measure_process(process: Process, end: float, results: dict, options) -> None:
    """Measure the sections in a process. If a section ends it, another process continues after that section."""
    sections = [name for name in process.sections if not is_done(results, name, process.package)]
    while sections and end - time.monotonic() > START_SECONDS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "cells")
            ended = run_process(process, sections, end - time.monotonic(), out, options)
            lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        merge(lines, process.package, results, ended)
        began = {line["section"] for line in lines} or set(sections)
        sections = [name for name in sections if name not in began]


def name_of_card(gpu: str) -> str:
    """'NVIDIA H100 80GB HBM3' is h100."""
    return next((word for word in gpu.lower().split() if word.startswith("h") and word[1:].isdigit()), "gpu")


def read(path: Path, begin: dict) -> dict:
    """The sections that were measured on this commit and such a machine."""
    earlier = json.loads(path.read_text()) if path.exists() else {"environment": {}}
    same = all(earlier["environment"].get(name) == begin[name] for name in ("commit", "gpu", "driver", "torch"))
    return earlier["sections"] if begin["commit"] and same else {}


def write(path: Path, results: dict, begin: dict) -> None:
    cells = [cell for section in results.values() for cell in section["cells"]]
    versions = {cell["package"]: cell["version"] for cell in cells if "version" in cell}
    parts = []
    for name, section in results.items():
        lines = ",\n".join(map(json.dumps, section["cells"]))
        head = json.dumps({key: section[key] for key in ("seconds", "failed")})
        parts.append(f'{json.dumps(name)}: {head[:-1]}, "cells": [\n{lines}\n]}}')
    environment_json = json.dumps(begin | {"versions": versions}, indent=1)
    path.write_text(f'{{"environment": {environment_json},\n"sections": {{\n' + ",\n".join(parts) + "\n}}\n")


def main(options) -> int:
    end = time.monotonic() + options.seconds
    chosen = options.sections.split(",") if options.sections else list(SECTIONS)
    packages = options.packages.split(",") if options.packages else [process.package for process in PROCESSES]
    processes = [
        dataclasses.replace(process, sections=[name for name in process.sections if name in chosen])
        for process in PROCESSES
        if process.package in packages and importable(process.package, options)
    ]
    if options.compile:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
            for process in (x for x in processes if x.package != "flash_qla" and x.sections):
                sections = [name for name in process.sections if name != "accuracy"]
                pool.submit(run_process, process, sections, options.seconds, Path(folder, "x"), options, "--compile")
        return 0
    begin = environment()
    path = Path(options.out, f"{name_of_card(begin['gpu'] or '')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not begin["commit"]:
        print("The commit is unknown: there is no git checkout, and COMMIT is not set", flush=True)
    results = read(path, begin)
    for process in processes:
        measure_process(process, end, results, options)
        write(path, results, begin)  # after each process, because the call may be interrupted
    wrong = [x for x in forward.problems(results.get("forward", {"cells": []})["cells"]) if "DISAGREEMENT" in x]
    wrong += [f"{name}, {package}: {why}" for name, x in results.items() for package, why in x["failed"].items()]
    missing = [(x.package, name) for x in processes for name in x.sections if not is_done(results, name, x.package)]
    print("\n".join([str(path), *(f"FAILED: {line}" for line in wrong), f"Not finished: {missing or 'none'}"]))
    return 1 if wrong or missing else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"), help="folder of the results")
    parser.add_argument("--seconds", type=float, default=540, help="for all")
    parser.add_argument("--sections", help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--packages", help="some of " + ", ".join(dict.fromkeys(x.package for x in PROCESSES)))
    parser.add_argument("--package-path", metavar="DIR", help="where flash_qla is, if it is not installed")
    parser.add_argument("--peers-path", metavar="DIR", help="where the peers are, if they are not installed")
    parser.add_argument("--compile", action="store_true", help="run the peers once, side by side, and time nothing")
    parser.add_argument("--measure", metavar="PACKAGE", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    options = make_parser().parse_args()
    if options.measure:
        more = ["--samples", "0"] if options.compile else []
        measure(options.measure, options.sections.split(","), Path(options.out), more)
    elif not torch.cuda.is_available():
        sys.exit("This needs a GPU, and torch sees no CUDA device")
    else:
        sys.exit(main(options))
