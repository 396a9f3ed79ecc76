// The GPUs and the driver of this machine, and whether the kernels run on them.
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

// The GPUs; empty without a GPU or a driver, and after a CUDA error.
std::vector<Gpu> gpus();

// The GPU with this index, and the GPU of a tensor. The process asks CUDA once for its GPUs. Throws the error of CUDA,
// if there is one.
const Gpu& gpu_at(int64_t index);
const Gpu& gpu_of(const Tensor& tensor);

// The reason why the kernels do not run under this driver on a GPU of this compute capability: what they need and what
// was found. Empty if they run.
std::string obstacle(int driver_cuda_version, int major, int minor);

// The text if this driver refuses a kernel's code although `obstacle` is empty: what was found, and what to do.
std::string refusal(int driver_cuda_version);

// Throws if the kernels do not run on the tensor's GPU, or not under this driver.
void check_gpu(const char* op, const Tensor& tensor);
// Throws, with the argument's name, if the call runs on a CPU only: dtypes, head dims, sizes, architecture.
void check_supported_on_gpu(const Tokens& call, const Tensor& q);
// The same for the driver and the architecture alone.
void check_gpu(const char* op, const Tensor& tensor);

}  // namespace flash_qla
