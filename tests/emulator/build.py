"""Builds the package with kernels that run on a CPU, as include/emulator.h says: the CUDA that TileLang generates and
the headers in kernels_tl/device, compiled by g++ with PTX replaced by calls of the emulator, and all host code, which
finds an emulated CUDA runtime. Its ops of CPU tensors are those of GPU tensors, except what only the CPU has.

    python tests/emulator/build.py build/emulator      # behind a build of the package, for the generated sources

An object is made again only if something that it is made of has changed.
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
ROOT = HERE.parent.parent
KERNELS, DEVICE = ROOT / "build/kernels", ROOT / "kernels_tl/device"
TORCH = Path(torch.__file__).parent


def store_of(kind: str, coordinates: str) -> str:
    return f"emulator::move_box(emulator::Box::{kind}, map, box, {{{coordinates}}}); tl::tma_store_arrive();"


# By the beginning of an instruction: what its statement becomes, in the names of the place. An instruction that only
# orders what the emulator does in order anyway becomes nothing.
PTX = {
    "": "",
    "exit": "emulator::exit_thread();",
    "trap": 'emulator::fail("trap");',
    "mov.b32": "y = x;",
    "ex2.approx.ftz.f32": "y = std::exp2(x);",
    "ld.shared.f32": "x = *factor;",
    "ld.acquire.gpu.global.s32": "now = *turn;",
    "st.release.gpu.global.s32": "*turn = own + 1;",
    "bar.sync %0, 128": "emulator::synchronize(emulator::named_barrier(barrier), 128);",
    "bar.sync %0, %1": "emulator::synchronize(emulator::named_barrier(NamedBarrier::kTeam + team), 32 * warps);",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "emulator::load_matrices(x, address, false);",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": "emulator::load_matrices(x, address, true);",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16": "emulator::store_matrices(address, {a, b, c, d}, false);",
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16": "emulator::store_matrices(address, {a, b, c, d}, true);",
    "mma.sync.aligned.m16n8k8": "emulator::mma_tf32(c, {a0, a1, a2, a3}, {b0, b1});",
    "mma.sync.aligned.m16n8k16": 'emulator::mma_16(c, a, {b0, b1}, sizeof(type) == sizeof("bf16"));',
    "{\\n\\t.reg .pred p;\\n\\tsetp.ne.b32 p, %34, 0;\\n\\twgmma.mma_async.sync.aligned.m64n64k16": (
        'emulator::wgmma({nullptr, a, b, x, 64, false, false, accumulate != 0, sizeof(type) == sizeof("bf16")})'
    ),
    "wgmma.fence": "",
    "wgmma.commit_group": "tl::warpgroup_commit_batch();",
    "wgmma.wait_group": "tl::wait_wgmma<kInFlight>();",
    "fence.proxy.async": "tl::fence_proxy_async();",
    "cp.async.cg.shared.global": "emulator::copy_piece(to, from, there);",
    "cp.async.commit_group": "",
    "cp.async.wait_group": "",
    "cp.async.bulk.prefetch.L2.global": "emulator::check_pieces(from, bytes);",
    "cp.async.bulk.wait_group": "tl::tma_store_wait<0, true>();",
    "cp.async.bulk.tensor.3d": store_of("kStore", "x0, x1, x2"),
    "cp.async.bulk.tensor.5d": store_of("kStore", "x0, x1, x2, x3, x4"),
    "cp.reduce.async.bulk.tensor.3d": store_of("kAdd", "x0, x1, x2"),
    "mbarrier.expect_tx": "emulator::mbarrier(barrier).expect((rows + 31 - lane) / 32 * bytes);",
    "cp.async.bulk.shared::cluster.global": (
        "emulator::load_bytes(emulator::mbarrier(barrier), static_cast<char*>(to) + row * pitch,"
        " static_cast<const char*>(state) + row * stride, bytes);"
    ),
}


def end_of_call(text: str, begin: int) -> int:
    """Behind the parenthesis that closes the one at `begin`."""
    depth, i = 0, begin
    while True:
        if text[i] == '"':
            i = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL).match(text, i + 1).end()
            continue
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        i += 1
        if depth == 0:
            return i


def without_ptx(path: Path) -> str:
    text, found, done = path.read_text(), [], 0
    for match in re.finditer(r"\basm(?: volatile)?(?=\()", text):
        end = end_of_call(text, match.end())
        strings = re.match(r'\((?:\s|\\\n)*((?:"(?:[^"\\]|\\.)*"(?:\s|\\\n)*)+)', text[match.end() : end]).group(1)
        instruction = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', strings))
        known = [x for x in PTX if instruction.startswith(x) and (x or not instruction)]
        if not known:
            sys.exit(f"{path.name}: the emulator does not know {instruction!r}, see PTX in {__file__}")
        statement = PTX[max(known, key=len)]
        if text[end] == ";" and statement.endswith(";"):
            end += 1
        found += [text[done : match.start()], statement]
        done = end
    return "".join([*found, text[done:]])


def without_cuda(path: Path) -> str:
    """A generated kernel's source, which makes itself known to the emulator."""
    name, text = path.stem, path.read_text()
    shared = re.compile(r"extern __shared__ \S+ uchar (\w+)\[\];")
    text = shared.sub(r"uchar* const \1 = reinterpret_cast<uchar*>(emulator::dynamic_shared);", text)
    parameters = re.search(rf'^extern "C" __global__ void {name}\((.*)\);$', text, re.MULTILINE).group(1).split(", ")
    types = [re.sub(r"__grid_constant__|__restrict__|\w+$", "", parameter) for parameter in parameters]
    arguments = ", ".join(f"*static_cast<std::decay_t<{kind}>*>(arguments[{i}])" for i, kind in enumerate(types))
    return (
        f'{text}\nstatic const bool {name}_added = emulator::add_kernel("{name}", {launch_of(path, parameters)},'
        f" [](void** arguments) {{ {name}({arguments}); }});\n"
    )


