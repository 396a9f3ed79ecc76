// Between a warpgroup's WGMMA fragments and tiles in shared memory, for chunk_backward. Fragments as in tiles.cuh; a
// tile of R rows and 128 columns is two panels of 64 columns, each with rows of 128 bytes under TMA's swizzle.
#pragma once

#include "device/tiles.cuh"

namespace flash_qla::device {

constexpr int kRowBytes = 128;  // of a panel

__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// Of the lane's row for ldmatrix and stmatrix: matrices 0, 1 are rows 0 to 7 and 8 to 15 of the warp's 16 rows at a
// piece of 16 bytes; 2, 3 at the next one. The swizzle of a piece needs the row.
struct MatrixRow {
  uint32_t address;  // of the row
  int row, piece;

  __device__ __forceinline__ uint32_t at(int n) const { return address + (((n + piece) ^ (row & 7)) << 4); }
};

__device__ __forceinline__ MatrixRow matrix_row(const void* panel, int first_row) {
  const int lane = lane_here(), row = first_row + (lane & 15);
  return {shared_address(panel) + row * kRowBytes, row, lane >> 4};
}

// use(i, x) for the packed pairs of columns of the tile's rows that the thread has in a fragment with 128 columns: x[0]
// to x[3] meet fragment[i .. i + 1], [i + 2 ..], [i + 4 ..], [i + 6 ..].
template <int kRows, typename Use>
__device__ __forceinline__ void for_pairs_of_tile(const void* tile, int first_row, Use use) {
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    const MatrixRow from = matrix_row(static_cast<const char*>(tile) + panel * kRows * kRowBytes, first_row);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t x[4];
      load_matrices(x, from.at(n));
      use(32 * panel + 4 * n, x);
    }
  }
}

// The thread's warp in its warpgroup, opaque like lane_here().
__device__ __forceinline__ int warp_here() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread / 32 & 3;
}

// The rows of a fragment of 64 rows that the thread has: this one, and the eighth below it.
__device__ __forceinline__ int first_row() { return 16 * warp_here() + lane_here() / 4; }

// Sums over a quad's lanes, which have the columns of a row, to the rows' places.
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

// By the warpgroup: fragment = diag(factors) fragment, and sums = rowsum(fragment * tile).
template <typename T>
__device__ __forceinline__ void scale_and_dot(float* fragment, const void* tile, const float* factors, float factor,
                                              float* sums) {
  const int row = first_row();
  const float scale[2] = {factors[row] * factor, factors[row + 8] * factor};
  float sum[2] = {};
  for_pairs_of_tile<kChunk>(tile, 16 * warp_here(), [&](int i, const uint32_t (&x)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 pair = unpack(T(), x[p]);
      float* const at = fragment + i + 2 * p;
      at[0] *= scale[p & 1];
      at[1] *= scale[p & 1];
      sum[p & 1] += at[0] * pair.x + at[1] * pair.y;
    }
  });
  store_row_sums(sums, row, sum);
}

// By the warpgroup: sums = diag(factors) rowsum(added * tile), fragment -= diag(betas) diag(factors) added.
template <typename T>
__device__ __forceinline__ void subtract_and_dot(float* fragment, const float* added, const void* tile,
                                                 const float* factors, const float* betas, float* sums) {
  const int row = first_row();
  const float scale[2] = {factors[row], factors[row + 8]};
  const float taken[2] = {-betas[row] * scale[0], -betas[row + 8] * scale[1]};
  float sum[2] = {};
  for_pairs_of_tile<kChunk>(tile, 16 * warp_here(), [&](int i, const uint32_t (&x)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 pair = unpack(T(), x[p]);
      const float* const at = added + i + 2 * p;
      sum[p & 1] += at[0] * pair.x + at[1] * pair.y;
      fragment[i + 2 * p] += taken[p & 1] * at[0];
      fragment[i + 2 * p + 1] += taken[p & 1] * at[1];
    }
  });
  sum[0] *= scale[0];
  sum[1] *= scale[1];
  store_row_sums(sums, row, sum);
}

// Sums over the rows of a warp, which are in the lanes of the same t = lane % 4, of eight columns a lane: leaves in
// x[0] that of the column with the number of the lane's row, lane / 4.
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

// dbeta is the diagonal of U V_new^T over beta, where V_new, which has beta as a factor, keeps its digits: in bf16,
// unless beta is as good as 0. Else it takes V.
__device__ __forceinline__ bool needs_V(__nv_bfloat16, float beta) {
  return fabsf(beta) < static_cast<float>(kLeastBeta);
}
__device__ __forceinline__ bool needs_V(__half, float) { return true; }

