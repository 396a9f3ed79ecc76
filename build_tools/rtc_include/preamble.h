// Included before each kernel's source by NVRTC, which has no headers of the host: what they would have brought, and of
// TileLang's templates what kernels have, so that it is read once.
#pragma once

#include <cuda_device_runtime_api.h>
#include <tl_templates/cuda/nvrtc_std.h>
// Before CUB, which defines as macros what this one has as enumerators.
#include <cutlass/floating_point_nvrtc.h>

#include <tl_templates/cuda/barrier.h>
#include <tl_templates/cuda/copy_sm90.h>
#include <tl_templates/cuda/debug.h>
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>
#include <tl_templates/cuda/ldsm.h>
#include <tl_templates/cuda/reduce.h>
#include <tl_templates/cuda/scan.h>
#include <tl_templates/cuda/threadblock_swizzle.h>
