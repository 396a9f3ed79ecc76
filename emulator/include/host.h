// Included before the library's sources: code for GPU tensors then takes CPU tensors.
#pragma once

#include "torch.h"

namespace torch::stable::accelerator {
struct NoGuard {
  explicit NoGuard(int) {}
};
}  // namespace torch::stable::accelerator
#define DeviceGuard NoGuard
#define is_cuda is_cpu
#define get_device_index() is_cpu() - 1
