"""The benchmarks compute what they say, and report what they measured; timing needs a GPU. The file is long because it
has the tests of all scripts in benchmarks/."""

import argparse
import importlib
import json
import math
import os
import socket
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
host = importlib.import_module("host")
peer_errors = importlib.import_module("peer_errors")
prefill = importlib.import_module("prefill")
report = importlib.import_module("report")

MS = {
    "flash_qla": {"1x512": 0.01, "ragged32": 0.1},
    "fla": {"1x512": 0.03, "ragged32": 0.6},
    "flash_qla_jit": {"1x512": 0.008, "ragged32": 0.2},
    "flashinfer": {"1x512": 0.02},  # the other cell failed
}
OTHER_DIMS = {"head_dims": "96x192"}
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
    variant = {"variant": "nocp", "ms": 0.0125}
    return [*cells, cells[0] | variant]


def contiguous_cells() -> list[dict]:
    first = made_up_cells()[0] | {"qkv": "contiguous"}
    ms = {("flash_qla", "contiguous"): 0.005, ("flash_qla", "op_contiguous"): 0.004, ("fla", "contiguous"): 0.02}
    return [first | {"package": package, "variant": variant, "ms": x} for (package, variant), x in ms.items()]


@pytest.fixture
def results(tmp_path):
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"environment": {}, "cells": made_up_cells()}))
    return file


def test_parse_lengths():
    assert common.parse_lengths("1x8192") == [8192]
    assert common.parse_lengths("8192x4") == [8192] * 4
    assert common.parse_lengths("28672+4096") == [28672, 4096]
    ragged = common.parse_lengths("ragged32")
    assert len(ragged) == 32 and sum(ragged) == 32768 and 1 <= min(ragged) < 100 and max(ragged) > 2000
    assert ragged == common.parse_lengths("ragged32")


def test_head_dims():
    parser = argparse.ArgumentParser()
    common.add_timing_arguments(parser, "16x32", "1x8192")
    assert parser.parse_args([]).head_dims == common.HEAD_DIMS == (128, 128)
    assert parser.parse_args(["--head-dims", "96x192"]).head_dims == (96, 192)
    for wrong in ("96", "96x192x2", "96x"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--head-dims", wrong])
    assert common.head_dims_field((96, 192)) == OTHER_DIMS and common.head_dims_field((128, 128)) == {}
    cell = {"heads": "16x32"}
    assert common.heads_of(cell) == "16x32" and common.heads_of(cell | OTHER_DIMS) == "16x32 of 96x192"


def test_floor():
    """16x64 heads are bound by the matrix work, 16x16 by memory."""
    for H_k, H_v, expected in ((16, 64, 164e3 * 64 / 796e12), (16, 16, (4 * 128 * 32 + 8 * 16) / 4.28e12)):
        floor = common.floor_ms(1000, forward.flop(128, 128) * H_v, forward.traffic(H_k, H_v, 128, 128))
        assert floor == pytest.approx(1e6 * expected)


def test_matrix_work_and_traffic():
    """Those of 128x128 are what stored results have; matrix work per token is of a chunk of 64."""
    assert (forward.flop(128, 128), backward.flop(128, 128)) == (164e3, 442e3)
    keys, values, states, tokens = 64 * 64 * 96, 64 * 64 * 192, 64 * 96 * 192, 64**3
    assert forward.flop(96, 192) == pytest.approx(2 * (2 * keys + 2 * values + 3 * states) / 64, rel=5e-3)
    step = 2 * (5 * keys + 5 * values + 8 * states + 2 * tokens) / 64
    assert backward.flop(96, 192) == pytest.approx(step, rel=5e-3)
    assert backward.traffic(16, 32, 128, 128) == 8 * 128 * 16 + 6 * 128 * 32 + 16 * 32

    size = {"keys": 2 * 96 * 16, "values": 2 * 192 * 32, "gates": 4 * 32}  # bytes of a token
    assert forward.traffic(16, 32, 96, 192) == 2 * size["keys"] + 2 * size["values"] + 2 * size["gates"]
    expected = 4 * size["keys"] + 3 * size["values"] + 4 * size["gates"]
    assert backward.traffic(16, 32, 96, 192) == expected


@pytest.fixture
def on_cpu(monkeypatch):
    """Calls run on the CPU; nothing is timed, and no bytes are counted."""
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(backward, "time_graph", lambda call, *_: call() and [1.0, 2.0, 3.0])
    monkeypatch.setattr(decode, "time_graph", lambda call, *_: call() or [1.0, 2.0, 3.0])
    monkeypatch.setattr(prefill, "time_graph", lambda call, *_: call() is None or [1.0])
    monkeypatch.setattr(dispatch, "time_graph", lambda call, *_: call() and [1.0, 2.0, 3.0])
    monkeypatch.setattr(dispatch, "figures_of_card", lambda: _C.cards()["H200"])
    monkeypatch.setattr(backward, "workspace", lambda call: (call(), 0))
    monkeypatch.setattr(backward, "step_memory", lambda step: {"saved_bytes": 0, "extra_bytes": 0})
    monkeypatch.setattr(forward, "time_graph", lambda *_: [1.0, 2.0, 3.0])
    monkeypatch.setattr(forward, "workspace", lambda call: (call(), 0))


def options(**changes) -> argparse.Namespace:
    given = {"heads": "1x2", "sequences": "64x2", "head_dims": (24, 40), "samples": 3, "sample_ms": 1.0}
    given |= {"variants": ""}
    return argparse.Namespace(**given | changes)


def test_inputs(on_cpu):
    inputs, gradients = common.make_inputs(**HEADS, lengths=[70, 3], head_dims=(24, 40), gradients=True)
    assert inputs["q"].shape == inputs["k"].shape == (1, 73, 1, 24)
    assert inputs["v"].shape == gradients["do"].shape == (1, 73, 2, 40)
    assert inputs["initial_state"].shape == gradients["dht"].shape == (2, 2, 24, 40)
    assert inputs["scale"] == 24**-0.5


def test_inputs_are_slices(on_cpu):
    """q, k and v follow one another in each row of one tensor. `contiguous` copies what is not contiguous yet."""
    inputs = common.make_inputs(**HEADS, lengths=[70, 3], head_dims=(24, 40))
    row = 2 * 24 + 2 * 40
    q, k, v = (inputs[name] for name in "qkv")
    assert [x.storage_offset() for x in (q, k, v)] == [0, 24, 48]
    assert {x.stride(1) for x in (q, k, v)} == {row} and {x.untyped_storage().data_ptr() for x in (q, k, v)} == {
        q.untyped_storage().data_ptr()
    }
    once = common.contiguous(inputs)
    twice = common.contiguous(once)
    for name, x in inputs.items():
        if name in ("q", "k", "v"):
            assert once[name].is_contiguous() and torch.equal(once[name], x) and twice[name] is once[name]
        else:
            assert once[name] is x


def stub_modules(monkeypatch, **modules: dict):
    """Modules with these names, __ for a dot, and these contents."""
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), SimpleNamespace(**contents))


