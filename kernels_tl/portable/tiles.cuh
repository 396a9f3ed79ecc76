// Tiles of 64 rows of 16-bit elements between global and shared memory, by all threads of a CTA. In shared memory they
// are panels of 64 x 64 under the swizzle of core/warp.cuh, as TileLang's gemm reads them. Nothing here needs more than
// sm_80: pieces of 16 bytes go by cp.async.
#pragma once

#include "core/warp.cuh"

namespace flash_qla::device {

__device__ __forceinline__ char* piece_of(void* tile, int row, int piece) {
  return static_cast<char*>(tile) + piece / 8 * (kChunk * 128) + swizzled(row, piece % 8);
}

// Begins to copy rows, `stride` elements apart, to a tile of kColumns columns. Rows from `valid` on and columns from
// `columns` on, a multiple of 8, become zeros: those rows belong to other sequences, and may hold NaN.
template <int kColumns>
__device__ __forceinline__ void load_rows(void* tile, const void* rows, int64_t stride, int valid, int columns) {
  constexpr int kPieces = kColumns / 8;
  for (int i = threadIdx.x; i < kChunk * kPieces; i += blockDim.x) {
    const int row = i / kPieces, piece = i % kPieces;
    const bool is_there = row < valid && 8 * piece < columns;
    const uint16_t* const from = static_cast<const uint16_t*>(rows) + (is_there ? row * stride + 8 * piece : 0);
    copy_async(piece_of(tile, row, piece), from, is_there);
  }
}

// Begins to copy one of a chunk's matrices, L^T or P^T, which is upper triangular: its rows of blocks follow one
// another, each from the diagonal block on (kTriangle of layout.py).
__device__ __forceinline__ void load_triangle(void* tile, const void* matrix) {
  for (int i = threadIdx.x; i < kChunk * 8; i += blockDim.x) {
    const int row = i / 8, piece = i % 8, block = row / kBlock, width = kChunk - kBlock * block;
    const bool is_there = piece >= 2 * block;
    const int before = kBlock * (kChunk * block - kBlock * block * (block - 1) / 2);  // elements of earlier blocks
    const int at = is_there ? before + row % kBlock * width + 8 * piece - kBlock * block : 0;
    copy_async(piece_of(tile, row, piece), static_cast<const uint16_t*>(matrix) + at, is_there);
  }
}

// Begins to copy `count` floats, a multiple of 4.
__device__ __forceinline__ void load_floats(float* to, const float* from, int count) {
  for (int i = threadIdx.x; i < count / 4; i += blockDim.x) {
    copy_async(to + 4 * i, from + 4 * i, true);
  }
}

// rows[i * stride + j] = tile[i][j] for i < valid, j < columns, a multiple of 8, from a tile of 64 x 64.
__device__ __forceinline__ void store_rows(void* rows, const void* tile, int64_t stride, int valid, int columns) {
  for (int i = threadIdx.x; i < kChunk * 8; i += blockDim.x) {
    const int row = i / 8, piece = i % 8;
    if (row < valid && 8 * piece < columns) {
      uint16_t* const to = static_cast<uint16_t*>(rows) + row * stride + 8 * piece;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(piece_of(const_cast<void*>(tile), row, piece));
    }
  }
}

// rows[i * stride + j] += tile[i][j], or = tile[i][j] if `is_first`, for i < valid, j < columns, a multiple of 8, from
// a tile of 64 rows and 128 columns. The rows are read from L2, where other CTAs have written them.
template <typename T>
__device__ __forceinline__ void add_tile(void* rows, const void* tile, int64_t stride, int valid, int columns,
                                         bool is_first) {
  for (int i = threadIdx.x; i < kChunk * 16; i += blockDim.x) {
    const int row = i / 16, piece = i % 16;
    if (row < valid && 8 * piece < columns) {
      uint4* const to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(rows) + row * stride + 8 * piece);
      uint4 x = *reinterpret_cast<const uint4*>(piece_of(const_cast<void*>(tile), row, piece));
      if (!is_first) {
        const uint4 sum = __ldcg(to);
        const auto add = [](uint32_t& a, uint32_t b) {
          const float2 x = unpack(T(), a), y = unpack(T(), b);
          a = pack(T(), x.x + y.x, x.y + y.y);
        };
        add(x.x, sum.x);
        add(x.y, sum.y);
        add(x.z, sum.z);
        add(x.w, sum.w);
      }
      *to = x;
    }
  }
  __threadfence();
}

}  // namespace flash_qla::device
