"""Where a kernel's time goes: variants of the kernel, each with one statement that runs twice. What a variant takes
longer is about what the statement costs: nothing if it hides behind others. The results are wrong, the times right.

    python benchmarks/stages.py build --out build/stages     # on the machine that has built the package, for Hopper
    python benchmarks/stages.py run --out build/stages --json stages.json     # on a GPU, from the same checkout

A statement is a call of a device function in the kernel's CUDA source, the instructions of one WGMMA product, or a line
of HEADER_STATEMENTS. Statements that wait, signal or end a CTA are left out. A variant with the code of the kernel
itself says that the compiler removed the second run. `build` also makes a library that takes variants from a folder.
`run` needs nvidia-ml-py too, for the energy of a call.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # last: without a build its flash_qla/ would hide the installed package


@dataclass(frozen=True)
class Kernel:
    """An instance, and the call that is timed: heads and sequences as other benchmarks have them, the mode of its
    dispatch, and whether it is a backward."""

    heads: str
    sequences: str
    mode: dict[str, int]
    backward: bool = False


SPLIT = {"value_tile": 64, "segment_chunks": 32, "fused": 0}
KERNELS = {
    "fused_forward_bf16_K128_no_normalize_no_low_level_no_cut_planned": Kernel("16x64", "4096x8", {"fused": 1}),
    "chunk_forward_bf16_K128_value_tile64": Kernel("2x8", "1x32768", SPLIT | {"segment_chunks": 0}),
    "chunk_forward_bf16_K128_value_tile128": Kernel("16x32", "4096x8", {"value_tile": 128, "fused": 0}),
    "segment_maps_bf16_K128_no_partial": Kernel("2x8", "1x32768", SPLIT),
    "segment_scan_bf16_K128_no_reverse_columns32": Kernel("2x8", "1x32768", SPLIT),
    "chunk_backward_bf16_K128_no_normalize": Kernel("16x32", "4096x8", {"segment_chunks": 0}, backward=True),
}
HEADER_STATEMENTS = {
    "fused_forward": (
        "states/fused_forward.cuh",
        (
            "begin_product<T>(KK, tiles.K, tiles.K);",
            "begin_product<T>(KQ, tiles.K, tiles.Q);",
            "maker.gate_diagonal(diagonal, b_row);",
            "maker.keep_products(KK);",
            "maker.invert_diagonal();",
            "maker.gate(D, diagonal, from);",
            "maker.put_attention(tiles.P, KQ, D);",
            "maker.invert(X);",
            "maker.put_inverse(tiles.L, X, D);",
        ),
    ),
}
NOT_TWICE = re.compile(
    r"leave|wait|semaphore|sync|next_|find_segment|forget|trap|kept\(|add_rows|make_matrices|clear_matrices|begin_scales"
)
CALL = re.compile(r"^\s+(?:[\w\[\]]+ = )?\(*flash_qla::device::(\w+)[<(].*;$")

# In csrc/gpu/runtime/launch.cpp of the library for `run`
LOADER = """
  if (const char* const folder = std::getenv("FLASH_QLA_STAGE")) {
    static std::map<std::string, std::string> files;
    std::ifstream file(std::string(folder) + "/" + config.kernel.name + ".cubin", std::ios::binary);
    if (file) {
      std::string code(std::istreambuf_iterator<char>(file), {});
      return files.emplace(config.kernel.name, std::move(code)).first->second.data();
    }
  }
"""
INCLUDES = "#include <cstdlib>\n#include <fstream>\n#include <iterator>\n#include <map>\n"
UNPACKED = "const char* unpacked(const LaunchConfig& config, const Code& code) {"


def statements(lines: list[str]) -> dict[str, range]:
    """The lines of each statement that may run twice, by a name with the number of its first line."""
    lines_of_statement = {}
    for i, line in enumerate(lines):
        if "tl::initialize_wgmma_descriptor" in line and "desc_b" in line:
            tiles = [re.search(r"\)(\w+)_s\)", x)[1] for x in lines[max(i - 2, 0) : i + 1] if "initialize_wgmma" in x]
            begin = next(j for j in range(i, len(lines)) if lines[j].lstrip().startswith("for ("))
            end = next(j for j in range(begin, len(lines)) if "tl::warpgroup_commit_batch" in lines[j])
            instruction = next(x for x in lines[begin:end] if "tl::wgmma_" in x)
            result = re.findall(r"uint32_t\*>?\)?\((\w+) \+", instruction)[-1]
            lines_of_statement[f"{i + 1:4} product {' '.join(tiles)} -> {result}"] = range(begin, end)
        elif (call := CALL.match(line)) and not NOT_TWICE.search(call[1]):
            lines_of_statement[f"{i + 1:4} {call[1]}"] = range(i, i + 1)
    return lines_of_statement


def variants(source: Path, kernels: Path) -> dict[str, dict[Path, str]]:
    """The edited files of each variant, of the kernel's source and of the folder of headers."""
    lines = source.read_text().splitlines()
    edits = {"": {}}
    for name, where in statements(lines).items():
        # A product that began from zero again would be the only one.
        again = [re.sub(r"\(\(0 < \w+\) \? 1 : 0\)", "1", line) for line in lines[where.start : where.stop]]
        twice = [*lines[: where.stop], *again, *lines[where.stop :]]
        edits[name] = {source: "\n".join(twice) + "\n"}
    for kernel, (file, texts) in HEADER_STATEMENTS.items():
        if not source.name.startswith(kernel):
            continue
        header = (kernels / file).read_text()
        for text in texts:
            assert header.count(text) == 1, f"{file} has {header.count(text)} lines {text}"
            edits[f"header {text}"] = {kernels / file: header.replace(text, f"{text}\n  {text}")}
    return edits


