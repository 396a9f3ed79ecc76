"""The plan: cu_seqlens -> tables of sequences, chunks and segments, on the device. Their columns are in layout.py.

The host never reads cu_seqlens, so a captured CUDA graph may be replayed after they change in place. Whatever they
hold, the tables describe disjoint runs of rows inside [0, tokens): the first offset is taken as 0, later ones are
clipped to [0, tokens] and replaced by their running maximum.

    sequences [N, 6]
    chunks    [chunk_slots, 3]     the sequences' chunks, then chunks of the padding rows, with sequence PADDING, then
                                   unused slots, with PADDING and 0 tokens
    segments  [segment_slots, 8]   every sequence, even an empty one, has at least one; longer ones are cut after every
                                   `segment_chunks` chunks, unless that is 0 or the batch is not long. A sequence's
                                   segments follow one another, and of each PLAN_STEP sequences the longest come first.
                                   With cu_seqlens those without a slot come last, because they have no work. Unused
                                   slots have 0 tokens, no flags and no states. Written if segment_slots > 0
    map_segments [map_slots, 8]    the same, but the sequences mapped_0 and mapped_1 lack the flag `dropped`: kernels
                                   that leave out the map of a sequence's last, or first, segment then compute it.
                                   Written if map_slots > 0, which then is segment_slots
    checkpoints [chunk_slots]      the slot of the state after each chunk, or NO_STATE. Written if checkpoint_every > 0.
                                   A new chunk begins after every checkpoint_every tokens (plan/runs.cuh); if that is no
                                   multiple of C, no sequence is cut
    needs_maps [N, H_v]            zeros, for segment_memory. Written if has_memory
    is_long [1]                    whether the batch is long: 0 if there are cu_seqlens, `cut_above` is not 0, and no
                                   sequence has more chunks. For chunk_forward
    drawn [1]                      0, for chunk_forward and fused_forward

plan.cpp launches one CTA, once per call. The next kernel does not wait for all of the tables: its first CTAs find their
rows themselves (plan/plan.cuh, which has the arithmetic of both). Without cu_seqlens every sequence
has `uniform_length` tokens.

A sequence's states are in the slot with the sequence's number or, on a pool, in the slot that state_indices give. Its
first state may be in another slot, that of first_indices. On a pool a sequence without a slot has padding chunks, one
segment without tokens, and no states.

A segment's states are in these slots if they are the sequence's first or last, and else FROM_SCAN. On a pool a sequence
may write its first state's slot, at its end or at a checkpoint. If the sequence is cut, a later segment may write the
slot before the first segment reads it. So the first segment of a cut sequence then takes its state from the scan,
which copies it (FROM_SCAN).
"""

from types import SimpleNamespace

import tilelang.language as T

from kernels_tl.bundles import CheckpointTable, Cuts, Memory, Plan, Sequences, Sizes, Slots, StatePresence
from kernels_tl.config import CHUNK_PLAN
from kernels_tl.core.common import PASS_CONFIGS as PASS_CONFIGS, C, extern
from kernels_tl.layout import (
    FROM_SCAN,
    NO_STATE,
    PADDING,
    WHOLE_SEQUENCE,
    SegmentColumn,
    SegmentFlag,
    SequenceColumn,
)

PRELUDE = """
#include "plan/block_scan.cuh"
#include "plan/runs.cuh"
"""

THREADS = CHUNK_PLAN.threads  # a step takes one sequence for each thread
WHOLE = WHOLE_SEQUENCE // C  # chunks of a segment where no sequence is cut


def offset_of(sequences, n):
    return extern("offset_of", sequences.offsets.record(), n, returns="int64")


def count_chunks(length, run):
    return extern("chunks_in_runs", length, run, returns="int32")


