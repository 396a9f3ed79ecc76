"""The recurrence in reverse over the chunks of each segment, and with it the gradients of all inputs.

With S the state at a chunk's start (h), dS' the gradient of the state behind it, D, L, P and V_new as in the forward:

    dV_new = P^T dO + diag(gamma_C / gamma) K dS'
    U      = dV_new + L^T dV_new
    dS     = gamma_C dS' + scale Q^T diag(gamma) dO - K^T diag(beta gamma) U, formed as
             gamma_1 times the same with gamma / gamma_1, so that 16 bits hold the factors however small gamma is
    dV     = diag(beta) U

    G   = scale tril(dO V_new^T) * D                    gradient of Q K^T
    F   = -stril(U V_new^T) * D                         diag(beta) F is the gradient of K K^T
    Q_S = dO S^T,   U_S = U S^T,   V_S = V_new dS'^T    [C, K]

    dQ    = diag(scale gamma) Q_S + G K
    dK    = -diag(beta gamma) U_S + diag(gamma_C / gamma) V_S + G^T Q + (diag(beta) F + F^T diag(beta)) K
    dbeta = rowsum(U * V) - x + rowsum(F * K K^T) = diagonal of U V_new^T / beta
    dg_t  = sum_{i >= t} y_i + sum_{i < t} z_i + sum_{i >= t > j} E_ij + gamma_C <S, dS'>
            x = gamma rowsum(K * U_S)
            y = scale gamma rowsum(Q * Q_S) - beta x            what a later output reads of S
            z = (gamma_C / gamma) rowsum(K * V_S)               what an earlier token leaves in S'
            E = G * Q K^T + diag(beta) F * K K^T                pairs of tokens that the gate of t parts

Every term of dg carries the decay across t, so that it is accurate, however strong the decay is; for that products of
tokens stay in fp32. The diagonal of G * Q K^T would cancel and is left out. Where e^g is 0, so is dg.

dbeta is made of the diagonal, which is there already, as V_new has beta as a factor; where it has lost its digits for
that (in fp16, and where beta is next to 0) of V.

A CTA takes one head of one segment. Two warpgroups carry dS^T, 64 rows each, in the transposed form that keeps every
intermediate in registers as the next WGMMA's A operand, and make G and diag(beta) F; what others need of a chunk, dS',
U, G and diag(beta) F, they leave in shared memory. A third makes dQ and dK, up to a chunk behind them. Of the fourth
one warp keeps the chunks' operands coming by TMA, two make dV, and one dbeta and dg.

Between chunks dS^T is carried without the factor gamma_1 of the chunk behind (`carried`), which goes into what is made
of it.

What is loaded is one chunk's but for K and the gates, which both ends of the pipeline need at the same time.

dq and dk are the sums over the heads of a group: each adds its own, which the last warp sends out by TMA, in its turn
(gradients/turns.cuh).

Of values with more than V channels a CTA takes a tile; what each adds to dQ and dK goes out in turns likewise. db and
dg are in fp32, and each tile has its own: gate_gradients adds them up, and takes them through the activations that are
inside.

Launched on [segments * H_v * value tiles].
"""

import tilelang.language as T

from kernels_tl.bundles import Gradients, Matrices, Plan, Sizes, StateGradients, Tokens
from kernels_tl.config import CHUNK_BACKWARD as TILE
from kernels_tl.core.common import (
    EXPLICIT_PASS_CONFIGS,
    SWIZZLE_128B,
    C,
    after,
    block_rows,
    descriptor,
    dims,
    element_type,
    extern,
    load_early,
)
from kernels_tl.core.cta import barriers, clear_rows_behind, fetch, fragments, load_segment_early, locate_cta, shared
from kernels_tl.core.pipeline import Stage, is_loader, stage_of
from kernels_tl.layout import BackwardGate, NamedBarrier, SegmentColumn, SegmentFlag, TokenSum

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EXPLICIT_FENCES = True
EARLY = {"segments": after("chunk_plan")}
PRELUDE = """
#include "core/descriptors.cuh"
#include "gradients/gradients.cuh"
#include "gradients/turns.cuh"
"""

