// The oldest NVIDIA driver that runs the kernels. Decided here alone: errors, `python -m flash_qla` and the launches
// take it from here, and tests/test_documents.py compares what the documents say.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_qla {

// CUDA 12.0, as cudaDriverGetVersion counts: 1000 * major + 10 * minor. The reason is the compiler: a driver runs the
// code of every toolkit of its own major version or of an older one. The launches ask the driver for no function that
// is newer.
inline constexpr int kDriverFloor = 12000;
static_assert(CUDART_VERSION / 1000 * 1000 == kDriverFloor);

// The first driver of CUDA 12.0, as NVIDIA numbers drivers.
inline constexpr const char* kDriverFloorName = "525";

}  // namespace flash_qla
