// What a chunk gives to those that carry the state: the gates' factors, the gated inverse A * D - I and the gated
// attention, both transposed.
//
//   A = (I + L)^-1, L = stril(diag(beta) K K^T)            D_ij = exp(b_i - b_j) for i >= j, else 0
//
// The inverse is blockwise, 4 x 4 blocks of 16 x 16. The diagonal blocks are inverted by forward substitution in fp32,
// one lane a column and two blocks a warp. Then a block column of A is made from top to bottom,
//
//   A_ij = -A_ii (L_ij A_jj + ... + L_i,i-1 A_i-1,j)
//
// in TF32 with fp32 accumulation (for fp16 in two TF32 parts), by one warp. It works on the transposed blocks, A_ij^T =
// -(sum of A_lj^T L_il^T) A_ii^T: so the accumulators of one product are the left factor of the next, in registers
// (with K's order permuted alike on both sides).
//
// beta, the gates and all that follows are one value head's; K K^T and Q K^T are a group's. So these lie in shared
// memory, beta is applied where L is used, and each of the CTA's warps works on a value head of its own (or, where the
// heads are fewer, two or four warps on one: a team), without waiting for the others.
#pragma once

#include <type_traits>

#include "device/warp.cuh"

namespace flash_qla::device {

constexpr int kChunk = 64;
constexpr int kBlock = 16;

// K K^T and K Q^T in shared memory. `blocks`: the ten blocks of K Q^T on and above the diagonal, scaled, then the six
// of K K^T below it, each of eight floats a lane as the accumulators have them: two float4, of columns 0 to 7 and 8 to
// 15. `diagonals`: the four diagonal blocks of K K^T by rows.
constexpr int kBlockFloats = kBlock * kBlock;
constexpr int kBlockPieces = kBlockFloats / 4;
constexpr int kDiagonalStride = kBlockFloats + 4;  // two blocks' rows are read together, from different banks

__device__ __forceinline__ int attention_block(int column, int row) { return column * (column + 1) / 2 + row; }
__device__ __forceinline__ int product_block(int row, int column) { return 10 + row * (row - 1) / 2 + column; }

// The inverted diagonal blocks of a head: 16 rows of 16 floats, columns 0 to 7 and 8 to 15 changing places in rows 2,
// 3, 6, 7, ..., so that 8-byte reads of a half-warp meet all banks.
constexpr int kInverseStride = kBlockFloats + 16;
__device__ __forceinline__ int in_inverse(int row, int column) { return row * kBlock + (column ^ ((row & 2) << 2)); }

// Rows of the gate table in global memory, of kChunk floats each.
enum Gate {
  kBeta,            // two rows of pairs: beta_i; beta_i exp(b_i), times 1 / |k_i| with l2norm
  kScaleGamma = 2,  // scale exp(b_i), times 1 / |q_i|
  kDecay,           // exp(b_C - b_i), times 1 / |k_i|
  kTotal,           // exp(b_C), the log2 norm bound of segments.cuh; the rest is unused
};

constexpr int kColumnBytes = kBlock * kChunk * 2;  // of a block column of one matrix, transposed
constexpr float kNormEps = 1e-6f;                  // as in transformers

// The lane, as a value that the compiler does not know: what is computed from it is computed there, not kept in
// registers from before the loops around it.
__device__ __forceinline__ int lane_here() {
  int lane = threadIdx.x & 31;
  asm volatile("" : "+r"(lane));
  return lane;
}

__device__ __forceinline__ void team_sync(int team, int warps) {
  if (warps == 1) {
    __syncwarp();
  } else if (team == 0) {
    asm volatile("bar.sync %0, %1;" ::"n"(kTeamBarrier), "r"(32 * warps) : "memory");
  } else {
    asm volatile("bar.sync %0, %1;" ::"n"(kTeamBarrier + 1), "r"(32 * warps) : "memory");
  }
}

// By four warps: 1 / |k_i| and 1 / |q_i|, from the diagonal of K K^T and from Q in shared memory.
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

// Factors of the TF32 products. bf16 results are content with rounded factors; fp16 ones get them in two parts each.
template <typename T>
constexpr bool kTwoParts = std::is_same_v<T, __half>;

template <typename T>
__device__ __forceinline__ float as_factor(float x) {
  return kTwoParts<T> ? x : round_to_tf32(x);
}

// By four warps: the fragments (see tiles.cuh) of K K^T and K Q^T to shared memory, with the norms applied.
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
        to_blocks[product_block(warp, i) * kBlockPieces + 32 * n + lane] = {as_factor<T>(x[0]), as_factor<T>(x[1]),
                                                                            as_factor<T>(x[2]), as_factor<T>(x[3])};
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

// By one warp: of `heads` neighbouring value heads what `rows` holds at the chunk's tokens, token rows `stride` apart;
// behind `length` tokens 0. Lane 8 l + i has the tokens 8 i to 8 i + 7 of head l: the heads of a token share a line.
__device__ __forceinline__ void load_heads(float (&x)[8], const float* rows, int64_t stride, int heads, int length) {
  const int head = (threadIdx.x & 31) / 8, first = threadIdx.x % 8 * 8;
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    x[s] = head < heads && first + s < length ? rows[(first + s) * stride + head] : 0.f;
  }
}

