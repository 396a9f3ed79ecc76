"""What the portable kernels share: their work tiles, and loads to shared memory by all threads (portable/tiles.cuh)."""

import tilelang.language as T

from kernels_tl.core.common import extern
from kernels_tl.core.cta import Variables
from kernels_tl.layout import NARROW_TILE


def locate(cta, sizes, value_tiles):
    """The work tile of a CTA of [segments * H_v * value tiles]: segment n, which is a whole sequence, value head hv and
    its query/key head hk, and v0, the first of NARROW_TILE value rows."""
    H_v = T.Cast("int32", sizes.H_v)
    found = Variables(part=T.truncdiv(cta, value_tiles))
    found.and_also(v0=(cta - found.part * value_tiles) * NARROW_TILE, n=T.truncdiv(found.part, H_v))
    found.and_also(hv=found.part - found.n * H_v)
    return found.and_also(hk=T.truncdiv(found.hv, sizes.group))


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
