"""The recurrence over the chunks of each sequence, and the outputs, for every GPU from Ampere on. Chunk by chunk,

    V_new = (L + I) (diag(beta) V - diag(beta gamma) K S)      L, P: chunk_matrices
    O     = diag(scale gamma) Q S + P V_new
    S'    = gamma_C S + (diag(gamma_C / gamma) K)^T V_new

    o   [tokens, H_v, value_dim] 16-bit
    h   [h_slots, H_v, value_dim, key_dim] 16-bit   S before each chunk, V-first, if requested (has_h)

This is states/chunk_forward.py with the instructions that all these GPUs have: mma.sync, ldmatrix and cp.async. All
threads of a CTA do the same, without roles. Read it first to learn how the algorithm works.

forward.cpp launches [segments * H_v * value tiles] CTAs of four warps. A CTA has ROWS value rows of one head of one
segment, which is a whole sequence unless that would leave SMs idle. Their state stays in registers from the first chunk
to the last, as S^T: a warp has 16 rows of it, so that S^T and everything that follows from it (V_new^T, O^T) is the
left factor of the next product without leaving the warp. The right factors come from shared memory, where K and Q are
[token, channel], and L^T and P^T arrive transposed already.

Shared memory holds one chunk, and K and Q of the next one. A tile is loaded again as soon as all warps have read it:

    load K Q          c+1 |      |-------------------------------|          cp.async, group of keys
    load V L P gates  c+1 |                               |------|-------|  cp.async, group of values
    compute chunk c       | S K, S Q | V_new, S', O             |store O|
                          sync       sync                       sync

A segment is processed in runs of chunks, each up to the next checkpoint (plan/runs.cuh); after each run the state is
written. If `rounds` is set, the recurrence goes on with the state as it was stored, rounded.
"""

import tilelang.language as T

from kernels_tl.bundles import Checkpoints, Chunks, Maps, Sizes, States
from kernels_tl.config import PORTABLE_FORWARD
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, C, dims, element_type, extern
from kernels_tl.core.cta import fragments, kilobytes_of, load_segment_early, shared
from kernels_tl.core.state_view import CHECKPOINT, FINAL, FirstState, chosen, is_checkpoint
from kernels_tl.layout import NARROW_TILE as ROWS, Dtype, ForwardGate, SegmentColumn
from kernels_tl.portable.tiles import (
    PRELUDE,
    Full,
    begin_state,
    chunk_of,
    load_gates,
    load_rows,
    load_triangle,
    locate,
    store_transposed,
)
from kernels_tl.states.recurrence import has_scales, prelude_of_scales, scales_of, tile_of_scales

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
PRELUDE += '#include "states/round_state.cuh"\n'


