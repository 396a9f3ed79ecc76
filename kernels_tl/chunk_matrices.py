"""Everything about a chunk that does not need the state, for all chunks in parallel: gates, inverse, attention.

    gates      [NT, HV, 5, C] fp32  beta_i and beta_i gamma_i in pairs (two rows), scale gamma_i, gamma_C / gamma_i, and
                                    gamma_C with the log2 norm bound of device/segments.cuh behind it; with the l2norm
                                    the factors of keys and queries hold 1 / their norm as well
    matrices   [NT, HV, 2, C, C]    (A * D - I)^T, A = (I + stril(diag(beta) K K^T))^-1; scale (tril(Q K^T) * D)^T
    A          [R, HV, C]           the op's output, if wanted (low_level): row i of a chunk's A at token i
    g_cumsum   [R, HV] fp32         likewise, b_i = g_1 + ... + g_i

D_ij = exp(b_i - b_j) for i >= j and 0 above, formed from differences, so it never overflows.  A * D is
diag(gamma) A diag(1/gamma), so the gates never enter the inverse; its unit diagonal is left out, so that products with
it round only what is small.  Rows that no sequence covers get zeros in A, g_cumsum and o.

With |k| <= 1 and beta <= 2 no entry below A's unit diagonal exceeds beta in size, so 16 bits hold it; with larger keys
entries grow like the product of (beta |k|^2 - 1) over the chunk, and what exceeds the dtype's range becomes inf.

The arithmetic is in device/chunk_matrices.cuh.  A CTA takes `heads` value heads of a group, whose K K^T and Q K^T are
the same.  Shared memory: K 16 + Q 16 + matrices 16 + L 18 + gates 4 = 70 KB, so 3 CTAs an SM hide each other's
latencies; the diagonal blocks of A come to Q's place.

Launched on [chunk slots * HV / heads], one warpgroup.
"""

import tilelang.language as T

from kernels_tl.common import (
    CHUNK_LENGTH,
    CHUNK_ROW,
    CHUNK_SEQ,
    FORWARD_TOTAL,
    GATE_TABLE_ROWS,
    PADDING,
    PASS_CONFIGS as COMMON,
    TABLE_COLUMNS,
    C,
    D,
    dims,
    element_type,
    extern,
    swizzled,
)

