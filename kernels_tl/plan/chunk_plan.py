"""The plan: cu_seqlens -> one table of sequences and one of chunks, on the device.

The host never reads cu_seqlens, so a captured CUDA graph may be replayed after they change in place.  Whatever they
hold, the tables describe disjoint runs of rows inside [0, rows): the first offset is taken as 0, later ones are clipped
to [0, rows] and replaced by their running maximum.

    sequences [N, 4]   first row, tokens, first chunk slot, first segment slot
    chunks    [chunk_slots, 3]  first row, tokens, sequence.  Behind the sequences' chunks come those that cover the padding rows
                       (sequence = PADDING), then unused slots (PADDING of 0 tokens)
    segments  [segment_slots, 5]  first row, tokens, first chunk slot, sequence, flags.  Every sequence, even an empty one, has at
                       least one; longer ones are cut after every `segment_chunks` chunks, unless that is 0 or (with
                       cu_seqlens) none has more than `cut_above` chunks.  A sequence's segments follow one another,
                       and of each 256 sequences the longest come first.  Unused slots have 0 tokens and no flags.
                       Written if segment_slots > 0

Launched once per call, one CTA.  The kernel behind it does not wait for all of this (device/early_plan.cuh has the same
arithmetic by warps).  Without cu_seqlens (has_offsets = 0) every sequence has `uniform_length` tokens.
"""

import tilelang.language as T

from kernels_tl.common import (
    PASS_CONFIGS as PASS_CONFIGS,
    C,
    dims,
    extern,
)
from kernels_tl.layout import (
    PADDING,
    ChunkColumn,
    SegmentColumn,
    SegmentFlag,
    SequenceColumn,
)

PRELUDE = """
#include "device/block_scan.cuh"
"""

THREADS = 256  # sequences planned per step


