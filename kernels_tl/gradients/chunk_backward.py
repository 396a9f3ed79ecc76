"""The recurrence in reverse over the chunks of each segment, and with it the gradients of all inputs.

S is the state at a chunk's start (h), dS' the gradient of the state after it; D, L, P and V_new are the forward's:

    dV_new = P^T dO + diag(gamma_C / gamma) K dS'
    U      = dV_new + L^T dV_new
    dS     = gamma_C dS' + scale Q^T diag(gamma) dO - K^T diag(beta gamma) U
    dV     = diag(beta) U

    G   = scale tril(dO V_new^T) * D                    gradient of Q K^T
    F   = -stril(U V_new^T) * D                         diag(beta) F is the gradient of K K^T
    Q_S = dO S^T,   U_S = U S^T,   V_S = V_new dS'^T    [C, K]

    dQ    = diag(scale gamma) Q_S + G K
    dK    = -diag(beta gamma) U_S + diag(gamma_C / gamma) V_S + G^T Q + (diag(beta) F + F^T diag(beta)) K
    dbeta = rowsum(U * V) - x + rowsum(F * K K^T) = diagonal of U V_new^T / beta
    dg_t  = sum_{i >= t} y_i + sum_{i < t} z_i + sum_{i >= t > j} E_ij + gamma_C <S, dS'>
            x = gamma rowsum(K * U_S)
            y = scale gamma rowsum(Q * Q_S) - beta x            a later output's read of S
            z = (gamma_C / gamma) rowsum(K * V_S)               an earlier token's part of S'
            E = G * Q K^T + diag(beta) F * K K^T                pairs of tokens with the gate of t between them

Shapes: q and k [tokens, H_k, K]; do, v and V_new [tokens, H_v, V]; h [chunk_slots, H_v, V, K]. V_new may be in the
memory of dv: dV of a chunk is written once the chunk's V_new has been loaded.
backward.cpp launches [segments * H_v * value tiles] CTAs: a CTA takes one head of one segment and a tile of value rows.

Roles. Two warpgroups carry dS^T and compute U, G, diag(beta) F + F^T diag(beta) and <S, dS'> (backward_state.py). They
leave dS', U and both matrices in shared memory. A third warpgroup computes dQ and dK, up to a chunk later; two warps
compute dV; one computes dbeta and dg (backward_outputs.py). The producer warp is here. Timeline (core/pipeline.py)
of one chunk and the beginning of the next one, whose operands the producer loads:

    producer warp             |K, gates   |L P, dO  |Q, V_new, h|         |           |
    warpgroups 0, 1  dV_new, U|G, <S, dS'>|dS       |F          |dV_new, U|G, <S, dS'>|
    warpgroup 2      V_new dS'|U S, dO S  |dQ, dK: G|           |dK: F    |V_new dS'  |
    value warps               |dV, U * V  |         |           |         |dV, U * V  |
    gates warp                |           |         |           |dbeta, dg|dq, dk     |

    U: U_taken>, >U_staged   V_new dS': staged>, >taken   U S: U_staged>, >U_taken   dV: U_staged>, >U_taken
    G, F: gated_taken>, >gated   dS: taken>, >staged   dQ, dK: gated>, >gated_taken, then keys_taken>, >keys_staged
    F, dO S, dV: >sums_staged   dbeta: sums_staged>, >sums_taken   dq: keys_staged>, >keys_taken
    loads: x_released>, >x_loaded, and x_loaded> where x is used

The l2norm inside (`normalize`): Q and K are the queries and keys before the l2norm. The gates contain the factors
1 / |q| and 1 / |k| (NormalizedGate). G has 1 / |q| in its rows and 1 / |k| in its columns; diag(beta) F has 1 / |k| in
both. So dQ and dK above become the gradients of the normalised rows, divided by the norms. project_rows turns them into
the gradients of q and k. "The l2norm of the backward" in docs/design.md has the formulas.

Accuracy:

- dS is computed as gamma_1 times the same sum with gamma / gamma_1 in the place of gamma. 16 bits hold gamma / gamma_1
  however small gamma is.
- Every term of dg carries the decay across t, so dg is accurate under strong decay too. This needs products of tokens
  in fp32. In bf16 the term G * Q K^T of E is (dO V_new^T) * P, because bf16 has as many digits where P is small. The
  diagonal of G * Q K^T cancels in dg, and is left out of E. If e^g is 0, dg is 0.
- dbeta is the diagonal of U V_new^T divided by beta, because V_new has beta as a factor. In fp16, and if beta is close
  to 0, dbeta comes from V instead, because the diagonal has lost its digits.

Sums over CTAs: dq and dk are sums over the heads of a group and over value tiles, accumulated in the CTAs' order
(gradients/semaphores.cuh). Each value tile writes its own db and dg, in fp32. gate_gradients adds these, and applies
the activations' slopes.

K and the gates have two stages, because the first and the last roles need them at the same time. The other operands
have one.
"""

