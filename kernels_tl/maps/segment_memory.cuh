// How far back a segment's first state remembers: see segments.cuh, which has the bound and the threshold.
#pragma once

#include "core/activations.cuh"
#include "core/warp.cuh"
#include "maps/segments.cuh"
#include "states/fused_gates.cuh"

namespace flash_qla::device {

// The inputs of the bounds. A key has `key_dim` channels, a multiple of 8. Keys of tokens are k_row elements apart,
// of heads k_head.
struct BoundInputs {
  const void *k, *g, *beta, *A_log, *dt_bias;
  int activations, H_k, H_v, key_dim;
  int64_t k_row, k_head;
};

constexpr int kLanesOfKey = 8;                        // lanes that read a key together, so that they read whole lines
constexpr int kPiecesOfLane = 128 / 8 / kLanesOfKey;  // a piece is eight channels; the kernel has K = 128

// |k|^2 of the lane's pieces of a key.
template <typename Element>
__device__ __forceinline__ float square_of_pieces(const uint4 (&pieces)[kPiecesOfLane]) {
  float sum = 0.f;
#pragma unroll
  for (const uint4& piece : pieces) {
    const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (const uint32_t pair : pairs) {
      const float2 x = unpack(Element(), pair);
      sum += x.x * x.x + x.y * x.y;
    }
  }
  return sum;
}

// squares[i] = |k|^2 of the chunk's token 2 lane + i. `keys` are in 16 bits, `stride` elements apart.
template <typename Element>
__device__ __forceinline__ void squares_of_keys(float (&squares)[2], const Element* keys, int64_t stride, int key_dim) {
  constexpr int kTokens = 32 / kLanesOfKey;  // tokens of a step
  constexpr int kSteps = 8;                  // whose loads are in flight
  const int lane = lane_here(), part = lane % kLanesOfKey;
  for (int step = 0; step < kChunk / kTokens; step += kSteps) {
    uint4 pieces[kSteps][kPiecesOfLane];
#pragma unroll
    for (int i = 0; i < kSteps * kPiecesOfLane; ++i) {
      const int token = kTokens * (step + i / kPiecesOfLane) + lane / kLanesOfKey;
      const int number = part + kLanesOfKey * (i % kPiecesOfLane);
      pieces[i / kPiecesOfLane][i % kPiecesOfLane] =
          number < key_dim / 8 ? reinterpret_cast<const uint4*>(keys + token * stride)[number] : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const float sum = sum_of_lanes<kLanesOfKey>(square_of_pieces<Element>(pieces[i]));
      const int from = 2 * lane % kTokens * kLanesOfKey;
      const float first = __shfl_sync(~0u, sum, from), second = __shfl_sync(~0u, sum, from + kLanesOfKey);
      if (2 * lane / kTokens == step + i) {
        squares[0] = first;
        squares[1] = second;
      }
    }
  }
}

// The sum of log2 of the bounds of a whole chunk's tokens, by one warp. With the l2norm |k| is at most 1.
template <typename Element, bool kNormalize>
__device__ __forceinline__ float bound_of_chunk(const BoundInputs& in, const float* head_gate, int row, int hv) {
  uint32_t g_bits[2] = {}, beta_bits[2] = {};
  load_pairs(g_bits, beta_bits, in.g, in.beta, in.activations, static_cast<int64_t>(row) * in.H_v + hv, in.H_v, kChunk);
  float g[2], beta[2], growth = 1.f;
  activate_pairs(g, beta, g_bits, beta_bits, head_gate[0], head_gate[1], in.activations, kChunk);
  float squares[2] = {1.f, 1.f};
  if constexpr (!kNormalize) {
    const int64_t first = row * in.k_row + hv / (in.H_v / in.H_k) * in.k_head;
    squares_of_keys(squares, static_cast<const Element*>(in.k) + first, in.k_row, in.key_dim);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    growth *= fmaxf(1.f, fabsf(1.f - beta[i] * squares[i]));
  }
  return sum_of_lanes<32>((g[0] + g[1]) * kLog2e + __log2f(growth));
}

// The search gives up if `most` chunks at the present rate would reach less than this fraction of the threshold.
constexpr float kGiveUp = 0.5f;

// The fewest of the chunks before token `row` that alone decide the state there. kFromMaps: more than `most` do, or the
// search has given up. A CTA calls it, and each warp takes every kWarps-th chunk.
template <typename Element, bool kNormalize, int kWarps>
__device__ __forceinline__ int remembered_chunks(const BoundInputs& in, int row, int hv, int most) {
  __shared__ float bounds[2][kWarps];  // double-buffered, so that one barrier is enough
  const int warp = warp_index();
  float head_gate[2], bound = 0.f;
  load_head_gate(head_gate, in.A_log, in.dt_bias, in.activations, hv);
  for (int before = 0, half = 0; before < most; before += kWarps, half ^= 1) {
    const int distance = before + 1 + warp;
    if (distance <= most) {
      const float of_chunk = bound_of_chunk<Element, kNormalize>(in, head_gate, row - distance * kChunk, hv);
      if (lane_here() == 0) {
        bounds[half][warp] = of_chunk;
      }
    }
    __syncthreads();
    for (int i = 0; i < kWarps && before + i < most; ++i) {
      const int chunks = before + i + 1;
      bound += bounds[half][i];
      if (bound < kNegligible) {
        return chunks;
      }
      if (bound * most > kGiveUp * kNegligible * chunks) {
        return kFromMaps;
      }
    }
  }
  return kFromMaps;
}

// The memory of the segment that begins at token `row`, after `before` chunks of its sequence. All CTAs that write
// needs_maps write 1.
template <typename Element, bool kNormalize, int kWarps>
__device__ __forceinline__ void find_memory(const BoundInputs& in, int row, int before, int hv, int* memory,
                                            int* needs_maps) {
  const int most = min(before, kLongestMemory);
  const int chunks = before == 0 ? 0 : remembered_chunks<Element, kNormalize, kWarps>(in, row, hv, most);
  if (threadIdx.x == 0) {
    *memory = chunks;
    if (chunks == kFromMaps) {
      *needs_maps = 1;
    }
  }
}

}  // namespace flash_qla::device
