"""The window after the last token of each sequence: the last rows of the initial window and the tokens, in order.

    x        [B, T, D] of x_dtype
    last     [slots, D, columns]   the final windows; perhaps the initial ones, in place

gpu/convolution.cpp launches a CTA for each sequence and each CHANNEL_THREADS channels, after causal_conv1d, which reads
initial windows. A thread reads the whole window of a channel before it writes.
"""

import tilelang.language as T

from kernels_tl.convolution.arguments import ConvInputs, WrittenWindow
from kernels_tl.convolution.tile import CHANNEL_THREADS
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, extern

PRELUDE = """
#include "convolution/conv_windows.cuh"
"""


def conv_windows():
    inputs, last = ConvInputs(), WrittenWindow()

    @T.prim_func
    def main(inputs: inputs, last: last, x_dtype: T.int32, in_place: T.int32):
        with T.Kernel(inputs.N, T.ceildiv(inputs.D, CHANNEL_THREADS), threads=CHANNEL_THREADS, prelude=PRELUDE) as (
            n,
            block,
        ):
            channel = block * CHANNEL_THREADS + T.get_thread_binding()
            extern("store_window", inputs.record(), x_dtype, last.record(), in_place != 0, n, channel)

    return main
