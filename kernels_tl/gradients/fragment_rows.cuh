// Rows of a warpgroup's WGMMA fragments and of tiles in shared memory, for the gradients: row dots, sums, rounding.
// tiles.cuh describes the fragments. A tile of R rows and 128 columns is two panels of 64 columns, each with rows of
// 128 bytes under TMA's swizzle.
#pragma once

#include "core/tiles.cuh"

namespace flash_qla::device {

constexpr int kRowBytes = 128;  // bytes of a panel's row

// The row of a panel whose address the lane gives to ldmatrix or stmatrix. at(n) is the address of piece n + `piece`,
// of 16 bytes; the swizzle depends on `row`.
struct MatrixRow {
  uint32_t address;  // the row's first byte
  int row, piece;

  __device__ __forceinline__ uint32_t at(int n) const { return address + (((n + piece) ^ (row & 7)) << 4); }
};

// The lane's row of a left factor or a fragment: matrices 0, 1 are rows 0 to 7 and 8 to 15 from first_row on at a
// piece; 2, 3 are the same rows at the next piece.
__device__ __forceinline__ MatrixRow matrix_row(const void* panel, int first_row) {
  const int lane = lane_here(), row = first_row + (lane & 15);
  return {shared_address(panel) + row * kRowBytes, row, lane >> 4};
}

// The lane's row of a right factor: matrices 0, 1 are rows 0 to 7 at a piece and at the next one; 2, 3 are rows 8 to 15
// at the same pieces. The two operands of one product then lie in consecutive registers.
__device__ __forceinline__ MatrixRow factor_row(const void* panel, int first_row) {
  const int lane = lane_here(), row = first_row + (lane & 7) + (lane >> 4) * 8;
  return {shared_address(panel) + row * kRowBytes, row, lane >> 3 & 1};
}

// Calls use(i, x) for every eight elements of a fragment of kPanels panels of 64 columns. x has the tile's elements at
// the places of fragment[i] to fragment[i + 7], as packed pairs:
//
//   x[0]: fragment[i], [i + 1]    x[1]: [i + 4], [i + 5]    x[2]: [i + 2], [i + 3]    x[3]: [i + 6], [i + 7]
template <int kRows, int kPanels, typename Use>
__device__ __forceinline__ void for_pairs_of_tile(const void* tile, int first_row, Use use) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    const MatrixRow from = factor_row(static_cast<const char*>(tile) + panel * kRows * kRowBytes, first_row);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t x[4];
      load_matrices(x, from.at(n));
      use(32 * panel + 4 * n, x);
    }
  }
}

// The warp's number in its warpgroup, opaque like lane_here().
__device__ __forceinline__ int warp_here() {
  int thread = threadIdx.x;
  make_opaque(thread);
  return thread / 32 & 3;
}

// The first of the thread's two rows of a fragment of 64 rows. The other one is first_row() + 8.
__device__ __forceinline__ int first_row() { return 16 * warp_here() + lane_here() / 4; }

// to[row + 8 h] = sum[h] added over the four lanes that share the rows.
__device__ __forceinline__ void store_row_sums(float* to, int row, float (&sum)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
  }
  if ((threadIdx.x & 3) == 0) {
    to[row] = sum[0];
    to[row + 8] = sum[1];
  }
}

// diag(a b^T) of 16 rows each, by a warp's tensor cores. Only the two 8 x 8 blocks on the diagonal matter. Each lane
// with is_mine() holds two entries: of rows g and g + 8, its rows of a fragment (g = lane / 4).
template <typename T>
class Diagonal {
 public:
  // Adds the products of 16 columns. a comes from matrix_row or from a fragment, b from factor_row.
  __device__ __forceinline__ void add(const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    multiply_add(T(), low_, a, b[0], b[1]);
    multiply_add(T(), high_, a, b[2], b[3]);
  }
  // Adds the products of a panel's 64 columns, by rows of matrix_row and factor_row.
  __device__ __forceinline__ void add_panel(const MatrixRow& a, const MatrixRow& b) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t x[4], y[4];
      load_matrices(x, a.at(n));
      load_matrices(y, b.at(n));
      add(x, y);
    }
  }
  static __device__ __forceinline__ bool is_mine() { return (lane_here() & 3) == lane_here() >> 3; }
  __device__ __forceinline__ float of_row(int half) const {
    const bool odd = lane_here() & 4;
    return half ? (odd ? high_[3] : high_[2]) : (odd ? low_[1] : low_[0]);
  }
  // The lane's part of the sum of all entries.
  __device__ __forceinline__ float sum() const { return is_mine() ? of_row(0) + of_row(1) : 0.f; }

 private:
  float low_[4] = {}, high_[4] = {};  // a times rows 0 to 7 of b, and times rows 8 to 15
};

// Dot products of a fragment's rows with the same rows of a tile, by a warp.
template <typename T>
class RowDots;

template <>
class RowDots<__nv_bfloat16> {
 public:
  // x and tile: the eight elements and packed pairs of for_pairs_of_tile.
  __device__ __forceinline__ void add(const float* x, const uint32_t (&tile)[4]) {
    uint32_t rounded[4];
    round_eight<__nv_bfloat16>(rounded, x);
    diagonal_.add(rounded, tile);
  }

