"""The state before each segment, from the maps of portable_replay, on every GPU from Ampere on: what
maps/segment_scan.py and maps/compose_maps.py do on Hopper.

    S after segment s = M_s S before s + Z_s

    states  [segment_slots, H_v, value_rows, K] fp32   slot s + 1 has Z_s^T, and gets the state before s + 1
                                                       over ranks there is a slot for s + 1 of the last segment, too
    maps    [segment_slots, H_v, K, K] fp32            M_s^T
    skips   [segment_slots, H_v] int32                 1 where M_s is negligible: Z_s is the state already

`reverse` is the instance for gradients, from the last segment to the first:

    dS' after segment s - 1 = M_s^T dS' after s + dZ_s

`states` then has dZ_s^T in slot s - 1, and gets dS'^T after segment s - 1 there; over ranks it begins one slot earlier
in memory. The states to start from are the gradients of the final states, and `skips` are the reverse skips.

pass.cpp launches [N * H_v * tiles of ROWS value rows] CTAs of four warps. A CTA takes its rows of S^T from segment to
segment of one head of a sequence; those of a sequence that is not split leave. Products and sums are in fp32
(portable/scan.cuh). M^T comes by cp.async in blocks of its rows, STAGES - 1 blocks ahead:

    load M^T  block b + 2   |   |---------|   |---
    S^T M^T   block b       |sync         |sync

With mapped > 0 it composes the maps of whole sequences instead, mapped_0 and mapped_1, which ranks exchange, by [mapped
* H_v * tiles of rows of Z^T and of M^T] CTAs, and leaves `states` as they are. `composed` gets rows of Z^T, which start
from the initial state if there is one, then rows of M^T, which start from the identity. A sequence without tokens has
Z = S and M = I.
"""

import tilelang
import tilelang.language as T

from kernels_tl.bundles import Maps, Plan, Sizes, States
from kernels_tl.config import PORTABLE_SCAN, WARP
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, dims, extern
from kernels_tl.core.cta import Variables, fragments, shared, z_slot
from kernels_tl.layout import (
    FROM_SCAN,
    NO_STATE,
    PORTABLE_SCAN_ROWS as ROWS,
    SegmentColumn,
    SegmentFlag,
    SequenceColumn,
)

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
PRELUDE = """
#include "portable/scan.cuh"
"""
WARP_ROWS = 4  # rows of S^T per warp
MAP_ROWS, PAD = 32, 4  # rows of a block of M^T, and floats between them


