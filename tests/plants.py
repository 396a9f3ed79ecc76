"""Plants faults in a copy of the tree, one at a time, and runs the tests that have to find them.

    python tests/plants.py                       # all, after a build in this checkout; about an hour on two cores
    python tests/plants.py --only 'slots|scale'  # those whose names match a regular expression

Each tests/plants/*.patch is a small mistake that builds. Above its diff, which `git apply` takes without context lines,
so that other changes seldom break it, stand what is wrong and which tests have to fail, on the CPU or in the emulator:

    The prefill takes -1 for null, whatever the caller says.

    emulator: test_pairs.py -k prefill-packed

In the emulator only tests that test_emulator.py selects count, because no others run in CI. A fault in Python of
kernels_tl is in a kernel's own file. A fault is killed if a test fails that passes without it. The exit status is 1 if
any fault survives, or is broken: its patch does not apply, it does not build, or it selects no tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from test_emulator import SELECTED, sms_of

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
BUILD = ROOT / "build/plants"
TREE = BUILD / "tree"  # where faults are planted: CMake's cache and objects hold this path
CLEAN = BUILD / "clean"  # the same without a fault, and built
TIMEOUT = 900  # seconds of a test run: a fault may make a kernel wait forever
LIBRARY = [sys.executable, "setup.py", "build_ext", "--inplace"]
EMULATOR = [sys.executable, "emulator/build.py", "build/emulator"]
Run = tuple[str, str, str]  # "cpu" or "emulator", the file of tests, an expression for pytest's -k


class Broken(Exception):
    pass


def runs_of(patch: Path) -> list[Run]:
    return re.findall(r"^(cpu|emulator): (test_\w+\.py) -k (.+)$", patch.read_text(), re.MULTILINE)


def files_of(patch: Path) -> list[str]:
    return re.findall(r"^--- a/(.+)$", patch.read_text(), re.MULTILINE)


def command(words: list, tree: Path, timeout: int | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Runs it in the tree, with the tree's package."""
    return subprocess.run(
        list(map(str, words)),
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "GIT_CEILING_DIRECTORIES": str(BUILD)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def must(words: list) -> None:
    result = command(words, TREE)
    if result.returncode != 0:
        raise Broken(result.stdout[-2000:])


def builds_of(patch: Path) -> list[list]:
    """The commands that build what the patch's tests run."""
    files, places, found = files_of(patch), {where for where, _, _ in runs_of(patch)}, []
    if "cpu" in places and any(file.startswith("csrc/") for file in files):
        found.append(LIBRARY)
    if "emulator" in places:
        kernels = [Path(file).stem for file in files if re.match(r"kernels_tl/\w+/\w+\.py", file)]
        found += [[sys.executable, "-m", "build_tools.kernels", "--only", name, "--sources"] for name in kernels]
        found.append(EMULATOR)
    return found


def prepare(patches: list[Path]) -> None:
    """Copies the checkout and what is built of it, and builds what the patches change, so that a fault costs little."""
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(ROOT, TREE, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
    (installed,) = importlib.util.find_spec("flash_qla").submodule_search_locations
    for built in (*Path(installed).glob("*.so"), Path(installed, "_layout.py")):
        shutil.copy2(built, TREE / "flash_qla")
    shutil.copytree(ROOT / "build/kernels", TREE / "build/kernels")
    if (ROOT / "build/emulator/objects").is_dir():  # objects are found again by the hash of their sources
        shutil.copytree(ROOT / "build/emulator/objects", TREE / "build/emulator/objects")
    for build in (LIBRARY, EMULATOR):
        if any(build in builds_of(patch) for patch in patches):
            must(build)
    shutil.copytree(TREE, CLEAN)


def pytest(run: Run, tree: Path, test: str | None = None) -> subprocess.CompletedProcess:
    """The run's tests, or one of them. The exit status is 1 if a test fails, and above if none runs."""
    where, file, expression = run
    words = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    if where == "cpu":
        selected = [f"tests/{test}"] if test else [f"tests/{file}", "-k", expression]
        return command([*words, "-m", "not gpu", *selected], tree, TIMEOUT)
    selected = [f"tests/{test}"] if test else [f"tests/{file}", "-k", f"({SELECTED[file]}) and ({expression})"]
    path = f"{tree}/build/emulator/package:{tree}/emulator"
    environment = {"PYTHONPATH": path, "FLASH_QLA_QUIET": "1", "EMULATED_SMS": sms_of(file)}
    return command([*words, "-p", "plugin", "-m", "gpu", *selected], tree, TIMEOUT, **environment)


def plant(patch: Path) -> str | None:
    """The test that finds the fault, or None."""
    shutil.rmtree(TREE)
    shutil.copytree(CLEAN, TREE)
    must(["git", "apply", "--unidiff-zero", patch])
    for build in builds_of(patch):
        must(build)
    for run in runs_of(patch):
        try:
            result = pytest(run, TREE)
        except subprocess.TimeoutExpired:
            return f"{run[1]} does not end"
        if result.returncode > 1:
            raise Broken(result.stdout[-2000:])
        if result.returncode != 0:
            found = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
            test = found and found.group(1)
            if pytest(run, CLEAN, test).returncode != 0:
                raise Broken(f"{test or run[1]} fails without the fault, too")
            return test or f"{run[1]} crashes"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", default="", help="faults whose names match this regular expression")
    options = parser.parse_args()
    patches = [patch for patch in sorted(TESTS.glob("plants/*.patch")) if re.search(options.only, patch.stem)]
    if not patches:
        parser.error(f"no fault's name matches {options.only!r}")
    prepare(patches)
    killed = 0
    for patch in patches:
        start = time.monotonic()
        try:
            test = plant(patch)
            verdict, why = ("killed", test) if test else ("survived", patch.read_text().partition("\n")[0])
        except Broken as error:
            verdict, why = "broken", str(error)
        killed += verdict == "killed"
        print(f"{verdict:8} {patch.stem:40} {time.monotonic() - start:4.0f} s  {why}", flush=True)
    print(f"{killed} of {len(patches)} killed")
    return 0 if killed == len(patches) else 1


if __name__ == "__main__":
    sys.exit(main())
