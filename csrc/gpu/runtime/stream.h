// The device and the stream of a tensor.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "call.h"

namespace flash_qla {

using torch::stable::accelerator::DeviceGuard;

// Makes the tensor's device the current one while the guard lives.
DeviceGuard make_current(const Tensor& tensor);

// The current stream of the tensor's device.
cudaStream_t current_stream(const Tensor& tensor);

}  // namespace flash_qla
