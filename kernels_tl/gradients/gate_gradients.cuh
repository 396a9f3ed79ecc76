// Gradients of the caller's gates and betas from the gradients of g and beta; see gradients/gate_gradients.py.
#pragma once

#include "core/activations.cuh"

namespace flash_qla::device {

constexpr int kGateThreads = kGateHeads * kGateTokens;

__device__ __forceinline__ void write_number(void* data, int activations, int bit, int64_t i, float x) {
  with_dtype(activations, bit, [&]<typename T>(T type) { static_cast<T*>(data)[i] = from_float(type, x); });
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

// Gradients of g and beta, in parts that are `size` elements apart.
struct GateParts {
  const float *db, *dg;
  int count;
  int64_t size;
};

// The caller's gates and betas.
struct RawGates {
  const void *g, *beta, *A_log, *dt_bias;
  int activations;
};

// The gradients of the caller's gates and betas.
struct RawGradients {
  void *db, *dg;
  float *dA_log, *ddt_bias;
};

// A CTA's work: kGateHeads value heads from first_head on, and the tokens of one chunk slot: `length` token rows from
// `row` on.
struct GateWork {
  int slot, slots, first_head, H_v;
  int64_t row;
  int length;
  bool is_padding;
};

// The work of one CTA. Of the CTAs with the same heads, the last one to end adds the sums of all slots.
__device__ __forceinline__ void gate_gradients(const GateParts& parts, const RawGates& raw, const RawGradients& to,
                                               const GateWork& work, float* sums_of_slots, int* counter) {
  const int activations = raw.activations, H_v = work.H_v, slots = work.slots, length = work.length;
  const int head = work.first_head + threadIdx.x % kGateHeads, first = threadIdx.x / kGateHeads;
  float2 sums = {};  // dA_log, ddt_bias
  if (head < H_v) {
    const GateBits bits = load_gate_bits(raw.A_log, raw.dt_bias, activations, head);
    for (int token = first; token < length; token += kGateTokens) {
      const int64_t at = (work.row + token) * H_v + head;
      float by_beta = 0.f, by_g = 0.f;
      if (!work.is_padding) {
        uint32_t g_bits = 0, beta_bits = 0;
        if (activations & Activation::kGate) {
          g_bits = load_bits(raw.g, activations, Activation::kG, at);
        }
        if (activations & Activation::kSigmoid) {
          beta_bits = load_bits(raw.beta, activations, Activation::kBeta, at);
        }
        for (int part = 0; part < parts.count; ++part) {
          by_beta += parts.db[part * parts.size + at];
          by_g += parts.dg[part * parts.size + at];
        }
        if (activations & Activation::kSigmoid) {
          by_beta *= activated_beta_slope(from_bits(beta_bits, activations, Activation::kBeta), activations);
        }
        if (activations & Activation::kGate) {
          const HeadGate gate(bits, activations);
          const float raw_g = from_bits(g_bits, activations, Activation::kG);
          sums.x += by_g * gate(raw_g);
          by_g *= gate.slope(raw_g);
          sums.y += by_g;
        }
      }
      write_number(to.db, activations, Activation::kBeta, at, by_beta);
      write_number(to.dg, activations, Activation::kG, at, by_g);
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
    all_sums[static_cast<int64_t>(work.slot) * H_v + head] = sums;
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
    to.dA_log[head] = sums.x;
    if (activations & Activation::kBias) {
      to.ddt_bias[head] = sums.y;
    }
  }
}

}  // namespace flash_qla::device
