"""Plants faults and looks whether the tests that CI runs find them: `python tests/plants.py`, after a build.

Each tests/plants/*.patch is a fault, a small mistake in the sources that builds. Above its diff it says what is wrong,
and which tests have to fail, on the CPU or in the emulator, where only what test_emulator.py selects counts:

    The decode kernels: the l2norm without its epsilon.

    emulator: test_decode.py -k small_norms

A hunk is found by its text, not by its line numbers, and its text stands in the file once. So a patch has few lines,
and few changes of the tree touch it.

The command changes a copy of the tree in build/plants-* for each fault, builds the library again as far as needed, and
runs the tests. The fault is killed if one of them fails that passes in a copy without any fault. The exit status is 1
if fewer than 90 % are killed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from test_emulator import SELECTED, sms_of

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LEAST_KILLED = 0.9
TIMEOUT = 900  # seconds of a test run; a fault that makes a kernel wait forever is killed by it

# Objects that a copy of the tree takes over: of the library as it is, and of the emulated one.
LIBRARY, EMULATOR = "build/library", "build/emulator"

WRITE_LAYOUT = """
from pathlib import Path
from build_tools.layout import header
Path("build/kernels/layout.h").write_text(header("kernels_tl"))
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """Tests of a file: on the CPU, or in the emulator."""

    where: str
    file: str
    expression: str

    @property
    def selection(self) -> str:
        """The expression for pytest's -k."""
        return self.expression if self.where == "cpu" else f"({SELECTED[self.file]}) and ({self.expression})"


@dataclasses.dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str

    def changed(self, text: str) -> str:
        found = ("\n" + text).count("\n" + self.old)
        if found != 1:
            raise ValueError(f"{self.file} has these lines {found} times, expected once:\n{self.old}")
        return ("\n" + text).replace("\n" + self.old, "\n" + self.new)[1:]


@dataclasses.dataclass(frozen=True)
class Plant:
    name: str
    reason: str
    runs: tuple[Run, ...]
    edits: tuple[Edit, ...]

    def changes(self, *folders: str) -> bool:
        return any(edit.file.startswith(folders) for edit in self.edits)

    def apply(self, tree: Path) -> None:
        for edit in self.edits:
            path = tree / edit.file
            path.write_text(edit.changed(path.read_text()))


def read(path: Path) -> Plant:
    head, *files = re.split(r"^--- a/", path.read_text(), flags=re.MULTILINE)
    runs = re.findall(r"^(cpu|emulator): (test_\w+\.py) -k (.+)$", head, re.MULTILINE)
    edits = []
    for text in files:
        file, _, hunks = text.partition("\n+++ b/")
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            edits.append(Edit(file, old, new))
    return Plant(path.stem, head.partition("\n")[0], tuple(Run(*run) for run in runs), tuple(edits))


def read_all(folder: Path = TESTS / "plants") -> list[Plant]:
    return [read(path) for path in sorted(folder.glob("*.patch"))]


class DoesNotBuild(Exception):
    pass


