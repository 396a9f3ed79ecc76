"""The gradient of the states: the recurrence of replay_states in reverse, with the gradient in registers throughout.

With dS' the gradient of the state at a chunk's end, and P = scale * tril(Q K^T) * D and L = A * D - I from
replay_matrices:

    dh        = dS'                                                  stored for input_gradients, V-first
    passed    = <S, dS'>, by parts of the state                      likewise, from dS' before it is rounded
    dV_new^T  = dO^T P + (dS'^T K^T) diag(gamma_C / gamma)
    U^T       = dV_new^T + dV_new^T L                                stored for input_gradients, transposed
    dS^T      = gamma_C dS'^T + (dO^T diag(scale gamma)) Q - (U^T diag(beta gamma)) K, formed as
                gamma_1 times the same with gamma / gamma_1, so that 16 bits hold the factors however small gamma is

diag(beta) U is the gradient of V - diag(gamma) K S, so also that of V.  The transposed form keeps every intermediate in
registers as the next WGMMA's A operand, as in replay_states.

Each CTA owns one value tile (64 rows of dS^T) of one head of one sequence: one consumer warpgroup that computes and one
producer warp that keeps the previous chunks' tiles coming by TMA.

    shared memory a CTA: stages * (Q 16 + K 16 + dO 8 + L 8 + P 8 + h 16 + gates 1.25 KB) + dh 16 + U 8 KB = 170 KB

Launched on [N, H_v, value tiles].
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as PASS_CONFIGS,
    C,
    dims,
    swizzled,
)
from kernels_tl.layout import (
    STATE_PRODUCT_PARTS,
    BackwardGate,
    SequenceColumn,
)

VALUE_TILE = 64  # rows of dS^T a CTA: the M of one warpgroup's WGMMA
STAGES = 2
CONSUMERS = 128  # one warpgroup
PRODUCERS = 32  # one warp
LANES = 32


def state_gradients(dtype, K, V):
    tokens, H_k, H_v, N, chunk_slots, state_size = dims("tokens", "H_k", "H_v", "N", "chunk_slots", "state_size")

    @T.prim_func
    def main(
        q: T.Tensor([tokens, H_k, K], dtype),
        k: T.Tensor([tokens, H_k, K], dtype),
        grad_o: T.Tensor([tokens, H_v, V], dtype),
        gates: T.Tensor([chunk_slots, H_v, BackwardGate.COUNT, C], "float32"),
        gated_inverse: T.Tensor([chunk_slots, H_v, C, C], dtype),
        attention: T.Tensor([chunk_slots, H_v, C, C], dtype),
        h: T.Tensor([chunk_slots, H_v, V, K], dtype),
        sequences: T.Tensor([N, SequenceColumn.COUNT], "int32"),
        dht: T.Tensor([state_size], "float32"),
        dh0: T.Tensor([state_size], "float32"),
        dh: T.Tensor([chunk_slots, H_v, V, K], dtype),
        u: T.Tensor([chunk_slots, H_v, V, C], dtype),
        passed: T.Tensor([chunk_slots, H_v, STATE_PRODUCT_PARTS], "float32"),
        group: T.int32,  # H_v / H_k
        scale: T.float32,
        state_stride_v: T.int32,  # of both states: the caller's layout is these two numbers
        state_stride_k: T.int32,
        has_dht: T.int32,
        has_dh0: T.int32,
    ):
        with T.Kernel(N, H_v, V // VALUE_TILE, threads=CONSUMERS + PRODUCERS) as (n, hv, tile):
            Q_s = T.alloc_shared([STAGES, C, K], dtype)
            K_s = T.alloc_shared([STAGES, C, K], dtype)
            dO_s = T.alloc_shared([STAGES, C, VALUE_TILE], dtype)
            L_s = T.alloc_shared([STAGES, C, C], dtype)
            P_s = T.alloc_shared([STAGES, C, C], dtype)
            h_s = T.alloc_shared([STAGES, VALUE_TILE, K], dtype)
            gates_s = T.alloc_shared([STAGES, BackwardGate.COUNT, C], "float32")
            dh_s = T.alloc_shared([VALUE_TILE, K], dtype)
            U_s = T.alloc_shared([VALUE_TILE, C], dtype)
            T.annotate_layout({h_s: swizzled(h_s)})  # no gemm reads it

            loaded = T.alloc_barrier([PRODUCERS] * STAGES)  # a stage's tiles have arrived
            released = T.alloc_barrier([CONSUMERS] * STAGES)  # a stage's tiles have been used

            tx = T.get_thread_binding()
            v0 = tile * VALUE_TILE
            row = sequences[n, SequenceColumn.ROW]
            length = sequences[n, SequenceColumn.LENGTH]
            first = sequences[n, SequenceColumn.CHUNK]
            chunks = T.truncdiv(length + (C - 1), C)
            state = (T.Cast("int64", n) * H_v + hv) * (K * V)

            if tx < CONSUMERS:
                dS = T.alloc_fragment([VALUE_TILE, K], "float32")  # dS^T
                dS_16 = T.alloc_fragment([VALUE_TILE, K], dtype)
                acc = T.alloc_fragment([VALUE_TILE, C], "float32")  # dS^T K^T
                local = T.alloc_fragment([VALUE_TILE, C], "float32")  # dO^T P, dV_new^T, U^T in turn
                dV_new_16 = T.alloc_fragment([VALUE_TILE, C], dtype)  # dV_new^T, then U^T
                # dO^T diag(scale gamma / gamma_1) in two parts: rounded to one, it would be the largest error of dS
                dO_16 = T.alloc_fragment([VALUE_TILE, C], dtype)
                dO_rest = T.alloc_fragment([VALUE_TILE, C], dtype)
                dR_16 = T.alloc_fragment([VALUE_TILE, C], dtype)  # -U^T diag(beta gamma / gamma_1)

                if has_dht != 0:
                    for i, j in T.Parallel(VALUE_TILE, K):
                        dS[i, j] = dht[state + (v0 + i) * state_stride_v + j * state_stride_k]
                else:
                    T.clear(dS)

                for step in T.serial(chunks):
                    c = chunks - 1 - step
                    s = step % STAGES
                    valid = length - c * C
                    T.barrier_wait(loaded[s], (step // STAGES) % 2)
                    if valid < C:
                        # Rows behind the sequence belong to others. Whatever they hold, even NaN, must not meet
                        # the zeros of the other factors.
                        for i, j in T.Parallel(C, K):
                            if i >= valid:
                                Q_s[s, i, j] = 0
                        for i, j in T.Parallel(C, K):
                            if i >= valid:
                                K_s[s, i, j] = 0
                        for i, j in T.Parallel(C, VALUE_TILE):
                            if i >= valid:
                                dO_s[s, i, j] = 0
                        T.fence_proxy_async()
                        T.sync_threads(4, CONSUMERS)

                    T.copy(dS, dS_16)
                    T.wgmma_gemm(
                        dS_16, K_s[s, :, :], acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True
                    )
                    S_dS = T.alloc_var("float32", init=0.0)
                    for i, j in T.Parallel(VALUE_TILE, K):
                        S_dS += dS[i, j] * h_s[s, i, j]
                    for r in T.unroll(5):
                        S_dS = S_dS + T.shfl_xor(S_dS, 1 << r)
                    if tx % LANES == 0:
                        passed[first + c, hv, tile * (CONSUMERS // LANES) + tx // LANES] = S_dS
                    T.wgmma_gemm(
                        dO_s[s, :, :],
                        P_s[s, :, :],
                        local,
                        transpose_A=True,
                        policy=T.GemmWarpPolicy.FullRow,
                        clear_accum=True,
                    )
                    # The last chunk's dh has left dh_s (its U may still be leaving). One thread issued the store
                    # and waits here; the barrier that the compiler puts before the copy tells the others.
                    T.tma_store_wait(1)
                    T.copy(dS_16, dh_s)
                    T.fence_proxy_async()
                    T.tma_copy(dh_s, dh[first + c, hv, v0 : v0 + VALUE_TILE, :])
                    for i, j in T.Parallel(VALUE_TILE, C):
                        dO_j = dO_s[s, j, i] * (gates_s[s, BackwardGate.FADE, j] * scale)
                        dO_16[i, j] = dO_j
                        dO_rest[i, j] = dO_j - T.Cast("float32", dO_16[i, j])
                    for i, j in T.Parallel(VALUE_TILE, K):
                        dS[i, j] *= gates_s[s, BackwardGate.FADE, C - 1]
                    T.wgmma_gemm(dO_16, Q_s[s, :, :], dS, policy=T.GemmWarpPolicy.FullRow)
                    T.wgmma_gemm(dO_rest, Q_s[s, :, :], dS, policy=T.GemmWarpPolicy.FullRow)
                    T.wait_wgmma(2)

                    for i, j in T.Parallel(VALUE_TILE, C):
                        local[i, j] += gates_s[s, BackwardGate.DECAY, j] * acc[i, j]
                    T.copy(local, dV_new_16)
                    T.wgmma_gemm(dV_new_16, L_s[s, :, :], local, policy=T.GemmWarpPolicy.FullRow)
                    T.wait_wgmma(0)

                    for i, j in T.Parallel(VALUE_TILE, C):
                        dR_16[i, j] = local[i, j] * (
                            -gates_s[s, BackwardGate.BETA, j] * gates_s[s, BackwardGate.FADE, j]
                        )
                    T.wgmma_gemm(dR_16, K_s[s, :, :], dS, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(local, dV_new_16)
                    T.tma_store_wait(1)  # likewise, the last chunk's U has left U_s
                    T.copy(dV_new_16, U_s)
                    T.fence_proxy_async()
                    T.tma_copy(U_s, u[first + c, hv, v0 : v0 + VALUE_TILE, :])
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(VALUE_TILE, K):
                        dS[i, j] *= gates_s[s, BackwardGate.GAMMA, 0]
                    T.barrier_arrive(released[s])

                if has_dh0 != 0:
                    for i, j in T.Parallel(VALUE_TILE, K):
                        dh0[state + (v0 + i) * state_stride_v + j * state_stride_k] = dS[i, j]
                T.tma_store_wait(0)
            else:
                for step in T.serial(chunks):
                    c = chunks - 1 - step
                    s = step % STAGES
                    t = row + c * C
                    T.barrier_wait(released[s], ((step // STAGES) % 2) ^ 1)
                    for target, source in (
                        (Q_s[s, :, :], q[t : t + C, T.truncdiv(hv, group), :]),
                        (K_s[s, :, :], k[t : t + C, T.truncdiv(hv, group), :]),
                        (dO_s[s, :, :], grad_o[t : t + C, hv, v0 : v0 + VALUE_TILE]),
                        (L_s[s, :, :], gated_inverse[first + c, hv, :, :]),
                        (P_s[s, :, :], attention[first + c, hv, :, :]),
                        (h_s[s, :, :], h[first + c, hv, v0 : v0 + VALUE_TILE, :]),
                        (gates_s[s, :, :], gates[first + c, hv, :, :]),
                    ):
                        T.tma_copy(source, target, barrier=loaded[s], leader_scope_threads=32)
                    T.barrier_arrive(loaded[s])

    return main
