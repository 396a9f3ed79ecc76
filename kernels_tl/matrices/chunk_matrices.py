"""The gates, the gated inverse and the gated attention of all chunks, in parallel: they need no state.

    A = (I + stril(diag(beta) K K^T))^-1       L = A * D - I       P = scale tril(Q K^T) * D
    D_ij = exp(b_i - b_j) for i >= j, else 0   b_i = g_1 + ... + g_i

    gates      [chunk_slots, H_v, 5, C] fp32       ForwardGate's rows (layout.py)
    matrices   [chunk_slots, H_v, 2, TRIANGLE]     L^T and P^T by rows of blocks, each from the diagonal on
                                                   (common.block_row)
    A          [tokens, H_v, C]                    if requested (has_A): row i of a chunk's A at token i
    g_cumsum   [tokens, H_v] fp32                  if requested (has_g_cumsum): b
    h          [h_slots, H_v, value_dim, key_dim] 16-bit  if requested (has_h): zeros in slots of no chunk
    backward_gates  [chunk_slots, H_v, rows, C] fp32  in the backward: BackwardGate's; with the l2norm NormalizedGate's
    semaphores [chunk_slots * key parts, H_k]      in the backward: zeros, from which gradients/semaphores.cuh counts
    counters   [H_v / 8]                           zeros, for gate_gradients

forward.cpp and backward.cpp launch [chunk slots * H_v / heads] CTAs of one warpgroup. The first early_ctas CTAs find
their chunk in cu_seqlens, while chunk_plan runs.

The backward may pass b in the place of g (`cumulative`). It passes normalised queries and keys if its kernels do no
l2norm. Rows that no sequence covers get zeros in o, A and g_cumsum; in the backward in dq, dk and dv, and in db and dg
unless gate_gradients runs.

D comes from differences, so it never overflows. A * D is diag(gamma) A diag(1/gamma), so the gates never enter the
inverse. L leaves the unit diagonal out, so products with L round small numbers only.

With |k| <= 1 and beta <= 2 no entry below A's unit diagonal exceeds beta in size, so 16 bits hold it. With larger keys
the entries grow like the product of (beta |k|^2 - 1) over the chunk, and become inf beyond the dtype's range.

A CTA takes `heads` value heads of a group, at most four. It computes K K^T and K Q^T once for them, and writes both
over K. Then each warp works on a head; with 2 heads or 1, a team of two or four warps works on a head.
Several CTAs per SM hide each other's latencies. The arithmetic is in matrices/chunk_matrices.cuh. Timeline of four
heads, with the barrier that ends each column (MATRICES: a named barrier of all warps):

    warp 0      K, Q by TMA, b|K K^T, K Q^T|products into K|head 0: inverses|columns 0 to 3: A, L, P, stored by TMA|
    warp 1      beta          |K K^T, K Q^T|products into K|head 1: inverses|columns 0 to 3                        |
    warps 2, 3                |K K^T, K Q^T|products into K|heads 2, 3      |columns 0 to 3                        |
                       loaded>|    MATRICES|       MATRICES|       team_sync|                                      |

`portable` instances run on every GPU from Ampere on: cp.async in the place of TMA, mma.sync in the place of WGMMA.
"""

import tilelang.language as T

from kernels_tl.bundles import BackwardTables, Chunks, Gates, Gradients, Memory, Outputs, Sequences, Sizes, Slots
from kernels_tl.config import CHUNK_MATRICES, WARPGROUP, key_parts
from kernels_tl.core.common import (
    CALLER,
    EXPLICIT_PASS_CONFIGS,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    SWIZZLE_NONE,
    C,
    after,
    descriptor,
    dims,
    element_type,
    extern,
    strides_of,
)
from kernels_tl.core.cta import Variables, barriers, clear_rows_after, shared
from kernels_tl.layout import (
    BLOCK,
    DIAGONAL_STRIDE,
    GATE_HEADS,
    INVERSE_STRIDE,
    PADDING,
    BackwardGate,
    ChunkColumn,
    NamedBarrier,
    NormalizedGate,
)
from kernels_tl.portable.tiles import load_rows

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
# The first CTAs touch these early. g_cumsum is written.
EARLY = {name: after(CALLER) for name in ("offsets_entries", "state_indices_entries", "g_cumsum")}
EARLY |= {name: after(CALLER) for name in ("g", "beta", "A_log", "dt_bias")}
EARLY |= {name: after(CALLER, "l2norm") for name in ("q", "k")}
PRELUDE = """
#include "core/tiles.cuh"
#include "matrices/chunk_matrices.cuh"
#include "plan/plan.cuh"
#include "portable/tiles.cuh"
"""