class Tree:
    """A copy of the tree, with what is built, and what `plant` changes."""

    def __init__(self, path: Path, plant: Plant | None = None, unplanted: Tree | None = None):
        self.path, self.plant, self.unplanted = path, plant, unplanted
        self.lock, self.passed = threading.Lock(), {}
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
        shutil.copytree(ROOT, self.path, ignore=ignored)
        installed = next(iter(importlib.util.find_spec("flash_qla").submodule_search_locations))
        for built in (*Path(installed).glob("*.so"), Path(installed, "_layout.py")):
            shutil.copy(built, self.path / "flash_qla")
        if plant is not None:
            plant.apply(self.path)

    def command(self, command: list, timeout: int | None = None, **environment: str) -> subprocess.CompletedProcess:
        """Runs it here, with this tree's package."""
        return subprocess.run(
            list(map(str, command)),
            cwd=self.path,
            env=os.environ | {"PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    def build(self, command: list) -> str:
        result = self.command(command)
        if result.returncode != 0:
            raise DoesNotBuild(result.stdout)
        return result.stdout

    @functools.cached_property
    def sources(self) -> None:
        """Generates the build's files again if the kernels' Python has changed."""
        shutil.copytree(ROOT / "build/kernels", self.path / "build/kernels")
        for edit in self.plant.edits if self.plant else ():
            if edit.file == "kernels_tl/layout.py":
                shutil.copy(self.path / edit.file, self.path / "flash_qla/_layout.py")
                self.build([sys.executable, "-c", WRITE_LAYOUT])
            elif edit.file.startswith("kernels_tl/") and edit.file.endswith(".py"):
                for kernel in self.kernels_of(Path(edit.file).stem):
                    self.build([sys.executable, "-m", "build_tools.kernels", "--only", kernel, "--sources"])

    def kernels_of(self, module: str) -> list[str]:
        """The kernels that a module of kernels_tl is a part of: its own, or those of the modules that import it."""
        sys.path.append(str(ROOT))
        from kernels_tl.instances import INSTANCES

        kernels = {instance.kernel for instance in INSTANCES}
        files = [file for file in (self.path / "kernels_tl").rglob("*.py") if file.stem in kernels]
        return [file.stem for file in files if file.stem == module or f".{module} import" in file.read_text()]

    def make(self, out: str, command: list) -> str:
        """Builds what has changed since the objects of the tree without a fault, or of an earlier run."""
        _ = self.sources
        if self.unplanted is not None:
            with self.unplanted.lock:
                _ = self.unplanted.library if out == LIBRARY else self.unplanted.emulated
        known = (ROOT if self.unplanted is None else self.unplanted.path) / out / "objects"
        if known.is_dir():
            shutil.copytree(known, self.path / out / "objects", copy_function=os.link)
        made = self.build(command)
        if self.unplanted is None:
            shutil.rmtree(known, ignore_errors=True)
            shutil.copytree(self.path / out / "objects", known, copy_function=os.link)
        return made

    @functools.cached_property
    def library(self) -> None:
        """The library on the CPU, in the tree's package."""
        self.make(LIBRARY, [sys.executable, __file__, "--library", self.path])

    @functools.cached_property
    def emulated(self) -> str:
        """The folder to import the emulated package from."""
        return self.make(EMULATOR, [sys.executable, "emulator/build.py", EMULATOR]).splitlines()[-1]

    def test(self, run: Run, one: str | None = None) -> subprocess.CompletedProcess:
        """The run's tests, or one of them. pytest's exit status is 0 if all have passed, 1 if one has failed, and
        another one if none was run."""
        tests = [f"tests/{one}"] if one else [f"tests/{run.file}", "-k", run.selection]
        command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        if run.where == "cpu":
            return self.command([sys.executable, *command, "-m", "not gpu"], TIMEOUT)
        path = os.pathsep.join([self.emulated, str(self.path / "emulator")])
        command = [sys.executable, "-P", *command, "-m", "gpu", "-p", "plugin"]
        environment = {"PYTHONPATH": path, "FLASH_QLA_QUIET": "1", "EMULATED_SMS": sms_of(run.file)}
        return self.command(command, TIMEOUT, **environment)

    def passes(self, run: Run, one: str | None) -> bool:
        with self.lock:
            if (run, one) not in self.passed:
                self.passed[run, one] = self.test(run, one).returncode == 0
            return self.passed[run, one]


def build_library(tree: Path) -> None:
    """libflash_qla.so and the library of autograd, as CMakeLists.txt builds them, but for what makes them portable."""
    sys.path[:0] = [str(ROOT / "emulator"), str(ROOT)]
    from build import TORCH, Compiler
    from build_tools.toolchain import find_toolkit, max_jobs

    toolkit, kernels = find_toolkit(), tree / "build/kernels"
    options = ["-O2", "-Wa,-Ibuild/kernels"]
    compiler = Compiler(tree, tree / LIBRARY, [tree / "csrc", kernels], toolkit.include, options)
    folders = ("csrc", "csrc/cpu", "csrc/gpu", "csrc/gpu/runtime")
    sources = [path for folder in folders for path in sorted((tree / folder).glob("*.cpp"))]
    with concurrent.futures.ThreadPoolExecutor(max_jobs()) as pool:
        objects = list(pool.map(compiler.compile, [*sources, kernels / "launchers.cpp", kernels / "registry.cpp"]))
    library = tree / "flash_qla/libflash_qla.so"
    library.unlink(missing_ok=True)
    needed = [
        toolkit.static_runtime,
        TORCH / "lib/libtorch.so",
        TORCH / "lib/libtorch_cpu.so",
        TORCH / "lib/libc10.so",
        "-ldl",
        "-lrt",
    ]
    options = ["-shared", "-Wl,--no-undefined", "-Wl,--no-as-needed", "-Wl,-soname,libflash_qla.so", "-lpthread"]
    subprocess.run([compiler.command[0], *objects, *needed, *options, "-o", library], check=True)
    api = ("-UTORCH_TARGET_VERSION", "-isystem", str(TORCH / "include/torch/csrc/api/include"))
    autograd = compiler.compile(tree / "csrc/autograd/autograd.cpp", *api)
    (library,) = (tree / "flash_qla").glob("autograd_torch*.so")
    library.unlink()
    needed = [TORCH / "lib/libtorch_cpu.so", TORCH / "lib/libc10.so"]
    subprocess.run([compiler.command[0], "-shared", autograd, *needed, "-o", library], check=True)


def verdict(plant: Plant, unplanted: Tree) -> tuple[str, str]:
    """killed, survived or broken, and by which test or why."""
    path = unplanted.path.with_name(plant.name)
    try:
        tree = Tree(path, plant, unplanted)
        if plant.changes("csrc", "kernels_tl/layout.py") and any(run.where == "cpu" for run in plant.runs):
            _ = tree.library
        for run in plant.runs:
            try:
                result = tree.test(run)
            except subprocess.TimeoutExpired:
                return "killed", f"{run.where}: {run.file} does not end"
            if result.returncode > 1:
                return "broken", result.stdout
            if result.returncode != 0:
                found = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
                failed = found and found.group(1)
                if not unplanted.passes(run, failed):
                    return "broken", f"{failed or run} fails without the fault, too ({run.where})"
                return "killed", f"{run.where}: {failed or f'{run.file} crashes'}"
        return "survived", plant.reason
    except (DoesNotBuild, ValueError) as error:
        return "broken", str(error)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", default="", help="plants whose names match this regular expression")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="plants at a time")
    parser.add_argument("--patches", type=Path, default=TESTS / "plants", help="the folder of the patches")
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.library:
        build_library(options.library)
        return 0
    plants = [plant for plant in read_all(options.patches) if re.search(options.only, plant.name)]
    if not plants:
        parser.error(f"no plant's name matches {options.only!r}")
    os.environ.setdefault("MAX_JOBS", "1" if options.jobs > 1 else str(len(os.sched_getaffinity(0))))
    found = []

    def report(plant: Plant, unplanted: Tree) -> None:
        start = time.monotonic()
        what, why = verdict(plant, unplanted)
        found.append(what)
        print(f"{what:8} {plant.name:40} {time.monotonic() - start:4.0f} s  {why}", flush=True)

    (ROOT / "build").mkdir(exist_ok=True)  # a folder of the run's own: another may be under way
    with (
        tempfile.TemporaryDirectory(prefix="plants-", dir=ROOT / "build") as scratch,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        unplanted = Tree(Path(scratch, "unplanted"))
        list(pool.map(functools.partial(report, unplanted=unplanted), plants))
    killed = found.count("killed")
    print(f"{killed} of {len(plants)} killed, {100 * killed / len(plants):.0f} %")
    return 0 if killed >= LEAST_KILLED * len(plants) else 1


if __name__ == "__main__":
    sys.exit(main())
