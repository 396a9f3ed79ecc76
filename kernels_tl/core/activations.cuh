// Gates and betas of a call: any floating dtype, activated or pre-activation. `activations` encodes both: Activation in
// layout.py.
#pragma once

#include "core/warp.cuh"

namespace flash_qla::device {

__device__ __forceinline__ float from_float(float, float x) { return x; }
__device__ __forceinline__ double from_float(double, float x) { return x; }
__device__ __forceinline__ __nv_bfloat16 from_float(__nv_bfloat16, float x) { return __float2bfloat16_rn(x); }
__device__ __forceinline__ __half from_float(__half, float x) { return __float2half_rn(x); }

// Calls use(T()), where T is the element type that `activations` encodes at `bit`, a Dtype.
template <typename Use>
__device__ __forceinline__ void with_dtype(int activations, int bit, Use use) {
  const int dtype = activations >> bit & 3;
  if (dtype == Dtype::kFloat32) [[likely]] {  // activated gates are fp32; a switch would jump through a table
    use(float());
  } else if (dtype == Dtype::kBfloat16) {
    use(__nv_bfloat16());
  } else if (dtype == Dtype::kFloat16) {
    use(__half());
  } else {
    use(double());
  }
}

// The bits of a number in the low bits of a word; a double is converted to float. Conversion comes later, so that
// several loads are in flight before the first wait.
template <typename T>
__device__ __forceinline__ uint32_t load_bits(const T* number) {
  if constexpr (sizeof(T) == 2) {
    return *reinterpret_cast<const uint16_t*>(number);
  } else {
    return __float_as_uint(to_float(*number));
  }
}
__device__ __forceinline__ uint32_t load_bits(const void* data, int activations, int bit, int64_t i) {
  uint32_t bits;
  with_dtype(activations, bit, [&]<typename T>(T) { bits = load_bits(static_cast<const T*>(data) + i); });
  return bits;
}

template <int kCount>
__device__ __forceinline__ void from_bits(float (&x)[kCount], const uint32_t (&bits)[kCount], int activations,
                                          int bit) {
  with_dtype(activations, bit, [&]<typename T>(T type) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 2) {
        x[i] = unpack(type, bits[i]).x;
      } else {
        x[i] = __uint_as_float(bits[i]);
      }
    }
  });
}
__device__ __forceinline__ float from_bits(uint32_t bits, int activations, int bit) {
  float x[1];
  const uint32_t all[1] = {bits};
  from_bits(x, all, activations, bit);
  return x[0];
}

// log(1 + e) / e, 0 <= e <= 1; relative error 2^-22. The polynomial was fitted to that error.
__device__ __forceinline__ float log1p_ratio(float e) {
  constexpr float kCoefficients[] = {0.0052326242f, -0.029504957f, 0.078225493f, -0.13663207f, 0.19105989f,
                                     -0.24842978f,  0.33319095f,   -0.49999493f, 0.99999994f};
  float x = 0.f;
#pragma unroll
  for (const float coefficient : kCoefficients) {
    x = x * e + coefficient;
  }
  return x;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

// The derivative of sigmoid. It keeps its digits where sigmoid is close to 1.
__device__ __forceinline__ float sigmoid_slope(float x) {
  const float e = expf(-fabsf(x)), r = __fdividef(1.f, 1.f + e);
  return e * r * r;
}

// The limit of g. A stronger decay changes nothing, because e^-1024 is 0 in fp32. So g = -inf forgets the state, and
// the sums over a chunk keep enough digits for later tokens.
constexpr float kStrongestDecay = -1024.f;
__device__ __forceinline__ float limit_decay(float g) { return g < kStrongestDecay ? kStrongestDecay : g; }

// The bits of a head's A_log and dt_bias. Each is read only if `activations` has its flag.
struct GateBits {
  uint32_t A_log = 0, dt_bias = 0;
};
__device__ __forceinline__ GateBits load_gate_bits(const void* A_log, const void* dt_bias, int activations, int head) {
  GateBits bits;
  if (activations & Activation::kGate) {
    bits.A_log = load_bits(A_log, activations, Activation::kALog, head);
  }
  if (activations & Activation::kBias) {
    bits.dt_bias = load_bits(dt_bias, activations, Activation::kDtBias, head);
  }
  return bits;
}

// g = -exp(A_log) softplus(y), y = x + dt_bias, and its derivative. With e = exp(-|y|),
//
//   softplus(y) = max(y, 0) + log(1 + e),    its derivative is exp(min(y, 0)) / (1 + e)
//
// exp(A_log) and exp(min(y, 0)) are one power, because the first may overflow where the product is small. Above
// PyTorch's threshold of 20 log(1 + e) is lost, as in PyTorch. No branches: they would keep a thread's tokens apart.
struct HeadGate {
  float log2_rate, bias;  // A_log log2(e)

  __device__ __forceinline__ HeadGate(float log2_rate, float bias) : log2_rate(log2_rate), bias(bias) {}
  __device__ __forceinline__ HeadGate(const GateBits& bits, int activations)
      : log2_rate(from_bits(bits.A_log, activations, Activation::kALog) * kLog2e),
        bias(activations & Activation::kBias ? from_bits(bits.dt_bias, activations, Activation::kDtBias) : 0.f) {}

  __device__ __forceinline__ float operator()(float x) const {
    const float y = x + bias, e = exp2_fast(-fabsf(y) * kLog2e), ratio = log1p_ratio(e);
    return limit_decay(-rate(y) * (y > 0.f ? y + e * ratio : ratio));
  }
  // The derivative, kept finite: a token that forgets everything multiplies it by a gradient of 0.
  __device__ __forceinline__ float slope(float x) const {
    constexpr float kMost = 3.402823466e38f;
    const float y = x + bias, finite_rate = rate(y) > kMost ? kMost : rate(y);
    return -finite_rate * __fdividef(1.f, 1.f + exp2_fast(-fabsf(y) * kLog2e));
  }

 private:
  // exp(A_log + min(y, 0))
  __device__ __forceinline__ float rate(float y) const { return exp2_fast(fminf(y, 0.f) * kLog2e + log2_rate); }
};

__device__ __forceinline__ float beta_factor(int activations) { return activations & Activation::kTwice ? 2.f : 1.f; }
__device__ __forceinline__ float activated_beta(float x, int activations) {
  return beta_factor(activations) * sigmoid(x);
}
__device__ __forceinline__ float activated_beta_slope(float x, int activations) {
  return beta_factor(activations) * sigmoid_slope(x);
}

// The log decay and the step size of a head's token, activated or not before. Both cases are computed, without a
// branch: the compiler then computes the activations while loads are in flight.
__device__ __forceinline__ float log_decay(float x, const GateBits& bits, int activations) {
  const float activated = HeadGate(bits, activations)(x);
  return activations & Activation::kGate ? activated : limit_decay(x);
}
__device__ __forceinline__ float step_size(float x, int activations) {
  const float activated = activated_beta(x, activations);
  return activations & Activation::kSigmoid ? activated : x;
}

}  // namespace flash_qla::device
