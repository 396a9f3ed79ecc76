"""The states before all chunks and the chunks' V_new again, for the backward on every GPU from Ampere on: what
states/replay_states.py does on Hopper. Chunk by chunk of each sequence,

    V_new = (L + I) (diag(beta) V - diag(beta gamma) K S)
    S'    = gamma_C S + (diag(gamma_C / gamma) K)^T V_new

    h       S before the chunk    [chunk_slots, H_v, value_rows, K] 16-bit, V-first
    v_new   V_new                 [tokens, H_v, V] 16-bit

backward.cpp launches [sequences * H_v * value tiles] CTAs of four warps. Layout and steps are those of
portable_forward.py, without outputs. V_new is rounded in two parts for S', whose error would reach all gradients.

For ranks (forward.cpp) it writes neither h nor v_new but the maps of `rank_maps` (portable/tiles.py), by
[mapped * H_v * (value tiles + tiles of M^T)] CTAs.
"""

import tilelang.language as T

from kernels_tl.bundles import Chunks, RankMaps, Replay, Sizes, States
from kernels_tl.config import PORTABLE_REPLAY
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, C, element_type, extern
from kernels_tl.core.cta import fragments, load_segment_early, shared
from kernels_tl.layout import NARROW_TILE as ROWS, ForwardGate
from kernels_tl.portable.tiles import (
    PRELUDE,
    Full,
    begin_state,
    chunk_of,
    load_gates,
    load_rows,
    load_triangle,
    locate,
    locate_map,
    store_transposed,
    write_map,
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

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype),
        states: States(sizes),
        replay: Replay(sizes, dtype, K),
        maps: RankMaps(sizes),
        ctas: T.int32,
        value_tiles: T.int32,  # tiles of ROWS rows, and of rows of M^T
    ):
        with T.Kernel(ctas, threads=tile.threads, prelude=PRELUDE) as cta:
            tiles = make_tiles()
            r = make_registers()
            initial = states.initial_in_a_run()
            offset = T.alloc_var("int32", init=extern("transposed_offset", returns="int32"))
            T.pdl_sync()
            at = locate_map(locate(cta, sizes, value_tiles), maps, chunks.plan, sizes)
            segment = load_segment_early(chunks.plan.segments, at.slot)
            begin_state(r.S, at, maps, segment.initial, initial)
            for c in T.serial(segment.chunks):
                chunk = chunk_of(segment, c, 0)
                load(tiles, chunks.tokens, chunks.matrices, chunk, at.hk, at.hv, at.v0)
                if maps.mapped == 0:
                    h_rows = (T.access_ptr(replay.h[chunk.slot, at.hv, at.v0, 0], "w"), K, ROWS, K)
                    extern(f"round_and_store_state<{element}, {K}>", r.S.data, *h_rows)
                step(r, tiles)
                T.sync_threads()  # all tiles have been read
                if maps.mapped == 0:
                    to = T.access_ptr(replay.v_new[chunk.row, at.hv, at.v0], "w")
                    stride = T.Cast("int64", replay.v_new_row)
                    columns = T.Cast("int32", sizes.value_dim) - at.v0
                    store_transposed(r.V_new, tiles.V, offset, element, to, stride, chunk.length, columns)
            if maps.mapped > 0:
                write_map(r.S, at, maps, sizes)

    return main
