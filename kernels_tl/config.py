"""The table of tiles: the resources of a CTA of each kernel. A kernel's page takes its numbers from here.

Numbers that CUDA and C++ need too are in layout.py; the table uses their names. The tables hold for both 16-bit
dtypes; a table keyed by K has a row for each K. `python -m flash_qla` prints what the compiler made of them.

    tile           extent of a CTA's tile, in value rows unless a comment names another unit
    stages         stages of the ring of operands in shared memory
    consumers      threads that compute
    producers      threads that load, store and compute tables; setmaxnreg needs whole warpgroups
    registers      registers per consumer and per producer thread after setmaxnreg; None keeps ptxas's choice
    early_factors  how many of eight quadruples of factors are loaded early: see registers() of states/recurrence.py
    shared         KB of shared memory; the kernel's page asserts that its buffers add up to it
    ctas           CTAs per SM
    spills         bytes that the compiler may spill
"""

from dataclasses import dataclass, replace

from kernels_tl.layout import (
    COPY_THREADS,
    COPY_TILE,
    DECODE_PART_ROWS_MMA,
    DECODE_TILE,
    DECODE_WARP_ROWS,
    DECODE_WARPS,
    GATE_HEADS,
    GATE_TOKENS,
    KEY_PART,
    MATRICES_CTAS,
    NARROW_KEY,
    NARROW_SCAN_COLUMNS,
    NARROW_TILE,
    PLAN_STEP,
    PORTABLE_SCAN_ROWS,
    SCAN_COLUMNS,
    WIDE_MATRICES_CTAS,
    WIDE_TILE,
    Ring,
)

WARPGROUP, WARP = 128, 32  # threads
WGMMA_ROWS = 64  # rows of S^T or dS^T that a warpgroup carries: the M of its WGMMA


def is_wide(K):
    """Whether a state of K channels leaves no registers for S^T in 16 bits. The kernels of such keys differ."""
    return K > NARROW_KEY


