"""examples/cpp for the tests: its block saved by a process of its own, its programs built, and run."""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import accuracy
import torch

import flash_qla

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples/cpp"
LIBRARY = Path(flash_qla.__file__).with_name("libflash_qla.so")


def load_example(path: Path):
    spec = importlib.util.spec_from_file_location(f"examples_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


export_block = load_example(EXAMPLE / "export_block.py")


def equal(actual, expected) -> bool:
    return all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def assert_close(actual, expected):
    """Compares two results (y, state) of the block. Compilers fuse gates, which are then rounded differently."""
    bar = accuracy.BARS[expected[0].dtype]
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        error = accuracy.relative_error(x, y.double())
        assert error <= bar, f"{error:.1e} > {bar:.1e}"


def run(*command, **environment: str) -> str:
    """The output of the command, on both streams. Asserts that the command succeeds."""
    done = try_run(*command, **environment)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def try_run(*command, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def tool(name: str) -> str | None:
    """A program of this Python's environment, whether or not that is on PATH."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@functools.cache
def cuda_home() -> Path | None:
    """The root of a CUDA toolkit that has the runtime."""
    from torch.utils.cpp_extension import CUDA_HOME

    roots = [Path(root) for root in (CUDA_HOME, "/usr/local/cuda") if root]
    return next((root for root in roots for lib in ("lib64", "lib") if (root / lib / "libcudart.so").exists()), None)


def no_cmake_reason() -> str | None:
    """Why CMake cannot build the program here; None if it can."""
    if tool("cmake") is None:
        return "there is no CMake (in the `test` extra)"
    if torch.version.cuda is None:
        return None
    if cuda_home() is None:
        return "the TorchConfig of a CUDA build of torch asks for a CUDA toolkit with libcudart.so"
    return None


def build_programs(folder: Path) -> None:
    """Builds both with CMake if possible, otherwise with the compiler alone."""
    if no_cmake_reason() is None:
        options = [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]
        if ninja := tool("ninja"):
            options += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        if torch.version.cuda is not None:
            options += [f"-DCUDA_TOOLKIT_ROOT_DIR={cuda_home()}"]
        run(tool("cmake"), "-S", EXAMPLE, "-B", folder, *options)
        run(tool("cmake"), "--build", folder)
        return
    from torch.utils import cpp_extension

    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    # libtorch is kept although nothing in it is called: it brings in libtorch_cuda, which finds what it needs itself.
    libraries += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--allow-shlib-undefined", "-ldl"]
    for name in ("call", "run"):
        run("g++", "-std=c++20", *includes, EXAMPLE / f"{name}.cpp", "-o", folder / f"flash_qla_{name}", *libraries)


def save_block(folder: Path, device: str) -> Path:
    """block.pt, block.pt2, inputs.pt and expected.pt, by the example's script."""
    run(sys.executable, EXAMPLE / "export_block.py", "--out", folder, "--device", device)
    return folder


def run_program(program: Path, model: Path, inputs: tuple, folder: Path, device: str) -> list[torch.Tensor]:
    """The results of the C++ program for the inputs, on the device."""
    torch.save(tuple(x if x is None else x.cpu() for x in inputs), folder / "inputs.pt")
    run(program, LIBRARY, model, folder / "inputs.pt", folder / "outputs.pt", device)
    return [x.to(device) for x in torch.load(folder / "outputs.pt")]
