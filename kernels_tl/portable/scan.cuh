// The arithmetic of portable_scan: rows of S^T times M^T, or times M, in fp32.
//
// A warp has kRows rows of S^T, and lane l the columns l, l + 32, ... of each. M^T arrives in shared memory in blocks
// of kMapRows rows, kPitch floats apart. A pitch of 4 more than kK floats gives reads along a column no bank conflicts.
#pragma once

#include "core/state_tiles.cuh"

namespace flash_qla::device {

// Begins to copy a block of M^T, by all threads of the CTA.
template <int kK, int kMapRows, int kPitch>
__device__ __forceinline__ void load_map_block(float* to, const float* map, int block) {
  constexpr int kPieces = kK / 4;
  for (int i = threadIdx.x; i < kMapRows * kPieces; i += blockDim.x) {
    const int row = i / kPieces, piece = i % kPieces;
    copy_async(to + row * kPitch + 4 * piece, map + (block * kMapRows + row) * kK + 4 * piece, true);
  }
}

// next += S^T M^T, of the channels that the block of M^T has as rows; with kReverse next += S^T M, for these columns.
// `S` is the CTA's tile of S^T, next[r][c] the thread's element in row r of its warp and column 32 c + lane.
template <int kK, bool kReverse, int kRows, int kMapRows, int kPitch>
__device__ __forceinline__ void multiply_map_block(float* next, const float* S, const float* M, int block) {
  constexpr int kColumns = kK / 32;
  const int lane = threadIdx.x % 32;
  const float* const rows = S + threadIdx.x / 32 * kRows * kK;
  const auto four = [](const float* from) { return *reinterpret_cast<const float4*>(from); };
  const auto dot = [](float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; };
  if constexpr (kReverse) {
    float sums[kRows] = {};
#pragma unroll 4
    for (int i = 0; i < kK; i += 4) {
      const float4 m = four(M + lane * kPitch + i);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r] += dot(four(rows + r * kK + i), m);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        next[r * kColumns + c] += c == block ? sums[r] : 0.f;
      }
    }
  } else {
#pragma unroll 2
    for (int i = 0; i < kMapRows; i += 4) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float* const column = M + i * kPitch + 32 * c + lane;
        const float4 m = {column[0], column[kPitch], column[2 * kPitch], column[3 * kPitch]};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          next[r * kColumns + c] += dot(four(rows + r * kK + block * kMapRows + i), m);
        }
      }
    }
  }
}

// fragment = rows of S^T in this layout from a caller's state. `state` points to the first row. Channels and rows that
// the state lacks are zeros.
template <int kK, int kRows, bool kFloat8>
__device__ __forceinline__ void read_state_rows(float* fragment, const void* state, int dtype, int stride_v,
                                                int stride_k, int channels, int rows) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRows;
  read_state_elements<kFloat8>(fragment, state, dtype, stride_v, stride_k, channels, rows, [=](auto use) {
#pragma unroll
    for (int i = 0; i < kRows * (kK / 32); ++i) {
      use(i, i % (kK / 32) * 32 + lane, first + i / (kK / 32));
    }
  });
}

}  // namespace flash_qla::device