def stub_peer(monkeypatch, package: str, fwd=None, bwd=None, operator=None):
    """Stand-ins for a peer's functions."""
    functions = {"chunk_gated_delta_rule_fwd": fwd, "chunk_gated_delta_rule_bwd": bwd}
    public = {"chunk_gated_delta_rule": operator}
    if package == "flashinfer":
        monkeypatch.setattr(forward, "flashinfer_function", lambda: ("1", fwd))
    elif package == "flash_qla_jit":
        monkeypatch.setattr(torch.ops, "flash_qla", SimpleNamespace())
        stub_modules(monkeypatch, flash_qla={"__version__": "1", **functions, **public}, tilelang={"__version__": "1"})
    else:
        stub_modules(
            monkeypatch,
            fla={"__version__": "1"},
            fla__ops={},
            fla__ops__gated_delta_rule=public,
            fla__ops__gated_delta_rule__chunk=functions,
            fla__ops__utils={},
            fla__ops__utils__index={"prepare_chunk_indices": lambda *_: None},
        )


@pytest.mark.parametrize("package", forward.PEERS)
def test_timed_calls_of_peers_copy_slices(on_cpu, monkeypatch, package):
    """The copy is made in the call: it has what the slice has by then."""
    given = []
    stub_peer(monkeypatch, package, fwd=lambda **arguments: given.append(arguments))
    inputs = common.make_inputs(**HEADS, lengths=[70, 3], head_dims=(24, 40))
    call = forward.LOADERS[package]().prepare(inputs, "default")
    for number, name in enumerate("qkv"):
        inputs[name].fill_(number)
    call()
    for number, name in enumerate("qkv"):
        assert given[0][name].is_contiguous() and set(given[0][name].flatten().tolist()) == {number}


@pytest.mark.parametrize("package", backward.PEERS)
def test_backwards_of_peers_have_the_copies_of_their_forwards(on_cpu, monkeypatch, package):
    given = []

    def fwd(**arguments):
        given.append(arguments)
        return (None,) * 5

    def bwd(**arguments):
        given.append(arguments)
        return (None,) * 6

    stub_peer(monkeypatch, package, fwd, bwd)
    inputs, output_gradients = backward.inputs_of(package, **HEADS, lengths=[70, 3], head_dims=(24, 40))
    backward.BACKWARDS[package](inputs, output_gradients)()
    for name in "qkv":
        assert given[0][name].is_contiguous() and given[1][name] is given[0][name] is not inputs[name]


@pytest.mark.parametrize("package", backward.PEERS)
def test_steps_of_peers_copy_slices(on_cpu, monkeypatch, package):
    """Their gradients are those of the slices."""
    import flash_qla

    ours, given = flash_qla.chunk_gated_delta_rule, []

    def operator(**arguments):
        given.append(arguments)
        return ours(**arguments)

    expected, _ = backward.step_inputs("flash_qla", **HEADS, lengths=[70], options=options(activations=False))
    inputs, gradients = backward.step_inputs(package, **HEADS, lengths=[70], options=options(activations=False))
    expected = backward.Step(ours, expected, gradients)()
    with monkeypatch.context() as stubbed:
        stub_peer(stubbed, package, operator=operator)
        _, function, _ = backward.load(package)
    found = backward.Step(function, inputs, gradients)()
    for name in "qkv":
        assert given[0][name].is_contiguous() and not inputs[name].is_contiguous()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("head_dims", (common.HEAD_DIMS, (24, 40)), ids=str)
def test_errors_of_the_forward(on_cpu, head_dims):
    for gate in ("bench", "trained"):
        errors = forward.check("flash_qla", forward.load_flash_qla(), **HEADS, head_dims=head_dims, gate=gate)
        assert errors.keys() == {"o", "final_state"} and max(errors.values()) < 5e-3


@pytest.mark.parametrize("activations", (False, True))
@pytest.mark.parametrize("head_dims", (common.HEAD_DIMS, (24, 40)), ids=str)
def test_errors_of_the_backward(on_cpu, head_dims, activations):
    """A step also has gradients of the gate's parameters if the gate is activated inside."""
    import flash_qla

    asked = options(head_dims=head_dims, activations=activations)
    operator = flash_qla.chunk_gated_delta_rule
    errors = backward.check("flash_qla", operator, backward.flash_qla_backward, **HEADS, options=asked)
    assert list(errors["backward"]) == ["dq", "dk", "dv", "db", "dg", "dh0"]
    assert list(errors["step"]) == [*errors["backward"], *(("dA_log", "ddt_bias") if activations else ())]
    assert max(max(found.values()) for found in errors.values()) < 1e-2


def test_step_with_activations(on_cpu):
    """It is given raw bf16 tensors, and both packages the same ones."""
    calls = []
    for _ in range(2):
        arguments, _ = backward.step_inputs("flash_qla", **HEADS, lengths=[70], options=options(activations=True))
        calls.append(backward.Step(None, arguments, {}).arguments)
    assert calls[0]["g"].dtype == calls[0]["beta"].dtype == torch.bfloat16
    assert {name for name, x in calls[0].items() if x is True} == {*common.INSIDE, "use_qk_l2norm_in_kernel"}
    tensors = [{name: x for name, x in call.items() if isinstance(x, torch.Tensor)} for call in calls]
    assert all(torch.equal(x, tensors[1][name]) for name, x in tensors[0].items())
    assert {name for name, x in tensors[0].items() if x.requires_grad} == set(common.ALL_GRADIENTS_OF)


def test_cells_of_the_forward(on_cpu):
    """They say head dimensions only where these are not 128x128."""
    cells = []
    for head_dims in (common.HEAD_DIMS, (24, 40)):
        asked = options(head_dims=head_dims, gates="bench", variants="l2norm", budget_s=math.inf)
        with torch.enable_grad():  # as after the measurement
            found = list(forward.measure("flash_qla", asked))
        assert [cell["variant"] for cell in found] == ["default", "l2norm"]
        cells.append(found[0])
    assert "head_dims" not in cells[0] and cells[1].keys() == cells[0].keys() | {"head_dims"}
    assert cells[1]["head_dims"] == "24x40" and cells[1]["floor_ms"] < cells[0]["floor_ms"] / 3
    assert [row.name for row in forward.rows_of(cells, "bench")] == ["1x2 64x2", "1x2 of 24x40 64x2"]


def test_contiguous_cells_of_the_forward(on_cpu, monkeypatch):
    """They say so, and compute the same. Peers have them in one variant."""
    ours, strides = forward.load_flash_qla(), []

    def prepare(inputs, variant):
        strides.append((variant, inputs["v"].is_contiguous()))
        return ours.prepare(inputs, variant)

    for package in ("flash_qla", "fla"):
        monkeypatch.setitem(forward.LOADERS, package, lambda: forward.Package("1", prepare, ours.results))
    monkeypatch.setattr(forward, "check", lambda *_: {"o": 0.0, "final_state": 0.0})
    asked = options(gates="bench", variants="op,contiguous,op_contiguous,fp16")
    cells = [cell for package in ("flash_qla", "fla") for cell in forward.measure(package, asked)]
    assert not [cell["error"] for cell in cells if "error" in cell]
    found = [(cell["package"], cell["variant"], cell["qkv"]) for cell in cells]
    assert found == [
        ("flash_qla", "default", "slices"),
        ("flash_qla", "op", "slices"),
        ("flash_qla", "contiguous", "contiguous"),
        ("flash_qla", "op_contiguous", "contiguous"),
        ("flash_qla", "fp16", "slices"),
        ("fla", "default", "slices"),
        ("fla", "contiguous", "contiguous"),
    ]
    assert strides == [
        *(("default", False), ("op", False), ("default", True), ("op", True), ("fp16", False)),
        *(("default", False), ("default", True)),
    ]
    assert cells[2]["sketches"] == cells[0]["sketches"] and cells[3]["sketches"] == cells[1]["sketches"]