  // Stores to[row + 8 h] = factors[h] * dot of that row; `row` is the thread's first row.
  __device__ __forceinline__ void store(float* to, int row, const float (&factors)[2]) const {
    if (diagonal_.is_mine()) {
      to[row] = factors[0] * diagonal_.of_row(0);
      to[row + 8] = factors[1] * diagonal_.of_row(1);
    }
  }

  // The dot of the thread's row + 8 half.
  __device__ __forceinline__ float of_row(int half) const {
    const int lane = lane_here();
    return __shfl_sync(~0u, diagonal_.of_row(half), (lane & ~3) | lane >> 3);
  }

 private:
  Diagonal<__nv_bfloat16> diagonal_;
};

template <>
class RowDots<__half> {  // fp32 products without tensor cores, because rounding a fragment to fp16 may overflow
 public:
  __device__ __forceinline__ void add(const float* x, const uint32_t (&tile)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 pair = unpack(__half(), tile[p]);
      const float* const with = x + 4 * (p & 1) + 2 * (p / 2);
      sum_[p / 2] += with[0] * pair.x + with[1] * pair.y;
    }
  }

  __device__ __forceinline__ void store(float* to, int row, const float (&factors)[2]) const {
    float scaled[2] = {factors[0] * sum_[0], factors[1] * sum_[1]};
    store_row_sums(to, row, scaled);
  }

 private:
  float sum_[2] = {};
};

// fragment = factor diag(factors) fragment, sums = rowsum(fragment * tile), by one warpgroup.
template <typename T, int kPanels = 2>
__device__ __forceinline__ void scale_and_dot(float* fragment, const void* tile, const float* factors, float factor,
                                              float* sums) {
  const int row = first_row();
  const float scale[2] = {factors[row] * factor, factors[row + 8] * factor};
  RowDots<T> dots;
  for_pairs_of_tile<kChunk, kPanels>(tile, 16 * warp_here(), [&](int i, const uint32_t (&x)[4]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      fragment[i + e] *= scale[e / 2 & 1];
    }
    dots.add(fragment + i, x);
  });
  dots.store(sums, row, {1.f, 1.f});
}

// sums = x rowsum(added * tile), fragment -= diag(betas) x added with x = factor diag(factors), by one warpgroup.
template <typename T, int kPanels = 2>
__device__ __forceinline__ void subtract_and_dot(float* fragment, const float* added, const void* tile,
                                                 const float* factors, const float* betas, float* sums,
                                                 float factor = 1.f) {
  const int row = first_row();
  const float scale[2] = {factors[row] * factor, factors[row + 8] * factor};
  const float minus_factor[2] = {-betas[row] * scale[0], -betas[row + 8] * scale[1]};
  RowDots<T> dots;
  for_pairs_of_tile<kChunk, kPanels>(tile, 16 * warp_here(), [&](int i, const uint32_t (&x)[4]) {
    dots.add(added + i, x);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      fragment[i + e] += minus_factor[e / 2 & 1] * added[i + e];
    }
  });
  dots.store(sums, row, scale);
}

// The backward of the l2norm y = x / |x|, by one warpgroup: `fragment` has dy / |x|, and gets dx. The tile has x; rstd
// has 1 / |x| of the tile's rows.
//
//   dx = (dy - y rowsum(y * dy)) / |x| = fragment - diag(rstd^2 rowsum(fragment * tile)) tile
template <typename T>
__device__ __forceinline__ void project_rows(float* fragment, const void* tile, const float* rstd) {
  constexpr int kPanels = 2;
  RowDots<T> dots;
  for_pairs_of_tile<kChunk, kPanels>(tile, 16 * warp_here(),
                                     [&](int i, const uint32_t (&x)[4]) { dots.add(fragment + i, x); });
  const int row = first_row();
  const float minus_factor[2] = {-rstd[row] * rstd[row] * dots.of_row(0),
                                 -rstd[row + 8] * rstd[row + 8] * dots.of_row(1)};
  // The shuffle hides that the rows are the same. Otherwise the compiler keeps the tile in registers, and spills.
  const int warp = __shfl_sync(~0u, warp_here(), 0);
  for_pairs_of_tile<kChunk, kPanels>(tile, 16 * warp, [&](int i, const uint32_t (&x)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 pair = unpack(T(), x[p]);
      float* const to = fragment + i + 4 * (p & 1) + 2 * (p / 2);
      to[0] += minus_factor[p / 2] * pair.x;
      to[1] += minus_factor[p / 2] * pair.y;
    }
  });
}

// x[0] = sum of x[lane / 4] over the eight lanes with the same lane % 4. x[0] to x[7] are a lane's terms of eight
// columns.
template <int kHalf = 4>
__device__ __forceinline__ void column_sums(float (&x)[8]) {
  const bool upper = threadIdx.x & 4 * kHalf;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float low = x[i], high = x[i + kHalf];
    x[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 4 * kHalf);
  }
  if constexpr (kHalf > 1) {
    column_sums<kHalf / 2>(x);
  }
}

}  // namespace flash_qla::device