__device__ __forceinline__ void store_head(float* to, const float (&x)[8]) {
  float4* const pieces = reinterpret_cast<float4*>(to + threadIdx.x % 8 * 8);
  pieces[0] = {x[0], x[1], x[2], x[3]};
  pieces[1] = {x[4], x[5], x[6], x[7]};
}

constexpr int kHeadGates = 2 * kChunk;  // floats in shared memory for each head: b log2(e), beta

// By one warp: b log2(e) of `heads` heads to `gates`, and b of the first `valid` tokens to b_rows.
__device__ __forceinline__ void load_gates(float* gates, const float* g, float* b_rows, int64_t stride, int heads,
                                           int length, int valid) {
  const int head = (threadIdx.x & 31) / 8, i = threadIdx.x % 8;
  float b[8];
  load_heads(b, g, stride, heads, length);
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    b[s] = b[s] * kLog2e + (s > 0 ? b[s - 1] : 0.f);
  }
  float before = b[7];
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    const float below = __shfl_up_sync(~0u, before, step, 8);
    before += i >= step ? below : 0.f;
  }
  before = __shfl_up_sync(~0u, before, 1, 8);
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    b[s] += i > 0 ? before : 0.f;
    if (head < heads && 8 * i + s < valid) {
      b_rows[(8 * i + s) * stride + head] = b[s] * kLn2;
    }
  }
  store_head(gates + head * kHeadGates, b);
}

// By one warp: likewise beta.
__device__ __forceinline__ void load_beta(float* gates, const float* beta_rows, int64_t stride, int heads, int length) {
  float beta[8];
  load_heads(beta, beta_rows, stride, heads, length);
  store_head(gates + (threadIdx.x & 31) / 8 * kHeadGates + kChunk, beta);
}

// By one warp: a head's table in global memory. Lane l has the tokens l and l + 32: so it brings their 1 / |k| and
// scale / |q|.
__device__ __forceinline__ void store_gates(const float* gates, const float* diagonals, float rstd_k_low,
                                            float rstd_k_high, float scale_q_low, float scale_q_high, float* table) {
  const int lane = lane_here();
  const float rstd_k[2] = {rstd_k_low, rstd_k_high}, scale_q[2] = {scale_q_low, scale_q_high};
  const float total = gates[kChunk - 1];
  float growth = 1.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    const float b = gates[token], beta = gates[kChunk + token], gamma = exp2_fast(b);
    const float square = diagonals[(token / kBlock) * kDiagonalStride + (token % kBlock) * (kBlock + 1)];
    growth *= fmaxf(1.f, fabsf(1.f - beta * square));
    reinterpret_cast<float2*>(table + kBeta * kChunk)[token] = {beta, beta * gamma * rstd_k[i]};
    table[kScaleGamma * kChunk + token] = scale_q[i] * gamma;
    table[kDecay * kChunk + token] = exp2_fast(total - b) * rstd_k[i];
  }
  float bound = __log2f(growth);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    bound += __shfl_xor_sync(~0u, bound, step);
  }
  if (lane < 2) {
    table[kTotal * kChunk + lane] = lane == 0 ? exp2_fast(total) : total + bound;
  }
}

