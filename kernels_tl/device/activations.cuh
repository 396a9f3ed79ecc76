// Gates and betas as a call has them: in any floating dtype, ready or raw. What becomes of them is one number,
// `activations`: Activation in layout.py.
#pragma once

#include "device/warp.cuh"

namespace flash_qla::device {

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(double x) { return static_cast<float>(x); }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }

// use(numbers) with a tensor's elements in their type, which is that whose Dtype `activations` has at `bit`.
template <typename Use>
__device__ __forceinline__ void with_numbers(const void* numbers, int activations, int bit, Use use) {
  switch (activations >> bit & 3) {
    case Dtype::kFloat32:
      return use(static_cast<const float*>(numbers));
    case Dtype::kBfloat16:
      return use(static_cast<const __nv_bfloat16*>(numbers));
    case Dtype::kFloat16:
      return use(static_cast<const __half*>(numbers));
    default:
      return use(static_cast<const double*>(numbers));
  }
}

__device__ __forceinline__ float read_number(const void* numbers, int activations, int bit, int64_t i) {
  float x;
  with_numbers(numbers, activations, bit, [&](auto* elements) { x = as_float(elements[i]); });
  return x;
}

// Of a head: -exp(A_log), dt_bias; without the gate they are not used.
__device__ __forceinline__ float gate_rate(const void* A_log, int activations, int head) {
  return activations & Activation::kGate ? -expf(read_number(A_log, activations, Activation::kALog, head)) : 0.f;
}
__device__ __forceinline__ float gate_bias(const void* dt_bias, int activations, int head) {
  return activations & Activation::kBias ? read_number(dt_bias, activations, Activation::kDtBias, head) : 0.f;
}

// As PyTorch's, which is the identity behind its threshold.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

__device__ __forceinline__ float activated_gate(float x, float rate, float bias) { return rate * softplus(x + bias); }

__device__ __forceinline__ float activated_beta(float x, int activations) {
  return activations & Activation::kTwice ? 2.f * sigmoid(x) : sigmoid(x);
}

}  // namespace flash_qla::device
