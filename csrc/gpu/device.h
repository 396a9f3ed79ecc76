// Which GPUs and driver there are, and whether the kernels run on them.
#pragma once

#include <string>
#include <vector>

#include "call.h"
#include "gpu/card.h"

namespace flash_qla {

struct Gpu {
  std::string name;
  int major, minor;  // compute capability
  Card card;
};

// The CUDA version that the driver supports, as 1000 * major + 10 * minor; 0 without a driver.
int driver_cuda_version();

// None where there is no GPU or no driver, or CUDA is out of order.
std::vector<Gpu> gpus();

// The GPU of a tensor, asked for once a process. Throws what CUDA says where it is out of order.
const Gpu& gpu_of(const Tensor& tensor);

// Why the kernels do not run under this driver on a GPU of this compute capability: what they need and what was found.
// Empty if they do.
std::string obstacle(int driver_cuda_version, int major, int minor);

// What only a GPU cannot do: dtypes, head dims, sizes, architecture. Throws, naming the argument.
void check_supported_on_gpu(const Tokens& call, const Tensor& q);

}  // namespace flash_qla
