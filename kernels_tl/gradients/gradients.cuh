// Device functions of chunk_backward and token_gradients: gated products of tokens, staged tiles, and the gradients of
// values, betas and gates. fragment_rows.cuh describes the fragments and tiles.
#pragma once

#include "gradients/fragment_rows.cuh"

namespace flash_qla::device {

// dbeta = diagonal of U V_new^T / beta, because V_new has beta as a factor. needs_V returns whether dbeta comes from V
// instead: in fp16, and in bf16 if beta is so close to 0 that V_new has lost its digits.
__device__ __forceinline__ bool needs_V(__nv_bfloat16, float beta) {
  return fabsf(beta) < static_cast<float>(kLeastBeta);
}
__device__ __forceinline__ bool needs_V(__half, float) { return true; }

// From `products`, 64 x 64 of tokens i and j, the CTA's first two warpgroups compute
//
//   kDiagonal (G):   gated = scale tril(products) * D,                 E = gated * Q K^T below the diagonal
//   else (F):        gated = scale diag(betas) stril(products) * D,    E = gated * K K^T
//   kNormalize:      gated = diag(row_norms) (gated as above) diag(column_norms)
//
//   likeness            the fragment of Q K^T or K K^T; with kFromP the tile of P^T, because E = products * P
//   row_sums [2, 64]    sum over a warpgroup's columns of E without its factor betas
//   columns  [4, 64]    sum over a warp's rows of E; set with kDiagonal, else added to
//   diagonal [64]       without kDiagonal: products_ii / betas_i, which is dbeta_i, unless needs_V
//
// `gated` is rounded, for stage_gated or stage_symmetric. A warpgroup has 32 columns; a warp has 16 rows of them, as
// two 16 x 16 blocks.
template <typename T, bool kDiagonal, bool kNormalize, bool kFromP>
class GatedProducts {
  static_assert(kDiagonal || !kFromP);

 public:
  // row_norms, column_norms: with kNormalize, factors of the rows and columns of `gated`.
  __device__ __forceinline__ GatedProducts(const float* products, const void* likeness, const float* log_gates,
                                           const float* betas, float scale, float* diagonal, const float* row_norms,
                                           const float* column_norms)
      : products_(products),
        likeness_(likeness),
        log_gates_(log_gates),
        column_norms_(column_norms),
        diagonal_(diagonal),
        row_(first_row()) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      b_[half] = log_gates[row_ + 8 * half];
      beta_[half] = kDiagonal ? 1.f : betas[row_ + 8 * half];
      scale_[half] = kNormalize ? scale * row_norms[row_ + 8 * half] : scale;
      factor_[half] = beta_[half] * scale_[half];
    }
  }

  // The warp's pair-th block. `column` is the thread's first column of a fragment. kOnDiagonal: the block's rows and
  // columns are the same tokens.
  template <bool kOnDiagonal>
  __device__ __forceinline__ void gate_block(int pair, int column, uint32_t* gated) {
    const int g = lane_here() / 4, t = lane_here() & 3;
    uint32_t P[4];  // a pair of columns of each 8 x 8 block
    if constexpr (kFromP) {
      load_P(P, pair);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int n = 2 * pair + m;
      const float2 b_j = *reinterpret_cast<const float2*>(log_gates_ + 8 * n + column);
      float2 norm_j;
      if constexpr (kNormalize) {
        norm_j = *reinterpret_cast<const float2*>(column_norms_ + 8 * n + column);
      }
#pragma unroll
      for (int half = kOnDiagonal ? m : 0; half < 2; ++half) {
        const bool crossed = kOnDiagonal && half == m;  // the diagonal crosses this 8 x 8 block
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = 4 * n + 2 * half + e;
          const float D = exp2_fast(b_[half] - (e ? b_j.y : b_j.x));
          const float ungated = products_[at];
          x[e] = D * ungated;  // may be inf above the diagonal, where it is not used
          if constexpr (kNormalize) {
            x[e] *= e ? norm_j.y : norm_j.x;
          }
          const bool below = !crossed || g > 2 * t + e, on = crossed && g == 2 * t + e;
          float E = 0.f;  // lacks `factor_`, unless P has it
          if (below) {
            E = kFromP ? ungated * element(T(), P[2 * m + half], e) : x[e] * static_cast<const float*>(likeness_)[at];
          }
          sum_[half] += E;
          below_[2 * n + e] += kFromP ? E : factor_[half] * E;
          if (!kDiagonal && on && !needs_V(T(), beta_[half])) {
            diagonal_[row_ + 8 * half] = __fdividef(ungated, beta_[half]);
          }
          x[e] = below || (kDiagonal && on) ? x[e] * factor_[half] : 0.f;
        }
        gated[2 * m + half] = pack(T(), x[0], x[1]);
      }
    }
  }

  __device__ __forceinline__ void run(uint32_t* gated, float* row_sums, float* columns) {
    const int warp = warp_index(), warpgroup = warpgroup_index();
    const int column = 32 * warpgroup + 2 * (lane_here() & 3);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      gated[i] = 0;
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int block = 2 * warpgroup + pair;
      if (block < warp) {
        gate_block<false>(pair, column, gated + 4 * pair);
      } else if (block == warp) {
        gate_block<true>(pair, column, gated + 4 * pair);
      }
    }
    column_sums(below_);
    float* const lane_column = columns + warp * kChunk + column + 8 * (lane_here() / 8) + (lane_here() / 4 & 1);
    *lane_column = kDiagonal ? below_[0] : *lane_column + below_[0];
    if constexpr (!kFromP) {
      sum_[0] *= scale_[0];
      sum_[1] *= scale_[1];
    }
    store_row_sums(row_sums + warpgroup * kChunk, row_, sum_);
  }

 private:
  // The warp's pair-th block of P.
  __device__ __forceinline__ void load_P(uint32_t (&P)[4], int pair) {
    const int lane = lane_here(), row = 32 * warpgroup_index() + 16 * pair + 8 * (lane >> 4) + (lane & 7);
    load_matrices_transposed(P, shared_address(likeness_) + swizzled(row, 2 * warp_here() + (lane >> 3 & 1)));
  }

  const float* products_;
  const void* likeness_;
  const float *log_gates_, *column_norms_;
  float* diagonal_;
  int row_;
  float b_[2], beta_[2], scale_[2], factor_[2];
  float sum_[2] = {}, below_[8] = {};
};

