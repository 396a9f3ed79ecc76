"""The two 64 x 64 matrices of each chunk that the backward pass multiplies with, chunk-parallel.

    gated_inverse  [chunk_slots, H_v, C, C]  A * D - I, from the A that the forward kept; D_ij = exp(b_i - b_j) for i >= j, else 0
    attention      [chunk_slots, H_v, C, C]  scale * tril(Q K^T) * D

Both are zero in the rows and columns behind a partial chunk's last token. A CTA computes Q K^T once for all value heads
of its group.

    shared memory a CTA: Q 16 + K 16 + two matrices 16 KB = 48 KB, so 4 CTAs an SM hide each other's latencies

Launched on [chunk slots, H_k], one warpgroup.
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as PASS_CONFIGS,
    C,
    dims,
    swizzled,
)
from kernels_tl.layout import (
    PADDING,
    BackwardGate,
    ChunkColumn,
)

THREADS = 128


def replay_matrices(dtype, K):
    tokens, H_k, H_v, chunk_slots = dims("tokens", "H_k", "H_v", "chunk_slots")

    @T.prim_func
    def main(
        q: T.Tensor([tokens, H_k, K], dtype),
        k: T.Tensor([tokens, H_k, K], dtype),
        A: T.Tensor([tokens, H_v, C], dtype),
        gates: T.Tensor([chunk_slots, H_v, BackwardGate.COUNT, C], "float32"),
        chunks: T.Tensor([chunk_slots, ChunkColumn.COUNT], "int32"),
        gated_inverse: T.Tensor([chunk_slots, H_v, C, C], dtype),
        attention: T.Tensor([chunk_slots, H_v, C, C], dtype),
        group: T.int32,  # H_v / H_k
        scale: T.float32,
    ):
        with T.Kernel(chunk_slots, H_k, threads=THREADS) as (slot, hk):
            Q_s = T.alloc_shared([C, K], dtype)
            K_s = T.alloc_shared([C, K], dtype)
            L_s = T.alloc_shared([C, C], dtype)  # A, then A * D - I
            P_s = T.alloc_shared([C, C], dtype)
            b_s = T.alloc_shared([C], "float32")
            T.annotate_layout({L_s: swizzled(L_s), P_s: swizzled(P_s)})
            QK = T.alloc_fragment([C, C], "float32")
            qk_loaded = T.alloc_barrier(THREADS)
            A_loaded = T.alloc_barrier(THREADS)

            row = chunks[slot, ChunkColumn.ROW]
            length = chunks[slot, ChunkColumn.LENGTH]
            if chunks[slot, ChunkColumn.SEQUENCE] != PADDING:
                T.tma_copy(q[row : row + C, hk, :], Q_s, barrier=qk_loaded)
                T.tma_copy(k[row : row + C, hk, :], K_s, barrier=qk_loaded)
                T.barrier_arrive(qk_loaded)
                T.barrier_wait(qk_loaded, 0)
                T.wgmma_gemm(Q_s, K_s, QK, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                for head in T.serial(group):
                    hv = hk * group + head
                    T.tma_store_wait(0)  # the last head's matrices have left
                    T.sync_threads()
                    T.tma_copy(A[row : row + C, hv, :], L_s, barrier=A_loaded)
                    T.barrier_arrive(A_loaded)
                    T.copy(gates[slot, hv, BackwardGate.LOG, :], b_s)
                    T.barrier_wait(A_loaded, head % 2)
                    T.sync_threads()
                    # Rows behind the chunk's last token belong to others: selected away, whatever they hold.
                    for i, j in T.Parallel(C, C):
                        P_s[i, j] = T.if_then_else(
                            (i >= j) & (i < length), QK[i, j] * T.exp(b_s[i] - b_s[j]) * scale, 0.0
                        )
                        L_s[i, j] = T.if_then_else((i > j) & (i < length), L_s[i, j] * T.exp(b_s[i] - b_s[j]), 0.0)
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.tma_copy(L_s, gated_inverse[slot, hv, :, :])
                    T.tma_copy(P_s, attention[slot, hv, :, :])
                T.tma_store_wait(0)

    return main