def launch_of(path: Path, parameters: list[str]) -> str:
    """The emulator::launches::Kernel, from what codegen.py says of the kernel in the source's first line."""
    about = json.loads(path.read_text().partition("\n")[0].partition(": ")[2])
    names = [parameter.split()[-1] for parameter in parameters]
    tensors = [
        (re.sub(r"_desc\w*$", "", name), i, "CUtensorMap" in parameters[i])
        for i, name in enumerate(names)
        if "*" in parameters[i] or "CUtensorMap" in parameters[i]
    ]
    early = [
        (name, kernels, -1 if where is None else names.index(where))
        for name, (kernels, where) in about["early"].items()
        if name in {tensor for tensor, _, _ in tensors}
    ]
    return initializer([about["kernel"], tensors, early])


def initializer(value) -> str:
    """In C++, of strings, numbers and sequences of such."""
    if isinstance(value, (list, tuple)):
        return f"{{{', '.join(map(initializer, value))}}}"
    return json.dumps(value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return path


def write_headers(folder: Path) -> None:
    """Device headers, and empty ones for what emulator.h has."""
    for path in DEVICE.glob("*.cuh"):
        text = write(folder / "device" / path.name, without_ptx(path)).read_text()
        for name in re.findall(r"#include <((?:cub|tl_templates)/.+)>", text):
            write(folder / name, "")
    for path in KERNELS.glob("*.cu"):
        for name in re.findall(r"#include <(tl_templates/.+)>", path.read_text()):
            write(folder / name, "")


class Compiler:
    """Compiles sources of a tree. An object is kept until its command, its source or a header that it includes changes.

    Commands run in the tree and name its files relative to it, so that a copy of the tree may have the objects too.
    """

    def __init__(self, root: Path, out: Path, include: list[Path], system_include: list[Path], options: list[str]):
        self.root, self.objects = root, out / "objects"
        self.command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-w"]
        self.command += ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
        self.command += ['-DFLASH_QLA_VERSION="emulated"', '-DFLASH_QLA_TORCH_TARGET="2.10"', *options]
        for folder in include:
            self.command += ["-I", self.name_of(folder)]
        for folder in (TORCH / "include", *system_include):
            self.command += ["-isystem", str(folder)]

    def name_of(self, path: Path) -> str:
        return str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)

    def compile(self, source: Path, *options: str) -> Path:
        name = self.name_of(source)
        command = [*self.command, *options, "-c", name]
        target = self.objects / f"{name.replace('/', '_')}.o"
        record, headers = target.with_suffix(".sha256"), target.with_suffix(".d")
        made = [target, record, headers]
        if not (all(path.is_file() for path in made) and record.read_text() == self._made_of(command, headers)):
            target.parent.mkdir(parents=True, exist_ok=True)
            for path in made:  # they may be linked to those of another tree
                path.unlink(missing_ok=True)
            subprocess.run([*command, "-MMD", "-MF", headers, "-o", target], cwd=self.root, check=True)
            record.write_text(self._made_of(command, headers))
        return target

    def _made_of(self, command: list[str], headers: Path) -> str:
        """A hash of the command and of the files of the tree that it read, which the compiler has listed."""
        digest = hashlib.sha256("\0".join(command).encode())
        for name in headers.read_text().replace("\\\n", " ").partition(":")[2].split():
            path = self.root / name
            digest.update(b"\0" + name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b""))
        return digest.hexdigest()


