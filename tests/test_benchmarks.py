"""The benchmarks compute what they say, and report what they measured; timing needs a GPU."""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flash_qla import _C

pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
all_figures = importlib.import_module("all")
common = importlib.import_module("common")
backward = importlib.import_module("backward")
context_parallelism = importlib.import_module("context_parallelism")
decode = importlib.import_module("decode")
dispatch = importlib.import_module("dispatch")
forward = importlib.import_module("forward")
generation = importlib.import_module("generation")
generation_vllm = importlib.import_module("generation_vllm")
prefill = importlib.import_module("prefill")
report = importlib.import_module("report")

MS = {
    "flash_qla": {"1x512": 0.01, "ragged32": 0.1},
    "fla": {"1x512": 0.03, "ragged32": 0.6},
    "flash_qla_jit": {"1x512": 0.008, "ragged32": 0.2},
    "flashinfer": {"1x512": 0.02},  # the other cell failed
}
HEADS = {"H_k": 1, "H_v": 2}


def made_up_cells() -> list[dict]:
    cells = []
    for package, times in MS.items():
        for sequences in MS["flash_qla"]:
            cell = {"package": package, "variant": "default", "version": "1", "gate": "bench", "heads": "2x8"}
            cell |= {"sequences": sequences, "floor_ms": 0.005, "relative_error": {"o": 2e-3, "final_state": 1e-3}}
            if sequences in times:
                sketches = {"o": [3.0, 4.0], "final_state": [1.0, 0.0]}
                cell |= {"ms": times[sequences], "workspace_bytes": 512 * 8 * 128, "sketches": sketches}
            else:
                cell["error"] = "RuntimeError: no"
            cells.append(cell)
    return [*cells, cells[0] | {"variant": "nocp", "ms": 0.0125}]


def contiguous_cells() -> list[dict]:
    first = made_up_cells()[0] | {"qkv": "contiguous"}
    ms = {("flash_qla", "contiguous"): 0.005, ("flash_qla", "op_contiguous"): 0.004, ("fla", "contiguous"): 0.02}
    return [first | {"package": package, "variant": variant, "ms": x} for (package, variant), x in ms.items()]


def test_parse_lengths():
    assert common.parse_lengths("1x8192") == [8192]
    assert common.parse_lengths("8192x4") == [8192] * 4
    assert common.parse_lengths("28672+4096") == [28672, 4096]
    ragged = common.parse_lengths("ragged32")
    assert len(ragged) == 32 and sum(ragged) == 32768 and 1 <= min(ragged) < 100 and max(ragged) > 2000
    assert ragged == common.parse_lengths("ragged32")


@pytest.fixture
def on_cpu(monkeypatch):
    """Calls run on the CPU; nothing is timed, and no bytes are counted."""
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for module in (common, decode):
        monkeypatch.setattr(module, "time_graph", lambda call, *_: (call(), [1.0, 2.0, 3.0])[1])
    monkeypatch.setattr(dispatch, "figures_of_card", lambda: _C.cards()["H200"])
    monkeypatch.setattr(common, "workspace", lambda call: (call(), 0))
    monkeypatch.setattr(backward, "step_memory", lambda step: {"saved_bytes": 0, "extra_bytes": 0})


def options(**changes) -> argparse.Namespace:
    given = {"heads": "1x2", "sequences": "64x2", "head_dims": (24, 40), "samples": 3, "sample_ms": 1.0}
    given |= {"variants": ""}
    return argparse.Namespace(**given | changes)


def test_inputs_are_slices(on_cpu):
    """q, k and v follow one another in each row of one tensor. `contiguous` copies what is not contiguous yet."""
    inputs = common.make_inputs(**HEADS, lengths=[70, 3], head_dims=(24, 40))
    assert inputs["q"].shape == (1, 73, 1, 24) and inputs["v"].shape == (1, 73, 2, 40)
    assert [inputs[name].storage_offset() for name in "qkv"] == [0, 24, 48]
    assert {inputs[name].stride(1) for name in "qkv"} == {2 * 24 + 2 * 40}
    once = common.contiguous(inputs)
    twice = common.contiguous(once)
    for name in "qkv":
        assert once[name].is_contiguous() and torch.equal(once[name], inputs[name]) and twice[name] is once[name]


