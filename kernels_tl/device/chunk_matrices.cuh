// What one warpgroup makes of a chunk for those that carry the state: the gates' factors, the gated inverse A * D - I
// and the gated attention, both transposed, in shared memory.
//
//   A = (I + L)^-1, L = stril(diag(beta) K K^T)            D_ij = exp(b_i - b_j) for i >= j, else 0
//
// The inverse is blockwise, 4 x 4 blocks of 16 x 16. Each warp inverts one diagonal block by forward substitution in
// fp32, one lane a column. Then each warp makes one block column of A from top to bottom,
//
//   A_ij = -A_ii (L_ij A_jj + ... + L_i,i-1 A_i-1,j)
//
// in TF32 with fp32 accumulation (for fp16 in two TF32 parts). It works on the transposed blocks, A_ij^T = -(sum of
// A_lj^T L_il^T) A_ii^T: so the accumulators of one product are the left factor of the next, in registers (with K's
// order permuted alike on both sides), and no warp waits for another.
#pragma once

#include <type_traits>

#include "device/warp.cuh"

namespace flash_qla::device {

constexpr int kChunk = 64;
constexpr int kBlock = 16;
constexpr int kPitchL = 72;  // floats a row: 8-byte reads of a half-warp meet all banks
constexpr int kPitchY = 24;  // likewise

// Rows of the gate table in shared memory, of kChunk floats each.
enum Gate {
  kBeta,            // two rows of pairs: beta_i; beta_i exp(b_i), times 1 / |k_i| with l2norm
  kScaleGamma = 2,  // scale exp(b_i), times 1 / |q_i|
  kDecay,           // exp(b_C - b_i), times 1 / |k_i|
  kTotal,           // exp(b_C), in all places
  kB,               // b_i log2(e)
  kBound,           // [warp]: sum of log2 max(1, |1 - beta_i |k_i|^2|) over its tokens, see segments.cuh
  kGates
};

// Beside it, for all heads, only with the l2norm: 1 / |k_i|, then 1 / |q_i|.

constexpr int kTileBytes = kChunk * kChunk * 2;
constexpr float kNormEps = 1e-6f;  // as in transformers

// The table, by one warp: lane l brings g and beta of tokens l and l + 32, both 0 behind the chunk's last token. The
// first `valid` of b go to b_rows, `stride` apart.
template <bool kNormalize>
__device__ __forceinline__ void chunk_gates(float* gates, const float* norms, float g_low, float g_high, float beta_low,
                                            float beta_high, float scale, float* b_rows, int64_t stride, int valid) {
  const int lane = threadIdx.x & 31;
  float b[2] = {g_low * kLog2e, g_high * kLog2e};
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float below = __shfl_up_sync(~0u, b[i], step);
      b[i] += lane >= step ? below : 0.f;
    }
  }
  b[1] += __shfl_sync(~0u, b[0], 31);
  const float total = __shfl_sync(~0u, b[1], 31);
  const float beta[2] = {beta_low, beta_high};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    float* const column = gates + token;
    const float gamma = exp2_fast(b[i]);
    const float rstd_k = kNormalize ? norms[token] : 1.f, rstd_q = kNormalize ? norms[kChunk + token] : 1.f;
    reinterpret_cast<float2*>(gates + kBeta * kChunk)[token] = {beta[i], beta[i] * gamma * rstd_k};
    column[kScaleGamma * kChunk] = scale * gamma * rstd_q;
    column[kDecay * kChunk] = exp2_fast(total - b[i]) * rstd_k;
    column[kTotal * kChunk] = exp2_fast(total);
    column[kB * kChunk] = b[i];
    if (token < valid) {
      b_rows[token * stride] = b[i] * kLn2;
    }
  }
}

