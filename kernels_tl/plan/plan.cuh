// Rows of chunk_plan's tables. chunk_plan writes them; warps that begin before it has ended compute their own.
//
// The contents of cu_seqlens may be wrong: see chunk_plan.py.
#pragma once

#include <cstdint>

#include "core/slots.cuh"

namespace flash_qla::device {

// N sequences with `tokens` tokens in all: their cu_seqlens or, without this table, `uniform_length` tokens each.
struct Sequences {
  Table offsets;
  int N, tokens, uniform_length;

  __device__ __forceinline__ Sequences(const Table& offsets, int N, int tokens, int uniform_length)
      : offsets(offsets), N(N), tokens(tokens), uniform_length(uniform_length) {}
};

__device__ __forceinline__ int chunks_of(int length) { return (length + kChunk - 1) / kChunk; }

// An offset, clamped to [tokens_before, tokens]; the running maximum of these is the end of a sequence.
__device__ __forceinline__ int clip_offset(int64_t offset, int tokens_before, int tokens) {
  return static_cast<int>(max(min(offset, int64_t{tokens}), int64_t{tokens_before}));
}

// Whether sequence a comes before b in the table of segments. The longest come first, so that no long one is left for
// the end. A sequence without a slot counts as one without chunks.
__device__ __forceinline__ bool comes_first(int chunks_a, int a, int chunks_b, int b) {
  return chunks_a > chunks_b || (chunks_a == chunks_b && a < b);
}

// put_chunk writes the row of a sequence's chunk; `sequence` is kPadding for a sequence without a slot. put_padding
// writes the row of the chunk-th chunk after the last sequence's tokens, which may have 0 tokens.
__device__ __forceinline__ void put_chunk(int* row, int begin, int end, int chunk, int sequence) {
  const int first = begin + chunk * kChunk;
  row[ChunkColumn::kRow] = first;
  row[ChunkColumn::kLength] = min(end - first, kChunk);
  row[ChunkColumn::kSequence] = sequence;
}
__device__ __forceinline__ void put_padding(int* row, int begin, int tokens, int chunk) {
  const int first = begin + chunk * kChunk;
  row[ChunkColumn::kRow] = min(first, tokens);
  row[ChunkColumn::kLength] = max(min(tokens - first, kChunk), 0);
  row[ChunkColumn::kSequence] = kPadding;
}

__device__ __forceinline__ int slot_of(const Slots& slots, int n) { return slots(n); }
__device__ __forceinline__ int64_t offset_of(const Table& offsets, int n) { return offsets(n); }

// The slot that a sequence with the slot `state_slot` starts from: that of the table or, without a table, its own.
__device__ __forceinline__ int first_slot_of(const Slots& first, int state_slot, int n) {
  return state_slot == kNoState || !first.indices ? state_slot : first(n);
}

// Which states exist: StatePresence of kernels_tl/bundles.py. `first` is the table of first states.
struct Presence {
  bool on_pool;
  int first_states;
  const void* flags;  // read for FirstStates::kFlagged only
  int64_t flag_stride;
  Slots first;
  bool has_final;

  __device__ __forceinline__ bool has_first(int n) const {
    return first_states == FirstStates::kFlagged ? static_cast<const bool*>(flags)[n * flag_stride]
                                                 : first_states == FirstStates::kAll;
  }
};

// The slot of the first state of sequence n, whose slot is `state_slot`, or kNoState.
__device__ __forceinline__ int first_state_slot(const Presence& presence, int state_slot, int n) {
  return presence.has_first(n) ? first_slot_of(presence.first, state_slot, n) : kNoState;
}
// The slot of its last state, or kNoState. A sequence without tokens leaves its slot of a pool alone: another sequence
// may have that slot.
__device__ __forceinline__ int last_state_slot(const Presence& presence, int state_slot, int first, bool is_empty) {
  const bool is_unchanged = presence.on_pool && is_empty && first != kNoState;
  return presence.has_final && !is_unchanged ? state_slot : kNoState;
}

// The slot of the checkpoint after a chunk, or kNoState. A sequence's i-th checkpoint follows i * every tokens. Its
// slot is entry i - 1 of the sequence's table row or, without a table, first + i - 1.
__device__ __forceinline__ int checkpoint_slot(const Table& indices, int64_t null_index, int64_t slots, int every,
                                               int length, int chunk, int n, int first) {
  const int64_t tokens = (int64_t{chunk} + 1) * kChunk;
  if (tokens > length || tokens % every != 0) {
    return kNoState;
  }
  const int i = static_cast<int>(tokens / every) - 1;
  int64_t index = int64_t{first} + i;
  if (indices) {
    index = i < indices.columns ? indices(n, i) : kNoState;
  }
  return static_cast<int>(checked_slot(index, indices ? null_index : -1, slots));
}

constexpr int kLanes = 32;

struct Extent {
  int begin, end;  // tokens
};

// The extent of sequence n + lane, by one warp. Sequences before n end at `tokens_before`. From sequence N on it is
// empty.
__device__ __forceinline__ Extent lane_extent(const Sequences& sequences, int n, int tokens_before) {
  const int lane = threadIdx.x & 31;
  const int64_t offset = n + lane < sequences.N ? sequences.offsets(n + lane + 1) : 0;
  int end = clip_offset(offset, tokens_before, sequences.tokens);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const int y = __shfl_up_sync(~0u, end, step);
    end = max(end, lane >= step ? y : 0);
  }
  const int end_before = __shfl_up_sync(~0u, end, 1);
  return {lane == 0 ? tokens_before : end_before, end};
}

