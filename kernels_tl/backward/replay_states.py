"""The states again, for the backward: the recurrence (forward/recurrence.py, without outputs, S' exact) over the chunks
of each segment, with the state in registers from first to last chunk. What it leaves of each chunk:

    h          S before the chunk    [chunk_slots, H_v, V, K], V-first
    v_new      V_new                 [chunk_slots, H_v, C, V]

A segment starts from the caller's state or from zero if it is its sequence's first, else from `states`.

A CTA owns a head of a segment: a consumer warpgroup for each 64 rows of S^T, a warp for each of these that stores h and
V_new, and a warp that keeps the next chunks' operands coming by TMA.

Launched on [segments * H_v].
"""

from functools import partial

import tilelang.language as T

from kernels_tl.common import (
    EXPLICIT_PASS_CONFIGS,
    C,
    block_row,
    block_rows,
    dims,
    extern,
)
from kernels_tl.cta import barriers, clear_rows_behind, fetch, load_segment_early, shared
from kernels_tl.forward.recurrence import begin_step, end_step, registers
from kernels_tl.layout import ForwardGate, NamedBarrier, SegmentColumn, SegmentFlag
from kernels_tl.states import States

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EXPLICIT_FENCES = True
PRELUDE = """
#include "device/tiles.cuh"
"""

ROWS = 64  # of S^T a warpgroup: the M of its WGMMA
STAGES = 4
EARLY_FACTORS = 4  # of eight, see recurrence.registers
PRODUCERS = 128  # a warp that loads, one for each consumer warpgroup that stores; setmaxnreg takes whole warpgroups
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40  # 2 * 232 + 40 = 3 * 168, what a CTA of 384 threads has


