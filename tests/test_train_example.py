"""examples/train.py on the CPU, in few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.long

TRAIN = Path(__file__).parent.parent / "examples" / "train.py"
STEPS = 32  # enough to learn the text
FEW_STEPS = 8  # enough for a wrong gradient to show

# Runs the example with an op through which one of the inputs gets no gradient.
WITHOUT_A_GRADIENT = """
import inspect, os, runpy, sys
import flash_qla

original = flash_qla.gated_delta_net

def wrong(mixed, z, a, b, *weights, **options):
    return original(mixed, z, a, b.detach(), *weights, **options)

wrong.__signature__ = inspect.signature(original)
flash_qla.gated_delta_net = wrong
del sys.argv[0]  # this script
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*command):
    # Thousands of small operations: on a busy machine two threads would wait for each other most of the time.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, command)], text=True, capture_output=True, env=environment)


def test_both_learn_the_same(tmp_path):
    result = run(TRAIN, "--device=cpu", f"--steps={STEPS}", "--out", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads((tmp_path / "train.json").read_text())
    ours, theirs = (results["runs"][name]["losses"] for name in ("flash_qla", "torch"))
    assert len(ours) == len(theirs) == STEPS
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert ours[-1] < results["entropy"][0] < ours[0]
    assert results["failures"] == []


def test_a_missing_gradient_is_noticed(tmp_path):
    script = tmp_path / "without_a_gradient.py"
    script.write_text(WITHOUT_A_GRADIENT)
    result = run(script, TRAIN, "--device=cpu", f"--steps={FEW_STEPS}")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAILED: the curves of flash_qla and torch are" in result.stderr


def over_ranks(folder, world_size, *options):
    """The losses under torchrun, over ranks and in one process, and what is printed."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}")
    result = run(*torchrun, TRAIN, "--out", folder, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads((folder / "train.json").read_text())
    assert results["failures"] == []
    return *[run["losses"] for run in results["runs"].values()][:2], result.stdout


def test_sequences_over_ranks(tmp_path):
    """Two sequences, each over two ranks. Few steps need not learn."""
    options = ("--device=cpu", f"--steps={FEW_STEPS}", "--length=512", "--context-ranks=2")
    ours, one_process, output = over_ranks(tmp_path, 4, *options)
    assert len(ours) == len(one_process) == FEW_STEPS
    assert max(abs(a - b) for a, b in zip(ours, one_process, strict=True)) < 1e-5
    assert "fewer than 30 steps: not asked whether the text has been learned" in output


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_long_sequence_over_two_gpus(tmp_path):
    """The example itself compares the curves, with a margin for what bf16 does."""
    ours, *_ = over_ranks(tmp_path, 2, "--device=cuda", "--length=131072")
    assert ours[-1] < ours[0]
