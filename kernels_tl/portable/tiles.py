"""What the portable kernels share: their work tiles, the maps that ranks exchange, and copies between shared and global
memory by all threads (portable/tiles.cuh).

A replay of states, forward or in reverse, also computes maps. Value rows of S^T do not depend on each other, and the
sequence maps each row by the same M^T. So rows of Z^T are value rows that start from the given state, or from zero, and
rows of M^T are value rows that start from the identity, with zeros as values.
"""

import tilelang.language as T

from kernels_tl.core.common import extern, load_early
from kernels_tl.core.cta import Variables
from kernels_tl.layout import NARROW_TILE, NO_STATE, Dtype, SequenceColumn

PRELUDE = """
#include "core/state_tiles.cuh"
#include "plan/runs.cuh"
#include "portable/tiles.cuh"
"""
Full = T.GemmWarpPolicy.FullRow  # each warp has 16 rows of a product


def locate(cta, sizes, value_tiles):
    """The work tile of a CTA of [segments * H_v * value tiles]: segment n, which is a whole sequence, value head hv and
    its query/key head hk, and v0, the first of NARROW_TILE value rows."""
    H_v = T.Cast("int32", sizes.H_v)
    found = Variables(part=T.truncdiv(cta, value_tiles))
    found.and_also(v0=(cta - found.part * value_tiles) * NARROW_TILE, n=T.truncdiv(found.part, H_v))
    found.and_also(hv=found.part - found.n * H_v)
    return found.and_also(hk=T.truncdiv(found.hv, sizes.group))


def locate_map(at, maps, plan, sizes):
    """The work tile `at` of a kernel that may compute maps: the slot of its segment, and m0, the first row of M^T;
    below 0 in tiles of Z^T. Without maps it is the tile of locate."""
    which = T.Select(at.n == 0, maps.mapped_0, maps.mapped_1)
    is_map = T.Cast("int32", maps.mapped) > 0
    slot = T.if_then_else(is_map, load_early(plan.sequences[which, SequenceColumn.SEGMENT]), at.n)
    rows = T.truncdiv(T.Cast("int32", sizes.value_dim) + (NARROW_TILE - 1), NARROW_TILE) * NARROW_TILE
    return at.and_also(slot=slot, m0=T.Select(is_map, at.v0 - rows, -1))


@T.macro
def begin_state(S, at, maps, slot, view):
    """S^T before the first chunk: zeros, the state in a slot of `view`, or rows of the identity."""
    T.clear(S)
    if at.m0 >= 0:
        for i, j in T.Parallel(*S.shape):
            S[i, j] = T.Select(at.m0 + i == j, 1.0, 0.0)
    else:
        if (slot != NO_STATE) & ((T.Cast("int32", maps.mapped) == 0) | (maps.has_ends != 0)):
            view.read(S, slot, at.hv, at.v0)


@T.macro
def write_map(S, at, maps, sizes):
    """Rows of Z^T or M^T, where S^T ends."""
    value_dim, key_dim = T.Cast("int32", sizes.value_dim), T.Cast("int32", sizes.key_dim)
    row = T.alloc_var("int32", init=T.Select(at.m0 < 0, at.v0, value_dim + at.m0))
    rest = T.alloc_var("int32", init=T.Select(at.m0 < 0, value_dim - at.v0, key_dim - at.m0))
    to = T.access_ptr(maps.rank_maps[at.n, at.hv, row, 0], "w")
    extern(f"write_state<{int(S.shape[1])}, false>", S.data, to, Dtype.FLOAT32, True, key_dim, rest, key_dim)


@T.macro
def store_transposed(X, tile, offset, element, to, stride, tokens, columns):
    """Writes rows of X, one for each token, from the fragment of X^T, through a tile that all warps have read."""
    extern(f"stage_transposed<{element}>", X.data, T.access_ptr(tile, "w"), offset)
    T.sync_threads()
    extern("store_rows", to, T.access_ptr(tile, "r"), stride, tokens, columns)
    T.sync_threads()


def chunk_of(segment, c, checkpoint_every):
    """Chunk c of a segment: its slot, its first row and its tokens, 0 or fewer after the last chunk."""
    before = extern("tokens_before", c, checkpoint_every, returns="int32")
    length = extern("tokens_of", c, segment.length, checkpoint_every, returns="int32")
    return Variables(c=c, slot=segment.first + c, row=segment.row + before, length=length)


def load_rows(tile, rows, stride, head, column, chunk):
    """Begins tile[i, j] = rows[chunk.row + i, head, column + j]; zeros after the chunk's tokens and the last column.
    `stride` is that of rows."""
    source = T.access_ptr(rows[chunk.row, head, column], "r")
    rest = T.Cast("int32", rows.shape[2]) - column
    width = int(tile.region[-1].extent)
    to = T.access_ptr(tile, "w")
    return extern(f"load_rows<{width}>", to, source, T.Cast("int64", stride), chunk.length, rest)


def load_triangle(tile, matrices, chunk, hv, which):
    """Begins to load L^T (which = 0) or P^T (1) of a chunk."""
    source = T.access_ptr(matrices.matrices_0[chunk.slot, hv, which, 0, 0], "r")
    return extern("load_triangle", T.access_ptr(tile, "w"), source)


def load_gates(table, matrices, chunk, hv):
    """Begins to load the table of a chunk's gates."""
    rows, columns = matrices.gates.shape[2:]
    source = T.access_ptr(matrices.gates[chunk.slot, hv, 0, 0], "r")
    return extern("load_floats", T.access_ptr(table, "w"), source, int(rows) * int(columns))
