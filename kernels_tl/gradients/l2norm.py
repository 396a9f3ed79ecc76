"""The l2norm of the rows of queries or keys, in fp32, for the backward:

    rstd = 1 / sqrt(rowsum(x * x) + eps)        eps as in transformers
    y    = diag(rstd) x

    q, k        [rows, pieces, 8] 16-bit      x; rows = tokens * H_k
    normalized  [2, rows, pieces, 8] 16-bit   y of q, then of k
    rstd        [2, rows] fp32                of q, then of k

backward.cpp launches [rows / ROWS, 2] CTAs: ROWS rows of q or of k each, 16 rows of 128 channels. A lane takes a piece
of a row. The pieces are a dimension of their own, because the compiler then loads 16 bytes at once instead of 2.
"""

from functools import partial

import tilelang.language as T

from kernels_tl.config import L2NORM
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, dims
from kernels_tl.layout import NORM_EPS, NORM_PIECE


def lanes_and_rows(K):
    """Lanes of a row, and rows of a CTA."""
    lanes = K // NORM_PIECE
    assert lanes & (lanes - 1) == 0 and lanes <= 32, f"sum_of_lanes adds over a power of two, not {lanes} lanes"
    return lanes, L2NORM.tile // lanes


@T.macro
def take_row(cta, which, K, q, k, of_row):
    """of_row(row, piece, there, which, tensor) on the thread's piece of a row of q or k, [rows, pieces, NORM_PIECE].
    `there` says whether there is such a piece."""
    lanes, rows = lanes_and_rows(K)
    row = cta * rows + T.get_thread_binding() // lanes
    piece = T.get_thread_binding() % lanes
    there = (row < q.shape[0]) & (piece < T.Cast("int32", q.shape[1]))
    if which == 0:
        of_row(row, piece, there, 0, q)
    else:
        of_row(row, piece, there, 1, k)


@T.macro
def sum_of_lanes(number, lanes):
    """The sum of a number over `lanes` neighbouring lanes, in each of them."""
    total = T.alloc_var("float32", init=number)
    for bit in T.unroll(lanes.bit_length() - 1):
        total += T.shfl_xor(total, 1 << bit)
    return total


def l2norm(dtype, K):
    rows, pieces = dims("rows", "pieces")
    LANES, ROWS = lanes_and_rows(K)

    @T.macro
    def normalize(normalized, rstd, row, piece, there, which, x):
        values = T.alloc_local([NORM_PIECE], "float32")
        squares = T.alloc_var("float32", init=0.0)
        for i in T.unroll(NORM_PIECE):
            values[i] = 0.0
        if there:
            for i in T.vectorized(NORM_PIECE):
                values[i] = x[row, piece, i]
        for i in T.unroll(NORM_PIECE):
            squares += values[i] * values[i]
        factor = T.alloc_var("float32", init=T.rsqrt(sum_of_lanes(squares, LANES) + NORM_EPS))
        if there:
            for i in T.vectorized(NORM_PIECE):
                normalized[which, row, piece, i] = values[i] * factor
        if there & (piece == 0):
            rstd[which, row] = factor

    @T.prim_func
    def main(
        q: T.Tensor([rows, pieces, NORM_PIECE], dtype),
        k: T.Tensor([rows, pieces, NORM_PIECE], dtype),
        normalized: T.Tensor([2, rows, pieces, NORM_PIECE], dtype),
        rstd: T.Tensor([2, rows], "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, ROWS), 2, threads=ROWS * LANES) as (cta, which):
            take_row(cta, which, K, q, k, partial(normalize, normalized, rstd))

    return main