def replay_states(dtype, K, V):
    tokens, H_k, H_v, chunk_slots, segment_slots, state_size = dims(
        "tokens", "H_k", "H_v", "chunk_slots", "segment_slots", "state_size"
    )
    WARPGROUPS = V // ROWS
    CONSUMERS = 128 * WARPGROUPS
    BOXES = K // C  # of a warpgroup's h

    def make_tiles():
        return shared(
            213,
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
            loaded=[32] * STAGES,  # loader to consumers: a stage's tiles have arrived
            released=[CONSUMERS] * STAGES,  # back: they have been used
            h_staged=[128] * WARPGROUPS,  # a consumer warpgroup to its storer: its h of a chunk lies in shared memory
            h_stored=[32] * WARPGROUPS,  # back: it has left
            V_new_staged=[128] * WARPGROUPS,
            V_new_stored=[32] * WARPGROUPS,
        )

    @T.macro
    def stage_h(r, tiles, ready, warpgroup, c, rows):
        T.barrier_wait(ready.h_stored[warpgroup], (c % 2) ^ 1)
        extern(f"stage_rows<{BOXES}>", r.S_16.data, T.access_ptr(tiles.h[warpgroup, 0, 0, 0], "w"), rows)
        T.barrier_arrive(ready.h_staged[warpgroup])

    @T.macro
    def stage_V_new(r, tiles, ready, warpgroup, c, offset):
        T.barrier_wait(ready.V_new_stored[warpgroup], (c % 2) ^ 1)
        extern(f"stage_transposed<{r.element}>", r.V_new.data, T.access_ptr(tiles.V_new[warpgroup, 0, 0], "w"), offset)
        T.barrier_arrive(ready.V_new_staged[warpgroup])

    @T.macro
    def compute(tiles, ready, slot, segment, hv, initial, has_initial_state, states):
        """The consumers: the recurrence, and the way to shared memory of what it leaves."""
        warpgroup = T.truncdiv(T.get_thread_binding(), 128)
        r = registers(V, K, dtype, EARLY_FACTORS, output=False, exact=True)
        offset = T.alloc_var("int32", init=extern("transposed_offset", returns="int32"))
        column = T.alloc_var("int32", init=extern("first_column", returns="int32"))
        rows = T.alloc_var("int32", init=extern("rows_offset", returns="int32"))
        T.clear(r.S)
        if segment.flags % SegmentFlag.LAST == SegmentFlag.FIRST:
            if has_initial_state != 0:
                initial.read(r.S, segment.n, hv)
        else:
            if segment.chunks > 0:
                extern(f"read_state<{K}, {V}>", r.S.data, T.access_ptr(states[slot, hv, 0, 0], "r"), True)
        for c in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=c % STAGES)
            T.barrier_wait(ready.loaded[s], (c // STAGES) % 2)
            if segment.length - c * C < C:
                clear_rows_behind(tiles.K, segment.length - c * C, s)
                for w in T.unroll(WARPGROUPS):
                    clear_rows_behind(tiles.V, segment.length - c * C, s, w)
                T.fence_proxy_async()
                T.sync_threads(NamedBarrier.BACKWARD_CLEARED, CONSUMERS)
            begin_step(
                r,
                tiles,
                s,
                tiles.V[s, warpgroup, 0, 0],
                offset,
                column,
                meanwhile=partial(stage_h, r, tiles, ready, warpgroup, c, rows),
            )
            T.wait_wgmma(0)
            end_step(r, tiles, s, meanwhile=partial(stage_V_new, r, tiles, ready, warpgroup, c, offset))
            T.barrier_arrive(ready.released[s])

    @T.macro
    def load(tiles, ready, segment, hv, hk, k, v, gates, matrices):
        """The loader: the chunks' operands."""
        edge = T.alloc_var("int32", init=0)  # see block_rows
        for c in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=c % STAGES)
            t = segment.row + c * C
            slot = segment.first + c
            T.barrier_wait(ready.released[s], ((c // STAGES) % 2) ^ 1)
            fetch(k[t : t + C, hk, :], tiles.K[s, :, :], ready.loaded[s])
            fetch(gates[slot, hv, :, :], tiles.gates[s, :, :], ready.loaded[s])
            for w in T.unroll(WARPGROUPS):
                fetch(v[t : t + C, hv, w * ROWS : w * ROWS + ROWS], tiles.V[s, w, :, :], ready.loaded[s])
            for target, source in block_rows(tiles.L, s, matrices, slot, hv, 0, edge):
                fetch(source, target, ready.loaded[s])
            T.barrier_arrive(ready.loaded[s])

    @T.macro
    def store(tiles, ready, segment, hv, h, v_new):
        """The storers, one for each consumer warpgroup: h and V_new from shared memory."""
        w = T.alloc_var("int32", init=T.truncdiv(T.get_thread_binding() - CONSUMERS, 32) - 1)
        for c in T.serial(T.if_then_else(w < WARPGROUPS, segment.chunks, 0)):
            slot = segment.first + c
            v0 = w * ROWS
            T.barrier_wait(ready.h_staged[w], c % 2)
            T.fence_proxy_async()
            for box in T.unroll(BOXES):
                T.tma_copy(
                    tiles.h[w, box, :, :],
                    h[slot, hv, v0 : v0 + ROWS, box * C : box * C + C],
                    leader_scope_threads=32,
                )
            T.tma_store_wait(0)
            T.barrier_arrive(ready.h_stored[w])
            T.barrier_wait(ready.V_new_staged[w], c % 2)
            T.fence_proxy_async()
            T.tma_copy(tiles.V_new[w, :, :], v_new[slot, hv, :, v0 : v0 + ROWS], leader_scope_threads=32)
            T.tma_store_wait(0)
            T.barrier_arrive(ready.V_new_stored[w])

    @T.prim_func
    def main(
        k: T.Tensor([tokens, H_k, K], dtype),
        v: T.Tensor([tokens, H_v, V], dtype),
        gates: T.Tensor([chunk_slots, H_v, ForwardGate.COUNT, C], "float32"),
        matrices_0: block_row(chunk_slots, H_v, 0, dtype),
        matrices_1: block_row(chunk_slots, H_v, 1, dtype),
        matrices_2: block_row(chunk_slots, H_v, 2, dtype),
        matrices_3: block_row(chunk_slots, H_v, 3, dtype),
        segments: T.Tensor([segment_slots, SegmentColumn.COUNT], "int32"),
        initial_state: T.Tensor([state_size], "float32"),
        states: T.Tensor([segment_slots, H_v, V, K], "float32"),
        h: T.Tensor([chunk_slots, H_v, V, K], dtype),
        v_new: T.Tensor([chunk_slots, H_v, C, V], dtype),
        group: T.int32,  # H_v / H_k
        state_stride_v: T.int32,  # of initial_state: the caller's layout is these two numbers
        state_stride_k: T.int32,
        has_initial_state: T.int32,
    ):
        with T.Kernel(segment_slots * H_v, threads=CONSUMERS + PRODUCERS, prelude=PRELUDE) as cta:
            tiles = make_tiles()
            ready = make_barriers()
            slot = T.alloc_var("int32", init=T.truncdiv(cta, T.Cast("int32", H_v)))
            segment = load_segment_early(segments, slot)
            if (segment.length == 0) & (cta != 0):
                extern("leave")
            T.pdl_sync()
            T.pdl_trigger()
            hv = T.alloc_var("int32", init=cta - slot * T.Cast("int32", H_v))
            hk = T.alloc_var("int32", init=T.truncdiv(hv, group))
            if T.get_thread_binding() < CONSUMERS:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                initial = States(initial_state, H_v, K, V, (state_stride_v, state_stride_k))
                compute(tiles, ready, slot, segment, hv, initial, has_initial_state, states)
            else:
                T.dec_max_nreg(PRODUCER_REGISTERS)
                if T.get_thread_binding() < CONSUMERS + 32:
                    matrices = (matrices_0, matrices_1, matrices_2, matrices_3)
                    load(tiles, ready, segment, hv, hk, k, v, gates, matrices)
                else:
                    store(tiles, ready, segment, hv, h, v_new)

    return main
