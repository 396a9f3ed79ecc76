"""The state before each segment: the maps of segment_maps applied one after the other along each sequence.

    S behind segment s = M_s S before it + N_s

    states  [segment_slots, H_v, V, K] fp32, V-first: in slot s + 1 N_s^T, which becomes the state before segment s + 1
    maps    [segment_slots, H_v, 2, K, K]: M_s^T in two 16-bit parts
    skips   [segment_slots, H_v]: 1 where M is negligible, so that N is all there is, and states is right already

S is taken in two 16-bit parts as well: the three products keep twice the digits of the 16-bit S that o is made of.

A CTA goes through one sequence with 32 columns of one head's S: two consumer warpgroups with 64 rows each, a warp that
keeps the next N and M coming, and one that stores.  M is the left factor, and S goes through shared memory between its
products: so the columns may be few.  N arrives in shared memory, where the new S takes its place and leaves from; each
thread's own loads and stores of them, 32 bytes at a time, had been half of the time.

Shared memory: 2 stages * M 64 KB + 2 * S 16 KB + 3 stages * N 16 KB = 208 KB.

Launched on [N * H_v * 4].
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as COMMON,
    dims,
    extern,
    load_early,
    swizzled,
)
from kernels_tl.layout import (
    SegmentColumn,
    SegmentFlag,
    SequenceColumn,
)

PASS_CONFIGS = COMMON | {"tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}
EXPLICIT_FENCES = True
PRELUDE = """
#include "device/tiles.cuh"
"""

MAP_STAGES = 2
STAGES = 3  # of N
COLUMNS = 32  # of S a CTA
BOX = 32  # floats: 128 bytes
CONSUMERS, PRODUCERS = 256, 64
ROUNDED_BARRIER = 1
SKIP, END = 1, 2  # of a segment: M is negligible; what follows is the sequence's last


def segment_scan(dtype, K, V):
    H_v, N, segment_slots, state_size = dims("H_v", "N", "segment_slots", "state_size")
    Full = T.GemmWarpPolicy.FullRow
    TILES = V // COLUMNS

    @T.prim_func
    def main(
        sequences: T.Tensor([N, SequenceColumn.COUNT], "int32"),
        segments: T.Tensor([segment_slots, SegmentColumn.COUNT], "int32"),
        maps: T.Tensor([segment_slots, H_v, 2, K, K], dtype),
        skips: T.Tensor([segment_slots, H_v], "int32"),
        initial_state: T.Tensor([state_size], "float32"),
        states: T.Tensor([segment_slots, H_v, V, K], "float32"),
        state_stride_v: T.int32,
        state_stride_k: T.int32,
        has_initial_state: T.int32,
    ):
        with T.Kernel(N * H_v * TILES, threads=CONSUMERS + PRODUCERS, prelude=PRELUDE) as block:
            M_s = T.alloc_shared([MAP_STAGES, 2, K, K], dtype)
            S_s = T.alloc_shared([2, 2, K, COLUMNS], dtype)  # by turns, as two parts
            N_s = T.alloc_shared([STAGES, K // BOX, COLUMNS, BOX], "float32")  # N^T, then S^T
            about_s = T.alloc_shared([STAGES], "int32")  # SKIP and END of the segment
            T.annotate_layout({N_s: swizzled(N_s)})
            loaded = T.alloc_barrier([32] * STAGES)  # N and about
            made = T.alloc_barrier([CONSUMERS] * STAGES)  # S in its place
            stored = T.alloc_barrier([32] * STAGES)
            map_loaded = T.alloc_barrier([32] * MAP_STAGES)
            map_released = T.alloc_barrier([CONSUMERS] * MAP_STAGES)
            tx = T.get_thread_binding()
            v0 = T.alloc_var("int32", init=block % TILES * COLUMNS)
            n = T.alloc_var("int32", init=T.truncdiv(T.truncdiv(block, TILES), T.Cast("int32", H_v)))
            hv = T.alloc_var("int32", init=T.truncdiv(block, TILES) - n * T.Cast("int32", H_v))
            slot = T.alloc_var("int32", init=load_early(sequences[n, SequenceColumn.SEGMENT]))
            first = T.alloc_var("int32", init=load_early(segments[slot, SegmentColumn.FLAGS]))
            if (first != SegmentFlag.FIRST) & (block != 0):  # but the last as well
                extern("leave")
            T.pdl_sync()
            T.pdl_trigger()
            step = T.alloc_var("int32", init=0)
            maps_used = T.alloc_var("int32", init=0)
            about = T.alloc_var("int32", init=0)
            if first != SegmentFlag.FIRST:
                about = END

            if tx < CONSUMERS:
                S = T.alloc_fragment([K, COLUMNS], "float32")
                S_16 = T.alloc_fragment([K, COLUMNS], dtype)
                rest = T.alloc_fragment([K, COLUMNS], dtype)
                T.clear(S)
                if (about < END) & (has_initial_state != 0):
                    state = T.alloc_var("int64", init=(T.Cast("int64", n) * H_v + hv) * (K * V))
                    for i, j in T.Parallel(K, COLUMNS):
                        S[i, j] = initial_state[state + (v0 + j) * state_stride_v + i * state_stride_k]
                while about < END:
                    u = step % STAGES
                    T.barrier_wait(loaded[u], (step // STAGES) % 2)
                    about = about_s[u]
                    if about % END != SKIP:
                        T.copy(S, S_16)
                        for i, j in T.Parallel(K, COLUMNS):
                            rest[i, j] = S[i, j] - T.Cast("float32", S_16[i, j])
                        T.copy(S_16, S_s[maps_used % 2, 0, :, :])
                        T.copy(rest, S_s[maps_used % 2, 1, :, :])
                        T.fence_proxy_async()
                        T.sync_threads(ROUNDED_BARRIER, CONSUMERS)
                    extern("read_columns", S.data, T.access_ptr(N_s[u, 0, 0, 0], "r"))
                    if about % END != SKIP:
                        m = maps_used % MAP_STAGES
                        T.barrier_wait(map_loaded[m], (maps_used // MAP_STAGES) % 2)
                        for a, b in ((0, 0), (0, 1), (1, 0)):
                            T.wgmma_gemm(M_s[m, a, :, :], S_s[maps_used % 2, b, :, :], S, transpose_A=True, policy=Full)
                        T.wait_wgmma(0)
                        T.barrier_arrive(map_released[m])
                        extern("write_columns", S.data, T.access_ptr(N_s[u, 0, 0, 0], "w"))
                        T.fence_proxy_async()
                        maps_used = maps_used + 1
                    T.barrier_arrive(made[u])
                    step = step + 1
            else:
                if tx < CONSUMERS + 32:
                    skip = T.alloc_var("int32", init=skips[slot, hv])
                    flags = T.alloc_var(
                        "int32", init=segments[T.min(slot + 1, segment_slots - 1), SegmentColumn.FLAGS]
                    )  # of the next
                    next_skip = T.alloc_var("int32", init=0)
                    next_flags = T.alloc_var("int32", init=0)
                    while about < END:
                        u = step % STAGES
                        next_skip = skips[T.min(slot + 1, segment_slots - 1), hv]
                        next_flags = segments[T.min(slot + 2, segment_slots - 1), SegmentColumn.FLAGS]
                        about = T.Select(skip == 0, 0, SKIP) + T.Select(flags >= SegmentFlag.LAST, END, 0)
                        T.barrier_wait(stored[u], ((step // STAGES) % 2) ^ 1)
                        if tx == CONSUMERS:
                            about_s[u] = about
                        for box in T.unroll(K // BOX):
                            T.tma_copy(
                                states[slot + 1, hv, v0 : v0 + COLUMNS, box * BOX : box * BOX + BOX],
                                N_s[u, box, :, :],
                                barrier=loaded[u],
                                leader_scope_threads=32,
                            )
                        T.barrier_arrive(loaded[u])
                        if skip == 0:
                            m = maps_used % MAP_STAGES
                            T.barrier_wait(map_released[m], ((maps_used // MAP_STAGES) % 2) ^ 1)
                            for part in T.unroll(2):
                                T.tma_copy(
                                    maps[slot, hv, part, :, :],
                                    M_s[m, part, :, :],
                                    barrier=map_loaded[m],
                                    leader_scope_threads=32,
                                )
                            T.barrier_arrive(map_loaded[m])
                            maps_used = maps_used + 1
                        step = step + 1
                        slot = slot + 1
                        skip = next_skip
                        flags = next_flags
                else:
                    while about < END:
                        u = step % STAGES
                        T.barrier_wait(made[u], (step // STAGES) % 2)
                        about = about_s[u]
                        if about % END != SKIP:
                            for box in T.unroll(K // BOX):
                                T.tma_copy(
                                    N_s[u, box, :, :],
                                    states[slot + 1, hv, v0 : v0 + COLUMNS, box * BOX : box * BOX + BOX],
                                    leader_scope_threads=32,
                                )
                            T.tma_store_wait(0)
                        T.barrier_arrive(stored[u])
                        step = step + 1
                        slot = slot + 1

    return main
