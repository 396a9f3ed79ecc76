"""Numbers that kernels, device headers, host code and the Python package share, written once.

The build writes it as layout.h for CUDA and C++ (build_tools/layout.py): a number CHUNK is flash_qla::kChunk there, a
class SegmentColumn with ROW is flash_qla::SegmentColumn::kRow. Plain numbers only; what the names of the project's
symbols mean is in docs/glossary.md.
"""

# Tokens a chunk, the C of the chunk form: one WGMMA M tile, and the size whose inverse still fits a warpgroup.
CHUNK = 64

# A chunk's matrices go by blocks of BLOCK x BLOCK.
BLOCK = 16

# Elements of one of the forward's two matrices of a chunk, which are triangular: ten blocks are not zero. The rows of
# blocks that the transposed one has follow one another, each from the diagonal on.
TRIANGLE = 10 * BLOCK * BLOCK

# The sequence of a chunk slot that no sequence covers: its rows are padding, whose outputs are zeros.
PADDING = -1

# Special numbers in place of a slot. NO_STATE: no state; as an initial state, zeros. FROM_SCAN: segment_scan writes it.
NO_STATE, FROM_SCAN = -1, -2

# Sequences that a step of chunk_plan takes: of so many the longest comes first in the table of segments.
PLAN_STEP = 256

# CTAs of chunk_matrices that an SM holds at a time.
MATRICES_CTAS = 4

# Head dimensions are multiples of HEAD_DIM_STEP, as rows of 16-bit elements are multiples of 16 bytes for TMA. Values
# have at most MOST_VALUE_DIM channels; a key as many as there is a kernel for (kernels_tl/instances.py).
HEAD_DIM_STEP, MOST_VALUE_DIM = 8, 512

# Rows of S^T a CTA of chunk_forward, one consumer warpgroup's or two's: a narrow tile gives more CTAs, a wide one
# fetches K and Q less often.
NARROW_TILE, WIDE_TILE = 64, 128

# Columns of S a CTA of segment_scan.
SCAN_COLUMNS = 32

# gate_gradients: value heads a CTA, whose fp32 numbers of a token are a sector of 32 bytes, and tokens at a time.
GATE_HEADS, GATE_TOKENS = 8, 32

# decode: warps a CTA and value rows of a state that a warp has at a time; tokens that are made ready at a time, those
# of a block, and the most value rows of a CTA where tokens go through a state together; lanes of a value row there,
# without tensor cores, and value rows of a lane; CTAs that an SM holds at a time, by path, and with one token on states
# of 16 bits.
DECODE_WARPS, DECODE_WARP_ROWS = 4, 8
DECODE_TOKENS, DECODE_BLOCK, DECODE_TILE = 8, 4, 128
DECODE_LANES, DECODE_LANE_ROWS = 8, 2
DECODE_CTAS_ROWS, DECODE_CTAS_BLOCKS, DECODE_CTAS_MMA, DECODE_CTAS_ONE_16 = 7, 3, 4, 8

# Strides in shared memory: bytes of padding after a row of a state; floats from one inverted diagonal block to the
# next; floats from one diagonal block of K K^T to the next. Two blocks' rows are read together, from different banks.
STATE_PAD = 16
INVERSE_STRIDE = BLOCK * BLOCK + 16
DIAGONAL_STRIDE = BLOCK * BLOCK + 4


# The least beta that the backward in bf16 divides by. A token with a smaller beta takes dbeta from V instead.
LEAST_BETA = 2.0**-40

# Added to the squares' sum in the l2norm, as in transformers.
NORM_EPS = 1e-6

# Channels that a lane of l2norm and l2norm_backward has: 16 bytes.
NORM_PIECE = 8


class SequenceColumn:
    """sequences [N, COUNT] int32: first token row, tokens, first chunk slot, first segment slot, slots of the first and
    the last state."""

    ROW, LENGTH, CHUNK, SEGMENT, INITIAL, FINAL = range(6)
    COUNT = 6


class ChunkColumn:
    """chunks [chunk slots, COUNT] int32: first token row, tokens, sequence or PADDING."""

    ROW, LENGTH, SEQUENCE = range(3)
    COUNT = 3


class SegmentColumn:
    """segments [segment slots, COUNT] int32; a segment is a run of a sequence's chunks that one CTA goes through. First
    token row, tokens, first chunk slot, sequence, SegmentFlag, slots of the states before and after it, tokens up to
    the first checkpoint."""

    ROW, LENGTH, CHUNK, SEQUENCE, FLAGS, INITIAL, FINAL, UNTIL = range(8)
    COUNT = 8


class SegmentFlag:
    """Whether a segment is its sequence's first, and its last."""

    FIRST, LAST = 1, 2