// By half a warp: Y = (I + L)^-1 of diagonal block `block`, as a factor.
template <typename T>
__device__ __forceinline__ void invert_diagonal(const float* diagonals, const float* gates, float* inverses,
                                                int block) {
  const int column = lane_here() & 15;
  const float* const rows = diagonals + block * kDiagonalStride;
  const float* const beta = gates + kChunk + kBlock * block;
  float* const Y = inverses + block * kInverseStride;
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float row[kBlock];
#pragma unroll
    for (int l = 0; l < i; l += 4) {
      *reinterpret_cast<float4*>(row + l) = *reinterpret_cast<const float4*>(rows + i * kBlock + l);
    }
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int l = 0; l < i; ++l) {
      sum[(i - l) & 1] += row[l] * x[l];
    }
    x[i] = (i == column ? 1.f : 0.f) - beta[i] * (sum[0] + sum[1]);
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {  // in the end: what is stored between them holds back the loads
    Y[in_inverse(i, column)] = as_factor<T>(x[i]);
  }
}

// acc += left right, 16 x 16 x 16: left is a block of accumulators, [2][4]; right[k] holds rows 8k to 8k + 7 of the
// right factor as the accumulators of its transposed hold them. K's order is permuted as accumulators are, on both
// sides.
template <typename T>
__device__ __forceinline__ void multiply(float (&acc)[2][4], const float (&left)[2][4], const float4 (&right)[2]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float2 b[2] = {{right[k].x, right[k].y}, {right[k].z, right[k].w}};
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
      if constexpr (kTwoParts<T>) {
        const float2 high = {truncate_to_tf32(b[n].x), truncate_to_tf32(b[n].y)};
        mma_tf32(acc[n], a_rest[0], a_rest[2], a_rest[1], a_rest[3], high.x, high.y);
        mma_tf32(acc[n], a[0], a[2], a[1], a[3], b[n].x - high.x, b[n].y - high.y);
        mma_tf32(acc[n], a[0], a[2], a[1], a[3], high.x, high.y);
      } else {
        mma_tf32(acc[n], left[k][0], left[k][2], left[k][1], left[k][3], b[n].x, b[n].y);
      }
    }
  }
}

// By one warp: block column j of A, transposed: X[i] is A_ij^T for i >= j.
template <typename T, int j>
__device__ __forceinline__ void invert_column(float (&X)[4][2][4], const void* blocks, const float* inverses,
                                              const float* gates) {
  const int lane = lane_here();
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      X[j][k][e] = inverses[j * kInverseStride + in_inverse(8 * k + 2 * t + (e & 1), g + 8 * (e >> 1))];
    }
  }
#pragma unroll
  for (int i = j + 1; i < 4; ++i) {
    float sum[2][4] = {}, product[2][4] = {};
    float4 right[2];
#pragma unroll
    for (int l = j; l < i; ++l) {
      const float4* const from = static_cast<const float4*>(blocks) + product_block(i, l) * kBlockPieces + lane;
      right[0] = from[0];
      right[1] = from[32];
      multiply<T>(sum, X[l], right);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float2 beta = *reinterpret_cast<const float2*>(gates + kChunk + kBlock * i + 8 * k + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[k][e] = as_factor<T>(sum[k][e] * -(e & 1 ? beta.y : beta.x));
      }
      const float* const from = inverses + i * kInverseStride + in_inverse(g, 8 * k + 2 * t);
      const float2 low = *reinterpret_cast<const float2*>(from);
      const float2 high = *reinterpret_cast<const float2*>(from + 8 * kBlock);
      right[k] = {low.x, low.y, high.x, high.y};
    }
    multiply<T>(product, sum, right);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        X[i][k][e] = as_factor<T>(product[k][e]);
      }
    }
  }
}

