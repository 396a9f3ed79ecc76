"""The maps of each segment in both directions, all segments in parallel: S -> M S + Z from the state before it to the
state after it, and in reverse dS' -> M^T dS' + dZ for their gradients.

    Z, M    as in segment_maps
    dZ      the recurrence in reverse (gradients/reverse_recurrence.py) from dS' = 0

    states        [segment_slots, H_v, value_rows, K] fp32   Z^T of segment s in slot s + 1, V-first
    grad_states   [segment_slots, H_v, value_rows, K] fp32   dZ^T of segment s in slot s - 1
    maps          [segment_slots, H_v, 2, K, K] 16-bit       M^T as a rounded part and the rest
    skips         [segment_slots, H_v] int32    1 where the gates make M negligible to the state after the segment
    reverse_skips [segment_slots, H_v] int32    1 where they make M negligible to the gradient of the state before it
                                                (maps/segments.cuh)

Timeline of dZ with K = 128 (core/pipeline.py), chunk 0 being the last one; Z and M as in segment_maps:

    producer warp    tiles 0, 1, 2|        |   |    |tiles 3 |   |    |tiles 4 |
    warpgroups 0, 1               |dV_new 0|U 0|dS 0|dV_new 1|U 1|dS 1|dV_new 2|    then dZ to memory

    tiles K, Q, dO, L, P, gates: released>, >loaded     dV_new: loaded>     dS: >released

Where skips is 1, Z comes from the last few chunks alone. Where reverse_skips is 1, dZ comes from the first few chunks.
Where both are 1, M is skipped. Both flags agree unless the bounds of some chunks let the state grow. The last segment
of a sequence has no Z, the first segment no dZ. The only segment of a sequence has no M.

backward.cpp launches [segments * H_v * (K / V + 2 * value tiles)] CTAs: a CTA computes V rows of M^T, Z^T or dZ^T, a
tile. dZ comes first, because it takes longest. With `short_last` every tile of dZ and Z has a second CTA, as in
segment_maps.
"""

from types import SimpleNamespace

import tilelang.language as T

from kernels_tl.bundles import Chunks, Maps, OutputGradient, Sizes
from kernels_tl.config import BACKWARD_MAPS, BACKWARD_MAPS_NORMALIZE, is_wide
from kernels_tl.core.common import (
    EXPLICIT_PASS_CONFIGS,
    C,
    after,
    block_rows,
    extern,
)
from kernels_tl.core.cta import (
    Variables,
    clear_rows_after,
    fetch,
    load_segment_early,
    locate_cta,
    position_in_tiles,
    shared,
    z_slot,
)
from kernels_tl.core.pipeline import is_producer_warp, stage_of
from kernels_tl.gradients.reverse_recurrence import GateTable, begin_step, end_step, registers, wide_step
from kernels_tl.layout import ForwardGate, NamedBarrier, SegmentFlag
from kernels_tl.maps.segment_maps import (
    CONSUMERS,
    MAP_M,
    MAP_Z,
    ROWS,
    V,
    first_row_of_M,
    make_barriers,
    map_roles,
)

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EARLY = {"segments": after("chunk_plan")}
PRELUDE = """
#include "maps/segments.cuh"
#include "core/state_tiles.cuh"
#include "states/wide_state.cuh"
"""

MAP_DZ = 2  # the third result, after MAP_Z and MAP_M


