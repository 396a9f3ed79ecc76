// Gates and betas as a call has them: in any floating dtype, ready or raw. What becomes of them is one number,
// `activations`: Activation in layout.py.
#pragma once

#include "device/warp.cuh"

namespace flash_qla::device {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(double x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

__device__ __forceinline__ float from_float(float, float x) { return x; }
__device__ __forceinline__ double from_float(double, float x) { return x; }
__device__ __forceinline__ __nv_bfloat16 from_float(__nv_bfloat16, float x) { return __float2bfloat16_rn(x); }
__device__ __forceinline__ __half from_float(__half, float x) { return __float2half_rn(x); }

// use(T()) with the type of the elements whose Dtype `activations` has at `bit`.
template <typename Use>
__device__ __forceinline__ void with_dtype(int activations, int bit, Use use) {
  switch (activations >> bit & 3) {
    case Dtype::kFloat32:
      return use(float());
    case Dtype::kBfloat16:
      return use(__nv_bfloat16());
    case Dtype::kFloat16:
      return use(__half());
    default:
      return use(double());
  }
}

__device__ __forceinline__ float read_number(const void* numbers, int activations, int bit, int64_t i) {
  float x;
  with_dtype(activations, bit, [&]<typename T>(T) { x = to_float(static_cast<const T*>(numbers)[i]); });
  return x;
}

__device__ __forceinline__ void write_number(void* numbers, int activations, int bit, int64_t i, float x) {
  with_dtype(activations, bit, [&]<typename T>(T type) { static_cast<T*>(numbers)[i] = from_float(type, x); });
}

constexpr float kSoftplusThreshold = 20.f;  // PyTorch's: from there on it is the identity

__device__ __forceinline__ float softplus(float x) { return x > kSoftplusThreshold ? x : log1pf(expf(x)); }

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

// Its derivative, which keeps its digits where sigmoid is next to 1.
__device__ __forceinline__ float sigmoid_slope(float x) {
  const float e = expf(-fabsf(x)), r = __fdividef(1.f, 1.f + e);
  return e * r * r;
}

__device__ __forceinline__ float softplus_slope(float x) { return x > kSoftplusThreshold ? 1.f : sigmoid(x); }

// Of a head: -exp(A_log), dt_bias. Without the gate inside nothing is read.
__device__ __forceinline__ float gate_rate(const void* A_log, int activations, int head) {
  return activations & Activation::kGate ? -expf(read_number(A_log, activations, Activation::kALog, head)) : 0.f;
}
__device__ __forceinline__ float gate_bias(const void* dt_bias, int activations, int head) {
  return activations & Activation::kBias ? read_number(dt_bias, activations, Activation::kDtBias, head) : 0.f;
}

// g of what comes, and its derivative.
struct HeadGate {
  float rate, bias;

  __device__ __forceinline__ float operator()(float x) const { return rate * softplus(x + bias); }
  __device__ __forceinline__ float slope(float x) const { return rate * softplus_slope(x + bias); }
};

__device__ __forceinline__ float beta_factor(int activations) { return activations & Activation::kTwice ? 2.f : 1.f; }
__device__ __forceinline__ float activated_beta(float x, int activations) {
  return beta_factor(activations) * sigmoid(x);
}
__device__ __forceinline__ float activated_beta_slope(float x, int activations) {
  return beta_factor(activations) * sigmoid_slope(x);
}

// By one warp: dbeta and dg of tokens 2 l and 2 l + 1, those before `valid`, through the activations that are inside, in
// the dtypes of what came, from element `at` on, `stride` apart. The slopes (GateSlope) and the sums are those of all
// chunks and heads: what the tokens add to dA_log and ddt_bias goes to the two sums of the piece, the chunk and head.
// Numbers of gates have 32 bits: their vectors would not fit into any memory.
__device__ __forceinline__ void store_through_activations(float (&dbeta)[2], float (&dg)[2], const float* slopes,
                                                          int activations, void* dbeta_rows, void* dg_rows, float* sums,
                                                          int piece, int at, int stride, int valid) {
  const int token = 2 * lane_here();
  if (activations != 0) {
    const auto row = [&](int i) {
      return *reinterpret_cast<const float2*>(slopes + (static_cast<int64_t>(piece) * GateSlope::kCount + i) * kChunk +
                                              token);
    };
    const float2 of_beta = row(GateSlope::kBeta);
    dbeta[0] *= of_beta.x;
    dbeta[1] *= of_beta.y;
    const float2 value = row(GateSlope::kValue);
    float dA_log = (token < valid ? dg[0] * value.x : 0.f) + (token + 1 < valid ? dg[1] * value.y : 0.f);
    const float2 of_g = row(GateSlope::kG);
    dg[0] *= of_g.x;
    dg[1] *= of_g.y;
    float ddt_bias = (token < valid ? dg[0] : 0.f) + (token + 1 < valid ? dg[1] : 0.f);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      dA_log += __shfl_xor_sync(~0u, dA_log, step);
      ddt_bias += __shfl_xor_sync(~0u, ddt_bias, step);
    }
    if (token == 0 && activations & Activation::kGate) {
      reinterpret_cast<float2*>(sums)[piece] = {dA_log, ddt_bias};
    }
  }
  const auto store = [&](void* rows, int bit, const float (&x)[2]) {
    with_dtype(activations, bit, [&]<typename T>(T type) {
      T* const to = static_cast<T*>(rows) + at + token * stride;
      if (token < valid) {
        to[0] = from_float(type, x[0]);
      }
      if (token + 1 < valid) {
        to[stride] = from_float(type, x[1]);
      }
    });
  };
  store(dbeta_rows, Activation::kBeta, dbeta);
  store(dg_rows, Activation::kG, dg);
}

}  // namespace flash_qla::device
