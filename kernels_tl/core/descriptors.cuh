// WGMMA descriptors, computed where they are used. The compiler would otherwise compute the descriptors of all fixed
// tiles before the loop over chunks, 64 bits for each step of a product, and run out of registers. The shuffle also
// tells the compiler that all lanes have the same value.
#pragma once

#include <tl_templates/cuda/common.h>

namespace tl {

template <int kLayout, int kLeading, int kStride, typename T>
__device__ __forceinline__ void make_wgmma_descriptor(GmmaDescriptor& descriptor, T* tile) {
  initialize_wgmma_descriptor<kLayout, kLeading, kStride>(descriptor, tile);
  descriptor.reg32_[0] = __shfl_sync(~0u, descriptor.reg32_[0], 0);
}

}  // namespace tl

#define initialize_wgmma_descriptor make_wgmma_descriptor