// The norms, once for all heads of the chunk: 1 / |k_i| from the diagonal of K K^T and 1 / |q_i| from Q in shared
// memory.
template <typename T>
__device__ __forceinline__ void chunk_norms(float* norms, const float* KK, const void* Q) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const int g = lane >> 2, t = lane & 3;
  if (t == g >> 1) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n >> 1 == warp) {
        const float* x = KK + 4 * n + 2 * (n & 1);
        const float square = g & 1 ? x[1] : x[0];
        norms[8 * n + g] = square > 0.f ? rsqrtf(square + kNormEps) : 0.f;  // of zeros: a factor that fp16 can hold
      }
    }
  }
  // Half a row a thread; the two halves of a row are in lanes 16 apart.
  const int row = 16 * warp + (lane & 15), half = lane >> 4;
  const char* const base = static_cast<const char*>(Q) + half * (kChunk * 128);
  float sum = 0.f;
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    const uint4 data = *reinterpret_cast<const uint4*>(base + swizzled(row, piece));
    const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack(T(), words[i]);
      sum += pair.x * pair.x + pair.y * pair.y;
    }
  }
  sum += __shfl_xor_sync(~0u, sum, 16);
  norms[kChunk + row] = rsqrtf(sum + kNormEps);  // twice, the same
}

// The tokens' part of the bound on the chunk's map, from the diagonal of K K^T.
template <bool kNormalize>
__device__ __forceinline__ void chunk_bound(float* gates, const float* norms, const float* KK) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const int g = lane >> 2, t = lane & 3;
  float product = 1.f;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n >> 1 == warp && t == g >> 1) {
      float square = g & 1 ? KK[4 * n + 2 * (n & 1) + 1] : KK[4 * n + 2 * (n & 1)];
      if constexpr (kNormalize) {
        const float rstd = norms[8 * n + g];
        square *= rstd * rstd;
      }
      product *= fmaxf(1.f, fabsf(1.f - gates[kBeta * kChunk + 2 * (8 * n + g)] * square));
    }
  }
  float sum = __log2f(product);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    sum += __shfl_xor_sync(~0u, sum, step);
  }
  gates[kBound * kChunk + warp] = sum;
}

// Factors of the TF32 products. bf16 results are content with rounded factors; fp16 ones get them in two parts each.
template <typename T>
constexpr bool kTwoParts = std::is_same_v<T, __half>;

template <typename T>
__device__ __forceinline__ float as_factor(float x) {
  return kTwoParts<T> ? x : round_to_tf32(x);
}

// Y = (I + L)^-1 of this warp's diagonal block; L and Y in shared memory.
template <typename T>
__device__ __forceinline__ void invert_diagonal_block(const float* L, float* Y) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const int column = lane & 15;
  const float* const block = L + kBlock * warp * (kPitchL + 1);
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float row[kBlock];
#pragma unroll
    for (int l = 0; l < i; l += 4) {
      *reinterpret_cast<float4*>(row + l) = *reinterpret_cast<const float4*>(block + i * kPitchL + l);
    }
    float sum[2] = {i == column ? 1.f : 0.f, 0.f};
#pragma unroll
    for (int l = 0; l < i; ++l) {
      sum[(i - l) & 1] -= row[l] * x[l];
    }
    x[i] = sum[0] + sum[1];
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    Y[(kBlock * warp + i) * kPitchY + column] =
        as_factor<T>(x[i]);  // twice, as there are two lanes a column: no branch
  }
}

// acc += left block^T, 16 x 16 x 16. left is a block of accumulators, [2][4]; block is in shared memory, `pitch` floats
// a row; both hold factors. K's order is permuted as accumulators are, on both sides.
template <typename T>
__device__ __forceinline__ void multiply(float (&acc)[2][4], const float (&left)[2][4], const float* block, int pitch) {
  const int lane = threadIdx.x & 31;
  const float* const from = block + (lane >> 2) * pitch + 2 * (lane & 3);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float a[4], a_rest[4];
    if constexpr (kTwoParts<T>) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a[e] = truncate_to_tf32(left[k][e]);
        a_rest[e] = left[k][e] - a[e];
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 right = *reinterpret_cast<const float2*>(from + 8 * n * pitch + 8 * k);
      if constexpr (kTwoParts<T>) {
        const float2 b = {truncate_to_tf32(right.x), truncate_to_tf32(right.y)};
        mma_tf32(acc[n], a_rest[0], a_rest[2], a_rest[1], a_rest[3], b.x, b.y);
        mma_tf32(acc[n], a[0], a[2], a[1], a[3], right.x - b.x, right.y - b.y);
        mma_tf32(acc[n], a[0], a[2], a[1], a[3], b.x, b.y);
      } else {
        mma_tf32(acc[n], left[k][0], left[k][2], left[k][1], left[k][3], right.x, right.y);
      }
    }
  }
}

