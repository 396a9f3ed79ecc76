"""The gradients of all inputs for keys of more than 128 channels, all chunks in parallel: after replay_states and
replay_gradients each chunk's S, V_new, dS' and U are there. chunk_backward.py has the formulas and the symbols:

    dQ    = diag(scale gamma) Q_S + G K                                     Q_S = dO S^T
    dK    = -diag(beta gamma) U_S + diag(gamma_C / gamma) V_S               U_S = U S^T,  V_S = V_new dS'^T
            + G^T Q + (diag(beta) F + F^T diag(beta)) K
    dV    = diag(beta) U
    dbeta, dg as there

    q, k          [tokens, H_k, key_dim]                 do, v, dv  [tokens, H_v, value_dim]
    h, dh         [chunk_slots, H_v, value_rows, K]      S and dS', V-first
    v_new, u      [tokens, H_v, V]
    db, dg        [K / 128, tokens, H_v] fp32            parts, which gate_gradients adds
    semaphores    [chunk_slots * K / 128, H_k]           see gradients/semaphores.cuh

backward.cpp launches [chunk slots * H_v * K / KEY_PART] CTAs. A CTA takes one head of a chunk and KEY_PART of its
channels, a part. The parts' x, y, z and <S, dS'> add up to those of all channels. Only the first part computes dV, and
the sums of E and of U * V: it has Q K^T and K K^T of all channels. dq and dk are sums over the heads of a group, whose
CTAs add their terms in order.

A CTA loops over the value rows in tiles of V. Each warpgroup has half of the part's channels, and 32 columns of the
products of tokens. dQ and dK reuse the tiles' memory. Timeline (core/pipeline.py), rows: tiles of dO, V_new, U, h, dS':

    producer warp    rows 0, Q K, rows 1|          |rows 2    |          |          |         |
    warpgroups 0, 1                     |products 0|products 1|products 2|G, F, sums|dQ, dK   |
    value warps                         |dV 0      |dV 1      |dV 2      |          |         |
    gates warp                          |          |          |          |          |dbeta, dg|dq, dk

    rows: released>, >loaded     products, dV: loaded>, >released     Q K, gates: >keys_loaded     dV 0, G: keys_loaded>
    sums, last dV: >sums_staged  dQ, dK: >keys_staged                 dbeta, dg: sums_staged>      dq, dk: keys_staged>
"""

import tilelang.language as T

from kernels_tl.bundles import Chunks, Gradients, OutputGradient, Replay, ReverseReplay, Sizes
from kernels_tl.config import TOKEN_GRADIENTS as TILE, key_parts
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, SWIZZLE_128B, C, descriptor, dims, element_type, extern
from kernels_tl.core.cta import Variables, barriers, clear_rows_after, fetch, fragments, shared
from kernels_tl.core.pipeline import is_producer_warp, stage_of
from kernels_tl.gradients.reverse_recurrence import gate_row
from kernels_tl.layout import KEY_PART, PADDING, BackwardGate, ChunkColumn, NamedBarrier, TokenSum

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
PRELUDE = """
#include "core/descriptors.cuh"
#include "gradients/token_gradients.cuh"
#include "gradients/semaphores.cuh"
"""

V = TILE.tile  # value rows at a time
STAGES = TILE.stages
CONSUMERS, CONSUMER_REGISTERS, OTHER_REGISTERS = TILE.consumers, *TILE.registers
VALUE_THREADS, GATE_THREADS = 64, 32  # they follow the warp that loads
SECOND_SUMS = 3  # sums of channels, QUERY, KEY and STATE, that the second warpgroup also has
VALUE_ROWS = C // (VALUE_THREADS // 32)  # rows of a chunk that a warp of dV takes
assert TILE.producers == 32 + VALUE_THREADS + GATE_THREADS