def portable_forward(dtype, K):
    sizes = Sizes()
    key_dim, value_dim, H_v = sizes.key_dim, sizes.value_dim, sizes.H_v
    (h_slots,) = dims("h_slots")
    element = element_type(dtype)
    tile = PORTABLE_FORWARD[K]
    assert tile.tile == ROWS
    STAGES = tile.stages  # of K
    HAS_SCALES = has_scales(dtype)

    def make_tiles():
        scales = tile_of_scales(dtype, ROWS)
        return shared(
            tile.shared + kilobytes_of(scales),
            K=([STAGES, C, K], dtype),
            Q=([C, K], dtype),
            V=([C, ROWS], dtype),  # later: O
            L=([C, C], dtype),  # L^T
            P=([C, C], dtype),  # P^T
            gates=([ForwardGate.COUNT * C], "float32"),
            **scales,
            swizzle=("V",),
        )

    def make_registers():
        return fragments(
            S=([ROWS, K], "float32"),  # S^T
            S_16=([ROWS, C], dtype),  # 64 channels of S^T
            V_new=([ROWS, C], "float32"),  # S^T K^T, then the residual^T, then V_new^T
            V_new_16=([ROWS, C], dtype),
            O=([ROWS, C], "float32"),  # O^T
        )

    def null():
        return T.reinterpret("handle", T.uint64(0))

    @T.macro
    def load_keys(tiles, tokens, hk, chunk):
        """Begins to load K and Q of a chunk."""
        load_rows(tiles.K[chunk.c % STAGES, :, :], tokens.k, tokens.k_row, hk, 0, chunk)
        load_rows(tiles.Q[:, :], tokens.q, tokens.q_row, hk, 0, chunk)
        extern("commit_copies")

    @T.macro
    def load_matrices(tiles, matrices, chunk, hv):
        """Begins to load L^T, P^T and the gates of a chunk."""
        load_triangle(tiles.L[0, 0], matrices, chunk, hv, 0)
        load_triangle(tiles.P[0, 0], matrices, chunk, hv, 1)
        load_gates(tiles.gates[0], matrices, chunk, hv)

    @T.macro
    def load_values(tiles, tokens, hv, v0, chunk):
        """Begins to load V of a chunk, and ends the group of copies that load_matrices began."""
        load_rows(tiles.V[:, :], tokens.v, tokens.v_row, hv, v0, chunk)
        extern("commit_copies")

    @T.macro
    def multiply_state(r, tiles, s):
        """V_new^T = S^T K^T and O^T = S^T Q^T, 64 channels at a time."""
        T.clear(r.V_new)
        T.clear(r.O)
        for k0 in range(0, K, C):
            for i, j in T.Parallel(ROWS, C):
                r.S_16[i, j] = r.S[i, k0 + j]
            T.gemm(r.S_16, tiles.K[s, :, k0 : k0 + C], r.V_new, transpose_B=True, policy=Full)
            T.gemm(r.S_16, tiles.Q[:, k0 : k0 + C], r.O, transpose_B=True, policy=Full)

    @T.macro
    def make_values(r, tiles):
        """V_new^T from S^T K^T: the residual, then its product with (L + I)^T."""
        gates = tiles.gates
        for i, j in T.Parallel(ROWS, C):
            beta, beta_gamma = gates[2 * j], gates[2 * j + 1]
            r.V_new[i, j] = beta * tiles.V[j, i] - beta_gamma * r.V_new[i, j]
        T.copy(r.V_new, r.V_new_16)
        T.gemm(r.V_new_16, tiles.L, r.V_new, policy=Full)

    @T.macro
    def update_state(r, tiles, s):
        """S'^T = gamma_C S^T + V_new^T diag(gamma_C / gamma) K."""
        for i, j in T.Parallel(ROWS, K):
            r.S[i, j] *= tiles.gates[ForwardGate.TOTAL * C]
        for i, j in T.Parallel(ROWS, C):
            r.V_new_16[i, j] = r.V_new[i, j] * tiles.gates[ForwardGate.DECAY * C + j]
        T.gemm(r.V_new_16, tiles.K[s, :, :], r.S, policy=Full)

    @T.macro
    def make_outputs(r, tiles):
        """O^T = scale gamma S^T Q^T + V_new^T P^T."""
        for i, j in T.Parallel(ROWS, C):
            r.O[i, j] *= tiles.gates[ForwardGate.QUERY * C + j]
        T.copy(r.V_new, r.V_new_16)
        T.gemm(r.V_new_16, tiles.P, r.O, policy=Full)

    def rest_of_value(v0):
        return T.Cast("int32", value_dim) - v0

    @T.macro
    def store_h(r, tiles, h, slot, hv, v0):
        to = T.access_ptr(h[slot, hv, v0, 0], "w")
        rows = (T.Cast("int32", key_dim), rest_of_value(v0), T.Cast("int32", key_dim))
        if HAS_SCALES:
            extern(f"store_scaled_state<{K}>", r.S.data, to, *rows, scales_of(tiles))
        else:
            extern(f"round_and_store_state<{element}, {K}>", r.S.data, to, *rows)

    @T.macro
    def store_outputs(r, tiles, o, row, hv, v0, tokens):
        """Writes O through the tile of V."""
        offset = extern("transposed_offset", returns="int32")
        stride = T.Cast("int64", H_v) * value_dim
        to = T.access_ptr(o[row, hv, v0], "w")
        store_transposed(r.O, tiles.V, offset, element, to, stride, tokens, rest_of_value(v0))

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype),
        states: States(sizes, float8=True),
        kept: Checkpoints(sizes),
        maps: Maps(sizes, "float32", K),  # only the states
        o: T.Tensor([sizes.tokens, H_v, value_dim], dtype),
        h: T.Tensor([h_slots, H_v, value_dim, key_dim], dtype),
        has_h: T.int32,
        value_tiles: T.int32,  # tiles of ROWS rows
        rounds: T.int32,
    ):
        with T.Kernel(
            sizes.segment_slots * H_v * value_tiles, threads=tile.threads, prelude=PRELUDE + prelude_of_scales(dtype)
        ) as cta:
            tiles = make_tiles()
            r = make_registers()
            tokens, matrices, plan = chunks.tokens, chunks.matrices, chunks.plan
            initial, final, checkpoints = states.initial(), states.final(), kept.view(states)
            T.pdl_sync()

            at = locate(cta, sizes, value_tiles)
            hk, hv, v0 = at.hk, at.hv, at.v0
            segment = load_segment_early(plan.segments, at.n)
            until_checkpoint = T.alloc_var("int32", init=plan.segments[at.n, SegmentColumn.UNTIL])

            first = chunk_of(segment, 0, kept.checkpoint_every)
            if first.length > 0:
                load_keys(tiles, tokens, hk, first)
                load_matrices(tiles, matrices, first, hv)
                load_values(tiles, tokens, hv, v0, first)

            begin_state(r.S, at, FirstState(segment.initial, initial, maps.states))

            c = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=segment.row)
            done = T.alloc_var("int32", init=0)  # tokens of the runs so far
            run = T.alloc_var("int32", init=until_checkpoint)
            is_end = T.alloc_var("int32", init=0)
            scaled = T.alloc_var("int32", init=0)  # fp16: whether a row of the warp's S^T has a scale
            while is_end == 0:
                extern(
                    f"round_state<{K}>", r.S.data, T.Select((rounds != 0) & (c > 0), checkpoints.dtype, Dtype.FLOAT32)
                )
                if HAS_SCALES:
                    scaled = extern(f"begin_scales<{K}>", r.S.data, null(), scales_of(tiles), returns="int32")
                run = T.min(run, segment.length - done)
                left = T.alloc_var("int32", init=run)
                while left > 0:
                    valid = T.alloc_var("int32", init=T.min(left, C))
                    s = c % STAGES
                    if (has_h != 0) & (segment.first + c < h_slots):
                        store_h(r, tiles, h, segment.first + c, hv, v0)
                    extern("wait_for_copies<1>")
                    T.sync_threads()  # K and Q are there
                    multiply_state(r, tiles, s)
                    extern("wait_for_copies<0>")
                    T.sync_threads()  # V, L, P and the gates are there, and Q has been read
                    after = chunk_of(segment, c + 1, kept.checkpoint_every)
                    if STAGES == 2 and after.length > 0:
                        load_keys(tiles, tokens, hk, after)
                    if HAS_SCALES:
                        offset = extern("transposed_offset", returns="int32")
                        extern("scale_values", T.access_ptr(tiles.V, "rw"), offset, scales_of(tiles), scaled)
                    make_values(r, tiles)
                    update_state(r, tiles, s)
                    make_outputs(r, tiles)
                    if HAS_SCALES:
                        large = extern(f"has_large<{K // 2}, false>", r.S.data, returns="bool")
                        scaling = (r.S.data, null(), scales_of(tiles), scaled, large, r.O.data)
                        scaled = extern(f"scale_rows<{K}>", *scaling, returns="int32")
                    T.sync_threads()  # K, V, L, P and the gates have been read
                    if STAGES == 1 and after.length > 0:
                        load_keys(tiles, tokens, hk, after)
                    if after.length > 0:
                        load_matrices(tiles, matrices, after, hv)
                    store_outputs(r, tiles, o, row, hv, v0, valid)
                    if after.length > 0:
                        load_values(tiles, tokens, hv, v0, after)
                    c += 1
                    row += valid
                    left -= valid
                if HAS_SCALES:
                    extern(f"end_scales<{K}>", r.S.data, scales_of(tiles))
                done += run
                run = kept.checkpoint_every
                is_end = T.Select(done >= segment.length, 1, 0)
                # A loop over both writes, because two copies of the write would take more registers.
                written = T.alloc_var("int32", init=FINAL)
                if is_checkpoint(done, segment.length, until_checkpoint, kept.checkpoint_every):
                    written = CHECKPOINT
                while written <= is_end:
                    to = T.alloc_var("int32", init=segment.final)
                    if written == CHECKPOINT:
                        to = plan.checkpoints[segment.first + c - 1]
                    if to >= 0:
                        chosen(written != CHECKPOINT, final, checkpoints).write(r.S, to, hv, v0)
                    written += 1

    return main
