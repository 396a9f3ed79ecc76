"""The window after the last token of each sequence: the last rows of the initial window and the tokens, in order. With
checkpoint_every > 0 also the windows after checkpoint_every tokens, after twice as many, and so on.

    x        [B, T, D] of x_dtype
    last     [slots, D, columns]   the final windows; perhaps the initial ones, in place
    kept     [.., D, columns]      the checkpoints, in slots of `kept_slots`

gpu/convolution.cpp launches `shares` CTAs for each sequence and each CHANNEL_THREADS channels, after causal_conv1d,
which reads initial windows. A thread reads the whole initial window of a channel before it writes. Of several CTAs each
writes a share of the checkpoints, and the first one the final window: then checkpoint_every is at least `columns`, so
that no window after a checkpoint has rows of the initial one, whose slot a checkpoint may have.
"""

import tilelang.language as T

from kernels_tl.bundles import CheckpointTable
from kernels_tl.convolution.arguments import ConvInputs, WrittenWindow
from kernels_tl.convolution.tile import CHANNEL_THREADS
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, extern

PRELUDE = """
#include "convolution/conv_windows.cuh"
"""


def conv_windows():
    inputs, last, kept, kept_slots = ConvInputs(), WrittenWindow(), WrittenWindow(), CheckpointTable()

    @T.prim_func
    def main(
        inputs: inputs,
        last: last,
        kept: kept,
        kept_slots: kept_slots,
        checkpoint_every: T.int32,
        x_dtype: T.int32,
        in_place: T.int32,
        shares: T.int32,
    ):
        with T.Kernel(
            inputs.N, T.ceildiv(inputs.D, CHANNEL_THREADS), shares, threads=CHANNEL_THREADS, prelude=PRELUDE
        ) as (n, block, share):
            channel = block * CHANNEL_THREADS + T.get_thread_binding()
            extern(
                "store_windows",
                *(inputs.record(), x_dtype, last.record(), in_place != 0),
                extern("WindowCheckpoints", kept.record(), *kept_slots.record(), checkpoint_every),
                extern("WindowShare", n, channel, share, shares),
            )

    return main