def test_tokens_in_fp16_are_slices(on_cpu, monkeypatch):
    import flash_qla

    given = []
    loaded = forward.load_flash_qla()
    monkeypatch.setattr(flash_qla, "chunk_gated_delta_rule_fwd", lambda **arguments: given.append(arguments))
    loaded.prepare(common.make_inputs(**HEADS, lengths=[70], head_dims=(24, 40)), "fp16")()
    assert {given[0][name].dtype for name in "qkv"} == {torch.float16}
    assert {given[0][name].stride(1) for name in "qkv"} == {2 * 24 + 2 * 40}


def test_cells_of_the_backward(on_cpu, capsys):
    """They say head dimensions and activations only where there are any."""
    asked = ((common.HEAD_DIMS, False), ((24, 40), False), ((24, 40), True))
    cells = [next(backward.measure("flash_qla", options(head_dims=x, activations=inside))) for x, inside in asked]
    assert "head_dims" not in cells[0] and "activations" not in cells[0]
    assert cells[1].keys() == cells[0].keys() | {"head_dims"} and cells[1]["head_dims"] == "24x40"
    assert cells[2].keys() == cells[1].keys() | {"activations"} and cells[2]["activations"] is True
    assert cells[1]["backward_floor_ms"] == cells[2]["backward_floor_ms"] < cells[0]["backward_floor_ms"] / 3
    backward.report(cells[:2])
    assert "1x2 of 24x40         64x2  backward" in capsys.readouterr().out


def test_contiguous_cells_of_the_backward(on_cpu, monkeypatch):
    given = []
    ours = backward.flash_qla_backward
    monkeypatch.setitem(
        backward.BACKWARDS, "flash_qla", lambda inputs, *others: given.append(inputs) or ours(inputs, *others)
    )
    cells = list(backward.measure("flash_qla", options(activations=False, variants="contiguous")))
    assert [(cell["variant"], cell["qkv"]) for cell in cells] == [("default", "slices"), ("contiguous", "contiguous")]
    assert [inputs["q"].is_contiguous() for inputs in given[:2]] == [False, True]


def test_head_dims_of_the_others():
    cases = peer_errors.all_cases(96, 192)
    assert {(case.K, case.V) for case in cases.values()} == {(96, 192)}
    assert cases.keys() == peer_errors.all_cases(128, 128).keys()
    arguments = host.make_arguments(options(device="cpu"))
    assert arguments["k"].shape == (1, 0, 1, 24) and arguments["initial_state"].shape == (0, 2, 24, 40)
    assert host.measure_first_calls(options(device="cpu")).keys() == {"first_call_ms", "second_call_ms"}


def test_rows_and_means():
    first, second = forward.rows_of(made_up_cells(), "bench")
    assert first.ratios == pytest.approx({"fla": 3, "flash_qla_jit": 0.8, "flashinfer": 2})
    assert second.ratios == pytest.approx({"fla": 6, "flash_qla_jit": 2})
    assert (first.best, second.best) == pytest.approx((0.8, 2))
    assert (first.floor, second.floor) == pytest.approx((0.5, 0.05))
    assert forward.rows_of(made_up_cells(), "trained") == []
    (variant,) = forward.rows_of(made_up_cells(), "bench", "nocp")
    assert variant.ratios == pytest.approx({"fla": 2.4, "flash_qla_jit": 0.64, "flashinfer": 1.6})
    (row,) = forward.rows_of([*made_up_cells(), *contiguous_cells()], "bench", "op_contiguous")
    assert row.ms == 0.004 and row.ratios == pytest.approx({"fla": 5})  # contiguous beside contiguous
    assert forward.summary([first, second]) == [
        f"Over the best peer: geometric mean {math.sqrt(0.8 * 2):.2f}, least 0.80 (2x8 1x512), n = 2",
        "Cells below 1.0: 2x8 1x512 0.800",
        f"Over FLA: geometric mean {math.sqrt(3 * 6):.2f}, least 3.00 (2x8 1x512), n = 2",
        "Over FlashQLA: geometric mean 1.26, least 0.80 (2x8 1x512), n = 2",
        "Over FlashInfer: geometric mean 2.00, least 2.00 (2x8 1x512), n = 1; without 2x8 ragged32",
        f"Of the floor: geometric mean {math.sqrt(0.5 * 0.05):.1%}, least 5.0% (2x8 ragged32), n = 2",
    ]


def test_report_of_stored_results(results):
    command = [sys.executable, BENCHMARKS / "forward.py", "--report", results]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = " ".join(printed.split())
    assert "2x8 1x512 0.0100 50% 3.00 0.80 2.00 0.80" in words
    assert "2x8 ragged32 0.1000 5% 6.00 2.00 - 2.00" in words
    assert "nocp, auto_cp=False: geometric mean 1.250, largest 1.250 (bench 2x8 1x512)" in printed
    assert "Workspace of flash_qla: at most 0.50 of the bytes of v (bench 2x8 1x512)" in printed
    assert "NOT MEASURED, flashinfer default, bench 2x8 ragged32: RuntimeError: no" in printed
    assert "DISAGREEMENT" not in printed


@pytest.mark.parametrize("wrong", (4.2, math.nan))
def test_report_says_who_disagrees(wrong):
    cells = made_up_cells()
    cells[2]["sketches"] = {"o": [3.0, wrong], "final_state": [1.0, 0.0]}
    found = [line for line in forward.report_outputs(cells) if "DISAGREEMENT" in line]
    assert found == [f"DISAGREEMENT, fla and flash_qla: bench 2x8 1x512 {0 * wrong + 4e-2:.1e}"]


def test_other_head_dims_are_other_cells(results, tmp_path):
    other = tmp_path / "other.json"
    wide = [cell | OTHER_DIMS | ({"ms": 3 * cell["ms"]} if "ms" in cell else {}) for cell in made_up_cells()]
    other.write_text(json.dumps({"cells": wide}))
    cells = forward.load([results, other])
    assert len(cells) == 2 * len(made_up_cells())
    rows = forward.rows_of(cells, "bench")
    assert [row.name for row in rows] == [
        *("2x8 1x512", "2x8 ragged32"),
        *("2x8 of 96x192 1x512", "2x8 of 96x192 ragged32"),
    ]
    assert rows[2].ms == 3 * rows[0].ms and rows[2].ratios == pytest.approx(rows[0].ratios)
    workspace = 512 * 8 * 128 / (2 * 512 * 8 * 192)
    found = forward.report_outputs(wide)
    assert f"Workspace of flash_qla: at most {workspace:.2f} of the bytes of v (bench 2x8 of 96x192 1x512)" in found
    assert "NOT MEASURED, flashinfer default, bench 2x8 of 96x192 ragged32: RuntimeError: no" in found
    assert forward.progress(wide[0] | {"ms_min": 0.1, "ms_max": 0.2}).split()[3:7] == ["2x8", "of", "96x192", "1x512"]


