"""The gradient of the states: the recurrence in reverse (reverse_recurrence.py), with the gradient in registers
throughout. What it leaves of each chunk, dS' being the gradient of the state behind it:

    dh            = dS'                                             [chunk_slots, H_v, V, K], V-first
    state_product = <S, dS'>, from dS' before it is rounded         [chunk_slots, H_v, 8], by parts of the state
    u             = U^T                                             [chunk_slots, H_v, V, C]

diag(beta) U is the gradient of V - diag(gamma) K S, so also that of V.

Behind a segment that is its sequence's last dS' is the caller's dht or zero, behind another grad_states'. What is left
before a sequence's first segment is dh0.

A CTA owns 64 rows of dS^T of one head of one segment: one consumer warpgroup that computes and stores, and a warp that
keeps the previous chunks' operands coming by TMA.

Launched on [segments, H_v, value tiles].
"""

from functools import partial
from types import SimpleNamespace

import tilelang.language as T

from kernels_tl.backward.reverse_recurrence import begin_step, end_step, registers
from kernels_tl.backward.shared import (
    WARP,
    load_piece,
    read_state,
    store,
    warp_sum,
    write_state,
)
from kernels_tl.common import (
    PASS_CONFIGS as PASS_CONFIGS,
    C,
    block_row,
    block_rows,
    dims,
    extern,
)
from kernels_tl.cta import barriers, clear_rows_behind, fetch, shared
from kernels_tl.layout import (
    STATE_PRODUCT_ROWS,
    BackwardGate,
    NamedBarrier,
    SegmentColumn,
    SegmentFlag,
)
from kernels_tl.states import States

PRELUDE = """
#include "device/tiles.cuh"
"""

VALUE_TILE = 64  # rows of dS^T a CTA: the M of one warpgroup's WGMMA
STAGES = 2
CONSUMERS, PRODUCERS = 128, 32  # a warpgroup, a warp
WARPS = CONSUMERS // WARP


