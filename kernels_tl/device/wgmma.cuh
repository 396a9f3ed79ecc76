// Products of tiles in shared memory by a warpgroup's WGMMA, in flight while the caller goes on.
#pragma once

#include <type_traits>

#include "device/warp.cuh"

namespace flash_qla::device {

// The WGMMA descriptor of 64 rows of 64 16-bit elements, K-major under the 128-byte swizzle.
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile) {
  return uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

// x = a b^T, or x += a b^T, 64 x 64 x 16, both from shared memory, in flight.
template <typename T>
__device__ __forceinline__ void begin_wgmma(float (&x)[32], uint64_t a, uint64_t b, int accumulate) {
#define FLASH_QLA_WGMMA(type)                                                                                       \
  asm volatile(                                                                                                     \
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"                                                            \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                   \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "      \
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;\n\t}"                            \
      : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]), "+f"(x[8]), \
        "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]), "+f"(x[16]),      \
        "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]), "+f"(x[24]),     \
        "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31])                   \
      : "l"(a), "l"(b), "r"(accumulate))
  if constexpr (std::is_same_v<T, __half>) {
    FLASH_QLA_WGMMA("f16");
  } else {
    FLASH_QLA_WGMMA("bf16");
  }
#undef FLASH_QLA_WGMMA
}

// By one warpgroup: x = a b^T of tiles of 64 x 128, in flight, as a group of its own.
template <typename T>
__device__ __forceinline__ void begin_product(float (&x)[32], const void* a, const void* b) {
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint64_t step = s / 4 * (kChunk * 128 / 16) + s % 4 * 2;  // in units of 16 bytes
    begin_wgmma<T>(x, tile_descriptor(a) + step, tile_descriptor(b) + step, s > 0);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until x is there, while kInFlight later groups may still be in flight.
template <int kInFlight>
__device__ __forceinline__ void end_product(float (&x)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    asm volatile("" : "+f"(x[i])::"memory");
  }
}

}  // namespace flash_qla::device
