"""The backward's table of factors, made of the chunk-local cumulative gate b_i = g_1 + ... + g_i that the forward kept.

    b          [tokens, H_v] fp32
    gates      [chunk_slots, H_v, 5, C] fp32    b_i, exp(b_i), exp(b_C - b_i), exp(b_i - b_1), beta_i, chunk by chunk. Behind the
                                      last token of a partial chunk b stays constant, so b_C is always the total of the
                                      chunk, and beta is 0

One thread a head goes through the tokens of one chunk: loads and stores of a warp are coalesced over heads.
Launched on [chunk slots, H_v / 32].
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as PASS_CONFIGS,
    C,
    dims,
)
from kernels_tl.layout import (
    PADDING,
    BackwardGate,
    ChunkColumn,
)

HEADS = 32  # heads a CTA: one warp
PART = 32  # tokens whose loads are in flight together


def replay_gates():
    tokens, H_v, chunk_slots = dims("tokens", "H_v", "chunk_slots")

    @T.prim_func
    def main(
        b: T.Tensor([tokens, H_v], "float32"),
        beta: T.Tensor([tokens, H_v], "float32"),
        chunks: T.Tensor([chunk_slots, ChunkColumn.COUNT], "int32"),
        gates: T.Tensor([chunk_slots, H_v, BackwardGate.COUNT, C], "float32"),
    ):
        with T.Kernel(chunk_slots, T.ceildiv(H_v, HEADS), threads=HEADS) as (slot, head_block):
            hv = head_block * HEADS + T.get_thread_binding()
            row = chunks[slot, ChunkColumn.ROW]
            length = chunks[slot, ChunkColumn.LENGTH]
            values = T.alloc_local([PART], "float32")
            if (hv < H_v) & (chunks[slot, ChunkColumn.SEQUENCE] != PADDING):
                start = T.alloc_var("float32", init=b[row, hv])
                total = T.alloc_var("float32", init=b[row + length - 1, hv])
                for part in T.serial(C // PART):
                    for i in T.unroll(PART):
                        values[i] = total
                        if part * PART + i < length:
                            values[i] = b[row + part * PART + i, hv]
                    for i in T.vectorized(PART):
                        gates[slot, hv, BackwardGate.LOG, part * PART + i] = values[i]
                    for i in T.vectorized(PART):
                        gates[slot, hv, BackwardGate.GAMMA, part * PART + i] = T.exp(values[i])
                    for i in T.vectorized(PART):
                        gates[slot, hv, BackwardGate.DECAY, part * PART + i] = T.exp(total - values[i])
                    for i in T.vectorized(PART):
                        gates[slot, hv, BackwardGate.FADE, part * PART + i] = T.exp(values[i] - start)
                    for i in T.unroll(PART):
                        values[i] = 0.0
                        if part * PART + i < length:
                            values[i] = beta[row + part * PART + i, hv]
                    for i in T.vectorized(PART):
                        gates[slot, hv, BackwardGate.BETA, part * PART + i] = values[i]

    return main