def state_gradients(dtype, K, V):
    tokens, H_k, H_v, chunk_slots, segment_slots, state_size = dims(
        "tokens", "H_k", "H_v", "chunk_slots", "segment_slots", "state_size"
    )
    assert VALUE_TILE == WARPS * STATE_PRODUCT_ROWS, "a part of <S, dS'> for each warp"

    def make_tiles():
        return shared(
            170.5,
            Q=([STAGES, C, K], dtype),
            K=([STAGES, C, K], dtype),
            dO=([STAGES, C, VALUE_TILE], dtype),
            L=([STAGES, C, C], dtype),  # L^T
            P=([STAGES, C, C], dtype),  # P^T
            h=([STAGES, VALUE_TILE, K], dtype),
            gates=([STAGES, BackwardGate.COUNT, C], "float32"),
            dh=([VALUE_TILE, K], dtype),
            U=([VALUE_TILE, C], dtype),
            swizzle=("h",),
        )

    def make_barriers():
        return barriers(
            loaded=[PRODUCERS] * STAGES,  # loader to consumers: a stage's tiles have arrived
            released=[CONSUMERS] * STAGES,  # back: they have been used
        )

    @T.macro
    def store_product(r, tiles, s, piece, slot, state_product):
        """A warp's part of <S, dS'>."""
        product = T.alloc_var("float32", init=0.0)
        for i, j in T.Parallel(VALUE_TILE, K):
            product += r.dS[i, j] * tiles.h[s, i, j]
        total = warp_sum(product)
        if T.get_thread_binding() % WARP == 0:
            part = piece.v0 // VALUE_TILE * WARPS + T.get_thread_binding() // WARP
            state_product[slot, piece.hv, part] = total

    @T.macro
    def leave_dS(r, tiles, s, piece, slot, state_product, dh):
        """Stores <S, dS'> and dS'."""
        store_product(r, tiles, s, piece, slot, state_product)
        store(r.dS_16, tiles.dh, dh[slot, piece.hv, piece.v0 : piece.v0 + VALUE_TILE, :])

    @T.macro
    def leave_U(r, tiles, piece, slot, u):
        T.copy(r.U, r.U_16)
        store(r.U_16, tiles.U, u[slot, piece.hv, piece.v0 : piece.v0 + VALUE_TILE, :])

    @T.macro
    def compute(tiles, ready, piece, segments, has, final, initial, grad_states, scale, state_product, dh, u):
        """The consumers: the recurrence in reverse, and what it leaves."""
        r = registers(VALUE_TILE, K, dtype)
        offset = T.alloc_var("int32", init=extern("transposed_offset", returns="int32"))
        column = T.alloc_var("int32", init=extern("first_column", returns="int32"))
        T.clear(r.dS)
        if segments[piece.segment, SegmentColumn.FLAGS] >= SegmentFlag.LAST:
            if has.dht != 0:
                read_state(r.dS, final, segments[piece.segment, SegmentColumn.SEQUENCE], piece)
        else:
            if piece.chunks > 0:
                for i, j in T.Parallel(VALUE_TILE, K):
                    r.dS[i, j] = grad_states[piece.segment, piece.hv, piece.v0 + i, j]
        for step in T.serial(piece.chunks):
            c = piece.chunks - 1 - step
            s = step % STAGES
            slot = piece.first + c
            valid = piece.length - c * C
            T.barrier_wait(ready.loaded[s], (step // STAGES) % 2)
            if valid < C:
                clear_rows_behind(tiles.Q, valid, s)
                clear_rows_behind(tiles.K, valid, s)
                clear_rows_behind(tiles.dO, valid, s)
                T.fence_proxy_async()
                T.sync_threads(NamedBarrier.BACKWARD_CLEARED, CONSUMERS)
            leave_first = partial(leave_dS, r, tiles, s, piece, slot, state_product, dh)
            begin_step(r, tiles, s, tiles.dO[s, 0, 0], offset, column, scale, meanwhile=leave_first)
            end_step(r, tiles, s, column, meanwhile=partial(leave_U, r, tiles, piece, slot, u))
            T.barrier_arrive(ready.released[s])
        is_first = segments[piece.segment, SegmentColumn.FLAGS] % SegmentFlag.LAST == SegmentFlag.FIRST
        if (has.dh0 != 0) & is_first:
            write_state(r.dS, initial, segments[piece.segment, SegmentColumn.SEQUENCE], piece)
        T.tma_store_wait(0)

    @T.macro
    def load(tiles, ready, piece, group, q, k, grad_o, matrices, h, gates):
        """The loader: the chunks' operands, the last chunk's first."""
        edge = T.alloc_var("int32", init=0)  # see block_rows
        for step in T.serial(piece.chunks):
            s = step % STAGES
            c = piece.chunks - 1 - step
            t = piece.row + c * C
            slot = piece.first + c
            T.barrier_wait(ready.released[s], ((step // STAGES) % 2) ^ 1)
            fetch(q[t : t + C, T.truncdiv(piece.hv, group), :], tiles.Q[s, :, :], ready.loaded[s])
            fetch(k[t : t + C, T.truncdiv(piece.hv, group), :], tiles.K[s, :, :], ready.loaded[s])
            fetch(grad_o[t : t + C, piece.hv, piece.v0 : piece.v0 + VALUE_TILE], tiles.dO[s, :, :], ready.loaded[s])
            for target, source in block_rows(tiles.L, s, matrices, slot, piece.hv, 0, edge):
                fetch(source, target, ready.loaded[s])
            for target, source in block_rows(tiles.P, s, matrices, slot, piece.hv, 1, edge):
                fetch(source, target, ready.loaded[s])
            fetch(h[slot, piece.hv, piece.v0 : piece.v0 + VALUE_TILE, :], tiles.h[s, :, :], ready.loaded[s])
            fetch(gates[slot, piece.hv, :, :], tiles.gates[s, :, :], ready.loaded[s])
            T.barrier_arrive(ready.loaded[s])

    @T.prim_func
    def main(
        q: T.Tensor([tokens, H_k, K], dtype),
        k: T.Tensor([tokens, H_k, K], dtype),
        grad_o: T.Tensor([tokens, H_v, V], dtype),
        gates: T.Tensor([chunk_slots, H_v, BackwardGate.COUNT, C], "float32"),
        matrices_0: block_row(chunk_slots, H_v, 0, dtype),
        matrices_1: block_row(chunk_slots, H_v, 1, dtype),
        matrices_2: block_row(chunk_slots, H_v, 2, dtype),
        matrices_3: block_row(chunk_slots, H_v, 3, dtype),
        h: T.Tensor([chunk_slots, H_v, V, K], dtype),
        segments: T.Tensor([segment_slots, SegmentColumn.COUNT], "int32"),
        dht: T.Tensor([state_size], "float32"),
        grad_states: T.Tensor([segment_slots, H_v, V, K], "float32"),
        dh0: T.Tensor([state_size], "float32"),
        dh: T.Tensor([chunk_slots, H_v, V, K], dtype),
        u: T.Tensor([chunk_slots, H_v, V, C], dtype),
        state_product: T.Tensor([chunk_slots, H_v, V // STATE_PRODUCT_ROWS], "float32"),
        group: T.int32,  # H_v / H_k
        scale: T.float32,
        state_stride_v: T.int32,  # of dht and dh0: the caller's layout is these two numbers
        state_stride_k: T.int32,
        has_dht: T.int32,
        has_dh0: T.int32,
    ):
        with T.Kernel(segment_slots, H_v, V // VALUE_TILE, threads=CONSUMERS + PRODUCERS, prelude=PRELUDE) as (
            segment,
            hv,
            tile,
        ):
            tiles = make_tiles()
            ready = make_barriers()
            piece = load_piece(segments, segment, hv, tile * VALUE_TILE)
            if T.get_thread_binding() < CONSUMERS:
                strides = (state_stride_v, state_stride_k)
                final = States(dht, H_v, K, V, strides)
                initial = States(dh0, H_v, K, V, strides)
                has = SimpleNamespace(dht=has_dht, dh0=has_dh0)
                compute(tiles, ready, piece, segments, has, final, initial, grad_states, scale, state_product, dh, u)
            else:
                matrices = (matrices_0, matrices_1, matrices_2, matrices_3)
                load(tiles, ready, piece, group, q, k, grad_o, matrices, h, gates)

    return main