def test_report_of_the_backward(capsys):
    def cell(package, ms, **more):
        measured = {"package": package, "variant": "default", "heads": "2x8", "sequences": "1x512"}
        measured |= {"backward_floor_ms": 0.01}
        times = {f"{what}_ms{suffix}": ms for what in ("backward", "step") for suffix in ("", "_min", "_max")}
        return measured | times | {"saved_bytes": 2**20, "extra_bytes": 2**21} | more

    backward.report([cell("flash_qla", 0.1), cell("fla", 0.3)])
    inside = {"activations": True, **OTHER_DIMS}
    backward.report([cell("flash_qla", 0.1, saved_bytes=0, **inside), cell("fla", 0.4, **inside)])
    of_slices, first, _, second = capsys.readouterr().out.splitlines()
    assert of_slices == "Slices:"
    assert first.split()[:2] == ["2x8", "1x512"] and "backward 3.00x, step 3.00x" in first
    assert second.split()[:4] == ["2x8", "of", "96x192", "1x512"] and "backward 4.00x, step 4.00x" in second
    assert "saved 1.00x" in first and "step 4.00x, extra" in second
    ours = [cell("flash_qla", 0.1), cell("flash_qla", 0.2, variant="contiguous")]
    backward.report([*ours, cell("fla", 0.3), cell("fla", 0.3, variant="contiguous")])
    of_slices, first, of_contiguous, second = capsys.readouterr().out.splitlines()
    assert (of_slices, of_contiguous) == ("Slices:", "Contiguous q, k and v:")
    assert "backward 3.00x" in first and "backward 1.50x" in second


@pytest.mark.parametrize(
    ("keep", "functions"),
    [
        ("last", {"decode", "packed"}),
        ("every", {"decode", "packed", "in slots", "in a buffer"}),
        ("plain", {"V-first", "K-first", "V-first in place", "K-first in place"}),
    ],
)
def test_cells_of_decoding(on_cpu, monkeypatch, keep, functions):
    """One token keeps one state in either mode. A sample goes through all pools, here four."""
    monkeypatch.setattr(decode, "ROTATED_BYTES", 4 * 2 * 24 * 40 * 4)
    sizes = {"batches": [1, 3], "tokens": [1, 3], "keep": keep, "state_dtypes": "fp32,bf16"}
    cells = list(decode.measure("flash_qla", options(**sizes)))
    assert {cell["function"] for cell in cells} == functions
    assert max(cell["relative_error"]["o"] for cell in cells) < 5e-3
    state = 2 * 24 * 40 * 4
    of_one_sequence = [cell for cell in cells if (cell["state_dtype"], cell["batch"]) == ("fp32", 1)]
    assert {cell["us"] for cell in of_one_sequence} == {2000 / 4}
    for cell in of_one_sequence:
        moved = 1 + (cell["tokens"] if keep == "every" else 1)
        tokens = cell["tokens"] * 2 * ((1 + 1) * 24 + (2 + 2) * 40)  # q, k, v, o
        raw = cell["tokens"] * 2 * 2 * 2 + 2 * 2 * 4 + 4  # a, b; A_log, dt_bias; the slot
        ready = cell["tokens"] * 2 * 2 * 4
        assert cell["bytes"] == moved * state + tokens + (ready if keep == "plain" else raw)


def test_cells_of_lagging_states(on_cpu, monkeypatch):
    """A sample goes through the steps of a cycle, and at each step through all pools, here two."""
    monkeypatch.setattr(decode, "ROTATED_BYTES", 2 * 2 * 24 * 40 * 4)
    sizes = {"batches": [1], "tokens": [1], "keep": "lagging", "steps": [1, 4], "state_dtypes": "fp32"}
    cells = {cell["function"]: cell for cell in decode.measure("flash_qla", options(**sizes))}
    assert {name: cell["keep"] for name, cell in cells.items()} == {
        **dict.fromkeys(("decode", "packed"), "last"),
        "buffered 1": "L=1",
        "buffered 4": "L=4",
    }
    assert max(cell["relative_error"]["o"] for cell in cells.values()) < 5e-3
    assert cells["buffered 4"]["us"] == 2000 / 2 / 4
    assert cells["buffered 1"]["bytes"] == cells["decode"]["bytes"]
    state, step = 2 * 24 * 40 * 4, 2 * 40 * 4 + 24 * 2 + 2 * 4  # of d, k and g
    assert cells["buffered 4"]["bytes"] - cells["decode"]["bytes"] == state * (1 / 4 - 1) + step * (3 / 2 + 3 / 4)


@pytest.mark.parametrize("state_dtype", ("fp32", "e4m3"))
def test_pools_of_decoding(on_cpu, state_dtype):
    """Random states of each dtype."""
    case = decode.Case(1, 2, 2, 1, "last", decode.STATE_DTYPES[state_dtype], pools=1)
    assert case.pool.dtype == decode.STATE_DTYPES[state_dtype] and case.pool.float().std() > 0.9


def test_report_of_decoding(capsys):
    def cell(package, function, us, **more):
        key = {"heads": "2x8", "state_dtype": "fp32", "tokens": 1, "keep": "last", "batch": 64}
        return {"package": package, "function": function, "us": us, "bytes": 4.28e6} | key | more

    decode.report(
        [
            cell("flash_qla", "decode", 4.0),
            cell("flash_qla", "packed", 2.0),
            cell("fla", "gathered", 9.0),
            cell("vllm", "packed", 3.0),
            cell("vllm", "packed", 8.0, state_dtype="bf16"),
            cell("flash_qla", "decode", 1.0, batch=1),
        ]
    )
    first, second, third = capsys.readouterr().out.splitlines()
    assert "2.00 us (packed)   2140 GB/s  50%; vllm     3.00 us, 1.50x" in first
    assert "1.00 us (decode)   4280 GB/s 100%" in second and ";" not in second
    assert third == "fp32: best peer over flash_qla 1.500 in the geometric mean, 1.50 at least"


def prefill_calls(lengths):
    return prefill.flash_qla_calls(prefill.Case(1, 2, lengths, (24, 40), torch.float32))


def test_ways_of_the_prefill(on_cpu):
    """All calls give the same results. Without a checkpoint the call with checkpoints is not timed."""
    calls = prefill_calls([300, 70])
    outputs = {way: call() for way, call in calls.items() if way != "gathered"}
    assert list(outputs) == ["op", "pool", "checkpoints", "blocks", "invariant", "resumable"]
    assert "checkpoints" not in prefill_calls([70])
    first = prefill_calls([300, 70])["op"]()
    for way in ("op", "gathered", "pool"):  # each on a pool of its own, as the first call finds it
        torch.testing.assert_close(prefill_calls([300, 70])[way](), first)


