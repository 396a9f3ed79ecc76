"""Functions in the processes of a group."""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch

# Modules that ask CUDA nothing when they are imported: CUDA works in no fork of a process that did. Inductor asks.
PRELOADED = ("torch.distributed.tensor.parallel", "flash_qla")
LIMIT = 120  # seconds that a group may take; it is there so that a test ends


def _run(rank, world_size, backend, timeout, folder, function, args):
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    if backend == "gloo":
        dist.barrier()  # a rank that ends before another one has connected to it would end that one
    try:
        outcome = {"result": function(*args)}
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    torch.save(outcome, Path(folder, f"{rank}.new"))
    Path(folder, f"{rank}.new").rename(Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


class GroupOfOne:
    """The part of a process group of one rank that a context uses, without processes."""

    group_name = "alone"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def on_gpus(world_size: int, *values):
    """Parameters of a test on this many GPUs: the device, their number, and the values."""
    missing = pytest.mark.skipif(torch.cuda.device_count() < world_size, reason=f"needs {world_size} GPUs")
    return pytest.param("cuda", world_size, *values, marks=[pytest.mark.gpu, missing])


def outcomes_on_ranks(world_size: int, function, *args, device: str = "cpu", timeout: float = 60) -> list[dict]:
    """The outcome of function(*args) on each rank: {"result": ...}, {"error": ..., "traceback": ...}, or neither if the
    process ended. `timeout` is the group's, in seconds, which has gloo on the CPU and NCCL on GPUs.

    The function is one of a module that can be imported; results are what torch.save takes.
    """
    # All processes are forked from one that has imported PyTorch and does nothing else: imports cost seconds each.
    context = multiprocessing.get_context("forkserver")
    more = [] if torch.cuda.is_available() else ["torch._inductor.compile_fx"]
    context.set_forkserver_preload([*PRELOADED, *more])
    deadline, backend = time.monotonic() + LIMIT, "nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run, args=(rank, world_size, backend, timeout, folder, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in hanging:
            processes[rank].kill()
            processes[rank].join()
        assert not hanging, f"ranks {hanging} of {world_size} have not ended after {LIMIT} s"
        files = [Path(folder, f"{rank}.pt") for rank in range(world_size)]
        return [torch.load(file, weights_only=False) if file.exists() else {} for file in files]


def run_on_ranks(world_size: int, function, *args, **options) -> list:
    """The result of function(*args) on each rank."""
    outcomes = outcomes_on_ranks(world_size, function, *args, **options)
    for rank, outcome in enumerate(outcomes):
        assert "result" in outcome, f"rank {rank}: {outcome.get('traceback', 'the process ended')}"
    return [outcome["result"] for outcome in outcomes]
