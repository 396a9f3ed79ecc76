// Tiles of 64 x 64 elements between a warpgroup's WGMMA fragment and shared memory, transposed on the way.
//
// A fragment is fp32, 32 registers per thread: with w the warp, g = lane / 4 and t = lane % 4, register 4n + e is row
// 16w + g + 8 (e / 2), column 8n + 2t + e % 2. The shared tiles are 16-bit, 64 rows of 128 bytes under TMA's swizzle.
#pragma once

#include <type_traits>

#include "core/warp.cuh"

namespace flash_qla::device {

// Byte offset of the thread's row of ldmatrix or stmatrix, transposed, in a tile of 64 x 64: matrices 0, 1 are rows 16w
// and 16w + 8 of the fragment at column 0; 2, 3 at column 8. 1024 bytes further they are eight columns on.
__device__ __forceinline__ int transposed_offset() {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
  return kept(swizzled(8 * (lane >> 4) + (lane & 7), 2 * warp + (lane >> 3 & 1)));
}

// The first column of the thread's pairs of columns in a fragment.
__device__ __forceinline__ int first_column() { return kept(2 * (threadIdx.x & 3)); }

// tile[i][j] = 0 for i >= valid, in `count` tiles of 64 x 64 16-bit elements. `threads` consecutive threads share the
// work. Calls are rare, so the thread's number is opaque: no address stays in a register between calls.
__device__ __forceinline__ void clear_rows_after(void* tiles, int count, int valid, int threads) {
  int thread = threadIdx.x % threads;
  make_opaque(thread);
#pragma unroll 1
  for (int piece = thread; piece < count * kChunk * 8; piece += threads) {
    if (piece / 8 % kChunk >= valid) {
      static_cast<uint4*>(tiles)[piece] = {};
    }
  }
}

// rounded = x[0] to x[7] in 16 bits: eight registers of a fragment, in the order of a left factor and of
// store_matrices.
template <typename T>
__device__ __forceinline__ void round_eight(uint32_t (&rounded)[4], const float* x) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    rounded[p] = pack(T(), x[2 * p], x[2 * p + 1]);
  }
}

// fragment[i][j] = factors[j].x * tile[j][i] - factors[j].y * fragment[i][j], in two steps. load_minuend loads the tile
// and kEarly of eight quadruples of factors while the WGMMA that computes the fragment is in flight.
// subtract_from_minuend loads the other factors after it.
__device__ __forceinline__ float4 factor_pairs(const float* factors, int column, int n) {
  return *reinterpret_cast<const float4*>(factors + 2 * (8 * n + column));
}

template <int kEarly>
__device__ __forceinline__ void load_minuend(uint32_t* x, float* early, const void* tile, const float* factors,
                                             int offset, int column) {
  const uint32_t from = shared_address(tile) + offset;
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    load_matrices_transposed(*reinterpret_cast<uint32_t (*)[4]>(x + 2 * n), from + 1024 * n);
  }
#pragma unroll
  for (int n = 0; n < kEarly; ++n) {
    const float4 f = factor_pairs(factors, column, n);
    early[4 * n] = f.x;
    early[4 * n + 1] = f.y;
    early[4 * n + 2] = f.z;
    early[4 * n + 3] = f.w;
  }
}

// The second step. Unless has_tile, 0 takes the tile's place.
template <typename T, int kEarly>
__device__ __forceinline__ void subtract_from_minuend(float* fragment, const uint32_t* x, const float* early,
                                                      const float* factors, int column, bool has_tile = true) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float4 f = n < kEarly ? float4{early[4 * n], early[4 * n + 1], early[4 * n + 2], early[4 * n + 3]}
                                : factor_pairs(factors, column, n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 pair = unpack(T(), has_tile ? x[2 * n + h] : 0u);
      float* const to = fragment + 4 * n + 2 * h;
      to[0] = f.x * pair.x - f.y * to[0];
      to[1] = f.z * pair.y - f.w * to[1];
    }
  }
}

// Loads one factor for all columns. The load is opaque: a uniform register would delay WGMMAs that are issued
// meanwhile.
__device__ __forceinline__ float load_factor(const float* factor) { return load_shared(factor); }

// x = factors[j] of a lane's columns, two for each eight columns. scale_columns computes fragment[i][j] *= factors[j].
// round_scaled_columns writes the same product as a left factor of WGMMA, rounded to 16 bits.
__device__ __forceinline__ void load_column_factors(float* x, const float* factors, int column) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(factors + 8 * n + column);
    x[2 * n] = pair.x;
    x[2 * n + 1] = pair.y;
  }
}

__device__ __forceinline__ void scale_columns(float* fragment, const float* x) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    fragment[i] *= x[i / 4 * 2 + i % 2];
  }
}