// By the CTA's first two warpgroups: of products of tokens i and j, 64 x 64, and how alike the same tokens are, 32
// columns a warpgroup,
//
//   gated = diag(betas) products * scale * D below the diagonal, rounded, to a tile; with kDiagonal on it, too, and
//           without betas
//   E     = gated * likeness, below the diagonal; its sums over a warpgroup's columns, without betas, go to row_sums
//           [2, 64], those over a warp's rows to columns [4, 64], or without kDiagonal are added to what is there
//
// and without kDiagonal the products' own diagonal over betas to `diagonal`, where that is dbeta.
template <typename T, bool kDiagonal>
__device__ __forceinline__ void gate_products(const float* products, const float* likeness, const float* log_gates,
                                              const float* betas, float scale, void* tile, float* row_sums,
                                              float* columns, float* diagonal) {
  const int warpgroup = threadIdx.x / 128;
  const int row = first_row(), column = 32 * warpgroup + 2 * (lane_here() & 3);
  const float b[2] = {log_gates[row] * kLog2e, log_gates[row + 8] * kLog2e};
  const float beta[2] = {kDiagonal ? 1.f : betas[row], kDiagonal ? 1.f : betas[row + 8]};
  const MatrixRow to = matrix_row(tile, 16 * warp_here());
  float sum[2] = {}, below[8];
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    uint32_t gated[4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int n = 2 * pair + m;
      const float2 b_j = *reinterpret_cast<const float2*>(log_gates + 8 * n + column);
      below[2 * n] = below[2 * n + 1] = 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = row + 8 * half, j = 8 * n + column + e, at = 4 * n + 2 * half + e;
          const float D = exp2_fast(fminf(b[half] - (e ? b_j.y : b_j.x) * kLog2e, 0.f));
          const float gated_one = products[at] * (D * scale);
          const float E = i > j ? gated_one * likeness[at] : 0.f;
          if (!kDiagonal && i == j && !needs_V(T(), beta[half])) {
            diagonal[i] = __fdividef(products[at], beta[half]);
          }
          sum[half] += E;
          below[2 * n + e] += beta[half] * E;
          x[e] = (kDiagonal ? i >= j : i > j) ? gated_one * beta[half] : 0.f;
        }
        gated[2 * m + half] = pack(T(), x[0], x[1]);
      }
    }
    store_matrices(to.at(4 * warpgroup + 2 * pair), gated[0], gated[1], gated[2], gated[3]);
  }
  column_sums(below);
  float* const own_column = columns + warp_here() * kChunk + column + 8 * (lane_here() / 8) + (lane_here() / 4 & 1);
  *own_column = kDiagonal ? below[0] : *own_column + below[0];
  store_row_sums(row_sums + warpgroup * kChunk, row, sum);
}

// By the warpgroups from the CTA's first on: a fragment of 128 columns, 64 rows each, rounded, to a tile of kRows x
// 128.
template <typename T, int kRows>
__device__ __forceinline__ void stage_rounded(const float* fragment, void* tile) {
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    const MatrixRow to =
        matrix_row(static_cast<char*>(tile) + panel * kRows * kRowBytes, 16 * (static_cast<int>(threadIdx.x) / 32));
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      const float* const x = fragment + 32 * panel + 4 * n;
      store_matrices(to.at(n), pack(T(), x[0], x[1]), pack(T(), x[2], x[3]), pack(T(), x[4], x[5]),
                     pack(T(), x[6], x[7]));
    }
  }
}

// By the warpgroups from the CTA's first on: the sum of dS * h over a warp's 16 rows, h a tile of kRows x 128.
template <typename T, int kRows>
__device__ __forceinline__ float warp_product(const float* dS, const void* h) {
  float sum[2] = {};
  for_pairs_of_tile<kRows>(h, 16 * (static_cast<int>(threadIdx.x) / 32), [&](int i, const uint32_t (&x)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 pair = unpack(T(), x[p]);
      sum[p & 1] += dS[i + 2 * p] * pair.x + dS[i + 2 * p + 1] * pair.y;
    }
  });
  float total = sum[0] + sum[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    total += __shfl_xor_sync(~0u, total, step);
  }
  return total;
}

// fragment[i][j] *= factors[j], 64 columns.
__device__ __forceinline__ void multiply_columns(float* fragment, const float* factors, int column) {
  float x[16];
  load_column_factors(x, factors, column);
  scale_columns(fragment, x);
}

// As a left factor: fragment diag(-a * b), 64 columns.
template <typename T>
__device__ __forceinline__ void fade_columns(void* faded, const float* fragment, const float* a, const float* b,
                                             int column) {
  float x[16];
  load_column_products(x, a, b, column);
  round_scaled_columns<T>(faded, fragment, x);
}

