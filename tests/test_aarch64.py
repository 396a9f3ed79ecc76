"""The library for Arm: built by a cross compiler, and run in QEMU by the program of examples/cpp."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from cpp_example import EXAMPLE, assert_close, export_block, tool

ROOT = Path(__file__).resolve().parent.parent
COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", Path("/usr/aarch64-linux-gnu")
# PyPI's last torch for Arm that needs no libraries of CUDA. The headers are those of this Python's torch.
TORCH, PLATFORMS = "2.10.0", ("manylinux_2_28_aarch64", "manylinux2014_aarch64")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not all(map(shutil.which, (COMPILER, EMULATOR))),
        reason=f"needs {COMPILER} and {EMULATOR} (Debian's g++-aarch64-linux-gnu and qemu-user), as CI has",
    ),
]


def run(*command) -> str:
    result = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """The folder with torch and CUDA's runtime for Arm."""
    wheels, folder = (tmp_path_factory.mktemp(name) for name in ("wheels", "packages"))
    runtime = f"nvidia-cuda-runtime-cu12=={importlib.metadata.version('nvidia-cuda-runtime-cu12')}"
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    run(*command, *platforms, "--python-version", "3.11", "-d", wheels, f"torch=={TORCH}", runtime)
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def libraries(packages) -> str:
    """The path of torch's libraries. One of them needs zlib, which the cross compiler lacks and nothing here calls."""
    folder = packages / "torch/lib"
    run(COMPILER, "-shared", "-nostdlib", "-Wl,-soname,libz.so.1", "-x", "c", os.devnull, "-o", folder / "libz.so.1")
    return str(folder)


@pytest.fixture(scope="module")
def library(packages, libraries, tmp_path_factory) -> Path:
    if not (ROOT / "build/kernels/launchers.cpp").is_file():
        pytest.skip("needs the kernels that a build in this checkout compiles")
    folder = tmp_path_factory.mktemp("build")
    definitions = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": COMPILER,
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "Python_EXECUTABLE": sys.executable,
        "TORCH_LIB": libraries,
        "CUDA_STATIC_RUNTIME": packages / "nvidia/cuda_runtime/lib/libcudart_static.a",
    }
    run(tool("cmake"), "-G", "Ninja", "-S", ROOT, "-B", folder, *(f"-D{name}={x}" for name, x in definitions.items()))
    run(tool("cmake"), "--build", folder, "--target", "flash_qla")
    return folder / "flash_qla/libflash_qla.so"


@pytest.fixture(scope="module")
def program(packages, libraries, tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("program") / "flash_qla_run"
    include = [f"-I{packages / 'torch/include' / name}" for name in (".", "torch/csrc/api/include")]
    link = [f"-L{libraries}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--allow-shlib-undefined"]
    run(COMPILER, "-std=c++20", *include, EXAMPLE / "run.cpp", "-o", program, *link, "-ldl")
    return program


def test_the_library_needs_no_more_than_the_tag_says(library, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from build_tools import glibc

    assert glibc.platform_tag([library]) == "manylinux_2_28_aarch64"


def test_a_block_runs(library, program, libraries, tmp_path):
    """Its results are those of this machine's Python."""
    block = export_block.make_block("cpu")
    export_block.save_torchscript(block, tmp_path / "block.pt")
    inputs = export_block.make_inputs(block, (70, 0, 3))
    torch.save(inputs, tmp_path / "inputs.pt")
    environment = ["-E", f"LD_LIBRARY_PATH={libraries}", "-E", "OMP_NUM_THREADS=1"]
    files = (tmp_path / name for name in ("block.pt", "inputs.pt", "outputs.pt"))
    run(EMULATOR, "-L", SYSTEM, *environment, program, library, *files, "cpu")
    with torch.no_grad():
        assert_close(torch.load(tmp_path / "outputs.pt"), block(*inputs))
