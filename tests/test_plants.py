"""The faults of plants.py: each still is what its patch says, and one is killed. `python tests/plants.py` runs all."""

import collections
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import plants
import pytest

PLANTS = plants.read_all()
FOLDERS = ("csrc/cpu", "csrc/gpu", "csrc", "kernels_tl", "build_tools", "flash_qla/integrations", "flash_qla")


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_applies(plant):
    assert plant.reason.endswith(".") and plant.runs and plant.edits
    for edit in plant.edits:
        text = edit.changed((plants.ROOT / edit.file).read_text())
        assert not edit.file.endswith(".py") or compile(text, edit.file, "exec")
    for run in plant.runs:
        assert (plants.TESTS / run.file).is_file()
        assert run.where == "cpu" or run.file in plants.SELECTED


# One process collects the tests of each run, so that it imports the file once.
COLLECT = """
import json, sys, pytest
file, runs = json.loads(sys.argv[1])
for marks, selection in runs:
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-n", "0"]
    status = pytest.main([*options, "-m", marks, file, "-k", selection])
    assert status == pytest.ExitCode.OK, (selection, status)
"""


@pytest.mark.long
@pytest.mark.parametrize("file", sorted({run.file for plant in PLANTS for run in plant.runs}))
def test_selects_tests(file):
    """Each run of a fault has tests."""
    marks = {"cpu": "not gpu", "emulator": "gpu"}
    runs = {(marks[run.where], run.selection) for plant in PLANTS for run in plant.runs if run.file == file}
    command = [sys.executable, "-P", "-c", COLLECT, json.dumps([str(plants.TESTS / file), sorted(runs)])]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout[-2000:]


def test_faults_everywhere():
    found = collections.Counter(
        next(folder for folder in FOLDERS if edit.file.startswith(folder)) for plant in PLANTS for edit in plant.edits
    )
    assert len(PLANTS) >= 44 and all(found[folder] >= 4 for folder in FOLDERS), found


def run(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, plants.TESTS / "plants.py", *options]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("flash_qla") is None, reason="needs the package")
def test_a_fault_is_killed():
    result = run("--only", "^cp_negligible$")
    assert result.returncode == 0 and "1 of 1 killed" in result.stdout, result.stdout


@pytest.mark.long
def test_a_fault_survives(tmp_path):
    """The command ends with status 1, and prints the reason."""
    path = tmp_path / "comment.patch"
    path.write_text(COMMENT)
    result = run("--patches", str(tmp_path))
    assert result.returncode == 1 and "survived comment" in result.stdout, result.stdout


COMMENT = """Nothing but a comment.

cpu: test_cp.py -k negligible

--- a/flash_qla/_version.py
+++ b/flash_qla/_version.py
@@ -1 +1 @@
"""
version = (Path(plants.ROOT) / "flash_qla/_version.py").read_text()
COMMENT += f"-{version}+{version.rstrip()}  # a comment\n"