def compile_variant(arguments: tuple[Path, str, dict[Path, str], Path]) -> dict:
    from build_tools import nvrtc
    from build_tools.toolchain import find_toolkit

    source, name, edits, folder = arguments
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "kernels_tl", folder / "kernels_tl")
    (folder / source.name).write_text(source.read_text())
    for file, text in edits.items():
        (folder / (file.name if file == source else file.relative_to(ROOT))).write_text(text)
    compiler = nvrtc.Compiler(find_toolkit(), [folder / "kernels_tl", source.parent])
    log = compiler.compile(folder / source.name, {"sm_90a": "compute_90a"})["sm_90a"]
    shutil.rmtree(folder / "kernels_tl")
    code = (folder / f"{source.stem}.sm_90a.cubin").rename(folder / f"{source.stem}.cubin")
    for file in folder.iterdir():
        if file != code:
            file.unlink()
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    return {"kernel": source.stem, "statement": name, "folder": folder.name, "spills": spills}


def build_variants(out: Path) -> None:
    """Variants of all kernels, and a list of them."""
    jobs = []
    for kernel in KERNELS:
        source = ROOT / f"build/kernels/{kernel}.cu"
        jobs += [(source, name, edits) for name, edits in variants(source, ROOT / "kernels_tl").items()]
    out.mkdir(parents=True, exist_ok=True)
    folders = [out / f"variant{i}" for i in range(len(jobs))]
    with multiprocessing.get_context("spawn").Pool() as pool:
        records = pool.map(compile_variant, [(*job, folder) for job, folder in zip(jobs, folders, strict=True)], 1)
    code = {x["folder"]: (out / x["folder"] / f"{x['kernel']}.cubin").read_bytes() for x in records}
    plain = {x["kernel"]: x for x in records if not x["statement"]}
    for x in records:
        x["is_removed"] = bool(x["statement"]) and code[x["folder"]] == code[plain[x["kernel"]]["folder"]]
    (out / "variants.json").write_text(json.dumps(records, indent=1))


def build_library(out: Path) -> None:
    """The library that takes a kernel's code from the folder FLASH_QLA_STAGE, if the kernel's is there."""
    tree = out / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", out.name, "emulator*", "tests", "docs"))
    launch = tree / "csrc/gpu/runtime/launch.cpp"
    text = launch.read_text()
    assert text.count(UNPACKED) == 1
    launch.write_text(INCLUDES + text.replace(UNPACKED, UNPACKED + LOADER))
    subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=tree, check=True)
    shutil.copy(tree / "flash_qla/libflash_qla.so", out)
    shutil.rmtree(tree)


CALLS_OF_GRAPH = 8
COLUMNS = {"us": "us in a row", "short_us": "us short", "mJ": "mJ"}
GROUP = 8  # processes that start at the same time; their calls are timed one after the other


def send_environment(pipe) -> None:
    import common

    pipe.send(common.environment())


