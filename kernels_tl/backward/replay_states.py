"""The states again, for the backward: the recurrence over the chunks of each sequence, with the state in registers from
first to last chunk.

Per chunk, in the transposed form that keeps every intermediate in registers as the next WGMMA's A operand
(D the gate matrix; L = A * D - I, strictly lower triangular, comes from replay_matrices):

    h        = S                                     stored, V-first
    R^T      = (V^T - (S^T K^T) diag(gamma)) diag(beta)
    V_new^T  = R^T + R^T L^T                         stored, transposed
    S^T      = gamma_C S^T + (V_new^T diag(gamma_C / gamma)) K

What rounding takes from the factor V_new^T diag(gamma_C / gamma) of the last line makes a second product: it would be
the largest error of S, and dg hangs on S.

Each CTA owns one value tile (64 rows of S^T) of one head of one sequence: one consumer warpgroup that computes and one
producer warp that keeps the next chunks' K, V, L and gates coming by TMA.  128 / 64 = 2 tiles a head give short
sequences and few heads twice the CTAs; their common K and L come from L2.

    shared memory a CTA: stages * (K 16 + V 8 + L 8 + gates 1.25 KB) + h 16 + V_new 8 KB = 90 KB, so 2 CTAs an SM

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
    BackwardGate,
    SequenceColumn,
)

VALUE_TILE = 64  # rows of S^T a CTA: the M of one warpgroup's WGMMA
STAGES = 2
CONSUMERS = 128  # one warpgroup
PRODUCERS = 32  # one warp


def replay_states(dtype, K, V):
    tokens, H_k, H_v, N, chunk_slots, state_size = dims("tokens", "H_k", "H_v", "N", "chunk_slots", "state_size")

    @T.prim_func
    def main(
        k: T.Tensor([tokens, H_k, K], dtype),
        v: T.Tensor([tokens, H_v, V], dtype),
        gates: T.Tensor([chunk_slots, H_v, BackwardGate.COUNT, C], "float32"),
        gated_inverse: T.Tensor([chunk_slots, H_v, C, C], dtype),
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
            K_s = T.alloc_shared([STAGES, C, K], dtype)
            V_s = T.alloc_shared([STAGES, C, VALUE_TILE], dtype)
            L_s = T.alloc_shared([STAGES, C, C], dtype)
            gates_s = T.alloc_shared([STAGES, BackwardGate.COUNT, C], "float32")
            h_s = T.alloc_shared([VALUE_TILE, K], dtype)
            V_new_s = T.alloc_shared([VALUE_TILE, C], dtype)
            # V is read element by element, transposed: swizzled, so that a warp's rows meet different banks.
            T.annotate_layout({V_s: swizzled(V_s)})

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
                S = T.alloc_fragment([VALUE_TILE, K], "float32")  # S^T
                S_16 = T.alloc_fragment([VALUE_TILE, K], dtype)
                acc = T.alloc_fragment([VALUE_TILE, C], "float32")  # S^T K^T
                V_new = T.alloc_fragment([VALUE_TILE, C], "float32")  # V^T, R^T, V_new^T in turn
                V_new_16 = T.alloc_fragment([VALUE_TILE, C], dtype)
                decayed = T.alloc_fragment([VALUE_TILE, C], dtype)  # V_new^T diag(gamma_C / gamma)
                rest = T.alloc_fragment([VALUE_TILE, C], dtype)  # what rounding took from it

                if has_initial_state != 0:
                    for i, j in T.Parallel(VALUE_TILE, K):
                        S[i, j] = initial_state[state + (v0 + i) * state_stride_v + j * state_stride_k]
                else:
                    T.clear(S)

                for c in T.serial(chunks):
                    s = c % STAGES
                    valid = length - c * C
                    T.barrier_wait(loaded[s], (c // STAGES) % 2)
                    if valid < C:
                        # Rows behind the sequence belong to others. Whatever they hold, even NaN, must not meet
                        # the zeros of V_new in the last product.
                        for i, j in T.Parallel(C, K):
                            if i >= valid:
                                K_s[s, i, j] = 0
                        T.fence_proxy_async()
                        T.sync_threads(4, CONSUMERS)

                    T.copy(S, S_16)
                    T.wgmma_gemm(
                        S_16, K_s[s, :, :], acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True
                    )
                    for i, j in T.Parallel(VALUE_TILE, C):
                        V_new[i, j] = V_s[s, j, i]
                    # The last chunk's h has left h_s (its V_new may still be leaving). One thread issued the store and
                    # waits here; the barrier that the compiler puts before the copy tells the others.
                    T.tma_store_wait(1)
                    T.copy(S_16, h_s)
                    T.fence_proxy_async()
                    T.tma_copy(h_s, h[first + c, hv, v0 : v0 + VALUE_TILE, :])
                    T.wait_wgmma(0)

                    for i, j in T.Parallel(VALUE_TILE, C):
                        V_new[i, j] = T.if_then_else(
                            j < valid,
                            gates_s[s, BackwardGate.BETA, j]
                            * (V_new[i, j] - gates_s[s, BackwardGate.GAMMA, j] * acc[i, j]),
                            0.0,
                        )
                    T.copy(V_new, V_new_16)
                    T.wgmma_gemm(V_new_16, L_s[s, :, :], V_new, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(VALUE_TILE, K):
                        S[i, j] *= gates_s[s, BackwardGate.GAMMA, C - 1]
                    T.wait_wgmma(0)

                    for i, j in T.Parallel(VALUE_TILE, C):
                        decayed[i, j] = V_new[i, j] * gates_s[s, BackwardGate.DECAY, j]
                    T.wgmma_gemm(decayed, K_s[s, :, :], S, policy=T.GemmWarpPolicy.FullRow)
                    for i, j in T.Parallel(VALUE_TILE, C):
                        rest[i, j] = V_new[i, j] * gates_s[s, BackwardGate.DECAY, j] - T.Cast("float32", decayed[i, j])
                    T.wgmma_gemm(rest, K_s[s, :, :], S, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(V_new, V_new_16)
                    T.tma_store_wait(1)  # likewise, the last chunk's V_new has left V_new_s
                    T.copy(V_new_16, V_new_s)
                    T.fence_proxy_async()
                    T.tma_copy(V_new_s, v_new[first + c, hv, v0 : v0 + VALUE_TILE, :])
                    T.wait_wgmma(0)
                    T.barrier_arrive(released[s])

                T.tma_store_wait(0)
            else:
                for c in T.serial(chunks):
                    s = c % STAGES
                    t = row + c * C
                    T.barrier_wait(released[s], ((c // STAGES) % 2) ^ 1)
                    T.tma_copy(
                        k[t : t + C, T.truncdiv(hv, group), :], K_s[s, :, :], barrier=loaded[s], leader_scope_threads=32
                    )
                    T.tma_copy(
                        v[t : t + C, hv, v0 : v0 + VALUE_TILE], V_s[s, :, :], barrier=loaded[s], leader_scope_threads=32
                    )
                    T.tma_copy(
                        gated_inverse[first + c, hv, :, :], L_s[s, :, :], barrier=loaded[s], leader_scope_threads=32
                    )
                    T.tma_copy(gates[first + c, hv, :, :], gates_s[s, :, :], barrier=loaded[s], leader_scope_threads=32)
                    T.barrier_arrive(loaded[s])

    return main
