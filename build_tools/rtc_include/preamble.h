// NVRTC includes this file before each kernel's source. It replaces the host's headers, which NVRTC lacks, and includes
// TileLang's templates, so that they are compiled once for all kernels.
#pragma once

#include <cuda_device_runtime_api.h>
#if __CUDA_ARCH__ < 900
// There is no programmatic dependent launch: a kernel begins when its predecessor has ended.
#define cudaGridDependencySynchronize() static_cast<void>(0)
#define cudaTriggerProgrammaticLaunchCompletion() static_cast<void>(0)
#endif
#include <tl_templates/cuda/nvrtc_std.h>
// This header comes before CUB, whose macros have the names of its enumerators.
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
