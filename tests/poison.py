"""Memory that PyTorch hands out uninitialised holds NaN while `poisoned(device)` is on, so that an output element which
is never written, or a workspace read before it is written, shows up as NaN.

Two independent means: PyTorch's deterministic mode fills what torch.empty returns (on both devices, also for calls
that come from C++ through the dispatcher; integers become their maximum), and on CUDA the free blocks of the caching
allocator are filled with 0xFF bytes beforehand (NaN in every floating dtype, -1 in integers), which also reaches
allocations that bypass the operators. test_helpers.py shows that both work.
"""

from __future__ import annotations

import contextlib
import warnings

import torch

FRESH_BYTES = 1 << 30  # more free memory than a call of the tests' sizes asks for


@contextlib.contextmanager
def poisoned(device: str):
    if device == "cuda":
        fill_free_cuda_blocks()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def free_cuda_blocks() -> list[int]:
    """The sizes of the caching allocator's free blocks."""
    device = torch.cuda.current_device()
    return [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]


def take_cuda_blocks(sizes: list[int]) -> list[torch.Tensor]:
    # Largest first: the allocator takes the smallest block that fits, so each request gets the block it was read from.
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sorted(sizes, reverse=True)]


def fill_free_cuda_blocks():
    """Take every free block of the caching allocator, and some fresh memory, fill them with 0xFF and give them back."""
    sizes = free_cuda_blocks()
    sizes += [max(0, FRESH_BYTES - sum(sizes))] + [512 << (i % 8) for i in range(256)]
    for block in take_cuda_blocks(sizes):
        block.fill_(0xFF)
