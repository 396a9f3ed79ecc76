"""The map S -> M S + Z of each segment, from the state before it to the state after it. All segments in parallel.

    Z^T   the recurrence (states/recurrence.py) from S = 0, without outputs
    M^T   the recurrence with V = 0 from S = I

    states  [segment_slots, H_v, value_rows, K] fp32   Z^T of segment s in slot s + 1, V-first
    maps    [segment_slots, H_v, 2, K, K] 16-bit       M^T as a rounded part and the rest
    skips   [segment_slots, H_v] int32            1 where the gates make M negligible (maps/segments.cuh): then M is
                                                  skipped, and Z comes from the last few chunks alone

Timeline (core/pipeline.py), 64 rows of M^T or Z^T per warpgroup:

    producer warp    K V L 0, K V L 1, K V L 2|       |   |K V L 3|   |K V L 4|   |
    warpgroups 0, 1                           |V_new 0|S 0|V_new 1|S 1|V_new 2|S 2|    then Z or M to memory

    K V L, gates: released>, >loaded     V_new: loaded>     S: >released

The last segment of a sequence needs no map. In chunk_plan's map_segments some of these segments lack the flag LAST, so
that they get a map. Their last chunk may be partial: `partial` is the instance for them.

forward.cpp launches [segments * H_v * (K / V + value tiles)] CTAs: a CTA computes V rows of M^T or of Z^T, a tile. With
`short_last` every tile of Z has a second CTA, after all others, which computes Z where M is negligible. The first CTA
computes the other Z. So long maps start first, although the host does not know which ones are long.
"""

from types import SimpleNamespace

import tilelang.language as T

from kernels_tl.bundles import Chunks, Maps, Memory, Sizes
from kernels_tl.config import SEGMENT_MAPS, WARPGROUP, WGMMA_ROWS as ROWS, is_wide
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, C, after, block_rows, extern
from kernels_tl.core.cta import (
    barriers,
    clear_rows_after,
    fetch,
    leave_without_work,
    load_segment_early,
    locate_cta,
    position_in_tiles,
    shared,
    z_slot,
)
from kernels_tl.core.pipeline import is_producer_warp, stage_of
from kernels_tl.layout import WIDE_TILE, ForwardGate, NamedBarrier, SegmentFlag
from kernels_tl.states.recurrence import begin_step, end_step, registers

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EARLY = {"segments": after("chunk_plan"), "needs_maps": after("segment_memory")}
PRELUDE = """
#include "maps/segments.cuh"
#include "core/state_tiles.cuh"
#include "states/wide_state.cuh"
"""

V = WIDE_TILE  # rows of M^T or of Z^T per CTA
CONSUMERS = V // ROWS * WARPGROUP
MAP_Z, MAP_M = 0, 1


def make_barriers(stages):
    return barriers(
        loaded=[32] * stages,  # producer warp to consumers: a stage's tiles have arrived
        released=[CONSUMERS] * stages,  # consumers to producer warp: the stage is free
    )


def map_roles(dtype, K, tile, partial, of_backward=False):
    """The roles of a CTA that computes M or Z: macros compute and load. With `partial` the last chunk of a segment may
    be partial. The backward's maps are exact, as its states are. It needs only M of segments that end a sequence, so V
    is never partial there."""
    STAGES = tile.stages
    assert tile.consumers == CONSUMERS

    @T.macro
    def clear_after(tiles, s, valid):
        if valid < C:
            clear_rows_after(tiles.K, valid, CONSUMERS, s)
            if not of_backward:
                clear_rows_after(tiles.V, valid, CONSUMERS, s)
            T.fence_proxy_async()
            T.sync_threads(NamedBarrier.BACKWARD_CLEARED, CONSUMERS)

    def store_map(r, to):
        if r.is_wide:
            return extern(f"round_and_store_state<{r.element}, {K}>", r.S.data, to, K, ROWS, K)
        return extern(f"store_state<{K}>", r.S_16.data, to, K, ROWS, K)

    @T.macro
    def compute(tiles, ready, start, chunks, which, segment, hv, v0, m0, maps):
        """The consumers: the recurrence, then Z or M to global memory. m0 is the first row of M^T."""
        warpgroup = T.truncdiv(T.get_thread_binding(), 128)
        r = registers(V, K, dtype, tile.early_factors, output=False, exact=of_backward)
        position = position_in_tiles()
        for i, j in T.Parallel(V, K):
            r.S[i, j] = T.Select((which == MAP_M) & (i + m0 == j), 1.0, 0.0)
        for c in T.serial(start, chunks):
            s = T.alloc_var("int32", init=(c - start) % STAGES)
            stage = stage_of(c - start, STAGES, s)
            stage.wait_for(ready.loaded)
            if partial:
                clear_after(tiles, s, segment.length - c * C)
            begin_step(r, tiles, s, tiles.V[s, 0, warpgroup * ROWS], position.offset, position.column, which == MAP_Z)
            T.wait_wgmma(0)
            end_step(r, tiles, s, position.column)
            stage.arrive(ready.released)

        if start < chunks:
            if which == MAP_Z:
                for i, j in T.Parallel(V, K):
                    maps.states[z_slot(segment.slot), hv, v0 + i, j] = r.S[i, j]
            else:
                row = m0 + warpgroup * ROWS
                if r.is_wide:
                    store_map(r, T.access_ptr(maps.maps[segment.slot, hv, 0, row, 0], "w"))
                    for i, j in T.Parallel(V, K):
                        r.S[i, j] -= T.Cast("float32", T.Cast(dtype, r.S[i, j]))
                else:
                    T.copy(r.S, r.S_16)
                    for i, j in T.Parallel(V, K):
                        r.S[i, j] -= T.Cast("float32", r.S_16[i, j])
                    store_map(r, T.access_ptr(maps.maps[segment.slot, hv, 0, row, 0], "w"))
                    T.copy(r.S, r.S_16)
                store_map(r, T.access_ptr(maps.maps[segment.slot, hv, 1, row, 0], "w"))

    @T.macro
    def load(tiles, ready, start, chunks, segment, hv, v0, hk, tokens, matrices):
        """The producer warp: the chunks' operands."""
        edge = T.alloc_var("int32", init=0)  # see block_rows
        for c in T.serial(start, T.if_then_else(is_producer_warp(CONSUMERS), chunks, start)):
            s = T.alloc_var("int32", init=(c - start) % STAGES)
            t, slot = segment.row_and_slot(c)
            stage = stage_of(c - start, STAGES, s)
            stage.wait_until_free(ready.released)
            fetch(tokens.k[t : t + C, hk, 0:K], tiles.K[s, :, :], ready.loaded[s])
            fetch(matrices.gates[slot, hv, :, :], tiles.gates[s, 0 : ForwardGate.COUNT, :], ready.loaded[s])
            for target, source in block_rows(tiles.L, s, matrices.rows, slot, hv, 0, edge):
                fetch(source, target, ready.loaded[s])
            fetch(tokens.v[t : t + C, hv, v0 : v0 + V], tiles.V[s, :, :], ready.loaded[s])
            stage.arrive(ready.loaded)

    return SimpleNamespace(compute=compute, load=load)


