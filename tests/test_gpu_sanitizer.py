"""compute-sanitizer over every kernel: no access out of bounds, no race in shared memory, no barrier misused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("sanitizer_driver.py")
# A tool that has nothing to say still prints its summary; one that did not run does not.
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "synccheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}


def run_under(tool: str, *command: str) -> subprocess.CompletedProcess:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH (it comes with the CUDA toolkit)")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    if "Device not supported" in result.stdout:
        pytest.skip("compute-sanitizer does not support this device or its virtual machine")
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("tool", CLEAN)
def test_sanitizer(tool):
    result = run_under(tool, sys.executable, str(DRIVER))
    output = result.stdout + result.stderr
    assert "driver finished" in output, output[-5000:]
    assert result.returncode == 0 and CLEAN[tool] in output, output[-5000:]


@pytest.mark.gpu
def test_the_sanitizer_would_find_something():
    """A tensor whose memory was taken away: reading it is out of bounds, and has to be reported."""
    code = """
import torch
x = torch.zeros(1 << 20, device="cuda")
x.untyped_storage().resize_(64)
print(x.sum().item())
"""
    result = run_under("memcheck", sys.executable, "-c", code)
    assert result.returncode != 0 and "Invalid __global__ read" in result.stdout, result.stdout[-5000:]
