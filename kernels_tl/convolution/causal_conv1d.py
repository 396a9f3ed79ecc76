"""The causal depthwise convolution, in fp32:

    y[t, d] = act(bias[d] + sum over w of weight[d, w] x[t - (W - 1) + w, d])        act: SiLU or none

Rows before a sequence's first token are those of the window that it starts from, or zeros. Tokens of no sequence get
zeros.

    x   [B, T, D] of `dtype`   any strides of batch and token
    y   [B, T, D] of `dtype`   contiguous

gpu/convolution.cpp launches CTAs of 4 warps. A warp walks down `warp_tokens` tokens; its lanes have neighbouring pieces
of 4 channels of a row. A lane keeps the weights and the last W - 1 rows of its channels in registers, and fetches 8
rows ahead, 4 in fp32. Where a tile begins inside a sequence, the W - 1 rows above it are read again. Rows that are not
whole pieces at multiples of their size are read channel by channel.

The bits of y[t] depend on its W rows alone, not on tiles, strides or other sequences.

Budget: 96 registers, so that 5 CTAs share an SM: 20 warps with 2 kB each in flight.
"""

import tilelang.language as T

from kernels_tl.convolution.arguments import ConvGrid, ConvInputs, address, pointer, template
from kernels_tl.convolution.tile import FORWARD, WARPS
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, extern

PRELUDE = """
#include "convolution/causal_conv1d.cuh"
"""


def causal_conv1d(dtype):
    inputs, grid, tile = ConvInputs(), ConvGrid(), FORWARD[dtype]

    @T.prim_func
    def main(inputs: inputs, grid: grid, y: address()):
        with T.Kernel(grid.ctas, threads=32 * WARPS, prelude=PRELUDE) as cta:
            T.annotate_min_blocks_per_sm(tile.ctas)
            extern(template("causal_conv1d", dtype, tile.channels), inputs.record(), grid.record(cta), pointer(y, "w"))

    return main