def test_ways_of_flashinfers_prefill(on_cpu, monkeypatch):
    """A stand-in with FlashInfer's arguments, computed by our op: both ways give the op's results and final states."""

    def stand_in(q, k, v, g, beta, *, cu_seqlens, output, output_state, initial_state, state_indices=None, **options):
        assert all(x.is_contiguous() for x in (q, k, v))
        assert options.pop("output_final_state") and options.pop("use_cp") == "auto"
        assert options.pop("max_seqlen") == 300 and cu_seqlens.dtype == torch.int32
        rows = slice(None) if state_indices is None else state_indices.long()
        inputs = {"q": q, "k": k, "v": v, "g": g.log(), "beta": beta}
        o, states = torch.ops.flash_qla.chunk_gated_delta_rule(
            **{name: x[None] for name, x in inputs.items()},
            **options,
            initial_state=initial_state[rows],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            state_v_first=True,
        )
        output.copy_(o[0])
        output_state[rows] = states
        return output, output_state

    monkeypatch.setattr(prefill, "flashinfer_function", lambda: ("1.0", stand_in))
    expected = prefill.Case(1, 2, [300, 70], (24, 40), torch.float32)
    first = prefill.flash_qla_calls(expected)["pool"]()
    for way in ("gathered", "pool"):
        case = prefill.Case(1, 2, [300, 70], (24, 40), torch.float32)
        torch.testing.assert_close(prefill.flashinfer_calls(case)[way](), first)
        torch.testing.assert_close(case.pool, expected.pool)


def test_cell_of_the_prefill(on_cpu, capsys):
    cell = prefill.cell_of("flash_qla", 1, 2, "512+70", "bf16", options())
    assert cell["checkpoint_bytes"] == 2 * 2 * 24 * 40 * 2 and set(cell["ms"].values()) == {1.0}
    cell["ms"] |= {"op": 1.0, "pool": 2.0, "gathered": 3.0, "checkpoints": 2.5}
    line = prefill.line_of(cell | {"checkpoint_bytes": 5e8})
    assert "gathered 1.500, checkpoints 1.250" in line and line.endswith("checkpoints at 1000 GB/s")
    peer = cell | {"package": "flashinfer", "ms": {"gathered": 6.0, "pool": 3.0}}
    prefill.report([cell, peer, peer | {"sequences": "1x64"}])  # the last one without a time of flash_qla
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gathered over the op: 3.000 in the geometric mean, 3.000 at most"
    assert lines[-1] == "FlashInfer's pool over our pool: 1.500, 1.500 at least"


def test_later_file_counts(results, tmp_path):
    later = tmp_path / "later.json"
    later.write_text(json.dumps({"cells": [made_up_cells()[0] | {"ms": 0.02}]}))
    cells = forward.load([results, later])
    assert len(cells) == len(made_up_cells())
    assert forward.rows_of(cells, "bench")[0].ms == 0.02


def test_modes_of_a_batch():
    dims = (128, 128)
    found = list(dispatch.Forward.modes(8, dims, [2048], 132))
    assert found[0] == {"fused": 1}
    wide = [x for x in found if x.get("value_tile") == 128]
    assert [x["segment_chunks"] for x in wide if "fused" in x] == [0, 16, 11, 8, 6, 4, 3, 2]
    assert [x["segment_chunks"] for x in wide if "fused_segments" in x] == [16, 11, 8, 6, 4, 3, 2]
    assert max(x["segment_chunks"] for x in found[1:]) == 16 and {"value_tile": 64, "segment_chunks": 2} not in found
    assert [x.get("segment_chunks") for x in dispatch.Forward.modes(64, dims, [64] * 3, 132)] == [None, 0, 0]
    assert [x["segment_chunks"] for x in dispatch.Backward.modes(8, dims, [2048], 132)] == [0, 16, 11, 8, 6, 4, 3, 2]


def test_modes_of_other_head_dims():
    """Two tiles are twice as many pieces, also where one is not full."""
    for H_v, V in ((64, 128), (32, 192), (32, 256)):
        assert {"fused": 1} in list(dispatch.Forward.modes(H_v, (128, V), [2048], 132))
        assert [x["segment_chunks"] for x in dispatch.Backward.modes(H_v, (256, V), [2048], 132)] == [0, 16, 11, 8, 6]


def test_modes_of_wide_keys():
    """One value tile, and no kernel that does everything."""
    found = list(dispatch.Forward.modes(8, (136, 128), [2048], 132))
    assert {x["value_tile"] for x in found} == {128} and not any(x["fused"] or "fused_segments" in x for x in found)


def test_report_of_modes(capsys):
    def cell(sequences, ms, predicted_us, chosen=False, segment_chunks=0, fused=0):
        measured = {"heads": "2x8", "sequences": sequences, "ms": ms, "predicted_us": predicted_us, "chosen": chosen}
        mode = {"value_tile": 128, "segment_chunks": segment_chunks, "cut_above": 0, "whole_tile": 128, "fused": fused}
        return measured | mode | {"fused_segments": False}

    dispatch.report(
        [
            cell("1x512", 0.1, 100.0, chosen=True),
            cell("1x512", 0.1, 100.0),
            cell("1x512", 0.05, 50 * math.e, segment_chunks=4),
            cell("128+64", 0.1, 100.0, fused=1, chosen=True),
            cell("128+64", 0.2, 10.0),
        ]
    )
    printed = capsys.readouterr().out
    assert "   2x8        1x512        128/-   100.0     100.0     128/4    50.0" in printed
    assert f"chosen over fastest: {math.sqrt(2):.3f}, at most 2.00" in printed
    assert f"equal sequences: {math.sqrt(1 / 2):.1%} rms over 2" in printed


def test_sketches_estimate_differences():
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(1, 3000, 8, 128, generator=generator)
    for size in (1e-1, 1e-3):
        other = o + size * torch.randn(o.shape, generator=generator)
        found = forward.difference({"o": forward.sketch(other)}, {"o": forward.sketch(o)})
        assert size / 2 < found < 2 * size
    one_head = o.clone()
    one_head[:, :, 5] *= 1.1  # 3.5e-2 of the whole
    assert forward.difference({"o": forward.sketch(one_head)}, {"o": forward.sketch(o)}) > 2e-2


# All figures in one call

TINY = ["--heads", "1x2"]
TINY_SECTIONS = {
    "decode": [*TINY, "--batches", "1"],
    "plain": [*TINY, "--batches", "1"],
    "drafts": [*TINY, "--batches", "1"],
    "wide_decode": [*TINY, "--batches", "1"],
    "accuracy": ["--cases", "2x8 1x1"],
    "host": [*TINY, "--device", "cpu", "--batches", "1", "--processes", "1"],
}


def measured_here(sections: dict[str, list[str]]) -> dict[str, dict]:
    """The results of all.py, with flash_qla's sections at tiny sizes in this process."""
    results = {}
    for name, more in sections.items():
        cells = list(all_figures.measure_section("flash_qla", name, math.inf, more))
        results[name] = {"seconds": {"flash_qla": 1.0}, "failed": {}, "cells": cells}
    return results