template <typename T, bool kDiagonal, bool kNormalize = false, bool kFromP = false>
__device__ __forceinline__ void gate_products(const float* products, const void* likeness, const float* log_gates,
                                              const float* betas, float scale, uint32_t* gated, float* row_sums,
                                              float* columns, float* diagonal, const float* row_norms = nullptr,
                                              const float* column_norms = nullptr) {
  GatedProducts<T, kDiagonal, kNormalize, kFromP>(products, likeness, log_gates, betas, scale, diagonal, row_norms,
                                                  column_norms)
      .run(gated, row_sums, columns);
}

// tile = gated.
__device__ __forceinline__ void stage_gated(const uint32_t* gated, void* tile) {
  const MatrixRow to = matrix_row(tile, 16 * warp_here());
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const uint32_t* const x = gated + 4 * pair;
    store_matrices(to.at(4 * (threadIdx.x / 128) + 2 * pair), x[0], x[1], x[2], x[3]);
  }
}

// tile = X + X^T, for `gated` = X, strictly below the diagonal. A warp stores its blocks below the diagonal twice, the
// second time transposed.
__device__ __forceinline__ void stage_symmetric(const uint32_t* gated, void* tile) {
  const int warp = warp_index(), warpgroup = warpgroup_index();
  const MatrixRow warp_rows = matrix_row(tile, 16 * warp);
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int block = 2 * warpgroup + pair;
    const uint32_t* const x = gated + 4 * pair;
    if (block < warp) {
      store_matrices(warp_rows.at(2 * block), x[0], x[1], x[2], x[3]);
      store_matrices_transposed(matrix_row(tile, 16 * block).at(2 * warp), x[0], x[2], x[1], x[3]);
    } else if (block == warp) {
      store_matrices(warp_rows.at(2 * block), x[0] | transposed(x[0]), x[1], transposed(x[1]), x[3] | transposed(x[3]));
    }
  }
}