def rows_of_warps(K):
    """The layout of S^T in registers: WARP_ROWS rows per warp, and columns 32 apart per lane."""
    columns = K // WARP
    return tilelang.layout.Fragment(
        (ROWS, K), lambda i, j: (WARP * (i // WARP_ROWS) + j % WARP, i % WARP_ROWS * columns + j // WARP)
    )


def locate_rows(cta, H_v, row_tiles):
    """The work tile of a CTA: the number of its sequence, value head hv, and v0, the first of its rows."""
    at = Variables(part=T.truncdiv(cta, row_tiles))
    at.and_also(v0=(cta - at.part * row_tiles) * ROWS, which=T.truncdiv(at.part, H_v))
    return at.and_also(hv=at.part - at.which * H_v)


def portable_scan(K, reverse):
    sizes = Sizes()
    mapped, map_rows, key_channels = dims("mapped", "map_rows", "key_channels")
    tile = PORTABLE_SCAN[K]
    STAGES = tile.stages
    BLOCKS = K // MAP_ROWS
    assert tile.tile == ROWS == WARP_ROWS * tile.threads // WARP

    def slot_after(first, step):
        return first - step if reverse else first + step

    @T.macro
    def load_block(tiles, maps, scan, block):
        """Begins to load a block of M^T, counted over all segments, unless M is negligible."""
        step = T.alloc_var("int32", init=T.truncdiv(block, BLOCKS))
        if step < scan.steps:
            slot = slot_after(scan.slot, step)
            if maps.skips[slot, scan.hv] == 0:
                extern(
                    f"load_map_block<{K}, {MAP_ROWS}, {K + PAD}>",
                    T.access_ptr(tiles.M[T.truncmod(block, STAGES), 0, 0], "w"),
                    T.access_ptr(maps.maps[slot, scan.hv, 0, 0], "r"),
                    block - step * BLOCKS,
                )
        extern("commit_copies")

    @T.macro
    def multiply(r, tiles, maps, scan, step, skip):
        """S^T = S^T M^T, or 0 if M is negligible."""
        for i, j in T.Parallel(ROWS, K):
            tiles.S[i, j] = r.S[i, j]
        T.clear(r.S)
        for b in T.serial(BLOCKS):
            block = T.alloc_var("int32", init=step * BLOCKS + b)
            extern(f"wait_for_copies<{STAGES - 2}>")
            T.sync_threads()  # the block is there, and so is S; the block before it has been read
            load_block(tiles, maps, scan, block + STAGES - 1)
            if skip == 0:
                extern(
                    f"multiply_map_block<{K}, {str(reverse).lower()}, {WARP_ROWS}, {MAP_ROWS}, {K + PAD}>",
                    r.S.data,
                    T.access_ptr(tiles.S[0, 0], "r"),
                    T.access_ptr(tiles.M[T.truncmod(block, STAGES), 0, 0], "r"),
                    b,
                )
        T.sync_threads()  # S has been read

    @T.prim_func
    def main(
        sizes: sizes,
        plan: Plan(sizes),
        maps: Maps(sizes, "float32", K),
        states: States(sizes, float8=not reverse),
        has_initial_state: T.int32,  # with mapped > 0
        composed: T.Tensor([mapped, sizes.H_v, map_rows, key_channels], "float32"),
        mapped_0: T.int32,
        mapped_1: T.int32,
        row_tiles: T.int32,  # tiles of ROWS rows
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=tile.threads, prelude=PRELUDE) as cta:
            tiles = shared(tile.shared, S=([ROWS, K], "float32"), M=([STAGES, MAP_ROWS, K + PAD], "float32"))
            r = fragments(S=([ROWS, K], "float32"), Z=([ROWS, K], "float32"))
            T.annotate_layout({r.S: rows_of_warps(K), r.Z: rows_of_warps(K)})
            initial = states.initial()
            T.pdl_sync()
            H_v = T.Cast("int32", sizes.H_v)
            composes = T.Cast("int32", mapped) > 0
            at = locate_rows(cta, H_v, row_tiles)
            n = T.alloc_var("int32", init=T.Select(composes, T.Select(at.which == 0, mapped_0, mapped_1), at.which))
            # The first row of M^T; below 0 in tiles of Z^T.
            rows_of_Z = T.truncdiv(initial.value_dim + (ROWS - 1), ROWS) * ROWS
            m0 = T.alloc_var("int32", init=T.Select(composes, at.v0 - rows_of_Z, -1))

            slot = T.alloc_var("int32", init=plan.sequences[n, SequenceColumn.SEGMENT])
            length = T.alloc_var("int32", init=plan.sequences[n, SequenceColumn.LENGTH])
            # All segments but the last are as long as the first, which gives their number.
            size = T.alloc_var("int32", init=plan.segments[slot, SegmentColumn.LENGTH])
            parts = T.alloc_var("int32", init=T.Select(length > 0, 1, 0))
            if plan.segments[slot, SegmentColumn.FLAGS] == SegmentFlag.FIRST:
                parts = T.truncdiv(length + size - 1, size)
            if composes | (parts > 1):
                # Without composition the last segment needs no map.
                steps = T.Select(composes, parts, parts - 1)
                first = slot + T.max(parts - 1, 0) if reverse else slot
                scan = Variables(hv=at.hv, steps=steps, slot=first)
                for block in T.serial(STAGES - 1):
                    load_block(tiles, maps, scan, block)

                state_slot = T.alloc_var(
                    "int32",
                    init=plan.sequences[n, SequenceColumn.FINAL if reverse else SequenceColumn.INITIAL],
                )
                if composes:
                    state_slot = T.Select(has_initial_state != 0, n, NO_STATE)
                T.clear(r.S)
                if m0 >= 0:
                    for i, j in T.Parallel(ROWS, K):
                        r.S[i, j] = T.Select(m0 + i == j, 1.0, 0.0)
                else:
                    if state_slot != NO_STATE:
                        extent = (initial.stride_v, initial.stride_k, initial.key_dim, initial.value_dim - at.v0)
                        of_rows = (initial.pointer(state_slot, at.hv, at.v0), initial.dtype, *extent)
                        extern(f"read_state_rows<{K}, {WARP_ROWS}, {initial.float8}>", r.S.data, *of_rows)
                if not reverse:  # noqa: SIM102  decided here, the other on the device
                    if (m0 < 0) & (mapped == 0) & (plan.segments[slot, SegmentColumn.INITIAL] == FROM_SCAN):
                        for i, j in T.Parallel(ROWS, K):
                            maps.states[slot, at.hv, at.v0 + i, j] = r.S[i, j]

                for step in T.serial(scan.steps):
                    to = T.alloc_var("int32", init=z_slot(slot_after(scan.slot, step), reverse))
                    skip = T.alloc_var("int32", init=maps.skips[slot_after(scan.slot, step), at.hv])
                    T.clear(r.Z)
                    if m0 < 0:
                        for i, j in T.Parallel(ROWS, K):
                            r.Z[i, j] = maps.states[to, at.hv, at.v0 + i, j]
                    multiply(r, tiles, maps, scan, step, skip)
                    for i, j in T.Parallel(ROWS, K):
                        r.S[i, j] += r.Z[i, j]
                    if mapped == 0:
                        for i, j in T.Parallel(ROWS, K):
                            maps.states[to, at.hv, at.v0 + i, j] = r.S[i, j]

                if composes:
                    row = T.alloc_var("int32", init=T.Select(m0 < 0, at.v0, initial.value_dim + m0))
                    end = T.alloc_var(
                        "int32", init=T.Select(m0 < 0, initial.value_dim, initial.value_dim + initial.key_dim)
                    )
                    for i, j in T.Parallel(ROWS, K):
                        if (row + i < end) & (j < initial.key_dim):
                            composed[at.which, at.hv, row + i, j] = r.S[i, j]

    return main
