"""The backward of the l2norm: of the gradients of the normalised rows y = x / |x|, in their place, those of x:

    dx = rstd (dy - y rowsum(y * dy))

    normalized, rstd  [2, rows, key_dim], [2, rows] fp32    y and 1 / |x| of q and k, by l2norm; rows = tokens * H_k
    dq, dk            [rows, key_dim]                       dy, then dx

A half-warp takes a row.

Launched on [rows / 16, 2].
"""

import tilelang.language as T

from kernels_tl.common import PASS_CONFIGS as PASS_CONFIGS, dims

ROWS = 16  # of a CTA
LANES = 16  # of a row


def l2norm_backward(dtype, K):
    rows, key_dim = dims("rows", "key_dim")
    CHANNELS = K // LANES  # of a lane: 16 bytes where K is 128

    @T.macro
    def replace(row, column, which, normalized, rstd, gradient):
        y = T.alloc_local([CHANNELS], "float32")
        dy = T.alloc_local([CHANNELS], "float32")
        product = T.alloc_var("float32", init=0.0)
        size = T.alloc_var("float32", init=0.0)
        for i in T.unroll(CHANNELS):
            y[i] = 0.0
            dy[i] = 0.0
        if column < T.Cast("int32", key_dim):
            for i in T.vectorized(CHANNELS):
                y[i] = normalized[which, row, column + i]
            for i in T.vectorized(CHANNELS):
                dy[i] = gradient[row, column + i]
        factor = T.alloc_var("float32", init=rstd[which, row])
        for i in T.unroll(CHANNELS):
            product += y[i] * dy[i]
            size += T.abs(dy[i])
        for bit in T.unroll(LANES.bit_length() - 1):
            product += T.shfl_xor(product, 1 << bit)
            size += T.shfl_xor(size, 1 << bit)
        # Rows that no sequence covers have zeros, and anything, even NaN, in y.
        if (size != 0.0) & (column < T.Cast("int32", key_dim)):
            for i in T.unroll(CHANNELS):
                dy[i] = factor * (dy[i] - y[i] * product)
            for i in T.vectorized(CHANNELS):
                gradient[row, column + i] = dy[i]

    @T.prim_func
    def main(
        normalized: T.Tensor([2, rows, key_dim], dtype),
        rstd: T.Tensor([2, rows], "float32"),
        dq: T.Tensor([rows, key_dim], dtype),
        dk: T.Tensor([rows, key_dim], dtype),
    ):
        with T.Kernel(T.ceildiv(rows, ROWS), 2, threads=ROWS * LANES) as (cta, which):
            row = cta * ROWS + T.get_thread_binding() // LANES
            column = T.get_thread_binding() % LANES * CHANNELS
            if row < rows:
                if which == 0:
                    replace(row, column, 0, normalized, rstd, dq)
                else:
                    replace(row, column, 1, normalized, rstd, dk)

    return main