// Byte offset of 16-byte piece `piece` of row `row` in a row of blocks, from its diagonal block j on, in shared memory:
// rows of 128 - 32 j bytes under the swizzle of SWIZZLES in chunk_matrices.py.
template <int j>
__device__ __forceinline__ int in_block_row(int row, int piece) {
  constexpr int shift[4] = {0, 0, 1, 2}, mask[4] = {7, 0, 3, 1};
  return row * (128 - 32 * j) + ((piece ^ (row >> shift[j] & mask[j])) << 4);
}

// One 16 x 16 block (i, j) of both gated matrices, transposed. On the diagonal what lies below it, transposed, is cut
// off.
template <typename T, int i, int j>
__device__ __forceinline__ void gate_block(uint32_t (&gated)[2][2], uint32_t (&attended)[2][2], const float (&X)[2][4],
                                           const void* blocks, const float* gates, const float (&b_row)[2]) {
  const int lane = threadIdx.x & 31;
  const int g = lane >> 2, t = lane & 3;
  const float4* const from = static_cast<const float4*>(blocks) + attention_block(i, j) * kBlockPieces + lane;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 b = *reinterpret_cast<const float2*>(gates + kBlock * i + 8 * n + 2 * t);
    const float4 KQ = from[32 * n];
    const float kq[4] = {KQ.x, KQ.y, KQ.z, KQ.w};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2], p[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float d = exp2_fast((e ? b.y : b.x) - b_row[h]);
        x[e] = X[n][2 * h + e] * d;
        p[e] = kq[2 * h + e] * d;
        if constexpr (i == j) {
          const int distance = 8 * n + 2 * t + e - (g + 8 * h);
          x[e] = distance > 0 ? x[e] : 0.f;
          p[e] = distance >= 0 ? p[e] : 0.f;
        }
      }
      gated[n][h] = pack(T(), x[0], x[1]);
      attended[n][h] = pack(T(), p[0], p[1]);
    }
  }
}

// Where the results of a chunk and head go.
struct MatricesOut {
  const CUtensorMap &rows_0, &rows_1, &rows_2, &rows_3;  // both matrices by rows of blocks: common.block_row
  const CUtensorMap& A;                                  // boxes of 64 tokens and 16 columns
  void* A_rows;                                          // A at the chunk's first token
  int slot, hv, row, HV;
  int valid;  // rows of A that are wanted
};

// By one warp: block column j of A itself, to the first half of `staging` and from there to global memory.
template <typename T, int j>
__device__ __forceinline__ void store_inverse(const float (&X)[4][2][4], char* staging, const MatricesOut& out) {
  const int lane = lane_here();
  // 64 tokens of two 16-byte pieces under TMA's 32-byte swizzle: they change places in tokens 4 to 7 of eight.
  const auto in_tile = [](int token, int piece) { return token * 32 + ((piece ^ (token >> 2 & 1)) << 4); };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t x[2][2] = {};
    if (i >= j) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[n][h] = pack(T(), X[i][n][2 * h], X[i][n][2 * h + 1]);
        }
      }
    }
    store_matrices_transposed(shared_address(staging) + in_tile(16 * i + 8 * (lane >> 4) + (lane & 7), lane >> 3 & 1),
                              x[0][0], x[0][1], x[1][0], x[1][1]);
  }
  if (out.valid == kChunk) {
    fence_boxes();
    __syncwarp();
    if (lane == 0) {
      store_box(out.A, staging, kBlock * j, out.hv, out.row);
    }
  } else {  // the rows behind are others'
    __syncwarp();
#pragma unroll 1
    for (int token = lane / 2; token < out.valid; token += kBlock) {
      T* const to = static_cast<T*>(out.A_rows) + static_cast<int64_t>(token) * out.HV * kChunk + kBlock * j;
      reinterpret_cast<uint4*>(to)[lane & 1] = *reinterpret_cast<const uint4*>(staging + in_tile(token, lane & 1));
    }
  }
}

