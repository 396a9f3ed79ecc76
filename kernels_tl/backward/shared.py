"""What the backward's kernels share."""

from types import SimpleNamespace

import tilelang.language as T

from kernels_tl.common import C
from kernels_tl.layout import SegmentColumn

WARP = 32  # threads


@T.macro
def warp_sum(number):
    """The sum of a number over the lanes of a warp, in all of them."""
    total = T.alloc_var("float32", init=number)
    for bit in T.unroll(5):
        total += T.shfl_xor(total, 1 << bit)
    return total


@T.macro
def load_piece(segments, segment, hv, v0):
    """A CTA's piece of work, the value rows from v0 on of a head of a segment: where it is, the segment's columns and
    its chunks."""
    row = segments[segment, SegmentColumn.ROW]
    length = segments[segment, SegmentColumn.LENGTH]
    first = segments[segment, SegmentColumn.CHUNK]
    chunks = T.truncdiv(length + (C - 1), C)
    return SimpleNamespace(segment=segment, hv=hv, v0=v0, row=row, length=length, first=first, chunks=chunks)


@T.macro
def read_state(fragment, states, n, piece):
    """A piece's rows of S^T, or of a gradient, from the caller's states."""
    for i, j in T.Parallel(*fragment.shape):
        fragment[i, j] = states.numbers[states.state_at(n, piece.hv, piece.v0 + i) + j * states.stride_k]


@T.macro
def write_state(fragment, states, n, piece):
    """Back."""
    for i, j in T.Parallel(*fragment.shape):
        states.numbers[states.state_at(n, piece.hv, piece.v0 + i) + j * states.stride_k] = fragment[i, j]


@T.macro
def store(fragment, tile, target):
    """A chunk's matrix to memory by way of its tile, by the consumers, which store two of them by turns: the last
    chunk's has left the tile then, and only the other matrix may still be leaving. One thread issued the store and
    waits here; the barrier that the compiler puts before the copy tells the others."""
    T.tma_store_wait(1)
    T.copy(fragment, tile)
    T.fence_proxy_async()
    T.tma_copy(tile, target)
