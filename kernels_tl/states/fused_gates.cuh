// The table of a chunk's gates that fused_forward keeps in shared memory: FusedGate of layout.py. One warp writes it,
// and lane l has tokens 2 l and 2 l + 1.
#pragma once

#include "core/activations.cuh"
#include "core/warp.cuh"

namespace flash_qla::device {

// rows[i * stride] = b_i for the tokens below `length`, from the table, which has b_i log2(e).
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

// bits[i] = the bits of the lane's two numbers, of g or of beta. Token n is element at + n stride; tokens from `length`
// on are not read. The loads are in flight while the warp writes the table of the chunk before.
__device__ __forceinline__ void load_pair(uint32_t* bits, const void* data, int activations, int bit, int64_t at,
                                          int stride, int length) {
  const int token = 2 * lane_here();
  with_dtype(activations, bit, [&]<typename T>(T) {
    const T* const elements = static_cast<const T*>(data) + at;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (token + i < length) {
        bits[i] = load_bits(elements + (token + i) * stride);
      }
    }
  });
}
__device__ __forceinline__ void load_pairs(uint32_t* g_bits, uint32_t* beta_bits, const void* g, const void* beta,
                                           int activations, int64_t at, int stride, int length) {
  load_pair(g_bits, g, activations, Activation::kG, at, stride, length);
  load_pair(beta_bits, beta, activations, Activation::kBeta, at, stride, length);
}

// g and beta = the activated numbers of load_pairs; 0 from token `length` on.
__device__ __forceinline__ void activate_pairs(float* g, float* beta, const uint32_t* g_bits, const uint32_t* beta_bits,
                                               float log2_rate, float bias, int activations, int length) {
  const uint32_t gs[2] = {g_bits[0], g_bits[1]}, betas[2] = {beta_bits[0], beta_bits[1]};
  float raw_g[2], raw_beta[2];
  from_bits(raw_g, gs, activations, Activation::kG);
  from_bits(raw_beta, betas, activations, Activation::kBeta);
  if (activations & Activation::kGate) {
    raw_g[0] = HeadGate(log2_rate, bias)(raw_g[0]);
    raw_g[1] = HeadGate(log2_rate, bias)(raw_g[1]);
  } else {
    raw_g[0] = limit_decay(raw_g[0]);
    raw_g[1] = limit_decay(raw_g[1]);
  }
  if (activations & Activation::kSigmoid) {
    raw_beta[0] = activated_beta(raw_beta[0], activations);
    raw_beta[1] = activated_beta(raw_beta[1], activations);
  }
  const int token = 2 * lane_here();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    g[i] = token + i < length ? raw_g[i] : 0.f;
    beta[i] = token + i < length ? raw_beta[i] : 0.f;
  }
}

// head_gate = {log2_rate, bias} of a head's HeadGate: the kernel keeps them in two registers.
__device__ __forceinline__ void load_head_gate(float* head_gate, const void* A_log, const void* dt_bias,
                                               int activations, int head) {
  const HeadGate gate(load_gate_bits(A_log, dt_bias, activations, head), activations);
  head_gate[0] = gate.log2_rate;
  head_gate[1] = gate.bias;
}

// Writes the rows that need no norms: all of ForwardGate's but the bound, then kLog, kPlainBeta, kFromBlockEnd and
// kToBlockEnd. `scale` is 1 with the l2norm, because scale / |q| then comes later (MatricesMaker::normalize).
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
