"""The whole forward of a segment in one kernel: like chunk_forward, with warpgroups that also compute L and P.

    P = scale tril(Q K^T) * D,   L = A * D - I     both transposed, from K K^T and K Q^T (states/fused_forward.cuh)
    O, S' from S, Q, K, V, L, P and gates          states/recurrence.py

    o         [tokens, H_v, value_dim] 16-bit
    A         [tokens, H_v, C] 16-bit         with low_level
    g_cumsum  [tokens, H_v] fp32              with low_level

Timeline (core/pipeline.py). The warpgroups ping-pong: while one runs a step, the other builds L and P two chunks ahead.

    producer warp   K Q 0, V 0, K Q 1, V 1, K Q 2   |      |V 2, K Q 3|      |V 3, K Q 4|V 4, K Q 5|      |V 5, K Q 6|
    gates warp      gates 0, gates 1, gates 2       |      |gates 3   |      |gates 4   |gates 5   |      |gates 6   |
    warpgroup 0     L P 0                           |step 0|L P 2     |step 1|step 2    |L P 4     |step 3|step 4    |
    warpgroup 1     L P 1                           |step 0|step 1    |L P 3 |step 2    |step 3    |L P 5 |step 4    |
    epilogue warp 0                                 |      |O 0       |      |O 1       |O 2       |      |O 3       |
    epilogue warp 1                                 |      |O 0       |O 1   |          |O 2       |O 3   |          |

    K Q: released>, >loaded   V: released_v>, >loaded_v   gates: released>, >gated
    L P: gated>, loaded>, >matrices_staged                O: staged>, >stored
    step: matrices_staged>, loaded_v>, V_new, >released_v, stored>, S and O, >released, >staged

forward.cpp launches [ctas] CTAs, at most [segments * H_v * value_tiles]: persistent, each looping over work tiles
(segment, head, tile). Each tile of a head computes the head's L and P again. The chunks of all tiles of a CTA are one
sequence: the last steps of a work tile build L and P of the next one's first chunks.

A segment is a whole sequence or, in the instances `cut`, a run of its chunks. With `cut` a work tile begins `memory`
chunks before its segment, from S = 0, and drops the O of these extra chunks. Without extra chunks the first state comes
from the caller or from segment_scan.

With `early` a CTA finds its first work tile in cu_seqlens, while chunk_plan runs. Rows that no sequence covers get
zeros. The kernel writes no h.

Without `planned` chunk_plan does not run, and each CTA has one work tile. A warp first writes the row of its segment to
shared memory.

The producer warp draws work tiles from a queue that all CTAs share (states/work_queue.cuh), and passes their numbers
to the other roles through a ring (`drawn`, `taken`). Empty tiles would stall prefetching, so the producer skips them;
each CTA handles its share of those with a final state at the end.

A warpgroup carries 64 rows of the state. With low_level, A is stored through the tiles of O: a warpgroup's epilogue
warp then has an A to store for every other O.

Why one kernel: with two kernels, chunk_matrices computes K K^T and Q K^T once for a group of heads. But then K and Q
are loaded a second time, and the matrices are written and read. The cost model (csrc/gpu/cost_model.cpp) chooses.

With the l2norm and r = diag(1 / |k_i|), K stays as it is, because

    I + stril(diag(beta) r K K^T r) = r^-1 (I + stril(diag(beta) r^2 K K^T)) r

so the inverse needs the norms of its own rows only. The other norms are factors of the gates (normalize in
states/fused_forward.cuh).
"""

import tilelang.language as T

