// A call's tensors and flags as arguments of kernels.
#pragma once

#include <cstdint>
#include <optional>

#include "call.h"
#include "gpu/states.h"
#include "kernels.h"
#include "layout.h"

namespace flash_qla {

// The dtype of a kernel's instance: float32, a 16-bit dtype, or both dtypes of 8 bits.
inline kernels::Dtype instance_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return kernels::Dtype::kFloat32;
    case ScalarType::BFloat16:
      return kernels::Dtype::kBfloat16;
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Float8_e5m2:
      return kernels::Dtype::kFloat8;
    default:
      return kernels::Dtype::kFloat16;
  }
}

// The tensor's memory; null without the tensor.
inline const void* data(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
inline void* data_if(bool requested, const Tensor& tensor) { return requested ? tensor.mutable_data_ptr() : nullptr; }

// The Dtype (layout.py) of a tensor.
inline int64_t dtype_code(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return Dtype::kBfloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::Double:
      return Dtype::kFloat64;
    case ScalarType::Float8_e4m3fn:
      return Dtype::kFloat8E4m3fn;
    case ScalarType::Float8_e5m2:
      return Dtype::kFloat8E5m2;
    default:
      return Dtype::kFloat32;
  }
}

// The Activation (layout.py) of pre-activation gates: g, A_log and dt_bias with their dtypes.
inline int64_t gate_activation(const Tensor& g, const Tensor& A_log, const std::optional<Tensor>& dt_bias) {
  const int64_t code = Activation::kGate | dtype_code(g) << Activation::kG | dtype_code(A_log) << Activation::kALog;
  return dt_bias ? code | Activation::kBias | dtype_code(*dt_bias) << Activation::kDtBias : code;
}

// The Activation of pre-activation betas.
inline int64_t beta_activation(const Tensor& beta, bool allow_neg_eigval) {
  const int64_t code = Activation::kSigmoid | dtype_code(beta) << Activation::kBeta;
  return allow_neg_eigval ? code | Activation::kTwice : code;
}

// The activations inside the kernels; 0: none. g is the forward's.
inline int64_t activations_of(const Call& call, const Tensor& g) {
  return (call.use_gate ? gate_activation(g, *call.A_log, call.dt_bias) : 0) |
         (call.use_beta_sigmoid ? beta_activation(call.beta, call.allow_neg_eigval) : 0);
}

inline kernels::Sequences sequences_of(const Call& call) {
  return {.offsets = index_table(call.cu_seqlens), .uniform_length = call.T};
}

// The kernel reads `g` and applies `activations` to it.
inline kernels::Gates gates_of(const Call& call, const Tensor& g, int64_t activations) {
  return {.g = g.const_data_ptr(),
          .beta = call.beta.const_data_ptr(),
          .A_log = data(call.A_log),
          .dt_bias = data(call.dt_bias),
          .activations = activations};
}

}  // namespace flash_qla