PASS_CONFIGS = COMMON | {"tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}
EXPLICIT_FENCES = True
PRELUDE = """
#include "device/chunk_matrices.cuh"
#include "device/tiles.cuh"
"""

THREADS = 128
BARRIER, L_PITCH = 8, 72  # as in the headers
GATES, B_ROW, BOUND_ROW = 7, 5, 6  # rows of the table in shared memory, and two that stay there


def chunk_matrices(dtype, normalize):
    R, HK, HV, NT = dims("R", "HK", "HV", "NT")
    element = element_type(dtype)
    norm = "true" if normalize else "false"
    Full = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def main(
        q: T.Tensor([R, HK, D], dtype),
        k: T.Tensor([R, HK, D], dtype),
        g: T.Tensor([R, HV], "float32"),
        beta: T.Tensor([R, HV], "float32"),
        chunks: T.Tensor([NT, TABLE_COLUMNS], "int32"),
        gates: T.Tensor([NT, HV, GATE_TABLE_ROWS, C], "float32"),
        matrices: T.Tensor([NT, HV, 2, C, C], dtype),
        o: T.Tensor([R, HV, D], dtype),
        A: T.Tensor([R, HV, C], dtype),
        g_cumsum: T.Tensor([R, HV], "float32"),
        group: T.int32,  # HV / HK
        heads: T.int32,  # a CTA: a divisor of group
        scale: T.float32,
        low_level: T.int32,
    ):
        with T.Kernel(NT * T.truncdiv(HV, heads), threads=THREADS, prelude=PRELUDE) as block:
            K_s = T.alloc_shared([C, D], dtype)
            Q_s = T.alloc_shared([C, D], dtype)
            matrices_s = T.alloc_shared([2, C, C], dtype)
            L_s = T.alloc_shared([C, L_PITCH], "float32")
            T.annotate_layout({matrices_s: swizzled(matrices_s)})
            gates_s = T.alloc_shared([2, GATES, C], "float32")
            norms_s = T.alloc_shared([2, C], "float32")
            loaded = T.alloc_barrier(THREADS)
            T.annotate_min_blocks_per_sm(3)
            KK = T.alloc_fragment([C, C], "float32")
            KQ = T.alloc_fragment([C, C], "float32")
            X = T.alloc_local([32], "float32")

            tx = T.get_thread_binding()
            lane = tx % 32
            parts = T.alloc_var("int32", init=T.truncdiv(T.Cast("int32", HV), heads))
            slot = T.alloc_var("int32", init=T.truncdiv(block, parts))
            first = T.alloc_var("int32", init=(block - slot * parts) * heads)
            hk = T.alloc_var("int32", init=T.truncdiv(first, group))
            row = T.alloc_var("int32", init=chunks[slot, CHUNK_ROW])
            length = T.alloc_var("int32", init=chunks[slot, CHUNK_LENGTH])
            sequence = T.alloc_var("int32", init=chunks[slot, CHUNK_SEQ])
            if sequence == PADDING:
                for l in T.serial(heads):
                    for i, j in T.Parallel(C, D):
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
                g_low = T.alloc_var("float32", init=value_or_zero(g, row, first, HV, lane, length))
                g_high = T.alloc_var("float32", init=value_or_zero(g, row, first, HV, lane + 32, length))
                beta_low = T.alloc_var("float32", init=value_or_zero(beta, row, first, HV, lane, length))
                beta_high = T.alloc_var("float32", init=value_or_zero(beta, row, first, HV, lane + 32, length))
                T.barrier_wait(loaded, 0)
                if length < C:
                    # Rows behind the chunk's last token belong to others, whatever they hold.
                    for i, j in T.Parallel(C, D):
                        if i >= length:
                            K_s[i, j] = 0
                    for i, j in T.Parallel(C, D):
                        if i >= length:
                            Q_s[i, j] = 0
                    T.fence_proxy_async()
                    T.sync_threads(BARRIER, THREADS)
                T.wgmma_gemm(K_s, K_s, KK, transpose_B=True, policy=Full, clear_accum=True)
                T.wgmma_gemm(K_s, Q_s, KQ, transpose_B=True, policy=Full, clear_accum=True)
                T.wait_wgmma(0)
                if normalize:
                    extern(f"chunk_norms<{element}>", T.access_ptr(norms_s, "rw"), KK.data, T.access_ptr(Q_s, "r"))
                    T.sync_threads(BARRIER, THREADS)
                for i in T.serial(-1, heads):
                    hv = first + i
                    if i >= 0:
                        T.tma_store_wait(0)  # the last head's matrices have left; the barriers in between tell all
                        extern(
                            f"invert_diagonal<{element}, {norm}>",
                            KK.data,
                            T.access_ptr(gates_s[i % 2, 0, 0], "rw"),
                            T.access_ptr(norms_s, "r"),
                            T.access_ptr(L_s, "rw"),
                            T.access_ptr(Q_s, "rw"),
                        )
                    if (tx >= THREADS - 32) & (i + 1 < heads):
                        # The next head's gates, by the warp that has the least to do otherwise.
                        extern(
                            f"chunk_gates<{norm}>",
                            T.access_ptr(gates_s[(i + 1) % 2, 0, 0], "rw"),
                            T.access_ptr(norms_s, "r"),
                            g_low,
                            g_high,
                            beta_low,
                            beta_high,
                            scale,
                            T.access_ptr(g_cumsum[row, hv + 1], "w"),
                            HV,
                            T.if_then_else(low_level != 0, length, 0),
                        )
                        if i + 2 < heads:
                            g_low = value_or_zero(g, row, hv + 2, HV, lane, length)
                            g_high = value_or_zero(g, row, hv + 2, HV, lane + 32, length)
                            beta_low = value_or_zero(beta, row, hv + 2, HV, lane, length)
                            beta_high = value_or_zero(beta, row, hv + 2, HV, lane + 32, length)
                    if i >= 0:
                        for l in T.unroll(T.ceildiv(GATE_TABLE_ROWS * C, THREADS)):
                            if l * THREADS + tx < GATE_TABLE_ROWS * C:
                                gates[slot, hv, T.truncdiv(l * THREADS + tx, C), tx % C] = T.if_then_else(
                                    l * THREADS + tx == FORWARD_TOTAL * C + 1,
                                    gates_s[i % 2, B_ROW, C - 1]
                                    + gates_s[i % 2, BOUND_ROW, 0]
                                    + gates_s[i % 2, BOUND_ROW, 1]
                                    + gates_s[i % 2, BOUND_ROW, 2]
                                    + gates_s[i % 2, BOUND_ROW, 3],
                                    gates_s[i % 2, T.truncdiv(l * THREADS + tx, C), tx % C],
                                )
                        extern(f"invert_below<{element}>", X.data, T.access_ptr(L_s, "r"), T.access_ptr(Q_s, "r"))
                        extern(
                            f"gate_matrices<{element}, {norm}>",
                            X.data,
                            KQ.data,
                            T.access_ptr(gates_s[i % 2, 0, 0], "r"),
                            T.access_ptr(norms_s, "r"),
                            T.access_ptr(matrices_s, "rw"),
                            scale,
                        )
                        T.fence_proxy_async()
                        T.sync_threads(BARRIER, THREADS)
                        T.tma_copy(matrices_s, matrices[slot, hv, :, :, :])
                        if low_level != 0:
                            extern(
                                f"store_inverse<{element}>", X.data, T.access_ptr(A[row, hv, 0], "w"), HV * C, length
                            )

                T.tma_store_wait(0)

    return main


def value_or_zero(values, row, hv, stride, token, valid):
    """values[row + token, hv], 0 behind the valid tokens."""
    return T.call_extern(
        "float32", "flash_qla::device::value_or_zero", T.access_ptr(values[row, hv], "r"), stride, token, valid
    )