from kernels_tl.bundles import (
    Checkpoints,
    Gates,
    Maps,
    Memory,
    Outputs,
    Plan,
    Sequences,
    Sizes,
    Slots,
    StatePresence,
    States,
    Tokens,
)
from kernels_tl.config import FUSED_FORWARD as TILE, WARPGROUP, WGMMA_ROWS as ROWS
from kernels_tl.core.common import CALLER, EXPLICIT_PASS_CONFIGS, C, after, element_type, extern
from kernels_tl.core.cta import (
    barriers,
    clear_rows_after,
    fetch,
    is_never,
    kilobytes_of,
    shared,
    store_rows,
)
from kernels_tl.core.pipeline import WARP, Stage, stage_of
from kernels_tl.core.state_view import CHECKPOINT, FINAL, FirstState, chosen, is_checkpoint
from kernels_tl.layout import (
    BLOCK,
    INVERSE_STRIDE,
    NO_STATE,
    PADDING,
    ChunkColumn,
    ConsumerBits,
    FusedGate,
    NamedBarrier,
    Ring,
    SegmentColumn,
    UnplannedSegment,
)
from kernels_tl.states import consumer_position
from kernels_tl.states.consumer_position import next_chunk, next_wave, stage, value_stage
from kernels_tl.states.recurrence import (
    begin_scales,
    begin_step,
    end_scales,
    end_step,
    prelude_of_scales,
    registers,
    scale_values,
    tile_of_scales,
)
from kernels_tl.states.work_queue import Queue

