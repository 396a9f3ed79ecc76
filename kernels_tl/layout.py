"""Numbers that kernels, device headers, host code and the Python package share, written once.

The build writes this file as layout.h for CUDA and C++ (build_tools/layout.py): CHUNK becomes flash_qla::kChunk, ROW of
the class SegmentColumn becomes flash_qla::SegmentColumn::kRow. The file holds plain numbers only. docs/glossary.md
explains the project's symbols.
"""

# Tokens of a chunk, the C of the chunk form: the M of one WGMMA, and the largest inverse that fits a warpgroup.
CHUNK = 64

# A chunk's matrices consist of blocks of BLOCK x BLOCK.
BLOCK = 16

# Elements in memory of a chunk's L^T or P^T. The matrix is upper triangular: ten of its blocks are stored. The four
# rows of blocks follow one another, each from the diagonal block on.
TRIANGLE = 10 * BLOCK * BLOCK

# The sequence of a chunk whose rows no sequence covers. They are padding, and their outputs are zeros.
PADDING = -1

# Special numbers in place of a slot. NO_STATE: no state; as an initial state, zeros. FROM_SCAN: the scan writes it.
NO_STATE, FROM_SCAN = -1, -2

# The table of segment_memory: the chunks from which a segment's first state is computed, at most LONGEST_MEMORY, or
# FROM_MAPS, if more count: then the scan writes that state.
LONGEST_MEMORY, FROM_MAPS = 16, -1

# Tokens up to the first checkpoint, if there is none: more than a sequence has, in whole chunks.
WHOLE_SEQUENCE = 0x7FFFFFFF // CHUNK * CHUNK

# Sequences of a step of chunk_plan. The table of segments is sorted within a step: the longest sequence comes first.
PLAN_STEP = 256

# CTAs of chunk_matrices per SM, for K up to 128 and for larger K.
MATRICES_CTAS, WIDE_MATRICES_CTAS = 4, 2

# Head dimensions are multiples of HEAD_DIM_STEP, because TMA needs rows of whole 16 bytes. Values have at most
# MOST_VALUE_DIM channels. kernels_tl/instances.py has the values of K.
HEAD_DIM_STEP, MOST_VALUE_DIM = 8, 512

# Keys of up to NARROW_KEY channels leave registers for S^T in 16 bits; the kernels for larger K differ. There a CTA of
# token_gradients computes the gradients of KEY_PART channels.
NARROW_KEY, KEY_PART = 128, 128

# Rows of S^T per CTA of chunk_forward, for one or two consumer warpgroups. A narrow tile gives more CTAs, a wide one
# fetches K and Q less often.
NARROW_TILE, WIDE_TILE = 64, 128

# Columns of S per CTA of segment_scan and compose_maps. Narrow: of segment_scan, when all CTAs fit in one wave.
SCAN_COLUMNS, NARROW_SCAN_COLUMNS = 32, 16

# Rows of S^T per CTA of portable_scan.
PORTABLE_SCAN_ROWS = 16

# gate_gradients: value heads per CTA, whose fp32 numbers of a token fill a sector of 32 bytes; tokens at a time.
GATE_HEADS, GATE_TOKENS = 8, 32

# decode.
DECODE_WARPS = 4  # warps per CTA
DECODE_WARP_ROWS = 8  # value rows of a state that a warp has at a time
DECODE_TOKENS = 8  # tokens prepared at a time
DECODE_BLOCK = 4  # path `blocks`: tokens of a block
DECODE_TILE = 128  # most value rows per CTA if tokens are processed together
DECODE_LANES = 8  # path `blocks`: lanes that share a value row
DECODE_LANE_ROWS = 2  # path `blocks`: value rows per lane

# decode_region: most value rows of a key head, and of a CTA; most CTAs of a cluster
REGION_VALUES, REGION_ROWS, REGION_CTAS = 2048, 512, 8

