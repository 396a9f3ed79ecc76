// The oldest NVIDIA driver that runs the kernels. It is decided here alone: errors, `python -m flash_qla` and the
// launches read it, and tests/test_documents.py compares the documents with it.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_qla {

// CUDA 12.0, as 1000 * major + 10 * minor (cudaDriverGetVersion). The compiler decides it: a driver runs the code of
// every toolkit of its own major version or an older one. The launches use no newer function of the driver.
inline constexpr int kDriverFloor = 12000;
static_assert(CUDART_VERSION / 1000 * 1000 == kDriverFloor);

// NVIDIA's number of the first driver of CUDA 12.0.
inline constexpr const char* kDriverFloorName = "525";

// NVIDIA's number of the first driver of the toolkit that compiles the kernels, CUDA 12.9.
inline constexpr const char* kDriverOfToolkitName = "575";
static_assert(CUDART_VERSION == 12090);

}  // namespace flash_qla