def stub_modules(monkeypatch, **modules: dict):
    """Modules with these names, __ for a dot, and these contents."""
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), SimpleNamespace(**contents))


@pytest.mark.parametrize("package", ("fla", "flash_qla_jit", "flashinfer"))
def test_timed_calls_of_peers_copy_slices(on_cpu, monkeypatch, package):
    """The copy is made in the call: it has what the slice has by then."""
    given = []
    chunk = {"chunk_gated_delta_rule_fwd": lambda **arguments: given.append(arguments)}
    if package == "flashinfer":
        monkeypatch.setattr(forward, "flashinfer_function", lambda: ("1", chunk["chunk_gated_delta_rule_fwd"]))
    elif package == "flash_qla_jit":
        monkeypatch.setattr(torch.ops, "flash_qla", SimpleNamespace())
        stub_modules(monkeypatch, flash_qla={"__version__": "1", **chunk}, tilelang={"__version__": "1"})
    else:
        stub_modules(
            monkeypatch, fla={"__version__": "1"}, fla__ops={}, fla__ops__gated_delta_rule={}, fla__ops__utils={}
        )
        stub_modules(monkeypatch, fla__ops__gated_delta_rule__chunk=chunk)
        stub_modules(monkeypatch, fla__ops__utils__index={"prepare_chunk_indices": lambda *_: None})
    inputs = common.make_inputs(**HEADS, lengths=[70, 3], head_dims=(24, 40))
    call = forward.LOADERS[package]().prepare(inputs, "default")
    for number, name in enumerate("qkv"):
        inputs[name].fill_(number)
    call()
    for number, name in enumerate("qkv"):
        assert given[0][name].is_contiguous() and set(given[0][name].flatten().tolist()) == {number}


def test_cells_of_the_passes(on_cpu, monkeypatch):
    """They say how q, k and v lie, and head dimensions other than 128x128. Peers have one contiguous variant."""
    ours, strides = forward.load_flash_qla(), []

    def prepare(inputs, variant):
        strides.append(inputs["v"].is_contiguous())
        return ours.prepare(inputs, variant)

    for package in ("flash_qla", "fla"):
        monkeypatch.setitem(forward.LOADERS, package, lambda: forward.Package("1", prepare, ours.results))
    monkeypatch.setattr(forward, "check", lambda *_: {"o": 0.0, "final_state": 0.0})
    asked = options(gates="bench", variants="op,contiguous,op_contiguous,fp16")
    cells = [cell for package in ("flash_qla", "fla") for cell in forward.measure(package, asked)]
    variants = ["default", "op", "contiguous", "op_contiguous", "fp16", "default", "contiguous"]
    assert [cell["variant"] for cell in cells] == variants and not any("error" in cell for cell in cells)
    assert [cell["qkv"] == "contiguous" for cell in cells] == strides == ["contiguous" in x for x in variants]
    assert cells[2]["sketches"] == cells[0]["sketches"] and cells[3]["sketches"] == cells[1]["sketches"]

    given = ((common.HEAD_DIMS, False), ((24, 40), True))
    asked = [options(head_dims=x, activations=inside, variants="contiguous") for x, inside in given]
    (first, second), (other, _) = (list(backward.measure("flash_qla", x)) for x in asked)
    assert (first["qkv"], second["qkv"]) == ("slices", "contiguous")
    assert other.keys() == first.keys() | {"head_dims", "activations"} and other["head_dims"] == "24x40"
    assert other["backward_floor_ms"] < first["backward_floor_ms"] / 3


