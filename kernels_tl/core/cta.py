"""Resources of a CTA: shared memory, barriers, and the work tiles that it processes."""

import math
from types import SimpleNamespace

import tilelang.language as T
from tvm.script.ir_builder import IRBuilder

from kernels_tl.core.common import C, element_type, extern, load_early, strides_of, swizzled
from kernels_tl.layout import WIDE_TILE, SegmentColumn

SHARED_LIMIT = 226  # KB per CTA of sm_90, less one for its barriers
BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "bits16": 2, "float8": 1}


def named(**buffers):
    """Buffers as a record, each called by its name in the generated code."""
    for name, buffer in buffers.items():
        IRBuilder.name(name, buffer)
    return SimpleNamespace(**buffers)


def kilobytes_of(buffers):
    """Kilobytes of buffers, each name: (shape, dtype)."""
    return sum(math.prod(shape) * BYTES[dtype] for shape, dtype in buffers.values()) / 1024


def shared(kilobytes, swizzle=(), **buffers):
    """Allocates shared memory, each buffer `name=(shape, dtype)`, as a record of these names. The generated code calls
    a buffer name_s. `kilobytes` is their sum, as the table in config.py states it. `swizzle` names buffers that need
    TMA's swizzle and no gemm reads."""
    total = kilobytes_of(buffers)
    assert total == kilobytes <= SHARED_LIMIT, f"{total} KB of shared memory, not {kilobytes}"
    allocated = {name: T.alloc_shared(shape, dtype) for name, (shape, dtype) in buffers.items()}
    for name, buffer in allocated.items():
        IRBuilder.name(f"{name}_s", buffer)
    if swizzle:
        T.annotate_layout({allocated[name]: swizzled(allocated[name]) for name in swizzle})
    return SimpleNamespace(**allocated)


def barriers(**arrivals):
    """Allocates barriers, each name a list with the number of threads that arrive at each of them, as a record."""
    return named(**{name: T.alloc_barrier(counts) for name, counts in arrivals.items()})


def fragments(**buffers):
    """Allocates matrices in registers of a role's threads, each `name=(shape, dtype)`, as a record of these names."""
    return named(**{name: T.alloc_fragment(shape, dtype) for name, (shape, dtype) in buffers.items()})


class Variables:
    """A thread's 32-bit variables, each `name=initial value`; reading an attribute reads the variable."""

    def __init__(self, **initial):
        self._buffers = {}
        self.and_also(**initial)

    def and_also(self, **initial):
        allocated = {name: T.alloc_var("int32", init=value) for name, value in initial.items()}
        for name, buffer in allocated.items():
            IRBuilder.name(name, buffer)
        self._buffers |= allocated
        return self

    def __getattr__(self, name):
        return self._buffers[name][0]


class Segment(Variables):
    """A segment's columns in chunk_plan's table."""

    def row_and_slot(self, c):
        """The first row of chunk c, and its slot."""
        return self.row + c * C, self.first + c


def z_slot(segment, reverse=False):
    """The slot of Maps.states that has Z of a segment, and later the state after it; in reverse dZ, and later dS'
    before it."""
    return segment - 1 if reverse else segment + 1


class WorkTiles:
    """Work tiles: `tiles` parts of the value rows of each head of each segment, in the order of the segments."""

    def __init__(self, segment_slots, H_v, tiles=1):
        self.H_v, self.tiles = T.Cast("int32", H_v), tiles
        self.totals = Variables(work_tiles=T.Cast("int32", segment_slots * H_v) * tiles)

    @property
    def work_tiles(self):
        return self.totals.work_tiles

    @T.inline
    def at(self, number):
        """A work tile by its number: segment, value head hv, tile."""
        work = T.alloc_var("int32", init=number)
        part = T.alloc_var("int32", init=T.truncdiv(work, self.tiles))
        segment = T.alloc_var("int32", init=T.truncdiv(part, self.H_v))
        return Variables(segment=segment, hv=part - segment * self.H_v, tile=work - part * self.tiles)