// tile = fragment, rounded, kRows x 128. Each warpgroup, in order, stages its 64 rows.
template <typename T, int kRows>
__device__ __forceinline__ void stage_fragment(const float* fragment, void* tile) {
  const int first_row = 16 * (static_cast<int>(threadIdx.x) / 32 % (kRows / 16));
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    const MatrixRow to = matrix_row(static_cast<char*>(tile) + panel * kRows * kRowBytes, first_row);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t rounded[4];
      round_eight<T>(rounded, fragment + 32 * panel + 4 * n);
      store_matrices(to.at(n), rounded[0], rounded[1], rounded[2], rounded[3]);
    }
  }
}

// sums[w] = factor * sum(a * b) over rows 16 w to 16 w + 15 of two tiles of kRows x 128, by warp w of the CTA's first
// kRows / 16 warps.
template <typename T, int kRows>
__device__ __forceinline__ void tile_product(const void* a, const void* b, float factor, float* sums) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  Diagonal<T> diagonal;
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    const int at = panel * kRows * kRowBytes;
    const MatrixRow from = matrix_row(static_cast<const char*>(a) + at, 16 * warp);
    const MatrixRow with = factor_row(static_cast<const char*>(b) + at, 16 * warp);
    diagonal.add_panel(from, with);
  }
  const float sum = sum_of_lanes<32>(diagonal.sum());
  if (lane_here() == 0) {
    sums[warp] = factor * sum;
  }
}

// fragment[i][j] *= factor factors[j], 64 columns.
__device__ __forceinline__ void multiply_columns(float* fragment, const float* factors, float factor, int column) {
  float x[16];
  load_column_factors(x, factors, column);
#pragma unroll
  for (float& one : x) {
    one *= factor;
  }
  scale_columns(fragment, x);
}

// faded = fragment diag(-a * b) as a left factor of WGMMA, 64 columns.
template <typename T>
__device__ __forceinline__ void fade_columns(void* faded, const float* fragment, const float* a, const float* b,
                                             int column) {
  float x[16];
  load_column_products(x, a, b, column);
  round_scaled_columns<T>(faded, fragment, x);
}

// dV = diag(beta) U for 32 tokens from `first` on, by one warp; a half-warp takes a row. U is a tile of 64 x 128; dV
// has its first `columns` columns.
template <typename T>
__device__ __forceinline__ void store_value_gradients(const void* U, void* dv_rows, int stride, const float* beta,
                                                      int first, int valid, int columns) {
  constexpr int kRows = 4;  // rows that a half-warp has in flight
  const int lane = lane_here(), piece = lane & 15, begin = first + (lane >> 4);
  const char* const panel = static_cast<const char*>(U) + (piece / 8) * kChunk * kRowBytes;
  T* dv = static_cast<T*>(dv_rows) + begin * stride + 8 * piece;
#pragma unroll 1
  for (int row = begin; row < first + 32; row += 2 * kRows) {
    uint4 u[kRows];
    float factor[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      u[i] = *reinterpret_cast<const uint4*>(panel + swizzled(row + 2 * i, piece & 7));
      factor[i] = beta[row + 2 * i];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      for (uint32_t* const x : {&u[i].x, &u[i].y, &u[i].z, &u[i].w}) {
        const float2 pair = unpack(T(), *x);
        *x = pack(T(), factor[i] * pair.x, factor[i] * pair.y);
      }
      if (row + 2 * i < valid && 8 * piece < columns) {
        *reinterpret_cast<uint4*>(dv + 2 * i * stride) = u[i];
      }
    }
    dv += 2 * kRows * stride;
  }
}

// sums = rowsum(U * V) for 32 tokens from `first` on, only where needs_V is true. One warp calls it; a half-warp takes
// a row.
template <typename T>
__device__ __forceinline__ void dot_values(const void* U, const void* v_rows, int stride, const float* beta,
                                           float* sums, int first, int valid, int columns) {
  const int lane = lane_here(), piece = lane & 15;
  if (!__any_sync(~0u, first + lane < valid && needs_V(T(), beta[first + lane]))) {
    return;
  }
  const char* const panel = static_cast<const char*>(U) + (piece / 8) * kChunk * kRowBytes;
  const T* const v = static_cast<const T*>(v_rows) + 8 * piece;
#pragma unroll 2
  for (int row = first + (lane >> 4); row < first + 32; row += 2) {
    const bool with_V = row < valid && needs_V(T(), beta[row]);
    const uint4 u = *reinterpret_cast<const uint4*>(panel + swizzled(row, piece & 7));
    uint4 values = {};
    if (with_V && 8 * piece < columns) {
      values = __ldg(reinterpret_cast<const uint4*>(v + row * stride));
    }
    float sum = 0.f;
    const auto add = [&](uint32_t x, uint32_t value) {
      const float2 a = unpack(T(), x), b = unpack(T(), value);
      sum += a.x * b.x + a.y * b.y;
    };
    add(u.x, values.x);
    add(u.y, values.y);
    add(u.z, values.z);
    add(u.w, values.w);
    sum = sum_of_lanes<16>(sum);
    if (with_V && piece == 0) {
      sums[row] = sum;
    }
  }
}

