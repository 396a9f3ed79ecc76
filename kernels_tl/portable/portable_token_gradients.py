"""The gradients of all inputs, all chunks in parallel, for every GPU from Ampere on: what gradients/token_gradients.py
does on Hopper for large keys. portable_replay and portable_replay_gradients have written each chunk's S, V_new, dS' and
U. chunk_backward.py has the formulas and the symbols:

    dQ    = diag(scale gamma) Q_S + G K                                     Q_S = dO S^T
    dK    = -diag(beta gamma) U_S + diag(gamma_C / gamma) V_S               U_S = U S^T,  V_S = V_new dS'^T
            + G^T Q + (diag(beta) F + F^T diag(beta)) K
    dV    = diag(beta) U
    dbeta, dg as there

Shapes are those of token_gradients.py. backward.cpp launches [chunk slots * H_v * K / KEY_PART] CTAs of eight warps. A
CTA takes one head of a chunk and KEY_PART of its channels, a part. Only the first part computes dV and E, which takes
Q K^T and K K^T of all channels. All threads do the same: the sums over value rows in tiles of V, then the products of
tokens. dq and dk are sums over the heads of a group, whose CTAs add their terms in order (gradients/semaphores.cuh).

G and F take the memory of dO and V_new, and dQ and dK that of h and dS', each once it has been read.
"""

import tilelang.language as T

from kernels_tl.bundles import Chunks, Gradients, OutputGradient, Replay, ReverseReplay, Sizes
from kernels_tl.config import PORTABLE_TOKEN_GRADIENTS as TILE, WARP, key_parts
from kernels_tl.core.common import EXPLICIT_PASS_CONFIGS, C, dims, element_type, extern
from kernels_tl.core.cta import Variables, fragments, shared
from kernels_tl.layout import KEY_PART, PADDING, BackwardGate, ChunkColumn, TokenSum
from kernels_tl.portable.tiles import load_gates, load_rows

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
PRELUDE = """
#include "gradients/token_gradients.cuh"
#include "gradients/semaphores.cuh"
#include "portable/tiles.cuh"
"""

Full = T.GemmWarpPolicy.FullRow  # four warps share the rows of a product, and each has half of its columns
V = TILE.tile  # value rows at a time
WARPS = TILE.consumers // WARP
SECOND_SUMS = 3  # sums of channels, QUERY, KEY and STATE, that the second four warps also have
VALUE_WARPS = 2  # of dV
VALUE_ROWS = C // VALUE_WARPS


