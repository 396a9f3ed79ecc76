"""What the portable kernels share: their work tiles, the maps of segments, and copies between shared and global memory
by all threads (portable/tiles.cuh).

A replay of states, forward or in reverse, also computes maps. Value rows of S^T do not depend on each other, and the
segment maps each row by the same M^T. So rows of Z^T are value rows that start from zero, and rows of M^T are value
rows that start from the identity, with zeros as values.
"""

import tilelang.language as T

from kernels_tl.config import WARPGROUP as THREADS
from kernels_tl.core.common import C, extern
from kernels_tl.core.cta import Variables
from kernels_tl.layout import NARROW_TILE, NO_STATE, Dtype, ForwardGate

PRELUDE = """
#include "core/state_tiles.cuh"
#include "maps/segments.cuh"
#include "plan/runs.cuh"
#include "portable/tiles.cuh"
"""
Full = T.GemmWarpPolicy.FullRow  # each warp has 16 rows of a product


def locate(cta, sizes, value_tiles):
    """The work tile of a CTA of [segments * H_v * value tiles]: segment n, value head hv and its query/key head hk, and
    v0, the first of NARROW_TILE value rows."""
    H_v = T.Cast("int32", sizes.H_v)
    work = Variables(part=T.truncdiv(cta, value_tiles))
    work.and_also(v0=(cta - work.part * value_tiles) * NARROW_TILE, n=T.truncdiv(work.part, H_v))
    work.and_also(hv=work.part - work.n * H_v)
    return work.and_also(hk=T.truncdiv(work.hv, sizes.group))


@T.macro
def begin_state(S, at, first):
    """S^T before the first chunk: the FirstState `first`, or zeros."""
    T.clear(S)
    if first.slot != NO_STATE:
        first.read(S, at.n, at.hv, at.v0)


@T.macro
def store_map(S, to):
    """Rows of Z^T or of M^T to a matrix of K fp32 channels."""
    rows, K = (int(extent) for extent in S.shape)
    extern(f"write_state<{K}, false>", S.data, to, Dtype.FLOAT32, True, K, rows, K)


def chunk_that_matters(which, gates, segment, hv):
    """The `first` chunk of a segment that matters to the state after it, or the `last` one that matters to the gradient
    before it, by maps/segments.cuh; -1: what lies on the other side of the segment may matter too."""
    bounds = T.access_ptr(gates[segment.first, hv, ForwardGate.TOTAL, 1], "r")
    stride = T.Cast("int64", gates.shape[1]) * (ForwardGate.COUNT * C)
    return extern(f"{which}_chunk_that_matters", bounds, stride, segment.chunks, returns="int32")


@T.macro
def store_transposed(X, tile, offset, element, to, stride, tokens, columns):
    """Writes rows of X, one for each token, from the fragment of X^T, through a tile that all warps have read."""
    extern(f"stage_transposed<{element}>", X.data, T.access_ptr(tile, "w"), offset)
    T.sync_threads()
    extern(f"store_rows<{THREADS}>", to, T.access_ptr(tile, "r"), stride, tokens, columns)
    T.sync_threads()


def chunk_of(segment, c, checkpoint_every):
    """Chunk c of a segment: its slot, its first row and its tokens, 0 or fewer after the last chunk."""
    before = extern("tokens_before", c, checkpoint_every, returns="int32")
    length = extern("tokens_of", c, segment.length, checkpoint_every, returns="int32")
    return Variables(c=c, slot=segment.first + c, row=segment.row + before, length=length)


def load_rows(tile, rows, stride, head, column, chunk, threads=THREADS):
    """Begins tile[i, j] = rows[chunk.row + i, head, column + j]; zeros after the chunk's tokens and the last column.
    `stride` is that of rows."""
    source = T.access_ptr(rows[chunk.row, head, column], "r")
    rest = T.Cast("int32", rows.shape[2]) - column
    width = int(tile.region[-1].extent)
    to = T.access_ptr(tile, "w")
    return extern(f"load_rows<{threads}, {width}>", to, source, T.Cast("int64", stride), chunk.length, rest)


def load_triangle(tile, matrices, chunk, hv, which):
    """Begins to load L^T (which = 0) or P^T (1) of a chunk."""
    source = T.access_ptr(matrices.matrices_0[chunk.slot, hv, which, 0, 0], "r")
    return extern(f"load_triangle<{THREADS}>", T.access_ptr(tile, "w"), source)


def load_gates(table, matrices, chunk, hv, threads=THREADS):
    """Begins to load the table of a chunk's gates."""
    rows, columns = matrices.gates.shape[2:]
    source = T.access_ptr(matrices.gates[chunk.slot, hv, 0, 0], "r")
    return extern(f"load_floats<{threads}, {int(rows) * int(columns)}>", T.access_ptr(table, "w"), source)
