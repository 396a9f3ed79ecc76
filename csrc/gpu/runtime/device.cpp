#include "gpu/runtime/device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <sstream>
#include <stdexcept>

#include "checks.h"
#include "chunks.h"
#include "gpu/head_dims.h"
#include "gpu/runtime/driver_floor.h"
#include "gpu/runtime/registry.h"
#include "layout.h"

namespace flash_qla {

namespace {

std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void check_head_dims(const Tokens& call) {
  check(is_key_dim(call.K), call.op, "q has head dimension K = ", call.K, ", expected a multiple of ", kHeadDimStep,
        " up to ", kMostKeyDim, " on a GPU");
  check(is_value_dim(call.V), call.op, "v has head dimension V = ", call.V, ", expected a multiple of ", kHeadDimStep,
        " up to ", kMostValueDim, " on a GPU");
}

// Throws the error of a CUDA call, which may come from an earlier kernel.
void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(status));
  }
}

// vGPUs may report zero clocks; assume an H100.
Card card_of(const cudaDeviceProp& properties) {
  const double bytes_a_cycle = 2 * properties.memoryBusWidth / 8.0;
  const int sm_mhz = properties.clockRate / 1000;
  const int memory_gb_s = static_cast<int>(properties.memoryClockRate * bytes_a_cycle / 1e6);
  return {properties.multiProcessorCount, sm_mhz > 0 ? sm_mhz : kH100.sm_mhz,
          memory_gb_s > 0 ? memory_gb_s : kH100.memory_gb_s};
}

std::vector<Gpu> find_gpus() {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count));
  std::vector<Gpu> gpus(count);
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, i));
    gpus[i] = {properties.name, properties.major, properties.minor, card_of(properties)};
  }
  return gpus;
}

}  // namespace

int driver_cuda_version() {
  static const int version = [] {
    int supported = 0;
    return cudaDriverGetVersion(&supported) == cudaSuccess ? supported : 0;
  }();
  return version;
}

std::vector<Gpu> gpus() {
  try {
    return find_gpus();
  } catch (const std::runtime_error&) {
    cudaGetLastError();  // no GPU, or a driver older than this library; clear the error for the next CUDA call
    return {};
  }
}

const Gpu& gpu_at(int64_t index) {
  static const std::vector<Gpu> all = find_gpus();
  return all.at(index);
}

const Gpu& gpu_of(const Tensor& tensor) { return gpu_at(tensor.get_device_index()); }

std::string obstacle(int driver_cuda_version, int major, int minor) {
  const bool driver_is_old = driver_cuda_version < kDriverFloor;
  // First, because every call on a GPU asks.
  if (!driver_is_old && std::ranges::any_of(kernel_registry(), [=](const KernelInfo& kernel) {
        return runs_on(kernel.architecture, major, minor);
      })) {
    return {};
  }
  std::ostringstream text;
  if (driver_is_old) {
    text << "the kernels were compiled with CUDA " << cuda_version(CUDART_VERSION) << " and need NVIDIA driver "
         << kDriverFloorName << " or newer, but ";
    if (driver_cuda_version == 0) {
      text << "no driver was found";
    } else {
      text << "the driver supports CUDA up to " << cuda_version(driver_cuda_version);
    }
  } else {
    text << "the kernels need a GPU of compute capability 8.0 or newer (from Ampere on), but this one has " << major
         << "." << minor;
  }
  return text.str();
}

std::string refusal(int driver_cuda_version) {
  const std::string toolkit = "CUDA " + cuda_version(CUDART_VERSION);
  const std::string versions = "the kernels were compiled with " + toolkit + ", and the driver supports CUDA up to " +
                               cuda_version(driver_cuda_version);
  if (driver_cuda_version >= CUDART_VERSION) {
    return versions + ", which is enough: libflash_qla.so may be damaged, so install the package again";
  }
  return versions + ": install NVIDIA driver " + kDriverOfToolkitName + " (" + toolkit +
         ") or a newer one, or NVIDIA's compatibility package for " + toolkit;
}

void check_gpu(const char* op, const Tensor& tensor) {
  const int driver = driver_cuda_version();
  // An old driver fails at every question except its version, with a worse message.
  if (driver < kDriverFloor) {
    fail(op, obstacle(driver, 0, 0), "; CPU tensors work without it");
  }
  const Gpu& gpu = gpu_of(tensor);
  const std::string reason = obstacle(driver, gpu.major, gpu.minor);
  check(reason.empty(), op, reason, "; CPU tensors work without it");
}

void check_gpu(const char* op, const Tensor& tensor, std::span<const char* const> architectures) {
  check_gpu(op, tensor);
  const Gpu& gpu = gpu_of(tensor);
  if (std::ranges::none_of(architectures, [&](const char* name) { return runs_on(name, gpu.major, gpu.minor); })) {
    std::ostringstream text;
    for (const char* const name : architectures) {
      text << (name == architectures.front() ? "" : ", ") << name;
    }
    fail(op, "its kernels were compiled for ", text.str(), ", but this GPU has compute capability ", gpu.major, ".",
         gpu.minor, "; CPU tensors work without it");
  }
}

void check_supported_on_gpu(const Tokens& call, const Tensor& q) {
  check(call.dtype == ScalarType::BFloat16 || call.dtype == ScalarType::Half, call.op, "q has dtype ",
        dtype_string(call.dtype), ", expected bfloat16 or float16 on a GPU (float32 and float64 run on the CPU)");
  check_head_dims(call);
  check(call.H_v <= 65535, call.op, "v has ", call.H_v, " heads, expected at most 65535 on a GPU");
  check(most_padded_tokens(call.T, call.N + 1) <= INT32_MAX, call.op, "q has ", call.T, " tokens in ", call.N,
        " sequences, expected at most ", INT32_MAX, " when each is padded to whole chunks of ", kChunk);
  check_gpu(call.op, q);
}

}  // namespace flash_qla
