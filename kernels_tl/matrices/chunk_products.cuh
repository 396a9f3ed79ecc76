// K K^T and K Q^T of a chunk, in shared memory for all value heads of a group. With the l2norm inside, K and Q are the
// normalized ones.
#pragma once

#include <type_traits>

#include "core/warp.cuh"

namespace flash_qla::device {

// The layout in shared memory. `blocks`: ten blocks of scale K Q^T on and above the diagonal, then six blocks of K K^T
// below it. A block holds a lane's accumulators as two float4: of columns 0 to 7, and of columns 8 to 15. `diagonals`:
// the four diagonal blocks of K K^T by rows.
constexpr int kBlockFloats = kBlock * kBlock;
constexpr int kBlockPieces = kBlockFloats / 4;

__device__ __forceinline__ int attention_block(int column, int row) { return column * (column + 1) / 2 + row; }
__device__ __forceinline__ int product_block(int row, int column) { return 10 + row * (row - 1) / 2 + column; }

// use(i, x_ii) for the diagonal of a 64 x 64 matrix in fragments (see tiles.cuh), by four warps. One lane calls it for
// each i.
template <typename Use>
__device__ __forceinline__ void for_diagonal(const float* x, Use use) {
  const int lane = threadIdx.x & 31, warp = warp_index();
  const int g = lane >> 2, t = lane & 3;
  if (t == g >> 1) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (n >> 1 == warp) {
        const float* const pair = x + 4 * n + 2 * (n & 1);
        use(8 * n + g, g & 1 ? pair[1] : pair[0]);
      }
    }
  }
}

// 1 / |x| of a row x.
__device__ __forceinline__ float rstd(float square) { return rsqrtf(square + float{kNormEps}); }

// norms[i] = scale / |q_i| for the rows of a tile of 64 x kK, by four warps.
template <typename T, int kK>
__device__ __forceinline__ void query_norms(float* norms, const void* Q, float scale) {
  // A thread has half a row, every other panel of 64 channels; the two halves of a row are in lanes 16 apart.
  const int lane = threadIdx.x & 31;
  const int row = 16 * warp_index() + (lane & 15), half = lane >> 4;
  const char* const base = static_cast<const char*>(Q) + half * (kChunk * 128);
  float sum = 0.f;
#pragma unroll
  for (int panel = 0; panel < kK / 64; panel += 2) {
#pragma unroll 4
    for (int piece = 0; piece < 8; ++piece) {
      const uint4 data = *reinterpret_cast<const uint4*>(base + panel * (kChunk * 128) + swizzled(row, piece));
      const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(T(), words[i]);
        sum += pair.x * pair.x + pair.y * pair.y;
      }
    }
  }
  sum += __shfl_xor_sync(~0u, sum, 16);
  norms[row] = scale * rstd(sum);  // both lanes of a row write the same number
}

// The same, but 0 for a row of zeros, because fp16 cannot hold its factor.
__device__ __forceinline__ float key_norm(float square) { return square > 0.f ? rstd(square) : 0.f; }

// norms = 1 / |k_i| of a chunk, from the diagonal of K K^T, then 1 / |q_i|, from Q in shared memory. Four warps call
// it.
template <typename T, int kK>
__device__ __forceinline__ void chunk_norms(float* norms, const float* KK, const void* Q) {
  // The backward in bf16 needs the factor of a row of zeros, too.
  for_diagonal(
      KK, [norms](int i, float square) { norms[i] = std::is_same_v<T, __half> ? key_norm(square) : rstd(square); });
  query_norms<T, kK>(norms + kChunk, Q, 1.f);
}

// TF32 parts of a factor: one rounded part is enough for bf16 results, fp16 results need two. Functions that multiply
// have the number of parts as a parameter.
template <typename T>
constexpr int kTf32Parts = std::is_same_v<T, __half> ? 2 : 1;

template <int kParts>
__device__ __forceinline__ float as_factor(float x) {
  return kParts == 2 ? x : round_to_tf32(x);
}

// Writes fragments (see tiles.cuh) of K K^T and K Q^T to shared memory with the norms applied, by four warps.
template <typename T, bool kNormalize>
__device__ __forceinline__ void store_products(const float* KK, const float* KQ, const float* norms, void* blocks,
                                               float* diagonals, float scale) {
  float4* const to_blocks = static_cast<float4*>(blocks);
  const int lane = threadIdx.x & 31, warp = warp_index();
  const int g = lane >> 2, t = lane & 3;
  float norm_row[2] = {1.f, 1.f};
  if constexpr (kNormalize) {
    norm_row[0] = norms[16 * warp + g];
    norm_row[1] = norms[16 * warp + g + 8];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float* const kk = KK + 8 * i + 4 * n;
      const float* const kq = KQ + 8 * i + 4 * n;
      const int column = 16 * i + 8 * n + 2 * t;
      float x[4], y[4];
      float2 norm_k = {1.f, 1.f}, norm_q = {1.f, 1.f};
      if constexpr (kNormalize) {
        norm_k = *reinterpret_cast<const float2*>(norms + column);
        norm_q = *reinterpret_cast<const float2*>(norms + kChunk + column);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = kk[e];
        y[e] = kq[e] * scale;
        if constexpr (kNormalize) {
          x[e] *= norm_row[e >> 1] * (e & 1 ? norm_k.y : norm_k.x);
          y[e] *= norm_row[e >> 1] * (e & 1 ? norm_q.y : norm_q.x);
        }
      }
      if (i < warp) {
        to_blocks[product_block(warp, i) * kBlockPieces + 32 * n + lane] = {
            as_factor<kTf32Parts<T>>(x[0]), as_factor<kTf32Parts<T>>(x[1]), as_factor<kTf32Parts<T>>(x[2]),
            as_factor<kTf32Parts<T>>(x[3])};
      }
      if (i == warp) {
        float* const to = diagonals + i * kDiagonalStride + g * kBlock + 8 * n + 2 * t;
        *reinterpret_cast<float2*>(to) = {x[0], x[1]};
        *reinterpret_cast<float2*>(to + 8 * kBlock) = {x[2], x[3]};
      }
      if (i >= warp) {
        to_blocks[attention_block(i, warp) * kBlockPieces + 32 * n + lane] = {y[0], y[1], y[2], y[3]};
      }
    }
  }
}

}  // namespace flash_qla::device