def portable_token_gradients(dtype, K):
    sizes = Sizes()
    H_v, key_dim, value_dim = sizes.H_v, sizes.key_dim, sizes.value_dim
    (parts,) = dims("parts")
    element = element_type(dtype)
    PARTS = key_parts(K)
    assert PARTS * KEY_PART == K

    def make_tiles():
        return shared(
            TILE.shared,
            dO=([C, V], dtype),  # later: G
            V_new=([C, V], dtype),  # later: diag(beta) F + F^T diag(beta)
            U=([C, V], dtype),
            h=([V, KEY_PART], dtype),  # later: Q of the other part, then dQ
            dS=([V, KEY_PART], dtype),  # later: K of the other part, then dK
            Q=([C, KEY_PART], dtype),
            K=([C, KEY_PART], dtype),
            gates=([BackwardGate.COUNT, C], "float32"),
            sums=([TokenSum.COUNT + SECOND_SUMS, C], "float32"),  # TokenSum's, then those of the second four warps
            columns=([4, C], "float32"),  # column sums of E over the rows of each warp
            products=([WARPS], "float32"),  # <S, dS'> over the rows of each warp
        )

    def make_registers():
        return fragments(
            dQ=([C, KEY_PART], "float32"),  # Q_S, then dQ
            dK=([C, KEY_PART], "float32"),  # V_S, then dK
            U_S=([C, KEY_PART], "float32"),
            dO_V=([C, C], "float32"),  # dO V_new^T
            U_V=([C, C], "float32"),  # U V_new^T
            QK=([C, C], "float32"),
            KK=([C, C], "float32"),
        )

    def locate_part(cta, plan):
        """The CTA's chunk, part and head. Parts first: the CTAs of a group's heads, which wait for one another, are
        close."""
        heads = T.Cast("int32", H_v)
        at = Variables(slot=T.truncdiv(cta, heads * PARTS))
        at.and_also(rest=cta - at.slot * heads * PARTS)
        at.and_also(part=T.truncdiv(at.rest, heads))
        at.and_also(hv=at.rest - at.part * heads)
        at.and_also(hk=T.truncdiv(at.hv, sizes.group))
        return at.and_also(row=plan.chunks[at.slot, ChunkColumn.ROW], length=plan.chunks[at.slot, ChunkColumn.LENGTH])

    def sums(tiles, row):
        return T.access_ptr(tiles.sums[row, 0], "rw")

    def gate(tiles, row):
        return T.access_ptr(tiles.gates[row, 0], "r")

    @T.macro
    def await_copies():
        extern("commit_copies")
        extern("wait_for_copies<0>")
        T.sync_threads()

    def load_state(tile, states, at, v0):
        """Begins to load V value rows of S or dS', from v0 on, and the part's channels."""
        source = T.access_ptr(states[at.slot, at.hv, v0, at.part * KEY_PART], "r")
        return extern(
            f"load_rows<{TILE.threads}, {KEY_PART}>", T.access_ptr(tile, "w"), source, T.int64(K), V, KEY_PART
        )

    @T.macro
    def go_through_values(r, tiles, at, tokens, grad_o, replay, reverse, dv, state_sum, dots):
        """The sums over value rows, and dV."""
        warp = T.truncdiv(T.get_thread_binding(), WARP)
        for i in T.serial(T.ceildiv(T.Cast("int32", value_dim), V)):
            v0 = T.alloc_var("int32", init=i * V)
            load_rows(tiles.dO[:, :], grad_o.grad_o, grad_o.grad_o_row, at.hv, v0, at, TILE.threads)
            load_rows(tiles.V_new[:, :], replay.v_new, replay.v_new_row, at.hv, v0, at, TILE.threads)
            load_rows(tiles.U[:, :], reverse.u, T.Cast("int64", H_v) * value_dim, at.hv, v0, at, TILE.threads)
            load_state(tiles.h[:, :], replay.h, at, v0)
            load_state(tiles.dS[:, :], reverse.dh, at, v0)
            await_copies()
            T.gemm(tiles.dO, tiles.h, r.dQ, policy=Full)
            T.gemm(tiles.U, tiles.h, r.U_S, policy=Full)
            T.gemm(tiles.V_new, tiles.dS, r.dK, policy=Full)
            T.gemm(tiles.dO, tiles.V_new, r.dO_V, transpose_B=True, policy=Full)
            T.gemm(tiles.U, tiles.V_new, r.U_V, transpose_B=True, policy=Full)
            both = (T.access_ptr(tiles.dS[0, 0], "r"), T.access_ptr(tiles.h[0, 0], "r"))
            extern(f"add_panel_product<{element}>", state_sum.data, *both)
            if (at.part == 0) & (warp < VALUE_WARPS):
                extern(
                    f"add_value_panel<{element}>",
                    dots.data,
                    T.access_ptr(tiles.U[0, 0], "r"),
                    T.access_ptr(tokens.v[at.row, at.hv, v0], "r"),
                    T.access_ptr(dv[at.row, at.hv, v0], "w"),
                    T.Cast("int32", tokens.v_row),
                    T.Cast("int32", dv.strides[0]),
                    gate(tiles, BackwardGate.BETA),
                    warp * VALUE_ROWS,
                    at.length,
                    T.Cast("int32", value_dim) - v0,
                )
            T.sync_threads()  # all tiles of value rows have been read
        if (at.part == 0) & (warp < VALUE_WARPS):
            rows = (gate(tiles, BackwardGate.BETA), warp * VALUE_ROWS, at.length)
            extern(f"store_value_sums<{element}>", sums(tiles, TokenSum.VALUE), dots.data, *rows)

    @T.macro
    def multiply_tokens(r, tiles, at, tokens):
        """Q K^T and K K^T of all channels."""
        T.gemm(tiles.Q, tiles.K, r.QK, transpose_B=True, policy=Full)
        T.gemm(tiles.K, tiles.K, r.KK, transpose_B=True, policy=Full)
        if PARTS == 2:
            load_rows(tiles.h[:, :], tokens.q, tokens.q_row, at.hk, KEY_PART, at, TILE.threads)
            load_rows(tiles.dS[:, :], tokens.k, tokens.k_row, at.hk, KEY_PART, at, TILE.threads)
            await_copies()
            T.gemm(tiles.h, tiles.dS, r.QK, transpose_B=True, policy=Full)
            T.gemm(tiles.dS, tiles.dS, r.KK, transpose_B=True, policy=Full)

    @T.macro
    def make_gated(r, tiles, scale):
        """Leaves G and diag(beta) F + F^T diag(beta) in their tiles, and the sums of E."""
        of_tokens = (gate(tiles, BackwardGate.LOG), gate(tiles, BackwardGate.BETA))
        of_sums = (T.access_ptr(tiles.columns[0, 0], "rw"), sums(tiles, TokenSum.VALUE))
        gated = T.alloc_local([8], "uint32")
        extern(
            f"gate_products<{element}, true>",
            *(r.dO_V.data, r.QK.data, *of_tokens, scale, gated.data, sums(tiles, TokenSum.BETWEEN), *of_sums),
        )
        extern("stage_gated", gated.data, T.access_ptr(tiles.dO[0, 0], "w"))
        extern(
            f"gate_products<{element}, false>",
            *(r.U_V.data, r.KK.data, *of_tokens, T.float32(-1), gated.data, sums(tiles, TokenSum.BETA), *of_sums),
        )
        extern("stage_symmetric", gated.data, T.access_ptr(tiles.V_new[0, 0], "w"))

    @T.macro
    def make_keys(r, tiles, scale):
        """dQ and dK, to their tiles, and the sums of channels."""
        Q, K_ = T.access_ptr(tiles.Q[0, 0], "r"), T.access_ptr(tiles.K[0, 0], "r")
        dot = f"scale_and_dot_panel<{element}>"
        extern(dot, r.dQ.data, Q, gate(tiles, BackwardGate.GAMMA), scale, sums(tiles, TokenSum.QUERY))
        extern(dot, r.dK.data, K_, gate(tiles, BackwardGate.DECAY), T.float32(1), sums(tiles, TokenSum.KEY))
        gates = (gate(tiles, BackwardGate.GAMMA), gate(tiles, BackwardGate.BETA))
        dot = f"subtract_and_dot_panel<{element}>"
        extern(dot, r.dK.data, r.U_S.data, K_, *gates, sums(tiles, TokenSum.STATE))
        T.sync_threads()  # G, F and all sums are complete
        T.gemm(tiles.dO, tiles.K, r.dQ, policy=Full)
        T.gemm(tiles.dO, tiles.Q, r.dK, transpose_A=True, policy=Full)
        T.gemm(tiles.V_new, tiles.K, r.dK, policy=Full)
        extern(f"stage_panel<{element}>", r.dQ.data, T.access_ptr(tiles.h[0, 0], "w"))
        extern(f"stage_panel<{element}>", r.dK.data, T.access_ptr(tiles.dS[0, 0], "w"))

    def add_rows(tile, rows, at, order):
        column = at.part * KEY_PART
        to = T.access_ptr(rows[at.row, at.hk, column], "rw")
        columns = T.Cast("int32", key_dim) - column
        return extern(
            f"add_tile<{TILE.threads}, {element}>",
            *(to, T.access_ptr(tile[0, 0], "r"), T.Cast("int64", rows.strides[0]), at.length, columns, order == 0),
        )

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
            r = make_registers()
            tokens, plan = chunks.tokens, chunks.plan
            T.pdl_sync()
            at = locate_part(cta, plan)
            if plan.chunks[at.slot, ChunkColumn.SEQUENCE] == PADDING:
                extern("leave")
            state_sum = T.alloc_local([1], "float32")
            dots = T.alloc_local([8], "float32")
            T.clear(dots)
            state_sum[0] = 0.0
            for each in (r.dQ, r.dK, r.U_S, r.dO_V, r.U_V, r.QK, r.KK):
                T.clear(each)

            load_gates(tiles.gates[0, 0], chunks.matrices, at, at.hv, TILE.threads)
            load_rows(tiles.Q[:, :], tokens.q, tokens.q_row, at.hk, at.part * KEY_PART, at, TILE.threads)
            load_rows(tiles.K[:, :], tokens.k, tokens.k_row, at.hk, at.part * KEY_PART, at, TILE.threads)
            of_values = (output_gradient, replay, reverse_replay, gradients.dv)
            go_through_values(r, tiles, at, tokens, *of_values, state_sum, dots)
            extern("store_warp_sum", T.access_ptr(tiles.products[0], "w"), state_sum[0])
            if at.part == 0:
                multiply_tokens(r, tiles, at, tokens)
                T.sync_threads()  # the tiles of the other part have been read
            make_gated(r, tiles, scale)
            make_keys(r, tiles, scale)

            warp = T.truncdiv(T.get_thread_binding(), WARP)
            order = T.alloc_var("int32", init=at.hv - at.hk * sizes.group)
            counter = T.alloc_var("int32", init=at.slot * PARTS + at.part)
            if warp == 0:
                extern("complete_sums", sums(tiles, 0), at.part != 0)
                extern(
                    f"store_gate_gradients<{element}>",
                    T.access_ptr(tiles.sums[0, 0], "r"),
                    T.access_ptr(tiles.columns[0, 0], "r"),
                    T.access_ptr(tiles.products[0], "r"),
                    T.access_ptr(tiles.gates[0, 0], "r"),
                    T.access_ptr(gradients.db[at.part, at.row, at.hv], "w"),
                    T.access_ptr(gradients.dg[at.part, at.row, at.hv], "w"),
                    T.Cast("int32", H_v),
                    at.length,
                )
                extern("wait_for_semaphore", T.access_ptr(semaphores[counter, at.hk], "r"), order)
            T.sync_threads()  # dQ and dK are complete, and the CTAs before this one have added theirs
            add_rows(tiles.h, gradients.dq, at, order)
            add_rows(tiles.dS, gradients.dk, at, order)
            T.sync_threads()
            if warp == 0:
                extern("release_semaphore", T.access_ptr(semaphores[counter, at.hk], "rw"), order, sizes.group)

    return main
