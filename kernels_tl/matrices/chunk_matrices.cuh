// A chunk's gated inverse L and gated attention P, both transposed, and A if requested.
//
//   L = A * D - I                                   P = scale tril(Q K^T) * D
//   A = (I + stril(diag(beta) K K^T))^-1            D_ij = exp(b_i - b_j) for i >= j, else 0
//
// The inverse consists of 4 x 4 blocks of 16 x 16. The diagonal blocks are inverted by forward substitution in fp32,
// one lane per column and two blocks per warp. One warp then computes a block column of A from top to bottom,
//
//   A_ij = -A_ii (B_ij A_jj + ... + B_i,i-1 A_i-1,j),   B_ij block (i, j) of diag(beta) K K^T,
//
// in TF32 with fp32 accumulation, for fp16 in two TF32 parts. It works on transposed blocks,
// A_ij^T = -(sum of A_lj^T B_il^T) A_ii^T, because the accumulators of one product are then the left factor of the
// next, in registers (with K's order permuted alike on both sides).
//
// K K^T and K Q^T belong to a group of heads, beta and the gates to one value head. So the products lie in shared
// memory, and beta is applied where B is used. Each warp works on a value head of its own, without waiting for the
// others. With two heads or one, a team of two or four warps works on a head.
#pragma once

#include "matrices/chunk_gates.cuh"

