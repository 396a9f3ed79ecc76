"""The benchmarks compute what they say, and report what they measured; timing needs a GPU."""

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dispatched import Ran

from flash_qla import _C

pytestmark = pytest.mark.long

if importlib.util.find_spec("transformers") is not None:
    importlib.import_module("test_transformers")  # imports models without FLA, which needs a GPU, before others do

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
all_figures = importlib.import_module("all")
common = importlib.import_module("common")
backward = importlib.import_module("backward")
context_parallelism = importlib.import_module("context_parallelism")
decode = importlib.import_module("decode")
decode_region = importlib.import_module("decode_region")
decode_steps = importlib.import_module("decode_steps")
dispatch = importlib.import_module("dispatch")
forward = importlib.import_module("forward")
generation = importlib.import_module("generation")
generation_vllm = importlib.import_module("generation_vllm")
layers = importlib.import_module("layers")
prefill = importlib.import_module("prefill")
region = importlib.import_module("region")
report = importlib.import_module("report")
stages = importlib.import_module("stages")

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
    defaults = {"heads": "1x2", "sequences": "64x2", "head_dims": (24, 40), "samples": 3, "sample_ms": 1.0}
    defaults |= {"variants": ""}
    return argparse.Namespace(**defaults | changes)


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
    calls = []
    chunk = {"chunk_gated_delta_rule_fwd": lambda **arguments: calls.append(arguments)}
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
        assert calls[0][name].is_contiguous() and set(calls[0][name].flatten().tolist()) == {number}


def test_cells_of_the_passes(on_cpu, monkeypatch):
    """They say how q, k and v lie, and head dimensions other than 128x128. Peers have one contiguous variant."""
    ours, strides = forward.load_flash_qla(), []

    def prepare(inputs, variant):
        strides.append(inputs["v"].is_contiguous())
        return ours.prepare(inputs, variant)

    for package in ("flash_qla", "fla"):
        monkeypatch.setitem(forward.LOADERS, package, lambda: forward.Package("1", prepare, ours.results))
    monkeypatch.setattr(forward, "check", lambda *_: {"o": 0.0, "final_state": 0.0})
    arguments = options(gates="bench", variants="op,contiguous,op_contiguous,fp16")
    cells = [cell for package in ("flash_qla", "fla") for cell in forward.measure(package, arguments)]
    variants = ["default", "op", "contiguous", "op_contiguous", "fp16", "default", "contiguous"]
    assert [cell["variant"] for cell in cells] == variants and not any("error" in cell for cell in cells)
    assert [cell["qkv"] == "contiguous" for cell in cells] == strides == ["contiguous" in x for x in variants]
    assert cells[2]["sketches"] == cells[0]["sketches"] and cells[3]["sketches"] == cells[1]["sketches"]

    cases = ((common.HEAD_DIMS, False), ((24, 40), True))
    arguments = [options(head_dims=x, activations=inside, variants="contiguous") for x, inside in cases]
    (first, second), (other, _) = (list(backward.measure("flash_qla", x)) for x in arguments)
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


def test_decode_region(on_cpu, capsys):
    """All functions, which agree on a token: those of one kernel and of the parts."""
    case = decode_region.Case(2, 4, batch=2, tokens_each=1, head_dims=(16, 8))
    calls = decode_region.flash_qla_calls(case)
    pools = [x.clone() for x in (case.windows, case.states)]
    y = calls["region"]()
    for x, before in zip((case.windows, case.states), pools, strict=True):
        x.copy_(before)
    torch.testing.assert_close(calls["parts"](), y, rtol=0, atol=0)
    cells = list(decode_region.measure("flash_qla", options(heads="2x4", batches="1,2", tokens=1)))
    drafts = list(decode_region.measure("flash_qla", options(heads="2x4", batches="2", tokens=4)))
    assert [cell["function"] for cell in drafts] == ["region", "rule"]
    assert [cell["function"] for cell in cells] == ["region", "parts", "rule"] * 2
    decode_region.report(cells)
    assert capsys.readouterr().out.count("% of the floor") == 6
    # Sequences read a state of 4 x 8 x 16 numbers, and write one for each token. A window is read and written; a token
    # has 64 + 32 channels of mixed, 32 of z and 32 of y.
    for tokens, columns in ((1, 3), (4, 6)):
        bytes_of_sequence = 4 * 512 * (1 + tokens) + 2 * 2 * 96 * columns + 2 * tokens * (96 + 32 + 32)
        assert decode_region.Case(2, 4, batch=2, tokens_each=tokens, head_dims=(16, 8)).bytes == 2 * bytes_of_sequence


