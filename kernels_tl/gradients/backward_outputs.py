"""The roles of chunk_backward that compute gradients from the tiles of the warpgroups of dS (backward_state.py): one
warpgroup dQ and dK, two warps dV, and one warp dbeta and dg. chunk_backward.py has the formulas.

The warp of dbeta and dg also adds dQ and dK to the outputs, in the CTAs' order (gradients/semaphores.cuh).
"""

from types import SimpleNamespace

import tilelang.language as T

from kernels_tl.config import CHUNK_BACKWARD as TILE
from kernels_tl.core.common import SWIZZLE_128B, C, descriptor, element_type, extern
from kernels_tl.core.cta import fragments, load_segment_early, locate_cta
from kernels_tl.core.pipeline import Stage, stage_of
from kernels_tl.gradients.backward_state import Full, multiply, token_sums
from kernels_tl.gradients.reverse_recurrence import GateTable, gate_row
from kernels_tl.layout import BackwardGate, NormalizedGate, TokenSum

STAGES = TILE.stages
VALUE_THREADS, GATE_THREADS = 64, 32  # they follow the warp that loads
VALUE_ROWS = C // (VALUE_THREADS // 32)  # rows of a chunk that a warp of dV takes


def output_roles(dtype, K, normalize, sizes, value_tiles):
    """The macros of the roles: make_keys, make_values, make_gates."""
    H_v, value_dim = sizes.H_v, sizes.value_dim
    element = element_type(dtype)
    table = GateTable(normalize)
    gates = table.rows

    def gamma_row(tiles, s, fade):
        """The row of the table with gamma of the tokens; with the l2norm the row `fade`, which lacks gamma_1."""
        return gate_row(tiles, s, fade if normalize else BackwardGate.GAMMA)

    def gamma_factor(tiles, s, factor):
        """The factor, times gamma_1 if gamma_row lacks it."""
        return factor * table.gamma(tiles, s, 0) if normalize else factor

    def project(gradient, tile, tiles, s, rstd):
        """The backward of the l2norm."""
        return extern(f"project_rows<{element}>", gradient.data, tile, gate_row(tiles, s, rstd))

    def make_key_registers():
        return fragments(
            product=([C, K], "float32"),  # Q_S, then dQ; U_S
            dK=([C, K], "float32"),
        )

    def stages_of(step, s, p):
        """A chunk's stages: of K and the gates, of the rings of one, and of the rings of sums, columns and products."""
        return stage_of(step, STAGES, s), Stage(0, p), Stage(p, (step // 2) % 2)

    def add_rows(tile, rows, row, hk, valid, order):
        return extern(
            f"add_rows<{element}>",
            descriptor(rows, [C, 1, C], SWIZZLE_128B),
            T.access_ptr(tile, "r"),
            T.access_ptr(rows[row, hk, 0], "rw"),
            row,
            hk,
            T.Cast("int32", rows.strides[0]),
            T.Cast("int32", sizes.key_dim),
            0,
            valid,
            order == 0,
        )

    def scale_and_dot(fragment, tile, factors, factor, sums):
        return extern(f"scale_and_dot<{element}>", fragment.data, tile, factors, factor, sums)

    def of_values(name, tiles, s, values, access, stride, *more):
        """Calls a function on U, beta, and the values or their gradients from the number `values` on."""
        rows = (T.access_ptr(values, access), T.Cast("int32", stride))
        return extern(f"{name}<{element}>", T.access_ptr(tiles.U, "r"), *rows, gate_row(tiles, s, gates.BETA), *more)

    @T.macro
    def begin_dK(r, tiles, ready, s, z, p, scale, carried):
        """Leaves the term of dK with V_new in dK."""
        multiply(tiles.V_new[z, :, :], tiles.dS[z, :, :], r.dK)
        T.wait_wgmma(0)
        T.barrier_arrive(ready.taken)
        T.barrier_arrive(ready.values_released)
        K_tile = T.access_ptr(tiles.K[s, 0, 0], "r")
        scale_and_dot(r.dK, K_tile, gate_row(tiles, s, gates.DECAY), carried, token_sums(tiles, p, TokenSum.KEY))

    @T.macro
    def add_states(r, tiles, ready, s, z, p, scale):
        """Adds the term of dK with the state, and leaves that of dQ in product."""
        multiply(tiles.U[z, :, :], tiles.S[z, :, :], r.product)
        T.wait_wgmma(0)
        T.barrier_arrive(ready.U_taken)
        K_tile = T.access_ptr(tiles.K[s, 0, 0], "r")
        extern(
            f"subtract_and_dot<{element}>",
            r.dK.data,
            r.product.data,
            K_tile,
            gamma_row(tiles, s, table.KEY_FADE),
            gate_row(tiles, s, gates.BETA),
            token_sums(tiles, p, TokenSum.STATE),
            gamma_factor(tiles, s, T.float32(1)),
        )
        multiply(tiles.dO[z, :, :], tiles.S[z, :, :], r.product)
        T.wait_wgmma(0)
        T.barrier_arrive(ready.h_released)
        T.barrier_arrive(ready.dO_released)
        Q_tile = T.access_ptr(tiles.Q[z, 0, 0], "r")
        gamma = (gamma_row(tiles, s, table.QUERY_FADE), gamma_factor(tiles, s, scale))
        scale_and_dot(r.product, Q_tile, *gamma, token_sums(tiles, p, TokenSum.QUERY))
        T.barrier_arrive(ready.sums_staged[p])

    @T.macro
    def add_tokens(r, tiles, ready, s, z, p):
        """Adds the terms with the two matrices of `gated`, and leaves dQ and dK in shared memory."""
        one = Stage(0, p)
        Q_tile, K_tile = T.access_ptr(tiles.Q[z, 0, 0], "r"), T.access_ptr(tiles.K[s, 0, 0], "r")
        Stage(0, 0).wait_for(ready.gated)
        T.wgmma_gemm(tiles.G[z, :, :], tiles.K[s, :, :], r.product, policy=Full)
        T.wgmma_gemm(tiles.G[z, :, :], tiles.Q[z, :, :], r.dK, transpose_A=True, policy=Full)
        T.wait_wgmma(0)
        T.barrier_arrive(ready.gated_taken)
        if normalize:
            project(r.product, Q_tile, tiles, s, NormalizedGate.QUERY_RSTD)
        T.barrier_arrive(ready.Q_released)
        one.wait_until_free(ready.keys_taken)
        Stage(0, 1).wait_for(ready.gated)
        T.wgmma_gemm(tiles.G[z, :, :], tiles.K[s, :, :], r.dK, policy=Full)
        extern(f"stage_fragment<{element}, {C}>", r.product.data, T.access_ptr(tiles.dQ, "w"))
        T.wait_wgmma(0)
        T.barrier_arrive(ready.gated_taken)
        if normalize:
            project(r.dK, K_tile, tiles, s, NormalizedGate.KEY_RSTD)
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
            stage, one, pair = stages_of(step, s, p)
            stage.wait_for(ready.loaded)
            one.wait_for(ready.values_loaded)
            pair.wait_until_free(ready.sums_taken)
            one.wait_for(ready.staged)  # rows after the sequence are zeros too
            begin_dK(r, tiles, ready, s, z, p, scale, carried)
            one.wait_for(ready.U_staged)
            one.wait_for(ready.h_loaded)
            one.wait_for(ready.dO_loaded)
            one.wait_for(ready.Q_loaded)
            # The compiler does not know these values, so it keeps no addresses from above in registers.
            s = extern("kept", step % STAGES, returns="int32")
            z = extern("kept", 0, returns="int32")
            add_states(r, tiles, ready, s, z, p, scale)
            s = extern("kept", step % STAGES, returns="int32")
            z = extern("kept", 0, returns="int32")
            add_tokens(r, tiles, ready, s, z, p)
            carried = table.gamma(tiles, s, 0)
            stage.arrive(ready.released)

    @T.macro
    def make_values(tiles, ready, cta, segments, tokens, dv):
        """The warps of dV."""
        work = locate_cta(cta, H_v, value_tiles)
        segment = load_segment_early(segments, work.slot)
        warp = T.alloc_var("int32", init=extern("warp_index", returns="int32") - 1)
        for step in T.serial(segment.chunks):
            c = segment.chunks - 1 - step
            s = step % STAGES
            p = step % 2
            stage, one, pair = stages_of(step, s, p)
            row = T.alloc_var("int32", init=segment.row + c * C)
            stage.wait_for(ready.loaded)
            pair.wait_until_free(ready.sums_taken)
            one.wait_for(ready.values_loaded)  # dV takes the place of V_new
            T.barrier_arrive(ready.values_released)
            one.wait_for(ready.U_staged)
            extent = (warp * VALUE_ROWS, segment.length - c * C, T.Cast("int32", value_dim) - work.v0)
            of_values("store_value_gradients", tiles, s, dv[row, work.hv, work.v0], "w", dv.strides[0], *extent)
            of_values(
                "dot_values",
                tiles,
                s,
                tokens.v[row, work.hv, work.v0],
                "r",
                tokens.v_row,
                token_sums(tiles, p, TokenSum.VALUE),
                *extent,
            )
            T.barrier_arrive(ready.U_taken)
            pair.arrive(ready.sums_staged)
            stage.arrive(ready.released)

    @T.macro
    def make_gates(tiles, ready, cta, segments, gradients, semaphores):
        """The warp of dbeta and dg. It also adds dQ and dK to the outputs, in order."""
        work = locate_cta(cta, H_v, value_tiles)
        segment = load_segment_early(segments, work.slot)
        hv = T.alloc_var("int32", init=work.hv)
        hk = T.alloc_var("int32", init=T.truncdiv(hv, sizes.group))
        order = T.alloc_var("int32", init=(hv - hk * sizes.group) * value_tiles + work.tile)
        # These variables move from chunk to chunk, because computing them again in each step takes more registers.
        chunk = T.alloc_var("int32", init=segment.first + segment.chunks - 1)
        row = T.alloc_var("int32", init=segment.row + (segment.chunks - 1) * C)
        length = T.alloc_var("int32", init=segment.length - (segment.chunks - 1) * C)
        for step in T.serial(segment.chunks):
            s = step % STAGES
            p = step % 2
            stage, one, pair = stages_of(step, s, p)
            stage.wait_for(ready.loaded)
            pair.wait_for(ready.sums_staged)
            extern(
                f"store_gate_gradients<{element}, {str(normalize).lower()}>",
                T.access_ptr(tiles.sums[p, 0, 0], "r"),
                T.access_ptr(tiles.columns[p, 0, 0], "r"),
                T.access_ptr(tiles.products[p, 0], "r"),
                T.access_ptr(tiles.gates[s, 0, 0], "r"),
                T.access_ptr(gradients.db[work.tile, row, hv], "w"),
                T.access_ptr(gradients.dg[work.tile, row, hv], "w"),
                T.Cast("int32", H_v),
                length,
            )
            pair.arrive(ready.sums_taken)
            stage.arrive(ready.released)
            one.wait_for(ready.keys_staged)
            extern("wait_for_semaphore", T.access_ptr(semaphores[chunk, hk], "r"), order)
            add_rows(tiles.dQ, gradients.dq, row, hk, length, order)
            add_rows(tiles.dK, gradients.dk, row, hk, length, order)
            extern("wait_for_boxes")
            T.barrier_arrive(ready.keys_taken)
            extern("wait_until_stored")
            extern("release_semaphore", T.access_ptr(semaphores[chunk, hk], "w"), order, sizes.group * value_tiles)
            chunk -= 1
            row -= C
            length += C

    return SimpleNamespace(make_keys=make_keys, make_values=make_values, make_gates=make_gates)
