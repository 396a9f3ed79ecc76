// Tiles of 64 rows of 16-bit elements between global and shared memory, by all kThreads threads of a CTA. In shared
// memory they are panels of 64 x 64 under the swizzle of core/warp.cuh, as TileLang's gemm reads them. Nothing here
// needs more than sm_80: vectors of 16 bytes go by cp.async.
//
// Row i of a tile has kColumns / 8 vectors. A thread has the same vector of every kStep-th row, so that its addresses
// differ by constants and one stride. Its number is opaque: addresses that were kept from chunk to chunk would spill.
#pragma once

#include "core/warp.cuh"

namespace flash_qla::device {

template <int kThreads, int kColumns>
struct TileVectors {
  static constexpr int kVectors = kColumns / 8, kStep = kThreads / kVectors;
  static_assert(kStep % 8 == 0 && kChunk % kStep == 0, "the swizzle of all rows of a thread is the same");

  int row, vector;

  __device__ __forceinline__ TileVectors() {
    int thread = threadIdx.x;
    make_opaque(thread);
    row = thread / kVectors, vector = thread % kVectors;
  }

  __device__ __forceinline__ int column() const { return 8 * vector; }

  // use(row, at) for the thread's rows, with the address of its vector in the tile.
  template <typename Use>
  __device__ __forceinline__ void for_each(void* tile, Use use) const {
    char* const first = static_cast<char*>(tile) + vector / 8 * (kChunk * 128) + swizzled(row, vector % 8);
#pragma unroll
    for (int i = 0; i < kChunk; i += kStep) {
      use(row + i, first + i * 128);
    }
  }
};

// Begins to copy rows, `stride` elements apart, to a tile of kColumns columns. Rows from `valid` on and columns from
// `columns` on, a multiple of 8, become zeros: those rows belong to other sequences, and may hold NaN.
template <int kThreads, int kColumns>
__device__ __forceinline__ void load_rows(void* tile, const void* rows, int64_t stride, int valid, int columns) {
  constexpr int kWidth = kColumns < 2 * kChunk ? kColumns : 2 * kChunk;  // at a time
  const TileVectors<kThreads, kWidth> vectors;
#pragma unroll
  for (int first = 0; first < kColumns; first += kWidth) {
    const auto* const from = static_cast<const uint16_t*>(rows) + first + vectors.column();
    const int there = first + vectors.column() < columns ? valid : 0;
    vectors.for_each(static_cast<char*>(tile) + first * (kChunk * 2),
                     [=](int row, char* at) { copy_async(at, from + row * stride, row < there); });
  }
}

// Begins to copy one of a chunk's matrices, L^T or P^T, which is upper triangular: its rows of blocks follow one
// another, each from the diagonal block on (kTriangle of layout.py). A step of the threads is a row of blocks.
template <int kThreads>
__device__ __forceinline__ void load_triangle(void* tile, const void* matrix) {
  const TileVectors<kThreads, kChunk> vectors;
  static_assert(vectors.kStep == kBlock);
  vectors.for_each(tile, [=](int row, char* at) {
    const int block = row / kBlock, width = kChunk - kBlock * block;
    const int before = kBlock * (kChunk * block - kBlock * block * (block - 1) / 2);  // elements of earlier blocks
    const auto* const from = static_cast<const uint16_t*>(matrix) + before + row % kBlock * width - kBlock * block;
    copy_async(at, from + vectors.column(), vectors.column() >= kBlock * block);
  });
}

// Begins to copy kCount floats, a multiple of 4.
template <int kThreads, int kCount>
__device__ __forceinline__ void load_floats(float* to, const float* from) {
#pragma unroll
  for (int first = 0; first < kCount / 4; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    if (i < kCount / 4) {
      copy_async(to + 4 * i, from + 4 * i, true);
    }
  }
}

// rows[i * stride + j] = tile[i][j] for i < valid, j < columns, a multiple of 8, from a tile of 64 x 64.
template <int kThreads>
__device__ __forceinline__ void store_rows(void* rows, void* tile, int64_t stride, int valid, int columns) {
  const TileVectors<kThreads, kChunk> vectors;
  auto* const to = static_cast<uint16_t*>(rows) + vectors.column();
  const int there = vectors.column() < columns ? valid : 0;
  vectors.for_each(tile, [=](int row, const char* at) {
    if (row < there) {
      *reinterpret_cast<uint4*>(to + row * stride) = *reinterpret_cast<const uint4*>(at);
    }
  });
}

// rows[i * stride + j] += tile[i][j], or = tile[i][j] if `is_first`, for i < valid, j < columns, a multiple of 8, from
// a tile of 64 rows and 128 columns. The rows are read from L2, where other CTAs have written them.
template <int kThreads, typename T>
__device__ __forceinline__ void add_tile(void* rows, void* tile, int64_t stride, int valid, int columns,
                                         bool is_first) {
  const TileVectors<kThreads, 2 * kChunk> vectors;
  auto* const first = static_cast<uint16_t*>(rows) + vectors.column();
  const int there = vectors.column() < columns ? valid : 0;
  vectors.for_each(tile, [=](int row, const char* at) {
    if (row < there) {
      uint4* const to = reinterpret_cast<uint4*>(first + row * stride);
      uint4 x = *reinterpret_cast<const uint4*>(at);
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
  });
  __threadfence();
}

}  // namespace flash_qla::device
