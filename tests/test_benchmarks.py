"""What the benchmarks make of their measurements; measuring needs a GPU."""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
common = importlib.import_module("common")
dispatch = importlib.import_module("dispatch")
forward = importlib.import_module("forward")

MS = {
    "flash_qla": {"1x512": 0.01, "ragged32": 0.1},
    "fla": {"1x512": 0.03, "ragged32": 0.6},
    "flash_qla_jit": {"1x512": 0.008, "ragged32": 0.2},
    "flashinfer": {"1x512": 0.02},  # the other cell failed
}


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


def test_floor():
    """16x64 heads are bound by the matrix work, 16x16 by memory."""
    for H_k, H_v, expected in ((16, 64, 164e3 * 64 / 796e12), (16, 16, (4 * 128 * 32 + 8 * 16) / 4.28e12)):
        floor = common.floor_ms(1000, forward.FLOP * H_v, 4 * 128 * (H_k + H_v) + 8 * H_v)
        assert floor == pytest.approx(1e6 * expected)


def test_rows_and_means():
    first, second = forward.rows_of(made_up_cells(), "bench")
    assert first.ratios == pytest.approx({"fla": 3, "flash_qla_jit": 0.8, "flashinfer": 2})
    assert second.ratios == pytest.approx({"fla": 6, "flash_qla_jit": 2})
    assert (first.best, second.best) == pytest.approx((0.8, 2))
    assert (first.floor, second.floor) == pytest.approx((0.5, 0.05))
    assert forward.rows_of(made_up_cells(), "trained") == []
    (variant,) = forward.rows_of(made_up_cells(), "bench", "nocp")
    assert variant.ratios == pytest.approx({"fla": 2.4, "flash_qla_jit": 0.64, "flashinfer": 1.6})
    assert forward.summary([first, second]) == [
        f"Over the best peer: geometric mean {math.sqrt(0.8 * 2):.2f}, least 0.80 (2x8 1x512), n = 2",
        "Cells below 1.0: 2x8 1x512 0.800",
        f"Over FLA: geometric mean {math.sqrt(3 * 6):.2f}, least 3.00 (2x8 1x512), n = 2",
        "Over FlashQLA: geometric mean 1.26, least 0.80 (2x8 1x512), n = 2",
        "Over FlashInfer: geometric mean 2.00, least 2.00 (2x8 1x512), n = 1; without 2x8 ragged32",
        f"Of the floor: geometric mean {math.sqrt(0.5 * 0.05):.1%}, least 5.0% (2x8 ragged32), n = 2",
    ]


def test_report_of_stored_results(results):
    command = [sys.executable, BENCHMARKS / "forward.py", "--report", results, "--markdown"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| 2x8 | 1x512 | 0.0100 | 50% | 3.00 | 0.80 | 2.00 | 0.80 |" in report
    assert "| 2x8 | ragged32 | 0.1000 | 5% | 6.00 | 2.00 | - | 2.00 |" in report
    assert "- nocp, auto_cp=False: geometric mean 1.250, largest 1.250 (bench 2x8 1x512)" in report
    assert "- Workspace of flash_qla: at most 0.50 of the bytes of v (bench 2x8 1x512)" in report
    assert "- NOT MEASURED, flashinfer default, bench 2x8 ragged32: RuntimeError: no" in report
    assert "DISAGREEMENT" not in report


@pytest.mark.parametrize("wrong", (4.2, math.nan))
def test_report_says_who_disagrees(wrong):
    cells = made_up_cells()
    cells[2]["sketches"] = {"o": [3.0, wrong], "final_state": [1.0, 0.0]}
    found = [line for line in forward.report_outputs(cells) if "DISAGREEMENT" in line]
    assert found == [f"DISAGREEMENT, fla and flash_qla: bench 2x8 1x512 {0 * wrong + 4e-2:.1e}"]


def test_later_file_counts(results, tmp_path):
    later = tmp_path / "later.json"
    later.write_text(json.dumps({"cells": [made_up_cells()[0] | {"ms": 0.02}]}))
    cells = forward.load([results, later])
    assert len(cells) == len(made_up_cells())
    assert forward.rows_of(cells, "bench")[0].ms == 0.02


def test_modes_of_a_batch():
    found = list(dispatch.Forward.modes(8, [2048], 132))
    assert found[0] == {"fused": 1}
    assert [x["segment_chunks"] for x in found if x.get("value_tile") == 128] == [0, 16, 11, 8, 6, 4, 3, 2]
    assert max(x["segment_chunks"] for x in found[1:]) == 16 and {"value_tile": 64, "segment_chunks": 2} not in found
    assert [x.get("segment_chunks") for x in dispatch.Forward.modes(64, [64] * 3, 132)] == [None, 0, 0]
    assert [x["segment_chunks"] for x in dispatch.Backward.modes(8, [2048], 132)] == [0, 16, 11, 8, 6, 4, 3, 2]


def test_report_of_modes(capsys):
    def cell(sequences, ms, predicted_us, chosen=False, segment_chunks=0, fused=0):
        measured = {"heads": "2x8", "sequences": sequences, "ms": ms, "predicted_us": predicted_us, "chosen": chosen}
        mode = {"value_tile": 128, "segment_chunks": segment_chunks, "cut_above": 0, "whole_tile": 128, "fused": fused}
        return measured | mode

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


def test_peers_come_first_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "already")
    monkeypatch.setenv("AWAY", "1")
    options = argparse.Namespace(package_path=None, peers_path="peers")
    peer = common.package_environment("flash_qla_jit", options, {"AWAY": None, "THERE": "2"})
    assert peer["PYTHONPATH"] == f"peers{os.pathsep}already"
    assert peer["THERE"] == "2" and "AWAY" not in peer
    assert common.package_environment("flash_qla", options, {})["PYTHONPATH"] == "already"


def test_figure(results, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = tmp_path / "figure.png"
    command = [sys.executable, BENCHMARKS / "plot.py", results, figure]
    subprocess.run(command, check=True)
    assert figure.read_bytes().startswith(b"\x89PNG")
