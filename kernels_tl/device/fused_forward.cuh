// A chunk's matrices and gates for one value head, as chunk_matrices.cuh makes them for a group: by a warpgroup that
// also carries half of the head's state, and a warp beside it.
#pragma once

#include "device/chunk_matrices.cuh"
#include "device/tiles.cuh"

namespace flash_qla::device {

// A warpgroup's scratch: the six blocks of K K^T below the diagonal as product_block has them, then its diagonal blocks
// by rows, and in their place the inverted ones.
constexpr int kBlocksBelow = 6 * kBlockFloats;

__device__ __forceinline__ void warpgroup_sync(int barrier) {
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

// The same in all lanes, so that the compiler sees that it is.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

__device__ __forceinline__ void stop() { asm volatile("trap;" ::: "memory"); }

// By one warpgroup: zeros in the rows from `valid` on of a tile of 64 x 64, 16-bit.
__device__ __forceinline__ void clear_rows_behind(void* tile, int valid) {
  for (int piece = threadIdx.x & 127; piece < kChunk * 8; piece += 128) {
    if (piece / 8 >= valid) {
      static_cast<uint4*>(tile)[piece] = {};
    }
  }
}

// By 256 threads: what lies below the diagonal blocks of L^T and P^T stays zero.
__device__ __forceinline__ void clear_matrices(void* L, void* P, int tiles) {
  for (int piece = threadIdx.x; piece < tiles * kChunk * 8; piece += 256) {
    static_cast<uint4*>(L)[piece] = {};
    static_cast<uint4*>(P)[piece] = {};
  }
}

// By one warp.
__device__ __forceinline__ void clear_bytes(void* begin, int64_t bytes) {
  for (int64_t i = lane_here() * 16; i < bytes; i += 32 * 16) {
    *reinterpret_cast<uint4*>(static_cast<char*>(begin) + i) = {};
  }
}

// The WGMMA descriptor of 64 rows of 64 16-bit elements, K-major under the 128-byte swizzle.
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile) {
  return uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

// x = a b^T, or x += a b^T, 64 x 64 x 16, both from shared memory, in flight.
template <typename T>
__device__ __forceinline__ void begin_wgmma(float (&x)[32], uint64_t a, uint64_t b, int accumulate) {
#define FLASH_QLA_WGMMA(type)                                                                                       \
  asm volatile(                                                                                                     \
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"                                                            \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                   \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "      \
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;\n\t}"                            \
      : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]), "+f"(x[8]), \
        "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]), "+f"(x[16]),      \
        "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]), "+f"(x[24]),     \
        "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31])                   \
      : "l"(a), "l"(b), "r"(accumulate))
  if constexpr (std::is_same_v<T, __half>) {
    FLASH_QLA_WGMMA("f16");
  } else {
    FLASH_QLA_WGMMA("bf16");
  }
#undef FLASH_QLA_WGMMA
}

// By one warpgroup: x = a b^T of tiles of 64 x 128, in flight, as a group of its own.
template <typename T>
__device__ __forceinline__ void begin_product(float (&x)[32], const void* a, const void* b) {
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint64_t step = s / 4 * (kChunk * 128 / 16) + s % 4 * 2;  // in units of 16 bytes
    begin_wgmma<T>(x, tile_descriptor(a) + step, tile_descriptor(b) + step, s > 0);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until x is there, while kInFlight later groups may still be in flight.
template <int kInFlight>
__device__ __forceinline__ void end_product(float (&x)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    asm volatile("" : "+f"(x[i])::"memory");
  }
}

// By warp j of a warpgroup: block (i, j) of a matrix, transposed, to a tile's address of the lane's row.
__device__ __forceinline__ void put_block(uint32_t row, int i, const uint32_t (&x)[2][2]) {
  const int lane = lane_here();
  store_matrices(row + ((2 * i + (lane >> 4) ^ (lane & 7)) << 4), x[0][0], x[0][1], x[1][0], x[1][1]);
}

// Factors of the TF32 products are rounded once, for fp16 too: nothing but L is made of them, which has no more digits.
using Once = __nv_bfloat16;

