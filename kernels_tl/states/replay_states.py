"""The states before all chunks and the chunks' V_new again, for the backward. Chunk by chunk of each segment,

    V_new^T, S'^T = f(S^T, K, V, L, gates)      f is the step of states/recurrence.py, without outputs and with exact S'

    h       S before the chunk    [chunk_slots, H_v, value_rows, K] 16-bit, V-first
    v_new   V_new                 [tokens, H_v, V] 16-bit

backward.cpp launches [segments * H_v * value tiles] CTAs. A CTA takes V value rows, a tile, of one head of one segment.
They stay in registers from the segment's first chunk to its last. A sequence's first segment starts from the caller's
state or from zero. Every other segment starts from `states`, which segment_scan has written.

Roles of a CTA: two consumer warpgroups with 64 rows of S^T each, a producer warp, and per consumer warpgroup an
epilogue warp, which stores h and V_new."""

from functools import partial

import tilelang.language as T

from kernels_tl.bundles import Chunks, Maps, Replay, Sizes, States
from kernels_tl.config import REPLAY_STATES, WGMMA_ROWS as ROWS
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, C, after, block_rows, extern
from kernels_tl.core.cta import barriers, clear_rows_after, fetch, grid_of_tiles, locate_tile, position_in_tiles, shared
from kernels_tl.core.pipeline import Stage, is_producer_warp, stage_of
from kernels_tl.layout import FROM_SCAN, ForwardGate, NamedBarrier
from kernels_tl.states.recurrence import begin_step, end_step, registers
from kernels_tl.states.replay import CONSUMERS, WARPGROUPS, Outgoing, V, read_scanned, stage_values, store

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EARLY = {"segments": after("chunk_plan")}
PRELUDE = """
#include "core/state_tiles.cuh"
#include "states/wide_state.cuh"
"""