def test_each_section_is_measured(on_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "ROTATED_BYTES", 1)
    small = [*TINY, "--sequences", "70"]
    (ours, *_) = all_figures.PROCESSES
    assert ours.sections.keys() == all_figures.SECTIONS.keys()
    results = measured_here({name: TINY_SECTIONS.get(name, small) for name in ours.sections})
    assert all(found["cells"] for found in results.values())
    assert not [cell["error"] for found in results.values() for cell in found["cells"] if "error" in cell]
    all_figures.write(tmp_path / "h100.json", results, common.environment(), 1.0)
    written = json.loads((tmp_path / "h100.json").read_text())
    assert written["environment"]["commit"] and written["environment"]["versions"] == {"flash_qla": "0.1.0"}
    assert {name: len(found["cells"]) for name, found in written["sections"].items()} == {
        name: len(found["cells"]) for name, found in results.items()
    }
    data = report.load(tmp_path)
    for table in report.TABLES.values():
        assert "| " in table(data)


def test_names_of_cards():
    assert all_figures.name_of_card("NVIDIA H100 80GB HBM3") == "h100"
    assert all_figures.name_of_card("NVIDIA H200") == "h200"


def test_a_section_that_fails_is_reported(monkeypatch, tmp_path):
    """The next one runs. Other processes go on with the sections after one that has ended its process."""

    def measure_section(package, name, seconds, more):
        yield {"package": package}
        if name == "decode":
            raise ValueError("no")
        if name == "options":
            raise common.OutOfTime("1 s are spent after 1 cells")

    monkeypatch.setattr(all_figures, "measure_section", measure_section)
    sections = {"forward": 1.0, "decode": 1.0, "options": 1.0, "host": 1.0}
    all_figures.measure("fla", sections, tmp_path / "cells")
    lines = [json.loads(line) for line in (tmp_path / "cells").read_text().splitlines()]
    results = {}
    assert all_figures.merge(lines, "fla", results, sections, "") == {}
    assert [len(found["cells"]) for found in results.values()] == [1, 1, 1, 1]
    failed = {name: found["failed"] for name, found in results.items()}
    assert failed == {
        "forward": {},
        "decode": {"fla": "ValueError: no"},
        "options": {"fla": "1 s are spent after 1 cells"},
        "host": {},
    }
    results = {}
    left = all_figures.merge(lines[:4], "fla", results, sections, "the process ended with status -11")
    assert left == {"options": 1.0, "host": 1.0}
    assert results["decode"]["failed"] == {"fla": "the process ended with status -11"}


def test_processes_are_started_and_stopped(monkeypatch, tmp_path):
    """The forward fails on the first cell of a package's process, because there is no GPU, and no peer is installed."""
    given = all_figures.make_parser().parse_args(["--out", str(tmp_path), "--sections", "ceilings"])
    (ours, *_) = all_figures.PROCESSES
    process = all_figures.dataclasses.replace(ours, sections={"ceilings": 60.0})
    results = {}
    all_figures.measure_process(process, all_figures.time.monotonic() + 100, results, given)
    assert results["ceilings"]["failed"] == {} and results["ceilings"]["cells"] == [common.ceilings()]
    assert all_figures.run_process(process, {"ceilings": 1.0}, 0, tmp_path / "cells", given) == "stopped after 0 s"
    assert not all_figures.importable("flash_qla_jit", given) and all_figures.importable("flash_qla", given)


def test_time_that_sections_leave_is_to_compile():
    processes = [
        all_figures.Process("flash_qla", {"backward": 20}),
        all_figures.Process("flash_qla_jit", {"backward": 25}),
    ]
    grace, planned = all_figures.GRACE_SECONDS, 45 + 2 * all_figures.START_SECONDS
    assert all_figures.split_time(processes, grace + planned + 100, compiles=True) == (100, 1)
    assert all_figures.split_time(processes, grace + planned + 100, compiles=False) == (0, 1)
    half = (planned + all_figures.COMPILE_SECONDS) / 2
    assert all_figures.split_time(processes, grace + half, compiles=True) == (all_figures.COMPILE_SECONDS / 2, 0.5)


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
    """Wide keys, ranks and text have files of their own."""
    environment = {"driver": "580", "torch": "2.11"}
    rank = {"package": "flash_qla", "heads": "2x8", "sequences": "1x64", "scaling": "strong"}
    rank |= {"forward_ms": 1.0, "step_ms": 4.0}
    text = {"engine": "vllm", "version": "0.1", "architecture": "qwen3_5", "states": "float32", "feature": "eager"}
    own = {"package": "own", "load": "prefill", "tokens_per_s": [10.0, 20.0, 90.0], **text}
    tables = tables_of(
        tmp_path,
        context_parallelism_h100={
            "environment": environment,
            "cells": [rank | {"ranks": 1}, rank | {"ranks": 2, "forward_ms": 0.5, "step_ms": 5.0}],
        },
        generation_h100={
            "environment": environment,
            "cells": [own, own | {"package": "flash_qla", "tokens_per_s": [30.0]}],
        },
    )
    assert "| forward on 2 GPUs | one GPU | 2.00 (least 2.00, 0 of 1 below 1) |" in tables["means"]
    assert "| training step on 2 GPUs | one GPU | 0.80 (least 0.80, 1 of 1 below 1) |" in tables["means"]
    assert "| text by vLLM | its own kernels | 1.50 (least 1.50, 0 of 1 below 1) |" in tables["means"]
    assert "vLLM 0.1" in tables["means"]


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


def test_every_table_without_results(tmp_path):
    assert set(tables_of(tmp_path).values()) <= {"Not measured on any card.", report.cells({}, report.SPEED_CELLS)}


# Context parallelism over ranks

SMALL = ("--device", "cpu", "--head-dims", "16x8", "--heads", "1x2", "--sequences", "1x1024", "--samples", "1")


def small_options(*more: str):
    return context_parallelism.make_parser().parse_args([*SMALL, *more])


@pytest.mark.parametrize(("world_size", "layout"), [(1, "contiguous"), (4, "contiguous"), (4, "zigzag")])
def test_ranks_draw_the_same_tokens(monkeypatch, world_size, layout):
    monkeypatch.setattr(common, "DEVICE", "cpu")
    whole = context_parallelism.make_inputs((1, 2), 256, range(context_parallelism.BLOCKS), small_options())
    all_blocks = []
    for rank in range(world_size):
        blocks = context_parallelism.blocks_of(rank, world_size, layout)
        all_blocks += blocks
        for name, x in context_parallelism.make_inputs((1, 2), 256, blocks, small_options()).items():
            pieces = whole[name].tensor_split(context_parallelism.BLOCKS, 1)
            assert torch.equal(x, torch.cat([pieces[block] for block in blocks], 1)), name
    assert sorted(all_blocks) == list(range(context_parallelism.BLOCKS))


