"""The plan: cu_seqlens -> one table of sequences and one of chunks, on the device.

The host never reads cu_seqlens, so a captured CUDA graph may be replayed after they change in place.  Whatever they
hold, the tables describe disjoint runs of rows inside [0, rows): the first offset is taken as 0, later ones are clipped
to [0, rows] and replaced by their running maximum.

    sequences [N, 4]   first row, tokens, first chunk slot, first segment slot
    chunks    [NT, 3]  first row, tokens, sequence.  Behind the sequences' chunks come those that cover the padding rows
                       (sequence = PADDING), then unused slots (PADDING of 0 tokens)
    segments  [NS, 5]  first row, tokens, first chunk slot, sequence, flags.  Every sequence, even an empty one, has at
                       least one; longer ones are cut after every `segment_chunks` chunks, unless that is 0 or (with
                       cu_seqlens) none has more than `cut_above` chunks.  A sequence's segments follow one another,
                       and of each 256 sequences the longest come first.  Unused slots have 0 tokens and no flags.
                       Written if NS > 0

Launched once per call, one CTA.  Without cu_seqlens (has_offsets = 0) every sequence has `uniform_length` tokens.
"""

import tilelang.language as T

from kernels_tl.common import (
    CHUNK_COLUMNS,
    CHUNK_LENGTH,
    CHUNK_ROW,
    CHUNK_SEQ,
    FIRST,
    LAST,
    PADDING,
    PASS_CONFIGS as PASS_CONFIGS,
    SEGMENT_CHUNK,
    SEGMENT_COLUMNS,
    SEGMENT_FLAGS,
    SEGMENT_LENGTH,
    SEGMENT_ROW,
    SEGMENT_SEQ,
    SEQ_CHUNK,
    SEQ_COLUMNS,
    SEQ_LENGTH,
    SEQ_ROW,
    SEQ_SEGMENT,
    C,
    dims,
)

THREADS = 256  # sequences planned per step; one warp does the scans, so a wider step adds latency when they are few


def chunk_plan(offset_dtype):
    N, NT, NS, offsets_size = dims("N", "NT", "NS", "offsets_size")

    @T.prim_func
    def main(
        offsets: T.Tensor([offsets_size], offset_dtype),
        sequences: T.Tensor([N, SEQ_COLUMNS], "int32"),
        chunks: T.Tensor([NT, CHUNK_COLUMNS], "int32"),
        segments: T.Tensor([NS, SEGMENT_COLUMNS], "int32"),
        rows: T.int32,
        has_offsets: T.int32,
        uniform_length: T.int32,
        segment_chunks: T.int32,
        cut_above: T.int32,
    ):
        with T.Kernel(1, threads=THREADS):
            T.pdl_trigger()
            ends = T.alloc_shared([THREADS], "int32")  # of this step's sequences, a running maximum
            counts = T.alloc_shared([THREADS], "int32")  # of their chunks, a running sum
            parts = T.alloc_shared([THREADS], "int32")  # of their segments, a running sum
            chunks_of = T.alloc_shared([THREADS], "int32")
            segments_of = T.alloc_shared([THREADS], "int32")
            tx = T.get_thread_binding()
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            count = T.alloc_var("int32")
            rows_before = T.alloc_var("int32", init=0)  # this step
            chunks_before = T.alloc_var("int32", init=0)
            segments_before = T.alloc_var("int32", init=0)
            part = T.alloc_var("int32")
            slot = T.alloc_var("int32")
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
                ends[tx] = end
                T.cummax(ends, dim=0)
                begin = rows_before
                if tx > 0:
                    begin = ends[tx - 1]
                end = ends[tx]
                count = T.truncdiv(end - begin + (C - 1), C)
                counts[tx] = count
                chunks_of[tx] = count
                part = 0
                if n < N:
                    part = T.max(T.truncdiv(count + size - 1, size), 1)
                parts[tx] = part
                segments_of[tx] = part
                T.cumsum(counts, dim=0)
                T.cumsum(parts, dim=0)
                if n < N:
                    sequences[n, SEQ_ROW] = begin
                    sequences[n, SEQ_LENGTH] = end - begin
                    sequences[n, SEQ_CHUNK] = chunks_before + counts[tx] - count
                    slot = segments_before
                    if NS > 0:  # the longest first, so that no long one is left for the end
                        for i in T.serial(T.min(N - step * THREADS, THREADS)):
                            slot += T.Select(
                                (chunks_of[i] > count) | ((chunks_of[i] == count) & (i < tx)), segments_of[i], 0
                            )
                    sequences[n, SEQ_SEGMENT] = slot
                    for i in T.serial(part):
                        if slot + i < NS:
                            segments[slot + i, SEGMENT_ROW] = begin + i * size * C
                            segments[slot + i, SEGMENT_LENGTH] = T.min(end - begin - i * size * C, size * C)
                            segments[slot + i, SEGMENT_CHUNK] = chunks_before + counts[tx] - count + i * size
                            segments[slot + i, SEGMENT_SEQ] = n
                            segments[slot + i, SEGMENT_FLAGS] = T.Select(i == 0, FIRST, 0) + T.Select(
                                i == part - 1, LAST, 0
                            )
                rows_before = ends[THREADS - 1]
                segments_before = segments_before + parts[THREADS - 1]
                chunks_before = chunks_before + counts[THREADS - 1]
                T.sync_threads()

            for step in T.serial(T.ceildiv(NS - segments_before, THREADS)):
                slot = segments_before + step * THREADS + tx
                if slot < NS:
                    for i in T.unroll(SEGMENT_COLUMNS):
                        segments[slot, i] = 0

            low = T.alloc_var("int32")
            high = T.alloc_var("int32")
            first = T.alloc_var("int32")
            for step in T.serial(T.ceildiv(NT, THREADS)):
                slot = step * THREADS + tx
                if slot < NT:
                    if slot < chunks_before:
                        # The last sequence whose first slot is <= slot: empty ones share theirs with their successor.
                        low = 0
                        high = N
                        while high - low > 1:
                            if sequences[(low + high) >> 1, SEQ_CHUNK] <= slot:
                                low = (low + high) >> 1
                            else:
                                high = (low + high) >> 1
                        first = (slot - sequences[low, SEQ_CHUNK]) * C
                        chunks[slot, CHUNK_ROW] = sequences[low, SEQ_ROW] + first
                        chunks[slot, CHUNK_LENGTH] = T.min(sequences[low, SEQ_LENGTH] - first, C)
                        chunks[slot, CHUNK_SEQ] = low
                    else:
                        first = rows_before + (slot - chunks_before) * C
                        chunks[slot, CHUNK_ROW] = T.min(first, rows)
                        chunks[slot, CHUNK_LENGTH] = T.max(T.min(rows - first, C), 0)
                        chunks[slot, CHUNK_SEQ] = PADDING

    return main
