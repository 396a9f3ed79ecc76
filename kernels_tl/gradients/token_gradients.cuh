// Device functions of token_gradients; its warpgroups have 64 columns each. See gradients/token_gradients.py.
#pragma once

#include "gradients/gradients.cuh"

namespace flash_qla::device {

constexpr int kPanelBytes = kChunk * kRowBytes;  // a panel of 64 x 64
static_assert(TokenSum::kQuery == 0 && TokenSum::kKey == 1 && TokenSum::kState == 2 && TokenSum::kValue == 3);

// The warpgroup's panel of a tile of 64 rows: each warpgroup has 64 columns.
__device__ __forceinline__ const char* warpgroup_panel(const void* tile) {
  return static_cast<const char*>(tile) + threadIdx.x / 128 * kPanelBytes;
}

// sum += the lane's part of <a, b> over the warpgroup's panels of two tiles. Each warp takes 16 rows.
template <typename T>
__device__ __forceinline__ void add_panel_product(float* sum, const void* a, const void* b) {
  const MatrixRow from = matrix_row(warpgroup_panel(a), 16 * warp_here());
  const MatrixRow with = factor_row(warpgroup_panel(b), 16 * warp_here());
  Diagonal<T> diagonal;
  diagonal.add_panel(from, with);
  *sum += diagonal.sum();
}

// sums[w] = the sum of `sum` over the lanes of warp w.
__device__ __forceinline__ void store_warp_sum(float* sums, float sum) {
  sum = sum_of_lanes<32>(sum);
  if (lane_here() == 0) {
    sums[threadIdx.x / 32] = sum;
  }
}

// The warpgroup's sums. The second warpgroup's sums follow TokenSum's rows.
__device__ __forceinline__ float* warpgroup_sums(float* sums) {
  return sums + threadIdx.x / 128 * (TokenSum::kCount * kChunk);
}

// scale_and_dot and subtract_and_dot on the warpgroup's columns.
template <typename T>
__device__ __forceinline__ void scale_and_dot_panel(float* fragment, const void* tile, const float* factors,
                                                    float factor, float* sums) {
  scale_and_dot<T, 1>(fragment, warpgroup_panel(tile), factors, factor, warpgroup_sums(sums));
}
template <typename T>
__device__ __forceinline__ void subtract_and_dot_panel(float* fragment, const float* added, const void* tile,
                                                       const float* factors, const float* betas, float* sums) {
  subtract_and_dot<T, 1>(fragment, added, warpgroup_panel(tile), factors, betas, warpgroup_sums(sums));
}

// The warpgroup's panel of a tile = fragment, rounded.
template <typename T>
__device__ __forceinline__ void stage_panel(const float* fragment, void* tile) {
  const MatrixRow to = matrix_row(warpgroup_panel(tile), 16 * warp_here());
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    uint32_t rounded[4];
    round_eight<T>(rounded, fragment + 4 * n);
    store_matrices(to.at(n), rounded[0], rounded[1], rounded[2], rounded[3]);
  }
}

// dV = diag(beta) U for 32 tokens from `first` on, and dots += rowsum(U * V) of tokens with needs_V, by one warp: eight
// lanes share a row. U is a panel of 64 x 64; dV and V have its first `columns` columns. dots[i] is the lane's part of
// its i-th row.
template <typename T>
__device__ __forceinline__ void add_value_panel(float* dots, const void* U, const void* v_rows, void* dv_rows,
                                                int v_stride, int dv_stride, const float* beta, int first, int valid,
                                                int columns) {
  const int lane = lane_here(), piece = lane & 7;
  const T* const v = static_cast<const T*>(v_rows) + 8 * piece;
  T* const dv = static_cast<T*>(dv_rows) + 8 * piece;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = first + 4 * i + (lane >> 3);
    if (row >= valid || 8 * piece >= columns) {
      continue;
    }
    uint4 u = *reinterpret_cast<const uint4*>(static_cast<const char*>(U) + swizzled(row, piece));
    const float factor = beta[row];
    if (needs_V(T(), factor)) {
      const uint4 values = __ldg(reinterpret_cast<const uint4*>(v + row * v_stride));
      const auto add = [&](uint32_t x, uint32_t value) {
        const float2 a = unpack(T(), x), b = unpack(T(), value);
        dots[i] += a.x * b.x + a.y * b.y;
      };
      add(u.x, values.x);
      add(u.y, values.y);
      add(u.z, values.z);
      add(u.w, values.w);
    }
    for (uint32_t* const x : {&u.x, &u.y, &u.z, &u.w}) {
      const float2 pair = unpack(T(), *x);
      *x = pack(T(), factor * pair.x, factor * pair.y);
    }
    *reinterpret_cast<uint4*>(dv + row * dv_stride) = u;
  }
}

// sums = the dots of add_value_panel, added over the lanes of a row, for tokens with needs_V.
template <typename T>
__device__ __forceinline__ void store_value_sums(float* sums, const float* dots, const float* beta, int first,
                                                 int valid) {
  const int lane = lane_here();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = first + 4 * i + (lane >> 3);
    const float sum = sum_of_lanes<8>(dots[i]);
    if ((lane & 7) == 0 && row < valid && needs_V(T(), beta[row])) {
      sums[row] = sum;
    }
  }
}

// Adds the second warpgroup's sums of QUERY, KEY and STATE, and writes 0 to VALUE if clears_value, by one warp.
__device__ __forceinline__ void complete_sums(float* sums, bool clears_value) {
  const int lane = lane_here();
#pragma unroll 1
  for (int i = lane; i < TokenSum::kValue * kChunk; i += 32) {
    sums[i] += sums[TokenSum::kCount * kChunk + i];
  }
  if (clears_value) {
    sums[TokenSum::kValue * kChunk + lane] = 0.f;
    sums[TokenSum::kValue * kChunk + lane + 32] = 0.f;
  }
  __syncwarp();
}

}  // namespace flash_qla::device
