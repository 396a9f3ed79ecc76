// One row of chunk_plan's table of chunks, for those that begin before it is there.
#pragma once

#include <cstdint>

namespace flash_qla::device {

constexpr int kPadding = -1;  // PADDING of common.py

__device__ __forceinline__ int running_maximum_of_warp(int x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int y = __shfl_up_sync(~0u, x, step);
    x = max(x, lane >= step ? y : x);
  }
  return x;
}

__device__ __forceinline__ int running_sum_of_warp(int x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int y = __shfl_up_sync(~0u, x, step);
    x += lane >= step ? y : 0;
  }
  return x;
}

// By each warp: found = {first row, tokens, sequence or kPadding} of a slot. Offsets are of 32 or 64 bits, `wide`; if
// there are none every sequence has `uniform_length` tokens. What they hold need not be offsets, see chunk_plan.py.
__device__ __forceinline__ void find_chunk(int* found, int slot, const void* offsets, int has_offsets, int wide, int N,
                                           int rows, int uniform_length) {
  constexpr int kTokens = 64;
  if (!has_offsets) {
    const int chunks = (uniform_length + kTokens - 1) / kTokens;
    const int n = slot / max(chunks, 1), first = (slot - n * chunks) * kTokens;
    const bool covered = slot < N * chunks;
    found[0] = covered ? n * uniform_length + first : rows;
    found[1] = covered ? min(uniform_length - first, kTokens) : 0;
    found[2] = covered ? n : kPadding;
    return;
  }
  const int lane = threadIdx.x & 31;
  int rows_before = 0, chunks_before = 0;  // these 32 sequences
  for (int n = 0; n < N; n += 32) {
    int64_t offset = 0;
    if (n + lane < N) {
      offset = wide ? static_cast<const int64_t*>(offsets)[n + lane + 1]
                    : static_cast<const int32_t*>(offsets)[n + lane + 1];
    }
    const int clipped = static_cast<int>(max(min(offset, int64_t{rows}), int64_t{rows_before}));
    const int end = running_maximum_of_warp(clipped, lane);
    const int end_before = __shfl_up_sync(~0u, end, 1);
    const int begin = lane == 0 ? rows_before : end_before;
    const int chunks = (end - begin + kTokens - 1) / kTokens;
    const int sum = chunks_before + running_sum_of_warp(chunks, lane);
    const unsigned behind = __ballot_sync(~0u, slot < sum);
    if (behind != 0) {
      const int owner = __ffs(behind) - 1;
      const int first = (slot - __shfl_sync(~0u, sum - chunks, owner)) * kTokens + __shfl_sync(~0u, begin, owner);
      found[0] = first;
      found[1] = min(__shfl_sync(~0u, end, owner) - first, kTokens);
      found[2] = n + owner;
      return;
    }
    rows_before = __shfl_sync(~0u, end, 31);
    chunks_before = __shfl_sync(~0u, sum, 31);
  }
  const int first = rows_before + (slot - chunks_before) * kTokens;
  found[0] = min(first, rows);
  found[1] = max(min(rows - first, kTokens), 0);
  found[2] = kPadding;
}

}  // namespace flash_qla::device
