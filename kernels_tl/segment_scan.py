"""The state before each segment: the maps of segment_maps applied one after the other along each sequence.

    S behind segment s = M_s S before it + N_s

    states  [NS, HV, D, D] fp32, V-first: in slot s + 1 N_s^T, which becomes the state before segment s + 1
    maps    [NS, HV, 2, D, D]: M_s^T in two 16-bit parts
    skips   [NS, HV]: 1 where M is negligible, so that N is all there is, and states is right already

S is taken in two 16-bit parts as well: the three products keep twice the digits of the 16-bit S that o is made of.

A CTA goes through one sequence with 32 columns of one head's S: two consumer warpgroups with 64 rows each, and a
producer warp that keeps the next maps coming.  M is the left factor, and S goes through shared memory between its
products: so the columns may be few.  Other ways, which take as long, are in benchmarks/NOTES.md.

Shared memory: 3 stages * M 64 KB + 2 * S 16 KB = 224 KB.

Launched on [N * HV * 4].
"""

import tilelang.language as T

from kernels_tl.common import (
    FIRST,
    LAST,
    PASS_CONFIGS as COMMON,
    SEGMENT_COLUMNS,
    SEGMENT_FLAGS,
    SEQ_COLUMNS,
    SEQ_SEGMENT,
    D,
    dims,
)

PASS_CONFIGS = COMMON | {"tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}
EXPLICIT_FENCES = True
STAGES = 3
COLUMNS = 32  # of S a CTA
TILES = D // COLUMNS
CONSUMERS, PRODUCERS = 256, 32
ROUNDED_BARRIER = 1


def segment_scan(dtype):
    HV, N, NS, state_size = dims("HV", "N", "NS", "state_size")
    Full = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def main(
        sequences: T.Tensor([N, SEQ_COLUMNS], "int32"),
        segments: T.Tensor([NS, SEGMENT_COLUMNS], "int32"),
        maps: T.Tensor([NS, HV, 2, D, D], dtype),
        skips: T.Tensor([NS, HV], "int32"),
        initial_state: T.Tensor([state_size], "float32"),
        states: T.Tensor([NS, HV, D, D], "float32"),
        state_stride_v: T.int32,
        state_stride_k: T.int32,
        has_initial_state: T.int32,
    ):
        with T.Kernel(N * HV * TILES, threads=CONSUMERS + PRODUCERS) as block:
            M_s = T.alloc_shared([STAGES, 2, D, D], dtype)
            S_s = T.alloc_shared([2, 2, D, COLUMNS], dtype)  # by turns, as two parts
            loaded = T.alloc_barrier([PRODUCERS] * STAGES)
            released = T.alloc_barrier([CONSUMERS] * STAGES)
            T.pdl_sync()
            T.pdl_trigger()
            tx = T.get_thread_binding()
            v0 = T.alloc_var("int32", init=block % TILES * COLUMNS)
            n = T.alloc_var("int32", init=T.truncdiv(T.truncdiv(block, TILES), T.Cast("int32", HV)))
            hv = T.alloc_var("int32", init=T.truncdiv(block, TILES) - n * T.Cast("int32", HV))
            slot = T.alloc_var("int32", init=sequences[n, SEQ_SEGMENT])
            state = T.alloc_var("int64", init=(T.Cast("int64", n) * HV + hv) * (D * D))
            step = T.alloc_var("int32", init=0)  # maps used
            skip = T.alloc_var("int32", init=skips[slot, hv])
            flags = T.alloc_var("int32", init=segments[T.min(slot + 1, NS - 1), SEGMENT_FLAGS])  # of the next segment
            next_skip = T.alloc_var("int32", init=0)
            next_flags = T.alloc_var("int32", init=0)
            going = T.alloc_var("int32", init=0)
            made = T.alloc_var("int32", init=0)  # S is not what states holds already
            if segments[slot, SEGMENT_FLAGS] == FIRST:  # and not the last as well
                going = 1

            if tx < CONSUMERS:
                S = T.alloc_fragment([D, COLUMNS], "float32")
                next_N = T.alloc_fragment([D, COLUMNS], "float32")
                S_16 = T.alloc_fragment([D, COLUMNS], dtype)
                rest = T.alloc_fragment([D, COLUMNS], dtype)
                T.clear(S)
                if going != 0:
                    if has_initial_state != 0:
                        for i, j in T.Parallel(D, COLUMNS):
                            S[i, j] = initial_state[state + (v0 + j) * state_stride_v + i * state_stride_k]
                    for i, j in T.Parallel(D, COLUMNS):
                        next_N[i, j] = states[slot + 1, hv, v0 + j, i]
                while going != 0:
                    if skip == 0:
                        T.copy(S, S_16)
                        for i, j in T.Parallel(D, COLUMNS):
                            rest[i, j] = S[i, j] - T.Cast("float32", S_16[i, j])
                        T.copy(S_16, S_s[step % 2, 0, :, :])
                        T.copy(rest, S_s[step % 2, 1, :, :])
                        T.fence_proxy_async()
                        T.sync_threads(ROUNDED_BARRIER, CONSUMERS)
                    # Behind the fence, which waits for memory; whether that is best is open (benchmarks/NOTES.md).
                    if made != 0:
                        for i, j in T.Parallel(D, COLUMNS):
                            states[slot, hv, v0 + j, i] = S[i, j]
                    next_skip = skips[T.min(slot + 1, NS - 1), hv]
                    next_flags = segments[T.min(slot + 2, NS - 1), SEGMENT_FLAGS]
                    T.copy(next_N, S)
                    for i, j in T.Parallel(D, COLUMNS):
                        next_N[i, j] = states[T.min(slot + 2, NS - 1), hv, v0 + j, i]
                    made = 1 - skip
                    if skip == 0:
                        T.barrier_wait(loaded[step % STAGES], (step // STAGES) % 2)
                        for m, x in ((0, 0), (0, 1), (1, 0)):
                            T.wgmma_gemm(
                                M_s[step % STAGES, m, :, :], S_s[step % 2, x, :, :], S, transpose_A=True, policy=Full
                            )
                        T.wait_wgmma(0)
                        T.barrier_arrive(released[step % STAGES])
                        step = step + 1
                    if flags >= LAST:
                        going = 0
                    slot = slot + 1
                    skip = next_skip
                    flags = next_flags
                if made != 0:
                    for i, j in T.Parallel(D, COLUMNS):
                        states[slot, hv, v0 + j, i] = S[i, j]
            else:
                while going != 0:
                    next_skip = skips[T.min(slot + 1, NS - 1), hv]
                    next_flags = segments[T.min(slot + 2, NS - 1), SEGMENT_FLAGS]
                    if skip == 0:
                        T.barrier_wait(released[step % STAGES], ((step // STAGES) % 2) ^ 1)
                        for part in T.unroll(2):
                            T.tma_copy(
                                maps[slot, hv, part, :, :],
                                M_s[step % STAGES, part, :, :],
                                barrier=loaded[step % STAGES],
                                leader_scope_threads=PRODUCERS,
                            )
                        T.barrier_arrive(loaded[step % STAGES])
                        step = step + 1
                    if flags >= LAST:
                        going = 0
                    slot = slot + 1
                    skip = next_skip
                    flags = next_flags

    return main
