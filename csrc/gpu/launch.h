// What launches of kernels take of a call.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "call.h"
#include "kernels.h"
#include "layout.h"

namespace flash_qla {

using torch::stable::accelerator::DeviceGuard;

// Makes the tensor's device the current one while the guard lives.
DeviceGuard make_current(const Tensor& tensor);

// The current stream of the tensor's device.
cudaStream_t current_stream(const Tensor& tensor);

// The dtype of a kernel's instance: float32 and the 16-bit dtypes.
inline kernels::Dtype instance_dtype(ScalarType dtype) {
  return dtype == ScalarType::Float      ? kernels::Dtype::kFloat32
         : dtype == ScalarType::BFloat16 ? kernels::Dtype::kBfloat16
                                         : kernels::Dtype::kFloat16;
}

inline const void* data(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
inline void* data_if(bool wanted, const Tensor& tensor) { return wanted ? tensor.mutable_data_ptr() : nullptr; }

inline int64_t dtype_code(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return Dtype::kBfloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::Double:
      return Dtype::kFloat64;
    default:
      return Dtype::kFloat32;
  }
}

// What kernels make of gates and betas, see Activation in layout.py; g is the forward's. 0 where nothing is inside.
inline int64_t activations_of(const Call& call, const Tensor& g) {
  int64_t code = 0;
  if (call.use_gate) {
    code |= Activation::kGate | dtype_code(g) << Activation::kG | dtype_code(*call.A_log) << Activation::kALog;
    if (call.dt_bias) {
      code |= Activation::kBias | dtype_code(*call.dt_bias) << Activation::kDtBias;
    }
  }
  if (call.use_beta_sigmoid) {
    code |= Activation::kSigmoid | dtype_code(call.beta) << Activation::kBeta;
    if (call.allow_neg_eigval) {
      code |= Activation::kTwice;
    }
  }
  return code;
}

inline kernels::Sequences sequences_of(const Call& call) {
  return {.offsets = data(call.cu_seqlens),
          .has_offsets = call.varlen,
          .wide_offsets = call.wide_offsets,
          .uniform_length = call.T,
          .offset_words = (call.N + 1) * (call.wide_offsets ? 2 : 1)};
}

// `g` is what the kernel reads, `activations` what it makes of it.
inline kernels::Gates gates_of(const Call& call, const Tensor& g, int64_t activations) {
  return {.g = g.const_data_ptr(),
          .beta = call.beta.const_data_ptr(),
          .A_log = data(call.A_log),
          .dt_bias = data(call.dt_bias),
          .activations = activations};
}

}  // namespace flash_qla
