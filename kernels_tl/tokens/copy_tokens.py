"""Queries, keys and values that cannot be read where they are, in contiguous memory:

    x_copy [B * length, heads, channels]  =  x [B, length, heads, channels], any strides        16-bit

for x in q, k and v; a tensor that is not copied has no heads. gpu/copy_tokens.cpp launches a CTA for each tile of
COPY_TILE tokens and as many columns of a tensor. Columns are the channels of all heads.

A CTA reads its tile along the tokens if their stride is smaller than that of the channels, and otherwise along the
channels, so that neighbouring lanes read neighbouring elements. The tile is in shared memory between its reads and its
writes, which are pieces of 16 bytes.
"""

import tilelang.language as T

from kernels_tl.bundles import CopiedTokens
from kernels_tl.config import COPY_TOKENS as TILE
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, extern
from kernels_tl.layout import COPY_PITCH

PRELUDE = """
#include "tokens/copy_tokens.cuh"
"""


def copy_tokens():
    tensors = CopiedTokens()

    def copied(name):
        x, copy = getattr(tensors, name), getattr(tensors, f"{name}_copy")
        batch, token, head, channel = x.strides
        rows, length, columns, channels = (
            T.Cast("int32", size) for size in (x.shape[0] * x.shape[1], x.shape[1], x.shape[2] * x.shape[3], x.shape[3])
        )
        return extern(
            "CopiedTensor",
            T.access_ptr(x[0, 0, 0, 0], "r"),
            T.access_ptr(copy[0, 0, 0], "w"),
            extern("Dimension", rows, length, token, batch),
            extern("Dimension", columns, channels, channel, head),
        )

    @T.prim_func
    def main(tensors: tensors, ctas: T.int32):
        with T.Kernel(ctas, threads=TILE.threads, prelude=PRELUDE) as cta:
            T.annotate_min_blocks_per_sm(TILE.ctas)
            tile = T.alloc_shared([TILE.tile, COPY_PITCH], "uint16")
            extern("copy_tile", copied("q"), copied("k"), copied("v"), T.access_ptr(tile, "rw"), cta)

    return main
