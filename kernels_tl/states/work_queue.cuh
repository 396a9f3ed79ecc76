// The queue of work tiles that the CTAs of a persistent kernel share. A CTA takes the tile of its own number first, and
// then draws the next one when it can load it. So CTAs end at nearly the same time, whatever a tile takes.
#pragma once

#include "core/warp.cuh"

namespace flash_qla::device {

// The CTA's next work tile, or `work_tiles` after the last one. `drawn` counts the draws of all `ctas` CTAs. Each draws
// until none is left, and the last draw leaves 0. One warp of a CTA calls it.
__device__ __forceinline__ int next_work(int* drawn, int ctas, int work_tiles) {
  int work = 0;
  if (lane_here() == 0) {
    work = ctas + atomicAdd(drawn, 1);
    if (work == work_tiles + ctas - 1) {
      *drawn = 0;
    }
  }
  return min(__shfl_sync(~0u, work, 0), work_tiles);
}

// The first of the work tiles first, first + step, ... whose segment has a final state but no token, or `work_tiles`. A
// segment has `of_segment` work tiles. A whole warp calls it.
__device__ __forceinline__ int next_empty(const void* segments, int first, int step, int work_tiles, int of_segment) {
  return next_where(first, step, work_tiles, [=](int work) {
    const auto* segment = static_cast<const int*>(segments) + int64_t{work / of_segment} * SegmentColumn::kCount;
    return segment[SegmentColumn::kLength] == 0 && segment[SegmentColumn::kFinal] >= 0;
  });
}

}  // namespace flash_qla::device