@pytest.mark.parametrize(
    ("keep", "functions"),
    [
        ("last", {"decode", "packed"}),
        ("every", {"decode", "packed", "in slots", "in a buffer"}),
        ("plain", {"V-first", "K-first", "V-first in place", "K-first in place"}),
        ("lagging", {"decode", "packed", "buffered 1", "buffered 4"}),
    ],
)
def test_cells_of_decoding(on_cpu, monkeypatch, keep, functions):
    """A sample goes through the steps of a cycle, and at each step through all pools, here two."""
    monkeypatch.setattr(decode, "ROTATED_BYTES", 2 * 2 * 24 * 40 * 4)
    sizes = {"batches": [1], "tokens": [1, 3], "keep": keep, "steps": [1, 4], "state_dtypes": "fp32"}
    cells = list(decode.measure("flash_qla", options(**sizes)))
    assert {cell["function"] for cell in cells} == functions
    assert max(cell["relative_error"]["o"] for cell in cells) < 5e-3
    state = 2 * 24 * 40 * 4
    for cell in cells:
        if cell["function"] == "buffered 4":
            step = 2 * 40 * 4 + 24 * 2 + 2 * 4  # of d, k and g
            assert cell["us"] == 2000 / 2 / 4
            assert cell["bytes"] == cells[0]["bytes"] + state * (1 / 4 - 1) + step * (3 / 2 + 3 / 4)
            continue
        moved = 1 + (cell["tokens"] if keep == "every" else 1)
        tokens = cell["tokens"] * 2 * ((1 + 1) * 24 + (2 + 2) * 40)  # q, k, v, o
        raw = cell["tokens"] * 2 * 2 * 2 + 2 * 2 * 4 + 4  # a, b; A_log, dt_bias; the slot
        assert cell["bytes"] == moved * state + tokens + (cell["tokens"] * 2 * 2 * 4 if keep == "plain" else raw)


def test_ways_of_the_prefill(on_cpu):
    """Each gives the same results, on a pool of its own. Checkpoints need long sequences."""

    def calls(lengths):
        return prefill.flash_qla_calls(prefill.Case(1, 2, lengths, (24, 40), torch.float32))

    ways = ["op", "gathered", "pool", "checkpoints", "blocks", "invariant", "resumable"]
    assert list(calls([300, 70])) == ways and "checkpoints" not in calls([70])
    first = calls([300, 70])["op"]()
    for way in ways[1:]:
        torch.testing.assert_close(calls([300, 70])[way](), first)


def test_report(capsys):
    """Of several functions the fastest one counts; contiguous tensors stand beside contiguous ones."""
    forward.report([*made_up_cells(), *contiguous_cells()])
    lines = " ".join(capsys.readouterr().out.split())
    assert "bench 2x8 1x512 0.0100 50% of the floor fla 3.00x flash_qla_jit 0.80x flashinfer 2.00x" in lines
    assert "bench 2x8 ragged32 0.1000 5% of the floor fla 6.00x flash_qla_jit 2.00x" in lines
    assert (
        "flash_qla_jit over flash_qla, ms: geometric mean 1.265, least 0.80 (bench 2x8 1x512), 1 of 2 below 1" in lines
    )
    assert "nocp, auto_cp=False: bench 2x8 1x512 0.0125 40% of the floor" in lines and "the default 0.80x" in lines
    assert "op_contiguous, the op with contiguous q, k and v: bench 2x8 1x512 0.0040" in lines and "fla 5.00x" in lines
    cell = {"heads": "2x8", "state_dtype": "fp32", "tokens": 1, "keep": "last", "batch": 64, "bytes": 4.28e6}
    us = {"flash_qla": (4.0, 2.0), "vllm": (3.0,)}
    decode.report([cell | {"package": package, "us": x} for package, times in us.items() for x in times])
    assert "2x8 fp32 1 last 64 2.0000 50% of the floor vllm 1.50x" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("wrong", (4.2, math.nan))
def test_report_says_who_disagrees(wrong):
    cells = made_up_cells()
    cells[2]["sketches"] = {"o": [3.0, wrong], "final_state": [1.0, 0.0]}
    assert forward.problems(cells) == [
        f"DISAGREEMENT with flash_qla's default, fla default bench 2x8 1x512: {0 * wrong + 4e-2:.1e}",
        "NOT MEASURED, flashinfer default bench 2x8 ragged32: RuntimeError: no",
    ]


