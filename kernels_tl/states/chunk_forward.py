"""The recurrence over the chunks of each segment, and the outputs. Chunk by chunk,

    V_new^T, O^T, S'^T = f(S^T, Q, K, V, L, P, gates)      states/recurrence.py has f; chunk_matrices computes L and P

    o   [tokens, H_v, value_dim] 16-bit
    h   [h_slots, H_v, value_dim, key_dim] 16-bit   S before each chunk, V-first, if requested (has_h)

Timeline (core/pipeline.py), a warpgroup and an epilogue warp for each 64 rows of S^T:

    producer warp    S, Q V L 0, K P 0, Q V L 1, K P 1| |       |Q V L 2|K P 2  |Q V L 3|K P 3  |
    warpgroup w                                       |S|V_new 0|S O 0  |V_new 1|S O 1  |V_new 2|
    epilogue warp w                                   | |       |       |O 0    |       |O 1    |

    S: taken>, >begun      Q V L: released_early>           K P, gates: released>, >loaded
    S: begun>, >taken      V_new: loaded>, >released_early  S O: >released, stored>, >staged        O: staged>, >stored

forward.cpp launches [ctas] CTAs, at most [segments * H_v * value tiles]: persistent, each looping over work tiles.

A segment is a whole sequence or, with context parallelism, a run of its chunks. A work tile is value_tile rows of S^T
of one head of one segment. They stay in registers from the segment's first chunk to its last.

- The producer warp draws work tiles from a queue that all CTAs share (states/work_queue.cuh), and prefetches across
  them: the next one's state and first chunks arrive while this one's last chunks are computed.
- With 128 rows, K, Q, L and P are loaded once for the head. With 64 rows two CTAs share a head, which pays if there are
  few heads.
- Where only the device knows which rows are best, both kernels are launched, and one has no work (`if_long`).
- Segment, state, K, Q and V of the first work tile are loaded while the kernel before this one still runs.
- All roles process a segment in runs of chunks, each up to the next checkpoint, so the last chunk of a run may be short
  (plan/runs.cuh). After each run the consumers write the state.
- If `rounds` is set, the recurrence goes on with the state as it was stored, rounded. A call that starts from the
  checkpoint then computes the same as the rest of this call.
"""

import tilelang.language as T

from kernels_tl.bundles import Checkpoints, Chunks, Maps, Sizes, States
from kernels_tl.config import CHUNK_FORWARD, WGMMA_ROWS as ROWS, is_wide
from kernels_tl.core.common import (
    CALLER,
    EXPLICIT_PASS_CONFIGS,
    C,
    after,
    block_rows,
    dims,
    element_type,
    extern,
    load_early,
)
from kernels_tl.core.cta import (
    barriers,
    clear_rows_after,
    fetch,
    kilobytes_of,
    load_segment_early,
    shared,
    store_rows,
)
from kernels_tl.core.pipeline import WARP, Stage, epilogue_warp, is_producer_warp, stage_of
from kernels_tl.core.state_view import CHECKPOINT, FINAL, FirstState, chosen, is_checkpoint
from kernels_tl.layout import FROM_SCAN, NO_STATE, STATE_PAD, Dtype, ForwardGate, NamedBarrier, SegmentColumn
from kernels_tl.states.recurrence import (
    begin_scales,
    begin_step,
    end_scales,
    end_step,
    prelude_of_scales,
    registers,
    scale_values,
    scales_of,
    tile_of_scales,
)
from kernels_tl.states.work_queue import Queue

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
EARLY = {name: after("chunk_plan") for name in ("segments", "is_long", "drawn")}
EARLY |= {name: after(CALLER) for name in ("q", "k", "v", "initial_state")}
EARLY |= {"final_state": after(CALLER)}  # written for a sequence without tokens
PRELUDE = """
#include "core/state_tiles.cuh"
#include "plan/runs.cuh"
#include "states/work_queue.cuh"
#include "states/round_state.cuh"
#include "states/wide_state.cuh"
"""

