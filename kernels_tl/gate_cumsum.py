"""The backward's table of factors, made of the chunk-local cumulative gate b_i = g_1 + ... + g_i that the forward kept.

    b          [R, HV] fp32
    gates      [NT, HV, 5, C] fp32    b_i, exp(b_i), exp(b_C - b_i), exp(b_i - b_1), beta_i, chunk by chunk. Behind the
                                      last token of a partial chunk b stays constant, so b_C is always the total of the
                                      chunk, and beta is 0

One thread a head goes through the tokens of one chunk: loads and stores of a warp are coalesced over heads.
Launched on [chunk slots, HV / 32].
"""

import tilelang.language as T

from kernels_tl.common import (
    CHUNK_COLUMNS,
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
    C,
    dims,
)

HEADS = 32  # heads a CTA: one warp
PART = 32  # tokens whose loads are in flight together


def gate_cumsum():
    R, HV, NT = dims("R", "HV", "NT")

    @T.prim_func
    def main(
        b: T.Tensor([R, HV], "float32"),
        beta: T.Tensor([R, HV], "float32"),
        chunks: T.Tensor([NT, CHUNK_COLUMNS], "int32"),
        gates: T.Tensor([NT, HV, GATE_ROWS, C], "float32"),
    ):
        with T.Kernel(NT, T.ceildiv(HV, HEADS), threads=HEADS) as (slot, head_block):
            hv = head_block * HEADS + T.get_thread_binding()
            row = chunks[slot, CHUNK_ROW]
            length = chunks[slot, CHUNK_LENGTH]
            values = T.alloc_local([PART], "float32")
            if (hv < HV) & (chunks[slot, CHUNK_SEQ] != PADDING):
                start = T.alloc_var("float32", init=b[row, hv])
                total = T.alloc_var("float32", init=b[row + length - 1, hv])
                for part in T.serial(C // PART):
                    for i in T.unroll(PART):
                        values[i] = total
                        if part * PART + i < length:
                            values[i] = b[row + part * PART + i, hv]
                    for i in T.vectorized(PART):
                        gates[slot, hv, GATE_LOG, part * PART + i] = values[i]
                    for i in T.vectorized(PART):
                        gates[slot, hv, GATE_GAMMA, part * PART + i] = T.exp(values[i])
                    for i in T.vectorized(PART):
                        gates[slot, hv, GATE_DECAY, part * PART + i] = T.exp(total - values[i])
                    for i in T.vectorized(PART):
                        gates[slot, hv, GATE_FADE, part * PART + i] = T.exp(values[i] - start)
                    for i in T.unroll(PART):
                        values[i] = 0.0
                        if part * PART + i < length:
                            values[i] = beta[row + part * PART + i, hv]
                    for i in T.vectorized(PART):
                        gates[slot, hv, GATE_BETA, part * PART + i] = values[i]

    return main