# All figures in one call

TINY = ["--heads", "1x2"]
TINY_SECTIONS = {
    **{name: [*TINY, "--batches", "1"] for name in ("decode", "plain", "drafts")},
    "accuracy": ["--cases", "2x8 1x1"],
    "host": [*TINY, "--device", "cpu", "--batches", "1"],
}


def test_each_section_is_measured(on_cpu, monkeypatch, tmp_path):
    """At tiny sizes, in this process. Every table can be made of the file."""
    monkeypatch.setattr(decode, "ROTATED_BYTES", 1)
    sections = all_figures.PROCESSES[0].sections
    assert sections == list(all_figures.SECTIONS)
    small, results, begin = [*TINY, "--sequences", "70"], {}, common.environment() | {"commit": "1"}
    for name in sections:
        all_figures.measure("flash_qla", [name], tmp_path / "cells", TINY_SECTIONS.get(name, small))
    lines = [json.loads(line) for line in (tmp_path / "cells").read_text().splitlines()]
    all_figures.merge(lines, "flash_qla", results, "")
    assert all(found["cells"] and not found["failed"] for found in results.values())
    all_figures.write(tmp_path / "h100.json", results, begin)
    assert all_figures.read(tmp_path / "h100.json", begin) == results
    assert all_figures.read(tmp_path / "h100.json", begin | {"commit": "2"}) == {}  # of another commit
    data = report.load(tmp_path)
    for table in report.TABLES.values():
        assert "| " in table(data)


def test_a_section_that_fails_is_measured_again(monkeypatch, tmp_path):
    """The next one runs, and another call measures what is missing."""
    fails = {"decode": "ValueError: no", "prefill": "the process ended with status -11"}

    def measure_section(package, name, more):
        yield {"package": package}
        if name == "prefill" and name in fails:
            raise SystemExit
        if name in fails:
            raise ValueError("no")

    def run_process(process, sections, seconds, out, options):
        try:
            all_figures.measure(process.package, sections, out, [])
        except SystemExit:
            return fails["prefill"]
        return ""

    monkeypatch.setattr(all_figures, "measure_section", measure_section)
    monkeypatch.setattr(all_figures, "run_process", run_process)
    process, results = all_figures.Process("fla", ["forward", "decode", "prefill", "host"]), {}
    all_figures.measure_process(process, time.monotonic() + 100, results, None)
    failed = {name: found["failed"]["fla"] for name, found in results.items() if found["failed"]}
    assert failed == fails and list(results) == process.sections
    fails.clear()
    results["forward"]["cells"].append({"package": "flash_qla"})
    all_figures.measure_process(process, time.monotonic() + 100, results, None)
    assert not any(found["failed"] for found in results.values())
    assert [len(found["cells"]) for found in results.values()] == [2, 1, 1, 1]
    assert not all_figures.is_done(results, "forward", "flash_qla")


def test_processes_are_started_and_stopped(tmp_path):
    given, ours = all_figures.make_parser().parse_args([]), all_figures.PROCESSES[0]
    assert all_figures.run_process(ours, ["ceilings"], 100, tmp_path / "cells", given) == ""
    lines = [json.loads(line) for line in (tmp_path / "cells").read_text().splitlines()]
    assert lines[1] == {"section": "ceilings", "cell": common.ceilings()}
    assert all_figures.run_process(ours, ["ceilings"], 0, tmp_path / "cells", given) == "stopped after 0 s"
    assert not all_figures.importable("flash_qla_jit", given) and all_figures.importable("flash_qla", given)


def test_peers_come_first_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "already")
    monkeypatch.setenv("AWAY", "1")
    options = argparse.Namespace(package_path=None, peers_path="peers")
    peer = common.package_environment("flash_qla_jit", options, {"AWAY": None, "THERE": "2"})
    assert peer["PYTHONPATH"] == f"peers{os.pathsep}already"
    assert peer["THERE"] == "2" and "AWAY" not in peer
    assert common.package_environment("flash_qla", options, {})["PYTHONPATH"] == "already"