constexpr float kForgotten = -150.f;  // log2 of a decay that is 0 in fp32

// dbeta and dg of a chunk (formula in chunk_backward.py), by one warp, from the rows of TokenSum and of BackwardGate
// or, with kNormalize, NormalizedGate. Lane l has tokens 2l and 2l + 1.
template <typename T, bool kNormalize = false>
__device__ __forceinline__ void store_gate_gradients(const float* sums, const float* columns, const float* products,
                                                     const float* gates, float* db, float* dg, int stride, int valid) {
  const int lane = lane_here();
  const auto pair = [&](const float* from) { return *reinterpret_cast<const float2*>(from + 2 * lane); };
  // If e^g is 0, dg is 0: the sums would leave a rounding error, which dA_log multiplies by g, down to -1024. A ballot
  // keeps one bit for each token, because registers are scarce.
  static_assert(BackwardGate::kLog == NormalizedGate::kLog && BackwardGate::kBeta == NormalizedGate::kBeta);
  const float2 logs = pair(gates + BackwardGate::kLog * kChunk);
  const float before = __shfl_up_sync(~0u, logs.y, 1);
  const unsigned bits[2] = {__ballot_sync(~0u, logs.x - (lane > 0 ? before : 0.f) < kForgotten),
                            __ballot_sync(~0u, logs.y - logs.x < kForgotten)};
  const float2 yq = pair(sums + TokenSum::kQuery * kChunk), z = pair(sums + TokenSum::kKey * kChunk);
  const float2 x = pair(sums + TokenSum::kState * kChunk), uv = pair(sums + TokenSum::kValue * kChunk);
  const auto both = [&](int row) {
    const float2 a = pair(sums + row * kChunk), b = pair(sums + (row + 1) * kChunk);
    return float2{a.x + b.x, a.y + b.y};
  };
  const float2 between = both(TokenSum::kBetween), f = both(TokenSum::kBeta);
  const float2 betas = pair(gates + BackwardGate::kBeta * kChunk);
  float below[2] = {};
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const float2 c = pair(columns + part * kChunk);
    below[0] += c.x;
    below[1] += c.y;
  }
  const float y[2] = {yq.x + between.x + betas.x * (f.x - x.x) - below[0],
                      yq.y + between.y + betas.y * (f.y - x.y) - below[1]};
  // suffix = sum of y over this lane and later ones, prefix = sum of z over earlier lanes. A total minus a sum would
  // lose digits, because no decay reduces the last token's z.
  float suffix = y[0] + y[1], prefix = __shfl_up_sync(~0u, z.x + z.y, 1);
  prefix = lane > 0 ? prefix : 0.f;
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
  if constexpr (kNormalize) {
    state *= exp2_fast(load_factor(gates + NormalizedGate::kLog * kChunk + kChunk - 1));
  } else {
    state *= load_factor(gates + BackwardGate::kGamma * kChunk + kChunk - 1);
  }
  const bool forgets[2] = {(bits[0] >> lane & 1) != 0, (bits[1] >> lane & 1) != 0};
  const float gradient[2] = {suffix + prefix + state, suffix - y[0] + prefix + z.x + state};
  const float betas_gradient[2] = {needs_V(T(), betas.x) ? uv.x - x.x + f.x : uv.x,
                                   needs_V(T(), betas.y) ? uv.y - x.y + f.y : uv.y};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    if (token < valid) {
      db[token * stride] = betas_gradient[i];
      dg[token * stride] = forgets[i] ? 0.f : gradient[i];
    }
  }
}

}  // namespace flash_qla::device
