"""The recurrence in reverse over the chunks of each sequence, for every GPU from Ampere on: what
gradients/replay_gradients.py does on Hopper. Chunk by chunk, from the last one on,

    dV_new = P^T dO + diag(gamma_C / gamma) K dS'
    U      = dV_new + L^T dV_new
    dS     = gamma_C dS' + scale Q^T diag(gamma) dO - K^T diag(beta gamma) U

    dh   dS', the gradient of the state after the chunk   [chunk_slots, H_v, value_rows, K] 16-bit, V-first
    u    U                                                [tokens, H_v, V] 16-bit

backward.cpp launches [segments * H_v * value tiles] CTAs of four warps. A CTA has ROWS value rows of dS^T of one head
of one segment in registers, from its last chunk to its first; everything is transposed, as in portable_forward.py.
portable_token_gradients computes the gradients of the inputs from dh and u.

With `writes_maps` it writes neither of them but dZ of the maps dS' -> M^T dS' + dZ of the segments, for portable_scan.
portable_replay has computed M.

    grad_states    dZ^T of segment s in slot s - 1    [segment_slots, H_v, value_rows, K] fp32
    reverse_skips  1 where the gates make M^T negligible: then dZ comes from the first few chunks alone

dS is computed as gamma_1 times the same sum with gamma / gamma_1 in the place of gamma: 16 bits hold gamma / gamma_1
however small gamma is.
"""

import tilelang.language as T

from kernels_tl.bundles import Chunks, OutputGradient, ReverseReplay, Sizes, StateGradients
from kernels_tl.config import PORTABLE_REPLAY_GRADIENTS
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, C, element_type, extern
from kernels_tl.core.cta import fragments, load_segment_early, shared, z_slot
from kernels_tl.core.state_view import FirstState
from kernels_tl.layout import NARROW_TILE as ROWS, BackwardGate, ForwardGate, SegmentFlag
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
GAMMA, DECAY, FADE, BETA = (
    C * row for row in (BackwardGate.GAMMA, BackwardGate.DECAY, BackwardGate.FADE, BackwardGate.BETA)
)


