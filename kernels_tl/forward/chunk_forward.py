"""The recurrence over the chunks of each segment, and the output, with the state in registers from first to last chunk.

A segment is a whole sequence or, with context parallelism, a run of its chunks. Per chunk, in the transposed form that
keeps every intermediate in registers as the next WGMMA's A operand (chunk_matrices makes L = A * D - I and
P = scale tril(Q K^T) * D):

    h        = S                                                  stored if wanted, V-first
    R^T      = (V^T - (S^T K^T) diag(gamma)) diag(beta)
    V_new^T  = R^T + R^T L^T
    O^T      = (S^T Q^T) diag(scale gamma) + V_new^T P^T
    S^T      = gamma_C S^T + (V_new^T diag(gamma_C / gamma)) K

With the l2norm the factors of the columns hold 1 / |k| and 1 / |q| too, so K and Q are used as they came.

A piece of work is value_tile rows of S^T of one head of one segment: a consumer warpgroup for each 64 rows, which
share nothing but the producer's stages, a warp for each of these that stores O, and a producer warp that keeps the next
chunks' operands coming by TMA, over the borders of pieces: while the last chunks of one are computed, the state and the
first chunks of the next arrive. With 128 rows K, Q, L and P are loaded once for the head; with 64 two CTAs share the
head, for when there are few heads.

A CTA goes through several pieces in turns, every other turn in the opposite order: the plan puts long segments first,
so each CTA gets long and short ones. The first piece's segment, state and K, Q and V are fetched while the kernel
before this one still runs.

    shared memory, 128 rows: 2 stages * (K 16 + Q 16 + V 16 + L 8 + P 8 + gates 1.25 KB) + O 16 + state 66 = 213 KB
    64 rows: 2 * 57.25 + 8 + 34 = 157 KB

Launched on [ctas], at most [segments * H_v * value tiles]; twice, with both value tiles, where the device is to choose
between them: `only_if` is what the first segment tells of the longest sequence.
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as COMMON,
    C,
    block_row,
    block_rows,
    dims,
    element_type,
    extern,
    load_early,
    swizzled,
)
from kernels_tl.forward.recurrence import begin_step, end_step
from kernels_tl.layout import (
    ForwardGate,
    SegmentColumn,
    SegmentFlag,
)

PASS_CONFIGS = COMMON | {"tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}
EXPLICIT_FENCES = True
PRELUDE = """
#include "device/tiles.cuh"
"""

STAGES = 2
ROWS = 64  # of S^T a warpgroup: the M of its WGMMA
CLEARED_BARRIER = 11
EARLY_FACTORS = 8  # of eight, see load_minuend
MORE = SegmentColumn.COUNT  # behind a segment's columns in shared memory: how many turns follow
PAD = 4  # floats behind a row of a state in shared memory, as in the header
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 224, 56  # 2 * 224 + 56 = 3 * 168, what a CTA of 384 threads has


def piece(turn, cta, ctas):
    """The piece of work that is a CTA's in its turn."""
    return turn * ctas + T.if_then_else(turn % 2 == 0, cta, ctas - 1 - cta)


def starts_from_a_state(flags, chunks, has_initial_state):
    """Whether S is not zero at the start: a later segment's is in `states`, V-first, a first one's is the caller's."""
    return T.if_then_else(flags % SegmentFlag.LAST == 0, chunks, has_initial_state) > 0


def k_first(flags, state_stride_k):
    """Nonzero where that state has K first."""
    return T.if_then_else(flags % SegmentFlag.LAST == 0, 0, state_stride_k - 1)


