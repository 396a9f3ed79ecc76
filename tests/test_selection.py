"""`pytest` leaves out the tests marked long, in its workers, too, unless they are asked for. It runs the installed
package."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from card import Card
from conftest import COSTLY, SYS_PATH, turn

CHECKS = """
import pytest

def test_quick():
    pass

@pytest.mark.long
def test_long():
    pass

@pytest.mark.build
def test_build():
    pass
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "passed", "is_reported"),
    (([], 1, True), (["-m", "long"], 2, False), (["-k", "quick or build"], 2, False), (["test_checks.py"], 3, False)),
    ids=str,
)
def test_what_runs(tmp_path, options, passed, is_reported):
    (tmp_path / "test_checks.py").write_text(CHECKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = test_checks.py\nmarkers =\n  long:\n  build:\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *options],
        env=environment | {"PYTHONPATH": str(Path(__file__).parent)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert f" {passed} passed" in result.stdout, result.stdout
    assert ("left out: the tests marked long" in result.stdout) == is_reported, result.stdout


def test_no_module_of_the_tests_puts_the_checkout_first():
    """The processes that tests start take over sys.path, where a checkout in front hides the installed package."""
    root = str(Path(__file__).parent.parent)
    assert root in SYS_PATH or root not in sys.path[: len(SYS_PATH)]


def test_turns():
    """Files that cost much come first. Tests that need the whole card are last, in these files too."""

    def item(file, *markers):
        return SimpleNamespace(path=Path(file), get_closest_marker=lambda name: name if name in markers else None)

    whole, other = (item(COSTLY[1], "gpu", "whole_card"), item("test_selection.py", "gpu"))
    second, first = item(COSTLY[1], "gpu"), item(COSTLY[0])
    assert sorted((whole, other, second, first), key=turn) == [first, second, other, whole]


@pytest.mark.parametrize(
    ("worker", "gpus", "visible", "devices", "workers"),
    (
        (0, 2, None, "0,1", 3),
        (1, 2, None, "1,0", 2),
        (3, 2, "4,7", "7,4", 2),
        (2, 3, None, "2,0,1", 1),
        (4, 1, None, None, 5),
    ),
)
def test_workers_take_gpus_in_turns(worker, gpus, visible, devices, workers, tmp_path, monkeypatch):
    """Of five workers. Each has the locks and the share of memory of its own GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    card = Card.of_worker(worker, 5, gpus, tmp_path)
    assert os.getenv("CUDA_VISIBLE_DEVICES") == devices
    assert (card.workers, card.folder) == (workers, tmp_path / str(worker % gpus)) and card.folder.is_dir()
