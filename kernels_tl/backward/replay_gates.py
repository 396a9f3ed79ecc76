"""The backward's table of factors, made of the chunk-local cumulative gate b_i = g_1 + ... + g_i that the forward kept.

    g_cumsum, beta  [tokens, H_v] fp32: b_i of a token
    gates    [chunk_slots, H_v, 5, C] fp32    the rows of layout.BackwardGate

Behind the last token of a partial chunk b stays constant, so b_C is always the total of the chunk, and beta is 0.

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
FACTORS = {
    BackwardGate.LOG: lambda b_i, b_1, b_C: b_i,
    BackwardGate.GAMMA: lambda b_i, b_1, b_C: T.exp(b_i),
    BackwardGate.DECAY: lambda b_i, b_1, b_C: T.exp(b_C - b_i),
    BackwardGate.FADE: lambda b_i, b_1, b_C: T.exp(b_i - b_1),
}


def replay_gates():
    tokens, H_v, chunk_slots = dims("tokens", "H_v", "chunk_slots")

    @T.macro
    def load(values, source, row, hv, part, length, behind):
        """A part's tokens of a tensor [tokens, H_v]; what is behind the chunk's last token gets a value of its own."""
        for i in T.unroll(PART):
            values[i] = behind
            if part * PART + i < length:
                values[i] = source[row + part * PART + i, hv]

    @T.prim_func
    def main(
        g_cumsum: T.Tensor([tokens, H_v], "float32"),
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
                b_1 = T.alloc_var("float32", init=g_cumsum[row, hv])
                b_C = T.alloc_var("float32", init=g_cumsum[row + length - 1, hv])
                for part in T.serial(C // PART):
                    load(values, g_cumsum, row, hv, part, length, b_C)
                    for gate, factor in FACTORS.items():
                        for i in T.vectorized(PART):
                            gates[slot, hv, gate, part * PART + i] = factor(values[i], b_1, b_C)
                    load(values, beta, row, hv, part, length, 0.0)
                    for i in T.vectorized(PART):
                        gates[slot, hv, BackwardGate.BETA, part * PART + i] = values[i]

    return main
