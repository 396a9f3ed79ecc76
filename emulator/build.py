"""Builds the package with kernels that run on a CPU (include/emulator.h).

    python emulator/build.py build/emulator      # after a build of the package, which generates the sources

g++ compiles the CUDA that TileLang has generated and the headers in kernels_tl, with include/core/ptx.cuh in the place
of theirs, and all host code, which gets an emulated CUDA runtime. Ops take CPU tensors and run the code for GPU
tensors. Parts that only the CPU has run as they are. An object is compiled again only if its inputs have changed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
KERNELS, DEVICE = ROOT / "build/kernels", ROOT / "kernels_tl"
TORCH = Path(torch.__file__).parent


def without_cuda(path: Path) -> str:
    """A generated kernel's source for g++. It adds the kernel to the emulator's list when the library is loaded."""
    name, text = path.stem, path.read_text()
    shared = re.compile(r"extern __shared__ \S+ (\w+) (\w+)\[\];")
    text = shared.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulator::own_shared());", text)
    parameters = re.search(rf'^extern "C" __global__ void {name}\((.*)\);$', text, re.MULTILINE).group(1).split(", ")
    types = [re.sub(r"__grid_constant__|__restrict__|\w+$", "", parameter) for parameter in parameters]
    arguments = ", ".join(f"*static_cast<std::decay_t<{kind}>*>(arguments[{i}])" for i, kind in enumerate(types))
    return (
        f'{text}\nstatic const bool {name}_added = emulator::add_kernel("{name}", {launch_of(path, parameters)},'
        f" [](void** arguments) {{ {name}({arguments}); }});\n"
    )


def launch_of(path: Path, parameters: list[str]) -> str:
    """The kernel's emulator::launches::Kernel, from the comment of codegen.py in the source's first line."""
    metadata = json.loads(path.read_text().partition("\n")[0].partition(": ")[2])
    names = [parameter.split()[-1] for parameter in parameters]
    tensors = [
        (re.sub(r"_desc\w*$", "", name), i, "CUtensorMap" in parameters[i])
        for i, name in enumerate(names)
        if "*" in parameters[i] or "CUtensorMap" in parameters[i]
    ]
    early = [
        (name, kernels, -1 if where is None else names.index(where))
        for name, (kernels, where) in metadata["early"].items()
        if name in {tensor for tensor, _, _ in tensors}
    ]
    return initializer([metadata["kernel"], tensors, early])


def initializer(value) -> str:
    """The C++ initializer of a string, a number or a sequence of them."""
    if isinstance(value, (list, tuple)):
        return f"{{{', '.join(map(initializer, value))}}}"
    return json.dumps(value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return path


def write_headers(folder: Path) -> None:
    """Writes empty headers in the place of those whose contents emulator.h has."""
    for path in DEVICE.rglob("*.cuh"):
        for name in re.findall(r"#include <((?:cub|tl_templates)/.+)>", path.read_text()):
            write(folder / name, "")
    for path in KERNELS.glob("*.cu"):
        for name in re.findall(r"#include <(tl_templates/.+)>", path.read_text()):
            write(folder / name, "")


class Compiler:
    """Compiles sources of a tree. An object is kept until its command, its source or a header that it includes changes.

    Commands run in the tree and name its files relative to it, so that a copy of the tree may have the objects too.
    """

    def __init__(self, root: Path, out: Path, include: list[Path], system_include: list[Path], options: list[str]):
        self.root, self.out, self.objects, self.headers = root, out, out / "objects", {}
        self.command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w"]
        self.command += ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
        self.command += ['-DFLASH_QLA_VERSION="emulated"', '-DFLASH_QLA_TORCH_TARGET="2.10"', *options]
        for folder in (self.objects, *include):
            self.command += ["-I", self.name_of(folder)]
        for folder in (TORCH / "include", *system_include):
            self.command += ["-isystem", str(folder)]

    def name_of(self, path: Path) -> str:
        return str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)

    def precompile(self, header: str, *options: str) -> tuple[str, ...]:
        """The options with which sources include the header first, without parsing it."""
        source = write(self.objects / "precompiled" / header, f"#include <{header}>\n")
        command = [*self.command, *options, "-x", "c++-header", self.name_of(source)]
        self.headers[f"precompiled/{header}"] = self._make(source.with_name(f"{header}.gch"), command)
        return (*options, "-include", f"precompiled/{header}")

    def compile(self, source: Path, *options: str) -> Path:
        name = self.name_of(source)
        return self._make(self.objects / f"{name.replace('/', '_')}.o", [*self.command, *options, "-c", name])

    def _make(self, target: Path, command: list[str]) -> Path:
        record, headers = target.with_suffix(".sha256"), target.with_suffix(".d")
        outputs = [target, record, headers]
        if not (all(path.is_file() for path in outputs) and record.read_text() == self._fingerprint(command, headers)):
            target.parent.mkdir(parents=True, exist_ok=True)
            for path in outputs:  # they may be linked to those of another tree
                path.unlink(missing_ok=True)
            subprocess.run([*command, "-MMD", "-MF", headers, "-o", target], cwd=self.root, check=True)
            record.write_text(self._fingerprint(command, headers))
        return target

    def _fingerprint(self, command: list[str], headers: Path) -> str:
        """A hash of the command, of its precompiled headers, and of the tree's files that the compiler has listed in
        `headers`."""
        digest = hashlib.sha256("\0".join(command).encode())
        for header in filter(None, map(self.headers.get, command)):
            digest.update(header.with_suffix(".sha256").read_bytes())
        for name in headers.read_text().replace("\\\n", " ").partition(":")[2].split():
            path = self.root / name
            digest.update(b"\0" + name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b""))
        return digest.hexdigest()


def sources(compiler: Compiler, races: bool) -> list[tuple]:
    """All sources of the library, each with its options."""
    registry, launchers = KERNELS / "registry.cpp", KERNELS / "launchers.cpp"
    sanitizers = ("-fsanitize=alignment", "-fno-sanitize-recover=alignment")
    if races:
        sanitizers = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0", "-g1")
    names = sorted(set(re.findall(r"\blaunch_(\w+)", registry.read_text())))
    kernels = [write(compiler.out / "kernels" / f"{name}.cpp", without_cuda(KERNELS / f"{name}.cu")) for name in names]
    kernel_options = compiler.precompile("emulator.h", "-O2", *sanitizers)
    host_options = compiler.precompile("torch.h", "-O1")
    gpu_options = (*host_options, "-include", "host.h")
    entries = [(path, *kernel_options) for path in kernels]
    entries += [(registry, "-O1"), (launchers, "-O1", f"-Wa,-I{KERNELS.relative_to(ROOT)}")]
    entries += [(HERE / name, "-O3", "-march=native") for name in ("emulator.cpp", "launches.cpp", "races.cpp")]
    entries += [(path, *host_options) for folder in ("csrc", "csrc/cpu") for path in (ROOT / folder).glob("*.cpp")]
    entries += [(path, *gpu_options) for path in (ROOT / "csrc/gpu").rglob("*.cpp")]
    dispatchers = [ROOT / "csrc" / name for name in ("call.cpp", "norm.cpp")]  # what they do depends on the device
    for path in (*dispatchers, ROOT / "csrc/ops.cpp"):
        entries.remove((path, *host_options))
    cp_passes = ("begin_forward", "finish_forward", "begin_backward", "replay_backward", "finish_backward")
    passes = ("forward", "backward", *cp_passes, "prefill", "decode", "decode_buffered", "decode_region")
    passes += ("convolve", "store_windows", "convolve_backward", "gated_rms_norm", "gated_rms_norm_backward")
    renamed = [f"-D{name}_cpu={name}_cuda" for name in passes]
    return [*entries, *((path, *gpu_options) for path in dispatchers), (ROOT / "csrc/ops.cpp", *host_options, *renamed)]


def put(source: str, target: str) -> None:
    """Copies a file. A process that has loaded the one before keeps it."""
    shutil.copy2(source, f"{target}.new")
    os.replace(f"{target}.new", target)


def build(out: Path, races: bool = False) -> Path:
    """Returns the folder to import flash_qla from."""
    installed = Path(next(iter(importlib.util.find_spec("flash_qla").submodule_search_locations)))
    sys.path.append(str(ROOT))
    from build_tools.toolchain import find_toolkit, max_jobs

    write_headers(out / "include")
    include = [out / "include", HERE / "include", DEVICE, ROOT / "csrc", ROOT / "csrc/gpu", KERNELS]
    # No strict aliasing, as in CUDA: pointers of several types may point to the same bytes.
    options = ["-Wno-psabi", "-fno-strict-aliasing", *(["-DEMULATOR_RACES"] if races else [])]
    compiler = Compiler(ROOT, out, include, find_toolkit().include, options)
    with concurrent.futures.ThreadPoolExecutor(max_jobs()) as pool:
        objects = list(pool.map(lambda source: compiler.compile(*source), sources(compiler, races)))
    package = out / "package/flash_qla"
    library = package / "libflash_qla.so"
    newest = max(x.stat().st_mtime for x in (*objects, *installed.rglob("*.py")))
    if library.exists() and library.stat().st_mtime > newest:
        return package.parent
    ignore = shutil.ignore_patterns("libflash_qla.so")
    shutil.copytree(installed, package, dirs_exist_ok=True, ignore=ignore, copy_function=put)
    libraries = [TORCH / "lib" / name for name in ("libtorch.so", "libtorch_cpu.so", "libc10.so")]
    options = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-lpthread", "-ldl", "-fsanitize=alignment"]
    subprocess.run([compiler.command[0], *objects, *libraries, *options, "-o", library], check=True)
    return package.parent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--races", action="store_true", help="look for races in shared memory, see races.cpp")
    options = parser.parse_args()
    print(build(options.out.resolve(), options.races))