PASS_CONFIGS = EXPLICIT_PASS_CONFIGS
# Inputs of the producer and gates warps of a CTA that finds its first segment itself, and g_cumsum, which is written.
EARLY = {name: after(CALLER) for name in ("offsets_entries", "state_indices_entries", "g_cumsum")}
EARLY |= {name: after(CALLER) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
PRELUDE = """
#include "states/fused_forward.cuh"
#include "plan/plan.cuh"
#include "states/work_queue.cuh"
"""

WARPGROUPS = 2  # they alternate in computing matrices
STAGES, VALUE_STAGES = TILE.stages, Ring.VALUE_STAGES  # K, Q, matrices and gates have STAGES; V has VALUE_STAGES
CONSUMERS = TILE.consumers
PRODUCER, EPILOGUE, GATES = 0, 1, 3  # the producers' first warps by role; EPILOGUE is one for each consumer warpgroup
SCRATCH = 6 * BLOCK**2 + 3 * INVERSE_STRIDE + BLOCK**2  # floats of a warpgroup: see states/fused_forward.cuh
CONSUMER_REGISTERS, PRODUCER_REGISTERS = TILE.registers
WAVES = ConsumerBits.WAVES
# The number after the last work tile's. In the ring of work tiles a negative entry x is tile -1 - x, and no chunk
# follows.
NO_WORK = 2**31 - 1
NO_ROW = -1  # a chunk whose A is not stored


class OnlySegment:
    """The row of a CTA's only segment, in place of the table of segments."""

    def __init__(self, row):
        self.row = row

    def __getitem__(self, index):
        _, column = index
        return self.row[column]


def fused_forward(dtype, K, normalize, low_level, cut, planned):
    sizes = Sizes()
    H_v = sizes.H_v
    V = TILE.tile
    assert K == 128, "begin_product has eight steps of 16 channels, and clear_rows_after two panels of 64"
    options = f"{element_type(dtype)}, {str(normalize).lower()}, {str(low_level).lower()}"

    def make_tiles():
        few = {"work_tiles": ([WAVES], "int32")} if planned else {"row_of_segment": ([UnplannedSegment.COUNT], "int32")}
        few |= tile_of_scales(dtype, V)
        if low_level:  # the first row of A of a stage's chunk, or NO_ROW; its head
            few |= {"rows_of_A": ([STAGES], "int32"), "heads_of_A": ([STAGES], "int32")}
        return shared(
            TILE.shared + kilobytes_of(few),
            K=([STAGES, C, K], dtype),
            Q=([STAGES, C, K], dtype),
            V=([VALUE_STAGES, WARPGROUPS, C, ROWS], dtype),
            L=([STAGES, C, C], dtype),
            P=([STAGES, C, C], dtype),
            O=([WARPGROUPS, C, ROWS], dtype),
            scratch=([WARPGROUPS, SCRATCH], "float32"),
            gates=([STAGES, FusedGate.COUNT, C], "float32"),
            lengths=([STAGES], "int32"),  # tokens of the chunk, negative after the last chunk
            # A consumer's work tile, and the tokens of its segment so far: here, because the steps take all registers.
            work_numbers=([CONSUMERS], "int32"),
            done=([CONSUMERS], "int32"),
            swizzle=("V", "O"),
            **few,
        )

    def make_barriers():
        return barriers(
            loaded=[32] * STAGES,  # producer warp to L P: a stage's K and Q have arrived
            gated=[32] * STAGES,  # gates warp to L P: a chunk's table is complete
            matrices_staged=[128] * STAGES,  # a warpgroup to the consumers: L and P are complete
            released=[CONSUMERS] * STAGES,  # consumers to producer and gates warps: the stage is free
            loaded_v=[32] * VALUE_STAGES,  # producer warp to consumers: a stage's V has arrived
            released_v=[CONSUMERS] * VALUE_STAGES,  # consumers to producer warp: the stage of V is free
            staged=[128] * WARPGROUPS,  # a warpgroup to its epilogue warp: O of a chunk, or an A, is in its tile
            stored=[32] * WARPGROUPS,  # epilogue warp to its warpgroup: the tile has been read
            drawn=[WARP] * WAVES,  # producer warp to the others: the number of a next work tile is in the ring
            taken=[CONSUMERS + WARP * (1 + WARPGROUPS)] * WAVES,  # the others to producer warp: they have read it
        )

    def extra_tokens(memory, segments, work):
        """Tokens before a segment that decide its first state. The work tile begins with them, and drops their O."""
        if not cut:
            return 0
        is_used = segments[work.segment, SegmentColumn.LENGTH] > 0  # a slot without tokens has no memory
        chunks = T.if_then_else(is_used, T.max(memory[work.segment, work.hv], 0), 0)
        return T.alloc_var("int32", init=chunks * C)

    def segment_tokens(segments, work):
        """Tokens of a work tile's segment."""
        return T.alloc_var("int32", init=segments[work.segment, SegmentColumn.LENGTH])

    def in_segment(rest, length):
        """Whether the chunk is the segment's, which has `length` tokens, with `rest` tokens of the work tile left."""
        return (rest <= length) if cut else True

    @T.macro
    def put_work(tiles, ready, wave: T.Ref, entry):
        """The producer warp passes the number of a work tile, or -1 - number, to the other roles."""
        stage = stage_of(wave, WAVES)
        stage.wait_until_free(ready.taken)
        tiles.work_tiles[stage.index] = entry
        extern("forget_memory")  # an arrival alone does not keep the stores before it
        stage.arrive(ready.drawn)
        wave += 1

    @T.macro
    def take_work(tiles, ready, stage, entry: T.Ref):
        """Another role takes the next entry of the ring."""
        stage.wait_for(ready.drawn)
        extern("forget_memory")  # a wait alone does not keep the loads after it
        entry = tiles.work_tiles[stage.index]  # noqa: F841, the caller's
        stage.arrive(ready.taken)

    @T.macro
    def take_next(tiles, ready, wave: T.Ref, entry: T.Ref):
        """The same for a producer thread, which counts work tiles. Without `planned` none follows."""
        if planned:
            take_work(tiles, ready, stage_of(wave, WAVES), entry)
            wave += 1
        else:
            entry = -1 - NO_WORK

    def number_of(entry):
        return T.max(entry, -1 - entry)

    @T.macro
    def make_matrices(tiles, ready, s, in_phase, warpgroup, position, scale):
        """A warpgroup computes L and P of the chunk in stage s."""
        extern(
            f"make_matrices<{options}>",
            extern(
                "MakerBarriers",
                ready.gated[s],
                ready.loaded[s],
                ready.matrices_staged[s],
                ready.stored[0],
                ready.staged[0],
            ),
            extern(
                "MakerTiles",
                T.access_ptr(tiles.lengths[s], "r"),
                T.access_ptr(tiles.K[s, 0, 0], "rw"),
                T.access_ptr(tiles.Q[s, 0, 0], "r"),
                T.access_ptr(tiles.gates[s, 0, 0], "rw"),
                T.access_ptr(tiles.scratch[warpgroup, 0], "rw"),
                T.access_ptr(tiles.L[s, 0, 0], "w"),
                T.access_ptr(tiles.P[s, 0, 0], "w"),
                T.access_ptr(tiles.O[0, 0, 0], "w"),
            ),
            in_phase,
            scale,
            NamedBarrier.FUSED_MAKER + warpgroup,
            position,
        )

    @T.macro
    def step(r, tiles, ready, now: T.Ref, position: T.Ref, left: T.Ref, scale):
        """A consumer's step, from the chunk's tiles to the tile of O. After every other step the warpgroup computes the
        matrices of the chunk two ahead."""
        tile, value = stage(now), value_stage(now)
        s, u = tile.index, value.index
        warpgroup = consumer_position.warpgroup(position)
        tile.wait_for(ready.matrices_staged)
        value.wait_for(ready.loaded_v)
        if left < C:
            clear_rows_after(tiles.V, left, WARPGROUP, u, warpgroup)
            T.fence_proxy_async()  # before the stage's next load
            extern("sync_warpgroup", NamedBarrier.FUSED_TAIL + warpgroup)
        scale_values(r, tiles, tiles.V[u, 0, 0, 0], consumer_position.offset(position))
        begin_step(
            r, tiles, s, tiles.V[u, 0, 0, 0], consumer_position.offset(position), consumer_position.column(position)
        )
        if is_never(sizes):  # keeps the code before it from moving below the wait
            extern("trap")
        T.wait_wgmma(0)
        value.arrive(ready.released_v)
        # This wait passes at once here. After the products it would cost 2 %.
        if low_level:
            extern("wait_for_tile", ready.stored[0], position)
        else:
            Stage(warpgroup, u).wait_until_free(ready.stored)
        end_step(r, tiles, s)
        tile.arrive(ready.released)
        O_s = tiles.O[0, 0, 0]
        extern(f"stage_transposed<{r.element}>", r.O.data, T.access_ptr(O_s, "w"), consumer_position.offset(position))
        T.barrier_arrive(ready.staged[warpgroup])
        if u == warpgroup:  # two chunks ahead: the stage before this one
            before = T.if_then_else(s == 0, STAGES - 1, s - 1)
            before_phase = T.if_then_else(s == 0, tile.parity, tile.parity ^ 1)
            make_matrices(tiles, ready, before, before_phase, warpgroup, position, scale)

    @T.macro
    def read_first_state(r, segments, work, extra, initial, scanned):
        """S before the work tile's first chunk: zero if extra tokens come first."""
        first = T.alloc_var("int32", init=segments[work.segment, SegmentColumn.INITIAL])
        T.clear(r.S)
        if cut:
            if extra > 0:
                first = NO_STATE
            if first != NO_STATE:
                FirstState(first, initial, scanned).read(r.S, work.segment, work.hv, work.tile * V)
        else:
            if first != NO_STATE:
                initial.read(r.S, first, work.hv, work.tile * V)

    @T.macro
    def compute(queue, tiles, ready, segments, memory, states, kept, checkpoints, scanned, scale):
        """The consumers: a loop over work tiles."""
        tx = T.get_thread_binding()
        r = registers(V, K, dtype, TILE.early_factors)
        position = T.alloc_var("int32", init=consumer_position.position_of_thread(C * ROWS * 2))
        extern("clear_matrices", T.access_ptr(tiles.L, "w"), T.access_ptr(tiles.P, "w"), STAGES)
        T.sync_threads(NamedBarrier.FUSED_BEGIN, CONSUMERS)
        make_matrices(tiles, ready, T.truncdiv(tx, 128), 0, T.truncdiv(tx, 128), position, scale)

        if planned:
            T.pdl_sync()
        tiles.work_numbers[tx] = queue.cta
        while tiles.work_numbers[tx] != NO_WORK:
            work = queue.at(tiles.work_numbers[tx])
            extra = extra_tokens(memory, segments, work)
            read_first_state(r, segments, work, extra, states.initial(), scanned)
            T.copy(r.S, r.S_16)

            tiles.done[tx] = -extra
            is_end = T.alloc_var("int32", init=0)
            while is_end == 0:
                begin = queue.at(tiles.work_numbers[tx])
                left = T.alloc_var("int32", init=segments[begin.segment, SegmentColumn.LENGTH] - tiles.done[tx])
                until = T.alloc_var("int32", init=kept.checkpoint_every)
                if cut:
                    if tiles.done[tx] <= 0:  # the extra tokens belong to the first run
                        until = T.min(
                            segments[begin.segment, SegmentColumn.UNTIL], segments[begin.segment, SegmentColumn.LENGTH]
                        )
                        until -= tiles.done[tx]
                else:
                    if tiles.done[tx] == 0:
                        until = segments[begin.segment, SegmentColumn.UNTIL]
                left = T.min(left, until)
                tiles.done[tx] += left
                begin_scales(r, tiles)
                while left > 0:
                    now = T.alloc_var(
                        "int32", init=extern("uniform", consumer_position.ring(position), returns="int32")
                    )
                    step(r, tiles, ready, now, position, left, scale)
                    position = next_chunk(position, ConsumerBits.RING)
                    left -= C
                end_scales(r, tiles)

                end = queue.at(tiles.work_numbers[tx])
                done = T.alloc_var("int32", init=tiles.done[tx])
                length = T.alloc_var("int32", init=segments[end.segment, SegmentColumn.LENGTH])
                is_end = T.Select(done >= length, 1, 0)
                # A loop over both writes, because two copies of the write would take more registers.
                written = T.alloc_var("int32", init=FINAL)
                if is_checkpoint(done, length, segments[end.segment, SegmentColumn.UNTIL], kept.checkpoint_every):
                    written = CHECKPOINT
                while written <= is_end:
                    to = T.alloc_var("int32", init=segments[end.segment, SegmentColumn.FINAL])
                    if written == CHECKPOINT:
                        chunks_done = T.truncdiv(done, C)
                        to = checkpoints[segments[end.segment, SegmentColumn.CHUNK] + chunks_done - 1]
                    if to >= 0:
                        into = chosen(written != CHECKPOINT, states.final(), kept.view(states))
                        into.write(r.S, to, end.hv, end.tile * V)
                    written += 1
            number = T.alloc_var("int32", init=NO_WORK)
            if planned:
                take_work(tiles, ready, consumer_position.wave(position), number)
                position = next_wave(position)
            tiles.work_numbers[tx] = number_of(number)

    def is_unknown(early, queue, number):
        """Whether the warp has not found the work tile itself."""
        return ((early == 0) | (number != queue.cta)) if planned else True

    @T.macro
    def read_extent(extent, segments, memory, work, condition):
        """Reads a work tile's first token row and number of tokens, on a condition."""
        if condition:
            if planned:
                T.pdl_sync()
            extra = extra_tokens(memory, segments, work)
            extent[0] = segments[work.segment, SegmentColumn.ROW] - extra
            extent[1] = segments[work.segment, SegmentColumn.LENGTH] + extra

    @T.macro
    def draw_work(queue, tiles, ready, number: T.Ref, wave: T.Ref, extent, segments, memory):
        """The producer warp draws the CTA's next work tile that has tokens, and passes it to the other roles."""
        extent[1] = 0
        while (extent[1] == 0) & (number < queue.work_tiles):
            T.pdl_sync()
            number = queue.next_work()
            read_extent(extent, segments, memory, queue.at(number), number < queue.work_tiles)
        if number < queue.work_tiles:
            put_work(tiles, ready, wave, number)

    @T.macro
    def load(queue, tiles, ready, first, ring: T.Ref, extent, early, segments, memory, tokens):
        """The producer warp: work tiles from the queue, K, Q and V. It draws the next tile before it waits for the last
        stage of V, which hides the latency."""
        number = T.alloc_var("int32", init=first)
        wave = T.alloc_var("int32", init=0)
        if first != NO_WORK:
            read_extent(extent, segments, memory, queue.at(first), is_unknown(early, queue, first))
            if planned:  # noqa: SIM102, this one is Python's
                if extent[1] == 0:
                    draw_work(queue, tiles, ready, number, wave, extent, segments, memory)
        while number < queue.work_tiles:
            work = queue.at(number)
            hk = T.alloc_var("int32", init=T.truncdiv(work.hv, sizes.group))
            v0 = T.alloc_var("int32", init=work.tile * V)
            row = T.alloc_var("int32", init=extent[0])
            chunks = T.alloc_var("int32", init=T.truncdiv(extent[1] + (C - 1), C))
            for c in T.serial(chunks):
                tile, value = stage(ring), value_stage(ring)
                s, u = tile.index, value.index
                t = row + c * C
                tile.wait_until_free(ready.released)
                fetch(tokens.k[t : t + C, hk, 0:K], tiles.K[s, :, :], ready.loaded[s])
                fetch(tokens.q[t : t + C, hk, 0:K], tiles.Q[s, :, :], ready.loaded[s])
                tile.arrive(ready.loaded)
                if planned:  # noqa: SIM102, this one is Python's
                    if c == chunks - 1:
                        draw_work(queue, tiles, ready, number, wave, extent, segments, memory)
                value.wait_until_free(ready.released_v)
                for w in T.unroll(WARPGROUPS):
                    fetch(
                        tokens.v[t : t + C, work.hv, v0 + w * ROWS : v0 + w * ROWS + ROWS],
                        tiles.V[u, w, :, :],
                        ready.loaded_v[u],
                    )
                value.arrive(ready.loaded_v)
                ring = next_chunk(ring)
            if not planned:
                number = NO_WORK
        if planned:  # noqa: SIM102, this one is Python's
            if first != NO_WORK:
                number = queue.next_empty(segments, queue.cta + queue.ctas)
                while number < queue.work_tiles:
                    put_work(tiles, ready, wave, -1 - number)
                    number = queue.next_empty(segments, number + queue.ctas)
                put_work(tiles, ready, wave, -1 - NO_WORK)

    @T.macro
    def load_gates(g_bits, beta_bits, inside, row, hv, rest):
        extern(
            "load_pairs",
            g_bits.data,
            beta_bits.data,
            T.access_ptr(inside.g[0, 0], "r"),
            T.access_ptr(inside.beta[0, 0], "r"),
            inside.activations,
            T.Cast("int64", row) * H_v + hv,
            H_v,
            rest,
        )

    @T.macro
    def make_tables(queue, tiles, ready, first, ring: T.Ref, extent, early, segments, memory, inside, g_cumsum, scale):
        """The gates warp: the chunks' tables. It prefetches the next chunk's gates. After the last chunk it stores a
        length of -1."""
        head_gate = T.alloc_local([2], "float32")
        g_bits = T.alloc_local([2], "uint32")
        beta_bits = T.alloc_local([2], "uint32")
        g_pair = T.alloc_local([2], "float32")
        beta_pair = T.alloc_local([2], "float32")
        number = T.alloc_var("int32", init=first)
        wave = T.alloc_var("int32", init=0)
        ends = T.alloc_var("int32", init=WARPGROUPS)  # each warpgroup asks for one chunk after the last
        while number != NO_WORK:
            work = queue.at(number)
            read_extent(extent, segments, memory, work, is_unknown(early, queue, number))
            row = T.alloc_var("int32", init=extent[0])
            rest = T.alloc_var("int32", init=extent[1])
            length = segment_tokens(segments, work)
            load_gates(g_bits, beta_bits, inside, row, work.hv, rest)
            extern(
                "load_head_gate",
                head_gate.data,
                T.access_ptr(inside.A_log[0], "r"),
                T.access_ptr(inside.dt_bias[0], "r"),
                inside.activations,
                work.hv,
            )
            while rest > 0:
                tile = stage(ring)
                s = tile.index
                extern(
                    "activate_pairs",
                    g_pair.data,
                    beta_pair.data,
                    g_bits.data,
                    beta_bits.data,
                    head_gate[0],
                    head_gate[1],
                    inside.activations,
                    rest,
                )
                load_gates(g_bits, beta_bits, inside, row + C, work.hv, rest - C)
                tile.wait_until_free(ready.released)
                tiles.lengths[s] = T.min(rest, C)
                if low_level:
                    tiles.rows_of_A[s] = T.Select((work.tile == 0) & in_segment(rest, length), row, NO_ROW)
                    tiles.heads_of_A[s] = work.hv
                extern(
                    "make_table",
                    T.access_ptr(tiles.gates[s, 0, 0], "w"),
                    g_pair.data,
                    beta_pair.data,
                    T.float32(1) if normalize else scale,
                )
                tile.arrive(ready.gated)
                if T.bool(low_level) & (work.tile == 0) & in_segment(rest, length):
                    extern(
                        "store_cumsum",
                        T.access_ptr(g_cumsum[row, work.hv], "w"),
                        T.access_ptr(tiles.gates[s, 0, 0], "r"),
                        H_v,
                        rest,
                    )
                ring = next_chunk(ring)
                row += C
                rest -= C
            take_next(tiles, ready, wave, number)
            if number < 0:
                while ends > 0:
                    tile = stage(ring)
                    tile.wait_until_free(ready.released)
                    tiles.lengths[tile.index] = -1
                    if low_level:
                        tiles.rows_of_A[tile.index] = NO_ROW
                    tile.arrive(ready.gated)
                    ring = next_chunk(ring)
                    ends -= 1
                number = -1 - number

    @T.macro
    def store(queue, tiles, ready, first, w, ring: T.Ref, segments, memory, outputs):
        """The epilogue warps: O, and with low_level each A that the warpgroup has computed, in between."""
        if low_level:
            stores = T.alloc_var("int32", init=0)
        number = T.alloc_var("int32", init=first)
        wave = T.alloc_var("int32", init=0)
        while number != NO_WORK:
            work = queue.at(number)
            extra = extra_tokens(memory, segments, work)
            length = segment_tokens(segments, work)
            row = T.alloc_var("int32", init=segments[work.segment, SegmentColumn.ROW] - extra)
            rest = T.alloc_var("int32", init=length + extra)
            while rest > 0:
                if low_level:
                    # A of the next chunk comes before O of each chunk that the other warpgroup follows with matrices.
                    # A of chunk w comes first of all.
                    computes_matrices = value_stage(ring).index == w
                    if (stores == 0) | T.Not(computes_matrices):
                        Stage(w, stores % 2).wait_for(ready.staged)
                        s = stage(T.if_then_else(computes_matrices, ring, next_chunk(ring))).index
                        A_row = T.alloc_var("int32", init=tiles.rows_of_A[s])
                        if A_row != NO_ROW:
                            hv = T.alloc_var("int32", init=tiles.heads_of_A[s])
                            store_rows(tiles.O, w, outputs.A, A_row, hv, 0, tiles.lengths[s])
                        T.barrier_arrive(ready.stored[w])
                        stores += 1
                Stage(w, stores % 2 if low_level else value_stage(ring).index).wait_for(ready.staged)
                if in_segment(rest, length):
                    store_rows(tiles.O, w, outputs.o, row, work.hv, work.tile * V + w * ROWS, rest)
                T.barrier_arrive(ready.stored[w])
                if low_level:
                    stores += 1
                ring = next_chunk(ring)
                row += C
                rest -= C
            take_next(tiles, ready, wave, number)
            number = number_of(number)

    @T.macro
    def clear_rows(row, length, outputs):
        """Writes zeros to rows of the outputs. One warp calls it."""
        values = T.Cast("int64", length) * H_v
        extern("clear_bytes", T.access_ptr(outputs.o[row, 0, 0], "w"), values * (2 * sizes.value_dim))
        # is_never keeps A and g_cumsum among the parameters of all instances.
        if T.bool(low_level) | is_never(sizes):
            extern("clear_bytes", T.access_ptr(outputs.A[row, 0, 0], "w"), values * (2 * C))
            gates = length * T.Cast("int32", H_v)
            for i in T.serial(T.ceildiv(gates, 32)):
                number = T.alloc_var("int32", init=i * 32 + T.get_thread_binding() % 32)
                if number < gates:
                    token = T.truncdiv(number, T.Cast("int32", H_v))
                    outputs.g_cumsum[row + token, T.truncmod(number, T.Cast("int32", H_v))] = 0

    @T.macro
    def clear_padding(queue, warp, chunks, outputs):
        """Writes zeros to the outputs' rows that no sequence with a slot covers. One warp of each CTA does."""
        slots = T.alloc_var(
            "int32", init=T.truncdiv(T.Cast("int32", sizes.chunk_slots) - queue.cta + queue.ctas - 1, queue.ctas)
        )
        for i in T.serial(T.if_then_else(warp == EPILOGUE, slots, 0)):
            slot = T.alloc_var("int32", init=queue.cta + i * queue.ctas)
            if chunks[slot, ChunkColumn.SEQUENCE] == PADDING:
                row = chunks[slot, ChunkColumn.ROW]
                clear_rows(row, chunks[slot, ChunkColumn.LENGTH], outputs)

    @T.macro
    def clear_unplanned_padding(queue, warp, segment, outputs):
        """The same without a plan. A CTA takes some of the rows after the last sequence. The first CTA of a sequence
        without a slot takes the rows of that sequence."""
        covered = segment[UnplannedSegment.COVERED]
        slots = T.alloc_var("int32", init=T.truncdiv(T.Cast("int32", sizes.tokens) - covered + (C - 1), C))
        for i in T.serial(
            T.if_then_else(warp == EPILOGUE, T.truncdiv(slots - queue.cta + queue.ctas - 1, queue.ctas), 0)
        ):
            row = T.alloc_var("int32", init=covered + (queue.cta + i * queue.ctas) * C)
            clear_rows(row, T.min(T.Cast("int32", sizes.tokens) - row, C), outputs)
        work = queue.at(queue.cta)
        begin = T.alloc_var("int32", init=segment[SegmentColumn.ROW] + segment[SegmentColumn.LENGTH])
        if (warp == EPILOGUE) & (work.hv == 0) & (work.tile == 0) & (begin < segment[UnplannedSegment.END]):
            clear_rows(begin, segment[UnplannedSegment.END] - begin, outputs)

    @T.prim_func
    def main(
        sizes: sizes,
        tokens: Tokens(sizes, dtype),
        gates: Gates(sizes),
        sequences: Sequences(),
        slots: Slots(),
        presence: StatePresence(sizes),
        plan: Plan(sizes),
        states: States(sizes),
        kept: Checkpoints(sizes),
        outputs: Outputs(sizes, dtype),
        ctas: T.int32,
        value_tiles: T.int32,  # tiles of V rows
        early: T.int32,
        scale: T.float32,
        memory: Memory(sizes),  # with cut
        maps: Maps(sizes, dtype, K),  # states, with cut
    ):
        with T.Kernel(ctas, threads=TILE.threads, prelude=PRELUDE + prelude_of_scales(dtype)) as cta:
            tiles = make_tiles()
            ready = make_barriers()
            queue = Queue(cta, ctas, plan.drawn, sizes.segment_slots, sizes.H_v, value_tiles)
            if not planned:
                if T.get_thread_binding() < 32:
                    segment = T.truncdiv(cta, T.Cast("int32", sizes.H_v) * value_tiles)
                    row = T.access_ptr(tiles.row_of_segment[0], "w")
                    records = (sequences.record(sizes), slots.record(), presence.record(slots))
                    extern("find_unplanned_segment", row, segment, *records)
                T.sync_threads()
            segments = plan.segments if planned else OnlySegment(tiles.row_of_segment)
            if T.get_thread_binding() < CONSUMERS:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                of_states = (states, kept, plan.checkpoints, maps.states)
                compute(queue, tiles, ready, segments, memory.memory, *of_states, scale)
            else:
                T.dec_max_nreg(PRODUCER_REGISTERS)
                warp = T.alloc_var("int32", init=T.truncdiv(T.get_thread_binding() - CONSUMERS, 32))
                ring = T.alloc_var("int32", init=0)  # the warp's own
                extent = T.alloc_local([2], "int32")
                if planned:
                    if (early != 0) & ((warp == PRODUCER) | (warp == GATES)):
                        segment = T.truncdiv(cta, T.Cast("int32", sizes.H_v) * value_tiles)
                        extern("find_segment", extent.data, segment, sequences.record(sizes), slots.record())
                    else:
                        T.pdl_sync()
                # A role begins with the CTA's own work tile. For the other warps its loop is empty.
                of_producer = T.if_then_else(warp == PRODUCER, cta, NO_WORK)
                load(queue, tiles, ready, of_producer, ring, extent, early, segments, memory.memory, tokens)
                of_gates = T.if_then_else(warp == GATES, cta, NO_WORK)
                of_tables = (segments, memory.memory, gates, outputs.g_cumsum, scale)
                make_tables(queue, tiles, ready, of_gates, ring, extent, early, *of_tables)
                w = T.alloc_var("int32", init=warp - EPILOGUE)
                of_epilogue = T.if_then_else((w >= 0) & (w < WARPGROUPS), cta, NO_WORK)
                store(queue, tiles, ready, of_epilogue, w, ring, segments, memory.memory, outputs)
                if planned:
                    clear_padding(queue, warp, plan.chunks, outputs)
                else:
                    clear_unplanned_padding(queue, warp, tiles.row_of_segment, outputs)

    return main
