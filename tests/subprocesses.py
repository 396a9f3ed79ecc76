"""Code in a fresh interpreter."""

import os
import subprocess
import sys
import tempfile


def run_python(code: str, **environment: str) -> str:
    """What the code prints. It runs outside the checkout, where `import flash_qla` finds the installed package."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tempfile.gettempdir(),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout
