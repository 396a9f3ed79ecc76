"""The norm that stands after the delta rule, of each row (a token's head) of V channels, in fp32:

    y = o * rstd * weight * act(z),  rstd = 1 / sqrt(mean(o^2) + eps)       norm_before_gate
    y = x * rstd * weight,  x = o * act(z),  rstd = 1 / sqrt(mean(x^2) + eps)        otherwise
    act(z) = z * sigmoid(z) or, with is_sigmoid, sigmoid(z)

    o, z      [batch, tokens, heads, V]   any strides of the first three dimensions; bf16 or fp16 (bits16), or fp32
    weight    [V]                         any floating dtype
    y         [rows, V]                   dtype of o; rows = batch * tokens * heads

gpu/norm.cpp launches at most FORWARD.ctas CTAs per SM, which loop over the rows (norm/tiles.py). Bound by memory: 3 V
elements are moved per row.
"""

import tilelang.language as T

from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, extern, memory_type
from kernels_tl.norm.rows import NormInputs, template
from kernels_tl.norm.tiles import FORWARD, THREADS

PRELUDE = """
#include "norm/gated_rms_norm.cuh"
"""


def gated_rms_norm(dtype, channels, vectors):
    inputs = NormInputs(dtype)
    batch, tokens, heads, V = inputs.shape

    @T.prim_func
    def main(inputs: inputs, y: T.Tensor([batch * tokens * heads, V], memory_type(dtype))):
        with T.Kernel(inputs.ctas, threads=THREADS, prelude=PRELUDE) as cta:
            T.annotate_min_blocks_per_sm(FORWARD.ctas[channels, vectors])
            T.pdl_sync()
            extern(
                template("gated_rms_norm", dtype, channels, vectors, FORWARD.rows(dtype, channels)),
                inputs.record(),
                T.access_ptr(y[0, 0], "w"),
                inputs.rows(),
                inputs.norm(),
                cta,
            )

    return main