__device__ __forceinline__ int sum_up_to_lane(int x) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const int y = __shfl_up_sync(~0u, x, step);
    x += (threadIdx.x & 31) >= step ? y : 0;
  }
  return x;
}

// row = the row of a slot of `chunks`. Each warp that needs the row calls it.
__device__ __forceinline__ void find_chunk(int* row, int slot, const Sequences& sequences, const Slots& slots) {
  const int N = sequences.N, tokens = sequences.tokens;
  const auto sequence = [&](int n) { return slots(n) == kNoState ? int{kPadding} : n; };
  if (!sequences.offsets) {
    const int uniform_length = sequences.uniform_length;
    const int chunks = chunks_of(uniform_length);
    const int n = slot / max(chunks, 1);
    if (slot < N * chunks) {
      put_chunk(row, n * uniform_length, (n + 1) * uniform_length, slot - n * chunks, sequence(n));
    } else {
      put_padding(row, tokens, tokens, slot - N * chunks);
    }
    return;
  }
  int tokens_before = 0, chunks_before = 0;  // tokens and chunks of the sequences before n
  for (int n = 0; n < N; n += kLanes) {
    const Extent extent = lane_extent(sequences, n, tokens_before);
    const int chunks = chunks_of(extent.end - extent.begin);
    const int sum = chunks_before + sum_up_to_lane(chunks);
    const unsigned up_to_here = __ballot_sync(~0u, slot < sum);
    if (up_to_here != 0) {
      const int owner = __ffs(up_to_here) - 1;
      put_chunk(row, __shfl_sync(~0u, extent.begin, owner), __shfl_sync(~0u, extent.end, owner),
                slot - __shfl_sync(~0u, sum - chunks, owner), sequence(n + owner));
      return;
    }
    tokens_before = __shfl_sync(~0u, extent.end, kLanes - 1);
    chunks_before = __shfl_sync(~0u, sum, kLanes - 1);
  }
  put_padding(row, tokens_before, tokens, slot - chunks_before);
}

// The sequence in a slot of `segments`. `extent` is lane_extent(.., 0, 0). The function assumes that no sequence is
// cut, and that there are at most 32. A sequence without a slot keeps its place in the table.
__device__ __forceinline__ int owner_of(int slot, const Extent& extent, int N, const Slots& slots) {
  const int lane = threadIdx.x & 31;
  const bool has_slot = lane < N && slots(lane) != kNoState;
  const int chunks = has_slot ? chunks_of(extent.end - extent.begin) : 0;
  int before = 0;  // sequences before the lane's in the table
  for (int i = 0; i < N; ++i) {
    before += comes_first(__shfl_sync(~0u, chunks, i), i, chunks, lane);
  }
  return __ffs(__ballot_sync(~0u, lane < N && before == slot)) - 1;
}

// row_and_length = the first token row and the tokens of a slot of `segments`. Each warp that needs them calls it. If
// lengths differ, it assumes what owner_of does. A sequence without a slot has no tokens in the table.
__device__ __forceinline__ void find_segment(int* row_and_length, int slot, const Sequences& sequences,
                                             const Slots& slots) {
  if (!sequences.offsets) {
    row_and_length[0] = slot * sequences.uniform_length;
    row_and_length[1] = slots(slot) == kNoState ? 0 : sequences.uniform_length;
    return;
  }
  const Extent extent = lane_extent(sequences, 0, 0);
  const int owner = owner_of(slot, extent, sequences.N, slots);
  row_and_length[0] = __shfl_sync(~0u, extent.begin, owner);
  row_and_length[1] = slots(owner) == kNoState ? 0 : __shfl_sync(~0u, extent.end, owner) - row_and_length[0];
}

// Writes to `to` what chunk_plan would write to a slot of `segments`, as far as fused_forward reads it.
// UnplannedSegment has two more columns. One warp calls it. It assumes what find_segment does.
__device__ __forceinline__ void find_unplanned_segment(void* to, int slot, const Sequences& sequences,
                                                       const Slots& slots, const Presence& presence) {
  int n = slot, begin = slot * sequences.uniform_length, end = begin + sequences.uniform_length;
  int covered = sequences.tokens;
  if (sequences.offsets) {
    const Extent extent = lane_extent(sequences, 0, 0);
    n = owner_of(slot, extent, sequences.N, slots);
    begin = __shfl_sync(~0u, extent.begin, n);
    end = __shfl_sync(~0u, extent.end, n);
    covered = __shfl_sync(~0u, extent.end, kLanes - 1);
  }
  const int state_slot = slots(n), first = first_state_slot(presence, state_slot, n);
  if ((threadIdx.x & 31) == 0) {
    int* const row = static_cast<int*>(to);
    row[SegmentColumn::kRow] = begin;
    row[SegmentColumn::kLength] = state_slot == kNoState ? 0 : end - begin;
    row[SegmentColumn::kInitial] = first;
    row[SegmentColumn::kFinal] = last_state_slot(presence, state_slot, first, begin == end);
    row[SegmentColumn::kUntil] = kWholeSequence;
    row[UnplannedSegment::kEnd] = end;
    row[UnplannedSegment::kCovered] = covered;
  }
}

}  // namespace flash_qla::device