def chunk_forward(dtype, K, V, value_tile):
    tokens, H_k, H_v, chunk_slots, segment_slots, state_size, h_slots = dims(
        "tokens", "H_k", "H_v", "chunk_slots", "segment_slots", "state_size", "h_slots"
    )
    WARPGROUPS = value_tile // ROWS
    TILES = V // value_tile
    CONSUMERS = 128 * WARPGROUPS
    # One warp loads, one for each consumer warpgroup stores; setmaxnreg takes whole warpgroups.
    PRODUCERS = 64 if WARPGROUPS == 1 else 128
    element = element_type(dtype)
    STATE_FLOATS = max(K * (value_tile + PAD), value_tile * (K + PAD))

    @T.prim_func
    def main(
        q: T.Tensor([tokens, H_k, K], dtype),
        k: T.Tensor([tokens, H_k, K], dtype),
        v: T.Tensor([tokens, H_v, V], dtype),
        gates: T.Tensor([chunk_slots, H_v, ForwardGate.COUNT, C], "float32"),
        matrices_0: block_row(chunk_slots, H_v, 0, dtype),
        matrices_1: block_row(chunk_slots, H_v, 1, dtype),
        matrices_2: block_row(chunk_slots, H_v, 2, dtype),
        matrices_3: block_row(chunk_slots, H_v, 3, dtype),
        segments: T.Tensor([segment_slots, SegmentColumn.COUNT], "int32"),
        initial_state: T.Tensor([state_size], "float32"),
        final_state: T.Tensor([state_size], "float32"),
        states: T.Tensor([segment_slots, H_v, V, K], "float32"),
        o: T.Tensor([tokens, H_v, V], dtype),
        h: T.Tensor([h_slots, H_v, V, K], dtype),
        group: T.int32,  # H_v / H_k
        state_stride_v: T.int32,  # of initial_state and final_state: the caller's layout is these two numbers
        state_stride_k: T.int32,
        has_initial_state: T.int32,
        has_final_state: T.int32,
        has_h: T.int32,
        ctas: T.int32,
        only_if: T.int32,  # the first segment's flags are these; 0: in any case
    ):
        with T.Kernel(ctas, threads=CONSUMERS + PRODUCERS, prelude=PRELUDE) as block:
            K_s = T.alloc_shared([STAGES, C, K], dtype)
            Q_s = T.alloc_shared([STAGES, C, K], dtype)
            V_s = T.alloc_shared([STAGES, WARPGROUPS, C, ROWS], dtype)
            L_s = T.alloc_shared([STAGES, C, C], dtype)
            P_s = T.alloc_shared([STAGES, C, C], dtype)
            O_s = T.alloc_shared([WARPGROUPS, C, ROWS], dtype)
            gates_s = T.alloc_shared([STAGES, ForwardGate.COUNT, C], "float32")
            S_s = T.alloc_shared([STATE_FLOATS], "float32")  # a state on its way in
            segment_s = T.alloc_shared([2, SegmentColumn.COUNT + 1], "int32")
            T.annotate_layout({V_s: swizzled(V_s), O_s: swizzled(O_s)})

            loaded = T.alloc_barrier([32] * STAGES)  # a stage's tiles have arrived
            released = T.alloc_barrier([CONSUMERS] * STAGES)  # K, P and gates of a stage have been used
            released_early = T.alloc_barrier([CONSUMERS] * STAGES)  # Q, V and L
            made = T.alloc_barrier([128] * WARPGROUPS)  # a warpgroup's O of a chunk lies in O_s
            stored = T.alloc_barrier([32] * WARPGROUPS)  # it has left
            begun = T.alloc_barrier([32])  # a turn's segment and state have arrived
            taken = T.alloc_barrier([CONSUMERS])  # they have been read

            if only_if != 0:
                if load_early(segments[0, SegmentColumn.FLAGS]) != only_if:
                    if block == 0:
                        T.pdl_sync()
                    extern("leave")
                if only_if == SegmentFlag.FIRST + SegmentFlag.LAST:  # of the two launches the first
                    T.pdl_trigger()
            tx = T.get_thread_binding()
            done = T.alloc_var("int32", init=0)  # chunks, in earlier turns

            if tx < CONSUMERS:
                if WARPGROUPS == 2:
                    T.inc_max_nreg(CONSUMER_REGISTERS)
                warpgroup = T.truncdiv(tx, 128)
                S = T.alloc_fragment([value_tile, K], "float32")  # S^T
                S_16 = T.alloc_fragment([value_tile, K], dtype)
                V_new = T.alloc_fragment([value_tile, C], "float32")  # S^T K^T, R^T, V_new^T in turn
                V_new_16 = T.alloc_fragment([value_tile, C], dtype)
                decayed = T.alloc_fragment([value_tile, C], dtype)  # V_new^T diag(gamma_C / gamma)
                O = T.alloc_fragment([value_tile, C], "float32")
                # What is loaded ahead of WGMMAs: the tile of V_new, its pairs of factors; gamma_C / gamma, scale gamma.
                minuend = T.alloc_local([16], "uint32")
                pairs = T.alloc_local([32], "float32")
                decays = T.alloc_local([16], "float32")
                queries = T.alloc_local([16], "float32")
                offset = T.alloc_var("int32", init=extern("transposed_offset", returns="int32"))
                column = T.alloc_var("int32", init=extern("first_column", returns="int32"))

                turn = T.alloc_var("int32", init=0)
                while turn >= 0:
                    work = T.alloc_var("int32", init=piece(turn, block, ctas))
                    T.barrier_wait(begun[0], turn % 2)
                    hv = T.alloc_var("int32", init=T.truncmod(T.truncdiv(work, TILES), T.Cast("int32", H_v)))
                    v0 = T.alloc_var("int32", init=work % TILES * value_tile)
                    length = T.alloc_var("int32", init=segment_s[turn % 2, SegmentColumn.LENGTH])
                    chunks = T.alloc_var("int32", init=T.truncdiv(length + (C - 1), C))
                    T.clear(S)
                    flags = T.alloc_var("int32", init=segment_s[turn % 2, SegmentColumn.FLAGS])
                    if starts_from_a_state(flags, chunks, has_initial_state):
                        extern(
                            f"read_state<{value_tile}, {PAD}>",
                            S.data,
                            T.access_ptr(S_s, "r"),
                            k_first(flags, state_stride_k) == 0,
                        )
                    T.barrier_arrive(taken[0])
                    T.copy(S, S_16)

                    for c in T.serial(chunks):
                        s = (done + c) % STAGES
                        T.barrier_wait(loaded[s], ((done + c) // STAGES) % 2)
                        if length - c * C < C:
                            # Rows behind the sequence belong to others. Whatever they hold, even NaN, must not meet the
                            # zeros of the other factors. (What Q has there stays in columns of O that are not stored.)
                            for i, j in T.Parallel(C, K):
                                if i >= length - c * C:
                                    K_s[s, i, j] = 0
                            for w in T.unroll(WARPGROUPS):
                                for i, j in T.Parallel(C, ROWS):
                                    if i >= length - c * C:
                                        V_s[s, w, i, j] = 0
                            T.fence_proxy_async()
                            T.sync_threads(CLEARED_BARRIER, CONSUMERS)

                        begin_step(
                            element,
                            EARLY_FACTORS,
                            K_s[s, :, :],
                            Q_s[s, :, :],
                            L_s[s, :, :],
                            T.access_ptr(V_s[s, warpgroup, 0, 0], "r"),
                            gates_s,
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
                            offset,
                            column,
                        )
                        if has_h != 0:  # a branch that keeps what is before it from sinking behind the wait
                            slot = T.alloc_var("int32", init=segment_s[turn % 2, SegmentColumn.CHUNK] + c)
                            if slot < h_slots:
                                to = T.access_ptr(h[slot, hv, v0 + warpgroup * ROWS, 0], "w")
                                extern("store_state", S_16.data, to)
                        T.wait_wgmma(0)
                        T.barrier_arrive(released_early[s])
                        end_step(
                            element, K_s[s, :, :], P_s[s, :, :], S, S_16, V_new, V_new_16, decayed, O, decays, queries
                        )
                        T.barrier_arrive(released[s])
                        T.barrier_wait(stored[warpgroup], ((done + c) % 2) ^ 1)
                        extern(f"stage_transposed<{element}>", O.data, T.access_ptr(O_s[warpgroup, 0, 0], "w"), offset)
                        T.barrier_arrive(made[warpgroup])

                    n = T.alloc_var("int32", init=segment_s[turn % 2, SegmentColumn.SEQUENCE])
                    state = T.alloc_var("int64", init=(T.Cast("int64", n) * H_v + hv) * (K * V))
                    if (has_final_state != 0) & (segment_s[turn % 2, SegmentColumn.FLAGS] >= SegmentFlag.LAST):
                        extern(
                            "write_state",
                            S.data,
                            T.access_ptr(final_state[state + v0 * state_stride_v], "w"),
                            state_stride_k == 1,
                        )
                    done += chunks
                    turn = T.if_then_else(segment_s[turn % 2, MORE] != 0, turn + 1, -1)
            else:
                if WARPGROUPS == 2:
                    T.dec_max_nreg(PRODUCER_REGISTERS)
                edge = T.alloc_var("int32", init=0)  # see block_rows
                pieces = T.alloc_var("int32", init=T.Cast("int32", segment_slots * H_v) * TILES)
                turns = T.alloc_var("int32", init=T.truncdiv(pieces, ctas))  # those in which all CTAs have work
                turns += T.if_then_else(piece(turns, block, ctas) < pieces, 1, 0)
                for turn in T.serial(T.if_then_else(tx < CONSUMERS + 32, turns, 0)):
                    work = T.alloc_var("int32", init=piece(turn, block, ctas))
                    segment = T.alloc_var("int32", init=T.truncdiv(T.truncdiv(work, TILES), T.Cast("int32", H_v)))
                    hv = T.alloc_var("int32", init=T.truncdiv(work, TILES) - segment * T.Cast("int32", H_v))
                    hk = T.alloc_var("int32", init=T.truncdiv(hv, group))
                    v0 = T.alloc_var("int32", init=work % TILES * value_tile)
                    row = T.alloc_var("int32", init=load_early(segments[segment, SegmentColumn.ROW]))
                    length = T.alloc_var("int32", init=load_early(segments[segment, SegmentColumn.LENGTH]))
                    first = T.alloc_var("int32", init=load_early(segments[segment, SegmentColumn.CHUNK]))
                    n = T.alloc_var("int32", init=load_early(segments[segment, SegmentColumn.SEQUENCE]))
                    flags = T.alloc_var("int32", init=load_early(segments[segment, SegmentColumn.FLAGS]))
                    chunks = T.alloc_var("int32", init=T.truncdiv(length + (C - 1), C))
                    T.barrier_wait(taken[0], (turn % 2) ^ 1)
                    lane = T.alloc_var("int32", init=tx - CONSUMERS)
                    if lane < SegmentColumn.COUNT:
                        segment_s[turn % 2, lane] = load_early(segments[segment, lane])
                    if lane == MORE:
                        segment_s[turn % 2, MORE] = turns - 1 - turn
                    if flags % SegmentFlag.LAST == 0:
                        T.pdl_sync()
                    if starts_from_a_state(flags, chunks, has_initial_state):
                        rows_are_k = T.alloc_var("int32", init=k_first(flags, state_stride_k))
                        state = T.alloc_var("int64", init=(T.Cast("int64", n) * H_v + hv) * (K * V))
                        extern(
                            "fetch_state",
                            begun[0],
                            T.access_ptr(S_s, "w"),
                            T.access_ptr(states[segment, hv, v0, 0], "r"),
                            T.access_ptr(initial_state[state + v0 * state_stride_v], "r"),
                            flags % SegmentFlag.LAST,
                            T.if_then_else(rows_are_k == 0, value_tile, K),
                            T.if_then_else(rows_are_k == 0, K, value_tile),
                        )
                    T.barrier_arrive(begun[0])
                    rows = (matrices_0, matrices_1, matrices_2, matrices_3)
                    for c in T.serial(chunks):
                        s = (done + c) % STAGES
                        t = row + c * C
                        T.barrier_wait(released_early[s], (((done + c) // STAGES) % 2) ^ 1)
                        T.tma_copy(q[t : t + C, hk, :], Q_s[s, :, :], barrier=loaded[s], leader_scope_threads=32)
                        for w in T.unroll(WARPGROUPS):
                            T.tma_copy(
                                v[t : t + C, hv, v0 + w * ROWS : v0 + w * ROWS + ROWS],
                                V_s[s, w, :, :],
                                barrier=loaded[s],
                                leader_scope_threads=32,
                            )
                        at_once = done + c == 0  # what does not come from the kernel before this one
                        if at_once:
                            T.tma_copy(k[t : t + C, hk, :], K_s[s, :, :], barrier=loaded[s], leader_scope_threads=32)
                            T.pdl_sync()
                        for target, source in block_rows(L_s, s, rows, first + c, hv, 0, edge):
                            T.tma_copy(source, target, barrier=loaded[s], leader_scope_threads=32)
                        T.barrier_wait(released[s], (((done + c) // STAGES) % 2) ^ 1)
                        if not at_once:
                            T.tma_copy(k[t : t + C, hk, :], K_s[s, :, :], barrier=loaded[s], leader_scope_threads=32)
                        for target, source in (
                            (gates_s[s, :, :], gates[first + c, hv, :, :]),
                            *block_rows(P_s, s, rows, first + c, hv, 1, edge),
                        ):
                            T.tma_copy(source, target, barrier=loaded[s], leader_scope_threads=32)
                        T.barrier_arrive(loaded[s])
                    done += chunks

                T.pdl_sync()
                w = T.alloc_var("int32", init=T.truncdiv(tx - CONSUMERS, 32) - 1)
                made_before = T.alloc_var("int32", init=0)
                for turn in T.serial(T.if_then_else((w >= 0) & (w < WARPGROUPS), turns, 0)):
                    work = T.alloc_var("int32", init=piece(turn, block, ctas))
                    segment = T.alloc_var("int32", init=T.truncdiv(T.truncdiv(work, TILES), T.Cast("int32", H_v)))
                    hv = T.alloc_var("int32", init=T.truncdiv(work, TILES) - segment * T.Cast("int32", H_v))
                    row = T.alloc_var("int32", init=segments[segment, SegmentColumn.ROW])
                    length = T.alloc_var("int32", init=segments[segment, SegmentColumn.LENGTH])
                    for c in T.serial(T.truncdiv(length + (C - 1), C)):
                        T.barrier_wait(made[w], (made_before + c) % 2)
                        if length - c * C >= C:
                            T.fence_proxy_async()
                            column = work % TILES * value_tile + w * ROWS
                            T.tma_copy(
                                O_s[w, :, :],
                                o[row + c * C : row + c * C + C, hv, column : column + ROWS],
                                leader_scope_threads=32,
                            )
                            T.tma_store_wait(0)
                        else:
                            extern(
                                f"store_tile<{element}>",
                                T.access_ptr(O_s[w, 0, 0], "r"),
                                T.access_ptr(o[row + c * C, hv, work % TILES * value_tile + w * ROWS], "w"),
                                H_v * V,
                                length - c * C,
                            )
                        T.barrier_arrive(stored[w])
                    made_before += T.truncdiv(length + (C - 1), C)

    return main
