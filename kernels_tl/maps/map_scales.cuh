// The scale of S in fp16, whose numbers end at 65504: a power of two for all columns of a CTA. S has two parts in fp16,
// so columns that are up to 2^25 times smaller than the largest keep as many digits as one part has.
#pragma once

#include "core/state_tiles.cuh"

namespace flash_qla::device {

// A CTA whose numbers lie below this needs no scale. The largest numbers that are scaled are below its double.
constexpr float kUnscaledMap = 16384.f;

// The largest finite |x|, but at least kUnscaledMap; with kInfinite an infinity counts too.
template <int kCount, bool kInfinite>
__device__ __forceinline__ float largest_of(const float* x) {
  float largest[4] = {kUnscaledMap, kUnscaledMap, kUnscaledMap, kUnscaledMap};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float size = fabsf(x[i]);
    largest[i % 4] = fmaxf(largest[i % 4], kInfinite || size < 3.4e38f ? size : 0.f);
  }
  return fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
}

// Each warp tells the CTA whether its part of S, kCount registers per thread, needs a scale: a word of `large`. After
// the next barrier any_large returns whether any part does.
template <int kCount>
__device__ __forceinline__ void tell_large(const float* S, void* large) {
  const bool is_large = __any_sync(~0u, largest_of<kCount, true>(S) > kUnscaledMap);
  if (threadIdx.x % 32 == 0) {
    static_cast<uint32_t*>(large)[threadIdx.x / 32] = is_large;
  }
}
template <int kWarps>
__device__ __forceinline__ bool any_large(const void* large) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    any |= static_cast<const uint32_t*>(large)[i];
  }
  return any != 0;
}

// Multiplies S by its scale, and returns the inverse. kWarps warps call it, and meet at the named barrier. `all` has a
// float for each warp.
template <int kCount, int kWarps, int kBarrier>
__device__ __forceinline__ float scale_state(float* S, void* all) {
  float largest = largest_of<kCount, false>(S);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
  }
  if (threadIdx.x % 32 == 0) {
    static_cast<float*>(all)[threadIdx.x / 32] = largest;
  }
  sync_named<kBarrier>(32 * kWarps);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    largest = fmaxf(largest, static_cast<const float*>(all)[warp]);
  }
  const float power = __uint_as_float(__float_as_uint(largest) & 0x7f800000);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    S[i] *= kUnscaledMap / power;
  }
  return power / kUnscaledMap;
}

// fragment += inverse * (the left and the right half of a fragment of twice the columns).
template <int kColumns>
__device__ __forceinline__ void add_scaled_halves(float* fragment, const float* halves, float inverse) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    fragment[i] += inverse * (halves[i] + halves[kColumns / 2 + i]);
  }
}

}  // namespace flash_qla::device
