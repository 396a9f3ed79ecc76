"""How many chunks before a segment decide its first state, by the bound of maps/segments.cuh.

    memory      [segment_slots, H_v] int32   chunks before the segment, 0 for a sequence's first segment; FROM_MAPS if
                                             they are more than LONGEST_MEMORY
    needs_maps  [N, H_v] int32               1 where that holds for a segment of the head; chunk_plan has written zeros

forward.cpp launches [segments * H_v] CTAs if fused_forward runs over segments. A CTA takes one, and goes back from the
chunk before it, a chunk per warp. fused_forward begins the segment that many chunks earlier, from a state of zero.
Maps are needed only for heads that remember more.

The bound needs |k|^2, which the kernel computes itself, because chunk_matrices, too, runs only for heads that need
maps. Eight lanes read a key together: a load of 32 lanes from 32 keys would take 32 cycles of the L1 cache.
"""

import tilelang.language as T

from kernels_tl.bundles import Gates, Memory, Plan, Sizes, Tokens
from kernels_tl.config import SEGMENT_MEMORY as TILE
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, C, element_type, extern
from kernels_tl.core.cta import Variables
from kernels_tl.layout import SegmentColumn, SequenceColumn

PRELUDE = """
#include "maps/segment_memory.cuh"
"""


def segment_memory(dtype, K, normalize):
    sizes = Sizes()
    H_v = sizes.H_v
    options = f"{element_type(dtype)}, {str(normalize).lower()}, {TILE.tile}"

    @T.prim_func
    def main(
        sizes: sizes,
        tokens: Tokens(sizes, dtype),
        gates: Gates(sizes),
        plan: Plan(sizes),
        memory: Memory(sizes),
    ):
        with T.Kernel(sizes.segment_slots * H_v, threads=TILE.threads, prelude=PRELUDE) as cta:
            T.pdl_sync()
            T.pdl_trigger()
            slot = T.alloc_var("int32", init=T.truncdiv(cta, T.Cast("int32", H_v)))
            hv = T.alloc_var("int32", init=cta - slot * T.Cast("int32", H_v))
            segment = Variables(
                row=plan.segments[slot, SegmentColumn.ROW],
                length=plan.segments[slot, SegmentColumn.LENGTH],
                n=plan.segments[slot, SegmentColumn.SEQUENCE],
            )
            if segment.length == 0:
                extern("leave")
            before = T.truncdiv(segment.row - plan.sequences[segment.n, SequenceColumn.ROW], C)
            extern(
                f"find_memory<{options}>",
                extern(
                    "BoundInputs",
                    T.access_ptr(tokens.k[0, 0, 0], "r"),
                    T.access_ptr(gates.g[0, 0], "r"),
                    T.access_ptr(gates.beta[0, 0], "r"),
                    T.access_ptr(gates.A_log[0], "r"),
                    T.access_ptr(gates.dt_bias[0], "r"),
                    gates.activations,
                    T.Cast("int32", sizes.H_k),
                    T.Cast("int32", H_v),
                    T.Cast("int32", sizes.key_dim),
                    T.Cast("int64", tokens.k_row),
                    T.Cast("int64", tokens.k_head),
                ),
                segment.row,
                before,
                hv,
                T.access_ptr(memory.memory[slot, hv], "w"),
                T.access_ptr(memory.needs_maps[segment.n, hv], "w"),
            )

    return main
