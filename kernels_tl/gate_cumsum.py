"""Chunk-local cumulative gate: b_i = g_1 + ... + g_i inside each chunk, and the table of factors made of it.

    g          [R, HV] fp32           log gates; with is_cumulative they are b already, as the backward gets them
    b          [R, HV] fp32           the op's output `g`, if wanted (has_b); zero on padding rows
    gates      [NT, HV, 5, C] fp32    b_i, exp(b_i), exp(b_C - b_i), exp(b_i - b_1), beta_i, chunk by chunk. Behind the
                                      last token of a partial chunk b stays constant, so b_C is always the total of the
                                      chunk, and beta is 0. exp(b_i - b_1) is for the backward, and only made there

One thread a head walks down the tokens of one chunk: loads and stores of a warp are coalesced over heads.
Launched on [chunk slots, HV / 32].
"""

import tilelang.language as T

from kernels_tl.common import (
    CHUNK_LENGTH,
    CHUNK_ROW,
    CHUNK_SEQ,
    GATE_BETA,
    GATE_DECAY,
    GATE_FADE,
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
        beta: T.Tensor([R, HV], "float32"),
        chunks: T.Tensor([NT, TABLE_COLUMNS], "int32"),
        b: T.Tensor([R, HV], "float32"),
        gates: T.Tensor([NT, HV, GATE_ROWS, C], "float32"),
        is_cumulative: T.int32,
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
                        if (is_cumulative == 0) | (i >= length):
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
                    if is_cumulative != 0:
                        for i in T.vectorized(C):
                            gates[slot, hv, GATE_FADE, i] = T.exp(total[i] - total[0])
                    for i in T.unroll(C):
                        total[i] = 0.0
                        if i < length:
                            total[i] = beta[row + i, hv]
                    for i in T.vectorized(C):
                        gates[slot, hv, GATE_BETA, i] = total[i]

    return main
