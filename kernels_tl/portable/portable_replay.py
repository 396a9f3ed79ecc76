"""The states before all chunks and the chunks' V_new again, for the backward on every GPU from Ampere on: what
states/replay_states.py does on Hopper. Chunk by chunk of each sequence,

    V_new = (L + I) (diag(beta) V - diag(beta gamma) K S)
    S'    = gamma_C S + (diag(gamma_C / gamma) K)^T V_new

    h       S before the chunk    [chunk_slots, H_v, value_rows, K] 16-bit, V-first
    v_new   V_new                 [tokens, H_v, V] 16-bit

backward.cpp launches [segments * H_v * value tiles] CTAs of four warps. Layout and steps are those of
portable_forward.py, without outputs. V_new is rounded in two parts for S', whose error would reach all gradients.

With `writes_maps` it writes neither h nor v_new but the maps S -> M S + Z of the segments, for portable_scan, by
[segments * H_v * (value tiles + tiles of M^T)] CTAs:

    states  Z^T of segment s in slot s + 1    [segment_slots, H_v, value_rows, K] fp32
    maps    M^T                               [segment_slots, H_v, K, K] fp32
    skips   1 where the gates make M negligible, as in maps/segment_maps.py: then Z comes from the last few chunks alone

A segment that ends its sequence has no Z, and one that also begins it no M. For the backward (has_reverse) M is also
computed where only the gradients need it; portable_replay_gradients writes reverse_skips.
"""

import tilelang.language as T

from kernels_tl.bundles import Chunks, Maps, Replay, Sizes, States
from kernels_tl.config import PORTABLE_REPLAY
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, C, element_type, extern
from kernels_tl.core.cta import fragments, load_segment_early, shared, z_slot
from kernels_tl.core.state_view import FirstState
from kernels_tl.layout import NARROW_TILE as ROWS, ForwardGate, SegmentFlag
from kernels_tl.portable.tiles import (
    PRELUDE,
    Full,
    begin_state,
    chunk_of,
    chunk_that_matters,
    load_gates,
    load_rows,
    load_triangle,
    locate,
    store_map,
    store_transposed,
)

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS


