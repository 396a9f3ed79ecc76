// Sums of a matrix's columns; see sum_rows.py.
#pragma once

#include "core/warp.cuh"

namespace flash_qla::device {

// sums[column] of a CTA's 32 columns: a warp adds every kWarps-th row, and the first warp adds the warps' sums.
template <int kWarps>
__device__ __forceinline__ void sum_rows(const float* terms, float* sums, float* shared, int rows, int columns,
                                         int cta) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = cta * 32 + lane;
  float sum = 0.f;
  if (column < columns) {
#pragma unroll 4
    for (int row = warp; row < rows; row += kWarps) {
      sum += terms[int64_t{row} * columns + column];
    }
  }
  shared[warp * 32 + lane] = sum;
  __syncthreads();
  if (warp == 0 && column < columns) {
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      sum += shared[i * 32 + lane];
    }
    sums[column] = sum;
  }
}

}  // namespace flash_qla::device
