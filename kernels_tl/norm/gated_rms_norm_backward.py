"""The backward of gated_rms_norm. With n = x * rstd, x what is normalized, and g = act(z), it computes for each row

    dn = dy * weight * g              dn = dy * weight                the second column without norm_before_gate
    dx = rstd * (dn - n * mean(dn * n))
    do = dx                           do = dx * g
    dz = dy * weight * n * act'(z)    dz = dx * o * act'(z)
    dweight = sum(dy * n * g)         dweight = sum(dy * n)           over all rows

    o, z, weight, dy   as in gated_rms_norm; dy like o
    grad_o, dz         [rows, V]     do and dz, dtype of o
    dweight            [ctas, V] fp32   each CTA's terms; sum_rows adds them

rstd is computed again. gpu/norm.cpp launches at most BACKWARD.ctas CTAs per SM. A thread has the same channels of all
its rows, so it adds its terms of dweight in registers. Bound by memory: 5 V elements are moved per row.
"""

import tilelang.language as T

from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, extern, memory_type
from kernels_tl.norm.rows import NormInputs, strided, strides, template
from kernels_tl.norm.tiles import BACKWARD, LANES, THREADS

PRELUDE = """
#include "norm/gated_rms_norm_backward.cuh"
"""


def gated_rms_norm_backward(dtype, channels, vectors):
    inputs = NormInputs(dtype)
    batch, tokens, heads, V = inputs.shape
    dy = strided("dy", inputs.shape, dtype)
    rows = batch * tokens * heads

    @T.prim_func
    def main(
        inputs: inputs,
        dy: dy["dy"],
        grad_o: T.Tensor([rows, V], memory_type(dtype)),
        dz: T.Tensor([rows, V], memory_type(dtype)),
        dweight: T.Tensor([inputs.ctas, V], "float32"),
    ):
        with T.Kernel(inputs.ctas, threads=THREADS, prelude=PRELUDE) as cta:
            T.annotate_min_blocks_per_sm(BACKWARD.ctas[channels, vectors])
            sums = T.alloc_shared([THREADS // 32, channels * LANES], "float32")
            T.pdl_sync()
            extern(
                template("gated_rms_norm_backward", dtype, channels, vectors, BACKWARD.rows(dtype, channels)),
                inputs.record(),
                extern(
                    "NormGradients",
                    T.access_ptr(dy[0, 0, 0, 0], "r"),
                    strides(dy),
                    T.access_ptr(grad_o[0, 0], "w"),
                    T.access_ptr(dz[0, 0], "w"),
                    T.access_ptr(dweight[0, 0], "w"),
                ),
                inputs.rows(),
                inputs.norm(),
                T.access_ptr(sums, "rw"),
                cta,
            )

    return main
