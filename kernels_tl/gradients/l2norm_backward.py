"""The backward of the l2norm y = x / |x|, in place: dy becomes dx.

    dx = rstd (dy - y rowsum(y * dy))        rstd = 1 / |x|

    normalized  [2, rows, pieces, 8] 16-bit   y of q, then of k, by l2norm; rows = tokens * H_k
    rstd        [2, rows] fp32                of q, then of k, by l2norm
    dq, dk      [tokens, H_k, pieces, 8] 16-bit   dy, then dx; any strides of tokens and heads
    dtype                                     the Dtype of the elements: bf16 or fp16

backward.cpp launches [rows / ROWS, 2] CTAs: ROWS rows of dq or of dk each. A lane takes a piece of a row.
"""

from functools import partial

import tilelang.language as T

from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, dims, extern
from kernels_tl.gradients.l2norm import PRELUDE as PRELUDE, lanes_and_rows, take_row, token_and_head
from kernels_tl.layout import NORM_PIECE


def l2norm_backward(K):
    tokens, H_k, rows, pieces = dims("tokens", "H_k", "rows", "pieces")
    dq_row, dq_head, dk_row, dk_head = dims("dq_row", "dq_head", "dk_row", "dk_head")
    shape = (tokens, H_k, pieces, NORM_PIECE)
    LANES, ROWS = lanes_and_rows(K)

    def replace(normalized, rstd, dtype, row, piece, there, which, gradient):
        token, head = token_and_head(row, H_k)
        return extern(
            f"replace_by_dx<{LANES}>",
            T.access_ptr(normalized[which, row, piece, 0], "r"),
            T.access_ptr(rstd[which, row], "r"),
            T.access_ptr(gradient[token, head, piece, 0], "rw"),
            dtype,
            there,
        )

    @T.prim_func
    def main(
        normalized: T.Tensor([2, rows, pieces, NORM_PIECE], "uint16"),
        rstd: T.Tensor([2, rows], "float32"),
        dq: T.StridedTensor(shape, (dq_row, dq_head, NORM_PIECE, 1), "uint16"),
        dk: T.StridedTensor(shape, (dk_row, dk_head, NORM_PIECE, 1), "uint16"),
        dtype: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, ROWS), 2, threads=ROWS * LANES, prelude=PRELUDE) as (cta, which):
            take_row(cta, which, K, normalized, dq, dk, partial(replace, normalized, rstd, dtype))

    return main
