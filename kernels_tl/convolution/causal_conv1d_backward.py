"""The backward of the causal depthwise convolution, in fp32:

    pre[t]     = bias + sum over w of weight[w] x[t - (W - 1) + w]         from x again
    dpre[t]    = dy[t] act'(pre[t])                                        0 beyond the sequence
    dx[t]      = sum over w of weight[w] dpre[t + (W - 1) - w]  +  dht of the row that t has in the final window
    dweight[w] = sum over t of dpre[t] x[t - (W - 1) + w],      dbias = sum over t of dpre[t]

    x, dy    [B, T, D] of `dtype`        any strides of batch and token
    dht      [N, D, columns]             the gradient of the final windows; a null address: none
    dx       [B, T, D] of `dtype`        contiguous; zeros for tokens of no sequence
    partial  [groups, W + 1, D] fp32     sums of dweight and dbias over the tokens of a CTA, for conv_gradients

The grid and the walk are those of causal_conv1d. A warp walks on for W - 1 tokens after its own ones, and computes
their dpre again. The sums of a CTA's warps are added in shared memory, in the order of the warps.

A lane fetches 4 rows of x and of dy ahead, 2 in fp32.

Budget: 168 registers, so that 3 CTAs share an SM: 12 warps with 2 kB each in flight. fp32 takes more, for 2 CTAs.
"""

import tilelang.language as T

from kernels_tl.convolution.arguments import ConvGradients, ConvGrid, ConvInputs, address, pointer, template
from kernels_tl.convolution.tile import BACKWARD, WARPS
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, extern

MOST_SUMS = 5  # of dweight and dbias per channel
PRELUDE = """
#include "convolution/causal_conv1d_backward.cuh"
"""


def causal_conv1d_backward(dtype):
    inputs, gradients, grid, tile = ConvInputs(), ConvGradients(), ConvGrid(), BACKWARD[dtype]

    @T.prim_func
    def main(inputs: inputs, gradients: gradients, grid: grid, dx: address(), partial: address()):
        with T.Kernel(grid.ctas, threads=32 * WARPS, prelude=PRELUDE) as cta:
            T.annotate_min_blocks_per_sm(tile.ctas)
            sums = T.alloc_shared([WARPS, MOST_SUMS, 32 * tile.channels], "float32")
            extern(
                template("causal_conv1d_backward", dtype, tile.channels),
                inputs.record(),
                gradients.record(),
                grid.record(cta),
                pointer(dx, "w"),
                T.access_ptr(sums, "rw"),
                pointer(partial, "w"),
            )

    return main
