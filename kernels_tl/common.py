"""Constants and small macros that all kernels share.

Symbols are those of the README's formula: C tokens a chunk, K = V = D channels a head, b the chunk-local cumulative
sum of the log gate g, gamma = exp(b).  Sizes that only change grids, strides and descriptors are dynamic:

    R   token rows, B * T            HK, HV  query/key and value heads
    N   sequences                    NT      chunk slots: an upper bound for varlen batches, with room for padding
    h_slots                          slots of h, which holds no padding: at most NT
"""

import math

import tilelang
import tilelang.language as T

C = 64  # tokens a chunk: one WGMMA M tile, and the size whose inverse still fits a warpgroup
D = 128  # head dimension, K = V

# Rows of the backward's gate table, [NT, HV, GATE_ROWS, C] fp32, which gate_cumsum writes: what a token brings to its
# head besides its vectors, chunk by chunk, with every exponential computed once.
GATE_LOG, GATE_GAMMA, GATE_DECAY, GATE_FADE, GATE_BETA = range(
    5
)  # b_i, exp(b_i), exp(b_C - b_i), exp(b_i - b_1), beta_i
GATE_ROWS = 5

# Rows of the forward's, [NT, HV, GATE_TABLE_ROWS, C] fp32, which chunk_matrices writes: the first ones of the enum Gate
# in device/chunk_gates.cuh.
FORWARD_BETA, FORWARD_QUERY, FORWARD_DECAY, FORWARD_TOTAL = 0, 2, 3, 4
GATE_TABLE_ROWS = 5

# The forward's matrices, which are triangular, by blocks of 16 x 16: the rows of blocks that they have transposed
# follow one another, each from the diagonal on.
BLOCK = 16
MATRIX = 10 * BLOCK * BLOCK  # elements

# Columns of the tables that chunk_plan writes.
SEQ_ROW, SEQ_LENGTH, SEQ_CHUNK, SEQ_SEGMENT = range(4)  # of sequence n: first token row, tokens, first slots
SEQ_COLUMNS = 4
CHUNK_ROW, CHUNK_LENGTH, CHUNK_SEQ = range(3)  # of chunk slot: first token row, tokens, sequence or PADDING
CHUNK_COLUMNS = 3
# Of a segment, a run of a sequence's chunks that is gone through in one go.
SEGMENT_ROW, SEGMENT_LENGTH, SEGMENT_CHUNK, SEGMENT_SEQ, SEGMENT_FLAGS = range(5)
SEGMENT_COLUMNS = 5
FIRST, LAST = 1, 2  # flags: of its sequence
PADDING = -1  # rows that no sequence covers: outputs there are zeros

# Index arithmetic is in bounds by construction (the plan clamps), so the compiler's own bounds checks are not
# wanted; warp specialisation is written out, never inferred.
PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_warp_specialized": True,
}


def dims(*names):
    """Dynamic (run-time) sizes by name."""
    return tuple(T.dynamic(name) for name in names)


def swizzled(buffer):
    """The TMA/WGMMA swizzle as an explicit layout, for tiles that no gemm reads (those get it by themselves)."""
    return tilelang.layout.make_swizzled_layout(buffer)


def element_type(dtype):
    """The name of a 16-bit dtype in CUDA C++."""
    return {"bfloat16": "__nv_bfloat16", "float16": "__half"}[dtype]


def block_row(NT, HV, j, dtype):
    """Block row j of the forward's two matrices of each chunk and value head, a strided part of [NT, HV, 2, MATRIX]."""
    width = C - BLOCK * j
    return T.StridedTensor([NT, HV, 2, BLOCK, width], (HV * 2 * MATRIX, 2 * MATRIX, MATRIX, width, 1), dtype)


def block_rows(tiles, stage, buffers, slot, hv, matrix, edge):
    """(where it goes, where it comes from) of the block rows of one matrix, from their four buffers to a tile of C x C.
    What lies before a row's diagonal block is out of bounds: TMA fills in zeros and reads nothing. `edge` is a variable
    that holds 0; a negative constant would count from the end."""
    return [
        (
            tiles[stage, BLOCK * j : BLOCK * (j + 1), :],
            buffers[j][slot, hv, matrix, :, edge - BLOCK * j : edge - BLOCK * j + C],
        )
        for j in range(C // BLOCK)
    ]


# CUtensorMapSwizzle, CUtensorMapDataType, CUtensorMapL2promotion
SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B = range(4)
TMA_DTYPES = {"float16": 6, "bfloat16": 9}
L2_PROMOTION_128B = 2


def descriptor(buffer, box, swizzle):
    """A TMA descriptor of a tensor of 16-bit elements, for a function in device/: boxes of these extents, which are of
    the innermost dimensions."""
    rank = len(buffer.shape)
    strides = list(buffer.strides) or [math.prod(buffer.shape[i + 1 :], start=1) for i in range(rank)]
    box = [1] * (rank - len(box)) + list(box)
    return T.create_tma_descriptor(
        TMA_DTYPES[str(buffer.dtype)],
        rank,
        buffer.data,
        *reversed(buffer.shape),
        *(2 * stride for stride in reversed(strides)),
        *reversed(box),
        *[1] * rank,
        0,  # no interleaving
        swizzle,
        L2_PROMOTION_128B,
        0,  # out of bounds: zeros
    )


def extern(name, *args, returns="handle"):
    """A call of a function in device/."""
    return T.call_extern(returns, f"flash_qla::device::{name}", *args)


def load_early(number):
    """An entry of chunk_plan's tables, perhaps before pdl_sync: see device/warp.cuh."""
    return extern("load_early", T.access_ptr(number, "r"), returns="int32")
