"""Code in fresh interpreters."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


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


FORKS = """
import os, sys, traceback
import torch, flash_qla
for code, path in {programs!r}:
    pid = os.fork()
    if pid == 0:
        output = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 0
        try:
            exec(code, {{"__name__": "__main__"}})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"{{code}}\\n{{status}}\\n{{open(path).read()}}"
"""


def run_forks(codes: list[str], **environment: str) -> list[str]:
    """The output of each code, as of run_python. Each runs in a fork of one process, which imports torch once."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(i)) for i in range(len(codes))]
        run_python(FORKS.format(programs=[*zip(codes, map(str, paths), strict=True)]), **environment)
        return [path.read_text() for path in paths]


def ending(status: int) -> str:
    """How a process has ended, in words."""
    return f"exit status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"
