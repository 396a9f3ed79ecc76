// What the generated launchers share: kernels' code, launch configuration and TMA descriptors.
// Every failure throws std::runtime_error with the kernel's name.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace flash_qla::runtime {

// Code for a GPU, loaded by its first launch. One object per kernel, which stays for good.
struct Kernel {
  const char* name;   // of the function in the cubin, and for messages
  const char* cubin;  // an ELF file
  std::atomic<const void*> function = nullptr;
  std::atomic<uint64_t> prepared = 0;  // the devices on which it may use its dynamic shared memory, one bit each
};

struct LaunchConfig {
  Kernel& kernel;
  std::array<int64_t, 3> grid;
  std::array<int, 3> block;
  int shared_bytes;  // dynamic
  // Programmatic dependent launch; only for kernels that wait for their predecessor themselves.
  bool overlaps_predecessor = false;

  bool is_empty() const { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
};

// Launches on the current device. `arguments` are pointers to the kernel's arguments.
void launch(const LaunchConfig& config, void** arguments, cudaStream_t stream);

// The arguments of cuTensorMapEncodeTiled, innermost dimension first.
struct TensorMap {
  static constexpr int kMaxRank = 5;

  const char* kernel;  // names for messages
  const char* tensor;
  const void* address;
  int rank;
  std::array<int64_t, kMaxRank> sizes;    // elements
  std::array<int64_t, kMaxRank> strides;  // bytes; the innermost is one element
  std::array<cuuint32_t, kMaxRank> box;   // elements
  std::array<cuuint32_t, kMaxRank> element_strides;
  CUtensorMapDataType dtype;
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
  CUtensorMapFloatOOBfill oob_fill;
};

CUtensorMap encode_tensor_map(const TensorMap& map);

// A kernel argument that the device code takes in 32 bits.
int32_t to_int32(const char* kernel, const char* argument, int64_t value);

}  // namespace flash_qla::runtime
