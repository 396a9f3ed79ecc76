// The work tiles of segment_scan: `of_sequence` of each sequence, in the order of the sequences. Only those of split
// sequences have work.
#pragma once

#include "core/warp.cuh"

namespace flash_qla::device {

// The first of the work tiles first, first + step, ... whose sequence is split, or `work_tiles`. A whole warp calls it.
__device__ __forceinline__ int next_scan(const void* sequences, const void* segments, int first, int step,
                                         int work_tiles, int of_sequence) {
  return next_where(first, step, work_tiles, [=](int work) {
    const auto* sequence = static_cast<const int*>(sequences) + work / of_sequence * SequenceColumn::kCount;
    const int segment = load_early(sequence + SequenceColumn::kSegment);
    const auto* row = static_cast<const int*>(segments) + int64_t{segment} * SegmentColumn::kCount;
    return load_early(row + SegmentColumn::kFlags) == SegmentFlag::kFirst;
  });
}

}  // namespace flash_qla::device
