"""The states again, for the backward: the recurrence over the chunks of each sequence, with the state in registers from
first to last chunk. Per chunk, in the transposed form that keeps every intermediate in registers as the next WGMMA's A
operand, with L = A * D - I from chunk_matrices:

    h          = S                                                  [chunk_slots, H_v, V, K], V-first
    residual^T = (V^T - (S^T K^T) diag(gamma)) diag(beta)
    V_new^T    = residual^T + residual^T L^T                        [chunk_slots, H_v, V, C]
    S^T        = gamma_C S^T + (V_new^T diag(gamma_C / gamma)) K

What rounding takes from the factor V_new^T diag(gamma_C / gamma) of the last line makes a second product: it would be
the largest error of S, and dg hangs on S.

A CTA owns 64 rows of S^T of one head of one sequence: one consumer warpgroup that computes and stores, and a warp that
keeps the next chunks' operands coming by TMA. More than one CTA a head serve short sequences and few heads; their
common K and L come from L2. Its shared memory is small enough for 2 CTAs an SM.

Launched on [N, H_v, value tiles].
"""

import tilelang.language as T

from kernels_tl.backward.shared import load_piece, read_state, store
from kernels_tl.common import (
    PASS_CONFIGS as PASS_CONFIGS,
    C,
    block_row,
    block_rows,
    dims,
)
from kernels_tl.cta import barriers, clear_rows_behind, fetch, fragments, shared
from kernels_tl.layout import BackwardGate, NamedBarrier, SequenceColumn
from kernels_tl.states import States

VALUE_TILE = 64  # rows of S^T a CTA: the M of one warpgroup's WGMMA
STAGES = 2
CONSUMERS, PRODUCERS = 128, 32  # a warpgroup, a warp

Full = T.GemmWarpPolicy.FullRow


