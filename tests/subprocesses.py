"""Code in fresh interpreters."""

import os
import signal
import subprocess
import sys
import tempfile


def start_python(code: str, **environment: str) -> subprocess.Popen:
    """It runs outside the checkout, where `import flash_qla` finds the installed package. Of a crash it says where."""
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", code],
        cwd=tempfile.gettempdir(),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_python(code: str, **environment: str) -> str:
    """The output of the code."""
    return run_side_by_side(code, [environment])[0]


def run_side_by_side(code: str, environments: list[dict[str, str]]) -> list[str]:
    """The output of each process; all run at the same time."""
    processes = [start_python(code, **environment) for environment in environments]
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, f"{ending(process.returncode)}\n{output}"
    return outputs


def ending(status: int) -> str:
    """How a process has ended, in words."""
    return f"exit status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"