THREADS = WARPGROUP
WARPS = THREADS // 32
SWIZZLES = (SWIZZLE_128B, SWIZZLE_NONE, SWIZZLE_64B, SWIZZLE_32B)  # a row of blocks has 128, 96, 64 or 32 bytes
Full = T.GemmWarpPolicy.FullRow


def chunk_matrices(dtype, K, normalize, portable):
    sizes = Sizes()
    H_v = sizes.H_v
    (h_slots,) = dims("h_slots")
    element = element_type(dtype)
    tile = CHUNK_MATRICES[K]
    KEY_PARTS = key_parts(K)
    assert tile.threads == THREADS

    def make_tiles():
        return shared(
            tile.shared,
            K=([C, K], dtype),  # later: blocks of the products
            Q=([C, K], dtype),  # later: block columns of the matrices, two of each warp
            diagonals=([3 * DIAGONAL_STRIDE + BLOCK**2], "float32"),  # blocks of K K^T
            inverses=([WARPS, 3 * INVERSE_STRIDE + BLOCK**2], "float32"),  # norms; later inverted diagonal blocks
            gates=([WARPS, 2, C], "float32"),  # b log2(e) and beta of a head
        )

    def make_barriers():
        return None if portable else barriers(loaded=[THREADS])  # all threads arrive: K and Q are there

    @T.macro
    def find_chunk(slot, early, chunks, sequences, slots):
        """The chunk in a slot: first row, length, sequence."""
        columns = T.alloc_local([ChunkColumn.COUNT], "int32")
        if early:
            extern("find_chunk", columns.data, slot, sequences.record(sizes), slots.record())
        else:
            T.pdl_sync()
            for i in T.unroll(ChunkColumn.COUNT):
                columns[i] = chunks[slot, i]
        return Variables(
            row=columns[ChunkColumn.ROW], length=columns[ChunkColumn.LENGTH], sequence=columns[ChunkColumn.SEQUENCE]
        )

    def clear_rows(rows, chunk, head):
        begin = T.access_ptr(rows[chunk.row, head, 0], "w")
        stride, columns = T.Cast("int64", strides_of(rows)[0]), T.Cast("int32", rows.shape[2])
        return extern("clear_rows", begin, stride, columns, chunk.length)

    @T.macro
    def clear_states(h, slot, first, heads):
        """Writes zeros to the states of a slot without a chunk."""
        channels, rows = T.Cast("int32", sizes.key_dim), T.Cast("int32", sizes.value_dim)
        for l in T.serial(heads):
            states = T.access_ptr(h[slot, first + l, 0, 0], "w")
            extern("clear_rows", states, T.Cast("int64", channels), channels, rows)

    @T.macro
    def clear_padding(chunk, first, heads, hk, leads, outputs, gradients, has_backward_gates, gate_gradients):
        """Writes zeros to the outputs' rows that no sequence covers."""
        tx = T.get_thread_binding()
        for l in T.serial(heads):
            if has_backward_gates != 0:
                clear_rows(gradients.dv, chunk, first + l)
            else:
                clear_rows(outputs.o, chunk, first + l)
            if outputs.has_A != 0:
                clear_rows(outputs.A, chunk, first + l)
            if (outputs.has_g_cumsum != 0) & (tx < chunk.length):
                outputs.g_cumsum[chunk.row + tx, first + l] = 0.0
            if (has_backward_gates != 0) & (gate_gradients == 0) & (tx < chunk.length):
                gradients.db[chunk.row + tx, first + l] = 0.0
                gradients.dg[chunk.row + tx, first + l] = 0.0
        if (has_backward_gates != 0) & leads:
            clear_rows(gradients.dq, chunk, hk)
            clear_rows(gradients.dk, chunk, hk)

    @T.macro
    def begin_load(tiles, ready, chunk, hk, tokens):
        """Begins to load K and Q of the chunk."""
        if portable:
            load_rows(tiles.K[:, :], tokens.k, tokens.k_row, hk, 0, chunk)
            load_rows(tiles.Q[:, :], tokens.q, tokens.q_row, hk, 0, chunk)
            extern("commit_copies")
        else:
            T.tma_copy(tokens.k[chunk.row : chunk.row + C, hk, 0:K], tiles.K, barrier=ready.loaded)
            T.tma_copy(tokens.q[chunk.row : chunk.row + C, hk, 0:K], tiles.Q, barrier=ready.loaded)
            T.barrier_arrive(ready.loaded)

    @T.macro
    def end_load(tiles, ready, chunk):
        """Waits for K and Q. Rows after the last token belong to other sequences, and become zeros."""
        if portable:
            extern("wait_for_copies<0>")
            T.sync_threads(NamedBarrier.MATRICES, THREADS)
        else:
            T.barrier_wait(ready.loaded, 0)
            if chunk.length < C:
                clear_rows_after(tiles.K, chunk.length, THREADS)
                clear_rows_after(tiles.Q, chunk.length, THREADS)
                T.fence_proxy_async()
                T.sync_threads(NamedBarrier.MATRICES, THREADS)

    @T.macro
    def load(tiles, ready, chunk, warp, first, hk, heads, tokens, inside, outputs, cumulative):
        """Loads K and Q of the chunk, and the gates of each head by one warp."""
        begin_load(tiles, ready, chunk, hk, tokens)
        extent = (H_v, heads, chunk.length)
        if inside.activations != 0:
            extern(
                "activate_chunk",
                T.access_ptr(tiles.gates, "w"),
                T.access_ptr(inside.g[0, 0], "r"),
                T.access_ptr(inside.beta[0, 0], "r"),
                T.access_ptr(inside.A_log[0], "r"),
                T.access_ptr(inside.dt_bias[0], "r"),
                inside.activations,
                cumulative != 0,
                T.Cast("int64", chunk.row) * H_v + first,
                first,
                *extent,
            )
            T.sync_threads(NamedBarrier.MATRICES, THREADS)
        if warp == 0:
            if cumulative != 0:
                extern(
                    "load_cumulative_gates",
                    T.access_ptr(tiles.gates, "rw"),
                    T.access_ptr(inside.g[chunk.row, first], "r"),
                    *extent,
                )
            else:
                extern(
                    "load_gates",
                    T.access_ptr(tiles.gates, "rw"),
                    T.access_ptr(inside.g[chunk.row, first], "r"),
                    inside.activations != 0,
                    T.access_ptr(outputs.g_cumsum[chunk.row, first], "w"),
                    *extent,
                    T.if_then_else(outputs.has_g_cumsum != 0, chunk.length, 0),
                )
        if (warp == 1) & (inside.activations == 0):
            extern(
                "load_beta",
                T.access_ptr(tiles.gates, "rw"),
                T.access_ptr(inside.beta[chunk.row, first], "r"),
                *extent,
            )
        end_load(tiles, ready, chunk)

    @T.macro
    def make_products(tiles, scale):
        """Leaves K K^T and K Q^T in shared memory. Returns the lane's factors for the tables of gates: those of its low
        and high key, and of its low and high query. They are 1 without the l2norm."""
        KK = T.alloc_fragment([C, C], "float32")
        KQ = T.alloc_fragment([C, C], "float32")
        if portable:
            T.gemm(tiles.K, tiles.K, KK, transpose_B=True, policy=Full, clear_accum=True)
            T.gemm(tiles.K, tiles.Q, KQ, transpose_B=True, policy=Full, clear_accum=True)
        else:
            T.wgmma_gemm(tiles.K, tiles.K, KK, transpose_B=True, policy=Full, clear_accum=True)
            T.wgmma_gemm(tiles.K, tiles.Q, KQ, transpose_B=True, policy=Full, clear_accum=True)
            T.wait_wgmma(0)
        T.pdl_sync()  # first, because the kernels after this one rely on the plan
        T.pdl_trigger()
        lane = T.get_thread_binding() % 32
        factors = T.alloc_local([4], "float32")
        factors[0] = 1.0
        factors[1] = 1.0
        factors[2] = 1.0
        factors[3] = 1.0
        if normalize:
            Q = T.access_ptr(tiles.Q, "r")
            extern(f"chunk_norms<{element}, {K}>", T.access_ptr(tiles.inverses, "rw"), KK.data, Q)
            T.sync_threads(NamedBarrier.MATRICES, THREADS)
            factors[0] = tiles.inverses[0, lane]
            factors[1] = tiles.inverses[0, lane + 32]
            factors[2] = tiles.inverses[0, C + lane]
            factors[3] = tiles.inverses[0, C + lane + 32]
        else:
            T.sync_threads(NamedBarrier.MATRICES, THREADS)  # K and Q have been read
        extern(
            f"store_products<{element}, {str(normalize).lower()}>",
            KK.data,
            KQ.data,
            T.access_ptr(tiles.inverses, "r"),
            T.access_ptr(tiles.K, "rw"),
            T.access_ptr(tiles.diagonals, "rw"),
            scale,
        )
        T.sync_threads(NamedBarrier.MATRICES, THREADS)
        return factors

    @T.macro
    def invert_diagonal(tiles, team):
        """Inverts the diagonal blocks of a head, two at a time; a team of four warps takes one each."""
        for step in T.serial(T.if_then_else(team.warps == 1, 2, 1)):
            diagonal = T.alloc_var(
                "int32", init=T.if_then_else(team.warps == WARPS, team.member, 2 * (team.member + step))
            )
            extern(
                f"invert_blocks<{element}>",
                T.access_ptr(tiles.diagonals[diagonal * DIAGONAL_STRIDE], "r"),
                DIAGONAL_STRIDE,
                T.access_ptr(tiles.inverses[team.head, diagonal * INVERSE_STRIDE], "rw"),
                T.access_ptr(tiles.gates[team.head, 1, diagonal * BLOCK], "r"),
                T.if_then_else(team.warps == WARPS, 1, 2),
            )
        extern("team_sync", team.head, team.warps)

    def destination(slot, hv, chunk, matrices, outputs):
        """The MatricesByTma or MatricesByThreads of a head."""
        of_A = (
            T.access_ptr(outputs.A[chunk.row, hv, 0], "w"),
            H_v,
            T.if_then_else(outputs.has_A != 0, chunk.length, 0),
        )
        if portable:
            both = T.access_ptr(matrices[0][slot, hv, 0, 0, 0], "w")
            return extern("MatricesByThreads", extern("InverseOut", *of_A), both)
        return extern(
            "MatricesByTma",
            extern("InverseOut", *of_A),
            *(descriptor(rows, [BLOCK, C - BLOCK * j], SWIZZLES[j]) for j, rows in enumerate(matrices)),
            descriptor(outputs.A, [C, 1, BLOCK], SWIZZLE_32B),
            slot,
            hv,
            chunk.row,
        )

    @T.macro
    def make_columns(tiles, team, slot, hv, chunk, matrices, outputs):
        """Computes the warp's block columns of the matrices from shared memory, and writes them."""
        extern(
            f"make_columns<{element}>",
            team.warps,
            team.member,
            T.access_ptr(tiles.K, "r"),
            T.access_ptr(tiles.inverses[team.head, 0], "r"),
            T.access_ptr(tiles.gates[team.head, 0, 0], "r"),
            T.access_ptr(tiles.Q, "rw"),
            destination(slot, hv, chunk, matrices, outputs),
        )

    @T.macro
    def find_mapped(memory, n, first, heads):
        """The CTA's heads that need matrices for their maps, as bits; all if the tables are not there. Ends a CTA that
        has none. It has waited for the plan and segment_memory."""
        mapped = T.alloc_var("int32", init=-1)
        if memory.has_memory != 0:  # fused_forward computes the matrices of heads that need no maps
            mapped = 0
            for l in T.serial(T.if_then_else(n == PADDING, 0, heads)):
                mapped |= memory.needs_maps[n, first + l] << l
            if mapped == 0:
                T.pdl_trigger()
                extern("leave")
        return mapped

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype),  # matrices are written
        gates: Gates(sizes),
        sequences: Sequences(),
        slots: Slots(),
        outputs: Outputs(sizes, dtype),
        backward: BackwardTables(sizes, NormalizedGate if normalize else BackwardGate),
        gradients: Gradients(sizes, dtype),  # get zeros in padding rows
        memory: Memory(sizes),
        heads: T.int32,  # heads per CTA: a divisor of group, at most 4
        scale: T.float32,
        cumulative: T.int32,  # whether g is b, in fp32
        gate_gradients: T.int32,  # whether the kernel of that name runs: then it writes all of db and dg
        early_ctas: T.int32,
        h: T.Tensor([h_slots, H_v, sizes.value_dim, sizes.key_dim], dtype),
        has_h: T.int32,
    ):
        with T.Kernel(sizes.chunk_slots * T.truncdiv(H_v, heads), threads=THREADS, prelude=PRELUDE) as cta:
            tiles = make_tiles()
            ready = make_barriers()
            T.annotate_min_blocks_per_sm(tile.ctas)
            share = T.alloc_var("int32", init=T.truncdiv(T.Cast("int32", H_v), heads))  # CTAs of a chunk
            slot = T.alloc_var("int32", init=T.truncdiv(cta, share))
            first = T.alloc_var("int32", init=(cta - slot * share) * heads)
            hk = T.alloc_var("int32", init=T.truncdiv(first, sizes.group))
            leads = first == hk * sizes.group  # the first CTA of a chunk and query/key head
            chunk = find_chunk(slot, cta < early_ctas, chunks.plan.chunks, sequences, slots)
            mapped = find_mapped(memory, chunk.sequence, first, heads)
            warp = T.alloc_var("int32", init=extern("warp_index", returns="int32"))
            warps = T.alloc_var("int32", init=T.if_then_else(heads < 3, WARPS // heads, 1))  # a team
            head = T.alloc_var("int32", init=T.truncdiv(warp, warps))
            team = Variables(warps=warps, head=head, member=warp - head * warps)
            if chunk.sequence == PADDING:
                T.pdl_sync()
                T.pdl_trigger()
                of_backward = (gradients, backward.has_backward_gates, gate_gradients)
                clear_padding(chunk, first, heads, hk, leads, outputs, *of_backward)
                if (has_h != 0) & (slot < h_slots):
                    clear_states(h, slot, first, heads)
            else:
                load(tiles, ready, chunk, warp, first, hk, heads, chunks.tokens, gates, outputs, cumulative)
                factors = make_products(tiles, scale)
                if (backward.has_backward_gates != 0) & leads & (T.get_thread_binding() == 0):
                    for part in range(KEY_PARTS):
                        backward.semaphores[slot * KEY_PARTS + part, hk] = 0
                if (team.head < heads) & (((mapped >> team.head) & 1) != 0):
                    hv = first + team.head
                    if team.member == 0:
                        extern(
                            "store_gates",
                            T.access_ptr(tiles.gates[team.head, 0, 0], "r"),
                            T.access_ptr(tiles.diagonals, "r"),
                            factors[0],
                            factors[1],
                            scale * factors[2],
                            scale * factors[3],
                            T.access_ptr(chunks.matrices.gates[slot, hv, 0, 0], "w"),
                        )
                        if backward.has_backward_gates != 0:
                            extern(
                                "store_normalized_gates" if normalize else "store_backward_gates",
                                T.access_ptr(tiles.gates[team.head, 0, 0], "r"),
                                *((factors[i] for i in range(4)) if normalize else ()),
                                T.access_ptr(backward.backward_gates[slot, hv, 0, 0], "w"),
                            )
                    invert_diagonal(tiles, team)
                    make_columns(tiles, team, slot, hv, chunk, chunks.matrices.rows, outputs)
            if (gate_gradients != 0) & (slot == 0) & (T.get_thread_binding() == 0):
                backward.counters[T.truncdiv(first, GATE_HEADS)] = 0

    return main