def portable_replay_gradients(dtype, K):
    sizes = Sizes()
    element = element_type(dtype)
    tile = PORTABLE_REPLAY_GRADIENTS[K]
    assert tile.tile == ROWS

    def make_tiles():
        return shared(
            tile.shared,
            K=([C, K], dtype),
            Q=([C, K], dtype),
            dO=([C, ROWS], dtype),  # later: U
            L=([C, C], dtype),  # L^T
            P=([C, C], dtype),  # P^T
            gates=([BackwardGate.COUNT * C], "float32"),
        )

    def make_registers():
        return fragments(
            dS=([ROWS, K], "float32"),  # dS'^T, then dS^T
            dS_16=([ROWS, C], dtype),  # 64 channels of dS'^T
            dSK=([ROWS, C], "float32"),  # dS'^T K^T
            U=([ROWS, C], "float32"),  # dO^T P, then dV_new^T, then U^T
            factor=([ROWS, C], dtype),  # a left factor
            rest=([ROWS, C], dtype),  # the rest of dO^T diag(scale gamma / gamma_1) after rounding
        )

    @T.macro
    def load(tiles, tokens, grad_o, grad_o_row, matrices, chunk, hk, hv, v0):
        load_rows(tiles.K[:, :], tokens.k, tokens.k_row, hk, 0, chunk)
        load_rows(tiles.Q[:, :], tokens.q, tokens.q_row, hk, 0, chunk)
        load_rows(tiles.dO[:, :], grad_o, grad_o_row, hv, v0, chunk)
        load_triangle(tiles.L[0, 0], matrices, chunk, hv, 0)
        load_triangle(tiles.P[0, 0], matrices, chunk, hv, 1)
        load_gates(tiles.gates[0], matrices, chunk, hv)
        extern("commit_copies")
        extern("wait_for_copies<0>")
        T.sync_threads()

    @T.macro
    def step(r, tiles, offset, column, scale):
        gates = tiles.gates
        T.clear(r.dSK)
        for k0 in range(0, K, C):
            for i, j in T.Parallel(ROWS, C):
                r.dS_16[i, j] = r.dS[i, k0 + j]
            T.gemm(r.dS_16, tiles.K[:, k0 : k0 + C], r.dSK, transpose_B=True, policy=Full)
        T.gemm(tiles.dO, tiles.P, r.U, transpose_A=True, transpose_B=True, policy=Full, clear_accum=True)
        for i, j in T.Parallel(ROWS, C):
            r.U[i, j] += r.dSK[i, j] * gates[DECAY + j]
        T.copy(r.U, r.factor)
        T.gemm(r.factor, tiles.L, r.U, transpose_B=True, policy=Full)
        for i, j in T.Parallel(ROWS, K):
            r.dS[i, j] *= gates[FADE + C - 1]
        extern(
            f"round_scaled_tile<{element}>",
            r.factor.data,
            r.rest.data,
            T.access_ptr(tiles.dO, "r"),
            T.access_ptr(gates[FADE], "r"),
            scale,
            offset,
            column,
        )
        T.gemm(r.factor, tiles.Q, r.dS, policy=Full)
        T.gemm(r.rest, tiles.Q, r.dS, policy=Full)
        for i, j in T.Parallel(ROWS, C):
            r.factor[i, j] = -r.U[i, j] * (gates[BETA + j] * gates[FADE + j])
        T.gemm(r.factor, tiles.K, r.dS, policy=Full)
        for i, j in T.Parallel(ROWS, K):
            r.dS[i, j] *= gates[GAMMA]

    @T.macro
    def chunks_of_map(at, segment, gates, reverse_skips):
        """The chunks of dZ, from the first one on; none for the first segment of a sequence."""
        chunks = T.alloc_var("int32", init=0)
        if (segment.flags % SegmentFlag.LAST == 0) & (segment.chunks > 0):
            last = T.alloc_var("int32", init=chunk_that_matters("last", gates, segment, at.hv))
            if (at.v0 == 0) & (T.get_thread_binding() == 0):
                reverse_skips[at.n, at.hv] = T.Select(last < 0, 0, 1)
            chunks = T.Select(last < 0, segment.chunks, last + 1)
        return chunks

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype, BackwardGate),
        forward_gates: T.Tensor([sizes.chunk_slots, sizes.H_v, ForwardGate.COUNT, C], "float32"),
        output_gradient: OutputGradient(sizes, dtype),
        ends: StateGradients(sizes),
        grad_states: T.Tensor([sizes.segment_slots, sizes.H_v, sizes.value_rows, K], "float32"),
        reverse_skips: T.Tensor([sizes.segment_slots, sizes.H_v], "int32"),
        reverse_replay: ReverseReplay(sizes, dtype, K),
        writes_maps: T.int32,
        scale: T.float32,
        value_tiles: T.int32,  # tiles of ROWS rows
    ):
        with T.Kernel(sizes.segment_slots * sizes.H_v * value_tiles, threads=tile.threads, prelude=PRELUDE) as cta:
            tiles = make_tiles()
            r = make_registers()
            last, first = (ends.view(T.access_ptr(x[0], mode)) for x, mode in ((ends.dht, "r"), (ends.dh0, "w")))
            offset = T.alloc_var("int32", init=extern("transposed_offset", returns="int32"))
            column = T.alloc_var("int32", init=extern("first_column", returns="int32"))
            T.pdl_sync()
            at = locate(cta, sizes, value_tiles)
            segment = load_segment_early(chunks.plan.segments, at.n)
            left = T.alloc_var("int32", init=segment.chunks)
            if writes_maps != 0:
                left = chunks_of_map(at, segment, forward_gates, reverse_skips)
                T.clear(r.dS)
            else:
                begin_state(r.dS, at, FirstState(segment.final, last, grad_states))
            has_map = T.alloc_var("int32", init=T.Select((writes_maps != 0) & (left > 0), 1, 0))
            while left > 0:
                left -= 1
                chunk = chunk_of(segment, left, 0)
                of_outputs = (output_gradient.grad_o, output_gradient.grad_o_row)
                load(tiles, chunks.tokens, *of_outputs, chunks.matrices, chunk, at.hk, at.hv, at.v0)
                if writes_maps == 0:
                    dh_rows = (T.access_ptr(reverse_replay.dh[chunk.slot, at.hv, at.v0, 0], "w"), K, ROWS, K)
                    extern(f"round_and_store_state<{element}, {K}>", r.dS.data, *dh_rows)
                step(r, tiles, offset, column, scale)
                T.sync_threads()  # all tiles have been read
                if writes_maps == 0:
                    to = T.access_ptr(reverse_replay.u[chunk.row, at.hv, at.v0], "w")
                    stride = T.Cast("int64", sizes.H_v) * sizes.value_dim
                    columns = T.Cast("int32", sizes.value_dim) - at.v0
                    store_transposed(r.U, tiles.dO, offset, element, to, stride, chunk.length, columns)
            if writes_maps != 0:
                if has_map != 0:
                    store_map(r.dS, T.access_ptr(grad_states[z_slot(at.n, reverse=True), at.hv, at.v0, 0], "w"))
            else:
                if segment.initial >= 0:
                    first.write(r.dS, segment.initial, at.hv, at.v0)

    return main