def time_in_a_row(call, seconds: float) -> tuple[float, float]:
    """Microseconds and millijoules of a call, of calls in a row after as many that settle the clock."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_OF_GRAPH):
            call()

    def replay(times: int) -> tuple[float, float]:
        torch.cuda.synchronize()
        begin, energy = time.perf_counter(), pynvml.nvmlDeviceGetTotalEnergyConsumption(device)
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()
        spent = time.perf_counter() - begin, pynvml.nvmlDeviceGetTotalEnergyConsumption(device) - energy
        return 1e6 * spent[0] / (times * CALLS_OF_GRAPH), spent[1] / (times * CALLS_OF_GRAPH)

    graph.replay()
    us, _ = replay(5)
    times = max(1, round(1e6 * seconds / (us * CALLS_OF_GRAPH)))
    replay(times)
    return replay(times)


def time_variant(kernel: Kernel, pipe) -> None:
    """Sends "ready" and then, on a message, the microseconds of a call, of short samples at a clock that rests, and of
    calls in a row, with their energy."""
    import common
    import torch
    from backward import flash_qla_backward

    import flash_qla
    from flash_qla.testing import forced_dispatch

    ((H_k, H_v),) = common.parse_heads(kernel.heads)
    lengths = common.parse_lengths(kernel.sequences)
    inputs, gradients = common.make_inputs(H_k, H_v, lengths, common.HEAD_DIMS, gradients=True)
    options = {"max_seqlen": max(lengths), "output_final_state": True}

    def call():
        return flash_qla.chunk_gated_delta_rule(**inputs, **options)

    if kernel.backward:
        call = flash_qla_backward(inputs | {"max_seqlen": max(lengths)}, gradients)
    with forced_dispatch(**{"backward" if kernel.backward else "forward": kernel.mode}):
        call()
        torch.cuda.synchronize()
        pipe.send("ready")
        pipe.recv()
        us, energy = time_in_a_row(call, 0.8)
        time.sleep(0.3)
        short = common.time_graph(call, 5, 1.0)
    pipe.send({"us": us, "short_us": 1e3 * short[0], "mJ": energy})


def answer_of(pipe, seconds: float):
    """The next message, or None if there is none in time."""
    try:
        return pipe.recv() if pipe.poll(seconds) else None
    except EOFError:
        return None


def time_group(records: list[dict], out: Path) -> list[dict]:
    """The times of variants; None of one that fails."""
    context, workers = multiprocessing.get_context("fork"), []
    for record in records:
        os.environ["FLASH_QLA_STAGE"] = str(out / record["folder"])
        pipe, of_worker = context.Pipe()
        process = context.Process(target=time_variant, args=(KERNELS[record["kernel"]], of_worker))
        process.start()
        of_worker.close()
        workers.append((process, pipe))
    are_ready = [answer_of(pipe, 60) is not None for _, pipe in workers]
    for (process, _), is_ready in zip(workers, are_ready, strict=True):
        if not is_ready:
            process.kill()
            process.join()  # before others are timed
    results = []
    for (process, pipe), is_ready in zip(workers, are_ready, strict=True):
        times = None
        if is_ready:
            pipe.send("go")
            times = answer_of(pipe, 30)
            process.kill()
            process.join()
        results.append(times or dict.fromkeys(COLUMNS))
    return results


def run(out: Path, results: Path, only: str) -> None:
    records, times = json.loads((out / "variants.json").read_text()), []
    records = [x for x in records if x["kernel"].startswith(only)]
    # A copy of the package, because _C loads the library of its own folder.
    package = out / "package/flash_qla"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "flash_qla", package)
    shutil.copy(out / "libflash_qla.so", package)
    sys.path.insert(0, str(package.parent))
    importlib.invalidate_caches()  # perhaps the folder was not there when Python last looked
    import common  # noqa: F401  before the forks, which then need no import
    import torch  # noqa: F401

    import flash_qla

    assert Path(flash_qla.__file__).parent == package, f"flash_qla is {flash_qla.__file__}, which takes no variants"

    # In a process of its own, because it starts CUDA, which a fork of this process then could not.
    pipe, of_worker = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=send_environment, args=(of_worker,))
    process.start()
    environment = answer_of(pipe, 60)
    process.join()
    records, plain = [x for x in records if not x["is_removed"]], {}
    for first in range(0, len(records), GROUP):
        group = records[first : first + GROUP]
        for record, of_variant in zip(group, time_group(group, out), strict=True):
            times.append(record | of_variant)
            if not record["statement"]:
                plain = of_variant
                print(f"{record['kernel']}: {', '.join(COLUMNS.values())} {tuple(plain.values())}", flush=True)
            elif of_variant["us"] and plain["us"]:
                more = "".join(f" {100 * (of_variant[name] / plain[name] - 1):6.1f} %" for name in COLUMNS)
                print(f"  {record['statement']:60}{more}  {record['spills'] or ''}", flush=True)
        results.write_text(json.dumps({"environment": environment, "variants": times}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("build", "run"))
    parser.add_argument("--out", type=Path, required=True, help="the folder of the variants")
    parser.add_argument("--json", type=Path, help="of run: the file of the times")
    parser.add_argument("--kernel", default="", help="of run: the first letters of the kernels that are measured")
    options = parser.parse_args()
    if options.step == "build":
        build_variants(options.out.resolve())
        build_library(options.out.resolve())
    else:
        run(options.out.resolve(), options.json, options.kernel)
