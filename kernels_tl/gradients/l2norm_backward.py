"""The backward of the l2norm y = x / |x|, in place: dy becomes dx.

    dx = rstd (dy - y rowsum(y * dy))        rstd = 1 / |x|

    normalized  [2, rows, pieces, 8] 16-bit   y of q, then of k, by l2norm
    rstd        [2, rows] fp32                of q, then of k, by l2norm
    dq, dk      [rows, pieces, 8] 16-bit      dy, then dx; rows = tokens * H_k

backward.cpp launches [rows / ROWS, 2] CTAs: ROWS rows of dq or of dk each. A lane takes a piece of a row.
"""

from functools import partial

import tilelang.language as T

from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, dims
from kernels_tl.gradients.l2norm import lanes_and_rows, sum_of_lanes, take_row
from kernels_tl.layout import NORM_PIECE


def l2norm_backward(dtype, K):
    rows, pieces = dims("rows", "pieces")
    LANES, ROWS = lanes_and_rows(K)

    @T.macro
    def replace(normalized, rstd, row, piece, there, which, gradient):
        y = T.alloc_local([NORM_PIECE], "float32")
        dy = T.alloc_local([NORM_PIECE], "float32")
        products = T.alloc_var("float32", init=0.0)
        sizes = T.alloc_var("float32", init=0.0)
        for i in T.unroll(NORM_PIECE):
            y[i] = 0.0
            dy[i] = 0.0
        if there:
            for i in T.vectorized(NORM_PIECE):
                y[i] = normalized[which, row, piece, i]
            for i in T.vectorized(NORM_PIECE):
                dy[i] = gradient[row, piece, i]
        for i in T.unroll(NORM_PIECE):
            products += y[i] * dy[i]
            sizes += T.abs(dy[i])
        product = T.alloc_var("float32", init=sum_of_lanes(products, LANES))
        size = T.alloc_var("float32", init=sum_of_lanes(sizes, LANES))
        # Rows that no sequence covers have dy = 0, and y may be NaN. They stay 0.
        if there & (size != 0.0):
            factor = T.alloc_var("float32", init=rstd[which, row])
            for i in T.unroll(NORM_PIECE):
                dy[i] = factor * (dy[i] - y[i] * product)
            for i in T.vectorized(NORM_PIECE):
                gradient[row, piece, i] = dy[i]

    @T.prim_func
    def main(
        normalized: T.Tensor([2, rows, pieces, NORM_PIECE], dtype),
        rstd: T.Tensor([2, rows], "float32"),
        dq: T.Tensor([rows, pieces, NORM_PIECE], dtype),
        dk: T.Tensor([rows, pieces, NORM_PIECE], dtype),
    ):
        with T.Kernel(T.ceildiv(rows, ROWS), 2, threads=ROWS * LANES) as (cta, which):
            take_row(cta, which, K, dq, dk, partial(replace, normalized, rstd))

    return main
