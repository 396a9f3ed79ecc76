"""The l2norm of the rows of queries or keys, in fp32, for the backward:

    rstd = 1 / sqrt(rowsum(x * x) + eps)        eps as in transformers
    y    = diag(rstd) x

    q, k        [rows, key_dim]        x, rows = tokens * H_k
    normalized  [2, rows, key_dim]     y of both
    rstd        [2, rows] fp32         likewise

Each warp takes a row.

Launched on [rows / 8, 2].
"""

import tilelang.language as T

from kernels_tl.common import PASS_CONFIGS as PASS_CONFIGS, dims
from kernels_tl.layout import NORM_EPS

WARP = 32  # threads
WARPS = 8  # of a CTA


@T.macro
def warp_sum(number):
    """The sum of a number over the lanes of a warp, in all of them."""
    total = T.alloc_var("float32", init=number)
    for bit in T.unroll(5):
        total += T.shfl_xor(total, 1 << bit)
    return total


def l2norm(dtype, K):
    rows, key_dim = dims("rows", "key_dim")
    CHANNELS = K // WARP  # of a lane

    @T.macro
    def normalize(row, column, which, x, normalized, rstd):
        values = T.alloc_local([CHANNELS], "float32")
        squares = T.alloc_var("float32", init=0.0)
        for i in T.unroll(CHANNELS):
            values[i] = 0.0
        if column < T.Cast("int32", key_dim):
            for i in T.vectorized(CHANNELS):
                values[i] = x[row, column + i]
        for i in T.unroll(CHANNELS):
            squares += values[i] * values[i]
        factor = T.alloc_var("float32", init=T.rsqrt(warp_sum(squares) + NORM_EPS))
        if column < T.Cast("int32", key_dim):
            for i in T.vectorized(CHANNELS):
                normalized[which, row, column + i] = values[i] * factor
        if column == 0:
            rstd[which, row] = factor

    @T.prim_func
    def main(
        q: T.Tensor([rows, key_dim], dtype),
        k: T.Tensor([rows, key_dim], dtype),
        normalized: T.Tensor([2, rows, key_dim], dtype),
        rstd: T.Tensor([2, rows], "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, WARPS), 2, threads=WARPS * WARP) as (cta, which):
            row = cta * WARPS + T.get_thread_binding() // WARP
            column = T.get_thread_binding() % WARP * CHANNELS
            if row < rows:
                if which == 0:
                    normalize(row, column, 0, q, normalized, rstd)
                else:
                    normalize(row, column, 1, k, normalized, rstd)

    return main
