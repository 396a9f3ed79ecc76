#include "tensors.h"

#include <cuda_runtime.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <iomanip>
#include <sstream>
#include <string>

#include "checks.h"

// The text of the last exception in PyTorch's C functions, which themselves return a code; since PyTorch 2.13.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

// The function behind TORCH_CHECK, which libc10 exports. It is not part of the stable ABI, so it may be missing one
// day.
namespace c10::detail {
[[noreturn]] __attribute__((weak, visibility("default"))) void torchCheckFail(const char* function, const char* file,
                                                                              uint32_t line, const char* text);
}

namespace flash_qla {

namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kOutOfMemory = "CUDA out of memory. ";

// 20.00 MiB
std::string size_string(double bytes) {
  const char* const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 4; ++unit) {
    bytes /= 1024;
  }
  std::ostringstream text;
  text << std::fixed << std::setprecision(unit == 0 ? 0 : 2) << bytes << ' ' << units[unit];
  return text.str();
}

struct GpuMemory {
  size_t free = 0, total = 0;
  cudaError_t status;  // may be the error of an earlier kernel

  // Calls only the CUDA runtime, because PyTorch's functions throw after a CUDA error.
  explicit GpuMemory(int device) {
    int current = 0;
    status = cudaGetDevice(&current);
    if (status == cudaSuccess) status = cudaSetDevice(device);
    if (status == cudaSuccess) status = cudaMemGetInfo(&free, &total);
    cudaSetDevice(current);
    cudaGetLastError();  // clears the error, which the caller reports
  }
};

// The reason why a call of PyTorch failed; empty if neither PyTorch (before 2.13) nor CUDA tells it.
std::string reason_of_pytorch(const Tensor& on) {
  if (torch_exception_get_what_without_backtrace != nullptr) {
    return torch_exception_get_what_without_backtrace();
  }
  const cudaError_t status = on.is_cuda() ? GpuMemory(on.get_device_index()).status : cudaSuccess;
  return status == cudaSuccess ? "" : std::string("CUDA error: ") + cudaGetErrorString(status);
}

// The text for an allocation that failed. The sizes were checked, so a GPU without an error lacks memory.
std::string out_of_memory(const Tensor& like, double bytes) {
  const std::string asked = "Tried to allocate " + size_string(bytes) + ".";
  if (!like.is_cuda()) {
    return "CPU out of memory. " + asked;
  }
  const GpuMemory memory(like.get_device_index());
  return kOutOfMemory + asked + " GPU " + std::to_string(like.get_device_index()) + " has a total capacity of " +
         size_string(static_cast<double>(memory.total)) + " of which " + size_string(static_cast<double>(memory.free)) +
         " is free.";
}

double element_bytes(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return 1;
    case ScalarType::BFloat16:
    case ScalarType::Half:
      return 2;
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    default:  // float, int
      return 4;
  }
}

[[noreturn]] void fail_to_allocate(const char* op, const Tensor& like, IntHeaderOnlyArrayRef shape, ScalarType dtype) {
  double bytes = element_bytes(dtype);
  for (const int64_t size : shape) {
    bytes *= static_cast<double>(size);
  }
  std::string reason = like.is_cuda() ? reason_of_pytorch(like) : "";  // a CPU's reason quotes a file and a line
  if (reason.empty()) {
    reason = out_of_memory(like, bytes);
  }
  if (like.is_cuda() && reason.find("out of memory") != std::string::npos && !reason.starts_with(kOutOfMemory)) {
    reason = kOutOfMemory + reason;  // PyTorch's other allocators have other texts
  }
  throw std::runtime_error(reason + " (" + op + ", " + dtype_string(dtype) + " " + shape_string(shape) + ")");
}

void replace_by_copy(const char* op, Tensor& tensor, ScalarType dtype) {
  Tensor replacement = new_empty(op, tensor, tensor.sizes(), dtype);
  copy(replacement, tensor);
  tensor = std::move(replacement);
}

bool is_contiguous_as(const Tensor& tensor, ScalarType dtype) {
  return has_dtype(tensor, dtype) && tensor.is_contiguous();
}

}  // namespace

Tensor undefined_tensor() {
  static const Tensor& none = *new Tensor;
  return none;
}

// Calls the C function of older headers' torch::stable::new_empty. Today's new_empty boxes its arguments and looks the
// operator up by name, which takes three times as long.
Tensor new_empty(const char* op, const Tensor& like, IntHeaderOnlyArrayRef shape, ScalarType dtype) {
  int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle;
  const AOTITorchError status = aoti_torch_aten_new_empty(like.get(), shape.data(), static_cast<int64_t>(shape.size()),
                                                          &code, /*layout=*/nullptr, /*device=*/nullptr,
                                                          /*device_index=*/0, /*pin_memory=*/nullptr, &handle);
  if (status != TORCH_SUCCESS) [[unlikely]] {
    fail_to_allocate(op, like, shape, dtype);
  }
  return Tensor(handle);
}

void throw_by_pytorch(const std::string& text) {
  if (c10::detail::torchCheckFail != nullptr) {
    c10::detail::torchCheckFail("flash_qla", "", 0, text.c_str());
  }
  throw std::runtime_error(text);
}

std::string out_of_host_memory(const char* op) {
  return std::string("CPU out of memory. The op's own buffers do not fit. (") + op + ")";
}

void fail_for_memory(const char* op) { throw std::runtime_error(out_of_host_memory(op)); }

void fail_in_pytorch(const Tensor& on, const char* call) {
  const std::string reason = reason_of_pytorch(on);
  throw std::runtime_error(reason.empty() ? call : reason);
}

void zero(Tensor& tensor) {
  with_reason(tensor, [&] { torch::stable::zero_(tensor); });
}

void fill(Tensor tensor, double value) {
  with_reason(tensor, [&] { torch::stable::fill_(tensor, value); });
}

void copy(Tensor& to, const Tensor& from) {
  with_reason(to, [&] { STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(to.get(), from.get(), /*non_blocking=*/0)); });
}

Tensor to_cpu(const Tensor& tensor) {
  return with_reason(tensor, [&] { return torch::stable::to(tensor, torch::stable::Device("cpu")); });
}

bool is_aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

void make_contiguous(const char* op, Tensor& tensor, ScalarType dtype) {
  if (!is_contiguous_as(tensor, dtype)) {
    replace_by_copy(op, tensor, dtype);
  }
}

void make_aligned(const char* op, Tensor& tensor, ScalarType dtype) {
  if (!is_contiguous_as(tensor, dtype) || !is_aligned(tensor)) {
    replace_by_copy(op, tensor, dtype);
  }
}

Tensor view(const Tensor& tensor, IntHeaderOnlyArrayRef shape, IntHeaderOnlyArrayRef strides, int64_t offset) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(shape.size()),
                                                               shape.data(), strides.data(), offset, &handle));
  return Tensor(handle);
}

}  // namespace flash_qla