# Entries in shared memory after a segment's columns: the work tile's head, or NO_WORK after the CTA's last one; its
# first value row; if the consumers load its first state, its segment.
HEAD, FIRST_ROW, SEGMENT = (SegmentColumn.COUNT + i for i in range(3))
NO_WORK = -1
ANY = -1


def chunk_forward(dtype, K, value_tile):
    sizes = Sizes()
    key_dim, value_dim = sizes.key_dim, sizes.value_dim
    (h_slots,) = dims("h_slots")
    element = element_type(dtype)
    tile = CHUNK_FORWARD[K][value_tile]
    STAGES, CONSUMERS, HAS_REGISTERS = tile.stages, tile.consumers, tile.registers is not None
    WARPGROUPS = value_tile // ROWS
    IS_WIDE, PANELS = is_wide(K), K // C
    FETCHES_STATE = not IS_WIDE  # the producer warp loads a work tile's first state; else the consumers do

    def size_of(dtype):
        """Bytes of a number of a state."""
        return T.Select(dtype == Dtype.FLOAT32, 4, T.Select(dtype >= Dtype.FLOAT8_E4M3FN, 1, 2))

    def pitch(columns, size=4):
        """The stride of a state's rows in shared memory, in elements."""
        return columns + STATE_PAD // size

    def make_tiles():
        scales = tile_of_scales(dtype, value_tile)
        state = max(K * pitch(value_tile), value_tile * pitch(K))  # K first, V first
        return shared(
            tile.shared + kilobytes_of(scales),
            K=([STAGES, C, K], dtype),
            Q=([STAGES, PANELS, C, C] if IS_WIDE else [STAGES, C, K], dtype),
            V=([STAGES, WARPGROUPS, C, ROWS], dtype),
            L=([STAGES, C, C], dtype),
            P=([STAGES, C, C], dtype),
            O=([WARPGROUPS, C, ROWS], dtype),
            gates=([STAGES, ForwardGate.COUNT, C], "float32"),
            **({"S": ([state], "float32")} if FETCHES_STATE else {}),  # a work tile's first state
            **scales,
            segment=([2, SEGMENT if FETCHES_STATE else SEGMENT + 1], "int32"),  # this work tile's and the next one's
            swizzle=("Q", "V", "O") if IS_WIDE else ("V", "O"),
        )

    def make_barriers():
        return barriers(
            loaded=[32] * STAGES,  # producer warp to consumers: a stage's tiles have arrived
            released=[CONSUMERS] * STAGES,  # consumers to producer warp: K, P and gates of a stage are free
            released_early=[CONSUMERS] * STAGES,  # consumers to producer warp: Q, V and L of a stage are free
            staged=[128] * WARPGROUPS,  # a consumer warpgroup to its epilogue warp: O of a chunk is in shared memory
            stored=[32] * WARPGROUPS,  # epilogue warp to its warpgroup: O has been read
            begun=[32],  # producer warp to the others: a work tile's segment and state have arrived
            taken=[CONSUMERS + WARP * WARPGROUPS],  # the others to producer warp: they have read both
        )

    def chunks_of(length, checkpoint_every):
        return extern("chunks_in_runs", length, checkpoint_every, returns="int32")

    @T.macro
    def next_chunk(row: T.Ref, run: T.Ref, checkpoint_every):
        """Moves `row` to the next chunk's first row. `run` counts the tokens that the run still has."""
        tokens = T.alloc_var("int32", init=T.min(run, C))
        row += tokens
        run -= tokens
        if run == 0:
            run = checkpoint_every

    @T.macro
    def await_work(ready, wave):
        """Waits for a work tile's segment, in the other roles."""
        Stage(0, wave % 2).wait_for(ready.begun)
        extern("forget_memory")  # a wait alone does not keep the loads after it

    def has_work(tiles, wave):
        return tiles.segment[wave % 2, HEAD] != NO_WORK

    def rest_of_value(v0):
        """Number of value rows from v0 on."""
        return T.Cast("int32", value_dim) - v0

    @T.macro
    def store_h(r, tiles, h, has_h, wave: T.Ref, c: T.Ref, warpgroup):
        """Writes S before a chunk to h, if h is requested. With K > 128 it runs before begin_step, which scales S."""
        if has_h != 0:  # the branch also keeps the code before it from moving below the wait
            slot = T.alloc_var("int32", init=tiles.segment[wave % 2, SegmentColumn.CHUNK] + c)
            if slot < h_slots:
                v0 = T.alloc_var("int32", init=tiles.segment[wave % 2, FIRST_ROW] + warpgroup * ROWS)
                rows = (T.Cast("int32", key_dim), rest_of_value(v0), T.Cast("int32", key_dim))
                to = T.access_ptr(h[slot, tiles.segment[wave % 2, HEAD], v0, 0], "w")
                if r.has_scales:
                    name, state = ("store_scaled_state", r.S) if r.is_wide else ("store_scaled_copy", r.S_16)
                    extern(f"{name}<{K}>", state.data, to, *rows, scales_of(tiles))
                elif r.is_wide:
                    extern(f"round_and_store_state<{element}, {K}>", r.S.data, to, *rows)
                else:
                    extern(f"store_state<{K}>", r.S_16.data, to, *rows)

    @T.macro
    def step(
        r,
        tiles,
        ready,
        h,
        has_h,
        wave: T.Ref,
        length: T.Ref,
        done: T.Ref,
        c: T.Ref,
        offset: T.Ref,
        column: T.Ref,
        warpgroup,
    ):
        """A consumer's step for chunk c of the segment, from the chunk's tiles to the tile of O."""
        s = (done + c) % STAGES
        stage = stage_of(done + c, STAGES, s)
        stage.wait_for(ready.loaded)
        if length - c * C < C:
            # Q keeps its rows after the sequence: they only reach columns of O^T that are not stored.
            clear_rows_after(tiles.K, length - c * C, CONSUMERS, s)
            clear_rows_after(tiles.V, length - c * C, CONSUMERS, s)
            T.fence_proxy_async()
            T.sync_threads(NamedBarrier.CLEARED, CONSUMERS)
        if r.is_wide:
            store_h(r, tiles, h, has_h, wave, c, warpgroup)
        scale_values(r, tiles, tiles.V[s, warpgroup, 0, 0], offset)
        begin_step(r, tiles, s, tiles.V[s, warpgroup, 0, 0], offset, column)
        if not r.is_wide:
            store_h(r, tiles, h, has_h, wave, c, warpgroup)
        T.wait_wgmma(0)
        stage.arrive(ready.released_early)
        end_step(r, tiles, s, column)
        stage.arrive(ready.released)
        output = Stage(warpgroup, (done + c) % 2)
        output.wait_until_free(ready.stored)
        extern(f"stage_transposed<{element}>", r.O.data, T.access_ptr(tiles.O[warpgroup, 0, 0], "w"), offset)
        output.arrive(ready.staged)

    @T.macro
    def compute(tiles, ready, initial, scanned, final, kept, checkpoints, checkpoint_every, h, has_h, rounds):
        """The consumers: the recurrence, with O to shared memory and the requested states to global memory."""
        warpgroup = T.truncdiv(T.get_thread_binding(), 128)
        r = registers(value_tile, K, dtype, tile.early_factors)
        offset = T.alloc_var("int32", init=extern("transposed_offset", returns="int32"))
        column = T.alloc_var("int32", init=extern("first_column", returns="int32"))
        done = T.alloc_var("int32", init=0)  # chunks of earlier work tiles
        wave = T.alloc_var("int32", init=0)
        await_work(ready, wave)
        # A variable: with the load in the loop's condition ptxas orders the products so that a chunk takes 7 % longer.
        more = T.alloc_var("int32", init=T.Select(has_work(tiles, wave), 1, 0))
        while more != 0:
            length = T.alloc_var("int32", init=tiles.segment[wave % 2, SegmentColumn.LENGTH])
            T.clear(r.S)
            slot = T.alloc_var("int32", init=tiles.segment[wave % 2, SegmentColumn.INITIAL])
            if slot != NO_STATE:
                state = FirstState(slot, initial, scanned)
                rest = rest_of_value(tiles.segment[wave % 2, FIRST_ROW])
                if FETCHES_STATE:
                    extern(
                        f"read_state<{K}, true>",
                        r.S.data,
                        T.access_ptr(tiles.S, "r"),
                        state.dtype,
                        state.is_v_first,
                        T.Select(state.is_v_first, pitch(K, size_of(state.dtype)), pitch(value_tile)),
                        rest,
                        T.Cast("int32", key_dim),
                    )
                else:
                    if slot == FROM_SCAN:
                        T.pdl_sync()
                    state.read(r.S, *(tiles.segment[wave % 2, column] for column in (SEGMENT, HEAD, FIRST_ROW)))
            T.barrier_arrive(ready.taken[0])
            c = T.alloc_var("int32", init=0)
            is_end = T.alloc_var("int32", init=0)
            tokens = T.alloc_var("int32", init=0)  # of the runs so far
            run = T.alloc_var("int32", init=tiles.segment[wave % 2, SegmentColumn.UNTIL])
            while is_end == 0:
                extern(f"round_state<{K}>", r.S.data, T.Select((rounds != 0) & (c > 0), kept.dtype, Dtype.FLOAT32))
                if not r.is_wide:
                    T.copy(r.S, r.S_16)
                begin_scales(r, tiles)
                run = T.min(run, length - tokens)
                # The steps of a run count tokens as if the run began at c * C, so it ends at `until`.
                until = T.alloc_var("int32", init=c * C + run)
                while c * C < until:
                    step(r, tiles, ready, h, has_h, wave, until, done, c, offset, column, warpgroup)
                    c += 1
                end_scales(r, tiles)
                tokens += run
                run = checkpoint_every
                is_end = T.Select(tokens >= length, 1, 0)
                # A loop over both writes, because two copies of the write would take more registers.
                written = T.alloc_var("int32", init=FINAL)
                if is_checkpoint(tokens, length, tiles.segment[wave % 2, SegmentColumn.UNTIL], checkpoint_every):
                    written = CHECKPOINT
                while written <= is_end:
                    to = T.alloc_var("int32", init=tiles.segment[wave % 2, SegmentColumn.FINAL])
                    if written == CHECKPOINT:
                        to = checkpoints[tiles.segment[wave % 2, SegmentColumn.CHUNK] + c - 1]
                    if to >= 0:
                        states = chosen(written != CHECKPOINT, final, kept)
                        states.write(r.S, to, tiles.segment[wave % 2, HEAD], tiles.segment[wave % 2, FIRST_ROW])
                    written += 1
            done += c
            wave += 1
            await_work(ready, wave)
            more = T.Select(has_work(tiles, wave), 1, 0)

    @T.macro
    def fetch_first_state(tiles, ready, work, segment, scanned, initial):
        if segment.initial == FROM_SCAN:
            T.pdl_sync()
        if segment.initial != NO_STATE:
            state = FirstState(segment.initial, initial, scanned)
            size = T.alloc_var("int32", init=size_of(state.dtype))
            v0 = T.alloc_var("int32", init=work.tile * value_tile)
            rows = T.alloc_var("int32", init=T.min(rest_of_value(v0), value_tile))  # rows of S^T
            channels = T.Cast("int32", key_dim)
            extern(
                "fetch_state",
                ready.begun[0],
                T.access_ptr(tiles.S, "w"),
                state.pointer(work.segment, work.hv, v0),
                T.Select(state.is_v_first, rows, channels),
                T.Select(state.is_v_first, channels, rows) * size,
                state.row_stride * size,
                T.Select(state.is_v_first, K, value_tile) * size + STATE_PAD,
            )

    @T.macro
    def begin_work(tiles, ready, wave, work, segment, segments, scanned, initial):
        """The producer warp loads a work tile's segment and state to shared memory."""
        begun = Stage(0, wave % 2)
        begun.wait_until_free(ready.taken)
        lane = T.alloc_var("int32", init=T.get_thread_binding() - CONSUMERS)
        if lane < SegmentColumn.COUNT:
            tiles.segment[wave % 2, lane] = load_early(segments[work.segment, lane])
        if lane == HEAD:
            tiles.segment[wave % 2, HEAD] = work.hv
        if lane == FIRST_ROW:
            tiles.segment[wave % 2, FIRST_ROW] = work.tile * value_tile
        if FETCHES_STATE:
            fetch_first_state(tiles, ready, work, segment, scanned, initial)
        else:
            if lane == SEGMENT:
                tiles.segment[wave % 2, SEGMENT] = work.segment
        extern("forget_memory")  # an arrival alone does not keep the stores before it
        begun.arrive(ready.begun)

    @T.macro
    def end_work(tiles, ready, wave):
        """The producer warp tells the other roles that there is no more work."""
        begun = Stage(0, wave % 2)
        begun.wait_until_free(ready.taken)
        if T.get_thread_binding() == CONSUMERS:
            tiles.segment[wave % 2, HEAD] = NO_WORK
        extern("forget_memory")
        begun.arrive(ready.begun)

    @T.macro
    def load(queue, tiles, ready, tokens, matrices, is_long, if_long, segments, scanned, initial, checkpoint_every):
        """The producer warp: segments, states and the chunks' operands."""
        edge = T.alloc_var("int32", init=0)  # see block_rows
        done = T.alloc_var("int32", init=0)  # chunks of earlier work tiles
        wave = T.alloc_var("int32", init=0)
        number = T.alloc_var("int32", init=queue.cta)
        if T.if_then_else(if_long != ANY, load_early(is_long[0]), ANY) != if_long:
            number = queue.work_tiles
        while number < queue.work_tiles:
            work = queue.at(number)
            hk = T.alloc_var("int32", init=T.truncdiv(work.hv, sizes.group))
            v0 = T.alloc_var("int32", init=work.tile * value_tile)
            segment = load_segment_early(segments, work.segment)
            begin_work(tiles, ready, wave, work, segment, segments, scanned, initial)
            t = T.alloc_var("int32", init=segment.row)
            run = T.alloc_var("int32", init=load_early(segments[work.segment, SegmentColumn.UNTIL]))
            for c in T.serial(chunks_of(segment.length, checkpoint_every)):
                s = (done + c) % STAGES
                stage = stage_of(done + c, STAGES, s)
                slot = segment.first + c
                stage.wait_until_free(ready.released_early)
                if IS_WIDE:  # by panels, because no gemm of TileLang gives the tile its layout
                    for panel in T.unroll(PANELS):
                        k0 = panel * C
                        fetch(tokens.q[t : t + C, hk, k0 : k0 + C], tiles.Q[s, panel, :, :], ready.loaded[s])
                else:
                    fetch(tokens.q[t : t + C, hk, 0:K], tiles.Q[s, :, :], ready.loaded[s])
                for w in T.unroll(WARPGROUPS):
                    fetch(
                        tokens.v[t : t + C, work.hv, v0 + w * ROWS : v0 + w * ROWS + ROWS],
                        tiles.V[s, w, :, :],
                        ready.loaded[s],
                    )
                at_once = done + c == 0  # K of the first chunk does not come from the kernel before this one
                if at_once:
                    fetch(tokens.k[t : t + C, hk, 0:K], tiles.K[s, :, :], ready.loaded[s])
                    T.pdl_sync()
                for target, source in block_rows(tiles.L, s, matrices.rows, slot, work.hv, 0, edge):
                    fetch(source, target, ready.loaded[s])
                stage.wait_until_free(ready.released)
                if not at_once:
                    fetch(tokens.k[t : t + C, hk, 0:K], tiles.K[s, :, :], ready.loaded[s])
                fetch(matrices.gates[slot, work.hv, :, :], tiles.gates[s, :, :], ready.loaded[s])
                for target, source in block_rows(tiles.P, s, matrices.rows, slot, work.hv, 1, edge):
                    fetch(source, target, ready.loaded[s])
                stage.arrive(ready.loaded)
                next_chunk(t, run, checkpoint_every)
            done += chunks_of(segment.length, checkpoint_every)
            wave += 1
            number = queue.next_work()
        end_work(tiles, ready, wave)

    @T.macro
    def store(tiles, ready, w, o, checkpoint_every):
        """Epilogue warp w: the O of consumer warpgroup w from shared memory."""
        done = T.alloc_var("int32", init=0)  # chunks of earlier work tiles
        wave = T.alloc_var("int32", init=0)
        await_work(ready, wave)
        while has_work(tiles, wave):
            row = T.alloc_var("int32", init=tiles.segment[wave % 2, SegmentColumn.ROW])
            end = T.alloc_var("int32", init=row + tiles.segment[wave % 2, SegmentColumn.LENGTH])
            run = T.alloc_var("int32", init=tiles.segment[wave % 2, SegmentColumn.UNTIL])
            hv = T.alloc_var("int32", init=tiles.segment[wave % 2, HEAD])
            v0 = T.alloc_var("int32", init=tiles.segment[wave % 2, FIRST_ROW] + w * ROWS)
            chunks = T.alloc_var("int32", init=chunks_of(end - row, checkpoint_every))
            T.barrier_arrive(ready.taken[0])
            for c in T.serial(chunks):
                output = Stage(w, (done + c) % 2)
                output.wait_for(ready.staged)
                store_rows(tiles.O, w, o, row, hv, v0, T.min(run, end - row))
                output.arrive(ready.stored)
                next_chunk(row, run, checkpoint_every)
            done += chunks
            wave += 1
            await_work(ready, wave)

    @T.prim_func
    def main(
        chunks: Chunks(sizes, dtype),
        states: States(sizes, float8=True),
        kept: Checkpoints(sizes),
        maps: Maps(sizes, dtype, K),
        o: T.Tensor([sizes.tokens, sizes.H_v, sizes.value_dim], dtype),
        h: T.Tensor([h_slots, sizes.H_v, sizes.value_dim, sizes.key_dim], dtype),
        has_h: T.int32,
        ctas: T.int32,
        value_tiles: T.int32,  # tiles of value_tile rows
        rounds: T.int32,
        if_long: T.int32,  # ANY, or the is_long of the batches that the kernel is for
    ):
        with T.Kernel(ctas, threads=tile.threads, prelude=PRELUDE + prelude_of_scales(dtype)) as cta:
            tiles = make_tiles()
            ready = make_barriers()
            initial = states.initial()
            if T.get_thread_binding() < CONSUMERS:
                if HAS_REGISTERS:
                    T.inc_max_nreg(tile.registers[0])
                ends = (states.final(), kept.view(states), chunks.plan.checkpoints, kept.checkpoint_every)
                compute(tiles, ready, initial, maps.states, *ends, h, has_h, rounds)
            else:
                if HAS_REGISTERS:
                    T.dec_max_nreg(tile.registers[1])
                if is_producer_warp(CONSUMERS):
                    queue = Queue(cta, ctas, chunks.plan.drawn, sizes.segment_slots, sizes.H_v, value_tiles)
                    of_producer = (
                        chunks.plan.is_long,
                        if_long,
                        chunks.plan.segments,
                        maps.states,
                        initial,
                        kept.checkpoint_every,
                    )
                    load(queue, tiles, ready, chunks.tokens, chunks.matrices, *of_producer)
                    T.pdl_sync()
                else:
                    T.pdl_sync()
                    w = T.alloc_var("int32", init=epilogue_warp(CONSUMERS))
                    if w < WARPGROUPS:
                        store(tiles, ready, w, o, kept.checkpoint_every)

    return main