# decode_buffered; MMA: if tokens and states have one dtype of 16 bits.
DECODE_BACKLOG = 32  # most steps of a replay buffer, one per lane
DECODE_PART_ROWS_MMA = 16  # value rows of a part of a CTA

# Shared memory: bytes of padding after a row of a state; floats from one inverted diagonal block to the next; floats
# from one diagonal block of K K^T to the next. Two blocks' rows are read together, so they lie in different banks.
STATE_PAD = 16
INVERSE_STRIDE = BLOCK * BLOCK + 16
DIAGONAL_STRIDE = BLOCK * BLOCK + 4


# The least beta that the backward in bf16 divides by. A token with a smaller beta takes dbeta from V instead.
LEAST_BETA = 2.0**-40

# Added to the squares' sum in the l2norm, as in transformers.
NORM_EPS = 1e-6

# Channels that a lane of l2norm and l2norm_backward has: 16 bytes.
NORM_PIECE = 8

# copy_tokens: tokens and columns of a tile, and threads per CTA.
COPY_TILE, COPY_THREADS = 64, 128
COPY_STEP = COPY_THREADS // COPY_TILE  # from one of a thread's elements to the next
COPY_PITCH = COPY_TILE + 2  # of a token in shared memory, so that reads along the tokens have no bank conflicts


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
    """segments [segment slots, COUNT] int32; a segment is a run of a sequence's chunks that one CTA processes. First
    token row, tokens, first chunk slot, sequence, SegmentFlag, slots of the states before and after it, tokens up to
    the first checkpoint. FROM_SCAN in place of a slot: the state is between two segments. In the backward, INITIAL is
    where dS is written and FINAL where it is read."""

    ROW, LENGTH, CHUNK, SEQUENCE, FLAGS, INITIAL, FINAL, UNTIL = range(8)
    COUNT = 8


class UnplannedSegment:
    """Columns after those of SegmentColumn where a CTA finds its segment itself: the row after the sequence's tokens,
    which exceeds ROW + LENGTH if the sequence has no slot, and the first row that no sequence covers."""

    END, COVERED = SegmentColumn.COUNT, SegmentColumn.COUNT + 1
    COUNT = SegmentColumn.COUNT + 2


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
    """fused_forward's table of a chunk's gates, in shared memory [COUNT, CHUNK] fp32: ForwardGate's rows, then

    LOG              b_i log2(e)
    PLAIN_BETA       beta_i; with the l2norm later beta_i / |k_i|^2
    QUERY_SCALE      scale / |q_i|, KEY_RSTD 1 / |k_i|, KEY_NORM |k_i|: only with the l2norm
    FROM_BLOCK_END   exp(b_l - b_i), l the last token of i's block
    TO_BLOCK_END     exp(b_i - b_l), l the last token of block j: four rows, j = 0 to 3

    So D_ij is a product of two numbers if i's block comes after j's."""

    LOG, PLAIN_BETA, QUERY_SCALE, KEY_RSTD, KEY_NORM, FROM_BLOCK_END, TO_BLOCK_END = range(5, 12)
    COUNT = 15


class BackwardGate:
    """The backward's table of a chunk's gates, [chunk slots, H_v, COUNT, CHUNK] fp32: b_i log2(e), gamma_i,
    gamma_C / gamma_i, gamma_i / gamma_1, beta_i."""

    LOG, GAMMA, DECAY, FADE, BETA = range(5)
    COUNT = 5


class NormalizedGate:
    """BackwardGate's table with the l2norm inside, r_q = 1 / |q_i| and r_k = 1 / |k_i|: b_i log2(e),
    r_q gamma_i / gamma_1, r_k gamma_C / gamma_i, r_k gamma_i / gamma_1, beta_i, r_q, r_k."""

    LOG, QUERY_FADE, DECAY, KEY_FADE, BETA, QUERY_RSTD, KEY_RSTD = range(7)
    COUNT = 7


