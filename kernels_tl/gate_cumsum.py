"""Chunk-local cumulative gate: b_i = g_1 + ... + g_i inside each chunk, and the factors made of it.

    b          [R, HV] fp32           the op's output `g`, if wanted (has_b); zero on padding rows
    gates      [NT, HV, 3, C] fp32    b_i, exp(b_i), exp(b_C - b_i), chunk by chunk (b stays constant behind the last
                                      token of a partial chunk, so b_C is always the chunk's total)

One thread a head walks down the tokens of one chunk: loads and stores of a warp are coalesced over heads.
Launched on [chunk slots, HV / 32].
"""

import tilelang.language as T

from kernels_tl.common import (
    CHUNK_LENGTH,
    CHUNK_ROW,
    CHUNK_SEQ,
    GATE_DECAY,
    GATE_GAMMA,
    GATE_LOG,
    GATE_ROWS,
    PADDING,
    PASS_CONFIGS as PASS_CONFIGS,
    TABLE_COLUMNS,
    C,
    dims,
)

HEADS = 32  # heads a CTA: one warp


def gate_cumsum():
    R, HV, NT = dims("R", "HV", "NT")

    @T.prim_func
    def main(
        g: T.Tensor([R, HV], "float32"),
        chunks: T.Tensor([NT, TABLE_COLUMNS], "int32"),
        b: T.Tensor([R, HV], "float32"),
        gates: T.Tensor([NT, HV, GATE_ROWS, C], "float32"),
        has_b: T.int32,
    ):
        with T.Kernel(NT, T.ceildiv(HV, HEADS), threads=HEADS) as (slot, head_block):
            hv = head_block * HEADS + T.get_thread_binding()
            row = chunks[slot, CHUNK_ROW]
            length = chunks[slot, CHUNK_LENGTH]
            total = T.alloc_local([C], "float32")
            if hv < HV:
                if chunks[slot, CHUNK_SEQ] == PADDING:
                    if has_b != 0:
                        for i in T.serial(length):
                            b[row + i, hv] = 0.0
                else:
                    # All loads first: they do not depend on each other, the sums do.
                    for i in T.unroll(C):
                        total[i] = 0.0
                        if i < length:
                            total[i] = g[row + i, hv]
                    for i in T.unroll(1, C):
                        total[i] = total[i] + total[i - 1]
                    if has_b != 0:
                        for i in T.unroll(C):
                            if i < length:
                                b[row + i, hv] = total[i]
                    for i in T.vectorized(C):
                        gates[slot, hv, GATE_LOG, i] = total[i]
                    for i in T.vectorized(C):
                        gates[slot, hv, GATE_GAMMA, i] = T.exp(total[i])
                    for i in T.vectorized(C):
                        gates[slot, hv, GATE_DECAY, i] = T.exp(total[C - 1] - total[i])

    return main
