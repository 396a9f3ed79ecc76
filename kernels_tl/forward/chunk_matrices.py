"""Everything about a chunk that does not need the state, for all chunks in parallel: gates, inverse, attention.

    gates      [chunk_slots, H_v, 5, C] fp32  beta_i and beta_i gamma_i in pairs (two rows), scale gamma_i, gamma_C / gamma_i, and
                                    gamma_C with the log2 norm bound of device/segments.cuh behind it; with the l2norm
                                    the factors of keys and queries hold 1 / their norm as well
    matrices   [chunk_slots, H_v, 2, MATRIX]  (A * D - I)^T, A = (I + stril(diag(beta) K K^T))^-1; scale (tril(Q K^T) * D)^T:
                                    by rows of blocks, of each those from the diagonal on (common.block_row)
    A          [tokens, H_v, C]           the op's output, if wanted (low_level): row i of a chunk's A at token i
    g_cumsum   [tokens, H_v] fp32         likewise, b_i = g_1 + ... + g_i

D_ij = exp(b_i - b_j) for i >= j and 0 above, formed from differences, so it never overflows.  A * D is
diag(gamma) A diag(1/gamma), so the gates never enter the inverse; its unit diagonal is left out, so that products with
it round only what is small.  Rows that no sequence covers get zeros in A, g_cumsum and o.

With |k| <= 1 and beta <= 2 no entry below A's unit diagonal exceeds beta in size, so 16 bits hold it; with larger keys
entries grow like the product of (beta |k|^2 - 1) over the chunk, and what exceeds the dtype's range becomes inf.

The arithmetic is in device/chunk_matrices.cuh.  A CTA takes `heads` value heads of a group: K K^T and Q K^T are made
once for them, by WGMMA, and go to the places of K and Q; then every warp works on a head of its own, or a team of two
or four warps on one where the heads are 2 or 1.  Shared memory, 56 KB, so that 4 CTAs an SM hide each other's
latencies:

    K 16, later K Q^T and K K^T by blocks 16
    Q 16, later each warp's block column of both matrices, 4 * 4
    diagonal blocks of K K^T 4, of A 4 * 4.25 for 4 heads, b and beta 4 * 0.5 KB

Launched on [chunk slots * H_v / heads], one warpgroup.  The first early_ctas of them find their chunk in cu_seqlens
themselves, while chunk_plan runs.
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as COMMON,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    SWIZZLE_NONE,
    C,
    block_row,
    descriptor,
    dims,
    element_type,
    extern,
)
from kernels_tl.layout import (
    BLOCK,
    PADDING,
    ChunkColumn,
    ForwardGate,
)

PASS_CONFIGS = COMMON | {"tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}
EXPLICIT_FENCES = True
PRELUDE = """
#include "device/chunk_matrices.cuh"
#include "device/early_plan.cuh"
"""

THREADS = 128
WARPS = THREADS // 32
BARRIER = 8
DIAGONAL, INVERSE = 256 + 4, 256 + 16  # floats from one block to the next, as in the header
DIAGONALS, INVERSES = 3 * DIAGONAL + 256, 3 * INVERSE + 256
SWIZZLES = (SWIZZLE_128B, SWIZZLE_NONE, SWIZZLE_64B, SWIZZLE_32B)  # of rows of blocks of 128, 96, 64 and 32 bytes


def chunk_matrices(dtype, K, V, normalize):
    tokens, H_k, H_v, chunk_slots, offset_words = dims("tokens", "H_k", "H_v", "chunk_slots", "offset_words")
    element = element_type(dtype)
    norm = "true" if normalize else "false"
    Full = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def main(
        q: T.Tensor([tokens, H_k, K], dtype),
        k: T.Tensor([tokens, H_k, K], dtype),
        g: T.Tensor([tokens, H_v], "float32"),
        beta: T.Tensor([tokens, H_v], "float32"),
        chunks: T.Tensor([chunk_slots, ChunkColumn.COUNT], "int32"),
        offsets: T.Tensor([offset_words], "int32"),
        gates: T.Tensor([chunk_slots, H_v, ForwardGate.COUNT, C], "float32"),
        matrices_0: block_row(chunk_slots, H_v, 0, dtype),
        matrices_1: block_row(chunk_slots, H_v, 1, dtype),
        matrices_2: block_row(chunk_slots, H_v, 2, dtype),
        matrices_3: block_row(chunk_slots, H_v, 3, dtype),
        o: T.Tensor([tokens, H_v, V], dtype),
        A: T.Tensor([tokens, H_v, C], dtype),
        g_cumsum: T.Tensor([tokens, H_v], "float32"),
        group: T.int32,  # H_v / H_k
        heads: T.int32,  # a CTA: a divisor of group, at most 4
        scale: T.float32,
        low_level: T.int32,
        early_ctas: T.int32,
        N: T.int32,
        has_offsets: T.int32,
        wide_offsets: T.int32,  # of 64 bits
        uniform_length: T.int32,
    ):
        with T.Kernel(chunk_slots * T.truncdiv(H_v, heads), threads=THREADS, prelude=PRELUDE) as block:
            K_s = T.alloc_shared([C, K], dtype)  # then blocks of the products
            Q_s = T.alloc_shared([C, K], dtype)  # then block columns of the matrices
            diagonals_s = T.alloc_shared([DIAGONALS], "float32")
            inverses_s = T.alloc_shared([WARPS, INVERSES], "float32")  # before them the norms
            gates_s = T.alloc_shared([WARPS, 2, C], "float32")
            loaded = T.alloc_barrier(THREADS)
            T.annotate_min_blocks_per_sm(4)
            KK = T.alloc_fragment([C, C], "float32")
            KQ = T.alloc_fragment([C, C], "float32")

            tx = T.get_thread_binding()
            lane = tx % 32
            parts = T.alloc_var("int32", init=T.truncdiv(T.Cast("int32", H_v), heads))
            slot = T.alloc_var("int32", init=T.truncdiv(block, parts))
            first = T.alloc_var("int32", init=(block - slot * parts) * heads)
            hk = T.alloc_var("int32", init=T.truncdiv(first, group))
            found = T.alloc_local([ChunkColumn.COUNT], "int32")
            if block < early_ctas:
                extern(
                    "find_chunk",
                    found.data,
                    slot,
                    T.access_ptr(offsets[0], "r"),
                    has_offsets,
                    wide_offsets,
                    N,
                    T.Cast("int32", tokens),
                    uniform_length,
                )
            else:
                T.pdl_sync()
                for i in T.unroll(ChunkColumn.COUNT):
                    found[i] = chunks[slot, i]
            row = T.alloc_var("int32", init=found[ChunkColumn.ROW])
            length = T.alloc_var("int32", init=found[ChunkColumn.LENGTH])
            valid = T.alloc_var("int32", init=T.if_then_else(low_level != 0, length, 0))  # rows of A and g_cumsum
            warp = T.alloc_var("int32", init=T.call_extern("int32", "flash_qla::device::warp_index"))
            warps = T.alloc_var("int32", init=T.if_then_else(heads < 3, WARPS // heads, 1))  # a team
            team = T.alloc_var("int32", init=T.truncdiv(warp, warps))
            member = T.alloc_var("int32", init=warp - team * warps)
            if found[ChunkColumn.SEQUENCE] == PADDING:
                T.pdl_sync()
                T.pdl_trigger()
                for l in T.serial(heads):
                    for i, j in T.Parallel(C, V):
                        if i < length:
                            o[row + i, first + l, j] = 0
                    if low_level != 0:
                        for i, j in T.Parallel(C, C):
                            if i < length:
                                A[row + i, first + l, j] = 0
                        if tx < length:
                            g_cumsum[row + tx, first + l] = 0.0
            else:
                T.tma_copy(k[row : row + C, hk, :], K_s, barrier=loaded)
                T.tma_copy(q[row : row + C, hk, :], Q_s, barrier=loaded)
                T.barrier_arrive(loaded)
                if warp == 0:
                    extern(
                        "load_gates",
                        T.access_ptr(gates_s, "rw"),
                        T.access_ptr(g[row, first], "r"),
                        T.access_ptr(g_cumsum[row, first], "w"),
                        H_v,
                        heads,
                        length,
                        valid,
                    )
                if warp == 1:
                    extern(
                        "load_beta",
                        T.access_ptr(gates_s, "rw"),
                        T.access_ptr(beta[row, first], "r"),
                        H_v,
                        heads,
                        length,
                    )
                T.barrier_wait(loaded, 0)
                if length < C:
                    # Rows behind the chunk's last token belong to others, whatever they hold.
                    for i, j in T.Parallel(C, K):
                        if i >= length:
                            K_s[i, j] = 0
                    for i, j in T.Parallel(C, K):
                        if i >= length:
                            Q_s[i, j] = 0
                    T.fence_proxy_async()
                    T.sync_threads(BARRIER, THREADS)
                T.wgmma_gemm(K_s, K_s, KK, transpose_B=True, policy=Full, clear_accum=True)
                T.wgmma_gemm(K_s, Q_s, KQ, transpose_B=True, policy=Full, clear_accum=True)
                T.wait_wgmma(0)
                T.pdl_sync()  # before its successors may begin, which take the plan for granted
                T.pdl_trigger()
                rstd_k_low = T.alloc_var("float32", init=1.0)
                rstd_k_high = T.alloc_var("float32", init=1.0)
                scale_q_low = T.alloc_var("float32", init=scale)
                scale_q_high = T.alloc_var("float32", init=scale)
                if normalize:
                    extern(f"chunk_norms<{element}>", T.access_ptr(inverses_s, "rw"), KK.data, T.access_ptr(Q_s, "r"))
                    T.sync_threads(BARRIER, THREADS)
                    rstd_k_low = inverses_s[0, lane]
                    rstd_k_high = inverses_s[0, lane + 32]
                    scale_q_low = scale * inverses_s[0, C + lane]
                    scale_q_high = scale * inverses_s[0, C + lane + 32]
                else:
                    T.sync_threads(BARRIER, THREADS)  # K and Q have been read
                extern(
                    f"store_products<{element}, {norm}>",
                    KK.data,
                    KQ.data,
                    T.access_ptr(inverses_s, "r"),
                    T.access_ptr(K_s, "rw"),
                    T.access_ptr(diagonals_s, "rw"),
                    scale,
                )
                T.sync_threads(BARRIER, THREADS)

                if team < heads:
                    hv = first + team
                    if member == 0:
                        extern(
                            "store_gates",
                            T.access_ptr(gates_s[team, 0, 0], "r"),
                            T.access_ptr(diagonals_s, "r"),
                            rstd_k_low,
                            rstd_k_high,
                            scale_q_low,
                            scale_q_high,
                            T.access_ptr(gates[slot, hv, 0, 0], "w"),
                        )
                    # Two blocks a warp, one in a team of four.
                    for step in T.serial(T.if_then_else(warps == 1, 2, 1)):
                        diagonal = T.alloc_var(
                            "int32", init=T.if_then_else(warps == WARPS, member, 2 * (member + step))
                        )
                        extern(
                            f"invert_blocks<{element}>",
                            T.access_ptr(diagonals_s[diagonal * DIAGONAL], "r"),
                            DIAGONAL,
                            T.access_ptr(inverses_s[team, diagonal * INVERSE], "rw"),
                            T.access_ptr(gates_s[team, 1, diagonal * BLOCK], "r"),
                            T.if_then_else(warps == WARPS, 1, 2),
                        )
                    extern("team_sync", team, warps)
                    extern(
                        f"make_columns<{element}>",
                        descriptor(matrices_0, [BLOCK, C], SWIZZLES[0]),
                        descriptor(matrices_1, [BLOCK, C - BLOCK], SWIZZLES[1]),
                        descriptor(matrices_2, [BLOCK, C - 2 * BLOCK], SWIZZLES[2]),
                        descriptor(matrices_3, [BLOCK, C - 3 * BLOCK], SWIZZLES[3]),
                        descriptor(A, [C, 1, BLOCK], SWIZZLES[3]),
                        warps,
                        member,
                        T.access_ptr(K_s, "r"),
                        T.access_ptr(inverses_s[team, 0], "r"),
                        T.access_ptr(gates_s[team, 0, 0], "r"),
                        T.access_ptr(Q_s, "rw"),
                        T.access_ptr(A[row, hv, 0], "w"),
                        slot,
                        hv,
                        row,
                        H_v,
                        valid,
                    )

    return main
