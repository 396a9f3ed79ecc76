"""Lowers and compiles every kernel instance: `python -m build_tools.kernels --out build/kernels`.

Kernel authors:
- kernels_tl/<folder>/<kernel>.py defines a function <kernel>(**params) that returns a TileLang PrimFunc with one
  T.Kernel, and optionally PASS_CONFIGS, a dict for TileLang's PassContext.
- kernels_tl/instances.py lists what is compiled: INSTANCES = [Instance("states.replay_states",
  {"dtype": "bfloat16", "K": 128}), ...]. It must not import tilelang.
- kernels_tl/layout.py, if it exists, is also written as layout.h, for device headers and host code.
- `--only NAME` (an instance, or a kernel for all of its instances) builds just that and prints its registers, spills
  and shared memory. OUT/<instance>.cu is the generated source, OUT/<instance>.log the tools' output. `--sources` writes
  the sources and compiles nothing, which is enough for the emulator.

A full run leaves OUT/kernels.h (argument structs and launchers for the host code, see build_tools/registry.py),
OUT/launchers.cpp, which embeds each OUT/<kernel>.<architecture>.lzma, the code of a kernel's instances, and
OUT/registry.cpp. OUT/<instance>.json has the hash that decides whether an instance is up to date. The hash covers
sources, parameters, flags and tool versions, but no time stamps and absolute paths, so it survives pip's throw-away
build environments.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import re
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path

from build_tools import archive, codegen, layout, nvrtc, registry
from build_tools.archive import Archive
from build_tools.instance import HOPPER, Instance
from build_tools.lower import Field
from build_tools.registry import Compiled, Resources
from build_tools.toolchain import (
    CUDA_VERSION,
    BuildError,
    Toolkit,
    check_tilelang,
    find_toolkit,
    lock,
    max_jobs,
)
from flash_qla_environment import is_on

ROOT = Path(__file__).resolve().parent.parent
# Sources that the generated code depends on, besides the kernel's own files
BUILD_SOURCES = [
    ROOT / "build_tools/lower.py",
    ROOT / "build_tools/tilelang_patches.py",
    ROOT / "build_tools/codegen.py",
    ROOT / "build_tools/nvrtc.py",
    *sorted(nvrtc.PREAMBLE.parent.iterdir()),
]
# Constants that device and host code share, and the header that is generated from them
LAYOUT, LAYOUT_HEADER = "layout.py", "layout.h"
# The preamble is precompiled for an architecture if at least so many instances are built for it.
WORTH_PRECOMPILING = 4
# Remarks of ptxas about speed, such as products of WGMMA that wait for each other; they fail the build.
REMARKS = ("Potential Performance Loss", "setmaxnreg")


class Builder:
    def __init__(self, kernels: Path, out: Path):
        self.kernels, self.out = kernels.resolve(), out.resolve()
        self.tilelang = check_tilelang()
        self.toolkit: Toolkit = find_toolkit()
        self.compiler = nvrtc.Compiler(self.toolkit, [self.kernels, self.out])
        self.out.mkdir(parents=True, exist_ok=True)
        if (self.kernels / LAYOUT).is_file():
            write(self.out / LAYOUT_HEADER, layout.header(self.package))

    @property
    def package(self) -> str:
        return self.kernels.name

    def content_hash(self, instance: Instance) -> str:
        digest = hashlib.sha256(self._sources(instance.module))
        compilers = [self.tilelang, CUDA_VERSION, nvrtc.OPTIONS]
        facts = [instance.name, instance.params, instance.architectures, instance.cubins, *compilers]
        digest.update(json.dumps(facts).encode())
        return digest.hexdigest()

    @functools.cache  # noqa: B019  the forks inherit it
    def _sources(self, module: str) -> bytes:
        """A hash of the sources of the module's instances."""
        digest = hashlib.sha256()
        sources = self._imported(module)
        for path in [*sources, *self._included(sources), *BUILD_SOURCES]:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.digest()

    def _imported(self, module: str) -> list[Path]:
        """The kernel's file, and those of its package that it imports, directly or not."""
        files, pending = {}, [module]
        while pending:
            name = pending.pop()
            path = self.kernels / f"{name.replace('.', '/')}.py"
            if name in files or not path.is_file():
                continue
            files[name] = path
            try:
                tree = ast.parse(path.read_text())
            except SyntaxError as error:
                kernel = module.rpartition(".")[2]
                raise BuildError(f"kernel {kernel} does not lower: {error.msg} ({path}:{error.lineno})") from None
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    base = f"{self.package}.{node.module or ''}" if node.level else node.module
                    names = [base, *(f"{base.rstrip('.')}.{alias.name}" for alias in node.names)]
                else:
                    continue
                # A prefix of package.folder.module.name is the module; prefixes that are no files are skipped.
                module_paths = [name.split(".")[1:] for name in names if name.startswith(f"{self.package}.")]
                pending += [".".join(parts[:depth]) for parts in module_paths for depth in range(1, len(parts) + 1)]
        return [files[name] for name in sorted(files)]

    def _included(self, sources: list[Path]) -> list[Path]:
        """The device headers that the sources include, directly or not. Names are relative to the kernels' folder."""
        headers, pending = {}, list(sources)
        while pending:
            for name in re.findall(r'^#include "(.+)"$', pending.pop().read_text(), re.MULTILINE):
                path = self.kernels / (LAYOUT if name == LAYOUT_HEADER else name)
                if name not in headers and path.is_file():
                    headers[name] = path
                    pending.append(path)
        return [headers[name] for name in sorted(headers)]

    def codes(self, instance: Instance) -> dict[str, Path]:
        """The files with the instance's code, by architecture."""
        kinds = {arch: "cubin" if arch in instance.cubins else "ptx" for arch in instance.architectures}
        return {arch: self.out / f"{instance.name}.{arch}.{kind}" for arch, kind in kinds.items()}

    def record(self, instance: Instance) -> dict:
        """The record that build() stored."""
        return json.loads((self.out / f"{instance.name}.json").read_text())

    def valid_record(self, instance: Instance) -> dict | None:
        """The record of an earlier build; None if the instance is out of date."""
        files = [self.out / f"{instance.name}.json", *self.codes(instance).values()]
        if not all(file.is_file() for file in files):
            return None
        record = self.record(instance)
        return record if record["hash"] == self.content_hash(instance) else None

    def build(self, instance: Instance) -> None:
        """Lowers and compiles the instance, and stores the files that record() and write_library() read."""
        name, content_hash = instance.name, self.content_hash(instance)
        source = self.out / f"{name}.cu"
        record_file, log = self.out / f"{name}.json", self.out / f"{name}.log"
        for stale in (record_file, log, *self.codes(instance).values()):
            stale.unlink(missing_ok=True)

        start = time.process_time()
        lowered = self._lower(instance, log)
        lower_seconds = time.process_time() - start
        source.write_text(codegen.kernel_source(instance, lowered))

        start = time.process_time()
        try:
            output = self.compiler.compile(source, instance.cubins)
        except nvrtc.CompileError as error:
            log.write_text(str(error))
            lines = str(error).splitlines()
            reason = next((line for line in lines if re.search("error|fatal", line, re.IGNORECASE)), lines[0])
            raise BuildError(
                f"kernel {name} does not compile: {reason}\nits source: {source}, all messages: {log}"
            ) from None
        log.write_text("".join(output.values()))
        remarks = [line for text in output.values() for line in text.splitlines() if any(r in line for r in REMARKS)]
        record = {
            "hash": content_hash,
            "fields": [dataclasses.asdict(field) for field in lowered.fields],
            "block": lowered.block,
            "shared_bytes": lowered.shared_bytes,
            "resources": {arch: dataclasses.asdict(registry.parse_ptxas(text)) for arch, text in output.items()},
            "launcher": codegen.launcher(instance, lowered),
            "waits_for_predecessor": lowered.waits_for_predecessor,
            "remarks": remarks,
            "lower_seconds": lower_seconds,
            "compile_seconds": time.process_time() - start,
        }
        write(record_file, json.dumps(record, indent=1))

    def write_source(self, instance: Instance) -> None:
        """Writes the generated source alone; the instance is then out of date."""
        name = instance.name
        (self.out / f"{name}.json").unlink(missing_ok=True)
        lowered = self._lower(instance, self.out / f"{name}.log")
        (self.out / f"{name}.cu").write_text(codegen.kernel_source(instance, lowered))

    def _lower(self, instance: Instance, log: Path):
        from build_tools.lower import lower

        try:
            return lower(self.package, instance)
        except Exception as error:
            log.write_text(traceback.format_exc())
            first_line = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise BuildError(f"kernel {instance.name} does not lower: {first_line}\nfull trace: {log}") from None

    def compiled(self, instance: Instance, record: dict) -> Compiled:
        return Compiled(
            instance,
            [Field(**field) for field in record["fields"]],
            record["block"],
            record["shared_bytes"],
            {arch: Resources(**used) for arch, used in record["resources"].items()},
        )

    def write_library(self, compiled: list[Compiled]) -> None:
        check_uniform(compiled)
        write(self.out / "kernels.h", registry.header(compiled))
        write(self.out / "registry.cpp", registry.registry(compiled, self.tilelang, CUDA_VERSION))
        instances = [item.instance for item in compiled]
        archives = self.write_archives(instances)
        locations = {file: (packed.name, offset) for packed in archives for file, offset in packed.offsets.items()}
        functions = ""
        for instance in instances:
            record = self.record(instance)
            codes = {arch: locations[path.name] for arch, path in self.codes(instance).items()}
            functions += codegen.codes(instance, codes, record["waits_for_predecessor"]) + record["launcher"] + "\n"
        write(self.out / "launchers.cpp", codegen.launchers(functions, archives))

    def write_archives(self, instances: list[Instance]) -> list[Archive]:
        """Compresses the code of each kernel, because its instances are much alike: by architecture, one file."""
        codes = defaultdict(list)
        for instance in instances:
            for architecture, path in self.codes(instance).items():
                codes[f"{instance.kernel}.{architecture}"].append(path)
        with multiprocessing.get_context("fork").Pool(max_jobs()) as pool:
            return pool.starmap(archive.write, [(self.out / f"{name}.lzma", paths) for name, paths in codes.items()])