import tilelang.language as T

from kernels_tl.bundles import Chunks, Gradients, OutputGradient, Replay, Sizes, StateGradients
from kernels_tl.config import CHUNK_BACKWARD as TILE, CHUNK_BACKWARD_NORMALIZE, WGMMA_ROWS as ROWS
from kernels_tl.core.common import (
    EXPLICIT_PASS_CONFIGS,
    C,
    after,
    block_rows,
    dims,
    extern,
    load_early,
)
from kernels_tl.core.cta import barriers, fetch, grid_of_tiles, load_segment_early, locate_cta, shared
from kernels_tl.core.pipeline import Stage, is_producer_warp, stage_of
from kernels_tl.gradients.backward_outputs import GATE_THREADS, VALUE_THREADS, output_roles
from kernels_tl.gradients.backward_state import STATE_THREADS, state_role
from kernels_tl.gradients.reverse_recurrence import GateTable
from kernels_tl.layout import SegmentColumn, TokenSum

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EARLY = {"segments": after("chunk_plan")}
PRELUDE = """
#include "core/descriptors.cuh"
#include "core/state_tiles.cuh"
#include "gradients/gradients.cuh"
#include "gradients/semaphores.cuh"
"""

V = TILE.tile  # value rows per CTA
STAGES = TILE.stages
CONSUMERS, CONSUMER_REGISTERS, OTHER_REGISTERS = TILE.consumers, *TILE.registers
KEY_THREADS = 128
assert CONSUMERS == STATE_THREADS + KEY_THREADS
assert TILE.producers == 32 + VALUE_THREADS + GATE_THREADS


