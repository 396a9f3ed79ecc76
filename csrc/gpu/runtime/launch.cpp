#include "gpu/runtime/launch.h"

#include <cudaTypedefs.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>

#include "gpu/runtime/device.h"
#include "gpu/runtime/driver_floor.h"
#include "gpu/runtime/lzma.h"

namespace flash_qla::runtime {
namespace {

template <typename Extents>
std::string join(const Extents& extents) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < std::size(extents); ++i) text << (i ? ", " : "") << extents[i];
  text << "]";
  return text.str();
}

[[noreturn]] void fail(const LaunchConfig& config, const std::string& reason) {
  std::ostringstream text;
  text << "flash_qla: kernel " << config.kernel.name << ": " << reason << " (grid " << join(config.grid) << ", block "
       << join(config.block) << ", " << config.shared_bytes << " bytes of dynamic shared memory)";
  throw std::runtime_error(text.str());
}

// Whether the driver refuses the code. Drivers may load it lazily, so any call about a kernel may return this.
bool is_refusal(cudaError_t status) {
  return status == cudaErrorInvalidKernelImage || status == cudaErrorNoKernelImageForDevice ||
         status == cudaErrorInvalidPtx || status == cudaErrorUnsupportedPtxVersion || status == cudaErrorInvalidSource;
}

void check(const LaunchConfig& config, cudaError_t status, const char* action) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which is reported here
  fail(config, std::string(action) + " failed: " + cudaGetErrorString(status) +
                   (is_refusal(status) ? "; " + refusal(driver_cuda_version()) : ""));
}

int current_device() {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("flash_qla: no current CUDA device: ") + cudaGetErrorString(status));
  }
  return device;
}

void check_grid(const LaunchConfig& config) {
  constexpr std::array<int64_t, 3> kMaxGrid = {std::numeric_limits<int32_t>::max(), 65535, 65535};
  for (int axis = 0; axis < 3; ++axis) {
    if (config.grid[axis] < 0 || config.grid[axis] > kMaxGrid[axis]) {
      fail(config, std::string("grid dimension ") + "xyz"[axis] + " is " + std::to_string(config.grid[axis]) +
                       ", the limit is " + std::to_string(kMaxGrid[axis]));
    }
  }
}

// A function of the driver, in its version of the driver floor. The runtime finds it, so the library links no libcuda
// and loads without a driver.
template <typename Function>
Function driver_function(const char* name) {
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult driver_status;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &symbol, kDriverFloor, cudaEnableDefault, &driver_status);
  if (status != cudaSuccess) {  // may be the error of an earlier kernel
    throw std::runtime_error(std::string("flash_qla: CUDA error: ") + cudaGetErrorString(status));
  }
  if (driver_status != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(std::string("flash_qla: the CUDA driver does not offer ") + name + " (driver " +
                             kDriverFloorName + " or newer)");
  }
  return reinterpret_cast<Function>(symbol);
}

// Allows memory allocations while a thread captures a graph. Loading code may allocate, and is not part of the graph.
class AllowInCapture {
 public:
  AllowInCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowInCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The driver's error numbers are those of the runtime.
cudaError_t error_of(CUresult status) { return static_cast<cudaError_t>(status); }

Code& code_for(const LaunchConfig& config, const Gpu& gpu) {
  for (Code& code : config.kernel.codes) {
    if (runs_on(code.architecture, gpu.major, gpu.minor)) {
      return code;
    }
  }
  fail(config, "it was not compiled for a GPU of compute capability " + std::to_string(gpu.major) + "." +
                   std::to_string(gpu.minor));
}

// The archive's code from an offset on. The caller has the lock of load.
const char* unpacked(const LaunchConfig& config, const Code& code) {
  Archive& archive = code.archive;
  if (archive.contents.empty()) {
    try {
      archive.contents = unpack_lzma({archive.packed, archive.packed_bytes}, archive.bytes);
    } catch (const std::runtime_error& error) {
      fail(config, error.what());
    }
  }
  return archive.contents.data() + code.offset;
}

// The code's function, loaded once. It belongs to no device; the driver loads it on each device that launches it.
const void* load(const LaunchConfig& config, Code& code) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  if (code.function.load(std::memory_order_relaxed) == nullptr) {
    static const auto load_data = driver_function<PFN_cuLibraryLoadData_v12000>("cuLibraryLoadData");
    static const auto get_kernel = driver_function<PFN_cuLibraryGetKernel_v12000>("cuLibraryGetKernel");
    CUlibrary library;
    CUkernel function;
    check(config, error_of(load_data(&library, unpacked(config, code), nullptr, nullptr, 0, nullptr, nullptr, 0)),
          "loading the code");
    check(config, error_of(get_kernel(&function, library, config.kernel.name)), "finding the function");
    code.function.store(function, std::memory_order_release);
  }
  return code.function.load(std::memory_order_relaxed);
}

