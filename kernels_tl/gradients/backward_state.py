"""The role of chunk_backward that carries dS^T: two warpgroups, 64 rows each. chunk_backward.py has the formulas.

A chunk's step computes U, G, diag(beta) F + F^T diag(beta), <S, dS'> and dS, and leaves them in shared memory for the
other roles (backward_outputs.py). dS is the next step's dS'. The transposed form keeps every intermediate in registers
as the next WGMMA's A operand. The registers carry dS^T / gamma_1, with gamma_1 of the chunk that dS comes from.
`carried` is this gamma_1: each use of dS' multiplies by it.
"""

import tilelang.language as T

from kernels_tl.config import CHUNK_BACKWARD as TILE, WGMMA_ROWS as ROWS
from kernels_tl.core.common import C, element_type, extern
from kernels_tl.core.cta import clear_rows_after, fragments, load_segment_early, locate_cta, position_in_tiles
from kernels_tl.core.pipeline import Stage, stage_of
from kernels_tl.gradients.reverse_recurrence import GateTable, beta_and_fade, gate_row, gate_rows, round_faded_dO
from kernels_tl.layout import FROM_SCAN, NO_STATE, NamedBarrier, NormalizedGate, TokenSum

V = TILE.tile  # value rows per CTA
STAGES = TILE.stages
STATE_THREADS = 2 * 128
Full = T.GemmWarpPolicy.FullRow


def token_sums(tiles, p, row):
    return T.access_ptr(tiles.sums[p, row, 0], "w")


@T.macro
def multiply(left, right, product, transpose_A=False, transpose_B=False):
    """product = left right, in flight."""
    transposes = {"transpose_A": transpose_A, "transpose_B": transpose_B}
    T.wgmma_gemm(left, right, product, policy=Full, clear_accum=True, **transposes)