# Tables


def card_results() -> dict:
    """Results of the forward, of the step, of prefill and of decoding, as all.py writes them."""
    forward_cells = made_up_cells()
    forward_cells += [cell | {"variant": "op", "ms": 0.8 * cell["ms"]} for cell in forward_cells[:2]]
    step = {"package": "flash_qla", "version": "1", "heads": "2x8", "sequences": "1x512", "extra_bytes": 2**20}
    key = {"heads": "2x8", "batch": 8, "tokens": 1, "keep": "last", "state_dtype": "fp32", "bytes": 4.28e6}
    us = {"flash_qla": 2.0, "vllm": 3.0, "sglang": 5.0, "attn_gym": 1.0}
    prefill_cell = {"package": "flash_qla", "heads": "2x8", "sequences": "1x512", "state_dtype": "bf16"}
    sections = {
        "ceilings": [common.CEILINGS["H200"]],
        "forward": forward_cells,
        "backward": [step | {"step_ms": 2.0}, step | {"package": "fla", "step_ms": 6.0, "extra_bytes": 2**21}],
        "decode": [{"package": name, "version": "1", "us": x, **key} for name, x in us.items()],
        "prefill": [
            prefill_cell | {"ms": {"op": 0.5, "gathered": 1.2, "pool": 0.6, "checkpoints": 0.8}},
            prefill_cell | {"package": "flashinfer", "ms": {"gathered": 0.9, "pool": 1.5}},
        ],
    }
    environment = {"gpu": "NVIDIA H100", "driver": "580", "torch": "2.11", "commit": "1"}
    return {"environment": environment, "sections": {name: {"cells": cells} for name, cells in sections.items()}}


def tables_of(folder, **results: dict) -> dict[str, str]:
    for name, x in results.items():
        (folder / f"{name}.json").write_text(json.dumps(x))
    data = report.load(folder)
    return {name: table(data) for name, table in report.TABLES.items()}


def test_geometric_means(tmp_path):
    lines = tables_of(tmp_path, h100=card_results())["means"].splitlines()
    assert lines[:2] == ["| call | compared with | H100 |", "|---|---|---|"]
    for row in (
        "forward | FLA | 5.30 (least 3.75, 0 of 2 below 1)",
        "forward | FlashQLA | 1.58 (least 1.00, 0 of 2 below 1)",
        "forward | FlashInfer | 2.50 (least 2.50, 0 of 1 below 1)",
        "low-level forward | FlashQLA | 1.26 (least 0.80, 1 of 2 below 1)",
        "training step | FLA | 3.00 (least 3.00, 0 of 1 below 1)",
        "memory of a step | FLA | 2.00 (least 2.00, 0 of 1 below 1)",
        "decoding, fp32 states | vLLM/SGLang | 1.50 (least 1.50, 0 of 1 below 1)",
        "decoding, fp32 states | attn-gym | 0.50 (least 0.50, 1 of 1 below 1)",
        "prefill on a pool | the op between copies | 2.00 (least 2.00, 0 of 1 below 1)",
        "prefill on a pool | FlashInfer | 1.50 (least 1.50, 0 of 1 below 1)",
        "prefill with checkpoints | without them | 0.75 (least 0.75, 1 of 1 below 1)",
    ):
        assert f"| {row} |" in lines
    assert not [line for line in lines if "2 GPUs" in line or "text by" in line]  # nobody measured them
    assert lines[-1].startswith("H100: driver 580, torch 2.11, FLA 1, FlashInfer 1, FlashQLA 1, ")


