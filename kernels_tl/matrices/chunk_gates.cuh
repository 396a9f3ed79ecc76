// The gates of a chunk and value head: b_i = g_1 + ... + g_i, beta_i, and the tables ForwardGate, BackwardGate
// and NormalizedGate.
#pragma once

#include "core/activations.cuh"
#include "matrices/chunk_products.cuh"

namespace flash_qla::device {

// x = the entries of `rows` of `heads` neighbouring value heads at the chunk's tokens, by one warp; token rows are
// `stride` apart. x is 0 from token `length` on. Lane 8 l + i has the tokens 8 i to 8 i + 7 of head l: the heads of a
// token share a line.
__device__ __forceinline__ void load_heads(float (&x)[8], const float* rows, int stride, int heads, int length) {
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

constexpr int kHeadGates = 2 * kChunk;  // floats of a head in shared memory: g, later b log2(e); then beta

// Reads and activates g (unless `cumulative`) and beta of `heads` heads from first_head on: element `at` and every
// `stride` further. Tokens from `length` on get 0. The whole CTA calls it. Not inlined, because inlined it slows
// chunk_matrices with activated gates by 10 %.
static __device__ __noinline__ void activate_chunk(float* gates, const void* g, const void* beta, const void* A_log,
                                                   const void* dt_bias, int activations, bool cumulative, int64_t at,
                                                   int first_head, int stride, int heads, int length) {
  constexpr int kMost = 2;  // gates a thread: 4 heads, 128 threads
  uint32_t g_bits[kMost], beta_bits[kMost];
  GateBits gate_bits[kMost];
  const auto token_of = [=](int n) { return static_cast<int>(threadIdx.x + n * blockDim.x) / heads; };
  const auto head_of = [=](int n) { return static_cast<int>(threadIdx.x + n * blockDim.x) % heads; };
#pragma unroll
  for (int n = 0; n < kMost; ++n) {
    if (token_of(n) < length) {
      const int64_t from = at + token_of(n) * stride + head_of(n);
      beta_bits[n] = load_bits(beta, activations, Activation::kBeta, from);
      if (!cumulative) {
        g_bits[n] = load_bits(g, activations, Activation::kG, from);
        gate_bits[n] = load_gate_bits(A_log, dt_bias, activations, first_head + head_of(n));
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kMost; ++n) {
    if (token_of(n) < kChunk) {
      float token_g = 0.f, token_beta = 0.f;
      if (token_of(n) < length) {
        if (!cumulative) {
          const float raw = from_bits(g_bits[n], activations, Activation::kG);
          token_g = activations & Activation::kGate ? HeadGate(gate_bits[n], activations)(raw) : limit_decay(raw);
        }
        const float raw = from_bits(beta_bits[n], activations, Activation::kBeta);
        token_beta = activations & Activation::kSigmoid ? activated_beta(raw, activations) : raw;
      }
      float* const to = gates + head_of(n) * kHeadGates + token_of(n);
      to[0] = token_g;
      to[kChunk] = token_beta;
    }
  }
}

// gates = b log2(e) of `heads` heads, and b_rows = b of the first `valid` tokens, by one warp. The input is g or, if
// `activated`, the result of activate_chunk in `gates`.
__device__ __forceinline__ void load_gates(float* gates, const float* g, bool activated, float* b_rows, int stride,
                                           int heads, int length, int valid) {
  const int head = (threadIdx.x & 31) / 8, i = threadIdx.x % 8;
  float b[8];
  if (activated) {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      b[s] = gates[min(head, heads - 1) * kHeadGates + 8 * i + s];
    }
    __syncwarp();  // all lanes have read g before b replaces it
  } else {
    load_heads(b, g, stride, heads, length);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      b[s] = limit_decay(b[s]);
    }
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

// gates = b log2(e) of `heads` heads from b_rows, by one warp. From token `length` on, b keeps its last value.
__device__ __forceinline__ void load_cumulative_gates(float* gates, const float* b_rows, int stride, int heads,
                                                      int length) {
  const int head = (threadIdx.x & 31) / 8, first = threadIdx.x % 8 * 8;
  float b[8];
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    b[s] = head < heads ? b_rows[min(first + s, length - 1) * stride + head] * kLog2e : 0.f;
  }
  store_head(gates + head * kHeadGates, b);
}

// beta of `heads` heads, by one warp.
__device__ __forceinline__ void load_beta(float* gates, const float* beta_rows, int stride, int heads, int length) {
  float beta[8];
  load_heads(beta, beta_rows, stride, heads, length);
  store_head(gates + (threadIdx.x & 31) / 8 * kHeadGates + kChunk, beta);
}

// Writes a head's ForwardGate table to global memory, by one warp. Lane l has tokens l and l + 32, and passes their
// 1 / |k| and scale / |q|: 1 and scale without the l2norm.
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
  const float bound = sum_of_lanes<32>(__log2f(growth));
  if (lane < 2) {
    table[ForwardGate::kTotal * kChunk + lane] = lane == 0 ? exp2_fast(total) : total + bound;
  }
}

// Writes a head's BackwardGate table to global memory, by one warp.
__device__ __forceinline__ void store_backward_gates(const float* gates, float* table) {
  const int lane = lane_here();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    const float b = gates[token];
    table[BackwardGate::kLog * kChunk + token] = b;
    table[BackwardGate::kGamma * kChunk + token] = exp2_fast(b);
    table[BackwardGate::kDecay * kChunk + token] = exp2_fast(gates[kChunk - 1] - b);
    table[BackwardGate::kFade * kChunk + token] = exp2_fast(b - gates[0]);
    table[BackwardGate::kBeta * kChunk + token] = gates[kChunk + token];
  }
}

// The same for NormalizedGate. Lane l passes 1 / |k| and 1 / |q| of tokens l and l + 32.
__device__ __forceinline__ void store_normalized_gates(const float* gates, float rstd_k_low, float rstd_k_high,
                                                       float rstd_q_low, float rstd_q_high, float* table) {
  const int lane = lane_here();
  const float rstd_k[2] = {rstd_k_low, rstd_k_high}, rstd_q[2] = {rstd_q_low, rstd_q_high};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    const float b = gates[token], fade = exp2_fast(b - gates[0]);
    table[NormalizedGate::kLog * kChunk + token] = b;
    table[NormalizedGate::kQueryFade * kChunk + token] = fade * rstd_q[i];
    table[NormalizedGate::kDecay * kChunk + token] = exp2_fast(gates[kChunk - 1] - b) * rstd_k[i];
    table[NormalizedGate::kKeyFade * kChunk + token] = fade * rstd_k[i];
    table[NormalizedGate::kBeta * kChunk + token] = gates[kChunk + token];
    table[NormalizedGate::kQueryRstd * kChunk + token] = rstd_q[i];
    table[NormalizedGate::kKeyRstd * kChunk + token] = rstd_k[i];
  }
}

}  // namespace flash_qla::device
