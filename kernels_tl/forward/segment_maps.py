"""The map of each segment from the state before it to the state behind it, S -> M S + N, all segments in parallel.

N^T is the recurrence of chunk_forward run from S = 0 without outputs, M^T that run with V = 0 from S = I:

    R^T      = (V^T - (S^T K^T) diag(gamma)) diag(beta)
    V_new^T  = R^T + R^T L^T
    S^T      = gamma_C S^T + (V_new^T diag(gamma_C / gamma)) K

    states  [segment_slots, H_v, V, K] fp32     N^T of segment s in slot s + 1, V-first
    maps    [segment_slots, H_v, 2, K, K]       M^T in two 16-bit parts, rounded and rest
    skips   [segment_slots, H_v] int32          1 where the gates make M negligible (device/segments.cuh): it is not made then, and
                                    N is made from the last few chunks alone

The last segment of a sequence needs no map.

A CTA makes M or N: two consumer warpgroups with 64 rows each, and a producer.  Shared memory: 3 stages * (K 16 + V 16 +
L 8 + gates 1.25 KB) = 124 KB.

Launched on [segments * H_v * 2].
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as COMMON,
    C,
    block_row,
    block_rows,
    dims,
    element_type,
    extern,
    load_early,
    swizzled,
)
from kernels_tl.layout import (
    ForwardGate,
    SegmentColumn,
    SegmentFlag,
)

PASS_CONFIGS = COMMON | {"tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}
EXPLICIT_FENCES = True
PRELUDE = """
#include "device/segments.cuh"
#include "device/tiles.cuh"
"""

STAGES = 3
ROWS = 64  # of S^T a warpgroup
EARLY_FACTORS = 4  # of eight, see load_minuend; with all of them it was 5 % slower (benchmarks/NOTES.md)
PRODUCERS = 128  # of which one warp works; setmaxnreg takes whole warpgroups
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
MAP_N, MAP_M = 0, 1


def segment_maps(dtype, K, V):
    tokens, H_k, H_v, chunk_slots, segment_slots = dims("tokens", "H_k", "H_v", "chunk_slots", "segment_slots")
    Full = T.GemmWarpPolicy.FullRow
    element = element_type(dtype)
    WARPGROUPS = V // ROWS
    CONSUMERS = 128 * WARPGROUPS

    @T.prim_func
    def main(
        k: T.Tensor([tokens, H_k, K], dtype),
        v: T.Tensor([tokens, H_v, V], dtype),
        gates: T.Tensor([chunk_slots, H_v, ForwardGate.COUNT, C], "float32"),
        matrices_0: block_row(chunk_slots, H_v, 0, dtype),
        matrices_1: block_row(chunk_slots, H_v, 1, dtype),
        matrices_2: block_row(chunk_slots, H_v, 2, dtype),
        matrices_3: block_row(chunk_slots, H_v, 3, dtype),
        segments: T.Tensor([segment_slots, SegmentColumn.COUNT], "int32"),
        states: T.Tensor([segment_slots, H_v, V, K], "float32"),
        maps: T.Tensor([segment_slots, H_v, 2, K, K], dtype),
        skips: T.Tensor([segment_slots, H_v], "int32"),
        group: T.int32,  # H_v / H_k
    ):
        with T.Kernel(segment_slots * H_v * 2, threads=CONSUMERS + PRODUCERS, prelude=PRELUDE) as block:
            K_s = T.alloc_shared([STAGES, C, K], dtype)
            V_s = T.alloc_shared([STAGES, WARPGROUPS, C, ROWS], dtype)
            L_s = T.alloc_shared([STAGES, C, C], dtype)
            gates_s = T.alloc_shared([STAGES, ForwardGate.COUNT, C], "float32")
            T.annotate_layout({V_s: swizzled(V_s)})
            loaded = T.alloc_barrier([32] * STAGES)
            released = T.alloc_barrier([CONSUMERS] * STAGES)

            tx = T.get_thread_binding()
            which = T.alloc_var("int32", init=block % 2)
            segment = T.alloc_var("int32", init=T.truncdiv(T.truncdiv(block, 2), T.Cast("int32", H_v)))
            flags = T.alloc_var("int32", init=load_early(segments[segment, SegmentColumn.FLAGS]))
            length = T.alloc_var("int32", init=load_early(segments[segment, SegmentColumn.LENGTH]))
            row = T.alloc_var("int32", init=load_early(segments[segment, SegmentColumn.ROW]))
            first = T.alloc_var("int32", init=load_early(segments[segment, SegmentColumn.CHUNK]))
            idle = T.alloc_var("int32", init=T.Select((flags >= SegmentFlag.LAST) | (length == 0), 1, 0))
            if (idle != 0) & (block != 0):
                extern("leave")
            T.pdl_sync()
            T.pdl_trigger()
            hv = T.alloc_var("int32", init=T.truncdiv(block, 2) - segment * T.Cast("int32", H_v))
            hk = T.alloc_var("int32", init=T.truncdiv(hv, group))
            chunks = T.alloc_var("int32", init=T.truncdiv(length + (C - 1), C))
            start = T.alloc_var("int32", init=0)
            if idle != 0:
                start = chunks  # no map
            else:
                start = T.call_extern(
                    "int32",
                    "flash_qla::device::first_chunk_that_matters",
                    T.access_ptr(gates[first, hv, ForwardGate.TOTAL, 1], "r"),
                    T.Cast("int64", H_v) * (ForwardGate.COUNT * C),
                    chunks,
                )
                if (which == MAP_M) & (tx == 0):
                    skips[segment, hv] = T.Select(start < 0, 0, 1)
                if start < 0:
                    start = 0
                else:
                    if which == MAP_M:
                        start = chunks

            if tx < CONSUMERS:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                warpgroup = T.truncdiv(tx, 128)
                S = T.alloc_fragment([V, K], "float32")  # S^T
                S_16 = T.alloc_fragment([V, K], dtype)
                V_new = T.alloc_fragment([V, C], "float32")  # S^T K^T, R^T, V_new^T in turn
                V_new_16 = T.alloc_fragment([V, C], dtype)
                # What is loaded while WGMMAs run: the tile of V_new, half of its factors, gamma_C / gamma.
                minuend = T.alloc_local([16], "uint32")
                early = T.alloc_local([16], "float32")
                decays = T.alloc_local([16], "float32")
                offset = T.alloc_var("int32", init=extern("transposed_offset", returns="int32"))
                column = T.alloc_var("int32", init=extern("first_column", returns="int32"))
                for i, j in T.Parallel(V, K):
                    S[i, j] = T.Select((which == MAP_M) & (i == j), 1.0, 0.0)

                for c in T.serial(start, chunks):
                    s = (c - start) % STAGES
                    T.barrier_wait(loaded[s], ((c - start) // STAGES) % 2)
                    T.copy(S, S_16)
                    T.wgmma_gemm(S_16, K_s[s, :, :], V_new, transpose_B=True, policy=Full, clear_accum=True)
                    extern(
                        f"load_minuend<{EARLY_FACTORS}>",
                        minuend.data,
                        early.data,
                        T.access_ptr(V_s[s, warpgroup, 0, 0], "r"),
                        T.access_ptr(gates_s[s, ForwardGate.BETA, 0], "r"),
                        offset,
                        column,
                    )
                    T.wait_wgmma(0)
                    extern(
                        f"subtract_from_minuend<{element}, {EARLY_FACTORS}>",
                        V_new.data,
                        minuend.data,
                        early.data,
                        T.access_ptr(gates_s[s, ForwardGate.BETA, 0], "r"),
                        column,
                        which == MAP_N,
                    )
                    T.copy(V_new, V_new_16)
                    T.wgmma_gemm(V_new_16, L_s[s, :, :], V_new, policy=Full)
                    for i, j in T.Parallel(V, K):
                        S[i, j] *= gates_s[s, ForwardGate.TOTAL, 0]
                    extern(
                        "load_column_factors", decays.data, T.access_ptr(gates_s[s, ForwardGate.DECAY, 0], "r"), column
                    )
                    T.wait_wgmma(0)
                    extern(f"round_scaled_columns<{element}>", V_new_16.data, V_new.data, decays.data)
                    T.wgmma_gemm(V_new_16, K_s[s, :, :], S, policy=Full)
                    T.wait_wgmma(0)
                    T.barrier_arrive(released[s])

                if start < chunks:
                    if which == MAP_N:
                        for i, j in T.Parallel(V, K):
                            states[segment + 1, hv, i, j] = S[i, j]
                    else:
                        T.copy(S, S_16)
                        for i, j in T.Parallel(V, K):
                            S[i, j] -= T.Cast("float32", S_16[i, j])
                        extern("store_state", S_16.data, T.access_ptr(maps[segment, hv, 0, warpgroup * ROWS, 0], "w"))
                        T.copy(S, S_16)
                        extern("store_state", S_16.data, T.access_ptr(maps[segment, hv, 1, warpgroup * ROWS, 0], "w"))
            else:
                T.dec_max_nreg(PRODUCER_REGISTERS)
                edge = T.alloc_var("int32", init=0)  # see block_rows
                for c in T.serial(start, T.if_then_else(tx < CONSUMERS + 32, chunks, start)):
                    s = (c - start) % STAGES
                    t = row + c * C
                    T.barrier_wait(released[s], (((c - start) // STAGES) % 2) ^ 1)
                    for target, source in (
                        (K_s[s, :, :], k[t : t + C, hk, :]),
                        (gates_s[s, :, :], gates[first + c, hv, :, :]),
                        *block_rows(L_s, s, (matrices_0, matrices_1, matrices_2, matrices_3), first + c, hv, 0, edge),
                    ):
                        T.tma_copy(source, target, barrier=loaded[s], leader_scope_threads=32)
                    for w in T.unroll(WARPGROUPS):
                        T.tma_copy(
                            v[t : t + C, hv, w * ROWS : w * ROWS + ROWS],
                            V_s[s, w, :, :],
                            barrier=loaded[s],
                            leader_scope_threads=32,
                        )
                    T.barrier_arrive(loaded[s])

    return main