def sources(out: Path, races: bool) -> list[tuple]:
    """Everything that the library is made of, each with its options."""
    registry, launchers = KERNELS / "registry.cpp", KERNELS / "launchers.cpp"
    seen = ("-fsanitize=alignment", "-fno-sanitize-recover=alignment")
    if races:
        seen = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0", "-g1")
    kernels = sorted(set(re.findall(r"\blaunch_(\w+)", registry.read_text())))
    found = [
        (write(out / "kernels" / f"{name}.cpp", without_cuda(KERNELS / f"{name}.cu")), "-include", "emulator.h", *seen)
        for name in kernels
    ]
    found += [(registry,), (launchers, f"-Wa,-I{KERNELS.relative_to(ROOT)}")]
    found += [(HERE / name, "-O3", "-march=native") for name in ("emulator.cpp", "launches.cpp", "races.cpp")]
    found += [(path,) for folder in ("csrc", "csrc/cpu") for path in (ROOT / folder).glob("*.cpp")]
    as_gpu = ("-include", "host.h")
    found += [(path, *as_gpu) for path in (ROOT / "csrc/gpu").glob("*.cpp")]
    found.remove((ROOT / "csrc/call.cpp",))
    found.remove((ROOT / "csrc/ops.cpp",))
    halves = [f"{half}_{name}" for half in ("begin", "finish") for name in ("forward", "backward")]
    passes = ("forward", "backward", *halves, "replay_backward", "prefill", "decode")
    renamed = [f"-D{name}_cpu={name}_cuda" for name in passes]
    return [*found, (ROOT / "csrc/call.cpp", *as_gpu), (ROOT / "csrc/ops.cpp", *renamed)]


def build(out: Path, races: bool = False) -> Path:
    """Returns the folder to import flash_qla from."""
    installed = next(iter(importlib.util.find_spec("flash_qla").submodule_search_locations))
    sys.path.append(str(ROOT))
    from build_tools.toolchain import find_toolkit, max_jobs

    write_headers(out / "include")
    include = [out / "include", HERE / "include", ROOT / "csrc", ROOT / "csrc/gpu", KERNELS]
    # No strict aliasing, as compilers of CUDA see it: pointers of all types to the same bytes
    options = ["-Wno-psabi", "-fno-strict-aliasing", *(["-DEMULATOR_RACES"] if races else [])]
    compiler = Compiler(ROOT, out, include, find_toolkit().include, options)
    with concurrent.futures.ThreadPoolExecutor(max_jobs()) as pool:
        objects = list(pool.map(lambda source: compiler.compile(*source), sources(out, races)))
    package = out / "package/flash_qla"
    shutil.copytree(installed, package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("libflash_qla.so"))
    libraries = [TORCH / "lib" / name for name in ("libtorch.so", "libtorch_cpu.so")]
    options = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-lpthread", "-ldl", "-fsanitize=alignment"]
    subprocess.run([compiler.command[0], *objects, *libraries, *options, "-o", package / "libflash_qla.so"], check=True)
    return package.parent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--races", action="store_true", help="look for races in shared memory, see races.cpp")
    options = parser.parse_args()
    print(build(options.out.resolve(), options.races))