def replay_states(dtype, K):
    sizes = Sizes()
    tile = REPLAY_STATES[K]
    STAGES = tile.stages
    assert (tile.tile, tile.consumers) == (V, CONSUMERS)
    BOXES = K // C  # TMA boxes of a warpgroup's h

    def make_tiles():
        return shared(
            tile.shared,
            K=([STAGES, C, K], dtype),
            V=([STAGES, WARPGROUPS, C, ROWS], dtype),
            L=([STAGES, C, C], dtype),  # L^T
            gates=([STAGES, ForwardGate.COUNT, C], "float32"),
            h=([WARPGROUPS, BOXES, ROWS, C], dtype),
            V_new=([WARPGROUPS, C, ROWS], dtype),
            swizzle=("V", "h", "V_new"),
        )

    def make_barriers():
        return barriers(
            loaded=[32] * STAGES,  # producer warp to consumers: a stage's tiles have arrived
            released=[CONSUMERS] * STAGES,  # consumers to producer warp: the stage is free
            h_staged=[128] * WARPGROUPS,  # a consumer warpgroup to its epilogue warp: h of a chunk is in shared memory
            h_stored=[32] * WARPGROUPS,  # epilogue warp to its warpgroup: h has been read
            V_new_staged=[128] * WARPGROUPS,
            V_new_stored=[32] * WARPGROUPS,
        )

    @T.macro
    def stage_h(r, tiles, ready, warpgroup, c, rows):
        h_stage = Stage(warpgroup, c % 2)
        if not r.is_wide:  # the first product stages a wide state
            h_stage.wait_until_free(ready.h_stored)
            extern(f"stage_rows<{BOXES}>", r.S_16.data, T.access_ptr(tiles.h[warpgroup, 0, 0, 0], "w"), rows)
        h_stage.arrive(ready.h_staged)

    def values_of(tiles, ready):
        return Outgoing(tiles.V_new, ready.V_new_staged, ready.V_new_stored)

    @T.macro
    def compute(tiles, ready, work, segment, initial, scanned):
        """The consumers: the recurrence, with h and V_new to shared memory."""
        warpgroup = T.truncdiv(T.get_thread_binding(), 128)
        r = registers(V, K, dtype, tile.early_factors, output=False, exact=True)
        position = position_in_tiles()
        rows = T.alloc_var("int32", init=extern("rows_offset", returns="int32"))
        T.clear(r.S)
        if segment.initial >= 0:
            initial.read(r.S, segment.initial, work.hv, work.v0)
        if segment.initial == FROM_SCAN:
            read_scanned(r.S, scanned, work)
        for c in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=c % STAGES)
            stage = stage_of(c, STAGES, s)
            stage.wait_for(ready.loaded)
            if segment.length - c * C < C:
                clear_rows_after(tiles.K, segment.length - c * C, CONSUMERS, s)
                clear_rows_after(tiles.V, segment.length - c * C, CONSUMERS, s)
                T.fence_proxy_async()
                T.sync_threads(NamedBarrier.BACKWARD_CLEARED, CONSUMERS)
            if r.is_wide:
                Stage(warpgroup, c % 2).wait_until_free(ready.h_stored)
            begin_step(
                r,
                tiles,
                s,
                tiles.V[s, warpgroup, 0, 0],
                position.offset,
                position.column,
                meanwhile=partial(stage_h, r, tiles, ready, warpgroup, c, rows),
                staged=(T.access_ptr(tiles.h[warpgroup, 0, 0, 0], "w"), rows) if r.is_wide else None,
            )
            T.wait_wgmma(0)
            values = values_of(tiles, ready)
            end_step(
                r,
                tiles,
                s,
                position.column,
                meanwhile=partial(stage_values, values, r.V_new, r.element, warpgroup, c, position.offset),
            )
            stage.arrive(ready.released)

    @T.macro
    def load(tiles, ready, work, segment, hk, tokens, matrices):
        """The producer warp: the chunks' operands."""
        edge = T.alloc_var("int32", init=0)  # see block_rows
        for c in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=c % STAGES)
            t, slot = segment.row_and_slot(c)
            stage = stage_of(c, STAGES, s)
            stage.wait_until_free(ready.released)
            fetch(tokens.k[t : t + C, hk, 0:K], tiles.K[s, :, :], ready.loaded[s])
            fetch(matrices.gates[slot, work.hv, :, :], tiles.gates[s, :, :], ready.loaded[s])
            for w in T.unroll(WARPGROUPS):
                v0 = work.v0 + w * ROWS
                fetch(tokens.v[t : t + C, work.hv, v0 : v0 + ROWS], tiles.V[s, w, :, :], ready.loaded[s])
            for target, source in block_rows(tiles.L, s, matrices.rows, slot, work.hv, 0, edge):
                fetch(source, target, ready.loaded[s])
            stage.arrive(ready.loaded)

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype),
        states: States(sizes),
        maps: Maps(sizes, dtype, K),
        replay: Replay(sizes, dtype, K),
    ):
        with T.Kernel(grid_of_tiles(sizes), threads=tile.threads, prelude=PRELUDE) as cta:
            tiles = make_tiles()
            ready = make_barriers()
            work, segment = locate_tile(cta, sizes, chunks.plan.segments)
            if (segment.length == 0) & (cta != 0):
                extern("leave")
            T.pdl_sync()
            T.pdl_trigger()
            hk = T.alloc_var("int32", init=T.truncdiv(work.hv, sizes.group))
            if T.get_thread_binding() < CONSUMERS:
                T.inc_max_nreg(tile.registers[0])
                compute(tiles, ready, work, segment, states.initial_in_a_run(), maps.states)
            else:
                T.dec_max_nreg(tile.registers[1])
                if is_producer_warp(CONSUMERS):
                    load(tiles, ready, work, segment, hk, chunks.tokens, chunks.matrices)
                else:
                    state = Outgoing(tiles.h, ready.h_staged, ready.h_stored)
                    store(state, values_of(tiles, ready), replay.h, replay.v_new, work, segment, reverse=False)

    return main
