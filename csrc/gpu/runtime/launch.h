// The base of the generated launchers: code of kernels, launch configurations and TMA descriptors. Every failure throws
// std::runtime_error with the kernel's name.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace flash_qla::runtime {

// The code of a kernel's instances for one architecture, unpacked by the first launch of one. build_tools/archive.py
// writes it.
struct Archive {
  const unsigned char* packed;  // a file of the format .lzma
  size_t packed_bytes;
  size_t bytes;  // unpacked
  std::vector<char> contents = {};
};

// An instance's code for one architecture, loaded by its first launch. There is one static object for each.
struct Code {
  const char* architecture;  // see runs_on of device.h
  Archive& archive;
  size_t offset;              // of a cubin, which is an ELF file, or of PTX, which ends with a zero
  bool overlaps_predecessor;  // programmatic dependent launch: the code itself waits for its predecessor
  std::atomic<const void*> function = nullptr;
  std::atomic<uint64_t> prepared = 0;  // bit i: device i allows its dynamic shared memory
};

struct Kernel {
  const char* name;       // the function's name in the code and in messages
  std::span<Code> codes;  // a GPU takes the first that it runs
};

struct LaunchConfig {
  Kernel& kernel;
  std::array<int64_t, 3> grid;
  std::array<int, 3> block;
  int shared_bytes;  // dynamic
  // The CTAs along x are a cluster: at most 8, a power of two.
  bool is_cluster = false;

  bool is_empty() const { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
};

// Launches the code for the current device. `arguments`: pointers to the kernel's arguments.
void launch(const LaunchConfig& config, void** arguments, cudaStream_t stream);

// The arguments of cuTensorMapEncodeTiled, innermost dimension first.
struct TensorMap {
  static constexpr int kMaxRank = 5;

  const char* kernel;  // names for messages
  const char* tensor;
  const void* address;
  std::array<int64_t, kMaxRank> sizes;    // elements
  std::array<int64_t, kMaxRank> strides;  // bytes; the innermost is one element
  std::array<cuuint32_t, kMaxRank> box;   // elements
  std::array<cuuint32_t, kMaxRank> element_strides;
  int rank;
  CUtensorMapDataType dtype;
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
  CUtensorMapFloatOOBfill oob_fill;
};
static_assert(std::has_unique_object_representations_v<TensorMap>);  // they are compared as bytes

// The descriptor of a tensor, all zeros without an address. A thread keeps the descriptors that it made last.
CUtensorMap encode_tensor_map(const TensorMap& map);

// The value of an argument that the device code takes in 32 bits. Throws if it does not fit.
int32_t to_int32(const char* kernel, const char* argument, int64_t value);

}  // namespace flash_qla::runtime