def test_cells_of_two_cards(tmp_path, monkeypatch):
    """What one of them has not measured is a dash."""
    monkeypatch.setattr(report, "README_CELLS", {"forward": "2x8 1x512, 2x8 ragged32"})
    monkeypatch.setattr(report, "SPEED_CELLS", {"decoding, fp32 states": "2x8 8"})
    other = card_results()
    del other["sections"]["decode"]
    tables = tables_of(tmp_path, h100=card_results(), h200=other)
    lines = tables["forward"].splitlines()
    assert lines[0] == ("| call | heads | sequences | H100 | of the floor | others | H200 | of the floor | others |")
    first = "0.008 ms | 62% | FLA 3.75, FlashQLA 1.00, FlashInfer 2.50"
    assert lines[2] == f"| forward | 2x8 | 1x512 | {first} | {first} |"
    assert "| 2x8 | ragged32 | 0.080 ms | 6% | FLA 7.50, FlashQLA 2.50 |" in lines[3]
    row = "| 2.0 us | 50% | vLLM/SGLang 1.50, attn-gym 0.50 | - | - | - |"
    assert tables["cells"].splitlines()[2] == f"| decoding, fp32 states | 2x8 | 8 {row}"


def test_contiguous_tensors_are_named(tmp_path):
    """The line below a table says that q, k and v were contiguous in cells that have no field, and in which."""
    results = card_results()
    assert tables_of(tmp_path, h100=results)["summary"].endswith(", contiguous q, k and v.")
    slices = [cell | {"qkv": "slices"} for cell in results["sections"]["forward"]["cells"]]
    results["sections"]["forward"]["cells"] = [*slices, *contiguous_cells()]
    tables = tables_of(tmp_path, h100=results)
    assert tables["forward"].endswith("FlashQLA 1.")
    assert "contiguous q, k and v in the sections backward." in " ".join(tables["summary"].split())


def test_other_files_of_a_card(tmp_path):
    """Ranks and text have files of their own."""
    rank = {"package": "flash_qla", "heads": "2x8", "sequences": "1x64", "scaling": "strong", "ranks": 1}
    text = {"package": "own", "engine": "vllm", "version": "0.1", "architecture": "x", "states": "x", "feature": "x"}
    cells = {
        "context_parallelism_h100": [rank | {"forward_ms": 1.0}, rank | {"ranks": 2, "forward_ms": 0.5}],
        "generation_h100": [
            text | {"tokens_per_s": [10.0, 20.0, 90.0]},
            text | {"package": "flash_qla", "tokens_per_s": [30.0]},
        ],
    }
    environment = {"driver": "580", "torch": "2.11"}
    tables = tables_of(tmp_path, **{name: {"environment": environment, "cells": x} for name, x in cells.items()})
    assert "| forward on 2 GPUs | one GPU | 2.00 (least 2.00, 0 of 1 below 1) |" in tables["means"]
    assert "| text by vLLM | its own kernels | 1.50 (least 1.50, 0 of 1 below 1) |" in tables["means"]
    assert tables["means"].endswith("H100: driver 580, torch 2.11, vLLM 0.1, contiguous q, k and v.")


def test_pages_are_filled(tmp_path):
    tables = tables_of(tmp_path, h100=card_results())
    data = report.load(tmp_path)
    page = "# Page\n\n<!-- report: summary -->\n\nold\n\n<!-- end report -->\n\nmore\n"
    new = report.filled(page, data)
    assert new == page.replace("old", tables["summary"]) and report.filled(new, data) == new
    with pytest.raises(KeyError, match="unknown"):
        report.filled(page.replace("summary", "unknown"), data)
    with pytest.raises(ValueError, match="a table has no <!-- end report -->"):
        report.filled(page.replace("end report", ""), data)
    assert report.TABLES["means"]({}) == "Not measured on any card."


# Context parallelism over ranks

SMALL = ("--device", "cpu", "--head-dims", "16x8", "--heads", "1x2", "--sequences", "1x1024", "--samples", "1")


def small_options(*more: str):
    return context_parallelism.make_parser().parse_args([*SMALL, *more])


