"""The chunk inverse A = (I + stril(diag(beta) K K^T))^-1, gate-free, and its gated form A * D - I.

    A              [R, HV, C]      the op's output: row i of a chunk's A at token i; zero on padding rows.  In a partial
                                   chunk the columns behind its last token are zero
    gated_inverse  [NT, HV, C, C]  A * D - I, with D_ij = exp(b_i - b_j) for i >= j and 0 above: what V_new needs. A * D
                                   is diag(gamma) A diag(1/gamma), so the gates never enter the inverse; its unit
                                   diagonal is left out, so that products with it round only what is small

The inverse is blockwise, in fp32 on the CUDA cores: the four 16 x 16 diagonal blocks by forward substitution, one
thread a column; then 16 -> 32 -> 64 by X21 = -X22 (L21 X11).
With |k| <= 1 and beta <= 2 no entry below A's unit diagonal exceeds beta in size, so 16 bits hold it; with larger keys
entries grow like the product of (beta |k|^2 - 1) over the chunk, and what exceeds the dtype's range becomes inf.

    shared memory a CTA: K 16 + L 17 + X 17 KB = 50 KB, so 4 CTAs an SM hide each other's latencies

Launched on [chunk slots, HV], one warpgroup.
"""

import tilelang.language as T

from kernels_tl.common import (
    CHUNK_LENGTH,
    CHUNK_ROW,
    CHUNK_SEQ,
    GATE_BETA,
    GATE_LOG,
    GATE_ROWS,
    PADDING,
    PASS_CONFIGS as PASS_CONFIGS,
    TABLE_COLUMNS,
    C,
    D,
    dims,
)

THREADS = 128
BLOCK = 16  # the substituted blocks
PITCH = C + 4  # of fp32 rows in shared memory: 16-byte aligned, and rows four banks apart


@T.macro
def product(out, scale, left, left_row, left_column, right, right_row, right_column, row, column, size, threads, tx):
    """out[row.., column..] = scale * left[..] @ right[..], size x size, by `threads` threads of which this is tx.

    A thread makes `rows` x 4 entries: a 16-byte load of the right factor serves all its rows.
    """
    rows = size * size // (4 * threads)
    i = tx // (size // 4)
    j = tx % (size // 4) * 4
    acc = T.alloc_local([rows, 4], "float32")
    T.clear(acc)
    for l in T.unroll(size):
        for r in T.unroll(rows):
            for c in T.unroll(4):
                acc[r, c] += (
                    left[left_row + i + r * (size // rows), left_column + l]
                    * right[right_row + l, right_column + j + c]
                )
    for r in T.unroll(rows):
        for c in T.vectorized(4):
            out[row + i + r * (size // rows), column + j + c] = scale * acc[r, c]


def chunk_inverse(dtype):
    R, HK, HV, NT = dims("R", "HK", "HV", "NT")

    @T.prim_func
    def main(
        k: T.Tensor([R, HK, D], dtype),
        gates: T.Tensor([NT, HV, GATE_ROWS, C], "float32"),
        chunks: T.Tensor([NT, TABLE_COLUMNS], "int32"),
        A: T.Tensor([R, HV, C], dtype),
        gated_inverse: T.Tensor([NT, HV, C, C], dtype),
        group: T.int32,  # HV / HK
        has_A: T.int32,
    ):
        with T.Kernel(NT, HV, threads=THREADS) as (slot, hv):
            K_s = T.alloc_shared([C, D], dtype)
            L_s = T.alloc_shared([C, PITCH], "float32")  # stril(diag(beta) K K^T); above the diagonal, L21 X11
            X_s = T.alloc_shared([C, PITCH], "float32")  # its inverse with the unit diagonal
            beta_s = T.alloc_shared([C], "float32")
            b_s = T.alloc_shared([C], "float32")
            KK = T.alloc_fragment([C, C], "float32")
            x = T.alloc_local([BLOCK], "float32")
            loaded = T.alloc_barrier(THREADS)

            tx = T.get_thread_binding()
            row = chunks[slot, CHUNK_ROW]
            length = chunks[slot, CHUNK_LENGTH]
            if chunks[slot, CHUNK_SEQ] == PADDING:
                if has_A != 0:
                    for i, j in T.Parallel(C, C):
                        if i < length:
                            A[row + i, hv, j] = 0
            else:
                T.tma_copy(k[row : row + C, T.truncdiv(hv, group), :], K_s, barrier=loaded)
                T.barrier_arrive(loaded)
                if tx < C:
                    beta_s[tx] = gates[slot, hv, GATE_BETA, tx]
                    b_s[tx] = gates[slot, hv, GATE_LOG, tx]
                T.barrier_wait(loaded, 0)
                T.wgmma_gemm(K_s, K_s, KK, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                # Rows behind the chunk's last token belong to others: selected away, whatever they hold.
                for i, j in T.Parallel(C, C):
                    L_s[i, j] = T.if_then_else((i > j) & (i < length), beta_s[i] * KK[i, j], 0.0)
                for i, j in T.Parallel(C, C):
                    X_s[i, j] = 0.0
                T.sync_threads()

                if tx < C:
                    block = tx // BLOCK * BLOCK
                    column = tx % BLOCK
                    for i in T.unroll(BLOCK):
                        x[i] = T.if_then_else(column == i, 1.0, 0.0)
                        for j in T.unroll(i):
                            x[i] -= L_s[block + i, block + j] * x[j]
                    for i in T.unroll(BLOCK):
                        X_s[block + i, block + column] = x[i]
                T.sync_threads()
                # All threads take part in both: barriers of a part of the CTA are beyond what racecheck follows.
                for size in (BLOCK, 2 * BLOCK):
                    threads = THREADS // (C // (2 * size))  # a pair's
                    thread = tx % threads
                    top = tx // threads * 2 * size
                    bottom = top + size
                    product(L_s, 1.0, L_s, bottom, top, X_s, top, top, top, bottom, size, threads, thread)
                    T.sync_threads()
                    product(X_s, -1.0, X_s, bottom, bottom, L_s, top, bottom, bottom, top, size, threads, thread)
                    T.sync_threads()

                if has_A != 0:
                    for i, j in T.Parallel(C, C):
                        if i < length:
                            A[row + i, hv, j] = X_s[i, j]
                # Four adjacent entries a thread. The mask may part them, so the compiler would store one by one.
                entries = T.alloc_local([4], dtype)
                for step in T.unroll(C * C // (4 * THREADS)):
                    i = step * (4 * THREADS // C) + tx // (C // 4)
                    j = tx % (C // 4) * 4
                    for c in T.unroll(4):
                        entries[c] = T.if_then_else(
                            (i > j + c) & (i < length), X_s[i, j + c] * T.exp(b_s[i] - b_s[j + c]), 0.0
                        )
                    for c in T.vectorized(4):
                        gated_inverse[slot, hv, i, j + c] = entries[c]

    return main
