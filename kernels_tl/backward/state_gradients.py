"""The gradient of the states: the recurrence of replay_states in reverse, with the gradient in registers throughout.

With dS' the gradient of the state behind a chunk, and P = scale * tril(Q K^T) * D and L = A * D - I from
chunk_matrices, which come transposed:

    dh            = dS'                                             [chunk_slots, H_v, V, K], V-first
    state_product = <S, dS'>, from dS' before it is rounded         [chunk_slots, H_v, 8], by parts of the state
    dV_new^T      = dO^T P + (dS'^T K^T) diag(gamma_C / gamma)
    U^T           = dV_new^T + dV_new^T L                           [chunk_slots, H_v, V, C]
    dS^T          = gamma_C dS'^T + (dO^T diag(scale gamma)) Q - (U^T diag(beta gamma)) K, formed as
                    gamma_1 times the same with gamma / gamma_1, so that 16 bits hold the factors however small gamma is

diag(beta) U is the gradient of V - diag(gamma) K S, so also that of V. The transposed form keeps every intermediate in
registers as the next WGMMA's A operand, as in replay_states.

A CTA owns 64 rows of dS^T of one head of one sequence: one consumer warpgroup that computes and stores, and a warp that
keeps the previous chunks' operands coming by TMA.

Launched on [N, H_v, value tiles].
"""

from types import SimpleNamespace

import tilelang.language as T

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
)
from kernels_tl.cta import barriers, clear_rows_behind, fetch, fragments, shared
from kernels_tl.layout import (
    STATE_PRODUCT_ROWS,
    BackwardGate,
    NamedBarrier,
    SequenceColumn,
)
from kernels_tl.states import States

VALUE_TILE = 64  # rows of dS^T a CTA: the M of one warpgroup's WGMMA
STAGES = 2
CONSUMERS, PRODUCERS = 128, 32  # a warpgroup, a warp
WARPS = CONSUMERS // WARP

Full = T.GemmWarpPolicy.FullRow


def state_gradients(dtype, K, V):
    tokens, H_k, H_v, N, chunk_slots, state_size = dims("tokens", "H_k", "H_v", "N", "chunk_slots", "state_size")
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

    def make_registers():
        return fragments(
            dS=([VALUE_TILE, K], "float32"),  # dS^T
            dS_16=([VALUE_TILE, K], dtype),
            dSK=([VALUE_TILE, C], "float32"),  # dS'^T K^T
            U=([VALUE_TILE, C], "float32"),  # dO^T P, dV_new^T, U^T in turn
            U_16=([VALUE_TILE, C], dtype),  # dV_new^T, then U^T
            # dO^T diag(scale gamma / gamma_1) in two parts: rounded to one, it would be the largest error of dS
            faded_dO=([VALUE_TILE, C], dtype),
            faded_dO_rest=([VALUE_TILE, C], dtype),
            faded_U=([VALUE_TILE, C], dtype),  # -U^T diag(beta gamma / gamma_1)
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
    def begin_step(r, tiles, s, piece, slot, scale, state_product, dh):
        """Stores <S, dS'> and dS', and leaves dS'^T K^T in dSK and dO^T P in U, behind them in flight what dO and dS'
        are of dS^T / gamma_1 in dS."""
        T.copy(r.dS, r.dS_16)
        T.wgmma_gemm(r.dS_16, tiles.K[s, :, :], r.dSK, transpose_B=True, policy=Full, clear_accum=True)
        store_product(r, tiles, s, piece, slot, state_product)
        T.wgmma_gemm(
            tiles.dO[s, :, :],
            tiles.P[s, :, :],
            r.U,
            transpose_A=True,
            transpose_B=True,
            policy=Full,
            clear_accum=True,
        )
        store(r.dS_16, tiles.dh, dh[slot, piece.hv, piece.v0 : piece.v0 + VALUE_TILE, :])
        for i, j in T.Parallel(VALUE_TILE, C):
            dO_j = tiles.dO[s, j, i] * (tiles.gates[s, BackwardGate.FADE, j] * scale)
            r.faded_dO[i, j] = dO_j
            r.faded_dO_rest[i, j] = dO_j - T.Cast("float32", r.faded_dO[i, j])
        for i, j in T.Parallel(VALUE_TILE, K):
            r.dS[i, j] *= tiles.gates[s, BackwardGate.FADE, C - 1]
        T.wgmma_gemm(r.faded_dO, tiles.Q[s, :, :], r.dS, policy=Full)
        T.wgmma_gemm(r.faded_dO_rest, tiles.Q[s, :, :], r.dS, policy=Full)
        T.wait_wgmma(2)

    @T.macro
    def end_step(r, tiles, s, piece, slot, u):
        """Makes and stores U, and leaves dS^T in dS."""
        for i, j in T.Parallel(VALUE_TILE, C):
            r.U[i, j] += tiles.gates[s, BackwardGate.DECAY, j] * r.dSK[i, j]
        T.copy(r.U, r.U_16)
        T.wgmma_gemm(r.U_16, tiles.L[s, :, :], r.U, transpose_B=True, policy=Full)
        T.wait_wgmma(0)
        for i, j in T.Parallel(VALUE_TILE, C):
            r.faded_U[i, j] = r.U[i, j] * (-tiles.gates[s, BackwardGate.BETA, j] * tiles.gates[s, BackwardGate.FADE, j])
        T.wgmma_gemm(r.faded_U, tiles.K[s, :, :], r.dS, policy=Full)
        T.copy(r.U, r.U_16)
        store(r.U_16, tiles.U, u[slot, piece.hv, piece.v0 : piece.v0 + VALUE_TILE, :])
        T.wait_wgmma(0)
        for i, j in T.Parallel(VALUE_TILE, K):
            r.dS[i, j] *= tiles.gates[s, BackwardGate.GAMMA, 0]

    @T.macro
    def compute(tiles, ready, piece, has, final, initial, scale, state_product, dh, u):
        """The consumers: the recurrence in reverse, and what it leaves."""
        r = make_registers()
        if has.dht != 0:
            read_state(r.dS, final, piece)
        else:
            T.clear(r.dS)
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
            begin_step(r, tiles, s, piece, slot, scale, state_product, dh)
            end_step(r, tiles, s, piece, slot, u)
            T.barrier_arrive(ready.released[s])
        if has.dh0 != 0:
            write_state(r.dS, initial, piece)
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
        sequences: T.Tensor([N, SequenceColumn.COUNT], "int32"),
        dht: T.Tensor([state_size], "float32"),
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
        with T.Kernel(N, H_v, V // VALUE_TILE, threads=CONSUMERS + PRODUCERS) as (n, hv, tile):
            tiles = make_tiles()
            ready = make_barriers()
            piece = load_piece(sequences, n, hv, tile * VALUE_TILE)
            if T.get_thread_binding() < CONSUMERS:
                strides = (state_stride_v, state_stride_k)
                final = States(dht, H_v, K, V, strides)
                initial = States(dh0, H_v, K, V, strides)
                has = SimpleNamespace(dht=has_dht, dh0=has_dh0)
                compute(tiles, ready, piece, has, final, initial, scale, state_product, dh, u)
            else:
                matrices = (matrices_0, matrices_1, matrices_2, matrices_3)
                load(tiles, ready, piece, group, q, k, grad_o, matrices, h, gates)

    return main