def test_context_parallelism_on_two_ranks(tmp_path):
    """The benchmark runs on the CPU, with the same results on one rank and on two. FLA's cannot run there."""
    program, file = BENCHMARKS / "context_parallelism.py", tmp_path / "both.json"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for before, after in (([], []), (ranks, ["--layout", "zigzag"])):
        command = [sys.executable, *before, program, *SMALL, "--packages", "flash_qla", *after, "--out", file]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COMMIT": "1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
    one, two = json.loads(file.read_text())["cells"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert two["sketches"].keys() == {"o", "dq", "dk", "dv", "dg", "db"}
    for name, x in two["sketches"].items():
        assert context_parallelism.difference(x, one["sketches"][name]) < 1e-2, name
    command = [sys.executable, program, "--report", file]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "W=2" in printed and "differences o" in printed


def test_runs_add_their_cells_to_one_file(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMIT", "a")
    path, cell = tmp_path / "cp.json", {"heads": "2x8", "ranks": 1, "ms": 1}

    def ms_after(cell: dict) -> list[int]:
        common.add_results(path, [cell], ("heads", "ranks"))
        return [cell["ms"] for cell in json.loads(path.read_text())["cells"]]

    assert ms_after(cell) == [1] and ms_after(cell | {"ranks": 2, "ms": 2}) == [1, 2]
    assert ms_after(cell | {"ms": 3}) == [3, 2]
    monkeypatch.setenv("COMMIT", "b")
    assert ms_after(cell | {"ms": 4}) == [4]


# Engines


class StubLLM:
    """An engine whose next token is the sum of a request's tokens, and whose layers make one call a token."""

    def __init__(self, **arguments):
        self.layers = sys.modules[f"{generation_vllm.GDN}.olmo_gdn_linear_attn"]
        self.shift = int(arguments["seed"])
        assert json.loads(Path(arguments["model"], "config.json").read_text())["model_type"] == "olmo_hybrid"
        assert arguments["enforce_eager"]

    def apply_model(self, function):
        function(torch.nn.Linear(2, 2))

    def generate(self, prompts, sampling, use_tqdm):
        return [self.complete(x["prompt_token_ids"], sampling) for x in prompts]

    def complete(self, prompt, sampling):
        tokens = []
        for i in range(sampling.max_tokens):
            self.layers.chunk_gated_delta_rule()
            tokens.append((sum(prompt) + self.shift * (i == 3)) % 100)
        logprobs = None
        if sampling.logprobs:
            logprobs = [{i: SimpleNamespace(logprob=-0.25 * i) for i in range(sampling.logprobs)}] * len(tokens)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])


def test_cells_of_an_engine(on_cpu, monkeypatch, capsys):
    stub_modules(
        monkeypatch,
        vllm={"__version__": "0.0", "LLM": StubLLM, "SamplingParams": lambda **given: SimpleNamespace(**given)},
    )
    layers = types.ModuleType(f"{generation_vllm.GDN}.olmo_gdn_linear_attn")
    layers.chunk_gated_delta_rule = lambda: None
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    monkeypatch.setattr(generation_vllm, "LOADS", {"prefill": (2, 8, 1), "decode": (3, 2, 5)})

    def cells_of(shift):
        arguments = json.dumps({"seed": shift, "enforce_eager": True})
        given = ["--architecture", "olmo_hybrid", "--samples", "2", "--engine-arguments", arguments]
        return list(generation.measure(generation.make_parser().parse_args(given), "eager", ours=False))

    own, shifted = cells_of(0), cells_of(1)
    calls = 2 * 24 * generation_vllm.NEW_TOKENS + 3 * (2 * 1 + 3 * 5)
    assert own[-1]["calls"] == {"total": calls, "flash_qla": 0}
    assert [len(cell["tokens_per_s"]) for cell in own[1:]] == [2, 2]
    assert generation.compare(own[0]["completions"], own[0]["completions"])["same"] == 24
    prefill_cell = generation.report(own, shifted)[2]
    assert prefill_cell["same_tokens"] == {"same": 0, "of": 24, "margins": [0.25] * 24}
    expected = "vllm 0.0, olmo_hybrid, float32 states, eager: the same tokens in 0 of 24 requests, margins up to 0.25"
    assert capsys.readouterr().out.splitlines()[0] == expected


