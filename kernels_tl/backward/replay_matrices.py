"""The two 64 x 64 matrices of each chunk that the backward multiplies with, chunk-parallel, from the A that the forward
kept, with D_ij = exp(b_i - b_j) for i >= j, else 0:

    L = A * D - I                     gated_inverse  [chunk_slots, H_v, C, C]
    P = scale * tril(Q K^T) * D       attention      [chunk_slots, H_v, C, C]

Both are zero in the rows and columns behind a partial chunk's last token. A CTA computes Q K^T once for all value heads
of its group. Its shared memory is small enough for 4 CTAs an SM, which hide each other's latencies.

Launched on [chunk slots, H_k].
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as PASS_CONFIGS,
    C,
    dims,
)
from kernels_tl.cta import barriers, shared
from kernels_tl.layout import (
    PADDING,
    BackwardGate,
    ChunkColumn,
)

THREADS = 128  # one warpgroup, which does everything


def replay_matrices(dtype, K):
    tokens, H_k, H_v, chunk_slots = dims("tokens", "H_k", "H_v", "chunk_slots")

    def make_tiles():
        return shared(
            48.25,
            Q=([C, K], dtype),
            K=([C, K], dtype),
            L=([C, C], dtype),  # A, then L
            P=([C, C], dtype),
            b=([C], "float32"),
            swizzle=("L", "P"),
        )

    def make_barriers():
        return barriers(
            qk_loaded=[THREADS],  # Q and K have arrived
            A_loaded=[THREADS],  # a head's A
        )

    def D(b, i, j):
        return T.exp(b[i] - b[j])

    @T.macro
    def make(tiles, QK, length, scale):
        """L and P of a head. Rows behind the chunk's last token belong to others: selected away, whatever they hold."""
        for i, j in T.Parallel(C, C):
            tiles.P[i, j] = T.if_then_else((i >= j) & (i < length), QK[i, j] * D(tiles.b, i, j) * scale, 0.0)
            tiles.L[i, j] = T.if_then_else((i > j) & (i < length), tiles.L[i, j] * D(tiles.b, i, j), 0.0)

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
            tiles = make_tiles()
            ready = make_barriers()
            QK = T.alloc_fragment([C, C], "float32")
            row = chunks[slot, ChunkColumn.ROW]
            length = chunks[slot, ChunkColumn.LENGTH]
            if chunks[slot, ChunkColumn.SEQUENCE] != PADDING:
                T.tma_copy(q[row : row + C, hk, :], tiles.Q, barrier=ready.qk_loaded)
                T.tma_copy(k[row : row + C, hk, :], tiles.K, barrier=ready.qk_loaded)
                T.barrier_arrive(ready.qk_loaded)
                T.barrier_wait(ready.qk_loaded, 0)
                T.wgmma_gemm(tiles.Q, tiles.K, QK, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                for head in T.serial(group):
                    hv = hk * group + head
                    T.tma_store_wait(0)  # the last head's matrices have left
                    T.sync_threads()
                    T.tma_copy(A[row : row + C, hv, :], tiles.L, barrier=ready.A_loaded)
                    T.barrier_arrive(ready.A_loaded)
                    T.copy(gates[slot, hv, BackwardGate.LOG, :], tiles.b)
                    T.barrier_wait(ready.A_loaded, head % 2)
                    T.sync_threads()
                    make(tiles, QK, length, scale)
                    T.fence_proxy_async()
                    T.sync_threads()
                    T.tma_copy(tiles.L, gated_inverse[slot, hv, :, :])
                    T.tma_copy(tiles.P, attention[slot, hv, :, :])
                T.tma_store_wait(0)

    return main
