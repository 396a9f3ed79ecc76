"""Finds the compilers, their headers and libraries, and reports those that are missing or too old.

NVRTC from PyPI compiles the kernels, whatever CUDA toolkit the machine has, so every build has the same compiler. Its
code runs under every driver of the same or a later major version of CUDA. pyproject.toml decides the versions.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MINIMUM_GXX = 11  # the oldest tested


class BuildError(Exception):
    """A failure that the message explains to the user. No traceback is printed."""


def build_requirements() -> dict[str, str]:
    """Package -> version that pyproject.toml pins for the build. Python 3.10 has no tomllib."""
    project = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
    requires = re.search(r"^\[build-system\]$.*?^requires = \[$(.*?)^\]$", project, re.MULTILINE | re.DOTALL)[1]
    return dict(re.findall(r'^ +"([\w-]+)==([\w.]+)",', requires, re.MULTILINE))


PINS = build_requirements()
# Package that kernels and host code are compiled with -> its folder
CUDA_FOLDERS = {
    "nvidia-cuda-nvrtc-cu12": "cuda_nvrtc",
    "nvidia-cuda-nvcc-cu12": "cuda_nvcc",  # ptxas and headers
    "nvidia-cuda-runtime-cu12": "cuda_runtime",
    "nvidia-cuda-cccl-cu12": "cuda_cccl",
}
CUDA_PACKAGES = {package: PINS[package] for package in CUDA_FOLDERS}
CUDA_VERSION = PINS["nvidia-cuda-nvrtc-cu12"]


@dataclass(frozen=True)
class Toolkit:
    """CUDA's compilers for device code, its folders of headers, and the runtime that is linked in."""

    nvrtc: Path
    ptxas: Path
    include: list[Path]
    static_runtime: Path


def find_toolkit() -> Toolkit:
    mismatches = []
    for package, version in CUDA_PACKAGES.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed = "none"
        if installed != version:
            mismatches.append(f"{package} {version} (found {installed})")
    if mismatches:
        packages = " ".join(f"{package}=={version}" for package, version in CUDA_PACKAGES.items())
        raise BuildError(f"the kernels' compiler is missing: {', '.join(mismatches)}. pip install {packages}")
    nvrtc, nvcc, runtime, cccl = (
        Path(importlib.metadata.distribution(package).locate_file(f"nvidia/{folder}"))
        for package, folder in CUDA_FOLDERS.items()
    )
    major = CUDA_VERSION.partition(".")[0]
    return Toolkit(
        nvrtc=nvrtc / f"lib/libnvrtc.so.{major}",
        ptxas=nvcc / "bin/ptxas",
        include=[folder / "include" for folder in (runtime, nvcc, cccl)],
        static_runtime=runtime / "lib/libcudart_static.a",
    )


def find_compiler() -> Path:
    """The C++ compiler of the host code: $CXX, or CMake's default."""
    name = os.environ.get("CXX")
    path = shutil.which(name) if name else shutil.which("c++") or shutil.which("g++")
    problem = (
        f"CXX is {name!r}, which is no program" if name else "no C++ compiler found, neither c++ nor g++ is on PATH"
    )
    if path:
        command = [path, "-E", "-P", "-x", "c++", "-"]
        result = subprocess.run(command, input="__clang_major__ __GNUC__", capture_output=True, text=True)
        clang, gxx = (result.stdout.split() or ["", ""])[-2:]
        if clang.isdecimal() or (gxx.isdecimal() and int(gxx) >= MINIMUM_GXX):
            return Path(path)
        problem = f"{path} is g++ {gxx}, too old" if gxx.isdecimal() else f"{path} does not run"
    raise BuildError(f"{problem}: g++ {MINIMUM_GXX} or newer is needed. Install it, or set CXX to it")


def check_tilelang() -> str:
    try:
        version = importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    needed = PINS["tilelang"]
    if version != needed:
        raise BuildError(
            f"TileLang {needed} is needed, found {version}: the build reads interfaces"
            f" that change between releases. pip install tilelang=={needed}"
        )
    return version


def package_root(name: str) -> Path:
    """The folder of an installed package. The package is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(f"the Python package {name} is needed to build and is not installed")
    return Path(spec.origin).parent


def check_path(folder: Path) -> None:
    """Refuses semicolons, at which CMake splits lists, and commas, at which compilers split options."""
    for character, name in ((",", "comma"), (";", "semicolon")):
        if character in str(folder):
            raise BuildError(f"the path {folder} holds a {name}, where CMake or the compiler would split it: move it")


def max_jobs() -> int:
    jobs = os.environ.get("MAX_JOBS")
    if not jobs:
        return len(os.sched_getaffinity(0))
    if not jobs.isdecimal() or int(jobs) == 0:
        raise BuildError(f"MAX_JOBS is {jobs!r}, expected how many compilers may run at a time, 1 or more")
    return int(jobs)


def lock(folder: Path) -> None:
    """Waits until no other process holds the folder, and holds it until this process ends.

    Builds in one tree share build/, and no build backend makes them wait.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise BuildError(
            f"the build keeps its files in {folder}, which cannot be written ({error.strerror}): "
            "build in a copy of the sources that can"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another build in {folder}", flush=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def full_disk(*folders: Path) -> str:
    """A message if the disk of a folder, or of temporary files, has no room for a build; otherwise empty."""
    for folder in (*folders, Path(tempfile.gettempdir())):
        free = shutil.disk_usage(folder).free
        if free < 16 << 20:
            return f": the disk of {folder} is full, {free >> 20} MB are free"
    return ""


def main() -> None:
    """Prints a CMake list for CMakeLists.txt. Its first item changes if the tools of the kernels do."""
    check_path(Path.cwd())
    toolkit = find_toolkit()
    tools = f"TileLang {check_tilelang()}, CUDA {CUDA_VERSION}"
    print(tools, toolkit.static_runtime, package_root("torch"), *toolkit.include, sep=";")


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(f"error: {error}")
