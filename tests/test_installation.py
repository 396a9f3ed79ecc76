"""The installed library: the sentences about GPUs and drivers, and which Hopper instructions the kernels really use.
(What the registry holds is in test_build.py.)"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flash_qla

LIBRARY = Path(flash_qla.__file__).with_name("libflash_qla.so")


@pytest.fixture
def _C():
    return pytest.importorskip("flash_qla._C", reason="flash_qla._C was built for another Python version")


def test_obstacles_are_sentences(_C):
    newest = 1000 * int(_C.build_info()["nvcc"].split(".")[0])
    assert _C.obstacle(newest, 9, 0) == "" and _C.obstacle(newest + 1000, 9, 0) == ""
    assert re.search(r"need NVIDIA driver \d+ or newer, but no driver was found", _C.obstacle(0, 9, 0))
    too_old = r"need NVIDIA driver \d+ or newer, but the driver supports CUDA up to 11\.8"
    assert re.search(too_old, _C.obstacle(11080, 9, 0))
    for major, minor in ((8, 0), (10, 0), (12, 0)):
        assert re.search(rf"need .* 9\.0 .*, but this one has {major}\.{minor}$", _C.obstacle(newest, major, minor))


def test_command_says_something_of_every_gpu(_C, tmp_path):
    command = [sys.executable, "-m", "flash_qla"]
    output = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    lines = [line for line in output.splitlines() if re.match(r"GPU( \d+)? ", line)]
    if _C.gpus():
        assert len(lines) == len(_C.gpus())
        assert all("the kernels run" in line or "the kernels do not run: " in line for line in lines)
    else:
        assert len(lines) == 1 and "CPU tensors run on the C++ CPU implementation" in lines[0]


def test_kernels_use_tma_and_wgmma():
    cuobjdump = shutil.which("cuobjdump")
    if cuobjdump is None:
        pytest.skip("cuobjdump is not on PATH (it comes with the CUDA toolkit)")
    sass = subprocess.run([cuobjdump, "--dump-sass", LIBRARY], capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"Function : (\w+)\n(.*?)(?=\n\s*Function : |\Z)", sass, re.S)
    for kernel in ("chunk_matrices", "chunk_forward", "segment_maps", "segment_scan", "chunk_states"):
        for dtype in ("bf16", "fp16"):
            bodies = [body for name, body in functions if f"{kernel}_{dtype}" in name]
            assert bodies, [name for name, _ in functions]
            assert all("HGMMA" in body and "UTMALDG" in body for body in bodies), kernel