def test_context_parallelism_on_two_ranks(tmp_path, capsys):
    """The benchmark runs on the CPU, with the same results on one rank and on two. FLA's cannot run there."""
    program = BENCHMARKS / "context_parallelism.py"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    files = [tmp_path / f"{name}.json" for name in ("one", "two", "parts")]
    runs = ([], []), (ranks, ["--layout", "zigzag"]), ([], ["--parts", "2,4"])
    for (before, after), file in zip(runs, files, strict=True):
        command = [sys.executable, *before, program, *SMALL, "--packages", "flash_qla", *after, "--out", file]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (one,), (two,), parts = (json.loads(file.read_text())["cells"] for file in files)
    assert (one["ranks"], two["ranks"], [x["parts_of"] for x in parts]) == (1, 2, [2, 4])
    assert two["sketches"].keys() == {"o", "dq", "dk", "dv", "dg", "db"}
    for name, x in two["sketches"].items():
        assert context_parallelism.difference(x, one["sketches"][name]) < 1e-2, name
    phases = {"begin", "collective", "fold", "finish"}
    for of_rank in two["phases"]:
        assert of_rank.keys() == phases | {"replay"} | {f"reverse {name}" for name in phases}
        assert all(ms > 0 for ms in of_rank.values())
    context_parallelism.report([one, two, *parts], small_options())
    printed = capsys.readouterr().out
    assert "W=2    strong" in printed and "W=4    predicted" in printed and "differences o" in printed


def test_runs_add_their_cells_to_one_file(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMIT", "a")
    path = tmp_path / "cp.json"
    cell = {"package": "flash_qla", "heads": "2x8", "sequences": "1x64", "ranks": 1, "scaling": "strong", "step_ms": 1}

    def ms_after(*cells: dict) -> list[int]:
        context_parallelism.write(path, list(cells))
        return [cell["step_ms"] for cell in json.loads(path.read_text())["cells"]]

    assert ms_after(cell) == [1]
    assert ms_after(cell | {"ranks": 2, "step_ms": 2}) == [1, 2]
    assert ms_after(cell | {"step_ms": 3}) == [3, 2]
    monkeypatch.setenv("COMMIT", "b")
    assert ms_after(cell | {"step_ms": 4}) == [4]


def test_prediction():
    ms = {"begin": 1.0, "whole": 3.0, "fold": 0.7, "product": 0.1}
    ms |= {"reverse begin": 2.0, "reverse replay": 2.6, "reverse whole": 6.0}
    found = context_parallelism.predicted_ms({"parts_of": 9, "ms": ms, "map_bytes": 10**6}, hop_us=10, gbs=100)
    hop = 0.01 + 0.01  # 1 MB at 100 GB/s
    assert found["between"] == pytest.approx(8 * hop + 0.7) and found["tree"] == pytest.approx(4 * (hop + 0.1))
    assert found["forward"] == pytest.approx(3 + found["between"])
    assert found["step"] == pytest.approx(9 + 2 * found["between"] - 0.6)
    assert found["step by tree"] == pytest.approx(9 + found["tree"])  # all of it in the backward beside the states


def test_differences_by_blocks():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6400, 2, 8, generator=generator)
    other = x + 1e-2 * torch.randn(x.shape, generator=generator)
    sketches = [context_parallelism.sketches({"o": y}, range(64))["o"] for y in (other, x)]
    assert 5e-3 < context_parallelism.difference(*sketches) < 2e-2


class StubLLM:
    """An engine whose next token is the sum of a request's tokens, and whose layers make one call a token."""

    def __init__(self, **arguments):
        self.layers = sys.modules[f"{generation_vllm.GDN}.olmo_gdn_linear_attn"]
        self.shift = int(arguments["seed"])
        assert json.loads(Path(arguments["model"], "config.json").read_text())["model_type"] == "olmo_hybrid"
        assert arguments["enforce_eager"]
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(get_output=self.get_output))

    def apply_model(self, function):
        function(torch.nn.Linear(2, 2))

    def get_output(self):
        """A step with drafts: two tokens of one request."""
        return SimpleNamespace(outputs=[SimpleNamespace(new_token_ids=[1, 2]), SimpleNamespace(new_token_ids=[])])

    def generate(self, prompts, sampling, use_tqdm):
        for _ in range(sampling.max_tokens):
            self.llm_engine.engine_core.get_output()
        return [self.complete(x["prompt_token_ids"], sampling) for x in prompts]

    def complete(self, prompt, sampling):
        tokens = []
        for i in range(sampling.max_tokens):
            self.layers.chunk_gated_delta_rule()
            tokens.append((sum(prompt) + self.shift * (i == 3)) % 100)
        logprobs = None
        if sampling.logprobs:
            logprobs = [{i: SimpleNamespace(logprob=-0.25 * i) for i in range(sampling.logprobs)}] * len(tokens)
        completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs)
        return SimpleNamespace(outputs=[completion], num_cached_tokens=64)


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture
def stub_vllm(monkeypatch, without_cuda):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(
        __version__="0.0", LLM=StubLLM, SamplingParams=lambda **given: SimpleNamespace(**given)
    ))  # fmt: skip
    layers = types.ModuleType(f"{generation_vllm.GDN}.olmo_gdn_linear_attn")
    layers.chunk_gated_delta_rule = lambda: None
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    monkeypatch.setattr(generation_vllm, "LOADS", {"prefill": (2, 8, 1), "decode": (3, 2, 5)})


def measure_engine(feature, shift):
    arguments = json.dumps({"seed": shift, "enforce_eager": True})
    given = ["--architecture", "olmo_hybrid", "--samples", "2", "--engine-arguments", arguments]
    options = generation.make_parser().parse_args(given)
    return generation.measure(options, feature, ours=False, turn=generation.Turn(None))


def test_cells_of_an_engine(stub_vllm, capsys):
    own = measure_engine("prefix", 0)
    alone = generation_vllm.ALONE
    new_tokens = (24 + 24 + alone) * generation_vllm.NEW_TOKENS + 3 * (2 * 1 + 3 * 5)
    assert own["calls"] == {"total": new_tokens, "flash_qla": 0}
    assert [len(own[x]) for x in ("batch", "again", "alone")] == [24, 24, alone]
    assert len(own["prefill"]["tokens_per_s"]) == 2 and own["decode"]["tokens_per_request_step"] == 2

    cell = generation.pair_of(own, measure_engine("prefix", 1))
    assert cell["agreement"] == {"same": 0, "of": 24, "margins": [0.25] * 24}
    assert cell["yardstick"] == cell["alone"] == {"same": alone, "of": alone, "margins": []}
    assert cell["from_cache"]["cached_tokens"] == 24 * 64

    generation.report([cell])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vLLM 0.0, olmo_hybrid, float32 states, prefix:"
    assert lines[2] == "  same tokens as the engine's own kernels: 0 of 24, margins up to 0.25"
    assert "    tokens a step of a request: 2.0, own kernels 2.0" in lines