def portable_replay(dtype, K):
    sizes = Sizes()
    element = element_type(dtype)
    tile = PORTABLE_REPLAY[K]
    assert tile.tile == ROWS

    def make_tiles():
        return shared(
            tile.shared,
            K=([C, K], dtype),
            V=([C, ROWS], dtype),  # later: V_new
            L=([C, C], dtype),  # L^T
            gates=([ForwardGate.COUNT * C], "float32"),
            swizzle=("V",),
        )

    def make_registers():
        return fragments(
            S=([ROWS, K], "float32"),  # S^T
            S_16=([ROWS, C], dtype),  # 64 channels of S^T
            V_new=([ROWS, C], "float32"),  # S^T K^T, then the residual^T, then V_new^T
            V_new_16=([ROWS, C], dtype),
            rest=([ROWS, C], dtype),  # the rest after rounding
        )

    @T.macro
    def load(tiles, tokens, matrices, chunk, hk, hv, v0):
        load_rows(tiles.K[:, :], tokens.k, tokens.k_row, hk, 0, chunk)
        load_rows(tiles.V[:, :], tokens.v, tokens.v_row, hv, v0, chunk)
        load_triangle(tiles.L[0, 0], matrices, chunk, hv, 0)
        load_gates(tiles.gates[0], matrices, chunk, hv)
        extern("commit_copies")
        extern("wait_for_copies<0>")
        T.sync_threads()

    @T.macro
    def step(r, tiles):
        gates = tiles.gates
        T.clear(r.V_new)
        for k0 in range(0, K, C):
            for i, j in T.Parallel(ROWS, C):
                r.S_16[i, j] = r.S[i, k0 + j]
            T.gemm(r.S_16, tiles.K[:, k0 : k0 + C], r.V_new, transpose_B=True, policy=Full)
        for i, j in T.Parallel(ROWS, C):
            r.V_new[i, j] = gates[2 * j] * tiles.V[j, i] - gates[2 * j + 1] * r.V_new[i, j]
        T.copy(r.V_new, r.V_new_16)
        T.gemm(r.V_new_16, tiles.L, r.V_new, policy=Full)
        for i, j in T.Parallel(ROWS, K):
            r.S[i, j] *= gates[ForwardGate.TOTAL * C]
        for i, j in T.Parallel(ROWS, C):
            decayed = r.V_new[i, j] * gates[ForwardGate.DECAY * C + j]
            r.V_new_16[i, j] = decayed
            r.rest[i, j] = decayed - T.Cast("float32", T.Cast(dtype, decayed))
        T.gemm(r.V_new_16, tiles.K, r.S, policy=Full)
        T.gemm(r.rest, tiles.K, r.S, policy=Full)

    def rows_of_Z():
        """Z^T in whole tiles. The tiles of M^T follow."""
        return T.truncdiv(T.Cast("int32", sizes.value_dim) + (ROWS - 1), ROWS) * ROWS

    @T.macro
    def begin_map(S, at, segment, gates, maps, has_reverse):
        """Zeros, or rows of the identity, and the first chunk of a map; the number of chunks if there is no map."""
        m0 = T.alloc_var("int32", init=at.v0 - rows_of_Z())  # the first row of M^T; below 0 in tiles of Z^T
        for i, j in T.Parallel(ROWS, K):
            S[i, j] = T.Select((m0 >= 0) & (m0 + i == j), 1.0, 0.0)
        first = T.alloc_var("int32", init=segment.chunks)
        if segment.flags < SegmentFlag.LAST:
            first = chunk_that_matters("first", gates, segment, at.hv)
        if m0 >= 0:
            needed = T.alloc_var("int32", init=T.Select(first < 0, 1, 0))
            if (m0 == 0) & (T.get_thread_binding() == 0):
                maps.skips[at.n, at.hv] = 1 - needed
            if (has_reverse != 0) & (segment.flags % SegmentFlag.LAST == 0) & (segment.chunks > 0):
                last = T.alloc_var("int32", init=chunk_that_matters("last", gates, segment, at.hv))
                needed = T.Select(last < 0, 1, needed)
            first = T.Select(needed != 0, 0, segment.chunks)
        return T.max(first, 0)

    @T.macro
    def store(S, at, maps):
        m0 = T.alloc_var("int32", init=at.v0 - rows_of_Z())
        if m0 < 0:
            store_map(S, T.access_ptr(maps.states[z_slot(at.n), at.hv, at.v0, 0], "w"))
        else:
            store_map(S, T.access_ptr(maps.maps[at.n, at.hv, m0, 0], "w"))

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype),
        states: States(sizes),
        maps: Maps(sizes, "float32", K),
        replay: Replay(sizes, dtype, K),
        writes_maps: T.int32,
        has_reverse: T.int32,
        value_tiles: T.int32,  # tiles of ROWS rows; with writes_maps those of M^T too
    ):
        with T.Kernel(sizes.segment_slots * sizes.H_v * value_tiles, threads=tile.threads, prelude=PRELUDE) as cta:
            tiles = make_tiles()
            r = make_registers()
            offset = T.alloc_var("int32", init=extern("transposed_offset", returns="int32"))
            T.pdl_sync()
            at = locate(cta, sizes, value_tiles)
            segment = load_segment_early(chunks.plan.segments, at.n)
            start = T.alloc_var("int32", init=0)
            if writes_maps != 0:
                start = begin_map(r.S, at, segment, chunks.matrices.gates, maps, has_reverse)
            else:
                begin_state(r.S, at, FirstState(segment.initial, states.initial_in_a_run(), maps.states))
            for c in T.serial(start, segment.chunks):
                chunk = chunk_of(segment, c, 0)
                load(tiles, chunks.tokens, chunks.matrices, chunk, at.hk, at.hv, at.v0)
                if writes_maps == 0:
                    h_rows = (T.access_ptr(replay.h[chunk.slot, at.hv, at.v0, 0], "w"), K, ROWS, K)
                    extern(f"round_and_store_state<{element}, {K}>", r.S.data, *h_rows)
                step(r, tiles)
                T.sync_threads()  # all tiles have been read
                if writes_maps == 0:
                    to = T.access_ptr(replay.v_new[chunk.row, at.hv, at.v0], "w")
                    stride = T.Cast("int64", replay.v_new_row)
                    columns = T.Cast("int32", sizes.value_dim) - at.v0
                    store_transposed(r.V_new, tiles.V, offset, element, to, stride, chunk.length, columns)
            if (writes_maps != 0) & (start < segment.chunks):
                store(r.S, at, maps)

    return main