template <typename T>
__device__ __forceinline__ void round_scaled_columns(void* scaled, const float* fragment, const float* x) {
  uint32_t* const to = static_cast<uint32_t*>(scaled);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    to[i] = pack(T(), fragment[2 * i] * x[i / 2 * 2], fragment[2 * i + 1] * x[i / 2 * 2 + 1]);
  }
}

// rest = fragment[i][j] factors[j] - scaled[i][j], rounded to 16 bits: the error of the rounding above.
template <typename T>
__device__ __forceinline__ void round_scaled_columns(void* rest, const float* fragment, const float* x,
                                                     const void* scaled) {
  uint32_t* const to = static_cast<uint32_t*>(rest);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 rounded = unpack(T(), static_cast<const uint32_t*>(scaled)[i]);
    to[i] = pack(T(), fragment[2 * i] * x[i / 2 * 2] - rounded.x, fragment[2 * i + 1] * x[i / 2 * 2 + 1] - rounded.y);
  }
}

// fragment[i][j] += factors[j] * other[i][j]
__device__ __forceinline__ void add_scaled_columns(float* fragment, const float* other, const float* x) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    fragment[i] += x[i / 4 * 2 + i % 2] * other[i];
  }
}

// x = -a[j] b[j] of a lane's columns.
__device__ __forceinline__ void load_column_products(float* x, const float* a, const float* b, int column) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 left = *reinterpret_cast<const float2*>(a + 8 * n + column);
    const float2 right = *reinterpret_cast<const float2*>(b + 8 * n + column);
    x[2 * n] = -left.x * right.x;
    x[2 * n + 1] = -left.y * right.y;
  }
}

// tile[j][i] * factors[j] * scale as a left factor of WGMMA in two 16-bit parts, rounded and rest.
template <typename T>
__device__ __forceinline__ void round_scaled_tile(void* rounded, void* rest, const void* tile, const float* factors,
                                                  float scale, int offset, int column) {
  const uint32_t from = shared_address(tile) + offset;
  uint32_t* const to = static_cast<uint32_t*>(rounded);
  uint32_t* const rest_to = static_cast<uint32_t*>(rest);
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    uint32_t x[4];
    load_matrices_transposed(x, from + 1024 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * (n + i / 2) + column);
      const float2 pair = unpack(T(), x[i]);
      const float low = pair.x * (f.x * scale), high = pair.y * (f.y * scale);
      to[2 * n + i] = pack(T(), low, high);
      const float2 taken = unpack(T(), to[2 * n + i]);
      rest_to[2 * n + i] = pack(T(), low - taken.x, high - taken.y);
    }
  }
}

// tile[j][i] = fragment[i][j], rounded to 16 bits.
template <typename T>
__device__ __forceinline__ void stage_transposed(const float* fragment, void* tile, int offset) {
  const uint32_t to = shared_address(tile) + offset;
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const float* const x = fragment + 4 * n;
    store_matrices_transposed(to + 1024 * n, pack(T(), x[0], x[1]), pack(T(), x[2], x[3]), pack(T(), x[4], x[5]),
                              pack(T(), x[6], x[7]));
  }
}

// Byte offset of the thread's row of stmatrix, not transposed, in a tile of 64 x 64.
__device__ __forceinline__ int rows_offset() {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
  return kept(swizzled(16 * warp + (lane & 15), lane >> 4));
}

// tile[i][j] = fragment[i][j], in kTiles tiles side by side. `fragment` is the left factor of a register-sourced WGMMA.
// Its registers have the order of an fp32 fragment's pairs.
template <int kTiles>
__device__ __forceinline__ void stage_rows(const void* fragment, void* tiles, int offset) {
  const uint32_t* const x = static_cast<const uint32_t*>(fragment);
  const uint32_t to = shared_address(tiles) + offset;
#pragma unroll
  for (int n = 0; n < 8 * kTiles; n += 2) {
    store_matrices((to ^ (16 * (n % 8))) + 8192 * (n / 8), x[2 * n], x[2 * n + 1], x[2 * n + 2], x[2 * n + 3]);
  }
}

// rows[j * stride + i] = tile[j][i] for j < valid, i < columns, a multiple of 8. One warp calls it in the place of a
// box of TMA, which would write rows of the next sequence.
template <typename T>
__device__ __forceinline__ void store_tile(const void* tile, void* rows, int stride, int valid, int columns) {
  const int lane = threadIdx.x & 31, row = lane / 8, piece = lane % 8;
  const char* const from = static_cast<const char*>(tile);
  T* const to = static_cast<T*>(rows) + piece * 8;
#pragma unroll 1
  for (int i = row; i < 64; i += 8) {
    uint4 data[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      data[n] = *reinterpret_cast<const uint4*>(from + swizzled(i + 4 * n, piece));
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (i + 4 * n < valid && piece * 8 < columns) {
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(i + 4 * n) * stride) = data[n];
      }
    }
  }
}

}  // namespace flash_qla::device
