// Rows of chunk_plan's tables, for warps that begin before it has written them.
//
// cu_seqlens comes as `offsets`, of 32 or 64 bits (`wide`), or there is none and all N sequences have `uniform_length`
// tokens, as many as `rows` together. What it holds need not be offsets: see chunk_plan.py.
#pragma once

#include <cstdint>

namespace flash_qla::device {

constexpr int kPadding = -1;  // PADDING of common.py
constexpr int kPlanned = 64;  // tokens a chunk
constexpr int kWarpLanes = 32;

__device__ __forceinline__ int chunks_of(int tokens) { return (tokens + kPlanned - 1) / kPlanned; }

__device__ __forceinline__ int sum_up_to_lane(int x) {
#pragma unroll
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const int y = __shfl_up_sync(~0u, x, step);
    x += (threadIdx.x & 31) >= step ? y : 0;
  }
  return x;
}

struct Extent {
  int begin, end;  // tokens
};

// Of sequence n + lane, empty from the N-th on; those before n end at `rows_before`.
__device__ __forceinline__ Extent lane_extent(const void* offsets, int wide, int N, int rows, int n, int rows_before) {
  const int lane = threadIdx.x & 31;
  int64_t offset = 0;
  if (n + lane < N) {
    offset =
        wide ? static_cast<const int64_t*>(offsets)[n + lane + 1] : static_cast<const int32_t*>(offsets)[n + lane + 1];
  }
  // Clipped, then the running maximum.
  int end = static_cast<int>(max(min(offset, int64_t{rows}), int64_t{rows_before}));
#pragma unroll
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const int y = __shfl_up_sync(~0u, end, step);
    end = max(end, lane >= step ? y : 0);
  }
  const int end_before = __shfl_up_sync(~0u, end, 1);
  return {lane == 0 ? rows_before : end_before, end};
}

// By each warp: a slot's row of `chunks`.
__device__ __forceinline__ void find_chunk(int* found, int slot, const void* offsets, int has_offsets, int wide, int N,
                                           int rows, int uniform_length) {
  if (!has_offsets) {
    const int chunks = chunks_of(uniform_length);
    const int n = slot / max(chunks, 1), first = (slot - n * chunks) * kPlanned;
    const bool covered = slot < N * chunks;
    found[0] = covered ? n * uniform_length + first : rows;
    found[1] = covered ? min(uniform_length - first, kPlanned) : 0;
    found[2] = covered ? n : kPadding;
    return;
  }
  int rows_before = 0, chunks_before = 0;  // sequence n
  for (int n = 0; n < N; n += kWarpLanes) {
    const Extent tokens = lane_extent(offsets, wide, N, rows, n, rows_before);
    const int chunks = chunks_of(tokens.end - tokens.begin);
    const int sum = chunks_before + sum_up_to_lane(chunks);
    const unsigned up_to_here = __ballot_sync(~0u, slot < sum);
    if (up_to_here != 0) {
      const int owner = __ffs(up_to_here) - 1;
      const int chunk = slot - __shfl_sync(~0u, sum - chunks, owner);
      found[0] = __shfl_sync(~0u, tokens.begin, owner) + chunk * kPlanned;
      found[1] = min(__shfl_sync(~0u, tokens.end, owner) - found[0], kPlanned);
      found[2] = n + owner;
      return;
    }
    rows_before = __shfl_sync(~0u, tokens.end, kWarpLanes - 1);
    chunks_before = __shfl_sync(~0u, sum, kWarpLanes - 1);
  }
  const int first = rows_before + (slot - chunks_before) * kPlanned;
  found[0] = min(first, rows);
  found[1] = max(min(rows - first, kPlanned), 0);
  found[2] = kPadding;
}

// By each warp: the first row and the tokens of a slot of `segments` where no sequence is cut, and there are at most 32
// or all are of the same length.
__device__ __forceinline__ void find_segment(int* found, int slot, const void* offsets, int has_offsets, int wide,
                                             int N, int rows, int uniform_length) {
  if (!has_offsets) {
    found[0] = slot * uniform_length;
    found[1] = uniform_length;
    return;
  }
  const int lane = threadIdx.x & 31;
  const Extent tokens = lane_extent(offsets, wide, N, rows, 0, 0);
  const int chunks = chunks_of(tokens.end - tokens.begin);
  int before = 0;  // this one, in the order of the table
  for (int i = 0; i < N; ++i) {
    const int others = __shfl_sync(~0u, chunks, i);
    before += others > chunks || (others == chunks && i < lane);
  }
  const int owner = __ffs(__ballot_sync(~0u, lane < N && before == slot)) - 1;
  found[0] = __shfl_sync(~0u, tokens.begin, owner);
  found[1] = __shfl_sync(~0u, tokens.end, owner) - found[0];
}

}  // namespace flash_qla::device
