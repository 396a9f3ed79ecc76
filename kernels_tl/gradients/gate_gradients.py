"""Gradients of the caller's gates and betas, from the gradients of g and beta by chunk_backward or token_gradients:

    dg = sum of dg_parts,           db = sum of db_parts
    dg_raw = dg * slope of g,       db_raw = db * slope of beta      for each activation that is inside
    dA_log = sum_t dg_t g_t,        ddt_bias = sum_t dg_raw_t        if the gate's activation is inside

    db_parts, dg_parts  [parts, tokens, H_v] fp32           chunk_backward's or token_gradients' results
    db, dg              [tokens, H_v]                       the gradients of the caller's betas and gates
    gate_sums           [chunk_slots, H_v, 2] fp32          a chunk's terms of dA_log and ddt_bias
    counters            [H_v / 8]                           CTAs of 8 heads that have ended; 0 at the start

Each gradient has the dtype of its input. Rows that no sequence covers get zeros.

backward.cpp launches [chunk_slots, H_v / 8] CTAs after the kernel of the gradients, if an activation is inside or there
are several parts. A CTA takes 8 heads of a chunk. Of the CTAs with the same heads, the last one to end adds the sums of
all chunks, in an order that depends on shapes alone.
"""

import tilelang.language as T

from kernels_tl.bundles import Gates, Plan, Sizes
from kernels_tl.config import GATE_GRADIENTS as TILE
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, dims, extern
from kernels_tl.layout import GATE_HEADS, PADDING, ChunkColumn

PRELUDE = """
#include "gradients/gate_gradients.cuh"
"""


def gate_gradients():
    sizes = Sizes()
    tokens, H_v, chunk_slots = sizes.tokens, sizes.H_v, sizes.chunk_slots
    parts, head_blocks = dims("parts", "head_blocks")

    @T.prim_func
    def main(
        sizes: sizes,
        plan: Plan(sizes),
        gates: Gates(sizes),
        db_parts: T.Tensor([parts, tokens, H_v], "float32"),
        dg_parts: T.Tensor([parts, tokens, H_v], "float32"),
        db: T.Tensor([tokens, H_v], "float32"),  # db and dg: dtypes by `activations`
        dg: T.Tensor([tokens, H_v], "float32"),
        gate_sums: T.Tensor([sizes.chunk_slots, H_v, 2], "float32"),
        counters: T.Tensor([head_blocks], "int32"),
        dA_log: T.Tensor([H_v], "float32"),
        ddt_bias: T.Tensor([H_v], "float32"),
    ):
        with T.Kernel(chunk_slots, head_blocks, threads=TILE.threads, prelude=PRELUDE) as (slot, block):
            T.pdl_sync()
            extern(
                "gate_gradients",
                extern(
                    "GateParts",
                    T.access_ptr(db_parts[0, 0, 0], "r"),
                    T.access_ptr(dg_parts[0, 0, 0], "r"),
                    T.Cast("int32", parts),
                    T.Cast("int64", tokens) * H_v,
                ),
                extern(
                    "RawGates",
                    T.access_ptr(gates.g[0, 0], "r"),
                    T.access_ptr(gates.beta[0, 0], "r"),
                    T.access_ptr(gates.A_log[0], "r"),
                    T.access_ptr(gates.dt_bias[0], "r"),
                    gates.activations,
                ),
                extern(
                    "RawGradients",
                    T.access_ptr(db[0, 0], "w"),
                    T.access_ptr(dg[0, 0], "w"),
                    T.access_ptr(dA_log[0], "w"),
                    T.access_ptr(ddt_bias[0], "w"),
                ),
                extern(
                    "GateWork",
                    slot,
                    T.Cast("int32", chunk_slots),
                    block * GATE_HEADS,
                    T.Cast("int32", H_v),
                    T.Cast("int64", plan.chunks[slot, ChunkColumn.ROW]),
                    plan.chunks[slot, ChunkColumn.LENGTH],
                    plan.chunks[slot, ChunkColumn.SEQUENCE] == PADDING,
                ),
                T.access_ptr(gate_sums[0, 0, 0], "rw"),
                T.access_ptr(counters[block], "rw"),
            )

    return main