def test_region(on_cpu, capsys):
    """Each part, in both calls, and the error of the whole."""
    cells = list(region.measure("flash_qla", options(sequences="64x2,9+70", parts=",".join(region.PARTS))))
    assert [cell["part"] for cell in cells] == [*region.PARTS] * 2
    assert all(cell["forward_us"] > 0 and cell["step_us"] > 0 for cell in cells)
    assert all(cell["relative_error"] < 1e-2 for cell in cells if cell["part"] == "region")
    region.report(cells)
    assert capsys.readouterr().out.count("% of the floor") == 8


def test_layers(on_cpu, capsys):
    """Both functions of flash_qla are what they say."""
    parser = layers.make_parser()
    small = ["--heads", "1x2", "--head-dims", "16x8", "--layers", "4", "--hidden", "64", "--samples", "1"]
    with Ran() as ran:
        cells = list(layers.measure("flash_qla", parser.parse_args([*small, "--sequences", "1x70,9x2"])))
    assert [(x["function"], x["sequences"]) for x in cells] == [
        (function, sequences) for function in ("region", "parts") for sequences in ("1x70", "9x2")
    ]
    assert {"gated_delta_net", "gated_delta_net_bwd", "causal_conv1d_bwd"} <= {*ran.ops}
    assert all(x["step_tokens_s"] > 0 and x["prefill_tokens_s"] > 0 for x in cells)
    layers.report(cells)
    assert capsys.readouterr().out.count("GiB") == 4
    with pytest.raises(ValueError, match="different lengths"):
        next(layers.measure("flash_qla", parser.parse_args([*small, "--sequences", "9+70"])))


# All figures in one call