class ForwardGate:
    """The forward's table of a chunk's gates, [chunk slots, H_v, COUNT, CHUNK] fp32: beta_i and beta_i gamma_i in pairs
    (two rows), scale gamma_i, gamma_C / gamma_i, gamma_C and next to it the log2 norm bound of maps/segments.cuh.
    With the l2norm the factors of keys and queries hold 1 / their norm as well."""

    BETA, QUERY, DECAY, TOTAL = 0, 2, 3, 4
    COUNT = 5


class FusedGate:
    """fused_forward's, in shared memory: ForwardGate's rows, then b_i log2(e); beta_i, with the l2norm then beta_i /
    |k_i|^2; and with the l2norm scale / |q_i|, 1 / |k_i|, |k_i|; exp(b_l - b_i), l the last token of i's block; four
    rows, one for each block, exp(b_i - b_l): so D_ij is a product where i's block comes after j's."""

    LOG, PLAIN_BETA, QUERY_SCALE, KEY_RSTD, KEY_NORM, FROM_BLOCK_END, TO_BLOCK_END = range(5, 12)
    COUNT = 15


class BackwardGate:
    """The backward's table, [chunk slots, H_v, COUNT, CHUNK] fp32: b_i log2(e), gamma_i, gamma_C / gamma_i, gamma_i /
    gamma_1, beta_i."""

    LOG, GAMMA, DECAY, FADE, BETA = range(5)
    COUNT = 5


class TableKind:
    """A table of indices that a call may have: none, or the width of its numbers. A table without elements has a null
    pointer too, so the pointer does not say whether there is a table."""

    NONE, INT32, INT64 = range(3)


class FirstStates:
    """Which sequences start from a state rather than from zero: none, all with a slot, those that a flag names."""

    NONE, ALL, FLAGGED = range(3)


class Dtype:
    """The dtype of a tensor that a kernel reads or writes in any floating dtype."""

    FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = range(4)


class Activation:
    """How to read and transform gates and betas, as one number; 0 means ready, in fp32.

    GATE: g = -exp(A_log) softplus(g_raw + dt_bias). BIAS: dt_bias is given. SIGMOID: beta = sigmoid(beta_raw).
    TWICE: beta is twice that. The other names are the first of two bits that hold the tensor's Dtype."""

    GATE, BIAS, SIGMOID, TWICE = 1, 2, 4, 8
    G, BETA, A_LOG, DT_BIAS = 4, 6, 8, 10


class DecodeTable:
    """decode's tables of indices: the first of two bits that each table's TableKind has in one number."""

    OFFSETS, STATES, ACCEPTED, WRITES, ROWS, PARENTS = range(0, 12, 2)


class TokenSum:
    """chunk_backward's sums of a chunk's tokens in shared memory, rows of CHUNK: of y what is of the queries, z, x, and
    rowsum(U * V) or, where that is not needed, dbeta; G's part of E and F * K K^T, of each warpgroup's columns."""

    QUERY, KEY, STATE, VALUE, BETWEEN, BETA = 0, 1, 2, 3, 4, 6
    COUNT = 8


class Ring:
    """Where a chunk's tiles are in fused_forward, as one number, because it lives through everything; the first bits of
    the stage (two bits) and its phase, of the stage of V, whose number is also that of the warpgroup that then makes
    matrices, and of that stage's phase."""

    STAGE, PHASE, VALUE_STAGE, VALUE_PHASE = 0, 2, 3, 4
    END = 5
    STAGES, VALUE_STAGES = 3, 2


class Place:
    """One register of a consumer of fused_forward: the first bits of its offset in a tile and its column in a
    fragment (core/tiles.cuh), of its warpgroup, and of its Ring."""

    OFFSET, COLUMN, WARPGROUP, RING = 0, 16, 20, 24


class NamedBarrier:
    """Named barriers of a CTA. TileLang takes the low numbers for what it synchronizes by itself."""

    SCAN_ROUNDED = 1  # segment_scan: S lies in shared memory
    BACKWARD_CLEARED = 4  # replay_states, chunk_backward: rows after the sequence are zeros
    BACKWARD_STAGED = 6  # chunk_backward: the warpgroups of dS, whose dS' lies in shared memory
    MATRICES = 8  # chunk_matrices
    TEAM = 9  # and the next, chunk_matrices: a team of warps
    CLEARED = 11  # chunk_forward: rows after the sequence are zeros
    FUSED_BEGIN = 11  # fused_forward: all consumers
    FUSED_MAKER = 12  # and the next: a warpgroup, in the middle of making matrices
    FUSED_TAIL = 14  # and the next: a warpgroup, rows after the sequence are zeros