// The block column j of A, transposed, with zeros on A's diagonal.
template <int j>
__device__ __forceinline__ void column_below_diagonal(float (&X)[4][2][4], const void* blocks, const float* inverses,
                                                      const float* beta) {
  invert_column<Once, j>(X, blocks, inverses, beta);
  const int lane = lane_here();
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      X[j][n][e] = 8 * n + 2 * t + (e & 1) == g + 8 * (e >> 1) ? 0.f : X[j][n][e];
    }
  }
}

// By warp j of a warpgroup: block column j of A, which X holds transposed and without its unit diagonal, to a tile of
// 64 rows of 128 bytes under the 128-byte swizzle. With the l2norm A is R^-1 X R (see fused_forward.py).
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

// By one warpgroup: the norms into what the steps multiply keys and queries with.
__device__ __forceinline__ void normalize_table(float* table) {
  const int token = threadIdx.x & 127;
  if (token < kChunk) {
    const float rstd_k = table[FusedGate::kKeyRstd * kChunk + token], scale_q = table[FusedGate::kQueryScale * kChunk + token];
    table[ForwardGate::kBeta * kChunk + 2 * token + 1] *= rstd_k;
    table[ForwardGate::kDecay * kChunk + token] *= rstd_k;
    table[ForwardGate::kQuery * kChunk + token] *= scale_q;
  }
}

// With kLowLevel a warpgroup's tile of O holds A of its first chunk, w, then O of chunk 0, and so on: O of each chunk,
// and behind that of every chunk c with c % 2 = w A of chunk c + 2. So with c = 2 p + u O comes there as number 3 p + u
// + 1 if w = 1, 3 p + 2 u + 1 if w = 0, and A, for which u = w, as the next. `place` (fused_forward.py) has w in bit
// 20, u in bit 27 and p % 2 in bit 28; the first A is number 0, made with p = u = 0. It is opaque here, so that nothing
// is made of it earlier.
__device__ __forceinline__ int place_here(int place) {
  asm volatile("" : "+r"(place));
  return place;
}

// Until the tile is free for O,
template <typename Barrier>
__device__ __forceinline__ void wait_for_tile(Barrier& stored, int place) {
  place = place_here(place);
  const int w = place >> 20 & 1, u = place >> 27 & 1, p = place >> 28 & 1;
  (&stored)[w].wait(p ^ (u & w));
}

// and for A. The warpgroup's number.
template <typename Barrier>
__device__ __forceinline__ int wait_for_tile_of_A(Barrier& stored, int place) {
  place = place_here(place);
  const int w = place >> 20 & 1, u = place >> 27 & 1, p = place >> 28 & 1;
  (&stored)[w].wait(p ^ u ^ 1);
  return w;
}

