"""dQ and dK of a query/key head: the sums over the value heads of its group, in fp32, and with the l2norm inside from
the gradients of the normalised rows y = x / |x| to those of the op's arguments:

    dx = rstd (dy - y rowsum(y * dy))           dy the sum

    dq_heads, dk_heads  [tokens, H_v, K]        of chunk_backward
    q, k                [tokens, H_k, K]        normalised, and the factors q_rstd, k_rstd [tokens, H_k] fp32, by l2norm
    dq, dk              [tokens, H_k, K]

A half-warp takes a row of dq or of dk.

Launched on [tokens * H_k / 16, 2].
"""

import tilelang.language as T

from kernels_tl.common import PASS_CONFIGS as PASS_CONFIGS, dims

ROWS = 16  # of a CTA
LANES = 16  # of a row


def sum_heads(dtype, K):
    tokens, H_k, H_v = dims("tokens", "H_k", "H_v")
    CHANNELS = K // LANES  # of a lane: 16 bytes where K is 128

    @T.macro
    def sum_row(token, hk, column, group, use_l2norm, parts, rows, rstd, sums):
        total = T.alloc_local([CHANNELS], "float32")
        for i in T.unroll(CHANNELS):
            total[i] = 0.0
        for head in T.serial(group):
            for i in T.vectorized(CHANNELS):
                total[i] += parts[token, hk * group + head, column + i]
        if use_l2norm != 0:
            y = T.alloc_local([CHANNELS], "float32")
            product = T.alloc_var("float32", init=0.0)
            size = T.alloc_var("float32", init=0.0)
            for i in T.vectorized(CHANNELS):
                y[i] = rows[token, hk, column + i]
            for i in T.unroll(CHANNELS):
                product += y[i] * total[i]
                size += T.abs(total[i])
            for bit in T.unroll(LANES.bit_length() - 1):
                product += T.shfl_xor(product, 1 << bit)
                size += T.shfl_xor(size, 1 << bit)
            factor = T.alloc_var("float32", init=rstd[token, hk])
            if size != 0.0:  # rows that no sequence covers have zeros, and anything, even NaN, in y
                for i in T.unroll(CHANNELS):
                    total[i] = factor * (total[i] - y[i] * product)
        for i in T.vectorized(CHANNELS):
            sums[token, hk, column + i] = total[i]

    @T.prim_func
    def main(
        dq_heads: T.Tensor([tokens, H_v, K], dtype),
        dk_heads: T.Tensor([tokens, H_v, K], dtype),
        q: T.Tensor([tokens, H_k, K], dtype),
        k: T.Tensor([tokens, H_k, K], dtype),
        q_rstd: T.Tensor([tokens, H_k], "float32"),
        k_rstd: T.Tensor([tokens, H_k], "float32"),
        dq: T.Tensor([tokens, H_k, K], dtype),
        dk: T.Tensor([tokens, H_k, K], dtype),
        group: T.int32,  # H_v / H_k
        use_l2norm: T.int32,
    ):
        with T.Kernel(T.ceildiv(tokens * H_k, ROWS), 2, threads=ROWS * LANES) as (cta, which):
            row = cta * ROWS + T.get_thread_binding() // LANES
            column = T.get_thread_binding() % LANES * CHANNELS
            token = T.alloc_var("int32", init=T.truncdiv(row, T.Cast("int32", H_k)))
            hk = T.alloc_var("int32", init=row - token * T.Cast("int32", H_k))
            if token < tokens:
                if which == 0:
                    sum_row(token, hk, column, group, use_l2norm, dq_heads, q, q_rstd, dq)
                else:
                    sum_row(token, hk, column, group, use_l2norm, dk_heads, k, k_rstd, dk)

    return main
