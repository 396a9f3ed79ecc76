import json
import os
import platform
import subprocess
from pathlib import Path

import accuracy
import pytest
import torch


def no_gpu_reason() -> str | None:
    """Why the tests marked gpu cannot run here; None if they can."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU (sm_90): torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"needs a Hopper GPU (sm_90): {torch.cuda.get_device_name()} is sm_{major}{minor}"
    return None


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU (sm_90)")


def pytest_collection_modifyitems(items):
    reason = no_gpu_reason()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


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


def environment() -> dict:
    """What the errors were measured on; COMMIT names the commit where there is no git checkout."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    git = ["git", "rev-parse", "HEAD"]
    return {
        "gpu": output_of(query) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("COMMIT") or output_of(git),
    }


def output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def pytest_terminal_summary(terminalreporter, config):
    rows = accuracy.worst_errors()
    if rows:
        terminalreporter.section("worst relative L2 error against fp64")
    for row in rows:
        terminalreporter.write_line("{device:4} {dtype:8} {tensor:12} {error:.2e}  {case}".format(**row))
    if config.getoption("--errors-json"):
        Path(config.getoption("--errors-json")).write_text(json.dumps(environment() | {"worst": rows}, indent=1))
