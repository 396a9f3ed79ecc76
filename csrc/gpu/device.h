// Which GPUs and driver there are, and whether the kernels run on them. Answers in sentences; nothing here fails where
// there is no GPU or no driver.
#pragma once

#include <string>
#include <vector>

#include "gpu/registry.h"

namespace flash_qla {

struct Gpu {
  std::string name;
  int major, minor;  // compute capability
  int sm_count;
};

// The CUDA version that the driver supports, as 1000 * major + 10 * minor; 0 without a driver.
int driver_cuda_version();

std::vector<Gpu> gpus();

// Why the kernels do not run under this driver on a GPU of this compute capability: what they need and what was found.
// Empty if they do.
std::string obstacle(int driver_cuda_version, int major, int minor);

// Throws unless the kernels run on the current device.
void require_supported_gpu(const char* op);

}  // namespace flash_qla
