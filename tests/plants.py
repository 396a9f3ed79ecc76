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

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/plants"
TREE = BUILD / "tree"  # where faults are planted: CMake's cache and objects hold this path
CLEAN = BUILD / "clean"  # the same without a fault, and built
TIMEOUT = 900  # seconds of a test run: a fault may make a kernel wait forever
LIBRARY = [sys.executable, "setup.py", "build_ext", "--inplace"]
EMULATOR = [sys.executable, "emulator/build.py", "build/emulator"]


class Broken(Exception):
    pass


class Patch:
    def __init__(self, path: Path):
        text = path.read_text()
        self.path, self.reason = path, text.partition("\n")[0]
        self.files = re.findall(r"^--- a/(.+)$", text, re.MULTILINE)
        self.runs = re.findall(r"^(cpu|emulator): (test_\w+\.py) -k (.+)$", text, re.MULTILINE)
        targets = {where for where, _, _ in self.runs}
        self.builds = [LIBRARY] if "cpu" in targets and any(file.startswith("csrc/") for file in self.files) else []
        if "emulator" in targets:
            kernels = [Path(file).stem for file in self.files if re.match(r"kernels_tl/\w+/\w+\.py", file)]
            build = [sys.executable, "-m", "build_tools.kernels", "--sources", "--only"]
            self.builds += [*([*build, name] for name in kernels), EMULATOR]


def command(words: list, tree: Path, timeout: int | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Runs it in the tree, with the tree's package."""
    environment = {"PYTHONPATH": str(tree), "GIT_CEILING_DIRECTORIES": str(BUILD)} | environment
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(words, cwd=tree, env=os.environ | environment, timeout=timeout, **output)


def build(words: list) -> None:
    result = command(words, TREE)
    if result.returncode != 0:
        raise Broken(f"{result.stdout[-2000:]}\n{words} ends with {result.returncode}")


def prepare(patches: list[Patch]) -> None:
    """Copies the checkout and what is built of it, and builds what the patches change, so that a fault costs little.
    Time stamps stay, so that this builds little too where an earlier run has left its build."""
    kept = BUILD / "kept"
    if (CLEAN / "build").is_dir():
        (CLEAN / "build").rename(kept)
    for old in filter(Path.exists, (TREE, CLEAN)):
        shutil.rmtree(old)
    shutil.copytree(ROOT, TREE, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
    if kept.is_dir():
        kept.rename(TREE / "build")
    (installed,) = importlib.util.find_spec("flash_qla").submodule_search_locations
    for built in (*Path(installed).glob("*.so"), Path(installed, "_layout.py")):
        shutil.copy2(built, TREE / "flash_qla")
    for built in ("build/kernels", "build/emulator/objects"):
        if (ROOT / built).is_dir():
            shutil.copytree(ROOT / built, TREE / built, dirs_exist_ok=True)
    for words in (LIBRARY, EMULATOR):
        if any(words in patch.builds for patch in patches):
            build(words)
    shutil.copytree(TREE, CLEAN)


def pytest(where: str, file: str, expression: str, tree: Path, test: str = "") -> subprocess.CompletedProcess:
    """The tests of a run, or one of them. The exit status is 1 if a test fails, and above if none runs."""
    words = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{test or file}"]
    if where == "cpu":
        return command([*words, "-m", "not gpu", *([] if test else ["-k", expression])], tree, TIMEOUT)
    words += ["-p", "plugin", "-m", "gpu", *([] if test else ["-k", f"({SELECTED[file]}) and ({expression})"])]
    path = f"{tree}/build/emulator/package:{tree}/emulator"
    return command(words, tree, TIMEOUT, PYTHONPATH=path, FLASH_QLA_QUIET="1", EMULATED_SMS=sms_of(file))


def plant(patch: Patch) -> str | None:
    """The test that finds the fault, or None."""
    shutil.rmtree(TREE)
    shutil.copytree(CLEAN, TREE)
    for words in (["git", "apply", "--unidiff-zero", patch.path], *patch.builds):
        build(words)
    for run in patch.runs:
        try:
            result = pytest(*run, TREE)
        except subprocess.TimeoutExpired:
            return f"{run[1]} does not end"
        if result.returncode > 1:
            raise Broken(result.stdout[-2000:])
        if result.returncode != 0:
            failure = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
            test = failure.group(1) if failure else ""
            if pytest(*run, CLEAN, test).returncode != 0:
                raise Broken(f"{test or run[1]} fails without the fault, too")
            return test or f"{run[1]} crashes"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", default="", help="faults whose names match this regular expression")
    only = parser.parse_args().only
    patches = [Patch(path) for path in sorted(ROOT.glob("tests/plants/*.patch")) if re.search(only, path.stem)]
    prepare(patches)
    killed = 0
    for patch in patches:
        start = time.monotonic()
        try:
            test = plant(patch)
            verdict, why = ("killed", test) if test else ("survived", patch.reason)
        except Broken as error:
            verdict, why = "broken", error
        killed += verdict == "killed"
        print(f"{verdict:8} {patch.path.stem:40} {time.monotonic() - start:4.0f} s  {why}", flush=True)
    print(f"{killed} of {len(patches)} killed")
    return 0 if patches and killed == len(patches) else 1


if __name__ == "__main__":
    sys.exit(main())