// By one warp: block column j of (A * D - I), of scale tril(Q K^T) * D, both transposed, and if it is wanted of A, from
// the X that invert_column left. `staging`: room for two tiles of 16 x 64 elements.
template <typename T, int j>
__device__ __forceinline__ void store_column(const float (&X)[4][2][4], const void* blocks, const float* gates,
                                             char* staging, const MatricesOut& out) {
  const int lane = lane_here();
  const int g = lane >> 2;
  const auto wait = [lane] {
    if (lane == 0) {
      wait_for_boxes();
    }
    __syncwarp();
  };
  wait();  // the last column has left
  if (out.valid > 0) {
    store_inverse<T, j>(X, staging, out);
  }
  const float b_row[2] = {gates[kBlock * j + g], gates[kBlock * j + g + 8]};
  uint32_t gated[4][2][2], attended[4][2][2];
  gate_block<T, j, j>(gated[j], attended[j], X[j], blocks, gates, b_row);
  if constexpr (j < 3) {
    gate_block<T, j + 1, j>(gated[j + 1], attended[j + 1], X[j + 1], blocks, gates, b_row);
  }
  if constexpr (j < 2) {
    gate_block<T, j + 2, j>(gated[j + 2], attended[j + 2], X[j + 2], blocks, gates, b_row);
  }
  if constexpr (j < 1) {
    gate_block<T, j + 3, j>(gated[j + 3], attended[j + 3], X[j + 3], blocks, gates, b_row);
  }
  if (out.valid > 0) {
    wait();  // A has left
  }
#pragma unroll
  for (int i = j; i < 4; ++i) {
    const uint32_t to = shared_address(staging) + in_block_row<j>(lane & 15, 2 * (i - j) + (lane >> 4));
    store_matrices(to, gated[i][0][0], gated[i][0][1], gated[i][1][0], gated[i][1][1]);
    store_matrices(to + kColumnBytes, attended[i][0][0], attended[i][0][1], attended[i][1][0], attended[i][1][1]);
  }
  fence_boxes();
  __syncwarp();
  if (lane == 0) {
    const CUtensorMap& rows = j == 0 ? out.rows_0 : j == 1 ? out.rows_1 : j == 2 ? out.rows_2 : out.rows_3;
    store_box(rows, staging, 0, 0, 0, out.hv, out.slot);
    store_box(rows, staging + kColumnBytes, 0, 0, 1, out.hv, out.slot);
  }
}

// By one warp: all that there is of block column j.
template <typename T, int j>
__device__ __forceinline__ void make_column(const void* blocks, const float* inverses, const float* gates,
                                            char* staging, const MatricesOut& out) {
  float X[4][2][4];
  invert_column<T, j>(X, blocks, inverses, gates);
  store_column<T, j>(X, blocks, gates, staging, out);
}

// The columns that are this warp's, the `member`-th of a team of `warps`. Column 0 is the longest, 3 the shortest.
// `staging`: room for two tiles for each warp of the CTA.
template <typename T>
__device__ __forceinline__ void make_columns(const CUtensorMap& rows_0, const CUtensorMap& rows_1,
                                             const CUtensorMap& rows_2, const CUtensorMap& rows_3, const CUtensorMap& A,
                                             int warps, int member, const void* blocks, const float* inverses,
                                             const float* gates, void* staging, void* A_rows, int slot, int hv, int row,
                                             int HV, int valid) {
  const MatricesOut out{rows_0, rows_1, rows_2, rows_3, A, A_rows, slot, hv, row, HV, valid};
  char* const mine = static_cast<char*>(staging) + warp_index() * 2 * kColumnBytes;
  const int columns = warps == 1 ? 0b1111 : warps == 2 ? (member == 0 ? 0b1001 : 0b0110) : 1 << member;
  if (columns & 1) {
    make_column<T, 0>(blocks, inverses, gates, mine, out);
  }
  if (columns & 2) {
    make_column<T, 1>(blocks, inverses, gates, mine, out);
  }
  if (columns & 4) {
    make_column<T, 2>(blocks, inverses, gates, mine, out);
  }
  if (columns & 8) {
    make_column<T, 3>(blocks, inverses, gates, mine, out);
  }
  if (lane_here() == 0) {
    wait_for_boxes();  // shared memory lives no longer than the CTA
  }
}

}  // namespace flash_qla::device