// By the warpgroup: a fragment of 64 x 128, rounded, to rows `stride` elements apart, of which the first `valid` exist.
// A quad's lanes exchange pairs, so that each stores 16 bytes of a row.
template <typename T>
__device__ __forceinline__ void store_fragment(const float* fragment, void* rows, int64_t stride, int valid) {
  const int t = threadIdx.x & 3, row = first_row();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    T* const to = static_cast<T*>(rows) + (row + 8 * half) * stride + 8 * t;
#pragma unroll
    for (int n = 0; n < 16; n += 4) {
      uint32_t x[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float* const at = fragment + 4 * (n + m) + 2 * half;
        x[m] = pack(T(), at[0], at[1]);
      }
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          if (!(m & bit)) {
            const uint32_t sent = t & bit ? x[m] : x[m | bit];
            const uint32_t got = __shfl_xor_sync(~0u, sent, bit);
            x[m] = t & bit ? got : x[m];
            x[m | bit] = t & bit ? x[m | bit] : got;
          }
        }
      }
      if (row + 8 * half < valid) {
        *reinterpret_cast<uint4*>(to + 8 * n) = {x[0], x[1], x[2], x[3]};
      }
    }
  }
}

// By a warp: dV = beta U of kCount tokens from the first-th on, and for those that need V rowsum(U * V) to sums; U is a
// tile of 64 x 128. A half-warp takes a row.
template <typename T, int kCount>
__device__ __forceinline__ void store_value_gradients(const void* U, const void* v_rows, void* dv_rows, int stride,
                                                      const float* beta, float* sums, int first, int valid) {
  const int lane = lane_here(), piece = lane & 15;
  const char* const panel = static_cast<const char*>(U) + (piece / 8) * kChunk * kRowBytes;
  const T* const v = static_cast<const T*>(v_rows) + 8 * piece;
  T* const dv = static_cast<T*>(dv_rows) + 8 * piece;
#pragma unroll 2
  for (int row = first + (lane >> 4); row < first + kCount; row += 2) {
    const float beta_i = beta[row];
    const bool with_V = row < valid && needs_V(T(), beta_i);
    uint4 u = *reinterpret_cast<const uint4*>(panel + swizzled(row, piece & 7)), values = {};
    if (with_V) {
      values = __ldg(reinterpret_cast<const uint4*>(v + row * stride));
    }
    float sum = 0.f;
    const auto use = [&](uint32_t& x, uint32_t value) {
      const float2 a = unpack(T(), x), b = unpack(T(), value);
      sum += a.x * b.x + a.y * b.y;
      x = pack(T(), beta_i * a.x, beta_i * a.y);
    };
    use(u.x, values.x);
    use(u.y, values.y);
    use(u.z, values.z);
    use(u.w, values.w);
    if (row < valid) {
      *reinterpret_cast<uint4*>(dv + row * stride) = u;
    }
    if (__any_sync(~0u, with_V)) {
#pragma unroll
      for (int bit = 1; bit < 16; bit *= 2) {
        sum += __shfl_xor_sync(~0u, sum, bit);
      }
      if (with_V && piece == 0) {
        sums[row] = sum;
      }
    }
  }
}

// By a warp: dbeta and dg of a chunk, see chunk_backward, from the rows of TokenSum. Lane l has tokens 2l and 2l + 1.
template <typename T>
__device__ __forceinline__ void store_gate_gradients(const float* sums, const float* columns, const float* products,
                                                     const float* beta, float total_decay, float* db, float* dg,
                                                     int64_t stride, int valid) {
  const int lane = lane_here();
  const auto pair = [&](const float* from) { return *reinterpret_cast<const float2*>(from + 2 * lane); };
  const float2 yq = pair(sums + TokenSum::kQuery * kChunk), z = pair(sums + TokenSum::kKey * kChunk);
  const float2 x = pair(sums + TokenSum::kState * kChunk), uv = pair(sums + TokenSum::kValue * kChunk);
  const auto both = [&](int row) {
    const float2 a = pair(sums + row * kChunk), b = pair(sums + (row + 1) * kChunk);
    return float2{a.x + b.x, a.y + b.y};
  };
  const float2 between = both(TokenSum::kBetween), f = both(TokenSum::kBeta);
  const float2 betas = pair(beta);
  float below[2] = {};
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const float2 c = pair(columns + part * kChunk);
    below[0] += c.x;
    below[1] += c.y;
  }
  const float y[2] = {yq.x + between.x + betas.x * (f.x - x.x) - below[0],
                      yq.y + between.y + betas.y * (f.y - x.y) - below[1]};
  float suffix = y[0] + y[1], prefix = z.x + z.y;  // of the lanes from this one on, up to this one
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float later = __shfl_down_sync(~0u, suffix, step), earlier = __shfl_up_sync(~0u, prefix, step);
    suffix += lane + step < 32 ? later : 0.f;
    prefix += lane >= step ? earlier : 0.f;
  }
  float state = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    state += products[i];
  }
  state *= total_decay;
  const float before = prefix - z.x - z.y;
  const float gradient[2] = {suffix + before + state, suffix - y[0] + before + z.x + state};
  const float betas_gradient[2] = {needs_V(T(), betas.x) ? uv.x - x.x + f.x : uv.x,
                                   needs_V(T(), betas.y) ? uv.y - x.y + f.y : uv.y};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (2 * lane + e < valid) {
      db[(2 * lane + e) * stride] = betas_gradient[e];
      dg[(2 * lane + e) * stride] = gradient[e];
    }
  }
}

}  // namespace flash_qla::device