namespace flash_qla::device {

// Index of an element of an inverted diagonal block, 16 rows of 16 floats. Columns 0 to 7 and 8 to 15 change places in
// rows 2, 3, 6, 7, ..., so that 8-byte reads of a half-warp meet all banks.
__device__ __forceinline__ int in_inverse(int row, int column) { return row * kBlock + (column ^ ((row & 2) << 2)); }

constexpr int kColumnBytes = kBlock * kChunk * 2;  // bytes of a transposed block column of one matrix

// Waits for the warps of a team. A CTA has one team of four warps, two of two, or four of one.
__device__ __forceinline__ void team_sync(int team, int warps) {
  if (warps == 1) {
    __syncwarp();
  } else if (team == 0) {
    sync_named<NamedBarrier::kTeam>(32 * warps);
  } else {
    sync_named<NamedBarrier::kTeam + 1>(32 * warps);
  }
}

// acc += left right, 8 x 8 x 8. Rows 8 to 15 of the left factor are zeros, so acc[2] and acc[3] do not change.
template <int kParts>
__device__ __forceinline__ void multiply_eighth(float (&acc)[4], float a0, float a1, float b0, float b1) {
  if constexpr (kParts == 2) {
    const float a[2] = {truncate_to_tf32(a0), truncate_to_tf32(a1)};
    const float b[2] = {truncate_to_tf32(b0), truncate_to_tf32(b1)};
    mma_tf32(acc, a0 - a[0], 0.f, a1 - a[1], 0.f, b[0], b[1]);
    mma_tf32(acc, a[0], 0.f, a[1], 0.f, b0 - b[0], b1 - b[1]);
    mma_tf32(acc, a[0], 0.f, a[1], 0.f, b[0], b[1]);
  } else {
    mma_tf32(acc, a0, 0.f, a1, 0.f, b0, b1);
  }
}

// (I + diag(beta) stril(block))^-1 of one or two symmetric 16 x 16 blocks, which are `stride` apart. One warp calls it.
// The two 8 x 8 quarters on the diagonal come from substitution, one lane a column. The quarter below them comes from
// products, as blocks do. `inverses` may be `blocks`.
template <typename T>
__device__ __forceinline__ void invert_blocks(const float* blocks, int stride, float* inverses, const float* beta,
                                              int count) {
  constexpr int kParts = kTf32Parts<T>;
  const int lane = lane_here();
  const int g = lane >> 2, t = lane & 3, column = lane & 7, quarter = lane & 8;
  const int mine = count == 2 ? lane >> 4 : 0;
  const float* const rows = blocks + mine * stride + quarter * (kBlock + 1);
  const float* const betas = beta + mine * kBlock + quarter;
  float x[8], sum[8] = {}, b[8];
  *reinterpret_cast<float4*>(b) = *reinterpret_cast<const float4*>(betas);
  *reinterpret_cast<float4*>(b + 4) = *reinterpret_cast<const float4*>(betas + 4);
#pragma unroll
  for (int l = 0; l < 8; ++l) {
    float row[8];
#pragma unroll
    for (int i = (l + 1) / 4 * 4; i < 8; i += 4) {
      *reinterpret_cast<float4*>(row + i) = *reinterpret_cast<const float4*>(rows + l * kBlock + i);
    }
    x[l] = (l == column ? 1.f : 0.f) - b[l] * sum[l];
#pragma unroll
    for (int i = l + 1; i < 8; ++i) {
      sum[i] += row[i] * x[l];
    }
  }
  float below[2][2];
  float2 beta_below[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (k < count) {
      const float* const from = blocks + k * stride + (8 + g) * kBlock + t;
      below[k][0] = as_factor<kParts>(from[0]);
      below[k][1] = as_factor<kParts>(from[4]);
      beta_below[k] = *reinterpret_cast<const float2*>(beta + k * kBlock + 8 + 2 * t);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    inverses[mine * kInverseStride + in_inverse(quarter + i, quarter + column)] = as_factor<kParts>(x[i]);
  }
  __syncwarp();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (k < count) {
      float* const inverse = inverses + k * kInverseStride;
      float product[4] = {}, result[4] = {};
      multiply_eighth<kParts>(product, inverse[in_inverse(t, g)], inverse[in_inverse(t + 4, g)], below[k][0],
                              below[k][1]);
      const float2 right = *reinterpret_cast<const float2*>(inverse + in_inverse(8 + g, 8 + 2 * t));
      multiply_eighth<kParts>(result, as_factor<kParts>(-beta_below[k].x * product[0]),
                              as_factor<kParts>(-beta_below[k].y * product[1]), right.x, right.y);
      inverse[in_inverse(8 + 2 * t, g)] = as_factor<kParts>(result[0]);
      inverse[in_inverse(9 + 2 * t, g)] = as_factor<kParts>(result[1]);
      inverse[in_inverse(g, 8 + t)] = 0.f;
      inverse[in_inverse(g, 12 + t)] = 0.f;
    }
  }
}

// acc += left right, 16 x 16 x 16. left is a block of accumulators, [2][4]. right[k] holds rows 8k to 8k + 7 of the
// right factor, as accumulators of its transpose hold them. Both sides permute the summed dimension alike, as
// accumulators do.
template <int kParts>
__device__ __forceinline__ void multiply(float (&acc)[2][4], const float (&left)[2][4], const float4 (&right)[2]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float2 b[2] = {{right[k].x, right[k].y}, {right[k].z, right[k].w}};
    float a[4], a_rest[4];
    if constexpr (kParts == 2) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a[e] = truncate_to_tf32(left[k][e]);
        a_rest[e] = left[k][e] - a[e];
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (kParts == 2) {
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

// Right factors of `multiply`: the transposes of block (i, l) of K K^T and of an inverted diagonal block.
__device__ __forceinline__ void load_product(float4 (&right)[2], const void* blocks, int i, int l) {
  const float4* const from = static_cast<const float4*>(blocks) + product_block(i, l) * kBlockPieces + lane_here();
  right[0] = from[0];
  right[1] = from[32];
}
__device__ __forceinline__ void load_inverse(float4 (&right)[2], const float* inverse) {
  const int lane = lane_here();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float* const from = inverse + in_inverse(lane >> 2, 8 * k + 2 * (lane & 3));
    const float2 low = *reinterpret_cast<const float2*>(from);
    const float2 high = *reinterpret_cast<const float2*>(from + 8 * kBlock);
    right[k] = {low.x, low.y, high.x, high.y};
  }
}

// A left factor of `multiply`: the transpose of an inverted diagonal block.
__device__ __forceinline__ void load_transposed(float (&left)[2][4], const float* inverse) {
  const int lane = lane_here();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      left[k][e] = inverse[in_inverse(8 * k + 2 * (lane & 3) + (e & 1), (lane >> 2) + 8 * (e >> 1))];
    }
  }
}

// x = -x diag(beta), as a factor. x is a transposed block, so beta belongs to its columns.
template <int kParts>
__device__ __forceinline__ void apply_beta(float (&x)[2][4], const float* beta) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float2 pair = *reinterpret_cast<const float2*>(beta + 8 * k + 2 * (lane_here() & 3));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[k][e] = as_factor<kParts>(x[k][e] * -(e & 1 ? pair.y : pair.x));
    }
  }
}

// x = left right, as a factor.
template <int kParts>
__device__ __forceinline__ void set_product(float (&x)[2][4], const float (&left)[2][4], const float4 (&right)[2]) {
  float product[2][4] = {};
  multiply<kParts>(product, left, right);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[k][e] = as_factor<kParts>(product[k][e]);
    }
  }
}

// X[i] = A_ij^T for i >= j: block column j of A, transposed, by one warp. Each block is added to the sums of the blocks
// below as soon as it is computed.
template <int kParts, int j>
__device__ __forceinline__ void invert_column(float (&X)[4][2][4], const void* blocks, const float* inverses,
                                              const float* beta) {
  load_transposed(X[j], inverses + j * kInverseStride);
#pragma unroll
  for (int l = j; l < 3; ++l) {
    float4 right[2];
#pragma unroll
    for (int i = l + 1; i < 4; ++i) {
      if (l == j) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          X[i][e / 4][e % 4] = 0.f;
        }
      }
      load_product(right, blocks, i, l);
      multiply<kParts>(X[i], X[l], right);
    }
    apply_beta<kParts>(X[l + 1], beta + kBlock * (l + 1));
    load_inverse(right, inverses + (l + 1) * kInverseStride);
    set_product<kParts>(X[l + 1], X[l + 1], right);
  }
}

// Byte offset of 16-byte piece `piece` of row `row` in a row of blocks, from its diagonal block j on, in shared memory:
// rows of 128 - 32 j bytes under the swizzle of SWIZZLES in chunk_matrices.py.
template <int j>
__device__ __forceinline__ int in_block_row(int row, int piece) {
  constexpr int shift[4] = {0, 0, 1, 2}, mask[4] = {7, 0, 3, 1};
  return row * (128 - 32 * j) + ((piece ^ (row >> shift[j] & mask[j])) << 4);
}

// gated, attended = the transposes of blocks (i, j) of L and P. If i == j, L^T is 0 on and below the diagonal, P^T
// below.
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

// Rows of A that are requested, at the chunk's first token and a head.
struct InverseOut {
  void* rows;
  int HV;
  int valid;  // the chunk's tokens, or 0

  template <typename T>
  __device__ __forceinline__ T* row(int token) const {
    return static_cast<T*>(rows) + static_cast<int64_t>(token) * HV * kChunk;
  }
};

// Byte offset of a 16-byte piece in a staged block column of A, 64 tokens of two pieces, under TMA's 32-byte swizzle:
// the pieces change places in tokens 4 to 7 of eight.
__device__ __forceinline__ int in_inverse_column(int token, int piece) {
  return token * 32 + ((piece ^ (token >> 2 & 1)) << 4);
}

// The destination of a chunk and head's results. One warp calls each function. store_inverse writes block column j of A
// from `staging`, store_blocks block column j of L and P, transposed; `staging` may be written again after wait().
struct MatricesByThreads {
  InverseOut A;
  void* matrices;  // L^T and P^T

  __device__ __forceinline__ void wait() const { __syncwarp(); }

  template <typename T>
  __device__ __forceinline__ void store_inverse(int j, const char* staging) const {
    __syncwarp();
    const int lane = lane_here();
#pragma unroll 1
    for (int token = lane / 2; token < A.valid; token += kBlock) {
      T* const to = A.row<T>(token) + kBlock * j;
      reinterpret_cast<uint4*>(to)[lane & 1] =
          *reinterpret_cast<const uint4*>(staging + in_inverse_column(token, lane & 1));
    }
  }

  template <int j>
  __device__ __forceinline__ void store_blocks(const char* staging) const {
    __syncwarp();
    constexpr int kPieces = 8 - 2 * j;  // of a row
    uint16_t* const first = static_cast<uint16_t*>(matrices) + kBlock * (kChunk * j - kBlock * j * (j - 1) / 2);
#pragma unroll
    for (int matrix = 0; matrix < 2; ++matrix) {
      uint4* const to = reinterpret_cast<uint4*>(first + matrix * kTriangle);
#pragma unroll 1
      for (int i = lane_here(); i < kBlock * kPieces; i += 32) {
        const char* const from = staging + matrix * kColumnBytes + in_block_row<j>(i / kPieces, i % kPieces);
        to[i] = *reinterpret_cast<const uint4*>(from);
      }
    }
  }
};

struct MatricesByTma {
  InverseOut A;
  const CUtensorMap &rows_0, &rows_1, &rows_2, &rows_3;  // both matrices by rows of blocks: common.block_row
  const CUtensorMap& A_boxes;                            // of 64 tokens and 16 columns
  int slot, hv, row;

  __device__ __forceinline__ void wait() const {
    if (lane_here() == 0) {
      wait_for_boxes();
    }
    __syncwarp();
  }

  template <typename T>
  __device__ __forceinline__ void store_inverse(int j, const char* staging) const {
    if (A.valid == kChunk) {
      fence_boxes();
      __syncwarp();
      if (lane_here() == 0) {
        store_box(A_boxes, staging, kBlock * j, hv, row);
      }
    } else {  // later rows belong to other sequences
      MatricesByThreads{A, nullptr}.store_inverse<T>(j, staging);
    }
  }

  template <int j>
  __device__ __forceinline__ void store_blocks(const char* staging) const {
    fence_boxes();
    __syncwarp();
    if (lane_here() == 0) {
      const CUtensorMap& rows = j == 0 ? rows_0 : j == 1 ? rows_1 : j == 2 ? rows_2 : rows_3;
      store_box(rows, staging, 0, 0, 0, hv, slot);
      store_box(rows, staging + kColumnBytes, 0, 0, 1, hv, slot);
    }
  }
};

// Stores block column j of A, not transposed, through the first half of `staging` to global memory. One warp calls it.
template <typename T, int j, typename Out>
__device__ __forceinline__ void store_inverse(const float (&X)[4][2][4], char* staging, const Out& out) {
  const int lane = lane_here();
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
    const int at = in_inverse_column(16 * i + 8 * (lane >> 4) + (lane & 7), lane >> 3 & 1);
    store_matrices_transposed(shared_address(staging) + at, x[0][0], x[0][1], x[1][0], x[1][1]);
  }
  out.template store_inverse<T>(j, staging);
}

// Stores block column j of L and of P, both transposed, and of A if requested. X is the result of invert_column. One
// warp calls it. `staging` has room for two tiles of 16 x 64 elements.
template <typename T, int j, typename Out>
__device__ __forceinline__ void store_column(const float (&X)[4][2][4], const void* blocks, const float* gates,
                                             char* staging, const Out& out) {
  const int lane = lane_here();
  const int g = lane >> 2;
  out.wait();  // the last column has left
  if (out.A.valid > 0) {
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
  if (out.A.valid > 0) {
    out.wait();  // A has left
  }
#pragma unroll
  for (int i = j; i < 4; ++i) {
    const uint32_t to = shared_address(staging) + in_block_row<j>(lane & 15, 2 * (i - j) + (lane >> 4));
    store_matrices(to, gated[i][0][0], gated[i][0][1], gated[i][1][0], gated[i][1][1]);
    store_matrices(to + kColumnBytes, attended[i][0][0], attended[i][0][1], attended[i][1][0], attended[i][1][1]);
  }
  out.template store_blocks<j>(staging);
}

// Computes and stores block column j of all matrices, by one warp.
template <typename T, int j, typename Out>
__device__ __forceinline__ void make_column(const void* blocks, const float* inverses, const float* gates,
                                            char* staging, const Out& out) {
  float X[4][2][4];
  invert_column<kTf32Parts<T>, j>(X, blocks, inverses, gates + kChunk);
  store_column<T, j>(X, blocks, gates, staging, out);
}

// Computes and stores the block columns of a warp, the `member`-th of a team of `warps`. Column 0 has four blocks,
// column 3 has one, so a team of two shares them as 0, 3 and 1, 2. `staging` has room for two tiles for each warp of
// the CTA.
template <typename T, typename Out>
__device__ __forceinline__ void make_columns(int warps, int member, const void* blocks, const float* inverses,
                                             const float* gates, void* staging, const Out& out) {
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
  out.wait();  // shared memory lives no longer than the CTA
}

// Fills `length` rows, `stride` apart, of `columns` 16-bit elements, a multiple of 8, with zeros. The whole CTA calls
// it.
__device__ __forceinline__ void clear_rows(void* rows, int64_t stride, int columns, int length) {
  const int pieces = columns / 8;
  for (int i = threadIdx.x; i < length * pieces; i += blockDim.x) {
    const int row = i / pieces;
    reinterpret_cast<uint4*>(static_cast<uint16_t*>(rows) + row * stride)[i - row * pieces] = {};
  }
}

}  // namespace flash_qla::device
