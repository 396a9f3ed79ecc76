"""The machine, the versions and the commit of a run of the tests or of the benchmarks."""

import os
import platform
import shutil
import subprocess
import time

import torch


def output_of(command: list[str]) -> str:
    """Standard output; empty where there is no such program."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def machine() -> dict:
    """The machine of this run. COMMIT names the commit where there is no git checkout."""
    gpu_info = {"gpu": None, "gpus": 0, "driver": None, "power_limit": None}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
        cards = [line.split(", ") for line in output_of(query).splitlines()]
        _, driver, power_limit = cards[0] if cards else (None, None, None)
        visible = {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
        gpu_info = visible | {"driver": driver, "power_limit": power_limit}
    return gpu_info | {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("COMMIT") or output_of(["git", "rev-parse", "HEAD"]),
        "date": time.strftime("%F"),
    }
