"""The last part of the convolution's backward: the gradients of the filter and of the initial windows.

    dweight [D, W], dbias [D]   fp32   the sums of `partial` over the groups, always in the same order
    dh0     [N, D, columns]     fp32   sum over w of weight[w] dpre of a sequence's first W - 1 tokens, and dht of the
                                       rows that the final window still has
    partial [groups, W + 1, D]  fp32   by causal_conv1d_backward

gpu/convolution.cpp launches sum_ctas CTAs for the sums of 32 columns of `partial` each, then one CTA for each sequence
that has dh0 and CHANNEL_THREADS channels. A null address: no dbias, no dht.
"""

import tilelang.language as T

from kernels_tl.convolution.arguments import ConvGradients, ConvInputs, address, pointer
from kernels_tl.convolution.tile import CHANNEL_THREADS
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, extern

PRELUDE = """
#include "convolution/conv_gradients.cuh"
"""


def conv_gradients():
    inputs, gradients = ConvInputs(), ConvGradients()

    @T.prim_func
    def main(
        inputs: inputs,
        gradients: gradients,
        x_dtype: T.int32,
        partial: address(),
        groups: T.int32,
        sum_ctas: T.int32,
        ctas: T.int32,
        dweight: address(),
        dbias: address(),
        dh0: address(),
    ):
        with T.Kernel(ctas, threads=CHANNEL_THREADS, prelude=PRELUDE) as cta:
            extern(
                "conv_gradients",
                *(inputs.record(), x_dtype, gradients.record(), pointer(partial), groups, sum_ctas, cta),
                *(pointer(x, "w") for x in (dweight, dbias, dh0)),
            )

    return main
