// The pieces of work of segment_scan: `of_sequence` of each sequence, in the order of the sequences. Only those of cut
// sequences have work.
#pragma once

#include "core/warp.cuh"

namespace flash_qla::device {

// The first of the pieces first, first + step, ... whose sequence is cut, or `pieces`. A whole warp calls it; lane i
// looks at the i-th of 32 pieces.
__device__ __forceinline__ int next_scan(const void* sequences, const void* segments, int first, int step, int pieces,
                                         int of_sequence) {
  const int lane = threadIdx.x & 31;
  for (; first < pieces; first += 32 * step) {
    const int piece = first + lane * step;
    bool is_cut = false;
    if (piece < pieces) {
      const auto* sequence = static_cast<const int*>(sequences) + piece / of_sequence * SequenceColumn::kCount;
      const int segment = load_early(sequence + SequenceColumn::kSegment);
      const auto* row = static_cast<const int*>(segments) + int64_t{segment} * SegmentColumn::kCount;
      is_cut = load_early(row + SegmentColumn::kFlags) == SegmentFlag::kFirst;
    }
    const unsigned found = __ballot_sync(~0u, is_cut);
    if (found != 0) {
      return first + (__ffs(found) - 1) * step;
    }
  }
  return pieces;
}

}  // namespace flash_qla::device