def replay_states(dtype, K, V):
    tokens, H_k, H_v, N, chunk_slots, state_size = dims("tokens", "H_k", "H_v", "N", "chunk_slots", "state_size")

    def make_tiles():
        return shared(
            90.5,
            K=([STAGES, C, K], dtype),
            V=([STAGES, C, VALUE_TILE], dtype),  # read by elements, transposed: a warp's rows meet different banks
            L=([STAGES, C, C], dtype),  # L^T
            gates=([STAGES, BackwardGate.COUNT, C], "float32"),
            h=([VALUE_TILE, K], dtype),
            V_new=([VALUE_TILE, C], dtype),
            swizzle=("V",),
        )

    def make_barriers():
        return barriers(
            loaded=[PRODUCERS] * STAGES,  # loader to consumers: a stage's tiles have arrived
            released=[CONSUMERS] * STAGES,  # back: they have been used
        )

    def make_registers():
        return fragments(
            S=([VALUE_TILE, K], "float32"),  # S^T
            S_16=([VALUE_TILE, K], dtype),
            SK=([VALUE_TILE, C], "float32"),  # S^T K^T
            V_new=([VALUE_TILE, C], "float32"),  # V^T, residual^T, V_new^T in turn
            V_new_16=([VALUE_TILE, C], dtype),
            decayed=([VALUE_TILE, C], dtype),  # V_new^T diag(gamma_C / gamma)
            decayed_rest=([VALUE_TILE, C], dtype),  # what rounding took from it
        )

    @T.macro
    def make_residual(r, tiles, s, h_part, valid):
        """Stores h, and leaves residual^T in V_new."""
        T.copy(r.S, r.S_16)
        T.wgmma_gemm(r.S_16, tiles.K[s, :, :], r.SK, transpose_B=True, policy=Full, clear_accum=True)
        for i, j in T.Parallel(VALUE_TILE, C):
            r.V_new[i, j] = tiles.V[s, j, i]
        store(r.S_16, tiles.h, h_part)
        T.wait_wgmma(0)
        for i, j in T.Parallel(VALUE_TILE, C):
            r.V_new[i, j] = T.if_then_else(
                j < valid,
                tiles.gates[s, BackwardGate.BETA, j]
                * (r.V_new[i, j] - tiles.gates[s, BackwardGate.GAMMA, j] * r.SK[i, j]),
                0.0,
            )

    @T.macro
    def make_state(r, tiles, s, v_new_part):
        """From residual^T V_new^T, which is stored, and the next S."""
        T.copy(r.V_new, r.V_new_16)
        T.wgmma_gemm(r.V_new_16, tiles.L[s, :, :], r.V_new, policy=Full)
        for i, j in T.Parallel(VALUE_TILE, K):
            r.S[i, j] *= tiles.gates[s, BackwardGate.GAMMA, C - 1]
        T.wait_wgmma(0)
        for i, j in T.Parallel(VALUE_TILE, C):
            r.decayed[i, j] = r.V_new[i, j] * tiles.gates[s, BackwardGate.DECAY, j]
        T.wgmma_gemm(r.decayed, tiles.K[s, :, :], r.S, policy=Full)
        for i, j in T.Parallel(VALUE_TILE, C):
            r.decayed_rest[i, j] = r.V_new[i, j] * tiles.gates[s, BackwardGate.DECAY, j] - T.Cast(
                "float32", r.decayed[i, j]
            )
        T.wgmma_gemm(r.decayed_rest, tiles.K[s, :, :], r.S, policy=Full)
        T.copy(r.V_new, r.V_new_16)
        store(r.V_new_16, tiles.V_new, v_new_part)
        T.wait_wgmma(0)

    @T.macro
    def compute(tiles, ready, piece, initial, has_initial_state, h, v_new):
        """The consumers: the recurrence, and what it leaves."""
        r = make_registers()
        if has_initial_state != 0:
            read_state(r.S, initial, piece)
        else:
            T.clear(r.S)
        for c in T.serial(piece.chunks):
            s = c % STAGES
            slot = piece.first + c
            valid = piece.length - c * C
            T.barrier_wait(ready.loaded[s], (c // STAGES) % 2)
            if valid < C:
                clear_rows_behind(tiles.K, valid, s)
                T.fence_proxy_async()
                T.sync_threads(NamedBarrier.BACKWARD_CLEARED, CONSUMERS)
            make_residual(r, tiles, s, h[slot, piece.hv, piece.v0 : piece.v0 + VALUE_TILE, :], valid)
            make_state(r, tiles, s, v_new[slot, piece.hv, piece.v0 : piece.v0 + VALUE_TILE, :])
            T.barrier_arrive(ready.released[s])
        T.tma_store_wait(0)

    @T.macro
    def load(tiles, ready, piece, group, k, v, matrices, gates):
        """The loader: the chunks' operands."""
        edge = T.alloc_var("int32", init=0)  # see block_rows
        for c in T.serial(piece.chunks):
            s = c % STAGES
            t = piece.row + c * C
            slot = piece.first + c
            T.barrier_wait(ready.released[s], ((c // STAGES) % 2) ^ 1)
            fetch(k[t : t + C, T.truncdiv(piece.hv, group), :], tiles.K[s, :, :], ready.loaded[s])
            fetch(v[t : t + C, piece.hv, piece.v0 : piece.v0 + VALUE_TILE], tiles.V[s, :, :], ready.loaded[s])
            for target, source in block_rows(tiles.L, s, matrices, slot, piece.hv, 0, edge):
                fetch(source, target, ready.loaded[s])
            fetch(gates[slot, piece.hv, :, :], tiles.gates[s, :, :], ready.loaded[s])
            T.barrier_arrive(ready.loaded[s])

    @T.prim_func
    def main(
        k: T.Tensor([tokens, H_k, K], dtype),
        v: T.Tensor([tokens, H_v, V], dtype),
        gates: T.Tensor([chunk_slots, H_v, BackwardGate.COUNT, C], "float32"),
        matrices_0: block_row(chunk_slots, H_v, 0, dtype),
        matrices_1: block_row(chunk_slots, H_v, 1, dtype),
        matrices_2: block_row(chunk_slots, H_v, 2, dtype),
        matrices_3: block_row(chunk_slots, H_v, 3, dtype),
        sequences: T.Tensor([N, SequenceColumn.COUNT], "int32"),
        initial_state: T.Tensor([state_size], "float32"),
        h: T.Tensor([chunk_slots, H_v, V, K], dtype),
        v_new: T.Tensor([chunk_slots, H_v, V, C], dtype),
        group: T.int32,  # H_v / H_k
        state_stride_v: T.int32,  # of initial_state: the caller's layout is these two numbers
        state_stride_k: T.int32,
        has_initial_state: T.int32,
    ):
        with T.Kernel(N, H_v, V // VALUE_TILE, threads=CONSUMERS + PRODUCERS) as (n, hv, tile):
            tiles = make_tiles()
            ready = make_barriers()
            piece = load_piece(sequences, n, hv, tile * VALUE_TILE)
            if T.get_thread_binding() < CONSUMERS:
                initial = States(initial_state, H_v, K, V, (state_stride_v, state_stride_k))
                compute(tiles, ready, piece, initial, has_initial_state, h, v_new)
            else:
                matrices = (matrices_0, matrices_1, matrices_2, matrices_3)
                load(tiles, ready, piece, group, k, v, matrices, gates)

    return main