SMALL_MODEL = {
    **{"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "head_dim": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("architecture", generation.ARCHITECTURES)
def test_transformers_generate(architecture, without_cuda, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    generation_transformers = importlib.import_module("generation_transformers")
    monkeypatch.setattr(generation, "VOCABULARY", 100)
    for name, value in {"PROMPTS": (2, (9, 9)), "NEW_TOKENS": 4, "ALONE": 1, "LOADS": {"batch 2": (2, 9, 4)}}.items():
        monkeypatch.setattr(generation_transformers, name, value)
    sizes = SMALL_MODEL | ({"linear_num_key_heads": 4} if architecture == "olmo_hybrid" else {})
    given = ["--engine", "transformers", "--architecture", architecture, "--layers", "4", "--samples", "1"]
    options = generation.make_parser().parse_args([*given, "--engine-arguments", json.dumps(sizes)])
    runs = [generation.measure(options, "eager", ours, generation.Turn(None)) for ours in (False, True)]
    cell = generation.pair_of(*runs)
    assert cell["calls"] == {"total": 3, "flash_qla": 3}
    assert cell["agreement"]["of"] == 2 and max(cell["agreement"]["margins"], default=0) < 0.2
    assert cell["batch 2"]["own"]["tokens_per_s"][0] > 0


def test_counts_of_sglang(tmp_path, monkeypatch):
    """The plugin counts SGLang's own functions and flash_qla's, whichever plugin is called first."""
    generation_sglang = importlib.import_module("generation_sglang")
    loader = types.ModuleType("sglang.srt.model_loader.loader")
    layers = types.ModuleType(generation_sglang.MODULE)
    layers.chunk_gated_delta_rule = lambda: None
    for module in (loader, layers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    import flash_qla

    for name in generation_sglang.CALLED:
        monkeypatch.setattr(flash_qla, name, lambda: None)
    notes = tmp_path / "notes.json"
    monkeypatch.setenv(generation_sglang.NOTES, str(notes))
    monkeypatch.setenv("FLASH_QLA_SGLANG", "1")
    generation_sglang.in_scheduler()
    assert not hasattr(loader, "initialize_dummy_weights")  # this is no child of SGLang's
    monkeypatch.setattr(generation_sglang.multiprocessing, "parent_process", lambda: 1)
    generation_sglang.in_scheduler()
    assert loader.initialize_dummy_weights is generation.initialize
    layers.chunk_gated_delta_rule()
    flash_qla.decode_gated_delta_rule_packed()
    flash_qla.decode_gated_delta_rule_buffered()
    deadline = time.monotonic() + 20
    while not notes.exists() or json.loads(notes.read_text()) != {"own": 1, "flash_qla": 2}:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_steps_of_sglang():
    """SGLang counts the steps that verify drafts; the prompt's own step gives a token as well."""
    engine = object.__new__(importlib.import_module("generation_sglang").Engine)
    engine._counts = {"cached_tokens": 0, "request_steps": 0, "new_tokens": 0}
    drafts = {"meta_info": {"spec_verify_ct": 3}, "output_ids": [1, 2, 3, 4, 5, 6]}
    no_drafts = {"meta_info": {"cached_tokens": 2}, "output_ids": [1, 2, 3]}
    engine._engine = types.SimpleNamespace(generate=lambda **_: [drafts, no_drafts])
    assert [x["tokens"] for x in engine.generate([[1], [1]], 6)] == [[1, 2, 3, 4, 5, 6], [1, 2, 3]]
    assert engine.counts() == {"cached_tokens": 2, "request_steps": 4 + 3, "new_tokens": 9}


def test_ports_of_sglang():
    """Each process has its own, below those that the system chooses, and none that is in use."""
    generation_sglang = importlib.import_module("generation_sglang")
    first, second = generation_sglang.free_ports()
    assert 10000 <= first < second < 30000
    with socket.socket() as used:
        used.bind(("127.0.0.1", first))
        used.listen()
        assert first not in generation_sglang.free_ports()
    code = "import generation_sglang; print(*generation_sglang.free_ports())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert len({first, second, *map(int, other.stdout.split())}) == 4, other.stderr


def test_plugin_of_sglang(tmp_path, monkeypatch):
    """importlib.metadata finds it in a process of SGLang's."""
    generation_sglang = importlib.import_module("generation_sglang")
    for name in ("PYTHONPATH", "SGLANG_PLUGINS"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setattr(sys, "path", list(sys.path))
    generation_sglang.add_plugin(tmp_path)
    code = "from importlib.metadata import entry_points\n"
    code += "print([x.load().__name__ for x in entry_points(group='sglang.srt.plugins') if x.name.startswith('gener')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "['in_scheduler']", found.stderr
    assert os.environ["SGLANG_PLUGINS"].split(",") == ["other", generation_sglang.PLUGIN, "flash_qla"]


FAILING = """
import json, sys, time
from pathlib import Path

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
turn = Path(arguments["--turn"])
if arguments["--features"] == "hangs":
    time.sleep(60)
for sample in range(3):
    (turn / f"ready{sample}").touch()
    while not (turn / f"go{sample}").exists():
        time.sleep(0.01)
    with open("order", "a") as order:
        print(arguments["--features"], arguments["--measure"], sample, file=order)
if arguments["--features"] == "fails" and arguments["--measure"] == "own" and not Path("mended").exists():
    sys.exit("no engine here")
tokens = [{"tokens": [1, 2], "margins": [0.5, 0.25]}] * 2
cell = {"engine": "vLLM 0", "architecture": arguments["--architecture"], "layers": int(arguments["--layers"])}
cell |= {"states": arguments["--states"], "feature": arguments["--features"], "kernels": arguments["--measure"]}
cell |= {"batch": tokens, "alone": tokens, "calls": {"total": 1, "flash_qla": 1}}
Path(arguments["--out"]).write_text(json.dumps(cell | {"decode": {"tokens_per_s": [1.0]}}))
"""


def test_engines_that_fail(tmp_path, monkeypatch, capsys):
    """A process that fails or hangs costs nothing but its own results, and the next start measures what is missing."""
    (tmp_path / "generation.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)

    def run(*options):
        given = ["--out", "out.json", "--layers", "4", "--lock", "lock", *options]
        monkeypatch.setattr(sys, "argv", ["generation.py", *given])
        generation.main()

    with pytest.raises(SystemExit, match=r"failed: qwen3_5, float32, hangs with own; .* hangs with flash_qla; .*fails"):
        run("--features", "works,hangs,fails", "--jobs", "6", "--limit-s", "3")
    printed = capsys.readouterr().out
    assert "qwen3_5, float32, hangs with own: more than 3 s" in printed and "no engine here" in printed
    stored = json.loads(Path("out.json").read_text())
    assert [x["feature"] for x in stored["cells"]] == ["works"]
    assert [(x["feature"], x["kernels"]) for x in stored["halves"]] == [("fails", "flash_qla")]
    in_turns = [f"{kernels} {sample}" for sample in range(3) for kernels in ("own", "flash_qla")]
    measured = Path("order").read_text().splitlines()
    assert measured == [f"{feature} {one}" for feature in ("works", "fails") for one in in_turns]

    Path("mended").touch()
    monkeypatch.setenv("COMMIT", "later")
    run("--features", "fails")
    stored, before = json.loads(Path("out.json").read_text()), stored["environment"]
    assert [x["feature"] for x in stored["cells"]] == ["works", "fails"] and "halves" not in stored
    assert [x.get("environment") for x in stored["cells"]] == [before, None]
    assert stored["environment"]["commit"] == "later" != before["commit"]
    assert "fails:" in capsys.readouterr().out


def test_an_engine_ends_with_the_benchmark():
    """However the benchmark ends, no process of its keeps the card."""
    ends = "import time, generation; generation.end_with_parent(); print('started', flush=True); time.sleep(60)"
    starts = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {ends!r}], start_new_session=True, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
os._exit(1)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])}
    run = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True, env=environment)
    process = Path("/proc", run.stdout.strip(), "stat")
    deadline = time.monotonic() + 20
    while process.exists() and process.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.1)
