"""The output: O = scale * [ diag(gamma) Q S + (tril(Q K^T) * D) V_new ], chunk-parallel.

S is the state at the chunk's start (h, V-first) and V_new^T comes from chunk_states; D_ij = exp(b_i - b_j) is formed
from differences for i >= j alone, so it never overflows.  Padding rows get zeros.

    shared memory a CTA: Q 16 + K 16 + h 32 + V_new 16 + O 16 KB = 96 KB, so 2 CTAs an SM

Launched on [chunk slots, HV], one warpgroup.
"""

import tilelang.language as T

from kernels_tl.common import (
    CHUNK_LENGTH,
    CHUNK_ROW,
    CHUNK_SEQ,
    GATE_LOG,
    GATE_ROWS,
    PADDING,
    PASS_CONFIGS as PASS_CONFIGS,
    TABLE_COLUMNS,
    C,
    D,
    dims,
    swizzled,
)

THREADS = 128


def chunk_output(dtype):
    R, HK, HV, NT, h_slots = dims("R", "HK", "HV", "NT", "h_slots")

    @T.prim_func
    def main(
        q: T.Tensor([R, HK, D], dtype),
        k: T.Tensor([R, HK, D], dtype),
        gates: T.Tensor([NT, HV, GATE_ROWS, C], "float32"),
        chunks: T.Tensor([NT, TABLE_COLUMNS], "int32"),
        h: T.Tensor([h_slots, HV, D, D], dtype),
        v_new: T.Tensor([NT, HV, D, C], dtype),
        o: T.Tensor([R, HV, D], dtype),
        group: T.int32,  # HV / HK
        scale: T.float32,
    ):
        with T.Kernel(NT, HV, threads=THREADS) as (slot, hv):
            Q_s = T.alloc_shared([C, D], dtype)
            K_s = T.alloc_shared([C, D], dtype)
            h_s = T.alloc_shared([D, D], dtype)
            V_new_s = T.alloc_shared([D, C], dtype)
            O_s = T.alloc_shared([C, D], dtype)
            b_s = T.alloc_shared([C], "float32")
            T.annotate_layout({O_s: swizzled(O_s)})
            P = T.alloc_fragment([C, C], "float32")  # Q K^T, then the attention matrix
            P_16 = T.alloc_fragment([C, C], dtype)
            O = T.alloc_fragment([C, D], "float32")
            qk_loaded = T.alloc_barrier(THREADS)
            state_loaded = T.alloc_barrier(THREADS)

            row = chunks[slot, CHUNK_ROW]
            length = chunks[slot, CHUNK_LENGTH]
            if chunks[slot, CHUNK_SEQ] == PADDING:
                for i, j in T.Parallel(C, D):
                    if i < length:
                        o[row + i, hv, j] = 0
            else:
                T.tma_copy(q[row : row + C, T.truncdiv(hv, group), :], Q_s, barrier=qk_loaded)
                T.tma_copy(k[row : row + C, T.truncdiv(hv, group), :], K_s, barrier=qk_loaded)
                T.barrier_arrive(qk_loaded)
                T.tma_copy(h[slot, hv, :, :], h_s, barrier=state_loaded)
                T.tma_copy(v_new[slot, hv, :, :], V_new_s, barrier=state_loaded)
                T.barrier_arrive(state_loaded)
                T.copy(gates[slot, hv, GATE_LOG, :], b_s)

                T.barrier_wait(qk_loaded, 0)
                T.wgmma_gemm(Q_s, K_s, P, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                T.barrier_wait(state_loaded, 0)
                T.wgmma_gemm(Q_s, h_s, O, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, C):
                    P_16[i, j] = T.if_then_else((i >= j) & (i < length), P[i, j] * T.exp(b_s[i] - b_s[j]) * scale, 0.0)
                T.wait_wgmma(0)
                for i, j in T.Parallel(C, D):
                    O[i, j] *= T.exp(b_s[i]) * scale
                T.wgmma_gemm(P_16, V_new_s, O, transpose_B=True)
                T.wait_wgmma(0)
                T.copy(O, O_s)
                for i, j in T.Parallel(C, D):
                    if i < length:
                        o[row + i, hv, j] = O_s[i, j]

    return main