def backward_maps(dtype, K, normalize):
    sizes = Sizes()
    H_v, value_rows = sizes.H_v, sizes.value_rows
    reverse_gates = GateTable(normalize).rows
    assert ForwardGate.COUNT <= reverse_gates.COUNT, "each in the same place"
    tile = BACKWARD_MAPS_NORMALIZE if normalize else BACKWARD_MAPS[K]
    STAGES = tile.stages
    M_TILES = K // V
    roles = map_roles(dtype, K, tile, partial=True, of_backward=True)

    def make_tiles():
        return shared(
            tile.shared,
            K=([STAGES, C, K], dtype),
            V=([STAGES, C, V], dtype),  # or dO
            L=([STAGES, C, C], dtype),
            gates=([STAGES, reverse_gates.COUNT, C], "float32"),  # or ForwardGate's
            Q=([STAGES, C, K], dtype),
            P=([STAGES, C, C], dtype),
            swizzle=("V",),
        )

    def bound(gates, segment, hv):
        """Arguments of maps/segments.cuh: the bound of the segment's first chunk, the stride, the chunks."""
        return (
            T.access_ptr(gates[segment.first, hv, ForwardGate.TOTAL, 1], "r"),
            T.Cast("int64", H_v) * (ForwardGate.COUNT * C),
            segment.chunks,
        )

    @T.macro
    def chunks_that_matter(segment, hv, which, gates, skips, reverse_skips, short_last, is_second):
        """The first and the last chunk of the recurrence; an empty range if there is nothing to compute. Ends a CTA
        whose map another one computes."""
        first = T.alloc_var("int32", init=segment.chunks)
        last = T.alloc_var("int32", init=-1)
        is_first = T.alloc_var("int32", init=segment.flags % SegmentFlag.LAST)
        is_last = T.alloc_var("int32", init=T.truncdiv(segment.flags, SegmentFlag.LAST))
        skip = T.alloc_var("int32", init=1)
        reverse_skip = T.alloc_var("int32", init=1)
        if (which != MAP_DZ) & (is_last == 0) & (segment.chunks > 0):
            first = extern("first_chunk_that_matters", *bound(gates, segment, hv), returns="int32")
            skip = T.Select(first < 0, 0, 1)
            first = T.max(first, 0)
        if (which != MAP_Z) & (is_first == 0) & (segment.chunks > 0):
            last = extern("last_chunk_that_matters", *bound(gates, segment, hv), returns="int32")
            reverse_skip = T.Select(last < 0, 0, 1)
            last = T.Select(last < 0, segment.chunks - 1, last)
        is_short = T.Select(which == MAP_DZ, reverse_skip, skip)
        if (short_last != 0) & (which != MAP_M) & (is_second != is_short):
            extern("leave")
        if which == MAP_M:
            if T.get_thread_binding() == 0:
                skips[segment.slot, hv] = skip
                reverse_skips[segment.slot, hv] = reverse_skip
            first = T.Select((skip == 0) | (reverse_skip == 0), 0, segment.chunks)
        return Variables(first=first, last=last)

    @T.macro
    def compute_dZ(tiles, ready, chunks, segment, hv, v0, grad_states, scale):
        """The consumers of dZ: the recurrence in reverse from dS' = 0, then dZ to global memory."""
        warpgroup = T.truncdiv(T.get_thread_binding(), 128)
        r = registers(V, K, dtype, normalize)
        position = position_in_tiles()
        T.clear(r.dS)
        for step in T.serial(chunks):
            c = chunks - 1 - step
            s = T.alloc_var("int32", init=step % STAGES)
            stage = stage_of(step, STAGES, s)
            stage.wait_for(ready.loaded)
            if segment.length - c * C < C:
                clear_rows_after(tiles.Q, segment.length - c * C, CONSUMERS, s)
                clear_rows_after(tiles.K, segment.length - c * C, CONSUMERS, s)
                clear_rows_after(tiles.dO, segment.length - c * C, CONSUMERS, s)
                T.fence_proxy_async()
                T.sync_threads(NamedBarrier.BACKWARD_CLEARED, CONSUMERS)
            dO = tiles.dO[s, 0, warpgroup * ROWS]
            if is_wide(K):
                wide_step(r, tiles, s, s, dO, position.offset, position.column, scale)
            else:
                begin_step(r, tiles, s, dO, position.offset, position.column, scale)
                end_step(r, tiles, s, position.column)
            stage.arrive(ready.released)
        if chunks > 0:
            for i, j in T.Parallel(V, K):
                grad_states[z_slot(segment.slot, reverse=True), hv, v0 + i, j] = r.dS[i, j]

    @T.macro
    def load_dZ(tiles, ready, chunks, segment, hv, v0, hk, tokens, grad_o, gates, matrices):
        """The producer warp: the chunks' operands, the last chunk's first."""
        edge = T.alloc_var("int32", init=0)  # see block_rows
        for step in T.serial(T.if_then_else(is_producer_warp(CONSUMERS), chunks, 0)):
            s = T.alloc_var("int32", init=step % STAGES)
            c = chunks - 1 - step
            t, slot = segment.row_and_slot(c)
            stage = stage_of(step, STAGES, s)
            stage.wait_until_free(ready.released)
            fetch(tokens.k[t : t + C, hk, 0:K], tiles.K[s, :, :], ready.loaded[s])
            fetch(grad_o[t : t + C, hv, v0 : v0 + V], tiles.dO[s, :, :], ready.loaded[s])
            for target, source in block_rows(tiles.P, s, matrices.rows, slot, hv, 1, edge):
                fetch(source, target, ready.loaded[s])
            fetch(gates[slot, hv, :, :], tiles.gates[s, :, :], ready.loaded[s])
            fetch(tokens.q[t : t + C, hk, 0:K], tiles.Q[s, :, :], ready.loaded[s])
            for target, source in block_rows(tiles.L, s, matrices.rows, slot, hv, 0, edge):
                fetch(source, target, ready.loaded[s])
            stage.arrive(ready.loaded)

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype),
        output_gradient: OutputGradient(sizes, dtype),
        backward_gates: T.Tensor([sizes.chunk_slots, H_v, reverse_gates.COUNT, C], "float32"),
        maps: Maps(sizes, dtype, K),
        grad_states: T.Tensor([sizes.segment_slots, H_v, value_rows, K], "float32"),
        reverse_skips: T.Tensor([sizes.segment_slots, H_v], "int32"),
        scale: T.float32,
        short_last: T.int32,  # whether further CTAs compute the short Z and dZ
    ):
        with T.Kernel(
            sizes.segment_slots * H_v * (M_TILES + 2 * T.truncdiv(value_rows, V) * (1 + short_last)),
            threads=tile.threads,
            prelude=PRELUDE,
        ) as cta:
            tiles = make_tiles()
            ready = make_barriers(STAGES)
            value_tiles = T.alloc_var("int32", init=T.Cast("int32", T.truncdiv(value_rows, V)))
            heads = T.alloc_var("int32", init=T.Cast("int32", sizes.segment_slots * H_v))
            dZ_ctas = T.alloc_var("int32", init=heads * value_tiles)  # CTAs
            first_ctas = T.alloc_var("int32", init=heads * (M_TILES + 2 * value_tiles))
            is_second = T.alloc_var("int32", init=T.Select(cta < first_ctas, 0, 1))
            cta_of_map = T.alloc_var("int32", init=cta - is_second * first_ctas)
            is_dZ = T.alloc_var("int32", init=T.Select(cta_of_map < dZ_ctas, 1, 0))
            has_M = T.alloc_var("int32", init=1 - T.max(is_dZ, is_second))
            work = locate_cta(cta_of_map - (1 - is_dZ) * dZ_ctas, H_v, value_tiles + has_M * M_TILES)
            is_M = T.alloc_var("int32", init=T.Select(work.tile >= value_tiles, 1, 0))  # M comes after the tiles of Z
            v0 = T.alloc_var("int32", init=T.Select(is_M != 0, 0, work.v0))
            which = T.alloc_var("int32", init=T.Select(is_dZ != 0, MAP_DZ, T.Select(is_M != 0, MAP_M, MAP_Z)))
            m0 = first_row_of_M(work.v0, which, value_rows) if is_wide(K) else 0
            hv = T.alloc_var("int32", init=work.hv)
            segment = load_segment_early(chunks.plan.segments, work.slot)
            # Flags of a segment that lacks this map: a last one has no Z, a first one no dZ, one that is both no M.
            without = T.alloc_var(
                "int32",
                init=T.Select(
                    which == MAP_M,
                    SegmentFlag.FIRST + SegmentFlag.LAST,
                    T.Select(which == MAP_Z, SegmentFlag.LAST, SegmentFlag.FIRST),
                ),
            )
            if (((segment.flags & without) == without) | (segment.length == 0)) & (cta != 0):
                extern("leave")
            T.pdl_sync()
            T.pdl_trigger()
            hk = T.alloc_var("int32", init=T.truncdiv(hv, sizes.group))
            segment = segment.and_also(slot=work.slot)
            flags_out = (maps.skips, reverse_skips, short_last, is_second)
            needed = chunks_that_matter(segment, hv, which, chunks.matrices.gates, *flags_out)
            reverse_tiles = SimpleNamespace(Q=tiles.Q, K=tiles.K, dO=tiles.V, L=tiles.L, P=tiles.P, gates=tiles.gates)
            if T.get_thread_binding() < CONSUMERS:
                T.inc_max_nreg(tile.registers[0])
                if which == MAP_DZ:
                    compute_dZ(reverse_tiles, ready, needed.last + 1, segment, hv, v0, grad_states, scale)
                else:
                    roles.compute(tiles, ready, needed.first, segment.chunks, which, segment, hv, v0, m0, maps)
            else:
                T.dec_max_nreg(tile.registers[1])
                if which == MAP_DZ:
                    inputs = (chunks.tokens, output_gradient.grad_o, backward_gates, chunks.matrices)
                    load_dZ(reverse_tiles, ready, needed.last + 1, segment, hv, v0, hk, *inputs)
                else:
                    roles.load(
                        tiles, ready, needed.first, segment.chunks, segment, hv, v0, hk, chunks.tokens, chunks.matrices
                    )

    return main
