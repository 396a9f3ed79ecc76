// The GPUs and the driver of this machine, and whether the kernels run on them.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "call.h"
#include "gpu/card.h"

namespace flash_qla {

struct Gpu {
  std::string name;
  int major, minor;  // compute capability
  Card card;

  bool is_hopper() const { return major == 9 && minor == 0; }
};

// Whether code for an architecture is PTX, which the driver compiles, and not a cubin.
constexpr bool is_ptx(std::string_view architecture) { return architecture.starts_with("compute_"); }

// Whether code for an architecture runs on a GPU of this compute capability. Cubins of sm_XY run on X.Y and on X.Z with
// Z > Y, of sm_XYa on X.Y alone. PTX of compute_XY runs on X.Y and on all that is newer.
constexpr bool runs_on(std::string_view architecture, int major, int minor) {
  const bool is_exact = architecture.back() == 'a';
  int number = 0;
  for (const char digit : architecture.substr(architecture.find('_') + 1)) {
    if (digit != 'a') number = 10 * number + (digit - '0');
  }
  if (is_ptx(architecture)) {
    return number <= 10 * major + minor;
  }
  return number / 10 == major && (is_exact ? number % 10 == minor : number % 10 <= minor);
}
static_assert(runs_on("sm_80", 8, 9) && runs_on("sm_100", 10, 3) && !runs_on("sm_120", 11, 0));
static_assert(runs_on("compute_80", 11, 0) && runs_on("compute_80", 8, 0) && !runs_on("compute_90", 8, 9));
static_assert(runs_on("sm_90a", 9, 0) && !runs_on("sm_90a", 9, 1) && !runs_on("sm_90", 10, 0));

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

// Throws if no kernels run on the tensor's GPU, or not under this driver.
void check_gpu(const char* op, const Tensor& tensor);
// The same, and throws if no code for these architectures runs there: those of the kernels that the op launches.
void check_gpu(const char* op, const Tensor& tensor, std::span<const char* const> architectures);
// Throws, with the argument's name, if the call runs on a CPU only: dtypes, head dims, sizes, architecture.
void check_supported_on_gpu(const Tokens& call, const Tensor& q);

}  // namespace flash_qla