// The code's function, with its dynamic shared memory allowed on the device. Function attributes belong to a device.
// Two threads may set one twice, which is harmless.
const void* prepare(const LaunchConfig& config, Code& code, int device) {
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (code.prepared.load(std::memory_order_acquire) & bit) return code.function.load(std::memory_order_relaxed);
  const AllowInCapture allow;
  const void* function = load(config, code);
  check(config, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes),
        "reserving dynamic shared memory");
  code.prepared.fetch_or(bit, std::memory_order_release);
  return function;
}

CUtensorMap encode(const TensorMap& map) {
  std::array<cuuint64_t, TensorMap::kMaxRank> sizes, strides;
  std::copy(map.sizes.begin(), map.sizes.end(), sizes.begin());
  std::copy(map.strides.begin(), map.strides.end(), strides.begin());
  static const auto encode_tiled = driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled");
  CUtensorMap encoded;
  const CUresult status = encode_tiled(&encoded, map.dtype, map.rank, const_cast<void*>(map.address), sizes.data(),
                                       strides.data() + 1, map.box.data(), map.element_strides.data(), map.interleave,
                                       map.swizzle, map.l2_promotion, map.oob_fill);
  if (status == CUDA_ERROR_INVALID_VALUE) {
    std::ostringstream text;
    text << "flash_qla: kernel " << map.kernel << ": cannot describe tensor " << map.tensor
         << " to the TMA unit (address " << map.address << ", sizes " << join(std::span(map.sizes).first(map.rank))
         << ", strides in bytes " << join(std::span(map.strides).first(map.rank)) << ", box "
         << join(std::span(map.box).first(map.rank)) << ")";
    throw std::runtime_error(text.str());
  }
  if (status != CUDA_SUCCESS) {  // may be the error of an earlier kernel
    throw std::runtime_error(std::string("flash_qla: CUDA error: ") + cudaGetErrorString(error_of(status)));
  }
  return encoded;
}

// Descriptors that a thread keeps. A descriptor depends on its arguments alone, and calls of one shape often get the
// same memory again.
class KeptTensorMaps {
 public:
  CUtensorMap of(const TensorMap& map) {
    Entry& entry = entries_[hash(map)];
    if (std::memcmp(&entry.map, &map, sizeof map) != 0) {
      entry.encoded = encode(map);  // may throw
      entry.map = map;
    }
    return entry.encoded;
  }

 private:
  struct Entry {
    TensorMap map{};
    CUtensorMap encoded{};
  };
  static constexpr int kHashBits = 7;
  static constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;  // a part of 2^64

  // Different for the tensors of a call, most of the time.
  static size_t hash(const TensorMap& map) {
    uint64_t mixed = 0;
    for (const void* const part :
         {map.address, static_cast<const void*>(map.kernel), static_cast<const void*>(map.tensor)}) {
      mixed = (mixed ^ reinterpret_cast<uintptr_t>(part)) * kGoldenRatio;
    }
    return mixed >> (64 - kHashBits);
  }

  std::array<Entry, size_t{1} << kHashBits> entries_;
};

}  // namespace

void launch(const LaunchConfig& config, void** arguments, cudaStream_t stream) {
  check_grid(config);
  const int device = current_device();
  Code& code = code_for(config, gpu_at(device));
  const void* function = prepare(config, code, device);

  std::array<cudaLaunchAttribute, 2> attributes;
  unsigned count = 0;
  if (code.overlaps_predecessor) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.is_cluster) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {.x = static_cast<unsigned>(config.grid[0]), .y = 1, .z = 1};
  }

  cudaLaunchConfig_t launch_config = {};
  launch_config.gridDim = dim3(config.grid[0], config.grid[1], config.grid[2]);
  launch_config.blockDim = dim3(config.block[0], config.block[1], config.block[2]);
  launch_config.dynamicSmemBytes = config.shared_bytes;
  launch_config.stream = stream;
  launch_config.attrs = attributes.data();
  launch_config.numAttrs = count;
  check(config, cudaLaunchKernelExC(&launch_config, function, arguments), "launch");
}

CUtensorMap encode_tensor_map(const TensorMap& map) {
  if (map.address == nullptr) {  // the call has no such tensor, and the kernel does not touch it
    return {};
  }
  thread_local KeptTensorMaps kept;
  return kept.of(map);
}

int32_t to_int32(const char* kernel, const char* argument, int64_t value) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    throw std::runtime_error(std::string("flash_qla: kernel ") + kernel + ": " + argument + " is " +
                             std::to_string(value) + ", which does not fit in 32 bits");
  }
  return static_cast<int32_t>(value);
}

}  // namespace flash_qla::runtime
