import json
import os
import shlex
import tempfile
from pathlib import Path

import accuracy
import pytest
import record
import torch
from card import GIB, Card, release


def no_gpu_reason() -> str | None:
    """Why the tests marked gpu cannot run here; None if they can."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU (sm_90): torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"needs a Hopper GPU (sm_90): {torch.cuda.get_device_name()} is sm_{major}{minor}"
    return None


CARD = pytest.StashKey[Card]()
LOCKS = pytest.StashKey[tempfile.TemporaryDirectory]()
ENDED_EARLY = pytest.StashKey[list[str]]()  # workers whose errors are lost


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU (sm_90)")
    config.addinivalue_line("markers", "whole_card: needs nearly all memory of the GPU, see tests/card.py")
    config.stash[ENDED_EARLY] = []
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    config.stash[CARD] = Card(Path(worker["locks"]), worker["workercount"]) if worker else Card()


def pytest_unconfigure(config):
    if LOCKS in config.stash:
        config.stash[LOCKS].cleanup()


def pytest_collection_modifyitems(items):
    reason = no_gpu_reason()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite runs on all cores, a worker of pytest-xdist each, unless -n or --pdb says otherwise.

    Workers share a GPU's memory, so on a machine with a GPU -n stays the caller's choice.
    """
    option = config.option
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if not is_whole or not config.pluginmanager.hasplugin("xdist") or not no_gpu_reason():
        return
    if option.numprocesses is None and not option.usepdb:
        option.numprocesses, option.dist = len(os.sched_getaffinity(0)), "loadscope"
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if item.get_closest_marker("gpu") is None or no_gpu_reason() is not None:
        return (yield)
    whole = item.get_closest_marker("whole_card") is not None
    with item.config.stash[CARD].during(item.nodeid, whole):
        return (yield)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(scope="session")
def cpp_program(tmp_path_factory) -> Path:
    """The program of examples/cpp, built."""
    import cpp_example  # it imports flash_qla, which not every test here needs

    return cpp_example.build_program(tmp_path_factory.mktemp("cpp_program"))


@pytest.fixture(scope="session")
def saved_blocks(tmp_path_factory) -> dict:
    return {}


@pytest.fixture
def saved_block(device, saved_blocks, tmp_path_factory) -> Path:
    """The folder with the block of examples/cpp, saved for the device by another process, once."""
    import cpp_example

    if device not in saved_blocks:
        saved_blocks[device] = cpp_example.save_block(tmp_path_factory.mktemp("saved_block"), device)
    return saved_blocks[device]


def pytest_addoption(parser):
    parser.addoption("--errors-json", metavar="FILE", help="write the worst error of each tensor to this file")
    parser.addoption("--record", metavar="FILE", help="add the machine, the selection and the counts to this file")


# The summary also shows the measurements of the workers of pytest-xdist.


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    stash = node.config.stash
    if LOCKS not in stash:
        stash[LOCKS] = tempfile.TemporaryDirectory(prefix="flash_qla-card-")
    node.workerinput["locks"] = stash[LOCKS].name


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["worst_errors"] = accuracy.worst_errors()
        session.config.workeroutput["peaks"] = session.config.stash[CARD].peaks
        release(kept=0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})
    if "worst_errors" not in output:
        node.config.stash[ENDED_EARLY].append(node.gateway.id)
        return
    for row in output["worst_errors"]:
        accuracy.record(row)
    node.config.stash[CARD].peaks.update(output["peaks"])


def pytest_terminal_summary(terminalreporter, config):
    rows = accuracy.worst_errors()
    if rows:
        terminalreporter.section("worst relative L2 error against fp64")
        for line in accuracy.table(rows):
            terminalreporter.write_line(line)
    for worker in config.stash[ENDED_EARLY]:
        terminalreporter.write_line(f"{worker} ended early: what it had measured is not in the table")
    peaks = config.stash[CARD].peaks
    if peaks:
        terminalreporter.section("most GPU memory")
        for test in sorted(peaks, key=peaks.get, reverse=True)[:5]:
            terminalreporter.write_line(f"{peaks[test] / GIB:5.1f} GiB  {test}")
    if config.getoption("--errors-json"):
        Path(config.getoption("--errors-json")).write_text(json.dumps(record.machine() | {"worst": rows}, indent=1))
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        stats = terminalreporter.stats
        failures = [report.nodeid for name in ("failed", "error") for report in stats.get(name, [])]
        passed, skipped = (len(stats.get(name, [])) for name in ("passed", "skipped"))
        record.append(config.getoption("--record"), selection(config), passed, skipped, failures)


def selection(config) -> str:
    """The tests that were asked for: files, -m and -k."""
    files = [] if config.args_source is pytest.Config.ArgsSource.TESTPATHS else list(config.args)
    options = {"-m": config.getoption("markexpr"), "-k": config.getoption("keyword")}
    words = [*files, *(f"{name} {shlex.quote(text)}" for name, text in options.items() if text)]
    return f"`{' '.join(words)}`" if words else "all tests"
