// Products of tiles in shared memory by a warpgroup's WGMMA, in flight while the caller goes on.
#pragma once

#include "core/warp.cuh"

namespace flash_qla::device {

// The WGMMA descriptor of 64 rows of 64 16-bit elements, K-major under the 128-byte swizzle.
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile) {
  return uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

// Begins x = a b^T of two tiles of 64 x 128, by one warpgroup, as one group of WGMMAs.
template <typename T>
__device__ __forceinline__ void begin_product(float (&x)[32], const void* a, const void* b) {
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint64_t step = s / 4 * (kChunk * 128 / 16) + s % 4 * 2;  // units of 16 bytes
    begin_wgmma<T>(x, tile_descriptor(a) + step, tile_descriptor(b) + step, s > 0);
  }
  commit_wgmma();
}

// Waits until x is complete; kInFlight later groups may still be in flight.
template <int kInFlight>
__device__ __forceinline__ void end_product(float (&x)[32]) {
  wait_wgmma<kInFlight>();
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    pin_here(x[i]);
  }
}

}  // namespace flash_qla::device
