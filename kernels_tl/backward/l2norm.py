"""y = x * rstd, rstd = 1 / sqrt(sum(x^2) + 1e-6) over the head dimension, in fp32; y is rounded to the dtype of x. The
backward wants rstd too (has_rstd). eps as in transformers.

One warp a row of K channels.  Launched on [rows / 8]; rows = R * heads.
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as PASS_CONFIGS,
    dims,
)

ROWS = 8  # rows a CTA, one warp each
LANES = 32
EPS = 1e-6


def l2norm(dtype, K):
    (rows,) = dims("rows")

    @T.prim_func
    def main(
        x: T.Tensor([rows, K], dtype),
        y: T.Tensor([rows, K], dtype),
        rstd: T.Tensor([rows], "float32"),
        has_rstd: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, ROWS), threads=ROWS * LANES) as block:
            tx = T.get_thread_binding()
            row = block * ROWS + tx // LANES
            column = tx % LANES * (K // LANES)
            values = T.alloc_local([K // LANES], "float32")
            total = T.alloc_var("float32", init=0.0)
            if row < rows:
                for i in T.vectorized(K // LANES):
                    values[i] = x[row, column + i]
                for i in T.unroll(K // LANES):
                    total = total + values[i] * values[i]
                for step in T.unroll(5):
                    total = total + T.shfl_xor(total, 1 << step)
                total = T.rsqrt(total + EPS)
                for i in T.vectorized(K // LANES):
                    y[row, column + i] = values[i] * total
                if (has_rstd != 0) & (column == 0):
                    rstd[row] = total

    return main
