// Tiles of 64 x 64 elements between a warpgroup's WGMMA fragment and shared memory, transposed on the way.
//
// A fragment is fp32, 32 registers a thread: with w the warp, g = lane / 4 and t = lane % 4, register 4n + e is row
// 16w + g + 8 (e / 2), column 8n + 2t + e % 2. The shared tiles are 16-bit, 64 rows of 128 bytes under TMA's swizzle.
#pragma once

#include "device/warp.cuh"

namespace flash_qla::device {

// fragment[i][j] = factors[j].x * tile[j][i] - factors[j].y * fragment[i][j], in two steps: what comes from shared
// memory is loaded while the WGMMA that makes the fragment still runs (all of the tile, and half of the factors:
// registers).
constexpr int kEarlyFactors = 4;  // of 8 float4

__device__ __forceinline__ float4 column_factors(const float* factors, int n) {
  return *reinterpret_cast<const float4*>(factors + 2 * (8 * n + 2 * (threadIdx.x & 3)));
}

__device__ __forceinline__ void load_minuend(uint32_t* x, float* early, const void* tile, const float* factors) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const uint32_t base = shared_address(tile);
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    // Matrices 0, 1: rows 16w and 16w + 8 of the fragment at column 8n; 2, 3: at column 8n + 8.
    const int row = 8 * (n + (lane >> 4)) + (lane & 7), piece = 2 * warp + ((lane >> 3) & 1);
    load_matrices_transposed(*reinterpret_cast<uint32_t (*)[4]>(x + 2 * n), base + swizzled(row, piece));
  }
#pragma unroll
  for (int n = 0; n < kEarlyFactors; ++n) {
    const float4 f = column_factors(factors, n);
    early[4 * n] = f.x;
    early[4 * n + 1] = f.y;
    early[4 * n + 2] = f.z;
    early[4 * n + 3] = f.w;
  }
}

// With 0 for the tile unless has_tile.
template <typename T>
__device__ __forceinline__ void subtract_from_minuend(float* fragment, const uint32_t* x, const float* early,
                                                      const float* factors, bool has_tile = true) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float4 f = n < kEarlyFactors ? float4{early[4 * n], early[4 * n + 1], early[4 * n + 2], early[4 * n + 3]}
                                       : column_factors(factors, n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 pair = unpack(T(), has_tile ? x[2 * n + h] : 0u);
      float* const to = fragment + 4 * n + 2 * h;
      to[0] = f.x * pair.x - f.y * to[0];
      to[1] = f.z * pair.y - f.w * to[1];
    }
  }
}

// The factors of a lane's columns, two for each eight columns, and with them scaled[i][j] = factors[j] fragment[i][j]
// as a left factor of WGMMA, rounded to 16 bits.
__device__ __forceinline__ void load_column_factors(float* x, const float* factors) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(factors + 8 * n + 2 * (threadIdx.x & 3));
    x[2 * n] = pair.x;
    x[2 * n + 1] = pair.y;
  }
}

template <typename T>
__device__ __forceinline__ void scale_columns(void* scaled, const float* fragment, const float* x) {
  uint32_t* const to = static_cast<uint32_t*>(scaled);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    to[i] = pack(T(), fragment[2 * i] * x[i / 2 * 2], fragment[2 * i + 1] * x[i / 2 * 2 + 1]);
  }
}

// rows[j * stride + i] = fragment[i][j] for j < valid, the fragment being rounded to 16 bits already; `tile` is this
// warpgroup's scratch.
template <typename T>
__device__ __forceinline__ void store_transposed(const void* fragment, void* tile, void* rows, int stride, int valid) {
  const int lane = threadIdx.x & 31, warp = warp_index(), thread = threadIdx.x & 127;
  const uint32_t base = shared_address(tile);
  const int barrier = kStateBarrier + threadIdx.x / 128;
  warpgroup_sync(barrier);  // the last tile has been read
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const int row = 8 * (n + (lane >> 4)) + (lane & 7), piece = 2 * warp + ((lane >> 3) & 1);
    const uint32_t* const x = static_cast<const uint32_t*>(fragment) + 2 * n;
    store_matrices_transposed(base + swizzled(row, piece), x[0], x[1], x[2], x[3]);
  }
  warpgroup_sync(barrier);
  const int row = thread / 8, piece = thread % 8;
  const char* const from = static_cast<const char*>(tile) + swizzled(row, piece);  // row % 8 stays the same
  T* const to = static_cast<T*>(rows) + row * stride + piece * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 data = *reinterpret_cast<const uint4*>(from + 16 * i * 128);
    if (row + 16 * i < valid) {
      *reinterpret_cast<uint4*>(to + 16 * i * stride) = data;
    }
  }
}

// A state on its way in, by one warp: `rows` rows of `columns` floats, 128 apart, from `first_state` or `state` to
// shared memory, where kStatePad floats stay free behind each row. Each lane announces its own rows to the barrier.
constexpr int kStatePad = 4;

template <typename Barrier>
__device__ __forceinline__ void fetch_state(Barrier& barrier, float* to, const float* state, const float* first_state,
                                            int is_first, int rows, int columns) {
  const float* const from = is_first ? first_state : state;
  const int lane = threadIdx.x & 31;
  const uint32_t bar = shared_address(&barrier);
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(rows / 32 * columns * 4)
               : "memory");
#pragma unroll 1
  for (int row = lane; row < rows; row += 32) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to + row * (columns + kStatePad))),
                 "l"(from + row * 128), "r"(columns * 4), "r"(bar)
                 : "memory");
  }
}

// fragment[i][j] = state[(row + i) * stride_i + j * stride_j], a fragment of 64 x 128.
__device__ __forceinline__ void load_state(float* fragment, const float* state, int row, int stride_i, int stride_j) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const float* const from = state + (row + 16 * warp + lane / 4) * stride_i + lane % 4 * 2 * stride_j;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      fragment[4 * n + e] = from[8 * (e / 2) * stride_i + (8 * n + e % 2) * stride_j];
    }
  }
}

// rows[i * 128 + j] = fragment[i][j], 64 rows of 128 16-bit elements, from the left factor of a register-sourced WGMMA,
// which has its registers in the order of an fp32 fragment's pairs.
__device__ __forceinline__ void store_state(const void* fragment, void* rows) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const uint32_t* const pairs = static_cast<const uint32_t*>(fragment);
  uint32_t* const to = static_cast<uint32_t*>(rows) + (16 * warp + lane / 4) * 64 + lane % 4;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      to[h * 8 * 64 + 4 * n] = pairs[2 * n + h];
    }
  }
}

}  // namespace flash_qla::device