def state_role(dtype, K, normalize, H_v, value_tiles):
    """The macro of the role, `carry`."""
    element = element_type(dtype)
    table = GateTable(normalize)
    gates = table.rows

    from_P = dtype == "bfloat16"  # whether E of G comes from P. In fp16, P has too few digits where it is small

    def norms(tiles, s, which):
        """With the l2norm, the factors of the rows and columns of G (which = 0) or F (which = 1)."""
        if not normalize:
            return ()
        rows = (NormalizedGate.QUERY_RSTD, NormalizedGate.KEY_RSTD)[which]
        return gate_row(tiles, s, rows), gate_row(tiles, s, NormalizedGate.KEY_RSTD)

    def make_state_registers():
        r = fragments(
            dS=([V, K], "float32"),  # dS^T
            U=([V, C], "float32"),  # dS'^T K^T, dV_new^T, U^T in turn
            U_16=([V, C], dtype),
            # dO^T diag(scale gamma / gamma_1) in two parts: rounded to one, it would be the largest error of dS
            faded_dO=([V, C], dtype),
            faded_dO_rest=([V, C], dtype),
            faded_U=([V, C], dtype),  # -U^T diag(beta gamma / gamma_1)
            products=([C, C], "float32"),  # dO V_new^T, U V_new^T
            likeness=([C, C], "float32"),  # K K^T; before it Q K^T, unless from_P
        )
        r.table = table
        return r

    @T.macro
    def multiply_tokens(left, right, product):
        """product = left right^T of a chunk's tokens, in flight: 32 columns per warpgroup."""
        T.wgmma_gemm(left, right, product, transpose_B=True, clear_accum=True)

    @T.macro
    def gate_products(r, tiles, ready, s, p, which, scale):
        """Leaves G (which = 0) or diag(beta) F + F^T diag(beta) (which = 1) in their tile, and adds to the sums of
        E."""
        takes_P = from_P and which == 0
        options = ", ".join(str(option).lower() for option in (which == 0, normalize, takes_P))
        gated = T.alloc_local([8], "uint32")
        extern(
            f"gate_products<{element}, {options}>",
            r.products.data,
            T.access_ptr(tiles.P[0, 0, 0], "r") if takes_P else r.likeness.data,
            *gate_rows(tiles, s, gates.LOG, gates.BETA),
            scale,
            gated.data,
            token_sums(tiles, p, (TokenSum.BETWEEN, TokenSum.BETA)[which]),
            T.access_ptr(tiles.columns[p, 0, 0], "w"),
            token_sums(tiles, p, TokenSum.VALUE),
            *norms(tiles, s, which),
        )
        Stage(0, which).wait_until_free(ready.gated_taken)
        extern(("stage_gated", "stage_symmetric")[which], gated.data, T.access_ptr(tiles.G[0, 0, 0], "w"))
        T.fence_proxy_async()
        T.barrier_arrive(ready.gated)

    @T.macro
    def stage_dS(r, tiles, ready):
        """Leaves dS' / carried in shared memory."""
        extern(f"stage_fragment<{element}, {V}>", r.dS.data, T.access_ptr(tiles.dS, "w"))
        T.fence_proxy_async()
        T.barrier_arrive(ready.staged)

    @T.macro
    def begin_step(r, tiles, ready, s, p, scale, carried, offset, column, warpgroup):
        """Leaves dV_new^T in U, and in dS all of dS^T / gamma_1 but its term with U."""
        one = Stage(0, p)
        one.wait_for(ready.dO_loaded)
        round_faded_dO(r, tiles, s, tiles.dO[0, 0, warpgroup * ROWS], scale, offset, column)
        T.sync_threads(NamedBarrier.BACKWARD_STAGED, STATE_THREADS)
        multiply(tiles.dS[0, :, :], tiles.K[s, :, :], r.U, transpose_B=True)
        fade = T.alloc_var("float32", init=table.fade(tiles, s) * carried)
        for i, j in T.Parallel(V, K):
            r.dS[i, j] *= fade
        one.wait_for(ready.Q_loaded)
        T.wgmma_gemm(r.faded_dO, tiles.Q[0, :, :], r.dS, policy=Full)
        T.wgmma_gemm(r.faded_dO_rest, tiles.Q[0, :, :], r.dS, policy=Full)
        one.wait_for(ready.matrices_loaded)
        T.wait_wgmma(0)
        extern("multiply_columns", r.U.data, gate_row(tiles, s, gates.DECAY), carried, column)
        T.wgmma_gemm(tiles.dO[0, :, :], tiles.P[0, :, :], r.U, transpose_A=True, transpose_B=True, policy=Full)
        T.wait_wgmma(0)

    @T.macro
    def end_step(r, tiles, ready, step, s, p, scale, carried, offset, column, warpgroup):
        """Leaves U, both matrices of `gated`, <S, dS'> and dS^T / gamma_1, the next chunk's dS', in shared memory."""
        one = Stage(0, p)
        pair = Stage(p, (step // 2) % 2)
        T.copy(r.U, r.U_16)
        T.wgmma_gemm(r.U_16, tiles.L[0, :, :], r.U, transpose_B=True, policy=Full)
        T.wait_wgmma(0)
        extern(f"fade_columns<{element}>", r.faded_U.data, r.U.data, *beta_and_fade(r, tiles, s), column)
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
        multiply_tokens(tiles.dO[z, :, :], tiles.V_new[z, :, :], r.products)
        if not from_P:
            multiply_tokens(tiles.Q[z, :, :], tiles.K[s, :, :], r.likeness)
        pair.wait_until_free(ready.sums_taken)
        one.wait_for(ready.h_loaded)
        extern(
            f"tile_product<{element}, {V}>",
            T.access_ptr(tiles.dS, "r"),
            T.access_ptr(tiles.S, "r"),
            carried,
            T.access_ptr(tiles.products[p, 0], "w"),
        )
        T.barrier_arrive(ready.h_released)
        T.wait_wgmma(0)
        gate_products(r, tiles, ready, s, p, 0, scale)
        T.barrier_arrive(ready.matrices_released)
        T.barrier_arrive(ready.dO_released)
        T.barrier_arrive(ready.Q_released)
        T.sync_threads(NamedBarrier.BACKWARD_STAGED, STATE_THREADS)  # U is complete
        multiply_tokens(tiles.U[z, :, :], tiles.V_new[z, :, :], r.products)
        multiply_tokens(tiles.K[s, :, :], tiles.K[s, :, :], r.likeness)
        one.wait_for(ready.taken)
        stage_dS(r, tiles, ready)
        T.wait_wgmma(0)
        T.barrier_arrive(ready.values_released)
        gate_products(r, tiles, ready, s, p, 1, -1.0)
        pair.arrive(ready.sums_staged)

    @T.macro
    def carry(tiles, ready, cta, segments, final, initial, grad_states, scale):
        """The warpgroups of dS."""
        work = locate_cta(cta, H_v, value_tiles)
        segment = load_segment_early(segments, work.slot)
        r = make_state_registers()
        warpgroup = T.alloc_var("int32", init=T.truncdiv(T.get_thread_binding(), 128))
        position = position_in_tiles()
        if segment.final == FROM_SCAN:
            for i, j in T.Parallel(V, K):
                r.dS[i, j] = grad_states[work.slot, work.hv, work.v0 + i, j]
        else:
            if segment.final != NO_STATE:
                final.read(r.dS, segment.final, work.hv, work.v0)
            else:
                T.clear(r.dS)
        if segment.length % C != 0:
            first = Stage(0, 0)
            first.wait_for(ready.loaded)
            first.wait_for(ready.Q_loaded)
            first.wait_for(ready.dO_loaded)
            first.wait_for(ready.values_loaded)
            clear_rows_after(tiles.Q, segment.length % C, STATE_THREADS, 0)
            clear_rows_after(tiles.K, segment.length % C, STATE_THREADS, 0)
            clear_rows_after(tiles.dO, segment.length % C, STATE_THREADS, 0)
            clear_rows_after(tiles.V_new, segment.length % C, STATE_THREADS, 0)
            T.fence_proxy_async()
            T.sync_threads(NamedBarrier.BACKWARD_CLEARED, STATE_THREADS)
        carried = T.alloc_var("float32", init=1.0)
        stage_dS(r, tiles, ready)
        for step in T.serial(segment.chunks):
            s = T.alloc_var("int32", init=step % STAGES)
            p = T.alloc_var("int32", init=step % 2)
            stage = stage_of(step, STAGES, s)
            stage.wait_for(ready.loaded)
            begin_step(r, tiles, ready, s, p, scale, carried, position.offset, position.column, warpgroup)
            end_step(r, tiles, ready, step, s, p, scale, carried, position.offset, position.column, warpgroup)
            carried = table.gamma(tiles, s, 0)
            stage.arrive(ready.released)
        if segment.initial >= 0:
            for i, j in T.Parallel(V, K):
                r.dS[i, j] *= carried
            initial.write(r.dS, segment.initial, work.hv, work.v0)

    return carry
