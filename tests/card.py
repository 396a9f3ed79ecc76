"""GPUs for the workers of pytest-xdist, which take them in turns: each worker has a share of its GPU's memory, and
tests that need the whole card wait until nothing else runs on it.

Locks are those of the operating system, which ends them with the process. A test takes its turn before it takes the
card, so that tests that come later queue up after one that waits for the whole card.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
from pathlib import Path

import torch

GIB = 1 << 30
LEFT_OVER = 2 * GIB  # of the card: the driver's memory, and unusable fragments of large blocks
BESIDE = 2 * GIB  # of each worker: its CUDA context, half of this, and processes that its tests start
KEPT = GIB + GIB // 4  # in the cache from test to test: the memory of `poisoned`, and a little


def share(total: int, workers: int) -> int:
    """The bytes that each worker may allocate through PyTorch."""
    return total if workers == 1 else (total - LEFT_OVER) // workers - BESIDE


def visible_devices(worker: int, gpus: int, visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a worker, whose GPU comes first. `visible`: the variable as it is."""
    devices = visible.split(",") if visible else [str(i) for i in range(gpus)]
    first = worker % gpus
    return ",".join(devices[first:] + devices[:first])


class Card:
    """The GPU as one of its `workers` sees it; `folder` has their locks."""

    def __init__(self, folder: Path | None = None, workers: int = 1):
        self.folder, self.workers = folder, workers
        self.peaks: dict[str, int] = {}  # test -> most bytes that were allocated

    @classmethod
    def of_worker(cls, worker: int, workers: int, gpus: int, folder: Path) -> Card:
        """Of worker number `worker`. To be called before CUDA starts in its process."""
        if gpus > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(worker, gpus, os.getenv("CUDA_VISIBLE_DEVICES"))
        gpus = max(gpus, 1)
        locks = folder / str(worker % gpus)
        locks.mkdir(exist_ok=True)
        return cls(locks, len(range(worker % gpus, workers, gpus)))

    @contextlib.contextmanager
    def during(self, test: str, whole: bool):
        """Around a test, with its fixtures."""
        with self.lock(whole) if self.workers > 1 else contextlib.nullcontext():
            if self.workers > 1:
                self.limit(whole)
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            try:
                yield
            finally:
                if torch.cuda.is_initialized():
                    self.peaks[test] = torch.cuda.max_memory_allocated()
                forget_failure()
                release()

    def limit(self, whole: bool) -> None:
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if whole else share(total, self.workers) / total)

    @contextlib.contextmanager
    def lock(self, whole: bool):
        with open(self.folder / "turn", "w") as turn, open(self.folder / "card", "w") as card:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # perhaps for a test that needs the whole card
                release(kept=0)
                fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(card, fcntl.LOCK_EX if whole else fcntl.LOCK_SH)
            fcntl.flock(turn, fcntl.LOCK_UN)
            yield


def forget_failure() -> None:
    """pytest keeps the exception of a failed test, and with it the tensors in its frames, until the next test runs."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)


def release(kept: int = KEPT) -> None:
    """Give memory back to the other workers, if PyTorch keeps more than so many bytes."""
    if torch.cuda.memory_reserved() > kept:
        if torch.cuda.memory_allocated() > kept:  # perhaps in cycles
            gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # a workspace keeps the whole block that it is a part of
        torch.cuda.empty_cache()