def write(path: Path, text: str) -> None:
    """Writes the file unless it has this text already, so that its dependents are not built again."""
    if path.is_file() and path.read_text() == text:
        return
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def check_uniform(compiled: list[Compiled]) -> None:
    """Raises unless all instances of a kernel have the same C++ structs, which they share."""
    for variants in registry.by_kernel(compiled).values():
        first = variants[0]
        for other in variants[1:]:
            for ours, theirs in zip(registry.structs(first), registry.structs(other), strict=True):
                if ours != theirs:
                    raise BuildError(
                        f"{first.instance.name} and {other.instance.name} are instances of one kernel, but differ in\n"
                        f"{ours}\n{theirs}"
                    )


def check_spills(compiled: list[Compiled]) -> None:
    violations = [
        f"kernel {item.instance.name} spills {used.spill_bytes} bytes, its budget is {item.instance.spill_budget}"
        for item in compiled
        for arch, used in item.resources.items()
        if arch == item.instance.measured and used.spill_bytes > item.instance.spill_budget
    ]
    if violations and not is_on("FLASH_QLA_ALLOW_SPILLS"):
        raise BuildError("\n".join(violations) + "\n(FLASH_QLA_ALLOW_SPILLS=1 builds nevertheless)")


def check_remarks(builder: Builder, instances: list[Instance]) -> None:
    slow = [f"kernel {item.name}: {remark.strip()}" for item in instances for remark in builder.record(item)["remarks"]]
    if slow:
        raise BuildError("\n".join(slow))


