// Included before each kernel's source by NVRTC, which has no headers of the host: what they would have brought.
#pragma once

#include <cuda_device_runtime_api.h>
#include <tl_templates/cuda/nvrtc_std.h>
// Before CUB, which defines as macros what this one has as enumerators.
#include <cutlass/floating_point_nvrtc.h>
