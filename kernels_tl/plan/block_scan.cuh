// Inclusive scans over a CTA's threads. All threads pass a barrier before the same scan runs again.
#pragma once

#include <cub/block/block_scan.cuh>

namespace flash_qla::device {

template <int kThreads>
using BlockScan = cub::BlockScan<int, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

template <int kThreads>
__device__ __forceinline__ int running_sum(int x) {
  __shared__ typename BlockScan<kThreads>::TempStorage space;
  BlockScan<kThreads>(space).InclusiveSum(x, x);
  return x;
}

template <int kThreads>
__device__ __forceinline__ int running_maximum(int x) {
  __shared__ typename BlockScan<kThreads>::TempStorage space;
  BlockScan<kThreads>(space).InclusiveScan(x, x, [](int a, int b) { return max(a, b); });
  return x;
}

}  // namespace flash_qla::device
