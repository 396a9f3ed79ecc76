// The gates of a chunk: b_i = g_1 + ... + g_i, and what a token brings to its value head besides its vectors.
#pragma once

#include "device/activations.cuh"
#include "device/chunk_products.cuh"

namespace flash_qla::device {

// By one warp: of `heads` neighbouring value heads what `numbers`, with the Dtype at `bit`, hold from element `at` on at
// the chunk's tokens, `stride` apart; behind `length` tokens 0. Lane 8 l + i has the tokens 8 i to 8 i + 7 of head l: the
// heads of a token share a line.
__device__ __forceinline__ void load_heads(float (&x)[8], const void* numbers, int activations, int bit, int64_t at,
                                           int64_t stride, int heads, int length) {
  const int head = (threadIdx.x & 31) / 8, first = threadIdx.x % 8 * 8;
  with_dtype(activations, bit, [&]<typename T>(T) {
    const T* const elements = static_cast<const T*>(numbers) + at;
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      x[s] = head < heads && first + s < length ? to_float(elements[(first + s) * stride + head]) : 0.f;
    }
  });
}

// f of each, behind `length` tokens 0 again.
template <typename F>
__device__ __forceinline__ void change_heads(float (&x)[8], int length, F f) {
  const int first = threadIdx.x % 8 * 8;
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    x[s] = first + s < length ? f(x[s]) : 0.f;
  }
}

__device__ __forceinline__ void store_head(float* to, const float (&x)[8]) {
  float4* const pieces = reinterpret_cast<float4*>(to + threadIdx.x % 8 * 8);
  pieces[0] = {x[0], x[1], x[2], x[3]};
  pieces[1] = {x[4], x[5], x[6], x[7]};
}

constexpr int kHeadGates = 2 * kChunk;  // floats in shared memory for each head: b log2(e), beta

__device__ __forceinline__ HeadGate head_gate(const void* A_log, const void* dt_bias, int activations, int head) {
  return {gate_rate(A_log, activations, head), gate_bias(dt_bias, activations, head)};
}

// By one warp: b log2(e) of `heads` heads, of which first_head is the first, to `gates`, and b of the first `valid`
// tokens to b_rows.
__device__ __forceinline__ void load_gates(float* gates, const void* g, const void* A_log, const void* dt_bias,
                                           int activations, int64_t at, int first_head, float* b_rows, int64_t stride,
                                           int heads, int length, int valid) {
  const int head = (threadIdx.x & 31) / 8, i = threadIdx.x % 8;
  float b[8];
  load_heads(b, g, activations, Activation::kG, at, stride, heads, length);
  if (activations & Activation::kGate) {
    const HeadGate gate = head_gate(A_log, dt_bias, activations, first_head + min(head, heads - 1));
    change_heads(b, length, [&](float x) { return gate(x); });
  }
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

// By one warp: b log2(e) of `heads` heads from b itself, which behind the chunk's last token stays what it was.
__device__ __forceinline__ void load_cumulative_gates(float* gates, const float* b_rows, int64_t stride, int heads,
                                                      int length) {
  const int head = (threadIdx.x & 31) / 8, first = threadIdx.x % 8 * 8;
  float b[8];
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    b[s] = head < heads ? b_rows[min(first + s, length - 1) * stride + head] * kLog2e : 0.f;
  }
  store_head(gates + head * kHeadGates, b);
}

// By one warp: likewise beta.
__device__ __forceinline__ void load_beta(float* gates, const void* betas, int activations, int64_t at, int64_t stride,
                                          int heads, int length) {
  float beta[8];
  load_heads(beta, betas, activations, Activation::kBeta, at, stride, heads, length);
  if (activations & Activation::kSigmoid) {
    change_heads(beta, length, [&](float x) { return activated_beta(x, activations); });
  }
  store_head(gates + (threadIdx.x & 31) / 8 * kHeadGates + kChunk, beta);
}

// By one warp: rows of the tables of slopes of `heads` heads, in global memory.
__device__ __forceinline__ void store_slopes(float* table, int row, const float (&x)[8], int heads) {
  const int head = (threadIdx.x & 31) / 8;
  if (head < heads) {
    store_head(table + (head * GateSlope::kCount + row) * kChunk, x);
  }
}
__device__ __forceinline__ void store_gate_slopes(float* table, const void* g, const void* A_log, const void* dt_bias,
                                                  int activations, int64_t at, int first_head, int64_t stride,
                                                  int heads, int length) {
  const int head = (threadIdx.x & 31) / 8;
  float slope[8], value[8];
  if (activations & Activation::kGate) {
    const HeadGate gate = head_gate(A_log, dt_bias, activations, first_head + min(head, heads - 1));
    load_heads(slope, g, activations, Activation::kG, at, stride, heads, length);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      value[s] = gate(slope[s]);
      slope[s] = gate.slope(slope[s]);
    }
  } else {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      slope[s] = 1.f;
      value[s] = 0.f;
    }
  }
  store_slopes(table, GateSlope::kG, slope, heads);
  store_slopes(table, GateSlope::kValue, value, heads);
}
__device__ __forceinline__ void store_beta_slopes(float* table, const void* betas, int activations, int64_t at,
                                                  int64_t stride, int heads, int length) {
  float slope[8] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
  if (activations & Activation::kSigmoid) {
    load_heads(slope, betas, activations, Activation::kBeta, at, stride, heads, length);
    change_heads(slope, length, [&](float x) { return activated_beta_slope(x, activations); });
  }
  store_slopes(table, GateSlope::kBeta, slope, heads);
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
    reinterpret_cast<float2*>(table + ForwardGate::kBeta * kChunk)[token] = {beta, beta * gamma * rstd_k[i]};
    table[ForwardGate::kQuery * kChunk + token] = scale_q[i] * gamma;
    table[ForwardGate::kDecay * kChunk + token] = exp2_fast(total - b) * rstd_k[i];
  }
  float bound = __log2f(growth);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    bound += __shfl_xor_sync(~0u, bound, step);
  }
  if (lane < 2) {
    table[ForwardGate::kTotal * kChunk + lane] = lane == 0 ? exp2_fast(total) : total + bound;
  }
}

// By one warp: likewise the backward's.
__device__ __forceinline__ void store_backward_gates(const float* gates, float* table) {
  const int lane = lane_here();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    const float b = gates[token];
    table[BackwardGate::kLog * kChunk + token] = b * kLn2;
    table[BackwardGate::kGamma * kChunk + token] = exp2_fast(b);
    table[BackwardGate::kDecay * kChunk + token] = exp2_fast(gates[kChunk - 1] - b);
    table[BackwardGate::kFade * kChunk + token] = exp2_fast(b - gates[0]);
    table[BackwardGate::kBeta * kChunk + token] = gates[kChunk + token];
  }
}

}  // namespace flash_qla::device