def chunk_plan(offset_dtype):
    N, chunk_slots, segment_slots, offsets_size = dims("N", "chunk_slots", "segment_slots", "offsets_size")

    @T.prim_func
    def main(
        offsets: T.Tensor([offsets_size], offset_dtype),
        sequences: T.Tensor([N, SequenceColumn.COUNT], "int32"),
        chunks: T.Tensor([chunk_slots, ChunkColumn.COUNT], "int32"),
        segments: T.Tensor([segment_slots, SegmentColumn.COUNT], "int32"),
        rows: T.int32,
        has_offsets: T.int32,
        uniform_length: T.int32,
        segment_chunks: T.int32,
        cut_above: T.int32,
    ):
        with T.Kernel(1, threads=THREADS, prelude=PRELUDE):
            T.pdl_trigger()
            # Of this step's sequences; sums are those of counts, up to the sequence itself.
            begins = T.alloc_shared([THREADS], "int32")
            ends = T.alloc_shared([THREADS], "int32")
            counts = T.alloc_shared([THREADS], "int32")  # chunks
            sums = T.alloc_shared([THREADS], "int32")
            parts = T.alloc_shared([THREADS], "int32")  # segments
            tx = T.get_thread_binding()
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            up_to = T.alloc_var("int32")
            rows_before = T.alloc_var("int32", init=0)  # this step
            chunks_before = T.alloc_var("int32", init=0)
            segments_before = T.alloc_var("int32", init=0)
            part = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            low = T.alloc_var("int32")
            first = T.alloc_var("int32")
            size = T.alloc_var("int32", init=0x7FFFFFFF // C)
            if segment_chunks > 0:
                longer = T.alloc_var("int32", init=T.Select((has_offsets != 0) & (cut_above > 0), 0, 1))
                if longer == 0:
                    for step in T.serial(T.ceildiv(N, THREADS)):
                        n = T.min(step * THREADS + tx, N - 1)
                        # Of offsets that are none the difference may be anything, and so may then the choice.
                        if offsets[n + 1] - offsets[n] > T.Cast(offset_dtype, cut_above) * C:
                            longer = 1
                if T.call_extern("int32", "__syncthreads_or", longer) != 0:
                    size = segment_chunks

            for step in T.serial(T.ceildiv(N, THREADS)):
                n = step * THREADS + tx
                end = rows_before
                if n < N:
                    if has_offsets != 0:
                        # Clipped in the offsets' own width: an int64 may hold anything.
                        lowest = T.Cast(offset_dtype, rows_before)
                        highest = T.Cast(offset_dtype, rows)
                        end = T.Cast("int32", T.max(T.min(offsets[n + 1], highest), lowest))
                    else:
                        end = (n + 1) * uniform_length
                end = extern(f"running_maximum<{THREADS}>", end, returns="int32")
                ends[tx] = end
                T.sync_threads()
                begin = rows_before
                if tx > 0:
                    begin = ends[tx - 1]
                count = T.truncdiv(end - begin + (C - 1), C)
                part = 0
                if n < N:
                    part = T.max(T.truncdiv(count + size - 1, size), 1)
                up_to = extern(f"running_sum<{THREADS}>", count, returns="int32")
                begins[tx] = begin
                counts[tx] = count
                sums[tx] = up_to
                parts[tx] = part
                T.sync_threads()

                total = T.alloc_var("int32", init=sums[THREADS - 1])
                for i in T.serial(T.ceildiv(total - tx, THREADS)):
                    # Behind as many sequences as have all their chunks before this one.
                    low = 0
                    for bit in T.unroll(THREADS.bit_length() - 1):
                        if sums[low + (THREADS >> (bit + 1)) - 1] <= i * THREADS + tx:
                            low += THREADS >> (bit + 1)
                    first = begins[low] + (i * THREADS + tx - (sums[low] - counts[low])) * C
                    slot = chunks_before + i * THREADS + tx
                    chunks[slot, ChunkColumn.ROW] = first
                    chunks[slot, ChunkColumn.LENGTH] = T.min(ends[low] - first, C)
                    chunks[slot, ChunkColumn.SEQUENCE] = step * THREADS + low
                first = chunks_before + up_to - count
                slot = segments_before
                if segment_slots > 0:
                    for i in T.serial(T.min(N - step * THREADS, THREADS)):
                        # The longest first, so that no long one is left for the end.
                        slot += T.Select((counts[i] > count) | ((counts[i] == count) & (i < tx)), parts[i], 0)
                        segments_before += parts[i]
                if n < N:
                    sequences[n, SequenceColumn.ROW] = begin
                    sequences[n, SequenceColumn.LENGTH] = end - begin
                    sequences[n, SequenceColumn.CHUNK] = first
                    sequences[n, SequenceColumn.SEGMENT] = slot
                    for i in T.serial(part):
                        if slot + i < segment_slots:
                            segments[slot + i, SegmentColumn.ROW] = begin + i * size * C
                            segments[slot + i, SegmentColumn.LENGTH] = T.min(end - begin - i * size * C, size * C)
                            segments[slot + i, SegmentColumn.CHUNK] = first + i * size
                            segments[slot + i, SegmentColumn.SEQUENCE] = n
                            segments[slot + i, SegmentColumn.FLAGS] = T.Select(i == 0, SegmentFlag.FIRST, 0) + T.Select(
                                i == part - 1, SegmentFlag.LAST, 0
                            )
                rows_before = ends[THREADS - 1]
                chunks_before += total
                T.sync_threads()

            for step in T.serial(T.ceildiv(segment_slots - segments_before, THREADS)):
                slot = segments_before + step * THREADS + tx
                if slot < segment_slots:
                    for i in T.unroll(SegmentColumn.COUNT):
                        segments[slot, i] = 0

            for step in T.serial(T.ceildiv(chunk_slots - chunks_before, THREADS)):
                slot = chunks_before + step * THREADS + tx
                if slot < chunk_slots:
                    first = rows_before + (slot - chunks_before) * C
                    chunks[slot, ChunkColumn.ROW] = T.min(first, rows)
                    chunks[slot, ChunkColumn.LENGTH] = T.max(T.min(rows - first, C), 0)
                    chunks[slot, ChunkColumn.SEQUENCE] = PADDING

    return main