// By one warpgroup, if there is such a chunk: its L and P. Warp j makes their rows 16 j to 16 j + 15, transposed. All
// warps run the same code, also for blocks left of the diagonal one, which are not stored: code for each of them would
// have to be fetched for each chunk. `barrier` is the warpgroup's. With kLowLevel A goes to O's tile, as soon as
// what was there has left; the warp that stores is told so even if there is no such chunk.
template <typename T, bool kNormalize, bool kLowLevel, typename Barrier>
__device__ __forceinline__ void make_matrices(Barrier& gated, Barrier& loaded, Barrier& made, int phase,
                                              const int* length, void* K, const void* Q, float* table, float scale,
                                              float* scratch, void* L, void* P, int barrier, Barrier& stored,
                                              Barrier& filled, int place, void* O) {
  gated.wait(phase);
  const int valid = *length;
  if (valid < 0) {
    if constexpr (kLowLevel) {
      (&filled)[wait_for_tile_of_A(stored, place)].arrive();
    }
    return;
  }
  loaded.wait(phase);
  if (valid < kChunk) {
    // Rows behind the sequence belong to others. (What Q has there stays in columns of P and O that nobody uses.)
    clear_rows_behind(K, valid);
    clear_rows_behind(static_cast<char*>(K) + kChunk * 128, valid);
    fence_boxes();
    warpgroup_sync(barrier);
  }
  float KK[32], KQ[32];
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  begin_product<T>(KK, K, K);
  begin_product<T>(KQ, K, Q);
  if constexpr (kNormalize) {
    query_norms<T>(table + FusedGate::kQueryScale * kChunk, Q, scale);
  }
  const int j = warp_index();
  const int lane = lane_here();
  const int g = lane >> 2, t = lane & 3;
  const float* const columns = table + 2 * t;
  const float* const rows = table + kBlock * j + g;
  float* const inverses = scratch + kBlocksBelow;
  const auto pair = [&](int row, int i, int n) {
    return *reinterpret_cast<const float2*>(columns + row * kChunk + kBlock * i + 8 * n);
  };
  float diagonal[8];
  const float b_row[2] = {rows[FusedGate::kLog * kChunk], rows[FusedGate::kLog * kChunk + 8]};
  float from[2] = {rows[FusedGate::kFromBlockEnd * kChunk], rows[FusedGate::kFromBlockEnd * kChunk + 8]};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 b = pair(FusedGate::kLog, j, n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float d = exp2_fast((e & 1 ? b.y : b.x) - b_row[e >> 1]);
      diagonal[4 * n + e] = 8 * n + 2 * t + (e & 1) >= g + 8 * (e >> 1) ? d : 0.f;
    }
  }

  end_product<1>(KK);
  if constexpr (kNormalize) {
    for_diagonal(KK, [table](int i, float square) {
      const float rstd = key_norm(square);
      table[FusedGate::kKeyRstd * kChunk + i] = rstd;
      table[FusedGate::kKeyNorm * kChunk + i] = (square + float{kNormEps}) * rstd;
      table[FusedGate::kPlainBeta * kChunk + i] *= rstd * rstd;
    });
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const x = KK + 8 * i;
    if (i == j) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float* const to = inverses + j * kInverseStride + g * kBlock + 8 * n + 2 * t;
        *reinterpret_cast<float2*>(to) = {x[4 * n], x[4 * n + 1]};
        *reinterpret_cast<float2*>(to + 8 * kBlock) = {x[4 * n + 2], x[4 * n + 3]};
      }
    }
    if (i < j) {
      float4* const to = reinterpret_cast<float4*>(scratch) + (j * (j - 1) / 2 + i) * kBlockPieces + lane;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        to[32 * n] = {as_factor<Once>(x[4 * n]), as_factor<Once>(x[4 * n + 1]), as_factor<Once>(x[4 * n + 2]),
                      as_factor<Once>(x[4 * n + 3])};
      }
    }
  }
  __syncwarp();
  float* const own = inverses + j * kInverseStride;
  invert_blocks<Once>(own, 0, own, table + FusedGate::kPlainBeta * kChunk + kBlock * j, 1);
  warpgroup_sync(barrier);
  if constexpr (kNormalize) {
    normalize_table(table);
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // D is D diag(1 / |k|) from here on
      const float rstd = rows[FusedGate::kKeyRstd * kChunk + 8 * h];
      from[h] *= rstd;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        diagonal[4 * (i / 2) + 2 * h + i % 2] *= rstd;
      }
    }
  }
  float D[4][8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 to = pair(FusedGate::kToBlockEnd + j, i, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        D[i][4 * n + e] = i == j ? diagonal[4 * n + e] : (e & 1 ? to.y : to.x) * from[e >> 1];
      }
    }
  }

  end_product<0>(KQ);
  const uint32_t row = (kBlock * j + (lane & 15)) * 128;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t p[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float2 norm = {scale, scale};
      if constexpr (kNormalize) {
        norm = pair(FusedGate::kQueryScale, i, n);
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
    if (i >= j) {
      put_block(shared_address(P) + row, i, p);
    }
  }

  float X[4][2][4] = {};
  const float* const blocks = scratch - product_block(1, 0) * kBlockFloats;
  const float* const beta = table + FusedGate::kPlainBeta * kChunk;
  switch (j) {
    case 0:
      column_below_diagonal<0>(X, blocks, inverses, beta);
      break;
    case 1:
      column_below_diagonal<1>(X, blocks, inverses, beta);
      break;
    case 2:
      column_below_diagonal<2>(X, blocks, inverses, beta);
      break;
    default:
      column_below_diagonal<3>(X, blocks, inverses, beta);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t l[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float2 norm = {1.f, 1.f};
      if constexpr (kNormalize) {
        norm = pair(FusedGate::kKeyNorm, i, n);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* const x = &X[i][n][2 * h];
        const float* const d = &D[i][4 * n + 2 * h];
        l[n][h] = pack(T(), x[0] * d[0] * norm.x, x[1] * d[1] * norm.y);
      }
    }
    if (i >= j) {
      put_block(shared_address(L) + row, i, l);
    }
  }
  fence_boxes();
  made.arrive();
  if constexpr (kLowLevel) {
    const int own = wait_for_tile_of_A(stored, place);
    stage_inverse<T, kNormalize>(X, table, static_cast<char*>(O) + own * (kChunk * 128));
    (&filled)[own].arrive();
  }
}