SMALL_MODEL = {
    **{"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "head_dim": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("architecture", generation.ARCHITECTURES)
def test_transformers_generate(on_cpu, architecture, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    generation_transformers = importlib.import_module("generation_transformers")
    monkeypatch.setattr(generation, "VOCABULARY", 100)
    for name, value in {"PROMPTS": (2, (9, 9)), "NEW_TOKENS": 4, "LOADS": {"batch 2": (2, 9, 4)}}.items():
        monkeypatch.setattr(generation_transformers, name, value)
    sizes = SMALL_MODEL | ({"linear_num_key_heads": 4} if architecture == "olmo_hybrid" else {})
    given = ["--engine", "transformers", "--architecture", architecture, "--layers", "4", "--samples", "1"]
    given = generation.make_parser().parse_args([*given, "--engine-arguments", json.dumps(sizes)])
    own, ours = (list(generation.measure(given, "eager", x)) for x in (False, True))
    assert ours[1]["calls"] == {"total": 3, "flash_qla": 3}
    assert max(generation.compare(own[0]["completions"], ours[0]["completions"])["margins"], default=0) < 0.2
    assert own[1]["tokens_per_s"][0] > 0


def test_plugin_of_sglang(tmp_path, monkeypatch):
    """importlib.metadata finds it in a process of SGLang's. It counts SGLang's own functions and flash_qla's."""
    generation_sglang = importlib.import_module("generation_sglang")
    for name in ("PYTHONPATH", "SGLANG_PLUGINS"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setattr(sys, "path", list(sys.path))
    generation_sglang.add_plugin(tmp_path)
    code = "from importlib.metadata import entry_points\n"
    code += "print([x.load().__name__ for x in entry_points(group='sglang.srt.plugins') if x.name.startswith('gener')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "['in_scheduler']", found.stderr

    import flash_qla

    loader, layers = (types.ModuleType(x) for x in ("sglang.srt.model_loader.loader", generation_sglang.MODULE))
    layers.chunk_gated_delta_rule = lambda: None
    for module in (loader, layers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in generation_sglang.CALLED:
        monkeypatch.setattr(flash_qla, name, lambda: None)
    notes = tmp_path / "notes.json"
    monkeypatch.setenv(generation_sglang.NOTES, str(notes))
    monkeypatch.setenv("FLASH_QLA_SGLANG", "1")
    monkeypatch.setattr(generation_sglang.multiprocessing, "parent_process", lambda: 1)
    generation_sglang.in_scheduler()
    assert loader.initialize_dummy_weights is generation.initialize
    layers.chunk_gated_delta_rule()
    flash_qla.decode_gated_delta_rule_packed()
    deadline = time.monotonic() + 20
    while not notes.exists() or json.loads(notes.read_text()) != {"own": 1, "flash_qla": 1}:
        assert time.monotonic() < deadline
        time.sleep(0.05)


FAILING = """
import json, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if arguments["--features"] == "hangs":
    time.sleep(60)
if arguments["--features"] == "fails" and arguments["--measure"] == "own":
    sys.exit("no engine here")
cell = {"package": arguments["--measure"], "engine": "vllm", "version": "0", "architecture": "qwen3_5", "layers": 4}
cell |= {"states": "float32", "feature": arguments["--features"]}
load = {"load": "decode", "tokens_per_s": [1.0], "calls": {"total": 1, "flash_qla": 1}}
open(arguments["--out"], "w").write(json.dumps([cell | {"completions": []}, cell | load]))
"""


def test_engines_that_fail(tmp_path, monkeypatch):
    """A process that fails or hangs costs nothing but its own feature."""
    (tmp_path / "generation.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["generation.py", "--out", "out.json", "--features", "works,hangs,fails", "--limit-s", "2"]
    )
    with pytest.raises(SystemExit, match="failed: hangs, fails"):
        generation.main()
    cells = json.loads(Path("out.json").read_text())["cells"]
    assert [(x["package"], x["feature"]) for x in cells] == [("own", "works"), ("flash_qla", "works")]