# The most shared memory that a CTA has: on Hopper, and on 8.6, 8.9 and 12.0, which have the least.
HOPPER_SHARED_BYTES, SHARED_BYTES = 227 * 1024, 99 * 1024


def check_shared(compiled: list[Compiled]) -> None:
    violations = [
        f"kernel {item.instance.name} takes {used} bytes of shared memory, a CTA has {limit}"
        for item in compiled
        for limit in [HOPPER_SHARED_BYTES if item.instance.architectures == HOPPER else SHARED_BYTES]
        if (used := item.shared_bytes + item.static_shared_bytes) > limit
    ]
    if violations:
        raise BuildError("\n".join(violations))


def load_instances(kernels: Path) -> list[Instance]:
    sys.path.insert(0, str(kernels.resolve().parent))
    instances = importlib.import_module(f"{kernels.resolve().name}.instances").INSTANCES
    names = [instance.name for instance in instances]
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise BuildError(f"instances listed twice: {', '.join(sorted(doubled))}")
    return instances


def run(builder: Builder, instance: Instance, errors: multiprocessing.connection.Connection):
    try:
        builder.build(instance)
    except BuildError as error:
        errors.send(str(error))
    except OSError as error:
        errors.send(f"kernel {instance.name}: {error}")
    except BaseException:
        errors.send(f"kernel {instance.name}: {traceback.format_exc()}")