@T.macro
def has_long_sequence(sequences, N, cut_above):
    """Whether the batch is long, the same in all threads."""
    is_long = T.alloc_var("int32", init=T.Select(sequences.offsets.exists & (cut_above > 0), 0, 1))
    if is_long == 0:
        for step in T.serial(T.ceildiv(N, THREADS)):
            n = T.min(step * THREADS + T.get_thread_binding(), N - 1)
            # Invalid offsets may give any difference. Both choices are safe.
            if offset_of(sequences, n + 1) - offset_of(sequences, n) > T.Cast("int64", cut_above) * C:
                is_long = 1
        is_long = T.Select(T.call_extern("int32", "__syncthreads_or", is_long) != 0, 1, 0)
    return is_long


@T.macro
def write_chunks(plan, of, tx, n0, chunks_before, total, to):
    """Writes the rows of a step's chunks. Each thread takes chunks, and finds their sequences."""
    low = T.alloc_var("int32")
    for i in T.serial(T.ceildiv(total - tx, THREADS)):
        # low = the number of sequences whose chunks all come before this one.
        low = 0
        for bit in T.unroll(THREADS.bit_length() - 1):
            if of.sums[low + (THREADS >> (bit + 1)) - 1] <= i * THREADS + tx:
                low += THREADS >> (bit + 1)
        chunk = i * THREADS + tx - (of.sums[low] - of.counts[low])
        extern(
            "put_chunk_of_runs",
            T.access_ptr(plan.chunks[chunks_before + i * THREADS + tx, 0], "w"),
            of.begins[low],
            of.ends[low] - of.begins[low],
            chunk,
            T.Select(of.slots[low] == NO_STATE, PADDING, n0 + low),
            to.every,
        )
        if to.every > 0:
            checkpoint = T.alloc_var("int32", init=NO_STATE)
            if of.slots[low] != NO_STATE:
                checkpoint = extern(
                    "checkpoint_slot_of_runs",
                    to.indices,
                    to.null_index,
                    to.slots,
                    to.every,
                    of.ends[low] - of.begins[low],
                    chunk,
                    n0 + low,
                    of.rows[low],
                    returns="int32",
                )
            plan.checkpoints[chunks_before + i * THREADS + tx] = checkpoint


@T.macro
def write_segments(segments, n, slot, begin, end, first, parts, size, states, dropped=0):
    """Writes the rows of a sequence's segments. One thread calls it."""
    for i in T.serial(parts):
        if slot + i < segments.shape[0]:
            segments[slot + i, SegmentColumn.ROW] = begin + i * size * C
            segments[slot + i, SegmentColumn.LENGTH] = T.min(end - begin - i * size * C, size * C)
            segments[slot + i, SegmentColumn.CHUNK] = first + i * size
            segments[slot + i, SegmentColumn.SEQUENCE] = n
            segments[slot + i, SegmentColumn.FLAGS] = T.Select(
                (i == 0) & (dropped != SegmentFlag.FIRST), SegmentFlag.FIRST, 0
            ) + T.Select((i == parts - 1) & (dropped != SegmentFlag.LAST), SegmentFlag.LAST, 0)
            is_scanned = (i > 0) | ((states.on_pool != 0) & (parts > 1) & (states.initial != NO_STATE))
            segments[slot + i, SegmentColumn.INITIAL] = T.Select(is_scanned, FROM_SCAN, states.initial)
            segments[slot + i, SegmentColumn.FINAL] = T.Select(i == parts - 1, states.final, FROM_SCAN)
            until = T.alloc_var("int32", init=WHOLE_SEQUENCE)
            if states.checkpoint_every > 0:
                until = states.checkpoint_every - T.truncmod(i * size * C, states.checkpoint_every)
            segments[slot + i, SegmentColumn.UNTIL] = until


@T.macro
def clear_needs(memory, N, H_v, tx):
    """Zeros in needs_maps, for segment_memory."""
    if memory.has_memory != 0:
        for step in T.serial(T.ceildiv(N * H_v, THREADS)):
            i = T.alloc_var("int32", init=step * THREADS + tx)
            if i < N * H_v:
                memory.needs_maps[T.truncdiv(i, T.Cast("int32", H_v)), T.truncmod(i, T.Cast("int32", H_v))] = 0