TINY = ["--heads", "1x2"]
TINY_SECTIONS = {
    **{
        name: [*TINY, "--batches", "1"]
        for name in ("decode", "portable_decode", "decode_region", "drafts_region", "plain", "drafts")
    },
    "accuracy": ["--cases", "2x8 1x1"],
    "layers": [
        *TINY,
        "--head-dims",
        "16x8",
        "--sequences",
        "1x70",
        "--layers",
        "4",
        "--hidden",
        "64",
        "--samples",
        "1",
    ],
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
    assert all(section["cells"] and not section["failed"] for section in results.values())
    all_figures.write(tmp_path / "h100.json", results, begin)
    assert all_figures.read(tmp_path / "h100.json", begin) == results
    assert all_figures.read(tmp_path / "h100.json", begin | {"commit": "2"}) == {}  # of another commit
    data = report.load(tmp_path)
    for name in report.TABLES.keys() - {"decode_steps", "ranks"}:  # these have files of their own
        assert "| " in report.TABLES[name](data), name


@pytest.mark.parametrize(
    ("package", "expected"), (("flash_qla", "ours:path"), ("flash_qla_jit", "peers:path"), ("fla", "path:peers"))
)
def test_where_a_package_is_found(package, expected, monkeypatch):
    """The published FlashQLA has flash_qla's name: where others are measured it must not hide flash_qla."""
    monkeypatch.setenv("PYTHONPATH", "path")
    options = argparse.Namespace(package_path="ours", peers_path="peers")
    assert common.package_environment(package, options, {"X": "1", "HOME": None})["PYTHONPATH"] == expected


class TimedEngine:
    """A prompt takes five units of time, a step two."""

    def __init__(self):
        self.now = 0.0

    def generate(self, prompts, tokens: int) -> None:
        self.now += 5 * len(prompts) + 2 * tokens


def test_a_step_of_decoding(on_cpu, monkeypatch, capsys):
    """What comes before decoding cancels; a layer's kernels are known by their names."""
    engine = TimedEngine()
    monkeypatch.setattr(decode_steps.time, "perf_counter", lambda: engine.now)
    assert decode_steps.timed_step(engine, [[1], [2]]) == 2
    names = {"_causal_conv1d_update_kernel": 1.0, "decode_region_bf16_K128_fp32": 2.0, "nvjet_tst": 4.0, "prefill": 0.0}
    monkeypatch.setattr(
        decode_steps,
        "kernel_times",
        lambda _, prompts, tokens: Counter({name: 7 * len(prompts) + us * tokens for name, us in names.items()}),
    )
    kernels = decode_steps.profiled_step(engine, [[1]])
    assert list(kernels.values()) == [4, 2, 1] and kernels == {x: us for x, us in names.items() if us}
    assert decode_steps.sum_of_layers(kernels) == 3
    cell = {"package": "own", "requests": 8, "ms": [1.0, 2.0, 3.0], "gpu_us": 7.0, "gdn_us": 3.0, "kernels": kernels}
    decode_steps.report([cell])
    assert "step 2.000 ms (1.000 to 3.000), GPU 7 us, Gated DeltaNet layers 3.0 us" in capsys.readouterr().out


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
    assert lines[0] == "| H100 | FLA | FlashQLA | FlashInfer | attn-gym | vLLM/SGLang |"
    for row in (
        "forward | 5.30 (3.75; 0/2) | 1.58 (1.00; 0/2) | 2.50 (2.50; 0/1) | - | -",
        "training step | 3.00 (3.00; 0/1) | - | - | - | -",
        "memory of a step | 2.00 (2.00; 0/1) | - | - | - | -",
        "decoding, fp32 states | - | - | - | 0.50 (0.50; 1/1) | 1.50 (1.50; 0/1)",
        "prefill on a pool | - | - | 1.50 (1.50; 0/1) | - | -",
        "prefill on a pool | the op between copies | 2.00 (2.00; 0/1)",
        "prefill with checkpoints | without them | 0.75 (0.75; 1/1)",
    ):
        assert f"| {row} |" in lines
    assert any(line.startswith("| low-level forward |") and "| 1.26 (0.80; 1/2) |" in line for line in lines)
    assert not [line for line in lines if "text by" in line]  # nobody measured them
    assert lines[-1].startswith("H100: driver 580, torch 2.11, FLA 1, FlashInfer 1, FlashQLA 1, ")


def test_cells_have_a_table_for_each_card(tmp_path, monkeypatch):
    """Without the rows that the card lacks."""
    monkeypatch.setattr(report, "SPEED_CELLS", {"forward": "2x8 1x512, 2x8 1x9", "training step": "2x8 1x512"})
    tables = tables_of(tmp_path, h100=card_results(), h200=card_results())["cells"]
    for card in ("H100", "H200"):
        assert f"| call | heads | sequences | {card} | of the floor | others |" in tables
    row = "| forward | 2x8 | 1x512 | 0.008 ms | 62% | FLA 3.75, FlashQLA 1.00, FlashInfer 2.50 |"
    assert tables.count(row) == 2 and "1x9 |" not in tables


def test_steps_of_decoding(tmp_path):
    """A card that has no other results is in no table of the calls."""
    times = {"own": {"ms": [1.0, 2.0, 4.0], "gpu_us": 900.0, "gdn_us": 60.0}}
    times["flash_qla"] = {"ms": [1.0, 1.5, 2.0], "gpu_us": 870.0, "gdn_us": 30.0}
    cells = [{"package": package, "engine": "vllm", "requests": 8, **x} for package, x in times.items()]
    steps = {"environment": card_results()["environment"], "cells": cells}
    tables = tables_of(tmp_path, h100=card_results(), decode_steps_h200=steps)
    row = "| H200 | 8 | 60 us | 30 us | 2.00 | 900 us | 870 us | 2.0 ms (1.0 to 4.0) | 1.5 ms (1.0 to 2.0) |"
    assert row in tables["decode_steps"]
    assert "H200" not in tables["means"] + tables["cells"] + report.overview(report.load(tmp_path))


def test_the_figure_is_sorted(tmp_path):
    """By the largest means, and well-formed."""
    (tmp_path / "h100.json").write_text(json.dumps(card_results()))
    svg = xml.etree.ElementTree.fromstring(report.overview(report.load(tmp_path)))
    texts = [element.text for element in svg.iter() if element.get("text-anchor") == "end"]
    first = [
        "forward: FLA",
        "training step: FLA",
        "forward: FlashInfer",
        "forward: FlashQLA",
        "prefill on a pool: FlashInfer",
    ]
    assert [text for text in texts if text in first] == first


# Context parallelism over ranks

SMALL = ("--device", "cpu", "--head-dims", "16x8", "--heads", "1x2", "--sequences", "1x1024", "--samples", "1")


def test_context_parallelism_on_two_ranks(tmp_path):
    """The benchmark runs on the CPU, with the same results on one rank and on two, and predicts. FLA's cannot run
    there."""
    program, file = BENCHMARKS / "context_parallelism.py", tmp_path / "both.json"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    zigzag = ["--layout", "zigzag"]
    for before, after in (([], []), (ranks, zigzag), ([], [*zigzag, "--parts", "2,8"])):
        command = [sys.executable, *before, program, *SMALL, "--packages", "flash_qla", *after, "--out", file]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COMMIT": "1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
    cells = json.loads(file.read_text())["cells"]
    one, two, *parts = cells
    assert [x["ranks"] for x in cells] == [1, 2, 2, 8]
    for part, prediction, factor in zip(parts, context_parallelism.predictions(cells), (1, 7), strict=True):
        for name, gathers in (("forward_ms", 1), ("step_ms", 2)):
            assert prediction[name] == pytest.approx(part[name] + gathers * factor * two["gather_ms"])
    as_contiguous = [x | {"layout": x["layout"] and "contiguous"} for x in cells]
    table = report.ranks({"H200": {"context_parallelism": {"cells": as_contiguous}}})
    assert "|" not in report.ranks({"H200": {"context_parallelism": {"cells": cells[1:]}}})  # of zigzag alone
    assert (
        f"| step | 1x2 of 16x8 | 1x1024 | {one['step_ms']:.2f} ms | {one['step_ms'] / two['step_ms']:.2f} | - |"
        in table
    )
    assert two["differences"].keys() == one["sketches"].keys() == {"o", "dq", "dk", "dv", "dg", "db"}
    assert max(two["differences"].values()) < 1e-2 and "sketches" not in two
    command = [sys.executable, program, "--report", file]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "W=2" in printed and "differences o" in printed


# Engines


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
    arguments = ["--engine", "transformers", "--architecture", architecture, "--layers", "4", "--samples", "1"]
    arguments = generation.make_parser().parse_args([*arguments, "--engine-arguments", json.dumps(sizes)])
    theirs, ours = (list(generation.measure(arguments, "eager", x)) for x in (False, True))
    assert ours[1]["calls"] == {"total": 3, "flash_qla": 3}
    assert max(generation.compare(theirs[0]["completions"], ours[0]["completions"])["margins"], default=0) < 0.2
    assert theirs[1]["tokens_per_s"][0] > 0


def test_each_statement_of_a_kernel_runs_twice(tmp_path):
    """A product goes on with its sum, and what waits or signals runs once."""
    product = [
        "tl::initialize_wgmma_descriptor<1, 1, 64>(desc_b, (&(((bfloat16_t*)K_s)[0])));",
        "for (int ki = 0; ki < 8; ++ki) {",
        "tl::wgmma_rs<64>(S_16, desc_b, reinterpret_cast<uint32_t*>(V_new + 0), ((0 < ki) ? 1 : 0));",
        "}",
        "tl::warpgroup_commit_batch();",
    ]
    lines = [*product, "  flash_qla::device::round(S, 2);", "  flash_qla::device::wait_for_boxes();"]
    source = tmp_path / "kernel.cu"
    source.write_text("\n".join(lines) + "\n")
    edited = {name: edits.get(source) for name, edits in stages.variants(source, tmp_path).items()}
    again = [line.replace("((0 < ki) ? 1 : 0)", "1") for line in product[1:4]]
    assert edited == {
        "": None,
        "   1 product K -> V_new": "\n".join([*product[:4], *again, *lines[4:]]) + "\n",
        "   6 round": "\n".join([*lines[:6], *lines[5:]]) + "\n",
    }
    kernels = BENCHMARKS.parent / "kernels_tl"
    for file, texts in stages.HEADER_STATEMENTS.values():
        assert all((kernels / file).read_text().count(text) == 1 for text in texts)
