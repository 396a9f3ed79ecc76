"""Queries, keys and values that cannot be read where they are, in contiguous memory:

    x_copy [B * length, heads, channels]  =  x [B, length, heads, channels], any strides        16-bit

for x in q, k and v; a tensor that is not copied has no heads. gpu/copy_tokens.cpp launches [tiles of TOKENS tokens] *
[tiles of COLUMNS columns of all tensors] CTAs, where columns are the channels of all heads.

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

TOKENS = COLUMNS = TILE.tile


def copy_tokens():
    tensors = CopiedTokens()

    def columns_of(name):
        x = getattr(tensors, name)
        return T.Cast("int32", x.shape[2] * x.shape[3])

    def copy_tile(name, tile, token, column):
        x = getattr(tensors, name)
        batch_stride, token_stride, head_stride, channel_stride = x.strides
        tokens, length, channels = (T.Cast("int32", y) for y in (x.shape[0] * x.shape[1], x.shape[1], x.shape[3]))
        return extern(
            "copy_tile",
            T.access_ptr(x[0, 0, 0, 0], "r"),
            T.access_ptr(getattr(tensors, f"{name}_copy")[0, 0, 0], "w"),
            T.access_ptr(tile, "rw"),
            extern("Dimension", tokens, length, token_stride, batch_stride),
            extern("Dimension", columns_of(name), channels, channel_stride, head_stride),
            token,
            column,
        )

    @T.prim_func
    def main(tensors: tensors, ctas: T.int32):
        with T.Kernel(ctas, threads=TILE.threads, prelude=PRELUDE) as cta:
            tile = T.alloc_shared([TOKENS, COPY_PITCH], "uint16")
            tiles = [T.ceildiv(columns_of(name), COLUMNS) for name in ("q", "k", "v")]
            row = T.alloc_var("int32", init=T.truncdiv(cta, tiles[0] + tiles[1] + tiles[2]))
            column = T.alloc_var("int32", init=cta - row * (tiles[0] + tiles[1] + tiles[2]))
            if column < tiles[0]:
                copy_tile("q", tile, row * TOKENS, column * COLUMNS)
            else:
                if column < tiles[0] + tiles[1]:
                    copy_tile("k", tile, row * TOKENS, (column - tiles[0]) * COLUMNS)
                else:
                    copy_tile("v", tile, row * TOKENS, (column - tiles[0] - tiles[1]) * COLUMNS)

    return main