def prepare(builder: Builder, instances: list[Instance]) -> None:
    """Imports TileLang and the kernels, and precompiles the preamble, side by side; the forked processes inherit it."""
    used = Counter(ptx for instance in instances for ptx in set(instance.cubins.values()))
    files = {arch: builder.out / f"preamble.{arch}.pch" for arch in used if used[arch] >= WORTH_PRECOMPILING}
    precompiling = threading.Thread(target=builder.compiler.precompile, args=(files,))
    precompiling.start()
    print("importing TileLang", flush=True)
    import tilelang  # noqa: F401

    for instance in instances:
        with contextlib.suppress(Exception):  # the instance's own process reports it
            builder.content_hash(instance)
            importlib.import_module(f"{builder.package}.{instance.module}")
    precompiling.join()


def build_all(builder: Builder, instances: list[Instance]) -> list[Compiled]:
    """Builds the instances that are out of date, MAX_JOBS at a time.

    Each instance has a forked process: TileLang is imported once, and the message can name an instance that crashes the
    compiler. No process starts after a failure.
    """
    records = {instance.name: builder.valid_record(instance) for instance in instances}
    pending = [instance for instance in instances if records[instance.name] is None]
    jobs = max_jobs()
    total, done = len(instances), 0

    def report(instance: Instance, timing: str) -> None:
        record = records[instance.name]
        print(f"[{done}/{total}] {instance.name}: {timing}", end="")
        for arch, used in record["resources"].items():
            shared = (record["shared_bytes"] + used["static_shared_bytes"]) / 1024
            label = f"; {arch} " if len(record["resources"]) > 1 else ", "
            print(
                f"{label}{used['registers']} registers, {used['spill_bytes']} B spills, {shared:.0f} KB shared", end=""
            )
        print(flush=True)

    for instance in instances:
        if records[instance.name] is not None:
            done += 1
            report(instance, "cached")
    if pending:
        prepare(builder, pending)

    fork = multiprocessing.get_context("fork")
    running, failures = {}, []
    while running or (pending and not failures):
        while pending and not failures and len(running) < jobs:
            instance = pending.pop(0)
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=run, args=(builder, instance, sender))
            process.start()
            sender.close()
            running[process.sentinel] = (instance, process, receiver)
        for sentinel in multiprocessing.connection.wait(running):
            instance, process, receiver = running.pop(sentinel)
            process.join()
            done += 1
            if receiver.poll() and (message := _receive(receiver)):
                failures.append(message)
            elif process.exitcode != 0:
                failures.append(f"kernel {instance.name} crashed the compiler (exit status {process.exitcode})")
            else:
                record = records[instance.name] = builder.record(instance)
                timing = "lowered {lower_seconds:.1f} s, compiled {compile_seconds:.1f} s"
                report(instance, timing.format(**record))
    if failures:
        raise BuildError("\n".join(failures))
    return [builder.compiled(instance, records[instance.name]) for instance in instances]


def _receive(receiver) -> str | None:
    try:
        return receiver.recv()
    except EOFError:
        return None


def select(instances: list[Instance], only: str | None) -> list[Instance]:
    if only is None:
        return instances
    selected = [item for item in instances if only in (item.name, item.kernel)]
    if not selected:
        names = ", ".join(item.name for item in instances)
        raise BuildError(f"no instance or kernel is called {only}; there are: {names}")
    return selected


def main() -> int:
    parser = argparse.ArgumentParser(description="Lower and compile the kernel instances.")
    parser.add_argument("--out", type=Path, default=Path("build/kernels"))
    parser.add_argument("--kernels", type=Path, default=ROOT / "kernels_tl", help="kernel package")
    parser.add_argument("--only", metavar="NAME", help="build this instance or kernel, no library")
    parser.add_argument("--sources", action="store_true", help="write the sources, compile nothing")
    options = parser.parse_args()
    try:
        instances = select(load_instances(options.kernels), options.only)
        lock(options.out)
        builder = Builder(options.kernels, options.out)
        if options.sources:
            for instance in instances:
                builder.write_source(instance)
            return 0
        try:
            compiled = build_all(builder, instances)
        finally:
            for file in builder.compiler.precompiled.values():
                file.unlink(missing_ok=True)
        check_shared(compiled)
        check_spills(compiled)
        check_remarks(builder, instances)
        if options.only is None:
            builder.write_library(compiled)
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
