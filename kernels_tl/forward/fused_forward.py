"""The whole forward of a segment in one kernel: chunk_forward whose warpgroups make the chunks' matrices themselves.

chunk_matrices makes K K^T and Q K^T once for a group of heads, but K and Q are then loaded a second time, and the
matrices cross the memory. With one head a group, or two, that costs more than it saves. Here each of the two warpgroups
that carry the state makes L and P (chunk_forward has the formula) for every other chunk, between two of its steps and
two chunks ahead, while the other one is in a step:

    K K^T, K Q^T     by WGMMA from the tiles that are there for the steps
    P = scale tril(Q K^T) * D, L = A * D - I, both transposed: a row of blocks a warp (device/fused_forward.cuh)

A producer warp loads K, Q and V, two store O, and one makes the chunks' tables of gates. With low_level g_cumsum and A
are written, too: A goes out by way of O's tiles, whose warpgroups have an A to store for every other O. h is not made:
that is chunk_forward's. Rows that no sequence covers get zeros.

With the l2norm, R = diag(1 / |k_i|), K is left as it is, for

    I + stril(diag(beta) R K K^T R) = R^-1 (I + stril(diag(beta) R^2 K K^T)) R

so that the inverse needs no norms but those of its own rows, and the others come in with the gates.

    shared memory: 3 stages * (K 16 + Q 16 + L 8 + P 8 + table 3.75 KB) + 2 * V 16 + O 16 + 2 * scratch 10.25
                   + turns 1 = 225 KB

A CTA goes through several pieces of work, heads of segments, in turns as chunk_forward's do; chunks are counted through
all of them, so the matrices of a piece's first chunks are made in the last steps of the one before it.

Launched on [ctas], at most [segments * H_v]. With `early` the first piece is found in cu_seqlens, while chunk_plan runs.
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as COMMON,
    C,
    dims,
    element_type,
    extern,
    swizzled,
)
from kernels_tl.forward.chunk_forward import piece
from kernels_tl.forward.recurrence import begin_step, end_step
from kernels_tl.layout import (
    BLOCK,
    PADDING,
    ChunkColumn,
    FusedGate,
    SegmentColumn,
    SegmentFlag,
)

PASS_CONFIGS = COMMON | {"tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}
EXPLICIT_FENCES = True
PRELUDE = """
#include "device/early_plan.cuh"
#include "device/fused_forward.cuh"
"""

STAGES = 3  # of K, Q, matrices and gates; V has two
WARPGROUPS, ROWS = 2, 64
CONSUMERS, PRODUCERS = 128 * WARPGROUPS, 128
LOADER, STORERS, GATES = 0, 1, 3  # producer warps: one, two, one
SCRATCH = 6 * BLOCK**2 + 3 * (BLOCK**2 + 16) + BLOCK**2  # floats of a warpgroup, likewise
BEGIN_BARRIER, MAKER_BARRIER, TAIL_BARRIER = 11, 12, 14  # of all consumers; of each warpgroup: it and the next
EARLY_FACTORS = 4  # of eight, see load_minuend; more spill
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 224, 56  # 2 * 224 + 56 = 3 * 168, what a CTA of 384 threads has


# Where a chunk's tiles are, in one number, because it lives through everything: bits 0 and 1 are the stage, bit 2 its
# phase; bit 3 is the stage of V_new, and whose turn it is to make matrices, bit 4 the phase of that. RING_BIT is where a
# consumer has it, in the same register as its place in a tile.
RING_BIT = 24


def stage(ring):
    return ring & 3


def phase(ring):
    return (ring >> 2) & 1


def value_stage(ring):
    return (ring >> 3) & 1


def value_phase(ring):
    return (ring >> 4) & 1


def next_chunk(number, bit=0):
    """Of a ring that lies from this bit on of a number."""
    wrapped = (number & (3 << bit)) == ((STAGES - 1) << bit)
    following = T.if_then_else(wrapped, (number ^ (4 << bit)) - ((STAGES - 1) << bit), number + (1 << bit))
    return (following + (8 << bit)) & ((32 << bit) - 1)


def fused_forward(dtype, K, V, normalize, low_level):
    tokens, H_k, H_v, chunk_slots, segment_slots, state_size, offset_words = dims(
        "tokens", "H_k", "H_v", "chunk_slots", "segment_slots", "state_size", "offset_words"
    )
    element = element_type(dtype)
    flags = f"{str(normalize).lower()}, {str(low_level).lower()}"

    @T.macro
    def read_extent(extent, segments, segment):
        T.pdl_sync()
        extent[0] = segments[segment, SegmentColumn.ROW]
        extent[1] = segments[segment, SegmentColumn.LENGTH]

    @T.macro
    def make_matrices(
        m,
        in_phase,
        warpgroup,
        place,
        gated,
        loaded,
        made,
        stored,
        filled,
        lengths_s,
        K_s,
        Q_s,
        table_s,
        scratch_s,
        L_s,
        P_s,
        O_s,
        scale,
    ):
        extern(
            f"make_matrices<{element}, {flags}>",
            gated[m],
            loaded[m],
            made[m],
            in_phase,
            T.access_ptr(lengths_s[m], "r"),
            T.access_ptr(K_s[m, 0, 0], "rw"),
            T.access_ptr(Q_s[m, 0, 0], "r"),
            T.access_ptr(table_s[m, 0, 0], "rw"),
            scale,
            T.access_ptr(scratch_s[warpgroup, 0], "rw"),
            T.access_ptr(L_s[m, 0, 0], "w"),
            T.access_ptr(P_s[m, 0, 0], "w"),
            MAKER_BARRIER + warpgroup,
            stored[0],
            filled[0],
            place,
            T.access_ptr(O_s[0, 0, 0], "w"),
        )

    @T.prim_func
    def main(
        q: T.Tensor([tokens, H_k, K], dtype),
        k: T.Tensor([tokens, H_k, K], dtype),
        v: T.Tensor([tokens, H_v, V], dtype),
        g: T.Tensor([tokens, H_v], "float32"),
        beta: T.Tensor([tokens, H_v], "float32"),
        chunks: T.Tensor([chunk_slots, ChunkColumn.COUNT], "int32"),
        segments: T.Tensor([segment_slots, SegmentColumn.COUNT], "int32"),
        offsets: T.Tensor([offset_words], "int32"),
        initial_state: T.Tensor([state_size], "float32"),
        final_state: T.Tensor([state_size], "float32"),
        o: T.Tensor([tokens, H_v, V], dtype),
        A: T.Tensor([tokens, H_v, C], dtype),
        g_cumsum: T.Tensor([tokens, H_v], "float32"),
        group: T.int32,  # H_v / H_k
        state_v_first: T.int32,  # the layout of initial_state and final_state
        has_initial_state: T.int32,
        has_final_state: T.int32,
        ctas: T.int32,
        early: T.int32,
        has_offsets: T.int32,
        wide_offsets: T.int32,  # of 64 bits
        uniform_length: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(ctas, threads=CONSUMERS + PRODUCERS, prelude=PRELUDE) as block:
            K_s = T.alloc_shared([STAGES, C, K], dtype)
            Q_s = T.alloc_shared([STAGES, C, K], dtype)
            V_s = T.alloc_shared([2, WARPGROUPS, C, ROWS], dtype)
            L_s = T.alloc_shared([STAGES, C, C], dtype)
            P_s = T.alloc_shared([STAGES, C, C], dtype)
            O_s = T.alloc_shared([WARPGROUPS, C, ROWS], dtype)
            scratch_s = T.alloc_shared([WARPGROUPS, SCRATCH], "float32")
            table_s = T.alloc_shared([STAGES, FusedGate.COUNT, C], "float32")
            lengths_s = T.alloc_shared([STAGES], "int32")  # tokens of the chunk, negative behind the last one
            turns_s = T.alloc_shared([CONSUMERS], "int32")  # a consumer's, while the chunks take all registers
            T.annotate_layout({V_s: swizzled(V_s), O_s: swizzled(O_s)})

            loaded = T.alloc_barrier([32] * STAGES)  # a stage's K and Q have arrived
            gated = T.alloc_barrier([32] * STAGES)  # its table is there
            made = T.alloc_barrier([128] * STAGES)  # and its L and P
            released = T.alloc_barrier([CONSUMERS] * STAGES)  # all of these have been used
            loaded_v = T.alloc_barrier([32] * 2)
            released_v = T.alloc_barrier([CONSUMERS] * 2)
            filled = T.alloc_barrier([128] * WARPGROUPS)  # a warpgroup's O of a chunk lies in O_s
            stored = T.alloc_barrier([32] * WARPGROUPS)  # it has left

            tx = T.get_thread_binding()
            pieces = T.alloc_var("int32", init=T.Cast("int32", segment_slots * H_v))

            if tx < CONSUMERS:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                warpgroup = T.truncdiv(tx, 128)
                S = T.alloc_fragment([V, K], "float32")  # S^T
                S_16 = T.alloc_fragment([V, K], dtype)
                V_new = T.alloc_fragment([V, C], "float32")  # S^T K^T, R^T, V_new^T in turn
                V_new_16 = T.alloc_fragment([V, C], dtype)
                decayed = T.alloc_fragment([V, C], dtype)  # V_new^T diag(gamma_C / gamma)
                O = T.alloc_fragment([V, C], "float32")
                minuend = T.alloc_local([16], "uint32")
                pairs = T.alloc_local([32], "float32")
                decays = T.alloc_local([16], "float32")
                queries = T.alloc_local([16], "float32")
                # A thread's offset in V_s and O_s, which have the same tiles, its first column, its warpgroup and its
                # ring, in one number.
                place = T.alloc_var("int32", init=extern("transposed_offset", returns="int32"))
                place += warpgroup * (C * ROWS * 2 + (1 << 20)) + (extern("first_column", returns="int32") << 16)

                extern("clear_matrices", T.access_ptr(L_s, "w"), T.access_ptr(P_s, "w"), STAGES)
                T.sync_threads(BEGIN_BARRIER, CONSUMERS)
                barriers = (gated, loaded, made, stored, filled)
                tiles = (lengths_s, K_s, Q_s, table_s, scratch_s, L_s, P_s, O_s)
                make_matrices(warpgroup, 0, warpgroup, place, *barriers, *tiles, scale)

                T.pdl_sync()
                turns_s[tx] = 0
                while piece(turns_s[tx], block, ctas) < pieces:
                    work = T.alloc_var("int32", init=piece(turns_s[tx], block, ctas))
                    segment = T.alloc_var("int32", init=T.truncdiv(work, T.Cast("int32", H_v)))
                    n = T.alloc_var("int32", init=segments[segment, SegmentColumn.SEQUENCE])
                    state = T.alloc_var("int64", init=(T.Cast("int64", n - segment) * H_v + work) * (K * V))
                    T.clear(S)
                    if (has_initial_state != 0) & (segments[segment, SegmentColumn.FLAGS] >= SegmentFlag.LAST):
                        extern(
                            f"read_state<{K}, {V}>",
                            S.data,
                            T.access_ptr(initial_state[state], "r"),
                            state_v_first != 0,
                        )
                    T.copy(S, S_16)

                    left = T.alloc_var("int32", init=segments[segment, SegmentColumn.LENGTH])
                    while left > 0:
                        now = T.alloc_var("int32", init=extern("uniform", place >> RING_BIT, returns="int32"))
                        s = stage(now)
                        u = value_stage(now)
                        own = (place >> 20) & 1
                        T.barrier_wait(made[s], phase(now))
                        T.barrier_wait(loaded_v[u], value_phase(now))
                        if left < C:
                            extern("clear_rows_behind", T.access_ptr(V_s[u, own, 0, 0], "rw"), left)
                            extern("warpgroup_sync", TAIL_BARRIER + own)
                        begin_step(
                            element,
                            EARLY_FACTORS,
                            K_s[s, :, :],
                            Q_s[s, :, :],
                            L_s[s, :, :],
                            T.access_ptr(V_s[u, 0, 0, 0], "r"),
                            table_s,
                            s,
                            S,
                            S_16,
                            V_new,
                            V_new_16,
                            O,
                            minuend,
                            pairs,
                            decays,
                            queries,
                            place & 0xFFFF,
                            (place >> 16) & 15,
                        )
                        if group == 0:  # never: a branch that keeps what is before it from sinking behind the wait
                            extern("stop")
                        T.wait_wgmma(0)
                        T.barrier_arrive(released_v[u])
                        # Over long ago; behind the products it would cost 2 %.
                        if low_level:
                            extern("wait_for_tile", stored[0], place)
                        else:
                            T.barrier_wait(stored[own], u ^ 1)
                        end_step(
                            element, K_s[s, :, :], P_s[s, :, :], S, S_16, V_new, V_new_16, decayed, O, decays, queries
                        )
                        T.barrier_arrive(released[s])
                        extern(f"stage_transposed<{element}>", O.data, T.access_ptr(O_s[0, 0, 0], "w"), place & 0xFFFF)
                        T.barrier_arrive(filled[own])
                        if u == own:  # two chunks ahead: the stage before this one
                            make_matrices(
                                T.if_then_else(s == 0, STAGES - 1, s - 1),
                                T.if_then_else(s == 0, phase(now), phase(now) ^ 1),
                                own,
                                place,
                                *barriers,
                                *tiles,
                                scale,
                            )
                        place = next_chunk(place, RING_BIT)
                        left -= C

                    done_work = T.alloc_var("int32", init=piece(turns_s[tx], block, ctas))
                    done_segment = T.alloc_var("int32", init=T.truncdiv(done_work, T.Cast("int32", H_v)))
                    done_n = T.alloc_var("int32", init=segments[done_segment, SegmentColumn.SEQUENCE])
                    if (has_final_state != 0) & (segments[done_segment, SegmentColumn.FLAGS] >= SegmentFlag.LAST):
                        extern(
                            f"write_state<{K}, {V}>",
                            S.data,
                            T.access_ptr(
                                final_state[(T.Cast("int64", done_n - done_segment) * H_v + done_work) * (K * V)], "w"
                            ),
                            state_v_first != 0,
                        )
                    turns_s[tx] += 1
            else:
                T.dec_max_nreg(PRODUCER_REGISTERS)
                warp = T.alloc_var("int32", init=T.truncdiv(tx - CONSUMERS, 32))
                turns = T.alloc_var("int32", init=T.truncdiv(pieces, ctas))  # those in which all CTAs have work
                turns += T.if_then_else(piece(turns, block, ctas) < pieces, 1, 0)
                at = T.alloc_var("int32", init=0)  # the ring of this warp
                extent = T.alloc_local([2], "int32")  # a piece's first row and tokens
                if (early != 0) & ((warp == LOADER) | (warp == GATES)):
                    extern(
                        "find_segment",
                        extent.data,
                        T.truncdiv(block, T.Cast("int32", H_v)),
                        T.access_ptr(offsets[0], "r"),
                        has_offsets,
                        wide_offsets,
                        T.Cast("int32", segment_slots),
                        T.Cast("int32", tokens),
                        uniform_length,
                    )
                else:
                    T.pdl_sync()
                for turn in T.serial(T.if_then_else(warp == LOADER, turns, 0)):
                    work = T.alloc_var("int32", init=piece(turn, block, ctas))
                    segment = T.alloc_var("int32", init=T.truncdiv(work, T.Cast("int32", H_v)))
                    hv = T.alloc_var("int32", init=work - segment * T.Cast("int32", H_v))
                    hk = T.alloc_var("int32", init=T.truncdiv(hv, group))
                    if (early == 0) | (turn > 0):
                        read_extent(extent, segments, segment)
                    row = T.alloc_var("int32", init=extent[0])
                    length = T.alloc_var("int32", init=extent[1])
                    for c in T.serial(T.truncdiv(length + (C - 1), C)):
                        s = stage(at)
                        u = value_stage(at)
                        t = row + c * C
                        T.barrier_wait(released[s], phase(at) ^ 1)
                        T.tma_copy(k[t : t + C, hk, :], K_s[s, :, :], barrier=loaded[s], leader_scope_threads=32)
                        T.tma_copy(q[t : t + C, hk, :], Q_s[s, :, :], barrier=loaded[s], leader_scope_threads=32)
                        T.barrier_arrive(loaded[s])
                        T.barrier_wait(released_v[u], value_phase(at) ^ 1)
                        for w in T.unroll(WARPGROUPS):
                            T.tma_copy(
                                v[t : t + C, hv, w * ROWS : w * ROWS + ROWS],
                                V_s[u, w, :, :],
                                barrier=loaded_v[u],
                                leader_scope_threads=32,
                            )
                        T.barrier_arrive(loaded_v[u])
                        at = next_chunk(at)

                g_pair = T.alloc_local([2], "float32")
                beta_pair = T.alloc_local([2], "float32")
                for turn in T.serial(T.if_then_else(warp == GATES, turns, 0)):
                    work = T.alloc_var("int32", init=piece(turn, block, ctas))
                    segment = T.alloc_var("int32", init=T.truncdiv(work, T.Cast("int32", H_v)))
                    hv = T.alloc_var("int32", init=work - segment * T.Cast("int32", H_v))
                    if (early == 0) | (turn > 0):
                        read_extent(extent, segments, segment)
                    row = T.alloc_var("int32", init=extent[0])
                    rest = T.alloc_var("int32", init=extent[1])
                    while rest > 0:
                        s = stage(at)
                        extern("load_pair", g_pair.data, T.access_ptr(g[row, hv], "r"), H_v, rest)
                        extern("load_pair", beta_pair.data, T.access_ptr(beta[row, hv], "r"), H_v, rest)
                        T.barrier_wait(released[s], phase(at) ^ 1)
                        lengths_s[s] = T.min(rest, C)
                        extern(
                            "make_table",
                            T.access_ptr(table_s[s, 0, 0], "w"),
                            g_pair.data,
                            beta_pair.data,
                            T.float32(1) if normalize else scale,
                        )
                        T.barrier_arrive(gated[s])
                        if low_level:
                            extern(
                                "store_cumsum",
                                T.access_ptr(g_cumsum[row, hv], "w"),
                                T.access_ptr(table_s[s, 0, 0], "r"),
                                H_v,
                                rest,
                            )
                        at = next_chunk(at)
                        row += C
                        rest -= C
                for _ in T.serial(T.if_then_else(warp == GATES, 2, 0)):  # each warpgroup asks for one chunk too many
                    s = stage(at)
                    T.barrier_wait(released[s], phase(at) ^ 1)
                    lengths_s[s] = -1
                    T.barrier_arrive(gated[s])
                    at = next_chunk(at)

                w = T.alloc_var("int32", init=warp - STORERS)
                if low_level:
                    stores = T.alloc_var("int32", init=0)
                    # A's chunk: w at first, then every other one.
                    A_turn = T.alloc_var("int32", init=-1)
                    A_row = T.alloc_var("int32", init=0)
                    A_rest = T.alloc_var("int32", init=0)
                    A_hv = T.alloc_var("int32", init=0)
                    A_ahead = T.alloc_var("int32", init=1 + w)  # chunks; 0 where O is next
                for turn in T.serial(T.if_then_else((w >= 0) & (w < WARPGROUPS), turns, 0)):
                    work = T.alloc_var("int32", init=piece(turn, block, ctas))
                    segment = T.alloc_var("int32", init=T.truncdiv(work, T.Cast("int32", H_v)))
                    hv = T.alloc_var("int32", init=work - segment * T.Cast("int32", H_v))
                    row = T.alloc_var("int32", init=segments[segment, SegmentColumn.ROW])
                    rest = T.alloc_var("int32", init=segments[segment, SegmentColumn.LENGTH])
                    while rest > 0:
                        if low_level:  # noqa: SIM102, this one is Python's
                            if A_ahead > 0:
                                while A_ahead > 0:
                                    A_row += C
                                    A_rest -= C
                                    while (A_rest <= 0) & (A_turn + 1 < turns):
                                        A_turn += 1
                                        A_work = T.alloc_var("int32", init=piece(A_turn, block, ctas))
                                        A_segment = T.alloc_var("int32", init=T.truncdiv(A_work, T.Cast("int32", H_v)))
                                        A_hv = A_work - A_segment * T.Cast("int32", H_v)
                                        A_row = segments[A_segment, SegmentColumn.ROW]
                                        A_rest = segments[A_segment, SegmentColumn.LENGTH]
                                    A_ahead -= 1
                                T.barrier_wait(filled[w], stores % 2)
                                if A_rest >= C:
                                    T.fence_proxy_async()
                                    T.tma_copy(O_s[w, :, :], A[A_row : A_row + C, A_hv, :], leader_scope_threads=32)
                                    T.tma_store_wait(0)
                                else:
                                    extern(
                                        f"store_tile<{element}>",
                                        T.access_ptr(O_s[w, 0, 0], "r"),
                                        T.access_ptr(A[A_row, A_hv, 0], "w"),
                                        H_v * C,
                                        A_rest,
                                    )
                                T.barrier_arrive(stored[w])
                                stores += 1
                        T.barrier_wait(filled[w], stores % 2 if low_level else value_stage(at))
                        if rest >= C:
                            T.fence_proxy_async()
                            T.tma_copy(
                                O_s[w, :, :],
                                o[row : row + C, hv, w * ROWS : w * ROWS + ROWS],
                                leader_scope_threads=32,
                            )
                            T.tma_store_wait(0)
                        else:
                            extern(
                                f"store_tile<{element}>",
                                T.access_ptr(O_s[w, 0, 0], "r"),
                                T.access_ptr(o[row, hv, w * ROWS], "w"),
                                H_v * V,
                                rest,
                            )
                        T.barrier_arrive(stored[w])
                        if low_level:
                            stores += 1
                            if value_stage(at) == w:
                                A_ahead = 2
                        at = next_chunk(at)
                        row += C
                        rest -= C
                slots = T.alloc_var("int32", init=T.truncdiv(T.Cast("int32", chunk_slots) - block + ctas - 1, ctas))
                for i in T.serial(T.if_then_else(warp == STORERS, slots, 0)):
                    slot = T.alloc_var("int32", init=block + i * ctas)
                    if chunks[slot, ChunkColumn.SEQUENCE] == PADDING:
                        extern(
                            "clear_bytes",
                            T.access_ptr(o[chunks[slot, ChunkColumn.ROW], 0, 0], "w"),
                            T.Cast("int64", chunks[slot, ChunkColumn.LENGTH]) * H_v * (2 * V),
                        )
                        # A group of 0 there is not: but so all instances have the same parameters.
                        if T.bool(low_level) | (group == 0):
                            extern(
                                "clear_bytes",
                                T.access_ptr(A[chunks[slot, ChunkColumn.ROW], 0, 0], "w"),
                                T.Cast("int64", chunks[slot, ChunkColumn.LENGTH]) * H_v * (2 * C),
                            )
                            for i in T.serial(T.ceildiv(chunks[slot, ChunkColumn.LENGTH] * T.Cast("int32", H_v), 32)):
                                number = T.alloc_var("int32", init=i * 32 + tx % 32)
                                if number < chunks[slot, ChunkColumn.LENGTH] * T.Cast("int32", H_v):
                                    g_cumsum[
                                        chunks[slot, ChunkColumn.ROW] + T.truncdiv(number, T.Cast("int32", H_v)),
                                        T.truncmod(number, T.Cast("int32", H_v)),
                                    ] = 0

    return main