def grid_of_tiles(sizes):
    """CTAs for the wide tiles of each segment and head."""
    return sizes.segment_slots * sizes.H_v * T.truncdiv(sizes.value_rows, WIDE_TILE)


def locate_cta(cta, H_v, tiles):
    """The work tile of a CTA of [segments * H_v * tiles]: segment slot, value head hv, tile, and v0, its first
    value row, of tiles of WIDE_TILE."""
    work = Variables(part=T.truncdiv(cta, tiles))
    work.and_also(slot=T.truncdiv(work.part, T.Cast("int32", H_v)), tile=cta - work.part * tiles)
    return work.and_also(hv=work.part - work.slot * T.Cast("int32", H_v), v0=work.tile * WIDE_TILE)


def load_segment_early(segments, segment):
    """A segment's columns and its number of chunks, read before pdl_sync or after it."""

    def column(number):
        return load_early(segments[segment, number])

    read = Segment(
        row=column(SegmentColumn.ROW),
        length=column(SegmentColumn.LENGTH),
        first=column(SegmentColumn.CHUNK),
        n=column(SegmentColumn.SEQUENCE),
        flags=column(SegmentColumn.FLAGS),
        initial=column(SegmentColumn.INITIAL),
        final=column(SegmentColumn.FINAL),
    )
    return read.and_also(chunks=T.truncdiv(read.length + (C - 1), C))


def locate_tile(cta, sizes, segments):
    """The work tile and the segment of a CTA of grid_of_tiles."""
    work = locate_cta(cta, sizes.H_v, T.truncdiv(T.Cast("int32", sizes.value_rows), WIDE_TILE))
    return work, load_segment_early(segments, work.slot)


@T.macro
def leave_without_work(cta):
    """Ends a CTA that has nothing to do, perhaps before pdl_sync. The first CTA stays until the kernels before this one
    have ended, because what follows the call waits for its last kernel only. The next kernel may begin at once, so it
    must not read early what the kernels before this one write."""
    T.pdl_trigger()
    if cta == 0:
        T.pdl_sync()
    extern("leave")


def is_never(sizes):
    """False, but the compiler cannot know it. A branch on it keeps instructions on their side of the branch, and keeps
    the parameters that the branch uses."""
    return sizes.group == 0


def position_in_tiles():
    """The thread's `offset` in a tile that goes transposed to or from registers, and its first `column` of a fragment:
    see core/tiles.cuh."""
    return Variables(
        offset=extern("transposed_offset", returns="int32"), column=extern("first_column", returns="int32")
    )


def fetch(source, target, barrier):
    """Copies a part of a tensor to shared memory by TMA, and announces it to the barrier. One warp calls it."""
    return T.tma_copy(source, target, barrier=barrier, leader_scope_threads=32)


def clear_rows_after(tile, valid, threads, *stage):
    """Rows i >= valid of tile[stage] become 0, in panels of 64 x 64 as TMA lays them out. `threads` consecutive threads
    call it. Rows after the sequence belong to others and may hold NaN, which a factor of 0 does not remove."""
    inner = [int(extent) for extent in tile.shape[len(stage) :]]
    begin = T.access_ptr(tile[(*stage, *[0] * len(inner))], "rw")
    return extern("clear_rows_after", begin, math.prod(inner) // (C * C), valid, threads)


@T.macro
def store_rows(tiles, w, rows, row, hv, column, valid):
    """rows[row + i, hv, column + j] = tiles[w, i, j] for i < valid and j < 64, within rows' width. One warp calls it. A
    chunk with fewer tokens is not stored by TMA, because the box would reach into the next sequence."""
    if valid >= C:
        T.fence_proxy_async()
        T.tma_copy(tiles[w, :, :], rows[row : row + C, hv, column : column + C], leader_scope_threads=32)
        T.tma_store_wait(0)
    else:
        extern(
            f"store_tile<{element_type(str(tiles.dtype))}>",
            T.access_ptr(tiles[w, 0, 0], "r"),
            T.access_ptr(rows[row, hv, column], "w"),
            strides_of(rows)[0],
            valid,
            T.Cast("int32", rows.shape[2]) - column,
        )
