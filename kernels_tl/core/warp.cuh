// Small device functions: numbers of warps and lanes, early loads, conversions, the swizzle, TF32.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/ptx.cuh"
#include "layout.h"

namespace flash_qla::device {

// The warp's number in its warpgroup. The shuffle tells the compiler that all lanes have the same number, so branches
// on it may stand where WGMMAs are in flight.
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, threadIdx.x >> 5, 0) & 3; }

// The warpgroup's number in its CTA, also from a shuffle.
__device__ __forceinline__ int warpgroup_index() { return __shfl_sync(~0u, threadIdx.x >> 7, 0); }

// The lane, opaque: values that depend on it are computed here, not before the surrounding loops and kept in registers.
__device__ __forceinline__ int lane_here() {
  int lane = threadIdx.x & 31;
  make_opaque(lane);
  return lane;
}

// The sum of a number over kLanes neighbouring lanes, in each of them.
template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) {
    x += __shfl_xor_sync(~0u, x, bit);
  }
  return x;
}

// x, but the compiler must assume that it differs between lanes. If it knew that all lanes load from one address, it
// would move the result to a uniform register, and wait for each load before the next.
__device__ __forceinline__ int as_of_lane(int x) { return x + (threadIdx.x >= blockDim.x); }

// Loads an entry of chunk_plan's tables before the wait for the preceding grid. The entry is complete, because every
// CTA of chunk_matrices waits for chunk_plan before it lets its successor begin. The load reads L2, because L1 may hold
// an entry of an earlier call.
__device__ __forceinline__ int load_early(const void* from) { return __ldcg(static_cast<const int*>(from)); }

// The first of the work tiles first, first + step, ... for which is_chosen(tile), or `work_tiles`. A whole warp calls
// it; lane i tests the i-th of 32.
template <typename IsChosen>
__device__ __forceinline__ int next_where(int first, int step, int work_tiles, IsChosen is_chosen) {
  const int lane = threadIdx.x & 31;
  for (; first < work_tiles; first += 32 * step) {
    const int work = first + lane * step;
    const unsigned matches = __ballot_sync(~0u, work < work_tiles && is_chosen(work));
    if (matches != 0) {
      return first + (__ffs(matches) - 1) * step;
    }
  }
  return work_tiles;
}

// Ends a thread whose CTA has no work. At least one CTA of a grid must still wait for the preceding grid, or the
// successor would not wait for it.
__device__ __forceinline__ void leave() { exit_thread(); }

constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(double x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

__device__ __forceinline__ uint32_t pack(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ float2 unpack(__nv_bfloat16, uint32_t pair) {  // one instruction for each element
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
__device__ __forceinline__ float2 unpack(__half, uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Element e of a pair.
template <typename T>
__device__ __forceinline__ float element(T, uint32_t pair, int e) {
  const float2 both = unpack(T(), pair);
  return e == 0 ? both.x : both.y;
}

// A number of a state of 8 bits, whose format is known at run time: Dtype::kFloat8E4m3fn or kFloat8E5m2.
struct Float8 {
  uint8_t bits;
};
__device__ __forceinline__ bool is_float8(int dtype) { return dtype >= Dtype::kFloat8E4m3fn; }
// pack and unpack for a pair of such numbers. They compute both formats and select one, because code for each format
// would be longer.
__device__ __forceinline__ uint32_t pack_float8(int dtype, float low, float high) {
  return dtype == Dtype::kFloat8E5m2 ? pack_8<true>(low, high) : pack_8<false>(low, high);
}
__device__ __forceinline__ float2 unpack_float8(int dtype, uint32_t pair) {
  return unpack(__half(), dtype == Dtype::kFloat8E5m2 ? unpack_8<true>(pair) : unpack_8<false>(pair));
}

// A number of 16 bits, whose format is known at run time: Dtype::kBfloat16 or kFloat16.
struct Bits16 {
  uint16_t bits;
};
// Returns use(format). The format of Bits16 is a __nv_bfloat16 or a __half, by `dtype`. The format of Float8 is a
// constant: whether it is e5m2. Any other number T is its own format, and `dtype` is not used.
template <typename T, typename Use>
__device__ __forceinline__ auto with_format(int dtype, Use use) {
  if constexpr (std::is_same_v<T, Bits16>) {
    return dtype == Dtype::kBfloat16 ? use(__nv_bfloat16()) : use(__half());
  } else if constexpr (std::is_same_v<T, Float8>) {
    return dtype == Dtype::kFloat8E5m2 ? use(std::true_type()) : use(std::false_type());
  } else {
    return use(T());
  }
}

// to_float and unpack for any 16-bit number.
template <typename T>
__device__ __forceinline__ float to_float(T x, int) {
  return to_float(x);
}
__device__ __forceinline__ float to_float(Bits16 x, int dtype) {
  return with_format<Bits16>(dtype, [=](auto format) { return unpack(format, x.bits).x; });
}
template <typename T>
__device__ __forceinline__ float2 unpack(T, uint32_t pair, int) {
  return unpack(T(), pair);
}
__device__ __forceinline__ float2 unpack(Bits16, uint32_t pair, int dtype) {
  return with_format<Bits16>(dtype, [=](auto format) { return unpack(format, pair); });
}

// Byte offset of 16-byte piece `piece` of row `row` in a tile of 64 x 64 16-bit elements under TMA's 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// x rounded to nearest in the bits that the tensor cores read: they ignore the 13 low ones. (cvt.rna.tf32 is a dozen
// instructions on sm_90.)
__device__ __forceinline__ float round_to_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000); }

// x without the 13 low bits.
__device__ __forceinline__ float truncate_to_tf32(float x) { return __uint_as_float(__float_as_uint(x) & ~0x1fffu); }

}  // namespace flash_qla::device