def chunk_backward(dtype, K, normalize):
    sizes = Sizes()
    gates = GateTable(normalize).rows
    H_v, value_rows = sizes.H_v, sizes.value_rows
    (parts,) = dims("parts")
    value_tiles = T.truncdiv(T.Cast("int32", value_rows), V)
    assert V == 2 * ROWS and K == 128, "two warpgroups carry dS^T, and a tile has two panels"
    carry = state_role(dtype, K, normalize, H_v, value_tiles)
    outputs = output_roles(dtype, K, normalize, sizes, value_tiles)

    def make_tiles():
        return shared(
            (CHUNK_BACKWARD_NORMALIZE if normalize else TILE).shared,
            Q=([1, C, K], dtype),
            K=([STAGES, C, K], dtype),
            dO=([1, C, V], dtype),
            S=([1, V, K], dtype),  # h
            V_new=([1, C, V], dtype),
            L=([1, C, C], dtype),  # L^T
            P=([1, C, C], dtype),  # P^T
            dS=([1, V, K], dtype),  # dS'^T
            U=([1, C, V], dtype),
            G=([1, C, C], dtype),  # later: diag(beta) F + F^T diag(beta)
            gates=([STAGES, gates.COUNT, C], "float32"),
            sums=([2, TokenSum.COUNT, C], "float32"),
            columns=([2, 4, C], "float32"),  # column sums of E over the rows of each warp
            products=([2, STATE_THREADS // 32], "float32"),  # <S, dS'> over the rows of each warp
            dQ=([2, C, K // 2], dtype),  # dQ and dK, until they are added to the outputs
            dK=([2, C, K // 2], dtype),
            swizzle=("U", "dQ", "dK"),
        )

    def make_barriers():
        return barriers(
            # x_loaded, from the producer warp: the tiles x have arrived. x_released, back: it is free. K and the
            # gates share `loaded`, L and P share `matrices_loaded`; `values_loaded` is for V_new.
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
            values_released=[CONSUMERS + VALUE_THREADS],
            # The warpgroups of dS to the roles that use their tiles, and back: `staged` for dS' (rows after the
            # sequence are then zeros), `U_staged` for U, `gated` twice a chunk, for both matrices in one tile.
            staged=[STATE_THREADS],
            taken=[KEY_THREADS],
            U_staged=[STATE_THREADS],
            U_taken=[KEY_THREADS + VALUE_THREADS],
            gated=[STATE_THREADS],
            gated_taken=[KEY_THREADS],
            # The other roles to the warp of dbeta and dg, and back: sums, columns and products. Each has two stages.
            sums_staged=[CONSUMERS + VALUE_THREADS] * 2,
            sums_taken=[GATE_THREADS] * 2,
            # The warpgroup of dQ and dK to the warp that adds them to the outputs, and back.
            keys_staged=[KEY_THREADS],
            keys_taken=[GATE_THREADS],
        )

    @T.macro
    def load(tiles, ready, cta, segments, tokens, grad_o, matrices, replay):
        """The producer warp: the chunks' operands, the last chunk's first."""
        work = locate_cta(cta, H_v, value_tiles)
        segment = load_segment_early(segments, work.slot)
        hv = T.alloc_var("int32", init=work.hv)
        hk = T.alloc_var("int32", init=T.truncdiv(hv, sizes.group))
        v0 = T.alloc_var("int32", init=work.v0)
        edge = T.alloc_var("int32", init=0)  # see block_rows
        for step in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=step % STAGES)
            c = segment.chunks - 1 - step
            t, chunk = segment.row_and_slot(c)
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
            fetch(replay.v_new[t : t + C, hv, v0 : v0 + V], tiles.V_new[0, :, :], ready.values_loaded)
            T.barrier_arrive(ready.values_loaded)
            one.wait_until_free(ready.h_released)
            fetch(replay.h[chunk, hv, v0 : v0 + V, :], tiles.S[0, :, :], ready.h_loaded)
            T.barrier_arrive(ready.h_loaded)

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype, gates),
        output_gradient: OutputGradient(sizes, dtype),
        replay: Replay(sizes, dtype, K),
        grad_states: T.Tensor([sizes.segment_slots, H_v, value_rows, K], "float32"),
        ends: StateGradients(sizes),
        semaphores: T.Tensor([sizes.chunk_slots, sizes.H_k], "int32"),
        gradients: Gradients(sizes, dtype, [parts]),
        scale: T.float32,
    ):
        with T.Kernel(grid_of_tiles(sizes), threads=TILE.threads, prelude=PRELUDE) as cta:
            tiles = make_tiles()
            ready = make_barriers()
            slot = locate_cta(cta, H_v, value_tiles).slot
            flags = load_early(chunks.plan.segments[slot, SegmentColumn.FLAGS])
            length = load_early(chunks.plan.segments[slot, SegmentColumn.LENGTH])
            if (flags + length == 0) & (cta != 0):
                extern("leave")
            T.pdl_sync()
            T.pdl_trigger()
            tx = T.get_thread_binding()
            if tx < STATE_THREADS:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                final = ends.view(T.access_ptr(ends.dht[0], "r"))
                initial = ends.view(T.access_ptr(ends.dh0[0], "w"))
                carry(tiles, ready, cta, chunks.plan.segments, final, initial, grad_states, scale)
            else:
                if tx < CONSUMERS:
                    T.inc_max_nreg(CONSUMER_REGISTERS)
                    outputs.make_keys(tiles, ready, cta, chunks.plan.segments, scale)
                else:
                    T.dec_max_nreg(OTHER_REGISTERS)
                    if is_producer_warp(CONSUMERS):
                        load(
                            tiles,
                            ready,
                            cta,
                            chunks.plan.segments,
                            chunks.tokens,
                            output_gradient.grad_o,
                            chunks.matrices,
                            replay,
                        )
                    else:
                        if tx < CONSUMERS + 32 + VALUE_THREADS:
                            outputs.make_values(tiles, ready, cta, chunks.plan.segments, chunks.tokens, gradients.dv)
                        else:
                            outputs.make_gates(tiles, ready, cta, chunks.plan.segments, gradients, semaphores)

    return main
