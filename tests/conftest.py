import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import accuracy
import pytest
import record
import torch
import unchanged
from card import GIB, Card, release


def no_gpu_reason(config) -> str | None:
    """Why the tests marked gpu cannot run here; None if they can."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU (sm_90): torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0) and config.getoption("--kernels") != "portable":
        return f"needs a Hopper GPU (sm_90), or --kernels portable: {torch.cuda.get_device_name()} is sm_{major}{minor}"
    return None


SYS_PATH = tuple(sys.path)  # before any test is imported
CARD = pytest.StashKey[Card]()
LOCKS = pytest.StashKey[tempfile.TemporaryDirectory]()
ENDED_EARLY = pytest.StashKey[list[str]]()  # workers whose errors are lost
NOT_LONG = "not long"

# Workers take these files first, so that none of them ends late.
COSTLY = (
    "test_fla.py",
    "test_gdr.py",
    "test_export.py",
    "test_emulator.py",
    "test_emulator_portable.py",
    "test_wheel.py",
    "test_build.py",
    "test_cp.py",
    "test_train_example.py",
    "test_torchscript.py",
    "test_fuzz.py",
    "test_pairs.py",
    "test_benchmarks.py",
    "test_transformers.py",
    "test_op_registration.py",
    "test_dtensor.py",
)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU (sm_90)")
    config.addinivalue_line("markers", "hopper: on a GPU about Hopper's own kernels; skipped with --kernels portable")
    config.addinivalue_line("markers", "whole_card: needs nearly all memory of the GPU, see tests/card.py")
    config.stash[ENDED_EARLY] = []
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    config.stash[CARD] = Card()
    if worker:
        number = int(worker["workerid"].removeprefix("gw"))
        config.stash[CARD] = Card.of_worker(number, worker["workercount"], worker["gpus"], Path(worker["locks"]))


def pytest_unconfigure(config):
    if LOCKS in config.stash:
        config.stash[LOCKS].cleanup()


def turn(item) -> int:
    """Tests that need the whole card come last, because each waits until no other test runs."""
    if item.get_closest_marker("whole_card"):
        return len(COSTLY) + 1
    return COSTLY.index(item.path.name) if item.path.name in COSTLY else len(COSTLY)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("build"):
            item.add_marker("long")
    items.sort(key=turn)
    reason = no_gpu_reason(config)
    of_hopper = "is about Hopper's own kernels" if config.getoption("--kernels") == "portable" else None
    for item in items:
        skipped = reason or (of_hopper if item.get_closest_marker("hopper") else None)
        if skipped and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=skipped))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite leaves out the tests marked long, unless -m or -k selects tests. It runs on all cores, a worker
    of pytest-xdist each, unless -n or --pdb says otherwise.

    Workers share a GPU's memory, so on a machine with a GPU -n stays the caller's choice. They take two tests at a
    time, or one of them would have all of a costly file.
    """
    option = config.option
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and not option.markexpr and not option.keyword:
        option.markexpr = NOT_LONG  # in the workers, too
    if hasattr(config, "workerinput") or not config.pluginmanager.hasplugin("xdist"):
        return
    if no_gpu_reason(config) and is_whole and option.numprocesses is None and not option.usepdb:
        option.numprocesses, option.dist, option.loadscopereorder = len(os.sched_getaffinity(0)), "loadfile", False
    if option.numprocesses:
        option.maxschedchunk = option.maxschedchunk or 2
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # or each worker has as many threads as there are cores


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if item.get_closest_marker("gpu") is None or no_gpu_reason(item.config) is not None:
        return (yield)
    whole = item.get_closest_marker("whole_card") is not None
    with item.config.stash[CARD].during(item.nodeid, whole):
        return (yield)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def portable_kernels(request):
    """With --kernels portable a test on the GPU runs these kernels."""
    if request.config.getoption("--kernels") != "portable" or request.node.get_closest_marker("gpu") is None:
        yield
        return
    from flash_qla.testing import forced_dispatch

    with forced_dispatch(kernels="portable"):
        yield


@pytest.fixture
def errors_change_nothing():
    """A call of an op that raises has changed no tensor."""
    with unchanged.ErrorsChangeNothing():
        yield


def filled_once(tmp_path_factory, name: str, fill) -> Path:
    """A folder that fill(folder) has filled, in one worker of the session for all of them."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder, filled = root / name, root / f"{name}.filled"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not filled.exists():
            folder.mkdir(exist_ok=True)
            fill(folder)
            filled.touch()
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> str:
    """The folder to import the emulated package from, which one worker builds."""
    root = Path(__file__).parent.parent
    if not (root / "build/kernels/registry.cpp").is_file():
        pytest.skip("needs the sources that a build in this checkout generates")

    def build(folder: Path) -> None:
        command = [sys.executable, root / "emulator/build.py", root / "build/emulator"]
        path = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        (folder / "package").symlink_to(path)

    return str((filled_once(tmp_path_factory, "emulator", build) / "package").resolve())


@pytest.fixture
def cpp_program(tmp_path_factory) -> Path:
    """The program of examples/cpp that runs models, built; the one that calls an op lies beside it."""
    import cpp_example  # it imports flash_qla, which not every test here needs

    return filled_once(tmp_path_factory, "cpp_program", cpp_example.build_programs) / "flash_qla_run"


@pytest.fixture
def saved_block(device, tmp_path_factory) -> Path:
    """The folder with the block of examples/cpp, saved for the device by another process."""
    import cpp_example

    return filled_once(tmp_path_factory, f"saved_block_{device}", lambda x: cpp_example.save_block(x, device))


def pytest_addoption(parser):
    parser.addoption("--errors-json", metavar="FILE", help="write the worst error of each tensor to this file")
    kernels = "portable: tests on the GPU run the kernels that every GPU from Ampere on has"
    parser.addoption("--kernels", choices=("device", "portable"), default="device", help=kernels)


# The summary also shows the measurements of the workers of pytest-xdist.


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    stash = node.config.stash
    if LOCKS not in stash:
        stash[LOCKS] = tempfile.TemporaryDirectory(prefix="flash_qla-card-")
    node.workerinput |= {"locks": stash[LOCKS].name, "gpus": torch.cuda.device_count()}


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
    if config.getoption("markexpr") == NOT_LONG:
        terminalreporter.write_line("left out: the tests marked long, which `pytest -m long` runs")
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
