"""The state before each segment: the maps of segment_maps applied one after the other along each sequence.

    S^T behind segment s = S^T before it M_s^T + N_s^T

    states  [NS, HV, D, D] fp32, V-first: in slot s + 1 N_s^T, which becomes the state before segment s + 1
    maps    [NS, HV, 2, D, D]: M_s^T in two 16-bit parts
    skips   [NS, HV]: 1 where M is negligible, so that N is all there is, and states is right already

S is taken in two 16-bit parts as well: the three products keep twice the digits of the 16-bit S that o is made of.

A CTA goes through one sequence with 64 rows of one head's S^T: a consumer warpgroup and a producer warp that keeps the
next map coming.  Shared memory: 2 stages * M 64 KB.

Launched on [segments * HV * 2]: the CTA of a sequence's first segment does the work.
"""

import tilelang.language as T

from kernels_tl.common import (
    FIRST,
    LAST,
    PASS_CONFIGS as COMMON,
    SEGMENT_COLUMNS,
    SEGMENT_FLAGS,
    SEGMENT_SEQ,
    D,
    dims,
)

PASS_CONFIGS = COMMON | {"tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}
EXPLICIT_FENCES = True
STAGES = 2
ROWS = 64
TILES = D // ROWS
CONSUMERS, PRODUCERS = 128, 32


def segment_scan(dtype):
    HV, NS, state_size = dims("HV", "NS", "state_size")
    Full = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def main(
        segments: T.Tensor([NS, SEGMENT_COLUMNS], "int32"),
        maps: T.Tensor([NS, HV, 2, D, D], dtype),
        skips: T.Tensor([NS, HV], "int32"),
        initial_state: T.Tensor([state_size], "float32"),
        states: T.Tensor([NS, HV, D, D], "float32"),
        state_stride_v: T.int32,
        state_stride_k: T.int32,
        has_initial_state: T.int32,
    ):
        with T.Kernel(NS * HV * TILES, threads=CONSUMERS + PRODUCERS) as block:
            M_s = T.alloc_shared([STAGES, 2, D, D], dtype)
            loaded = T.alloc_barrier([PRODUCERS] * STAGES)
            released = T.alloc_barrier([CONSUMERS] * STAGES)
            T.pdl_sync()
            T.pdl_trigger()
            tx = T.get_thread_binding()
            tile = T.alloc_var("int32", init=block % TILES)
            slot = T.alloc_var("int32", init=T.truncdiv(T.truncdiv(block, TILES), T.Cast("int32", HV)))
            hv = T.alloc_var("int32", init=T.truncdiv(block, TILES) - slot * T.Cast("int32", HV))
            v0 = T.alloc_var("int32", init=tile * ROWS)
            n = T.alloc_var("int32", init=segments[slot, SEGMENT_SEQ])
            state = T.alloc_var("int64", init=(T.Cast("int64", n) * HV + hv) * (D * D))
            step = T.alloc_var("int32", init=0)  # maps used
            skip = T.alloc_var("int32", init=skips[slot, hv])
            flags = T.alloc_var("int32", init=segments[T.min(slot + 1, NS - 1), SEGMENT_FLAGS])  # of the next segment
            next_skip = T.alloc_var("int32", init=0)
            next_flags = T.alloc_var("int32", init=0)
            going = T.alloc_var("int32", init=0)
            if segments[slot, SEGMENT_FLAGS] == FIRST:  # and not the last as well
                going = 1

            if tx < CONSUMERS:
                S = T.alloc_fragment([ROWS, D], "float32")  # S^T
                N = T.alloc_fragment([ROWS, D], "float32")  # the next N^T
                S_16 = T.alloc_fragment([ROWS, D], dtype)
                rest = T.alloc_fragment([ROWS, D], dtype)
                T.clear(S)
                if going != 0:
                    if has_initial_state != 0:
                        for i, j in T.Parallel(ROWS, D):
                            S[i, j] = initial_state[state + (v0 + i) * state_stride_v + j * state_stride_k]
                    for i, j in T.Parallel(ROWS, D):
                        N[i, j] = states[slot + 1, hv, v0 + i, j]
                while going != 0:
                    next_skip = skips[T.min(slot + 1, NS - 1), hv]
                    next_flags = segments[T.min(slot + 2, NS - 1), SEGMENT_FLAGS]
                    T.copy(S, S_16)
                    for i, j in T.Parallel(ROWS, D):
                        rest[i, j] = S[i, j] - T.Cast("float32", S_16[i, j])
                    T.copy(N, S)
                    # Loaded while the products run.
                    for i, j in T.Parallel(ROWS, D):
                        N[i, j] = states[T.min(slot + 2, NS - 1), hv, v0 + i, j]
                    if skip == 0:
                        T.barrier_wait(loaded[step % STAGES], (step // STAGES) % 2)
                        T.wgmma_gemm(S_16, M_s[step % STAGES, 0, :, :], S, policy=Full)
                        T.wgmma_gemm(rest, M_s[step % STAGES, 0, :, :], S, policy=Full)
                        T.wgmma_gemm(S_16, M_s[step % STAGES, 1, :, :], S, policy=Full)
                        T.wait_wgmma(0)
                        T.barrier_arrive(released[step % STAGES])
                        step = step + 1
                        for i, j in T.Parallel(ROWS, D):
                            states[slot + 1, hv, v0 + i, j] = S[i, j]
                    if flags >= LAST:
                        going = 0
                    slot = slot + 1
                    skip = next_skip
                    flags = next_flags
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