def key_parts(K):
    """Parts of a key's channels whose gradients different CTAs compute (token_gradients)."""
    return -(-K // KEY_PART)


@dataclass(frozen=True)
class Tile:
    tile: int
    consumers: int
    producers: int = 0
    stages: int = 1
    registers: tuple[int, int] | None = None
    early_factors: int | None = None
    shared: float = 0
    ctas: int = 1
    spills: int = 0

    @property
    def threads(self):
        return self.consumers + self.producers


def two_warpgroups(**fields):
    """A wide tile, two consumer warpgroups and one of producers. Registers: 2 * 224 + 56 = 2 * 232 + 40 = 2 * 240 + 24
    = 3 * 168."""
    return Tile(tile=WIDE_TILE, consumers=2 * WARPGROUP, producers=WARPGROUP, **fields)


# Tile: sequences of a step, one for each thread.
CHUNK_PLAN = Tile(tile=PLAN_STEP, consumers=PLAN_STEP)

# Keyed by K. Tile: value heads of a group that share K K^T, one for each warp. CTAs of an SM hide each other's
# latencies.
CHUNK_MATRICES = {
    128: Tile(tile=4, consumers=WARPGROUP, shared=54.796875, ctas=MATRICES_CTAS),
    256: Tile(tile=4, consumers=WARPGROUP, shared=86.796875, ctas=WIDE_MATRICES_CTAS),
}

# Tile: chunks at a time, one per warp.
SEGMENT_MEMORY = Tile(tile=4, consumers=4 * WARP)

# Keyed by K, then by value tile. The spills are around the stores of h; a forward without h does not pay for them. With
# K = 256 the state takes half of the registers, and shared memory has no room for a work tile's first state.
CHUNK_FORWARD = {
    128: {
        NARROW_TILE: Tile(
            tile=NARROW_TILE, consumers=WARPGROUP, producers=2 * WARP, stages=2, early_factors=8, shared=156.578125
        ),
        WIDE_TILE: two_warpgroups(stages=2, registers=(224, 56), early_factors=8, shared=212.578125),
    },
    256: {
        WIDE_TILE: two_warpgroups(stages=2, registers=(240, 24), early_factors=0, shared=210.5859375, spills=268),
    },
}

# Keyed by K. At most 99 KB of shared memory, so that every GPU from Ampere on has one CTA per SM. Stages: of K.
PORTABLE_FORWARD = {
    128: Tile(tile=NARROW_TILE, consumers=WARPGROUP, stages=2, shared=73.25),
    256: Tile(tile=NARROW_TILE, consumers=WARPGROUP, stages=1, shared=89.25),
}
PORTABLE_MATRICES_SPILLS = 12  # bytes, once per chunk
# The portable backward. Tile of the last kernel: value rows at a time. The spilled registers are addresses and, with
# K = 256, numbers of the state.
PORTABLE_REPLAY = {
    128: Tile(tile=NARROW_TILE, consumers=WARPGROUP, shared=33.25, spills=56),
    256: Tile(tile=NARROW_TILE, consumers=WARPGROUP, shared=49.25, spills=144),
}
PORTABLE_REPLAY_GRADIENTS = {
    128: Tile(tile=NARROW_TILE, consumers=WARPGROUP, shared=57.25, spills=48),
    256: Tile(tile=NARROW_TILE, consumers=WARPGROUP, shared=89.25, spills=1368),
}
# Stages: blocks of M.
PORTABLE_SCAN = {
    128: Tile(tile=PORTABLE_SCAN_ROWS, consumers=WARPGROUP, stages=3, shared=57.5),
    256: Tile(tile=PORTABLE_SCAN_ROWS, consumers=WARPGROUP, stages=2, shared=81),
}
PORTABLE_TOKEN_GRADIENTS = Tile(tile=NARROW_TILE, consumers=2 * WARPGROUP, shared=93.03125)

# The tile has all value rows of a head. More early factors would spill registers.
FUSED_FORWARD = two_warpgroups(stages=Ring.STAGES, registers=(224, 56), early_factors=4, shared=225.63671875)
# A register or two that a role stores and loads at most once per chunk, in the instances with A.
FUSED_A_SPILLS = {"bfloat16": 12, "float16": 48}

# Keyed by K. With K = 256 the epilogue warps spill addresses.
REPLAY_STATES = {
    128: two_warpgroups(stages=4, registers=(232, 40), early_factors=4, shared=213),
    256: two_warpgroups(stages=2, registers=(232, 40), early_factors=0, shared=194.5, spills=20),
}

# Only with K = 256. Stages: of K and the gates. The spilled registers are addresses and a few numbers of dS.
REPLAY_GRADIENTS = two_warpgroups(stages=2, registers=(240, 24), shared=210.5, spills=684)

# Only with K = 256. Tile: value rows at a time. Producers: the producer warp, two warps of dV, one of the gates.
TOKEN_GRADIENTS = Tile(
    tile=NARROW_TILE,
    consumers=2 * WARPGROUP,
    producers=4 * WARP,
    stages=2,
    registers=(216, 72),
    shared=197.03125,
)

# Keyed by K. With K = 128 SEGMENT_MAPS takes 5 % longer with all eight early factors
# (benchmarks/notes/split_sequences.md).
SEGMENT_MAPS = {
    128: two_warpgroups(stages=3, registers=(232, 40), early_factors=4, shared=123.75),
    256: two_warpgroups(stages=3, registers=(232, 40), early_factors=0, shared=171.75),
}
BACKWARD_MAPS = {
    128: two_warpgroups(stages=3, registers=(232, 40), early_factors=4, shared=195.75),
    256: two_warpgroups(stages=2, registers=(240, 24), early_factors=0, shared=194.5, spills=340),
}
# The instance with the l2norm inside.
BACKWARD_MAPS_NORMALIZE = replace(BACKWARD_MAPS[128], shared=197.25)

# Keyed by K, then by columns of S, which are the tile. Stages: of Z. With K = 256 M arrives in blocks, and S has one
# buffer.
SEGMENT_SCAN = {
    128: {
        NARROW_SCAN_COLUMNS: Tile(
            tile=NARROW_SCAN_COLUMNS, consumers=2 * WARPGROUP, producers=2 * WARP, stages=3, shared=168.01171875
        ),
        SCAN_COLUMNS: Tile(
            tile=SCAN_COLUMNS, consumers=2 * WARPGROUP, producers=2 * WARP, stages=3, shared=208.01171875
        ),
    },
    256: {
        SCAN_COLUMNS: Tile(
            tile=SCAN_COLUMNS, consumers=4 * WARPGROUP, producers=2 * WARP, stages=2, shared=224.0078125
        ),
    },
}
COMPOSE_MAPS = {
    128: Tile(tile=SCAN_COLUMNS, consumers=2 * WARPGROUP, producers=WARP, stages=3, shared=208.01171875),
    256: Tile(tile=SCAN_COLUMNS, consumers=4 * WARPGROUP, producers=WARP, stages=2, shared=224.0078125),
}

# Consumers: two warpgroups carry dS, one computes dK. Producers: the producer warp, two of dV, one of the gates.
# Registers: all consumers have the same number, 3 * 160 + 32 = 4 * 128.
CHUNK_BACKWARD = Tile(
    tile=WIDE_TILE,
    consumers=3 * WARPGROUP,
    producers=4 * WARP,
    stages=2,
    registers=(160, 32),
    shared=224.5625,
    spills=164,
)
# The instance with the l2norm inside. Its warpgroup of dK spills numbers of dQ while it takes dQ through the l2norm.
CHUNK_BACKWARD_NORMALIZE = replace(CHUNK_BACKWARD, shared=225.5625, spills=296)

# Tile: value heads.
GATE_GRADIENTS = Tile(tile=GATE_HEADS, consumers=GATE_HEADS * GATE_TOKENS)

# Tile: tokens, and columns.
COPY_TOKENS = Tile(tile=COPY_TILE, consumers=COPY_THREADS, ctas=9)

# Tile: parts of rows of queries or keys, NORM_PIECE channels per thread.
L2NORM = Tile(tile=256, consumers=256)

DECODE_THREADS = DECODE_WARPS * WARP


@dataclass(frozen=True)
class DecodePath:
    """A path of decode. `group`: the value rows that the warps of a CTA have at a time; a tile is one group or several.
    `groups_in_shared`: the groups of a state's rows in shared memory."""

    ctas: int  # per SM
    groups_in_shared: int = 0
    group: int = DECODE_WARPS * DECODE_WARP_ROWS
    tile: int = DECODE_WARPS * DECODE_WARP_ROWS
    spills: int = 0

    @property
    def facts(self):
        """What csrc/gpu/decode.cpp needs for the grid."""
        return {"ctas": self.ctas, "group_rows": self.group, "has_groups": self.tile > self.group}


# Keyed by K, then by path. A suffix _16 or _8: the path with states of 16 or 8 bits. A CTA stores and loads most of its
# spilled registers only once. With K > 128 and one token a warp has half as many rows at a time.
WIDE_GROUP = {"group": 16, "tile": 16}
DECODE = {
    128: {
        "one_token": DecodePath(ctas=7),
        "one_token_16": DecodePath(ctas=8),
        "one_token_8": DecodePath(ctas=6, tile=DECODE_TILE),
        "rows": DecodePath(ctas=7, groups_in_shared=1, spills=128),
        "rows_8": DecodePath(ctas=7, groups_in_shared=1, spills=176),
        "blocks": DecodePath(ctas=3, groups_in_shared=3, tile=DECODE_TILE),  # two are fetched and one is written
        "tensor_cores": DecodePath(ctas=4, groups_in_shared=4, tile=DECODE_TILE),
        "key_first": DecodePath(ctas=5, groups_in_shared=2),  # one is fetched and one is written
    },
    256: {
        "one_token": DecodePath(ctas=7, **WIDE_GROUP),
        "one_token_16": DecodePath(ctas=8, **WIDE_GROUP),
        "rows": DecodePath(ctas=4, groups_in_shared=1, spills=248),
        "key_first": DecodePath(ctas=2, groups_in_shared=2),
    },
}


def decode_path(K, path, state_bytes):
    """The entry of a path of decode, with states whose numbers have state_bytes bytes."""
    return DECODE[K].get(f"{path}_{8 * state_bytes}", DECODE[K][path])


# Keyed by whether tokens and states have one dtype. Tile: parts of value rows, one or more per warp.
DECODE_BUFFERED = {
    False: Tile(tile=DECODE_WARP_ROWS * DECODE_WARPS, consumers=DECODE_THREADS, ctas=7),
    True: Tile(tile=DECODE_PART_ROWS_MMA * DECODE_WARPS, consumers=DECODE_THREADS, ctas=6),
}
