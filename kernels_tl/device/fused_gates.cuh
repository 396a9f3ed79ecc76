// fused_forward's table of a chunk's gates, in shared memory, by one warp.
#pragma once

#include "device/activations.cuh"
#include "device/warp.cuh"

namespace flash_qla::device {

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

// By one warp: of tokens 2 l and 2 l + 1 what `numbers`, with the Dtype at `bit`, hold from element `at` on, `stride`
// apart; from `length` on 0.
__device__ __forceinline__ void load_pair(float* x, const void* numbers, int activations, int bit, int64_t at,
                                          int64_t stride, int length) {
  const int token = 2 * lane_here();
  x[0] = x[1] = 0.f;
  with_dtype(activations, bit, [&]<typename T>(T) {
    const T* const elements = static_cast<const T*>(numbers) + at + token * stride;
    if (token < length) {
      x[0] = to_float(elements[0]);
    }
    if (token + 1 < length) {
      x[1] = to_float(elements[stride]);
    }
  });
}

// g and beta of these tokens, activated.
__device__ __forceinline__ void load_gate_pair(float* x, const void* g, float rate, float bias, int activations,
                                               int64_t at, int64_t stride, int length) {
  load_pair(x, g, activations, Activation::kG, at, stride, length);
  if (activations & Activation::kGate) {
    const int token = 2 * lane_here();
    const HeadGate gate = {rate, bias};
    x[0] = token < length ? gate(x[0]) : 0.f;
    x[1] = token + 1 < length ? gate(x[1]) : 0.f;
  }
}
__device__ __forceinline__ void load_beta_pair(float* x, const void* beta, int activations, int64_t at, int64_t stride,
                                               int length) {
  load_pair(x, beta, activations, Activation::kBeta, at, stride, length);
  if (activations & Activation::kSigmoid) {
    const int token = 2 * lane_here();
    x[0] = token < length ? activated_beta(x[0], activations) : 0.f;
    x[1] = token + 1 < length ? activated_beta(x[1], activations) : 0.f;
  }
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
  reinterpret_cast<float4*>(table + ForwardGate::kBeta * kChunk)[lane] = {beta[0], beta[0] * gamma[0], beta[1],
                                                                          beta[1] * gamma[1]};
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