class TableKind:
    """The width of a table's numbers, or NONE: the call has no such table. A table without elements has a null pointer
    too, so the pointer does not tell whether there is a table."""

    NONE, INT32, INT64 = range(3)


class FirstStates:
    """Which sequences start from a state instead of zero: none, all that have a slot, those whose flag is set."""

    NONE, ALL, FLAGGED = range(3)


class Dtype:
    """The dtype of a tensor, as a run-time number, if a kernel takes any floating dtype. Only states have 8 bits; their
    dtypes come last."""

    FLOAT32, BFLOAT16, FLOAT16, FLOAT64, FLOAT8_E4M3FN, FLOAT8_E5M2 = range(6)


class Activation:
    """How to read and transform gates and betas, as one number; 0 means activated, in fp32.

    GATE: g = -exp(A_log) softplus(g_raw + dt_bias). BIAS: dt_bias is given. SIGMOID: beta = sigmoid(beta_raw).
    TWICE: beta is twice that. The other names are the first of two bits that hold the tensor's Dtype."""

    GATE, BIAS, SIGMOID, TWICE = 1, 2, 4, 8
    G, BETA, A_LOG, DT_BIAS = 4, 6, 8, 10


class TokenSum:
    """The sums of chunk_backward and token_gradients for each token of a chunk, in shared memory [COUNT, CHUNK] fp32.
    chunk_backward.py explains the symbols:

    QUERY     scale gamma rowsum(Q * Q_S)
    KEY       z
    STATE     x
    VALUE     rowsum(U * V) for tokens with needs_V (gradients/gradients.cuh), dbeta for the others
    BETWEEN   row sums of G * Q K^T below the diagonal: two rows, one for each warpgroup's columns
    BETA      row sums of F * K K^T: two rows, one for each warpgroup's columns"""

    QUERY, KEY, STATE, VALUE, BETWEEN, BETA = 0, 1, 2, 3, 4, 6
    COUNT = 8


class Ring:
    """The stages of a chunk's tiles in fused_forward, as one number, because each thread always keeps it in a register.
    The names are the first bits of: the stage (two bits), its phase, the stage of V (one bit), its phase. The stage of
    V is also the number of the warpgroup that computes matrices after this chunk."""

    STAGE, PHASE, VALUE_STAGE, VALUE_PHASE = 0, 2, 3, 4
    END = 5
    STAGES, VALUE_STAGES = 3, 2


class ConsumerBits:
    """One register of a consumer of fused_forward. The names are the first bits of: its offset in a tile and its column
    in a fragment (core/tiles.cuh), its warpgroup, the next entry of the ring of work tiles, its phase (WAVE has
    both), its Ring."""

    OFFSET, COLUMN, WARPGROUP, WAVE, WAVE_PHASE, RING = 0, 16, 20, 21, 23, 24
    WAVES = 4  # entries of the ring of work tiles


class NamedBarrier:
    """Named barriers of a CTA. TileLang takes the low numbers for barriers of its own."""

    SCAN_ROUNDED = 1  # segment_scan, compose_maps: both parts of S are in shared memory
    BACKWARD_CLEARED = 4  # replay_states, the maps, chunk_backward: rows after the sequence are zeros
    BACKWARD_STAGED = 6  # chunk_backward: the tiles of both warpgroups of dS are complete, dS' or U
    MATRICES = 8  # chunk_matrices: all threads
    TEAM = 9  # and the next, chunk_matrices: the warps of a team
    CLEARED = 11  # chunk_forward: rows after the sequence are zeros
    FUSED_BEGIN = 11  # fused_forward: all consumers, L^T and P^T are zeros
    FUSED_MAKER = 12  # and the next, fused_forward: a warpgroup, while it computes matrices
    FUSED_TAIL = 14  # and the next, fused_forward: a warpgroup, rows after the sequence are zeros
