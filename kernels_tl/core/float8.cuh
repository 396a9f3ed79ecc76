// Conversions of 8-bit numbers in plain arithmetic, for architectures without instructions for them, and for the
// emulator. kE5M2: the format e5m2, else e4m3. Every number of both formats is a number of fp16. There are no branches,
// because a kernel has hundreds of conversions: NVRTC takes a third less time.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace flash_qla::device {

// x rounded to nearest, ties to even. A number beyond the format's largest becomes the largest; NaN stays NaN.
template <bool kE5M2>
__device__ __forceinline__ uint32_t round_to_8(float x) {
  constexpr int kDigits = kE5M2 ? 2 : 3, kLeastExponent = kE5M2 ? -14 : -6;  // of the normal numbers
  constexpr float kMost = kE5M2 ? 57344.f : 448.f, kLeast = kE5M2 ? 0x1p-14f : 0x1p-6f;
  constexpr float kStepsBelow = kE5M2 ? 0x1p16f : 0x1p9f;  // 1 / the distance of numbers below kLeast
  constexpr int kDropped = 23 - kDigits;
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
  const float size = fminf(fabsf(x), kMost);
  const uint32_t bits = __float_as_uint(size);
  const uint32_t rounded = bits + (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);
  const uint32_t normal = (rounded >> kDropped) - ((126 + kLeastExponent) << kDigits);
  const uint32_t below = __float_as_uint(size * kStepsBelow + 0x1p23f) & 0xf;  // the sum rounds to an integer
  return x != x ? 0x7f : sign | (size < kLeast ? below : normal);
}

// The bits of an 8-bit number in fp16.
template <bool kE5M2>
__device__ __forceinline__ uint32_t widen_from_8(uint32_t x) {
  if constexpr (kE5M2) {
    return x << 8;
  } else {
    const uint32_t sign = (x & 0x80) << 8, size = x & 0x7f;
    const uint32_t below = __half_as_ushort(__float2half_rn(static_cast<float>(size) * 0x1p-9f));
    return size == 0x7f ? 0x7fff : sign | (size < 8 ? below : (size << 7) + (8 << 10));
  }
}

}  // namespace flash_qla::device