V = TILE.tile  # value rows a CTA
ROWS = 64  # of dS^T a warpgroup: the M of its WGMMA
STAGES = TILE.stages
CONSUMER_REGISTERS, OTHER_REGISTERS = TILE.registers
Full = T.GemmWarpPolicy.FullRow


def chunk_backward(dtype, K):
    sizes = Sizes()
    H_v, value_dim, value_rows = sizes.H_v, sizes.value_dim, sizes.value_rows
    (parts,) = dims("parts")
    value_tiles = T.truncdiv(T.Cast("int32", value_rows), V)
    element = element_type(dtype)
    assert V == 2 * ROWS and K == 128, "two warpgroups carry dS^T, and a tile has two panels"
    STATE_THREADS = 2 * 128
    KEY_THREADS = 128
    CONSUMERS = TILE.consumers
    assert CONSUMERS == STATE_THREADS + KEY_THREADS
    VALUE_THREADS, GATE_THREADS = 64, 32  # behind them and the warp that loads
    VALUE_ROWS = C // (VALUE_THREADS // 32)  # of a warp of dV
    assert TILE.producers == 32 + VALUE_THREADS + GATE_THREADS

    def make_tiles():
        return shared(
            TILE.shared,
            Q=([1, C, K], dtype),
            K=([STAGES, C, K], dtype),
            dO=([1, C, V], dtype),
            h=([1, V, K], dtype),
            V_new=([1, C, V], dtype),
            L=([1, C, C], dtype),  # L^T
            P=([1, C, C], dtype),  # P^T
            dS=([1, V, K], dtype),  # dS'^T
            U=([1, C, V], dtype),
            G=([1, C, C], dtype),  # then diag(beta) F
            gates=([STAGES, BackwardGate.COUNT, C], "float32"),
            sums=([2, TokenSum.COUNT, C], "float32"),
            columns=([2, 4, C], "float32"),  # E's, over the rows of a warp
            products=([2, STATE_THREADS // 32], "float32"),  # <S, dS'>, over the rows of a warp
            dQ=([2, C, K // 2], dtype),  # on their way out
            dK=([2, C, K // 2], dtype),
            swizzle=("U", "dQ", "dK"),
        )

    def make_barriers():
        return barriers(
            # Tiles have arrived, loader to the others; they have been used, back. `loaded` is of K and the gates,
            # `matrices` of L and P, `values` of V_new.
            loaded=[32] * STAGES,
            released=[CONSUMERS + VALUE_THREADS + GATE_THREADS] * STAGES,
            h_loaded=[32],
            h_released=[CONSUMERS],
            Q_loaded=[32],
            Q_released=[CONSUMERS],
            dO_loaded=[32],
            dO_released=[CONSUMERS],
            matrices_loaded=[32],
            matrices_released=[STATE_THREADS],
            values_loaded=[32],
            values_released=[CONSUMERS],
            # From the warpgroups of dS to those that take it, and back: dS' (and rows behind the sequence are zeros),
            # U, and twice a chunk a matrix in the tile of G.
            staged=[STATE_THREADS],
            taken=[KEY_THREADS],
            U_staged=[STATE_THREADS],
            U_taken=[KEY_THREADS + VALUE_THREADS],
            gated=[STATE_THREADS],
            gated_taken=[KEY_THREADS],
            # All to the warp of dbeta and dg, of every other chunk: what lies in sums, columns and products; and back.
            sums_made=[CONSUMERS + VALUE_THREADS] * 2,
            sums_taken=[GATE_THREADS] * 2,
            # To the warp of dbeta and dg: dQ and dK lie in shared memory; and back.
            keys_staged=[KEY_THREADS],
            keys_taken=[GATE_THREADS],
        )

    def make_state_registers():
        return fragments(
            dS=([V, K], "float32"),  # dS^T
            U=([V, C], "float32"),  # dS'^T K^T, dV_new^T, U^T in turn
            U_16=([V, C], dtype),
            # dO^T diag(scale gamma / gamma_1) in two parts: rounded to one, it would be the largest error of dS
            faded_dO=([V, C], dtype),
            faded_dO_rest=([V, C], dtype),
            faded_U=([V, C], dtype),  # -U^T diag(beta gamma / gamma_1)
            products=([C, C], "float32"),  # dO V_new^T, U V_new^T
            likeness=([C, C], "float32"),  # Q K^T, K K^T
        )

    def make_key_registers():
        return fragments(
            product=([C, K], "float32"),  # Q_S, then dQ; U_S
            dK=([C, K], "float32"),
        )

    def sums(tiles, p, row):
        return T.access_ptr(tiles.sums[p, row, 0], "w")

    def gates(tiles, s, row):
        return T.access_ptr(tiles.gates[s, row, 0], "r")

    def gate(tiles, s, row, i):
        return extern("load_factor", T.access_ptr(tiles.gates[s, row, i], "r"), returns="float32")

    def add_rows(tile, rows, row, hk, valid, turn):
        return extern(
            f"add_rows<{element}>",
            descriptor(rows, [C, 1, C], SWIZZLE_128B),
            T.access_ptr(tile, "r"),
            T.access_ptr(rows[row, hk, 0], "rw"),
            row,
            hk,
            T.Cast("int32", sizes.H_k),
            T.Cast("int32", sizes.key_dim),
            valid,
            turn == 0,
        )

    @T.macro
    def multiply(left, right, product, transpose_A=False, transpose_B=False):
        """product = left right, in flight."""
        transposes = {"transpose_A": transpose_A, "transpose_B": transpose_B}
        T.wgmma_gemm(left, right, product, policy=Full, clear_accum=True, **transposes)

    @T.macro
    def multiply_tokens(r, tiles, s, z, left, alike):
        """The products of G or F, and Q K^T or K K^T, in flight: 32 columns a warpgroup."""
        T.wgmma_gemm(left, tiles.V_new[z, :, :], r.products, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(alike, tiles.K[s, :, :], r.likeness, transpose_B=True, clear_accum=True)

    @T.macro
    def gate_products(r, tiles, ready, s, z, p, which, scale):
        """G or diag(beta) F to their tile; sums of E."""
        gated = T.alloc_local([8], "uint32")
        T.wait_wgmma(0)
        extern(
            f"gate_products<{element}, {str(which == 0).lower()}>",
            r.products.data,
            r.likeness.data,
            gates(tiles, s, BackwardGate.LOG),
            gates(tiles, s, BackwardGate.BETA),
            scale,
            gated.data,
            sums(tiles, p, (TokenSum.BETWEEN, TokenSum.BETA)[which]),
            T.access_ptr(tiles.columns[p, 0, 0], "w"),
            sums(tiles, p, TokenSum.VALUE),
        )
        Stage(0, which).wait_until_free(ready.gated_taken)
        extern("stage_gated", gated.data, T.access_ptr(tiles.G[z, 0, 0], "w"))
        T.fence_proxy_async()
        T.barrier_arrive(ready.gated)

    @T.macro
    def stage_dS(r, tiles, ready):
        """dS' / carried to shared memory."""
        extern(f"stage_fragment<{element}, {V}>", r.dS.data, T.access_ptr(tiles.dS, "w"))
        T.fence_proxy_async()
        T.barrier_arrive(ready.staged)

    @T.macro
    def begin_step(r, tiles, ready, s, p, scale, carried, offset, column, warpgroup):
        """Leaves dV_new^T in U, and what dO and dS' are of dS^T / gamma_1 in dS."""
        one = Stage(0, p)
        one.wait_for(ready.dO_loaded)
        extern(
            f"round_scaled_tile<{element}>",
            r.faded_dO.data,
            r.faded_dO_rest.data,
            T.access_ptr(tiles.dO[0, 0, warpgroup * ROWS], "r"),
            gates(tiles, s, BackwardGate.FADE),
            scale,
            offset,
            column,
        )
        T.sync_threads(NamedBarrier.BACKWARD_STAGED, STATE_THREADS)
        multiply(tiles.dS[0, :, :], tiles.K[s, :, :], r.U, transpose_B=True)
        fade = T.alloc_var("float32", init=gate(tiles, s, BackwardGate.FADE, C - 1) * carried)
        for i, j in T.Parallel(V, K):
            r.dS[i, j] *= fade
        one.wait_for(ready.Q_loaded)
        T.wgmma_gemm(r.faded_dO, tiles.Q[0, :, :], r.dS, policy=Full)
        T.wgmma_gemm(r.faded_dO_rest, tiles.Q[0, :, :], r.dS, policy=Full)
        one.wait_for(ready.matrices_loaded)
        T.wait_wgmma(0)
        extern("multiply_columns", r.U.data, gates(tiles, s, BackwardGate.DECAY), carried, column)
        T.wgmma_gemm(tiles.dO[0, :, :], tiles.P[0, :, :], r.U, transpose_A=True, transpose_B=True, policy=Full)
        T.wait_wgmma(0)

    @T.macro
    def end_step(r, tiles, ready, step, s, p, scale, carried, offset, column, warpgroup):
        """Leaves U, G, diag(beta) F, <S, dS'> and dS^T / gamma_1, the next chunk's dS', in shared memory."""
        one = Stage(0, p)
        pair = Stage(p, (step // 2) % 2)
        T.copy(r.U, r.U_16)
        T.wgmma_gemm(r.U_16, tiles.L[0, :, :], r.U, transpose_B=True, policy=Full)
        T.wait_wgmma(0)
        T.barrier_arrive(ready.matrices_released)
        extern(
            f"fade_columns<{element}>",
            r.faded_U.data,
            r.U.data,
            gates(tiles, s, BackwardGate.BETA),
            gates(tiles, s, BackwardGate.FADE),
            column,
        )
        T.wgmma_gemm(r.faded_U, tiles.K[s, :, :], r.dS, policy=Full)
        one.wait_until_free(ready.U_taken)
        extern(
            f"stage_transposed<{element}>",
            r.U.data,
            T.access_ptr(tiles.U[0, 0, warpgroup * ROWS], "w"),
            offset,
        )
        T.fence_proxy_async()
        T.barrier_arrive(ready.U_staged)
        z = T.alloc_var("int32", init=0)
        one.wait_for(ready.values_loaded)
        multiply_tokens(r, tiles, s, z, tiles.dO[z, :, :], tiles.Q[z, :, :])
        pair.wait_until_free(ready.sums_taken)
        one.wait_for(ready.h_loaded)
        extern(
            f"tile_product<{element}, {V}>",
            T.access_ptr(tiles.dS, "r"),
            T.access_ptr(tiles.h, "r"),
            carried,
            T.access_ptr(tiles.products[p, 0], "w"),
        )
        T.barrier_arrive(ready.h_released)
        gate_products(r, tiles, ready, s, z, p, 0, scale)
        T.barrier_arrive(ready.dO_released)
        T.barrier_arrive(ready.Q_released)
        T.sync_threads(NamedBarrier.BACKWARD_STAGED, STATE_THREADS)  # all of U
        multiply_tokens(r, tiles, s, z, tiles.U[z, :, :], tiles.K[s, :, :])
        one.wait_for(ready.taken)
        stage_dS(r, tiles, ready)
        gate_products(r, tiles, ready, s, z, p, 1, -1.0)
        T.barrier_arrive(ready.values_released)
        pair.arrive(ready.sums_made)

    @T.macro
    def carry(tiles, ready, cta, segments, final, initial, grad_states, ends, scale):
        """The warpgroups of dS."""
        piece = locate_cta(cta, H_v, value_tiles)
        segment = load_segment_early(segments, piece.slot)
        r = make_state_registers()
        warpgroup = T.alloc_var("int32", init=T.truncdiv(T.get_thread_binding(), 128))
        offset = T.alloc_var("int32", init=extern("transposed_offset", returns="int32"))
        column = T.alloc_var("int32", init=extern("first_column", returns="int32"))
        if segment.flags < SegmentFlag.LAST:
            for i, j in T.Parallel(V, K):
                r.dS[i, j] = grad_states[piece.slot, piece.hv, piece.v0 + i, j]
        else:
            if ends.has_dht != 0:
                final.read(r.dS, segment.n, piece.hv, piece.v0)
            else:
                T.clear(r.dS)
        if segment.length % C != 0:
            first = Stage(0, 0)
            first.wait_for(ready.loaded)
            first.wait_for(ready.Q_loaded)
            first.wait_for(ready.dO_loaded)
            clear_rows_behind(tiles.Q, segment.length % C, 0)
            clear_rows_behind(tiles.K, segment.length % C, 0)
            clear_rows_behind(tiles.dO, segment.length % C, 0)
            T.fence_proxy_async()
            T.sync_threads(NamedBarrier.BACKWARD_CLEARED, STATE_THREADS)
        carried = T.alloc_var("float32", init=1.0)
        stage_dS(r, tiles, ready)
        for step in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=step % STAGES)
            p = T.alloc_var("int32", init=step % 2)
            stage = stage_of(step, STAGES, s)
            stage.wait_for(ready.loaded)
            begin_step(r, tiles, ready, s, p, scale, carried, offset, column, warpgroup)
            end_step(r, tiles, ready, step, s, p, scale, carried, offset, column, warpgroup)
            carried = gate(tiles, s, BackwardGate.GAMMA, 0)
            stage.arrive(ready.released)
        if (ends.has_dh0 != 0) & (segment.flags % SegmentFlag.LAST != 0):
            for i, j in T.Parallel(V, K):
                r.dS[i, j] *= carried
            initial.write(r.dS, segment.n, piece.hv, piece.v0)

    @T.macro
    def begin_dK(r, tiles, ready, s, z, p, scale, carried):
        """dQ, and what of dK needs no U."""
        one = Stage(0, p)
        multiply(tiles.V_new[z, :, :], tiles.dS[z, :, :], r.dK)
        one.wait_for(ready.h_loaded)
        multiply(tiles.dO[z, :, :], tiles.h[z, :, :], r.product)
        T.wait_wgmma(1)
        T.barrier_arrive(ready.taken)
        T.barrier_arrive(ready.values_released)
        K_tile = T.access_ptr(tiles.K[s, 0, 0], "r")
        extern(
            f"scale_and_dot<{element}>",
            r.dK.data,
            K_tile,
            gates(tiles, s, BackwardGate.DECAY),
            carried,
            sums(tiles, p, TokenSum.KEY),
        )
        T.wait_wgmma(0)
        T.barrier_arrive(ready.dO_released)
        Q_tile = T.access_ptr(tiles.Q[z, 0, 0], "r")
        extern(
            f"scale_and_dot<{element}>",
            r.product.data,
            Q_tile,
            gates(tiles, s, BackwardGate.GAMMA),
            scale,
            sums(tiles, p, TokenSum.QUERY),
        )
        Stage(0, 0).wait_for(ready.gated)
        T.wgmma_gemm(tiles.G[z, :, :], tiles.K[s, :, :], r.product, policy=Full)
        T.wgmma_gemm(tiles.G[z, :, :], tiles.Q[z, :, :], r.dK, transpose_A=True, policy=Full)
        T.wait_wgmma(0)
        T.barrier_arrive(ready.gated_taken)
        T.barrier_arrive(ready.Q_released)
        one.wait_until_free(ready.keys_taken)
        extern(f"stage_fragment<{element}, {C}>", r.product.data, T.access_ptr(tiles.dQ, "w"))

    @T.macro
    def end_dK(r, tiles, ready, s, z, p):
        """The rest of dK."""
        multiply(tiles.U[z, :, :], tiles.h[z, :, :], r.product)
        T.wait_wgmma(0)
        T.barrier_arrive(ready.h_released)
        T.barrier_arrive(ready.U_taken)
        K_tile = T.access_ptr(tiles.K[s, 0, 0], "r")
        extern(
            f"subtract_and_dot<{element}>",
            r.dK.data,
            r.product.data,
            K_tile,
            gates(tiles, s, BackwardGate.GAMMA),
            gates(tiles, s, BackwardGate.BETA),
            sums(tiles, p, TokenSum.STATE),
        )
        T.barrier_arrive(ready.sums_made[p])
        Stage(0, 1).wait_for(ready.gated)
        T.wgmma_gemm(tiles.G[z, :, :], tiles.K[s, :, :], r.dK, policy=Full)
        T.wgmma_gemm(tiles.G[z, :, :], tiles.K[s, :, :], r.dK, transpose_A=True, policy=Full)
        T.wait_wgmma(0)
        T.barrier_arrive(ready.gated_taken)
        extern(f"stage_fragment<{element}, {C}>", r.dK.data, T.access_ptr(tiles.dK, "w"))
        T.fence_proxy_async()
        T.barrier_arrive(ready.keys_staged)

    @T.macro
    def make_keys(tiles, ready, cta, segments, scale):
        """The warpgroup of dQ and dK."""
        segment = load_segment_early(segments, locate_cta(cta, H_v, value_tiles).slot)
        r = make_key_registers()
        carried = T.alloc_var("float32", init=1.0)  # see carry
        for step in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=extern("kept", step % STAGES, returns="int32"))
            z = T.alloc_var("int32", init=extern("kept", 0, returns="int32"))
            p = T.alloc_var("int32", init=step % 2)
            stage = stage_of(step, STAGES, s)
            one = Stage(0, p)
            pair = Stage(p, (step // 2) % 2)
            stage.wait_for(ready.loaded)
            one.wait_for(ready.values_loaded)
            pair.wait_until_free(ready.sums_taken)
            one.wait_for(ready.staged)  # and rows behind the sequence are zeros
            one.wait_for(ready.Q_loaded)
            one.wait_for(ready.dO_loaded)
            begin_dK(r, tiles, ready, s, z, p, scale, carried)
            one.wait_for(ready.U_staged)
            # As if they were others: what is computed from them shall not be kept in registers from above.
            s = extern("kept", step % STAGES, returns="int32")
            z = extern("kept", 0, returns="int32")
            end_dK(r, tiles, ready, s, z, p)
            carried = gate(tiles, s, BackwardGate.GAMMA, 0)
            stage.arrive(ready.released)

    @T.macro
    def load(tiles, ready, cta, segments, tokens, grad_o, matrices, h, v_new):
        """The loader: the chunks' operands, the last chunk's first."""
        piece = locate_cta(cta, H_v, value_tiles)
        segment = load_segment_early(segments, piece.slot)
        hv = T.alloc_var("int32", init=piece.hv)
        hk = T.alloc_var("int32", init=T.truncdiv(hv, sizes.group))
        v0 = T.alloc_var("int32", init=piece.v0)
        edge = T.alloc_var("int32", init=0)  # see block_rows
        for step in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=step % STAGES)
            c = segment.chunks - 1 - step
            t = segment.row + c * C
            chunk = segment.first + c
            p = T.alloc_var("int32", init=step % 2)
            stage = stage_of(step, STAGES, s)
            one = Stage(0, p)
            stage.wait_until_free(ready.released)
            fetch(tokens.k[t : t + C, hk, 0:K], tiles.K[s, :, :], ready.loaded[s])
            fetch(matrices.gates[chunk, hv, :, :], tiles.gates[s, :, :], ready.loaded[s])
            stage.arrive(ready.loaded)
            one.wait_until_free(ready.matrices_released)
            for target, source in block_rows(tiles.P, 0, matrices.rows, chunk, hv, 1, edge):
                fetch(source, target, ready.matrices_loaded)
            for target, source in block_rows(tiles.L, 0, matrices.rows, chunk, hv, 0, edge):
                fetch(source, target, ready.matrices_loaded)
            T.barrier_arrive(ready.matrices_loaded)
            one.wait_until_free(ready.dO_released)
            fetch(grad_o[t : t + C, hv, v0 : v0 + V], tiles.dO[0, :, :], ready.dO_loaded)
            T.barrier_arrive(ready.dO_loaded)
            one.wait_until_free(ready.Q_released)
            fetch(tokens.q[t : t + C, hk, 0:K], tiles.Q[0, :, :], ready.Q_loaded)
            T.barrier_arrive(ready.Q_loaded)
            one.wait_until_free(ready.values_released)
            fetch(v_new[chunk, hv, :, v0 : v0 + V], tiles.V_new[0, :, :], ready.values_loaded)
            T.barrier_arrive(ready.values_loaded)
            one.wait_until_free(ready.h_released)
            fetch(h[chunk, hv, v0 : v0 + V, :], tiles.h[0, :, :], ready.h_loaded)
            T.barrier_arrive(ready.h_loaded)

    @T.macro
    def make_values(tiles, ready, cta, segments, v, dv):
        """The warps of dV."""
        piece = locate_cta(cta, H_v, value_tiles)
        segment = load_segment_early(segments, piece.slot)
        warp = T.alloc_var("int32", init=extern("warp_index", returns="int32") - 1)
        for step in T.serial(segment.chunks):
            c = segment.chunks - 1 - step
            s = step % STAGES
            p = step % 2
            stage = stage_of(step, STAGES, s)
            one = Stage(0, p)
            pair = Stage(p, (step // 2) % 2)
            row = T.alloc_var("int32", init=segment.row + c * C)
            stage.wait_for(ready.loaded)
            pair.wait_until_free(ready.sums_taken)
            one.wait_for(ready.U_staged)
            extern(
                f"store_value_gradients<{element}>",
                T.access_ptr(tiles.U, "r"),
                T.access_ptr(dv[row, piece.hv, piece.v0], "w"),
                T.Cast("int32", H_v * value_dim),
                gates(tiles, s, BackwardGate.BETA),
                warp * VALUE_ROWS,
                segment.length - c * C,
                T.Cast("int32", value_dim) - piece.v0,
            )
            extern(
                f"dot_values<{element}>",
                T.access_ptr(tiles.U, "r"),
                T.access_ptr(v[row, piece.hv, piece.v0], "r"),
                T.Cast("int32", H_v * value_dim),
                gates(tiles, s, BackwardGate.BETA),
                sums(tiles, p, TokenSum.VALUE),
                warp * VALUE_ROWS,
                segment.length - c * C,
                T.Cast("int32", value_dim) - piece.v0,
            )
            T.barrier_arrive(ready.U_taken)
            pair.arrive(ready.sums_made)
            stage.arrive(ready.released)

    @T.macro
    def make_gates(tiles, ready, cta, segments, gradients, turns):
        """The warp of dbeta and dg, and of dQ and dK on their way out."""
        piece = locate_cta(cta, H_v, value_tiles)
        segment = load_segment_early(segments, piece.slot)
        hv = T.alloc_var("int32", init=piece.hv)
        hk = T.alloc_var("int32", init=T.truncdiv(hv, sizes.group))
        turn = T.alloc_var("int32", init=(hv - hk * sizes.group) * value_tiles + piece.tile)
        # Of the chunk, counted on rather than made anew each time: that takes fewer registers.
        chunk = T.alloc_var("int32", init=segment.first + segment.chunks - 1)
        row = T.alloc_var("int32", init=segment.row + (segment.chunks - 1) * C)
        length = T.alloc_var("int32", init=segment.length - (segment.chunks - 1) * C)
        for step in T.serial(segment.chunks):
            s = step % STAGES
            p = step % 2
            stage = stage_of(step, STAGES, s)
            one = Stage(0, p)
            pair = Stage(p, (step // 2) % 2)
            stage.wait_for(ready.loaded)
            pair.wait_for(ready.sums_made)
            extern(
                f"store_gate_gradients<{element}>",
                T.access_ptr(tiles.sums[p, 0, 0], "r"),
                T.access_ptr(tiles.columns[p, 0, 0], "r"),
                T.access_ptr(tiles.products[p, 0], "r"),
                T.access_ptr(tiles.gates[s, 0, 0], "r"),
                T.access_ptr(gradients.db[piece.tile, row, hv], "w"),
                T.access_ptr(gradients.dg[piece.tile, row, hv], "w"),
                T.Cast("int32", H_v),
                length,
            )
            pair.arrive(ready.sums_taken)
            stage.arrive(ready.released)
            one.wait_for(ready.keys_staged)
            extern("wait_for_turn", T.access_ptr(turns[chunk, hk], "r"), turn)
            add_rows(tiles.dQ, gradients.dq, row, hk, length, turn)
            add_rows(tiles.dK, gradients.dk, row, hk, length, turn)
            extern("wait_for_boxes")
            T.barrier_arrive(ready.keys_taken)
            extern("wait_until_stored")
            extern("end_turn", T.access_ptr(turns[chunk, hk], "w"), turn, sizes.group * value_tiles)
            chunk -= 1
            row -= C
            length += C

    @T.prim_func
    def main(
        sizes: sizes,
        tokens: Tokens(sizes, dtype),
        grad_o: T.Tensor([sizes.tokens, H_v, value_dim], dtype),
        plan: Plan(sizes),
        matrices: Matrices(sizes, dtype, BackwardGate),
        h: T.Tensor([sizes.chunk_slots, H_v, value_rows, K], dtype),
        v_new: T.Tensor([sizes.chunk_slots, H_v, C, value_rows], dtype),
        grad_states: T.Tensor([sizes.segment_slots, H_v, value_rows, K], "float32"),
        ends: StateGradients(sizes),
        turns: T.Tensor([sizes.chunk_slots, sizes.H_k], "int32"),
        gradients: Gradients(sizes, dtype, [parts]),
        scale: T.float32,
    ):
        with T.Kernel(
            sizes.segment_slots * H_v * T.truncdiv(value_rows, V), threads=TILE.threads, prelude=PRELUDE
        ) as cta:
            tiles = make_tiles()
            ready = make_barriers()
            slot = locate_cta(cta, H_v, value_tiles).slot
            flags = load_early(plan.segments[slot, SegmentColumn.FLAGS])
            length = load_early(plan.segments[slot, SegmentColumn.LENGTH])
            if (flags + length == 0) & (cta != 0):
                extern("leave")
            T.pdl_sync()
            T.pdl_trigger()
            tx = T.get_thread_binding()
            if tx < STATE_THREADS:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                final = ends.view(T.access_ptr(ends.dht[0], "r"))
                initial = ends.view(T.access_ptr(ends.dh0[0], "w"))
                carry(tiles, ready, cta, plan.segments, final, initial, grad_states, ends, scale)
            else:
                if tx < CONSUMERS:
                    T.inc_max_nreg(CONSUMER_REGISTERS)
                    make_keys(tiles, ready, cta, plan.segments, scale)
                else:
                    T.dec_max_nreg(OTHER_REGISTERS)
                    if is_loader(CONSUMERS):
                        load(tiles, ready, cta, plan.segments, tokens, grad_o, matrices, h, v_new)
                    else:
                        if tx < CONSUMERS + 32 + VALUE_THREADS:
                            make_values(tiles, ready, cta, plan.segments, tokens.v, gradients.dv)
                        else:
                            make_gates(tiles, ready, cta, plan.segments, gradients, turns)

    return main