// By four warps: L, and the inverse's diagonal blocks Y, to shared memory.
//
//   KK   fragment (see tiles.cuh) of K K^T
template <typename T, bool kNormalize>
__device__ __forceinline__ void invert_diagonal(const float* KK, float* gates, const float* norms, float* L, void* Y) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const int g = lane >> 2, t = lane & 3;

  warpgroup_sync(kMatricesBarrier);  // gates and norms are there; the last head's L and Y have been read
  chunk_bound<kNormalize>(gates, norms, KK);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * warp + g + 8 * h;
    float factor = gates[kBeta * kChunk + 2 * row];
    if constexpr (kNormalize) {
      factor *= norms[row];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n <= 2 * warp + 1) {
        const int column = 8 * n + 2 * t;
        float2 pair = {factor * KK[4 * n + 2 * h], factor * KK[4 * n + 2 * h + 1]};
        if constexpr (kNormalize) {
          const float2 rstd = *reinterpret_cast<const float2*>(norms + column);
          pair.x *= rstd.x;
          pair.y *= rstd.y;
        }
        if (n < 2 * warp) {  // a factor of the products
          pair = {as_factor<T>(pair.x), as_factor<T>(pair.y)};
        }
        *reinterpret_cast<float2*>(L + row * kPitchL + column) = pair;
      }
    }
  }
  __syncwarp();
  invert_diagonal_block<T>(L, static_cast<float*>(Y));
  warpgroup_sync(kMatricesBarrier);
}

// The blocks below it: each warp leaves with the block column of its own index j, transposed. X[i] is
// A_ij^T for i >= j; X[0] is A_jj^T.
template <typename T>
__device__ __forceinline__ void invert_below(float* X_registers, const float* L, const void* diagonals) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const int g = lane >> 2, t = lane & 3;
  const float* const Y = static_cast<const float*>(diagonals);
  auto& X = *reinterpret_cast<float (*)[4][2][4]>(X_registers);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      X[0][k][e] = Y[(kBlock * warp + 8 * k + 2 * t + (e & 1)) * kPitchY + g + 8 * (e >> 1)];
    }
  }
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    if (i > warp) {
      float sum[2][4] = {}, product[2][4] = {};
      multiply<T>(sum, X[0], L + kBlock * i * kPitchL + kBlock * warp, kPitchL);
#pragma unroll
      for (int l = 1; l < i; ++l) {
        if (l > warp) {
          multiply<T>(sum, X[l], L + kBlock * i * kPitchL + kBlock * l, kPitchL);
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[k][e] = as_factor<T>(-sum[k][e]);
        }
      }
      multiply<T>(product, sum, Y + kBlock * i * kPitchY, kPitchY);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          X[i][k][e] = as_factor<T>(product[k][e]);
        }
      }
    }
  }
}

