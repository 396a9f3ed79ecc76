"""Finds the compilers and what surrounds them, and says clearly when something is missing or too old.

Order for nvcc: $CUDA_HOME, PATH, then the PyPI toolkit packages (site-packages/nvidia/cu13), which are part
of build-system.requires; the first nvcc that is new enough is taken.
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

MINIMUM_NVCC = (12, 8)
MINIMUM_GXX = 11  # the oldest that has been tried
TILELANG_VERSION = "0.1.15"  # build_tools/lower.py reads its internals
ARCH = "sm_90a"


class BuildError(Exception):
    """A failure whose message is all that the user needs to see."""


@dataclass(frozen=True)
class Toolkit:
    nvcc: Path
    version: str  # e.g. 13.0.88
    root: Path
    origin: str  # where it was found, and what came before and was ignored

    @property
    def include(self) -> Path:
        return self._first("cuda_runtime.h", "include", "targets/x86_64-linux/include")

    @property
    def static_runtime(self) -> Path:
        name = "libcudart_static.a"
        return self._first(name, "lib64", "lib", "targets/x86_64-linux/lib") / name

    def _first(self, file: str, *folders: str) -> Path:
        for folder in folders:
            if (self.root / folder / file).is_file():
                return self.root / folder
        raise BuildError(f"{file} not found in {', '.join(folders)} of {self.root}")


def find_toolkit() -> Toolkit:
    looked_at = []
    for origin, nvcc in _candidates():
        if nvcc is None:
            looked_at.append(f"{origin}: none")
            continue
        version = _nvcc_version(nvcc)
        if version is None:
            looked_at.append(f"{origin}: {nvcc} does not run")
        elif tuple(map(int, version.split(".")[:2])) < MINIMUM_NVCC:
            looked_at.append(f"{origin}: {nvcc} is {version}, too old")
        else:
            ignored = "; ".join(line for line in looked_at if not line.endswith(": none"))
            return Toolkit(nvcc, version, _toolkit_root(nvcc), f"{origin} ({ignored})" if ignored else origin)
    minimum = ".".join(map(str, MINIMUM_NVCC))
    what = "nvcc is too old" if any("too old" in line for line in looked_at) else "no nvcc found"
    raise BuildError(
        f"{what}: {minimum} or newer is needed. Looked at\n  "
        + "\n  ".join(looked_at)
        + "\nInstall a CUDA toolkit and set CUDA_HOME, or: pip install nvidia-cuda-nvcc==13.0.88"
        " nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96"
        " nvidia-cuda-cccl==13.0.85"
    )


def _candidates() -> list[tuple[str, Path | None]]:
    home = os.environ.get("CUDA_HOME")
    in_home = Path(home, "bin/nvcc") if home else None
    on_path = shutil.which("nvcc")
    packages = importlib.util.find_spec("nvidia")
    locations = packages.submodule_search_locations if packages else []
    in_packages = [Path(location, "cu13/bin/nvcc") for location in locations]
    return [
        ("CUDA_HOME", in_home),
        ("PATH", Path(on_path) if on_path else None),
        ("PyPI packages", next((nvcc for nvcc in in_packages if nvcc.is_file()), None)),
    ]


def _nvcc_version(nvcc: Path) -> str | None:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return None
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match.group(1) if match else None


def _toolkit_root(nvcc: Path) -> Path:
    # nvcc may be a wrapper script elsewhere, so it is asked where its toolkit is.
    command = [nvcc, "--dryrun", "-c", "unused.cu"]
    text = subprocess.run(command, capture_output=True, text=True).stderr
    match = re.search(r"^#\$ TOP=(.*)$", text, re.MULTILINE)
    return Path(match.group(1) if match else nvcc.parent / "..").resolve()


def find_compiler() -> Path:
    """The C++ compiler, of the host code and for nvcc: $CXX, or what CMake would take."""
    name = os.environ.get("CXX")
    found = shutil.which(name) if name else shutil.which("c++") or shutil.which("g++")
    what = f"CXX is {name!r}, which is no program" if name else "no C++ compiler found, neither c++ nor g++ is on PATH"
    if found:
        command = [found, "-E", "-P", "-x", "c++", "-"]
        result = subprocess.run(command, input="__clang_major__ __GNUC__", capture_output=True, text=True)
        clang, gxx = (result.stdout.split() or ["", ""])[-2:]
        if clang.isdecimal() or (gxx.isdecimal() and int(gxx) >= MINIMUM_GXX):
            return Path(found)
        what = f"{found} is g++ {gxx}, too old" if gxx.isdecimal() else f"{found} does not run"
    raise BuildError(f"{what}: g++ {MINIMUM_GXX} or newer is needed. Install it, or set CXX to it")


def check_tilelang() -> str:
    try:
        version = importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != TILELANG_VERSION:
        raise BuildError(
            f"TileLang {TILELANG_VERSION} is needed, found {version}: the build reads interfaces"
            f" that change between releases. pip install tilelang=={TILELANG_VERSION}"
        )
    return version


def package_root(name: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(f"the Python package {name} is needed to build and is not installed")
    return Path(spec.origin).parent


# The device code's fixed flags; the include paths differ between machines and come on top.
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xptxas=-v",
    # TileLang declares variables that it does not always use, and annotates defaulted functions.
    "--diag-suppress=177,20012",
]


def nvcc_command(toolkit: Toolkit, source: Path, output: Path, include: list[Path]) -> list[str]:
    tilelang = package_root("tilelang")
    includes = [*include, tilelang / "src", tilelang / "3rdparty/cutlass/include"]
    return [
        str(toolkit.nvcc),
        f"-ccbin={find_compiler()}",
        *NVCC_FLAGS,
        *(f"-I{path}" for path in includes),
        "-c",
        str(source),
        "-o",
        str(output),
    ]


def max_jobs() -> int:
    jobs = os.environ.get("MAX_JOBS")
    if not jobs:
        return len(os.sched_getaffinity(0))
    if not jobs.isdecimal() or int(jobs) == 0:
        raise BuildError(f"MAX_JOBS is {jobs!r}, expected how many compilers may run at a time, 1 or more")
    return int(jobs)


def lock(folder: Path) -> None:
    """Waits until no other process has the folder; then it is this one's until it ends, however it ends."""
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
    """Says so of the first of the folders, and of that for temporary files, whose disk has no room for a build."""
    for folder in (*folders, Path(tempfile.gettempdir())):
        free = shutil.disk_usage(folder).free
        if free < 16 << 20:
            return f": the disk of {folder} is full, {free >> 20} MB are free"
    return ""


def main() -> None:
    """What CMakeLists.txt asks for, as a CMake list. The first item changes when the kernels' tools do."""
    toolkit = find_toolkit()
    tools = f"TileLang {check_tilelang()}, nvcc {toolkit.version}"
    print(tools, toolkit.include, toolkit.static_runtime, package_root("torch"), sep=";")


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(f"error: {error}")
