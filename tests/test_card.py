"""tests/card.py, tests/conftest.py: what pytest-xdist's workers share, and what their session says in the end."""

import json
import os
import subprocess
import sys
import threading
import time
import types
import weakref
from pathlib import Path

import accuracy
import card
import pytest
import torch
from card import GIB, KEPT, Card

TESTS = Path(__file__).parent


class Gpu:
    """A stand-in for torch.cuda, where this process has allocated and reserved so many bytes."""

    def __init__(self, monkeypatch, total=80 * GIB):
        self.allocated = self.reserved = 0
        self.fractions, self.emptied = [], 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.reserved)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.fractions.append)
        properties = types.SimpleNamespace(total_memory=total)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)

    def empty_cache(self):
        self.emptied, self.reserved = self.emptied + 1, self.allocated


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    return Gpu(monkeypatch)


def test_shares_leave_memory_for_contexts_and_other_processes():
    assert card.share(80 * GIB, 1) == 80 * GIB
    for workers in (2, 4, 8):
        assert workers * (card.share(80 * GIB, workers) + card.BESIDE) + card.LEFT_OVER <= 80 * GIB
    assert card.share(80 * GIB, 4) >= 16 * GIB


def test_a_worker_has_its_share_and_a_test_the_whole_card(gpu, tmp_path):
    of_four = Card(tmp_path, 4)
    for whole in (False, True, False):
        with of_four.during("test", whole):
            pass
    share = card.share(80 * GIB, 4) / (80 * GIB)
    assert gpu.fractions == [share, 1.0, share]


def test_alone_there_is_no_limit(gpu):
    with Card().during("test", True):
        pass
    assert gpu.fractions == []


@pytest.mark.parametrize(("reserved", "emptied"), ((KEPT, 0), (KEPT + 1, 1)))
def test_caches_are_emptied_after_a_test(gpu, tmp_path, reserved, emptied):
    with Card(tmp_path, 4).during("test", False):
        gpu.reserved = reserved
    assert gpu.emptied == emptied


def test_caches_are_emptied_after_a_test_that_fails(gpu):
    with pytest.raises(KeyError), Card().during("test", False):
        gpu.reserved = 56 * GIB
        raise KeyError
    assert gpu.reserved == 0


def test_a_failed_test_keeps_no_memory(gpu):
    kept = []

    def failing():
        tensor = torch.empty(1)
        kept.append(weakref.ref(tensor))
        raise MemoryError

    gpu.allocated = gpu.reserved = 8 * GIB
    with Card().during("test", False):
        try:
            failing()
        except MemoryError as error:
            sys.last_value = error  # as pytest does
    assert kept[0]() is None


def test_the_whole_card_is_for_one_test_alone(gpu, tmp_path):
    """A test that needs it waits for those that run, and those that come later for it, without a cache."""
    order, running, asks = [], threading.Event(), threading.Event()

    def others(number):  # every one a worker of its own
        with Card(tmp_path, 4).during("test", False):
            order.append(f"begin {number}")
            running.set()
            if number == 0:
                assert asks.wait(60)
                time.sleep(0.5)
            order.append(f"end {number}")

    def whole():
        with Card(tmp_path, 4).during("large", True):
            order.append("begin large")
            time.sleep(0.1)
            order.append("end large")

    gpu.reserved = KEPT
    first = threading.Thread(target=others, args=(0,))
    first.start()
    assert running.wait(60)
    large = threading.Thread(target=whole)
    large.start()
    time.sleep(0.2)  # it has its turn, and waits for the first one
    assert gpu.reserved == KEPT
    later = threading.Thread(target=others, args=(1,))
    later.start()
    asks.set()
    for thread in (first, large, later):
        thread.join()
    assert order == ["begin 0", "end 0", "begin large", "end large", "begin 1", "end 1"]
    assert gpu.reserved == 0


# The summary


CHECKS = """
import accuracy, os, pytest, time, torch

EXPECTED = torch.ones(1, 64, 1, 8, dtype=torch.float64)

@pytest.mark.parametrize("number", range(8))
def test_o(number):
    o = (EXPECTED * (1 + number * 2.0**-20)).float()
    accuracy.check("o", o, EXPECTED, dtype=torch.float32, case=f"number {number}")
    time.sleep(0.1)  # so that each worker has some

def test_db():
    db = EXPECTED[..., 0]
    accuracy.check(
        "db", (db * 1.001).bfloat16(), db * 1.001, dtype=torch.float64, case="betas in 16 bits", g_cumsum=torch.zeros(1)
    )
"""


def run_session(folder: Path, code: str, *options: str) -> tuple[str, list[dict]]:
    """The output of a session of pytest with these tests, and its JSON."""
    (folder / "test_checks.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", folder]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        [*command, "-c", os.devnull, "--errors-json", folder / "errors.json", *options, folder / "test_checks.py"],
        env=environment | {"PYTHONPATH": str(TESTS), "COMMIT": "none"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return result.stdout, json.loads((folder / "errors.json").read_text())["worst"]


@pytest.mark.long
@pytest.mark.parametrize("workers", (0, 2))
def test_the_table_has_what_every_worker_measured(tmp_path, workers):
    options = []
    if workers:
        pytest.importorskip("xdist")
        options = ["-n", str(workers)]
    output, rows = run_session(tmp_path, CHECKS, *options)
    assert "9 passed" in output, output
    by_tensor = {row["tensor"]: row for row in rows}
    assert by_tensor.keys() == {"o", "db"} and len(rows) == 2
    assert by_tensor["o"] | {"error": None} == {
        "device": "cpu",
        "dtype": "float32",
        "q_dtype": "float32",
        "tensor": "o",
        "error": None,
        "bar": accuracy.BARS[torch.float32],
        "case": "number 7",
    }
    assert by_tensor["o"]["error"] == pytest.approx(7 * 2.0**-20, rel=0.1)
    # One rounding to 16 bits is what makes this error, and its bar
    assert (by_tensor["db"]["dtype"], by_tensor["db"]["q_dtype"]) == ("bfloat16", "float64")
    assert by_tensor["db"]["error"] < by_tensor["db"]["bar"] == pytest.approx(2.0**-8)
    lines = output.splitlines()
    assert "device dtype    q        tensor      error    bar      case" in lines
    assert f"cpu    float32  float32  o           {by_tensor['o']['error']:.2e} 1.00e-05 number 7" in lines


@pytest.mark.long
def test_the_table_says_what_a_crash_took(tmp_path):
    pytest.importorskip("xdist")
    crash = "\ndef test_crash():\n    os._exit(1)\n"
    output, _ = run_session(tmp_path, CHECKS + crash, "-n", "2", "--max-worker-restart=0", "-k", "crash or 0")
    assert "ended early: what it had measured is not in the table" in output, output
