"""Code in fresh interpreters."""

import os
import subprocess
import sys
import tempfile


def start_python(code: str, **environment: str) -> subprocess.Popen:
    """It runs outside the checkout, where `import flash_qla` finds the installed package."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tempfile.gettempdir(),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_python(code: str, **environment: str) -> str:
    """What the code prints."""
    return run_side_by_side(code, [environment])[0]


def run_side_by_side(code: str, environments: list[dict[str, str]]) -> list[str]:
    """What each process prints; all run at the same time."""
    processes = [start_python(code, **environment) for environment in environments]
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs
