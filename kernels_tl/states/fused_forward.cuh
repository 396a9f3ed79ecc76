// A chunk's L and P for one value head, both transposed, by a warpgroup that also carries 64 rows of the state:
//
//   L = A * D - I,   P = scale tril(Q K^T) * D        A, D: matrices/chunk_matrices.cuh
#pragma once

#include "core/state_tiles.cuh"
#include "core/wgmma.cuh"
#include "matrices/chunk_matrices.cuh"
#include "states/consumer_position.cuh"
#include "states/fused_gates.cuh"

namespace flash_qla::device {

// x is the same in all lanes. The shuffle tells the compiler so.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Fills `tiles` tiles of L^T and of P^T with zeros, by 256 threads. The blocks below the diagonal are never written
// again.
__device__ __forceinline__ void clear_matrices(void* L, void* P, int tiles) {
  for (int piece = threadIdx.x; piece < tiles * kChunk * 8; piece += 256) {
    static_cast<uint4*>(L)[piece] = {};
    static_cast<uint4*>(P)[piece] = {};
  }
}

// Fills `bytes` bytes, a multiple of 16, with zeros, by one warp.
__device__ __forceinline__ void clear_bytes(void* begin, int64_t bytes) {
  for (int64_t i = lane_here() * 16; i < bytes; i += 32 * 16) {
    *reinterpret_cast<uint4*>(static_cast<char*>(begin) + i) = {};
  }
}

// Warpgroup w's tile of O, with low_level, holds A of chunk w first, then O of every chunk c in order. A of chunk c + 2
// follows O of chunk c if c % 2 = w. With c = 2 p + u these contents have the numbers
//
//   O of chunk c       3 p + u + 1 if w = 1, 3 p + 2 u + 1 if w = 0
//   A of chunk c + 2   the number after O of chunk c; A of chunk w has number 0
//
// Content n may be written once the epilogue warp has arrived n times, so the wait is for parity (n - 1) % 2. A
// position holds w as its warpgroup, u as its value stage, and p % 2 as that stage's phase.

// Waits until the tile is free for O.
template <typename Barrier>
__device__ __forceinline__ void wait_for_tile(Barrier& stored, int number) {
  const ConsumerPosition position(number);
  const int w = position.warpgroup(), u = position.value_stage(), p = position.value_phase();
  (&stored)[w].wait(p ^ (u & w));
}

// Waits until the tile is free for A. Returns w.
template <typename Barrier>
__device__ __forceinline__ int wait_for_tile_of_A(Barrier& stored, int number) {
  const ConsumerPosition position(number);
  const int w = position.warpgroup(), u = position.value_stage(), p = position.value_phase();
  (&stored)[w].wait(p ^ u ^ 1);
  return w;
}

// A chunk's L and P by a warpgroup: warp j computes rows 16 j to 16 j + 15, transposed.
//
// All warps run the same code, also for the blocks left of the diagonal, which are not stored. Separate code for each
// warp would have to be fetched again for each chunk. Element [4 n + 2 h + e] of a 16 x 16 block of accumulators is row
// g + 8 h, column 8 n + 2 t + e, in lane 4 g + t.
template <typename T, bool kNormalize>
struct MatricesMaker {
  static constexpr int kParts = kTf32Parts<T>;

  float* table;    // FusedGate's rows
  float* scratch;  // six blocks of K K^T below the diagonal, in product_block's order; then the four diagonal blocks by
                   // rows, which invert_diagonal inverts in place
  float scale;
  int j, lane, g, t;

  __device__ __forceinline__ MatricesMaker(float* table, float* scratch, float scale)
      : table(table), scratch(scratch), scale(scale), j(warp_index()), lane(lane_here()), g(lane >> 2), t(lane & 3) {}

  __device__ __forceinline__ float* inverses() const { return scratch + 6 * kBlockFloats; }

  // Entries of row `gate` of the table: at the lane's matrix row g + 8 h of block j, and at its two columns of block i.
  __device__ __forceinline__ float of_row(int gate, int h) const {
    return table[kBlock * j + g + gate * kChunk + 8 * h];
  }
  __device__ __forceinline__ float2 of_columns(int gate, int i, int n) const {
    return *reinterpret_cast<const float2*>(table + 2 * t + gate * kChunk + kBlock * i + 8 * n);
  }
  __device__ __forceinline__ bool is_in_upper_triangle(int n, int e) const {
    return 8 * n + 2 * t + (e & 1) >= g + 8 * (e >> 1);
  }

  // diagonal = block (j, j) of D^T: exp(b_column - b_row) on and above its diagonal, else 0.
  __device__ __forceinline__ void gate_diagonal(float (&diagonal)[8], const float (&b_row)[2]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 b = of_columns(FusedGate::kLog, j, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float d = exp2_fast((e & 1 ? b.y : b.x) - b_row[e >> 1]);
        diagonal[4 * n + e] = is_in_upper_triangle(n, e) ? d : 0.f;
      }
    }
  }

  // Writes 1 / |k_i| and |k_i| to the table, from the diagonal of K K^T. The plain beta_i becomes beta_i / |k_i|^2.
  __device__ __forceinline__ void keep_norms(const float* KK) const {
    float* const gates = table;
    for_diagonal(KK, [gates](int i, float square) {
      const float rstd = key_norm(square);
      gates[FusedGate::kKeyRstd * kChunk + i] = rstd;
      gates[FusedGate::kKeyNorm * kChunk + i] = (square + float{kNormEps}) * rstd;
      gates[FusedGate::kPlainBeta * kChunk + i] *= rstd * rstd;
    });
  }

  // Writes the warp's blocks of K K^T on and left of the diagonal to the scratch.
  __device__ __forceinline__ void keep_products(const float* KK) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const x = KK + 8 * i;
      if (i == j) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float* const to = inverses() + j * kInverseStride + g * kBlock + 8 * n + 2 * t;
          *reinterpret_cast<float2*>(to) = {x[4 * n], x[4 * n + 1]};
          *reinterpret_cast<float2*>(to + 8 * kBlock) = {x[4 * n + 2], x[4 * n + 3]};
        }
      }
      if (i < j) {
        float4* const to = reinterpret_cast<float4*>(scratch) + (j * (j - 1) / 2 + i) * kBlockPieces + lane;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          to[32 * n] = {as_factor<kParts>(x[4 * n]), as_factor<kParts>(x[4 * n + 1]), as_factor<kParts>(x[4 * n + 2]),
                        as_factor<kParts>(x[4 * n + 3])};
        }
      }
    }
  }

  __device__ __forceinline__ void invert_diagonal() const {
    float* const block = inverses() + j * kInverseStride;
    invert_blocks<T>(block, 0, block, table + FusedGate::kPlainBeta * kChunk + kBlock * j, 1);
  }

  // Brings the l2norm into the factors, because K and Q are not normalised. In the table, by 64 threads:
  //
  //   beta_i gamma_i, gamma_C / gamma_i   times 1 / |k_i|
  //   gamma_i                             times scale / |q_i|
  //
  // `diagonal` and `from` get 1 / |k| of their rows: gate() then computes diag(1 / |k|) D^T.
  __device__ __forceinline__ void normalize(float (&diagonal)[8], float (&from)[2]) const {
    const int token = threadIdx.x & 127;
    if (token < kChunk) {
      const float rstd_k = table[FusedGate::kKeyRstd * kChunk + token];
      const float scale_q = table[FusedGate::kQueryScale * kChunk + token];
      table[ForwardGate::kBeta * kChunk + 2 * token + 1] *= rstd_k;
      table[ForwardGate::kDecay * kChunk + token] *= rstd_k;
      table[ForwardGate::kQuery * kChunk + token] *= scale_q;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float rstd = of_row(FusedGate::kKeyRstd, h);
      from[h] *= rstd;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        diagonal[4 * (i / 2) + 2 * h + i % 2] *= rstd;
      }
    }
  }

  // D = the warp's blocks (j, i) of D^T. Off the diagonal they are exp(b_column - b_l) exp(b_l - b_row), with l the
  // last token of block j. Blocks left of the diagonal are undefined.
  __device__ __forceinline__ void gate(float (&D)[4][8], const float (&diagonal)[8], const float (&from)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 to = of_columns(FusedGate::kToBlockEnd + j, i, n);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          D[i][4 * n + e] = i == j ? diagonal[4 * n + e] : (e & 1 ? to.y : to.x) * from[e >> 1];
        }
      }
    }
  }

  // Stores block (j, i) to a tile if it is on or right of the diagonal.
  __device__ __forceinline__ void put_block(void* tile, int i, const uint32_t (&x)[2][2]) const {
    const uint32_t row = shared_address(tile) + (kBlock * j + (lane & 15)) * 128;
    const int here = lane_here();
    if (i >= j) {
      store_matrices(row + ((2 * i + (here >> 4) ^ (here & 7)) << 4), x[0][0], x[0][1], x[1][0], x[1][1]);
    }
  }

  __device__ __forceinline__ void put_attention(void* P, const float (&KQ)[32], const float (&D)[4][8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t p[2][2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float2 norm = {scale, scale};
        if constexpr (kNormalize) {
          norm = of_columns(FusedGate::kQueryScale, i, n);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            x[e] = KQ[8 * i + 4 * n + 2 * h + e] * (e ? norm.y : norm.x) * D[i][4 * n + 2 * h + e];
          }
          p[n][h] = pack(T(), x[0], x[1]);
        }
      }
      put_block(P, i, p);
    }
  }

  // X[i] = (A_ij - I_ij)^T for i >= j: block column j, with zeros on A's diagonal.
  template <int kColumn>
  __device__ __forceinline__ void invert_column_of(float (&X)[4][2][4]) const {
    const float* const blocks = scratch - product_block(1, 0) * kBlockFloats;
    invert_column<kParts, kColumn>(X, blocks, inverses(), table + FusedGate::kPlainBeta * kChunk);
    const int here = lane_here();
    const int row = here >> 2, column = 2 * (here & 3);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        X[kColumn][n][e] = 8 * n + column + (e & 1) == row + 8 * (e >> 1) ? 0.f : X[kColumn][n][e];
      }
    }
  }

  __device__ __forceinline__ void invert(float (&X)[4][2][4]) const {
    switch (j) {
      case 0:
        return invert_column_of<0>(X);
      case 1:
        return invert_column_of<1>(X);
      case 2:
        return invert_column_of<2>(X);
      default:
        return invert_column_of<3>(X);
    }
  }

  __device__ __forceinline__ void put_inverse(void* L, const float (&X)[4][2][4], const float (&D)[4][8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t l[2][2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float2 norm = {1.f, 1.f};
        if constexpr (kNormalize) {
          norm = of_columns(FusedGate::kKeyNorm, i, n);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* const x = &X[i][n][2 * h];
          const float* const d = &D[i][4 * n + 2 * h];
          l[n][h] = pack(T(), x[0] * d[0] * norm.x, x[1] * d[1] * norm.y);
        }
      }
      put_block(L, i, l);
    }
  }
};

// Stores block column j of A to a tile of 64 rows of 128 bytes under the 128-byte swizzle. Warp j of a warpgroup calls
// it. X holds the column transposed, with zeros on A's diagonal. With the l2norm, A_ij = |k_i| X_ij / |k_j|.
template <typename T, bool kNormalize>
__device__ __forceinline__ void stage_inverse(const float (&X)[4][2][4], const float* table, void* tile) {
  const int j = warp_index(), lane = lane_here();
  const int g = lane >> 2, t = lane & 3;
  float rstd[2] = {1.f, 1.f};
  if constexpr (kNormalize) {
    const float* const rows = table + FusedGate::kKeyRstd * kChunk + kBlock * j + g;
    rstd[0] = rows[0];
    rstd[1] = rows[8];
  }
  const uint32_t row =
      shared_address(tile) + (8 * (lane >> 4) + (lane & 7)) * 128 + ((2 * j + (lane >> 3 & 1) ^ (lane & 7)) << 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t a[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float2 norm = {1.f, 1.f};
      if constexpr (kNormalize) {
        norm = *reinterpret_cast<const float2*>(table + FusedGate::kKeyNorm * kChunk + kBlock * i + 8 * n + 2 * t);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool one = i == j && 8 * n + 2 * t + e == g + 8 * h;
          x[e] = one ? 1.f : X[i][n][2 * h + e] * (e ? norm.y : norm.x) * rstd[h];
        }
        a[n][h] = pack(T(), x[0], x[1]);
      }
    }
    store_matrices_transposed(row + 16 * 128 * i, a[0][0], a[0][1], a[1][0], a[1][1]);
  }
}

// Barriers of a stage: the gates' table is complete (gated), K and Q have arrived (loaded), L and P are complete
// (matrices_staged). stored and staged are barriers of the tiles of O.
template <typename Barrier>
struct MakerBarriers {
  Barrier &gated, &loaded, &matrices_staged, &stored, &staged;
};

// Tiles of a stage, the warpgroup's scratch, and the tiles of O. *length is negative without a chunk.
struct MakerTiles {
  const int* length;
  void* K;
  const void* Q;
  float *table, *scratch;
  void *L, *P, *O;
};

// Computes L and P of a chunk. A warpgroup calls it, and `barrier` is its named barrier. With kLowLevel the warpgroup
// also stages A in its tile of O as soon as the tile is free. It arrives at `staged` even without a chunk, because the
// epilogue warp waits for this arrival.
template <typename T, bool kNormalize, bool kLowLevel, typename Barrier>
__device__ __forceinline__ void make_matrices(const MakerBarriers<Barrier>& ready, const MakerTiles& tiles, int phase,
                                              float scale, int barrier, int position) {
  ready.gated.wait(phase);
  const int valid = *tiles.length;
  if (valid < 0) {
    if constexpr (kLowLevel) {
      (&ready.staged)[wait_for_tile_of_A(ready.stored, position)].arrive();
    }
    return;
  }
  ready.loaded.wait(phase);
  if (valid < kChunk) {
    // Rows of K after the sequence belong to other sequences. Rows of Q may stay, because they only reach columns of
    // P^T and O^T that are not stored.
    clear_rows_after(tiles.K, 2, valid, 128);
    fence_boxes();
    sync_warpgroup(barrier);
  }
  float KK[32], KQ[32];
  fence_wgmma();
  begin_product<T>(KK, tiles.K, tiles.K);
  begin_product<T>(KQ, tiles.K, tiles.Q);
  if constexpr (kNormalize) {
    query_norms<T, 128>(tiles.table + FusedGate::kQueryScale * kChunk, tiles.Q, scale);
  }
  const MatricesMaker<T, kNormalize> maker(tiles.table, tiles.scratch, scale);
  float diagonal[8], D[4][8], X[4][2][4] = {};
  const float b_row[2] = {maker.of_row(FusedGate::kLog, 0), maker.of_row(FusedGate::kLog, 1)};
  float from[2] = {maker.of_row(FusedGate::kFromBlockEnd, 0), maker.of_row(FusedGate::kFromBlockEnd, 1)};
  maker.gate_diagonal(diagonal, b_row);

  end_product<1>(KK);
  if constexpr (kNormalize) {
    maker.keep_norms(KK);
  }
  maker.keep_products(KK);
  __syncwarp();
  maker.invert_diagonal();
  sync_warpgroup(barrier);
  if constexpr (kNormalize) {
    maker.normalize(diagonal, from);
  }
  maker.gate(D, diagonal, from);

  end_product<0>(KQ);
  maker.put_attention(tiles.P, KQ, D);
  maker.invert(X);
  maker.put_inverse(tiles.L, X, D);
  fence_boxes();
  ready.matrices_staged.arrive();
  if constexpr (kLowLevel) {
    const int warpgroup = wait_for_tile_of_A(ready.stored, position);
    stage_inverse<T, kNormalize>(X, tiles.table, static_cast<char*>(tiles.O) + warpgroup * (kChunk * 128));
    (&ready.staged)[warpgroup].arrive();
  }
}

}  // namespace flash_qla::device