// One 16 x 16 block (i, j = warp) of both gated matrices, transposed. On the diagonal what lies below it, transposed,
// is cut off.
template <typename T, bool kNormalize, bool kDiagonal>
__device__ __forceinline__ void gate_block(const float (&X)[2][4], const float (&KQ)[2][4], const float* gates,
                                           const float* norms, int i, const float (&b_row)[2],
                                           const float (&norm_row)[2], uint32_t inverse, uint32_t attention) {
  const int lane = threadIdx.x & 31;
  const int g = lane >> 2, t = lane & 3;
  uint32_t gated[2][2], attended[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int column = 16 * i + 8 * n + 2 * t;
    const float2 b = *reinterpret_cast<const float2*>(gates + kB * kChunk + column);
    float2 norm = {1.f, 1.f};
    if constexpr (kNormalize) {
      norm = *reinterpret_cast<const float2*>(norms + kChunk + column);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2], p[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int distance = 8 * n + 2 * t + e - (g + 8 * h);  // on the diagonal
        const float d = exp2_fast((e ? b.y : b.x) - b_row[h]);
        float factor = d * norm_row[h];
        if constexpr (kNormalize) {
          factor *= e ? norm.y : norm.x;
        }
        x[e] = X[n][2 * h + e] * d;
        p[e] = KQ[n][2 * h + e] * factor;
        if constexpr (kDiagonal) {
          x[e] = distance > 0 ? x[e] : 0.f;
          p[e] = distance >= 0 ? p[e] : 0.f;
        }
      }
      gated[n][h] = pack(T(), x[0], x[1]);
      attended[n][h] = pack(T(), p[0], p[1]);
    }
  }
  const uint32_t piece = (2 * i + (lane >> 4)) << 4;
  store_matrices(inverse ^ piece, gated[0][0], gated[0][1], gated[1][0], gated[1][1]);
  store_matrices(attention ^ piece, attended[0][0], attended[0][1], attended[1][0], attended[1][1]);
}

// All of them, from the X that invert_below left and the fragment of K Q^T: inverse = (A * D - I)^T and
// attention = scale (tril(Q K^T) * D)^T, 64 x 64, swizzled, one behind the other.
template <typename T, bool kNormalize>
__device__ __forceinline__ void gate_matrices(const float* X_registers, const float* KQ_registers, const float* gates,
                                              const float* norms, void* tiles, float scale) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const int g = lane >> 2, t = lane & 3;
  const auto& X = *reinterpret_cast<const float (*)[4][2][4]>(X_registers);
  const auto& KQ = *reinterpret_cast<const float (*)[4][2][4]>(KQ_registers);
  float b_row[2], norm_row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    b_row[h] = gates[kB * kChunk + 16 * warp + g + 8 * h];
    norm_row[h] = scale;
    if constexpr (kNormalize) {
      norm_row[h] *= norms[16 * warp + g + 8 * h];
    }
  }
  // Row 16 warp + lane % 16 of both.
  const uint32_t row = swizzled(16 * warp + (lane & 15), 0);
  const uint32_t to_inverse = shared_address(tiles) + row, to_attention = to_inverse + kTileBytes;
  float KQ_diagonal[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float low = warp & 1 ? KQ[1][n][e] : KQ[0][n][e], high = warp & 1 ? KQ[3][n][e] : KQ[2][n][e];
      KQ_diagonal[n][e] = warp & 2 ? high : low;
    }
  }
  gate_block<T, kNormalize, true>(X[0], KQ_diagonal, gates, norms, warp, b_row, norm_row, to_inverse, to_attention);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (i < warp) {
      const uint32_t piece = (2 * i + (lane >> 4)) << 4;
      store_matrices(to_inverse ^ piece, 0, 0, 0, 0);
      store_matrices(to_attention ^ piece, 0, 0, 0, 0);
    }
  }
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    if (i > warp) {
      gate_block<T, kNormalize, false>(X[i], KQ[i], gates, norms, i, b_row, norm_row, to_inverse, to_attention);
    }
  }
}

// The first `valid` rows of A itself, `stride` elements apart.
template <typename T>
__device__ __forceinline__ void store_inverse(const float* X_registers, void* A, int stride, int valid) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const int g = lane >> 2, t = lane & 3;
  const auto& X = *reinterpret_cast<const float (*)[4][2][4]>(X_registers);
  T* const to = static_cast<T*>(A) + 16 * warp + 2 * t;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int token = 16 * i + 8 * n + g;
      uint32_t pair[2] = {0, 0};
      if (i >= warp) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float low = i == warp ? X[0][n][2 * h] : X[i][n][2 * h];
          const float high = i == warp ? X[0][n][2 * h + 1] : X[i][n][2 * h + 1];
          pair[h] = transpose(pack(T(), low, high));
        }
      }
      if (token < valid) {
        uint32_t* const row = reinterpret_cast<uint32_t*>(to + token * stride);
        row[0] = pair[0];
        row[4] = pair[1];
      }
    }
  }
}

}  // namespace flash_qla::device