// By one warp: g_cumsum of tokens 2 l and 2 l + 1 from the table, `stride` apart, those before `length`.
__device__ __forceinline__ void store_cumsum(float* rows, const float* table, int stride, int length) {
  const int token = 2 * lane_here();
  const float2 b = *reinterpret_cast<const float2*>(table + FusedGate::kLog * kChunk + token);
  if (token < length) {
    rows[static_cast<int64_t>(token) * stride] = b.x * kLn2;
  }
  if (token + 1 < length) {
    rows[static_cast<int64_t>(token + 1) * stride] = b.y * kLn2;
  }
}

// By one warp: of tokens 2 l and 2 l + 1 what `rows` holds, `stride` apart; from `length` on 0.
__device__ __forceinline__ void load_pair(float* x, const float* rows, int stride, int length) {
  const int token = 2 * lane_here();
  x[0] = token < length ? rows[static_cast<int64_t>(token) * stride] : 0.f;
  x[1] = token + 1 < length ? rows[static_cast<int64_t>(token + 1) * stride] : 0.f;
}

// By one warp: a chunk's table from its tokens' g and beta, two a lane.
__device__ __forceinline__ void make_table(float* table, const float* g, const float* beta, float scale) {
  const int lane = lane_here();
  const auto put = [&](int row, float x, float y) { reinterpret_cast<float2*>(table + row * kChunk)[lane] = {x, y}; };
  float b[2] = {g[0] * kLog2e, (g[0] + g[1]) * kLog2e};
  float before = b[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float below = __shfl_up_sync(~0u, before, step);
    before += lane >= step ? below : 0.f;
  }
  const float total = __shfl_sync(~0u, before, 31);
  before = __shfl_up_sync(~0u, before, 1);
  before = lane > 0 ? before : 0.f;
  b[0] += before;
  b[1] += before;
  const float gamma[2] = {exp2_fast(b[0]), exp2_fast(b[1])};
  reinterpret_cast<float4*>(table + ForwardGate::kBeta * kChunk)[lane] = {beta[0], beta[0] * gamma[0], beta[1], beta[1] * gamma[1]};
  put(ForwardGate::kQuery, scale * gamma[0], scale * gamma[1]);
  put(ForwardGate::kDecay, exp2_fast(total - b[0]), exp2_fast(total - b[1]));
  put(FusedGate::kLog, b[0], b[1]);
  put(FusedGate::kPlainBeta, beta[0], beta[1]);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float end = __shfl_sync(~0u, b[1], 8 * j + 7);
    if (lane / 8 == j) {
      put(FusedGate::kFromBlockEnd, exp2_fast(end - b[0]), exp2_fast(end - b[1]));
    }
    put(FusedGate::kToBlockEnd + j, exp2_fast(b[0] - end), exp2_fast(b[1] - end));
  }
  if (lane == 0) {
    table[ForwardGate::kTotal * kChunk] = exp2_fast(total);
  }
}

}  // namespace flash_qla::device