def token_gradients(dtype, K):
    sizes = Sizes()
    H_v, value_dim = sizes.H_v, sizes.value_dim
    (parts,) = dims("parts")
    element = element_type(dtype)
    PARTS = key_parts(K)
    assert PARTS * KEY_PART == K

    def make_tiles():
        return shared(
            TILE.shared,
            dO=([STAGES, C, V], dtype),
            V_new=([STAGES, C, V], dtype),
            U=([STAGES, C, V], dtype),
            h=([STAGES, V, KEY_PART], dtype),  # in the end the first stage is dQ's
            dS=([STAGES, V, KEY_PART], dtype),  # in the end the first stage is dK's
            Q=([PARTS, C, KEY_PART], dtype),
            K=([PARTS, C, KEY_PART], dtype),
            G=([1, C, C], dtype),
            F=([1, C, C], dtype),  # diag(beta) F + F^T diag(beta)
            gates=([1, BackwardGate.COUNT, C], "float32"),
            sums=([TokenSum.COUNT + SECOND_SUMS, C], "float32"),  # TokenSum's, then those of the second warpgroup
            columns=([4, C], "float32"),  # column sums of E over the rows of each warp
            products=([CONSUMERS // 32], "float32"),  # <S, dS'> over the rows of each warp
        )

    def make_barriers():
        return barriers(
            loaded=[32] * STAGES,  # producer warp to the others: a stage's tiles have arrived
            released=[CONSUMERS + VALUE_THREADS] * STAGES,  # back: the stage is free
            keys_loaded=[32],  # producer warp to the others: Q, K and the gates have arrived
            sums_staged=[CONSUMERS + VALUE_THREADS],  # the others to the warp of dbeta and dg: sums, columns, products
            keys_staged=[CONSUMERS],  # the same for dQ and dK
        )

    def sums(tiles, row):
        return T.access_ptr(tiles.sums[row, 0], "w")

    def work_of(chunk_slot, hv, part, chunks):
        return Variables(
            slot=chunk_slot,
            hv=hv,
            part=part,
            row=chunks[chunk_slot, ChunkColumn.ROW],
            length=chunks[chunk_slot, ChunkColumn.LENGTH],
        )

    @T.macro
    def sync_consumers():
        T.fence_proxy_async()
        T.sync_threads(NamedBarrier.BACKWARD_CLEARED, CONSUMERS)

    @T.macro
    def gate(r, tiles, products, likeness, which, scale):
        """Leaves G (which = 0) or diag(beta) F + F^T diag(beta) (which = 1) in its tile, and the sums of E."""
        gated = T.alloc_local([8], "uint32")
        extern(
            f"gate_products<{element}, {str(which == 0).lower()}>",
            products.data,
            likeness.data,
            gate_row(tiles, 0, BackwardGate.LOG),
            gate_row(tiles, 0, BackwardGate.BETA),
            scale,
            gated.data,
            sums(tiles, (TokenSum.BETWEEN, TokenSum.BETA)[which]),
            T.access_ptr(tiles.columns[0, 0], "w"),
            sums(tiles, TokenSum.VALUE),
        )
        stage = ("stage_gated", "stage_symmetric")[which]
        extern(stage, gated.data, T.access_ptr((tiles.G, tiles.F)[which][0, 0, 0], "w"))

    @T.macro
    def go_through_values(r, tiles, ready, work, value_tiles, state_sum):
        """The sums over value rows."""
        for i in T.serial(value_tiles):
            s = T.alloc_var("int32", init=i % STAGES)
            stage = stage_of(i, STAGES, s)
            stage.wait_for(ready.loaded)
            if work.length < C:
                clear_rows_after(tiles.dO, work.length, CONSUMERS, s)
                clear_rows_after(tiles.V_new, work.length, CONSUMERS, s)
                clear_rows_after(tiles.U, work.length, CONSUMERS, s)
                sync_consumers()
            T.wgmma_gemm(tiles.dO[s, :, :], tiles.h[s, :, :], r.dQ)
            T.wgmma_gemm(tiles.U[s, :, :], tiles.h[s, :, :], r.U_S)
            T.wgmma_gemm(tiles.V_new[s, :, :], tiles.dS[s, :, :], r.dK)
            T.wgmma_gemm(tiles.dO[s, :, :], tiles.V_new[s, :, :], r.dO_V, transpose_B=True)
            T.wgmma_gemm(tiles.U[s, :, :], tiles.V_new[s, :, :], r.U_V, transpose_B=True)
            extern(
                f"add_panel_product<{element}>",
                state_sum.data,
                T.access_ptr(tiles.dS[s, 0, 0], "r"),
                T.access_ptr(tiles.h[s, 0, 0], "r"),
            )
            T.wait_wgmma(0)
            stage.arrive(ready.released)

    @T.macro
    def compute(tiles, ready, work, value_tiles, scale):
        """The consumers."""
        r = fragments(
            dQ=([C, KEY_PART], "float32"),  # Q_S, then dQ
            dK=([C, KEY_PART], "float32"),  # V_S, then dK
            U_S=([C, KEY_PART], "float32"),
            dO_V=([C, C], "float32"),  # dO V_new^T
            U_V=([C, C], "float32"),  # U V_new^T
            QK=([C, C], "float32"),
            KK=([C, C], "float32"),
        )
        state_sum = T.alloc_local([1], "float32")
        state_sum[0] = 0.0
        T.clear(r.dQ)
        T.clear(r.dK)
        T.clear(r.U_S)
        T.clear(r.dO_V)
        T.clear(r.U_V)
        T.clear(r.QK)
        T.clear(r.KK)
        go_through_values(r, tiles, ready, work, value_tiles, state_sum)
        extern("store_warp_sum", T.access_ptr(tiles.products[0], "w"), state_sum[0])
        T.barrier_wait(ready.keys_loaded, 0)
        if work.length < C:
            for part in T.serial(PARTS):
                clear_rows_after(tiles.Q, work.length, CONSUMERS, part)
                clear_rows_after(tiles.K, work.length, CONSUMERS, part)
            sync_consumers()
        if work.part == 0:  # E takes all channels, and only one part has it
            for part in T.serial(PARTS):
                T.wgmma_gemm(tiles.Q[part, :, :], tiles.K[part, :, :], r.QK, transpose_B=True)
                T.wgmma_gemm(tiles.K[part, :, :], tiles.K[part, :, :], r.KK, transpose_B=True)
            T.wait_wgmma(0)
        gate(r, tiles, r.dO_V, r.QK, 0, scale)
        gate(r, tiles, r.U_V, r.KK, 1, -1.0)
        Q_tile, K_tile = (T.access_ptr(x[work.part, 0, 0], "r") for x in (tiles.Q, tiles.K))
        gates = (gate_row(tiles, 0, BackwardGate.GAMMA), gate_row(tiles, 0, BackwardGate.BETA))
        dot = f"scale_and_dot_panel<{element}>"
        extern(dot, r.dQ.data, Q_tile, gates[0], scale, sums(tiles, TokenSum.QUERY))
        extern(dot, r.dK.data, K_tile, gate_row(tiles, 0, BackwardGate.DECAY), T.float32(1), sums(tiles, TokenSum.KEY))
        dot = f"subtract_and_dot_panel<{element}>"
        extern(dot, r.dK.data, r.U_S.data, K_tile, *gates, sums(tiles, TokenSum.STATE))
        T.barrier_arrive(ready.sums_staged)
        sync_consumers()  # G and F are complete; all tiles of value rows have been read
        T.wgmma_gemm(tiles.G[0, :, :], tiles.K[work.part, :, :], r.dQ)
        T.wgmma_gemm(tiles.G[0, :, :], tiles.Q[work.part, :, :], r.dK, transpose_A=True)
        T.wgmma_gemm(tiles.F[0, :, :], tiles.K[work.part, :, :], r.dK)
        T.wait_wgmma(0)
        extern(f"stage_panel<{element}>", r.dQ.data, T.access_ptr(tiles.h[0, 0, 0], "w"))
        extern(f"stage_panel<{element}>", r.dK.data, T.access_ptr(tiles.dS[0, 0, 0], "w"))
        T.fence_proxy_async()
        T.barrier_arrive(ready.keys_staged)

    @T.macro
    def load(tiles, ready, work, value_tiles, hk, tokens, grad_o, matrices, replay, reverse_replay):
        """The producer warp."""
        t = work.row
        for i in T.serial(value_tiles):
            s = T.alloc_var("int32", init=i % STAGES)
            stage = stage_of(i, STAGES, s)
            stage.wait_until_free(ready.released)
            v0 = T.alloc_var("int32", init=i * V)
            k0 = T.alloc_var("int32", init=work.part * KEY_PART)
            fetch(grad_o[t : t + C, work.hv, v0 : v0 + V], tiles.dO[s, :, :], ready.loaded[s])
            fetch(replay.h[work.slot, work.hv, v0 : v0 + V, k0 : k0 + KEY_PART], tiles.h[s, :, :], ready.loaded[s])
            fetch(reverse_replay.u[t : t + C, work.hv, v0 : v0 + V], tiles.U[s, :, :], ready.loaded[s])
            fetch(replay.v_new[t : t + C, work.hv, v0 : v0 + V], tiles.V_new[s, :, :], ready.loaded[s])
            fetch(
                reverse_replay.dh[work.slot, work.hv, v0 : v0 + V, k0 : k0 + KEY_PART],
                tiles.dS[s, :, :],
                ready.loaded[s],
            )
            stage.arrive(ready.loaded)
            if i == 0:
                fetch(matrices.gates[work.slot, work.hv, :, :], tiles.gates[0, :, :], ready.keys_loaded)
                for part in T.serial(work.part, PARTS):  # the first part needs all of them
                    c0 = T.alloc_var("int32", init=part * KEY_PART)
                    fetch(tokens.q[t : t + C, hk, c0 : c0 + KEY_PART], tiles.Q[part, :, :], ready.keys_loaded)
                    fetch(tokens.k[t : t + C, hk, c0 : c0 + KEY_PART], tiles.K[part, :, :], ready.keys_loaded)
                T.barrier_arrive(ready.keys_loaded)

    @T.macro
    def make_values(tiles, ready, work, value_tiles, tokens, dv):
        """The warps of dV."""
        first = T.alloc_var("int32", init=(extern("warp_index", returns="int32") - 1) * VALUE_ROWS)
        dots = T.alloc_local([8], "float32")
        T.clear(dots)
        T.barrier_wait(ready.keys_loaded, 0)
        for i in T.serial(value_tiles):
            s = T.alloc_var("int32", init=i % STAGES)
            stage = stage_of(i, STAGES, s)
            stage.wait_for(ready.loaded)
            if work.part == 0:
                v0 = T.alloc_var("int32", init=i * V)
                extern(
                    f"add_value_panel<{element}>",
                    dots.data,
                    T.access_ptr(tiles.U[s, 0, 0], "r"),
                    T.access_ptr(tokens.v[work.row, work.hv, v0], "r"),
                    T.access_ptr(dv[work.row, work.hv, v0], "w"),
                    T.Cast("int32", tokens.v_row),
                    T.Cast("int32", dv.strides[0]),
                    gate_row(tiles, 0, BackwardGate.BETA),
                    first,
                    work.length,
                    T.Cast("int32", value_dim) - v0,
                )
            stage.arrive(ready.released)
        if work.part == 0:
            beta_and_rows = (gate_row(tiles, 0, BackwardGate.BETA), first, work.length)
            extern(f"store_value_sums<{element}>", sums(tiles, TokenSum.VALUE), dots.data, *beta_and_rows)
        T.barrier_arrive(ready.sums_staged)

    def add_rows(tiles, rows, work, hk, order):
        return extern(
            f"add_rows<{element}>",
            descriptor(rows, [C, 1, C], SWIZZLE_128B),
            T.access_ptr(tiles[0, 0, 0], "r"),
            T.access_ptr(rows[work.row, hk, 0], "rw"),
            work.row,
            hk,
            T.Cast("int32", rows.strides[0]),
            T.Cast("int32", sizes.key_dim),
            work.part * KEY_PART,
            work.length,
            order == 0,
        )

    @T.macro
    def make_gates(tiles, ready, work, hk, gradients, semaphores):
        """The warp of dbeta and dg. It also adds dQ and dK to the outputs, in order."""
        T.barrier_wait(ready.keys_loaded, 0)
        T.barrier_wait(ready.sums_staged, 0)
        extern("complete_sums", sums(tiles, 0), work.part != 0)
        extern(
            f"store_gate_gradients<{element}>",
            T.access_ptr(tiles.sums[0, 0], "r"),
            T.access_ptr(tiles.columns[0, 0], "r"),
            T.access_ptr(tiles.products[0], "r"),
            T.access_ptr(tiles.gates[0, 0, 0], "r"),
            T.access_ptr(gradients.db[work.part, work.row, work.hv], "w"),
            T.access_ptr(gradients.dg[work.part, work.row, work.hv], "w"),
            T.Cast("int32", H_v),
            work.length,
        )
        order = T.alloc_var("int32", init=work.hv - hk * sizes.group)
        counter = T.alloc_var("int32", init=work.slot * PARTS + work.part)
        T.barrier_wait(ready.keys_staged, 0)
        extern("wait_for_semaphore", T.access_ptr(semaphores[counter, hk], "r"), order)
        add_rows(tiles.h, gradients.dq, work, hk, order)
        add_rows(tiles.dS, gradients.dk, work, hk, order)
        extern("wait_for_boxes")
        extern("wait_until_stored")
        extern("release_semaphore", T.access_ptr(semaphores[counter, hk], "w"), order, sizes.group)

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype, BackwardGate),
        output_gradient: OutputGradient(sizes, dtype),
        replay: Replay(sizes, dtype, K),
        reverse_replay: ReverseReplay(sizes, dtype, K),
        semaphores: T.Tensor([sizes.chunk_slots * PARTS, sizes.H_k], "int32"),
        gradients: Gradients(sizes, dtype, [parts]),
        scale: T.float32,
    ):
        with T.Kernel(sizes.chunk_slots * H_v * PARTS, threads=TILE.threads, prelude=PRELUDE) as cta:
            tiles = make_tiles()
            ready = make_barriers()
            T.pdl_sync()
            T.pdl_trigger()
            # Parts first: the CTAs of a group's heads, which wait for each other, are close.
            slot = T.alloc_var("int32", init=T.truncdiv(cta, T.Cast("int32", H_v) * PARTS))
            rest = T.alloc_var("int32", init=cta - slot * T.Cast("int32", H_v) * PARTS)
            part = T.alloc_var("int32", init=T.truncdiv(rest, T.Cast("int32", H_v)))
            if chunks.plan.chunks[slot, ChunkColumn.SEQUENCE] == PADDING:
                extern("leave")
            work = work_of(slot, rest - part * T.Cast("int32", H_v), part, chunks.plan.chunks)
            hk = T.alloc_var("int32", init=T.truncdiv(work.hv, sizes.group))
            value_tiles = T.alloc_var("int32", init=T.ceildiv(T.Cast("int32", value_dim), V))
            tx = T.get_thread_binding()
            if tx < CONSUMERS:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                compute(tiles, ready, work, value_tiles, scale)
            else:
                T.dec_max_nreg(OTHER_REGISTERS)
                if is_producer_warp(CONSUMERS):
                    replays = (replay, reverse_replay)
                    load(
                        tiles,
                        ready,
                        work,
                        value_tiles,
                        hk,
                        chunks.tokens,
                        output_gradient.grad_o,
                        chunks.matrices,
                        *replays,
                    )
                else:
                    if tx < CONSUMERS + 32 + VALUE_THREADS:
                        make_values(tiles, ready, work, value_tiles, chunks.tokens, gradients.dv)
                    else:
                        make_gates(tiles, ready, work, hk, gradients, semaphores)

    return main