@T.macro
def write_unused_segments(segments, segments_before, tx):
    for step in T.serial(T.ceildiv(segments.shape[0] - segments_before, THREADS)):
        slot = segments_before + step * THREADS + tx
        if slot < segments.shape[0]:
            for i in T.unroll(SegmentColumn.COUNT):
                segments[slot, i] = 0
            segments[slot, SegmentColumn.INITIAL] = NO_STATE
            segments[slot, SegmentColumn.FINAL] = NO_STATE
            segments[slot, SegmentColumn.UNTIL] = WHOLE_SEQUENCE


@T.macro
def write_unused_chunks(chunks, chunk_slots, chunks_before, tx, begin, tokens):
    """Writes the rows after the last sequence's chunks: padding and unused slots."""
    for step in T.serial(T.ceildiv(chunk_slots - chunks_before, THREADS)):
        chunk = step * THREADS + tx
        if chunks_before + chunk < chunk_slots:
            extern("put_padding", T.access_ptr(chunks[chunks_before + chunk, 0], "w"), begin, tokens, chunk)


def chunk_plan():
    sizes = Sizes()
    N = sizes.N

    @T.prim_func
    def main(
        sizes: sizes,
        sequences: Sequences(),
        slots: Slots(),
        presence: StatePresence(sizes),
        to: CheckpointTable(),
        cuts: Cuts(),
        plan: Plan(sizes),
        memory: Memory(sizes),
        checkpoint_every: T.int32,  # tokens
    ):
        with T.Kernel(1, threads=THREADS, prelude=PRELUDE):
            T.pdl_trigger()
            # One entry for each sequence of this step. sums[i] = counts[0] + ... + counts[i].
            begins = T.alloc_shared([THREADS], "int32")
            ends = T.alloc_shared([THREADS], "int32")
            counts = T.alloc_shared([THREADS], "int32")  # chunks
            ranks = T.alloc_shared([THREADS], "int32")  # chunks, by which the table of segments is sorted
            sums = T.alloc_shared([THREADS], "int32")
            parts = T.alloc_shared([THREADS], "int32")  # segments
            owned = T.alloc_shared([THREADS], "int32")  # slots of the sequences' states
            rows = T.alloc_shared([THREADS], "int32")  # number of checkpoints of all earlier sequences
            tx = T.get_thread_binding()
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            part = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            state_slot = T.alloc_var("int32")
            initial = T.alloc_var("int32")
            rows_before = T.alloc_var("int32", init=0)
            tokens_before = T.alloc_var("int32", init=0)  # tokens of earlier steps
            chunks_before = T.alloc_var("int32", init=0)
            segments_before = T.alloc_var("int32", init=0)
            is_long = has_long_sequence(sequences, N, cuts.cut_above)
            size = T.alloc_var("int32", init=WHOLE)  # chunks of a segment
            if (is_long != 0) & (cuts.segment_chunks > 0):
                size = cuts.segment_chunks
            clear_needs(memory, N, sizes.H_v, tx)
            if tx == 0:
                plan.is_long[0] = is_long
                plan.drawn[0] = 0

            for step in T.serial(T.ceildiv(N, THREADS)):
                n = step * THREADS + tx
                end = tokens_before
                if n < N:
                    if sequences.offsets.exists:
                        offset = offset_of(sequences, n + 1)
                        end = extern("clip_offset", offset, tokens_before, sizes.tokens, returns="int32")
                    else:
                        end = (n + 1) * sequences.uniform_length
                end = extern(f"running_maximum<{THREADS}>", end, returns="int32")
                ends[tx] = end
                T.sync_threads()
                begin = tokens_before
                if tx > 0:
                    begin = ends[tx - 1]
                count = count_chunks(end - begin, checkpoint_every)
                part = 0
                state_slot = NO_STATE
                initial = NO_STATE
                if n < N:
                    state_slot = extern("slot_of", slots.record(), n, returns="int32")
                    part = T.Select(state_slot == NO_STATE, 1, T.max(T.truncdiv(count + size - 1, size), 1))
                    initial = extern("first_state_slot", presence.record(slots), state_slot, n, returns="int32")
                up_to = T.alloc_var("int32", init=extern(f"running_sum<{THREADS}>", count, returns="int32"))
                begins[tx] = begin
                counts[tx] = count
                ranks[tx] = T.Select((state_slot == NO_STATE) & sequences.offsets.exists, 0, count)
                sums[tx] = up_to
                parts[tx] = part
                owned[tx] = state_slot
                T.sync_threads()
                if checkpoint_every > 0:
                    kept = T.alloc_var("int32", init=T.truncdiv(end - begin, checkpoint_every))
                    kept_up_to = T.alloc_var("int32", init=extern(f"running_sum<{THREADS}>", kept, returns="int32"))
                    rows[tx] = rows_before + kept_up_to - kept
                    T.sync_threads()
                    rows_before = rows[THREADS - 1] + T.truncdiv(
                        ends[THREADS - 1] - begins[THREADS - 1], checkpoint_every
                    )

                total = T.alloc_var("int32", init=sums[THREADS - 1])
                of = SimpleNamespace(begins=begins, ends=ends, counts=counts, sums=sums, slots=owned, rows=rows)
                kept_in = SimpleNamespace(
                    indices=to.checkpoint_indices.record(),
                    null_index=slots.null_index,
                    slots=to.checkpoint_states,
                    every=checkpoint_every,
                )
                write_chunks(plan, of, tx, step * THREADS, chunks_before, total, kept_in)
                slot = segments_before
                if sizes.segment_slots > 0:
                    for i in T.serial(T.min(N - step * THREADS, THREADS)):
                        if extern("comes_first", ranks[i], i, ranks[tx], tx, returns="bool"):
                            slot += parts[i]
                        segments_before += parts[i]
                if n < N:
                    first = T.alloc_var("int32", init=chunks_before + up_to - count)
                    plan.sequences[n, SequenceColumn.ROW] = begin
                    plan.sequences[n, SequenceColumn.LENGTH] = end - begin
                    plan.sequences[n, SequenceColumn.CHUNK] = first
                    plan.sequences[n, SequenceColumn.SEGMENT] = slot
                    final = T.alloc_var(
                        "int32",
                        init=extern(
                            "last_state_slot",
                            presence.record(slots),
                            state_slot,
                            initial,
                            begin == end,
                            returns="int32",
                        ),
                    )
                    plan.sequences[n, SequenceColumn.INITIAL] = initial
                    plan.sequences[n, SequenceColumn.FINAL] = final
                    segments_end = T.Select(state_slot == NO_STATE, begin, end)
                    states = SimpleNamespace(
                        initial=initial, final=final, on_pool=presence.on_pool, checkpoint_every=checkpoint_every
                    )
                    write_segments(plan.segments, n, slot, begin, segments_end, first, part, size, states)
                    if cuts.map_slots > 0:
                        is_mapped = (n == cuts.mapped_0) | (n == cuts.mapped_1)
                        without = T.alloc_var("int32", init=T.Select(is_mapped, cuts.dropped, 0))
                        write_segments(
                            cuts.map_segments, n, slot, begin, segments_end, first, part, size, states, without
                        )
                tokens_before = ends[THREADS - 1]
                chunks_before += total
                T.sync_threads()

            write_unused_segments(plan.segments, segments_before, tx)
            write_unused_segments(cuts.map_segments, segments_before, tx)
            write_unused_chunks(plan.chunks, sizes.chunk_slots, chunks_before, tx, tokens_before, sizes.tokens)

    return main