def first_row_of_M(row, which, value_rows):
    """The first row of a CTA's tile of M^T: `row` counts from the first row of Z^T."""
    return T.alloc_var("int32", init=T.Select(which == MAP_M, row - T.Cast("int32", value_rows), 0))


def segment_maps(dtype, K, partial):
    sizes = Sizes()
    H_v, value_rows = sizes.H_v, sizes.value_rows
    tile = SEGMENT_MAPS[K]
    STAGES = tile.stages
    M_TILES = K // V
    roles = map_roles(dtype, K, tile, partial)

    def make_tiles():
        return shared(
            tile.shared,
            K=([STAGES, C, K], dtype),
            V=([STAGES, C, V], dtype),
            L=([STAGES, C, C], dtype),
            gates=([STAGES, ForwardGate.COUNT, C], "float32"),
            swizzle=("V",),
        )

    @T.macro
    def first_chunk(segment, hv, which, gates, skips, short_last, is_second):
        """The first chunk of the recurrence; the number of chunks if there is nothing to compute. Ends a CTA whose map
        another one computes."""
        start = T.alloc_var(
            "int32",
            init=extern(
                "first_chunk_that_matters",
                T.access_ptr(gates[segment.first, hv, ForwardGate.TOTAL, 1], "r"),
                T.Cast("int64", H_v) * (ForwardGate.COUNT * C),
                segment.chunks,
                returns="int32",
            ),
        )
        if (short_last != 0) & (which == MAP_Z) & (is_second != T.Select(start < 0, 0, 1)):
            extern("leave")
        if (which == MAP_M) & (T.get_thread_binding() == 0):
            skips[segment.slot, hv] = T.Select(start < 0, 0, 1)
        if start < 0:
            start = 0
        else:
            if which == MAP_M:
                start = segment.chunks
        return start

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype),
        maps: Maps(sizes, dtype, K),
        memory: Memory(sizes),
        short_last: T.int32,  # whether further CTAs compute the short Z
    ):
        with T.Kernel(
            sizes.segment_slots * H_v * (M_TILES + T.truncdiv(value_rows, V) * (1 + short_last)),
            threads=tile.threads,
            prelude=PRELUDE,
        ) as cta:
            tiles = make_tiles()
            ready = make_barriers(STAGES)
            value_tiles = T.alloc_var("int32", init=T.truncdiv(T.Cast("int32", value_rows), V))
            first_ctas = T.alloc_var(
                "int32", init=T.Cast("int32", sizes.segment_slots * H_v) * (M_TILES + value_tiles)
            )  # CTAs
            is_second = T.alloc_var("int32", init=T.Select(cta < first_ctas, 0, 1))
            work = locate_cta(  # M comes after the tiles of Z
                cta - is_second * first_ctas, H_v, T.Select(is_second != 0, value_tiles, M_TILES + value_tiles)
            )
            v0 = T.alloc_var("int32", init=T.if_then_else(work.v0 < T.Cast("int32", value_rows), work.v0, 0))
            which = T.alloc_var("int32", init=T.if_then_else(work.v0 < T.Cast("int32", value_rows), MAP_Z, MAP_M))
            m0 = first_row_of_M(work.v0, which, value_rows) if is_wide(K) else 0
            segment = load_segment_early(chunks.plan.segments, work.slot)
            if (segment.flags >= SegmentFlag.LAST) | (segment.length == 0):  # it needs no map
                leave_without_work(cta)
            if memory.lacks_maps(segment.n, work.hv):
                leave_without_work(cta)
            T.pdl_sync()
            T.pdl_trigger()
            hk = T.alloc_var("int32", init=T.truncdiv(work.hv, sizes.group))
            segment = segment.and_also(slot=work.slot)
            start = first_chunk(segment, work.hv, which, chunks.matrices.gates, maps.skips, short_last, is_second)
            if T.get_thread_binding() < CONSUMERS:
                T.inc_max_nreg(tile.registers[0])
                roles.compute(tiles, ready, start, segment.chunks, which, segment, work.hv, v0, m0, maps)
            else:
                T.dec_max_nreg(tile.registers[1])
                inputs = (chunks.tokens, chunks.matrices)
                roles.load(tiles, ready, start, segment.chunks, segment, work.hv, v0, hk, *inputs)

    return main
