"""The l2norm of the rows of queries or keys, in fp32, for the backward:

    rstd = 1 / sqrt(rowsum(x * x) + eps)        eps as in transformers
    y    = diag(rstd) x

    q, k        [tokens, H_k, pieces, 8] 16-bit   x; any strides of tokens and heads
    normalized  [2, rows, pieces, 8] 16-bit       y of q, then of k; rows = tokens * H_k
    rstd        [2, rows] fp32                    of q, then of k
    dtype                                         the Dtype of the elements: bf16 or fp16

backward.cpp launches [rows / ROWS, 2] CTAs: ROWS rows of q or of k each, 16 rows of 128 channels. A lane takes a piece
of a row.
"""

from functools import partial

import tilelang.language as T

from kernels_tl.config import L2NORM
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, dims, extern
from kernels_tl.layout import NORM_PIECE

PRELUDE = """
#include "gradients/l2norm.cuh"
"""


def lanes_and_rows(K):
    """Lanes of a row, and rows of a CTA."""
    lanes = K // NORM_PIECE
    assert lanes & (lanes - 1) == 0 and lanes <= 32, f"sum_of_lanes adds over a power of two, not {lanes} lanes"
    return lanes, L2NORM.tile // lanes


def token_and_head(row, H_k):
    """Token and head of a row."""
    heads = T.Cast("int32", H_k)
    return T.truncdiv(row, heads), T.truncmod(row, heads)


@T.macro
def take_row(cta, which, K, normalized, q, k, of_row):
    """of_row(row, piece, there, which, tensor) on the thread's piece of a row of q or k. `there` says whether there is
    such a piece."""
    lanes, rows = lanes_and_rows(K)
    row = cta * rows + T.get_thread_binding() // lanes
    piece = T.get_thread_binding() % lanes
    there = (row < normalized.shape[1]) & (piece < T.Cast("int32", normalized.shape[2]))
    if which == 0:
        of_row(row, piece, there, 0, q)
    else:
        of_row(row, piece, there, 1, k)


def l2norm(K):
    tokens, H_k, rows, pieces = dims("tokens", "H_k", "rows", "pieces")
    q_row, q_head, k_row, k_head = dims("q_row", "q_head", "k_row", "k_head")
    shape = (tokens, H_k, pieces, NORM_PIECE)
    LANES, ROWS = lanes_and_rows(K)

    def normalize(normalized, rstd, dtype, row, piece, there, which, x):
        token, head = token_and_head(row, H_k)
        return extern(
            f"normalize_piece<{LANES}>",
            T.access_ptr(x[token, head, piece, 0], "r"),
            T.access_ptr(normalized[which, row, piece, 0], "w"),
            T.access_ptr(rstd[which, row], "w"),
            dtype,
            there,
            piece == 0,
        )

    @T.prim_func
    def main(
        q: T.StridedTensor(shape, (q_row, q_head, NORM_PIECE, 1), "uint16"),
        k: T.StridedTensor(shape, (k_row, k_head, NORM_PIECE, 1), "uint16"),
        normalized: T.Tensor([2, rows, pieces, NORM_PIECE], "uint16"),
        rstd: T.Tensor([2, rows], "float32"),
        dtype: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, ROWS), 2, threads=ROWS * LANES, prelude=PRELUDE) as (cta, which):
            take_row(cta, which, K, normalized, q, k, partial(normalize, normalized, rstd, dtype))

    return main
