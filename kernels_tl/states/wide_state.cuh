// The products of a state with K > 128 with a chunk's keys and queries. A 16-bit copy of the whole state would take
// half as many registers again as the state. So 16 channels at a time, a piece, are rounded while the previous piece's
// product is in flight.
#pragma once

#include <tl_templates/cuda/instruction/wgmma.h>

#include "core/tiles.cuh"
#include "core/wgmma.cuh"

namespace flash_qla::device {

constexpr int kPieceChannels = 16;  // channels of S^T that are rounded at a time: the K of a WGMMA

// Begins x = a b^T or, with `accumulate`, x += a b^T over 16 channels. a is the registers of a left factor, b the
// descriptor of 64 tokens.
template <typename T>
__device__ __forceinline__ void begin_state_wgmma(float* x, const uint32_t* a, uint64_t b, bool accumulate) {
  constexpr auto kType = std::is_same_v<T, __half> ? tl::DataType::kFloat16 : tl::DataType::kBFloat16;
  tl::wgmma_rs<kType, kType, tl::DataType::kFloat32, 64, kChunk, 16, false, false, 1, 1>(
      a, b, reinterpret_cast<uint32_t*>(x), accumulate);
}

// Begins keys = S^T K^T and, with kHasQueries, queries = S^T Q^T, by one warpgroup. S is its fragment of 64 x kK; K and
// Q are tiles of 64 x kK. At the end the products of the last two pieces may be in flight, a group of WGMMAs each.
// use(n, x) gets each rounded piece, channels 8 n to 8 n + 15, as the four registers of a left factor.
template <typename T, int kK, bool kHasQueries, typename Use>
__device__ __forceinline__ void multiply_pieces(const float* S, const void* K, float* keys, const void* Q,
                                                float* queries, Use use) {
  uint32_t rounded[2][4];
  const auto round = [&](int piece) { round_eight<T>(rounded[piece % 2], S + 8 * piece); };
#pragma unroll
  for (int piece = 0; piece < kK / kPieceChannels; ++piece) {
    if (piece == 0) {
      round(0);
      round(1);  // before the fence, because ptxas would wait for the first product at a second fence
      fence_wgmma();
    } else if (piece > 1) {
      wait_wgmma<kHasQueries ? 2 : 1>();  // the products of two pieces ago have read their factor
      round(piece);
      fence_wgmma();
    }
    const uint32_t (&x)[4] = rounded[piece % 2];
    const uint64_t at = piece / 4 * (kChunk * 128 / 16) + piece % 4 * 2;  // units of 16 bytes; a panel has four pieces
    begin_state_wgmma<T>(keys, x, tile_descriptor(K) + at, piece > 0);
    commit_wgmma();
    if constexpr (kHasQueries) {
      begin_state_wgmma<T>(queries, x, tile_descriptor(Q) + at, piece > 0);
      commit_wgmma();
    }
    use(2 * piece, x);
  }
}

template <typename T, int kK>
__device__ __forceinline__ void multiply_state(const float* S, const void* K, float* keys, const void* Q,
                                               float* queries) {
  multiply_pieces<T, kK, true>(S, K, keys, Q, queries, [](int, const uint32_t (&)[4]) {});
}
template <typename T, int kK>
__device__ __forceinline__ void multiply_state(const float* S, const void* K, float* keys) {
  multiply_pieces<T, kK, false>(S, K, keys, nullptr, nullptr, [](int, const uint32_t (&)[4]) {});
}

// Begins keys = S^T K^T as above, and stages S^T in 16 bits in `staged`, in the layout of stage_rows.
template <typename T, int kK>
__device__ __forceinline__ void multiply_and_stage_state(const float* S, const void* K, float* keys, void* staged,
                                                         int offset) {
  const uint32_t to = shared_address(staged) + offset;
  multiply_pieces<T, kK, false>(S, K, keys, nullptr, nullptr, [to](int n, const uint32_t (&x)[4]) {
    store_matrices((to ^ (16 * (n % 8))) + 8192 * (n / 8), x[0], x[1], x[2], x[3]);
  });
}

}  // namespace flash_qla::device
