// What launches of kernels take of a call.
#pragma once

#include <cuda_runtime.h>

#include <optional>

#include "call.h"

namespace flash_qla {

// The current stream of the device of the call's tensors.
cudaStream_t current_stream(const Call& call);

// The call's dtype, as kernel instances have it.
inline const char* dtype_name(const Call& call) { return call.dtype == ScalarType::BFloat16 ? "bfloat16" : "float16"; }

inline const void* data(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
inline void* data_if(bool wanted, const Tensor& tensor) { return wanted ? tensor.mutable_data_ptr() : nullptr; }

}  // namespace flash_qla
