// Gradients of the raw gates and betas from chunk_backward's gradients of g and beta; see gradients/gate_gradients.py.
#pragma once

#include "core/activations.cuh"

namespace flash_qla::device {

constexpr int kGateThreads = kGateHeads * kGateTokens;

__device__ __forceinline__ void write_number(void* numbers, int activations, int bit, int64_t i, float x) {
  with_dtype(activations, bit, [&]<typename T>(T type) { static_cast<T*>(numbers)[i] = from_float(type, x); });
}

// The sum of x over the threads of a head, those with the same thread % kGateHeads, in a fixed order. The first
// kGateHeads threads get it.
__device__ __forceinline__ float2 sum_over_tokens(float2* shared, float2 x) {
  const int thread = threadIdx.x;
  shared[thread] = x;
  for (int half = kGateThreads / 2; half >= kGateHeads; half /= 2) {
    __syncthreads();
    if (thread < half) {
      shared[thread].x += shared[thread + half].x;
      shared[thread].y += shared[thread + half].y;
    }
  }
  return shared[thread];
}

// One CTA's work: kGateHeads value heads from first_head on, the `length` tokens of one chunk slot from token row `row`
// on. Parts are `part_size` elements apart. The last CTA of these heads to end adds the sums of all slots. A kernel
// cannot pass records, so everything is an argument.
__device__ __forceinline__ void gate_gradients(const float* db_parts, const float* dg_parts, int parts,
                                               int64_t part_size, const void* g, const void* beta, const void* A_log,
                                               const void* dt_bias, int activations, void* db, void* dg,
                                               float* sums_of_slots, int* counter, float* dA_log, float* ddt_bias,
                                               int slot, int slots, int first_head, int H_v, int64_t row, int length,
                                               bool is_padding) {
  const int head = first_head + threadIdx.x % kGateHeads, first = threadIdx.x / kGateHeads;
  float2 sums = {};  // dA_log, ddt_bias
  if (head < H_v) {
    const GateBits bits = load_gate_bits(A_log, dt_bias, activations, head);
    for (int token = first; token < length; token += kGateTokens) {
      const int64_t at = (row + token) * H_v + head;
      float by_beta = 0.f, by_g = 0.f;
      if (!is_padding) {
        uint32_t g_bits = 0, beta_bits = 0;
        if (activations & Activation::kGate) {
          g_bits = load_bits(g, activations, Activation::kG, at);
        }
        if (activations & Activation::kSigmoid) {
          beta_bits = load_bits(beta, activations, Activation::kBeta, at);
        }
        for (int part = 0; part < parts; ++part) {
          by_beta += db_parts[part * part_size + at];
          by_g += dg_parts[part * part_size + at];
        }
        if (activations & Activation::kSigmoid) {
          by_beta *= activated_beta_slope(from_bits(beta_bits, activations, Activation::kBeta), activations);
        }
        if (activations & Activation::kGate) {
          const HeadGate gate(bits, activations);
          const float raw = from_bits(g_bits, activations, Activation::kG);
          sums.x += by_g * gate(raw);
          by_g *= gate.slope(raw);
          sums.y += by_g;
        }
      }
      write_number(db, activations, Activation::kBeta, at, by_beta);
      write_number(dg, activations, Activation::kG, at, by_g);
    }
  }
  if (!(activations & Activation::kGate)) {
    return;
  }
  __shared__ float2 shared[kGateThreads];
  __shared__ int before;
  sums = sum_over_tokens(shared, sums);
  float2* const all_sums = reinterpret_cast<float2*>(sums_of_slots);
  if (first == 0 && head < H_v) {
    all_sums[static_cast<int64_t>(slot) * H_v + head] = sums;
    __threadfence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    before = atomicAdd(counter, 1);
    __threadfence();
  }
  __syncthreads();
  if (before < slots - 1) {
    return;
  }
  sums = {};
  if (head < H_v) {
    for (int i = first; i < slots; i += kGateTokens) {
      const float2 of_slot = __ldcg(all_sums + static_cast<int64_t>(i) * H_v + head);
      sums.x += of_slot.x;
      sums.y += of_slot.y;
    }
  }
  sums = sum_over_tokens(shared, sums);
  if (first == 0 && head < H_v) {
    dA_log[head] = sums.x;
    if (activations & Activation::kBias) {
      ddt_bias[head] = sums.y;
    }
  }
}

}  // namespace flash_qla::device
