"""Kernels without a GPU: tests of the GPU run on the CPU, in emulation (emulator/build.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "build/kernels"

# Of each file some that are quick; between them they launch every kernel. What needs a GPU's streams or graphs, or a
# process of its own, is not for the emulator.
SELECTED = {
    "test_every_op.py": "(order and not mode) or (outside and not prefill)",
    "test_decode.py": "not (opcheck or compile)",
    "test_decode_gpu.py": "not (graph or reported or many)",
    "test_prefill.py": "test_new_requests or test_checkpoints or (test_kernels and 64-64)",
    "test_prefill_gpu.py": "not (graph or reported or many)",
    "test_forward.py": "test_dense_lengths or test_gate_and_beta_dtypes",
    "test_backward.py": "test_varlen_lengths and not 370",
    "test_head_dims.py": "test_autograd",
    "test_halves.py": "decayed or (recurrence and tiny)",
    "test_activations.py": "test_same_bits_twice or test_padding",
}


@pytest.fixture(scope="module")
def package() -> str:
    """The folder to import the emulated package from."""
    if not (KERNELS / "registry.cpp").is_file():
        pytest.skip("needs the sources that a build in this checkout generates")
    build = [sys.executable, TESTS / "emulator/build.py", TESTS.parent / "build/emulator"]
    return subprocess.run(build, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@pytest.mark.parametrize("file", SELECTED)
def test_in_emulation(package, file):
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider", "-m", "gpu"]
    path = os.pathsep.join([package, str(TESTS / "emulator")])
    result = subprocess.run(
        [*command, TESTS / file, "-k", SELECTED[file]],
        env=os.environ | {"PYTHONPATH": path, "FLASH_QLA_QUIET": "1"},
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed.group(1)) > 0 and "failed" not in result.stdout, result.stdout
