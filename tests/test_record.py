"""tests/record.py: a run of the tests adds its machine, selection and counts to a file."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import record

TESTS = Path(__file__).parent
CHECKS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_number(number):
    assert number != 1

@pytest.mark.skip
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise ValueError

def test_error(broken):
    pass
"""


@pytest.mark.long
def test_a_session_is_recorded(tmp_path):
    """Once, with workers too. A second session is a second record."""
    (tmp_path / "test_checks.py").write_text(CHECKS)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    command += ["-c", os.devnull, "--record", tmp_path / "tests.json", "test_checks.py"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    workers = ["-n", "2"] if importlib.util.find_spec("xdist") else []
    for more in (workers, ["-m", "not gpu", "-k", "number or nothing"]):
        subprocess.run(
            [*command, *more],
            env=variables | {"PYTHONPATH": str(TESTS), "COMMIT": "none"},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
        )
    first, second = json.loads((tmp_path / "tests.json").read_text())
    assert first.keys() == {"what", "passed", "skipped", "failed", "failures"} | record.machine().keys()
    assert (first["what"], first["commit"]) == ("`test_checks.py`", "none")
    assert (first["passed"], first["skipped"], first["failed"]) == (2, 1, 2)
    assert sorted(first["failures"]) == ["test_checks.py::test_error", "test_checks.py::test_number[1]"]
    assert second["what"] == "`test_checks.py -m 'not gpu' -k 'number or nothing'`"
    assert (second["passed"], second["skipped"], second["failed"]) == (2, 0, 1)


def test_the_commit_is_that_of_the_checkout(monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    if not (TESTS.parent / ".git").exists():
        pytest.skip("there is no git checkout")
    monkeypatch.chdir(TESTS)
    assert len(record.machine()["commit"]) == 40
    monkeypatch.setenv("COMMIT", "abc")
    assert record.machine()["commit"] == "abc"
