"""dA_log and ddt_bias of the gate's activation: the sums over all chunks of what chunk_backward leaves of each, in fp32
and, whatever the grid, in the same order.

    chunks       [chunk_slots, ChunkColumn.COUNT] int32     of chunk_plan: slots that no sequence has are left out
    gate_sums    [chunk_slots, H_v, 2] fp32                 of chunk_backward
    dA_log, ddt_bias  [H_v] fp32                            the second if wanted

A CTA takes 4 heads. A thread adds up every 64th slot of one of them; then the threads of a head add up in pairs.

Launched on [H_v / 4], behind chunk_backward.
"""

import tilelang.language as T

from kernels_tl.common import PASS_CONFIGS as PASS_CONFIGS, dims
from kernels_tl.layout import PADDING, ChunkColumn

HEADS = 4  # of a CTA: their sums of a slot are a sector of 32 bytes
SLOTS = 64  # at a time
THREADS = HEADS * SLOTS


def sum_gates():
    H_v, chunk_slots = dims("H_v", "chunk_slots")

    @T.prim_func
    def main(
        chunks: T.Tensor([chunk_slots, ChunkColumn.COUNT], "int32"),
        gate_sums: T.Tensor([chunk_slots, H_v, 2], "float32"),
        dA_log: T.Tensor([H_v], "float32"),
        ddt_bias: T.Tensor([H_v], "float32"),
        has_bias: T.int32,
    ):
        with T.Kernel(T.ceildiv(H_v, HEADS), threads=THREADS) as cta:
            sums = T.alloc_shared([2, THREADS], "float32")
            total = T.alloc_local([2], "float32")
            tx = T.get_thread_binding()
            hv = T.alloc_var("int32", init=cta * HEADS + tx % HEADS)
            T.pdl_sync()
            total[0] = 0.0
            total[1] = 0.0
            if hv < H_v:
                for step in T.serial(T.ceildiv(chunk_slots, SLOTS)):
                    slot = T.alloc_var("int32", init=step * SLOTS + tx // HEADS)
                    if slot < chunk_slots:  # noqa: SIM102, `and` would read beyond the table
                        if chunks[slot, ChunkColumn.SEQUENCE] != PADDING:
                            total[0] += gate_sums[slot, hv, 0]
                            total[1] += gate_sums[slot, hv, 1]
            sums[0, tx] = total[0]
            sums[1, tx] = total[1]
            for bit in T.unroll(SLOTS.bit_length() - 1):
                T.sync_threads()
                half = THREADS >> (bit + 1)
                if tx < half:
                    sums[0, tx] += sums[0, tx + half]
                    sums[1, tx] += sums[1, tx + half]
            if (tx < HEADS) & (hv < H_v):
                dA_log[hv] = sums[0, tx]
                if has_bias != 0:
                    ddt_bias[hv] = sums[1, tx]

    return main
