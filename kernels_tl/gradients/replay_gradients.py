"""The recurrence in reverse over the chunks of each segment, for keys of more than 128 channels. Chunk by chunk, from
the last one on,

    U^T, dS^T = f(dS'^T, Q, K, dO, L, P, gates)      f is wide_step of gradients/reverse_recurrence.py

    dh   dS', the gradient of the state after the chunk   [chunk_slots, H_v, value_rows, K] 16-bit, V-first
    u    U                                                [chunk_slots, H_v, C, value_rows] 16-bit

Timeline (core/pipeline.py), 64 rows of dS^T per warpgroup and epilogue warp, chunk 0 being the last one:

    producer warp    K 0, Q dO L P 0, K 1|   |Q dO L P 1|K 2|Q dO L P 2|
    warpgroups 0, 1                      |U 0|dS 0      |U 1|dS 1      |
    epilogue warps                       |   |dS' 0, U 0|   |dS' 1, U 1|

    K, gates: released>, >loaded                         Q dO L P: others_released>, >others_loaded
    U: loaded>, others_loaded>, dS_stored>, >dS_staged, U_stored>, >U_staged       dS: >others_released, >released
    epilogue warps: dS_staged>, >dS_stored, U_staged>, >U_stored

token_gradients computes the gradients of the inputs from them, all chunks in parallel. backward.cpp launches
[segments * H_v * value tiles] CTAs. A CTA takes V value rows of dS^T, a tile, of one head of one segment. They stay in
registers from the segment's last chunk to its first. A sequence's last segment starts from the gradient of the caller's
final state or from zero, every other segment from `grad_states`, which segment_scan has written.
"""

from functools import partial

import tilelang.language as T

from kernels_tl.bundles import Chunks, OutputGradient, ReverseReplay, Sizes, StateGradients
from kernels_tl.config import REPLAY_GRADIENTS as TILE, WGMMA_ROWS as ROWS
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, C, after, block_rows, extern
from kernels_tl.core.cta import barriers, clear_rows_after, fetch, grid_of_tiles, locate_tile, position_in_tiles, shared
from kernels_tl.core.pipeline import Stage, is_producer_warp, stage_of
from kernels_tl.gradients.reverse_recurrence import registers, wide_step
from kernels_tl.layout import FROM_SCAN, NO_STATE, BackwardGate, NamedBarrier
from kernels_tl.states.replay import CONSUMERS, WARPGROUPS, Outgoing, V, read_scanned, stage_values, store

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EARLY = {"segments": after("chunk_plan")}
PRELUDE = """
#include "core/state_tiles.cuh"
#include "states/wide_state.cuh"
"""

STAGES = TILE.stages  # of K and the gates: the first and the last product need them
assert (TILE.tile, TILE.consumers) == (V, CONSUMERS)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = TILE.registers


def replay_gradients(dtype, K):
    sizes = Sizes()
    H_v, value_rows = sizes.H_v, sizes.value_rows
    BOXES = K // C  # TMA boxes of a warpgroup's dS'

    def make_tiles():
        return shared(
            TILE.shared,
            K=([STAGES, C, K], dtype),
            gates=([STAGES, BackwardGate.COUNT, C], "float32"),
            Q=([1, C, K], dtype),
            dO=([1, C, V], dtype),
            L=([1, C, C], dtype),  # L^T
            P=([1, C, C], dtype),  # P^T
            dS=([WARPGROUPS, BOXES, ROWS, C], dtype),
            U=([WARPGROUPS, C, ROWS], dtype),
            swizzle=("dS", "U"),
        )

    def make_barriers():
        return barriers(
            loaded=[32] * STAGES,  # producer warp to consumers: K and the gates have arrived
            released=[CONSUMERS] * STAGES,  # consumers to producer warp: they are free
            others_loaded=[32],  # the same for Q, dO, L and P
            others_released=[CONSUMERS],
            dS_staged=[128] * WARPGROUPS,  # a warpgroup to its epilogue warp: dS' of a chunk is in shared memory
            dS_stored=[32] * WARPGROUPS,  # epilogue warp to its warpgroup: dS' has been read
            U_staged=[128] * WARPGROUPS,
            U_stored=[32] * WARPGROUPS,
        )

    def values_of(tiles, ready):
        return Outgoing(tiles.U, ready.U_staged, ready.U_stored)

    @T.macro
    def stage_U(r, tiles, ready, warpgroup, step, offset):
        Stage(warpgroup, step % 2).arrive(ready.dS_staged)
        stage_values(values_of(tiles, ready), r.U, r.element, warpgroup, step, offset)

    @T.macro
    def release_others(ready):
        T.barrier_arrive(ready.others_released)

    @T.macro
    def compute(tiles, ready, work, segment, final, initial, grad_states, scale):
        """The consumers: the recurrence, with dS' and U to shared memory."""
        warpgroup = T.truncdiv(T.get_thread_binding(), 128)
        r = registers(V, K, dtype)
        position = position_in_tiles()
        rows = T.alloc_var("int32", init=extern("rows_offset", returns="int32"))
        T.clear(r.dS)
        if segment.final == FROM_SCAN:
            read_scanned(r.dS, grad_states, work)
        else:
            if segment.final != NO_STATE:
                final.read(r.dS, segment.final, work.hv, work.v0)
        for step in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=step % STAGES)
            p = T.alloc_var("int32", init=step % 2)
            stage = stage_of(step, STAGES, s)
            stage.wait_for(ready.loaded)
            Stage(0, p).wait_for(ready.others_loaded)
            if (step == 0) & (segment.length % C != 0):
                clear_rows_after(tiles.Q, segment.length % C, CONSUMERS, 0)
                clear_rows_after(tiles.K, segment.length % C, CONSUMERS, 0)
                clear_rows_after(tiles.dO, segment.length % C, CONSUMERS, 0)
                T.fence_proxy_async()
                T.sync_threads(NamedBarrier.BACKWARD_CLEARED, CONSUMERS)
            Stage(warpgroup, p).wait_until_free(ready.dS_stored)
            wide_step(
                r,
                tiles,
                s,
                0,
                tiles.dO[0, 0, warpgroup * ROWS],
                position.offset,
                position.column,
                scale,
                staged=(T.access_ptr(tiles.dS[warpgroup, 0, 0, 0], "w"), rows),
                released=partial(release_others, ready),
                use_U=partial(stage_U, r, tiles, ready, warpgroup, step, position.offset),
            )
            stage.arrive(ready.released)
        if segment.initial >= 0:
            initial.write(r.dS, segment.initial, work.hv, work.v0)

    @T.macro
    def load(tiles, ready, work, segment, hk, tokens, grad_o, matrices):
        """The producer warp: the chunks' operands, the last chunk's first."""
        edge = T.alloc_var("int32", init=0)  # see block_rows
        for step in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=step % STAGES)
            c = segment.chunks - 1 - step
            t, slot = segment.row_and_slot(c)
            stage = stage_of(step, STAGES, s)
            stage.wait_until_free(ready.released)
            fetch(tokens.k[t : t + C, hk, 0:K], tiles.K[s, :, :], ready.loaded[s])
            fetch(matrices.gates[slot, work.hv, :, :], tiles.gates[s, :, :], ready.loaded[s])
            stage.arrive(ready.loaded)
            Stage(0, step % 2).wait_until_free(ready.others_released)
            fetch(grad_o[t : t + C, work.hv, work.v0 : work.v0 + V], tiles.dO[0, :, :], ready.others_loaded)
            for target, source in block_rows(tiles.P, 0, matrices.rows, slot, work.hv, 1, edge):
                fetch(source, target, ready.others_loaded)
            for target, source in block_rows(tiles.L, 0, matrices.rows, slot, work.hv, 0, edge):
                fetch(source, target, ready.others_loaded)
            fetch(tokens.q[t : t + C, hk, 0:K], tiles.Q[0, :, :], ready.others_loaded)
            T.barrier_arrive(ready.others_loaded)

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype, BackwardGate),
        output_gradient: OutputGradient(sizes, dtype),
        grad_states: T.Tensor([sizes.segment_slots, H_v, value_rows, K], "float32"),
        ends: StateGradients(sizes),
        reverse_replay: ReverseReplay(sizes, dtype, K),
        scale: T.float32,
    ):
        with T.Kernel(grid_of_tiles(sizes), threads=TILE.threads, prelude=PRELUDE) as cta:
            tiles = make_tiles()
            ready = make_barriers()
            work, segment = locate_tile(cta, sizes, chunks.plan.segments)
            if (segment.flags + segment.length == 0) & (cta != 0):
                extern("leave")
            T.pdl_sync()
            T.pdl_trigger()
            hk = T.alloc_var("int32", init=T.truncdiv(work.hv, sizes.group))
            if T.get_thread_binding() < CONSUMERS:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                final = ends.view(T.access_ptr(ends.dht[0], "r"))
                initial = ends.view(T.access_ptr(ends.dh0[0], "w"))
                compute(tiles, ready, work, segment, final, initial, grad_states, scale)
            else:
                T.dec_max_nreg(PRODUCER_REGISTERS)
                if is_producer_warp(CONSUMERS):
                    load(tiles, ready, work, segment, hk, chunks.tokens, output_gradient.grad_o, chunks.matrices)
                else:
                    state = Outgoing(tiles.dS, ready.dS_staged, ready.dS_stored)
                    store(
                        state,
                        values_of(tiles, ready),
                        reverse_replay.dh,
                        reverse_replay.u,
                        work,
                        segment,
                        reverse=True,
                    )

    return main
