// The instructions below a tile: warp-wide matrix moves and products, named barriers, conversions.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "layout.h"

namespace flash_qla::device {

// Of the thread's warp in its warpgroup; by a shuffle, so that the compiler knows that it is the same in all lanes:
// branches on it may then be where WGMMAs are in flight.
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, threadIdx.x >> 5, 0) & 3; }

// The lane, as a value that the compiler does not know: what is computed from it is computed there, not kept in
// registers from before the loops around it.
__device__ __forceinline__ int lane_here() {
  int lane = threadIdx.x & 31;
  asm volatile("" : "+r"(lane));
  return lane;
}

// x, as a value that may differ between lanes for all that the compiler knows. What is loaded from one address for all
// lanes it moves to a register of the warp, and waits for it there, before the next load: so several are not on their
// way together.
__device__ __forceinline__ int as_of_lane(int x) { return x + (threadIdx.x >= blockDim.x); }

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// What chunk_plan wrote, before the wait for the grid ahead: it is there, as all of chunk_matrices waits for it before
// it lets its successor begin. From L2, as L1 may hold what was there in an earlier call.
__device__ __forceinline__ int load_early(const void* from) { return __ldcg(static_cast<const int*>(from)); }

// For CTAs that find nothing to do. One of a grid must still wait for the one ahead, or its successor would not.
__device__ __forceinline__ void leave() { asm volatile("exit;" ::: "memory"); }

// 2^x; relative error 2^-22.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

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
__device__ __forceinline__ float2 unpack(__nv_bfloat16, uint32_t pair) {  // by an instruction each
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
__device__ __forceinline__ float2 unpack(__half, uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Of a matrix a lane
// holds row l / 4, columns 2 (l % 4) and the next; with _transposed that is of the transposed matrix.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                          uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Shared to global memory by TMA, by one thread: a box of the tensor behind `map`, from the given coordinates on, the
// innermost one first. What is out of bounds is left out. The box may be overwritten after wait_for_boxes, by the same
// thread; before, its writers have to pass fence_boxes.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* box, int x0, int x1, int x2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n\t"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(shared_address(box)), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* box, int x0, int x1, int x2, int x3,
                                          int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];\n\t"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(shared_address(box)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
// Likewise added to what is there, each sum rounded to the dtype of the tensor.
__device__ __forceinline__ void add_box(const CUtensorMap& map, const void* box, int x0, int x1, int x2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];\n\t"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(shared_address(box)), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
__device__ __forceinline__ void fence_boxes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wait_for_boxes() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Byte offset of 16-byte piece `piece` of row `row` in a tile of 64 x 64 16-bit elements under TMA's 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// Rounded to nearest, in the bits that the tensor cores read; they cut off the 13 low ones. (cvt.rna.tf32 is a dozen
// instructions on sm_90.)
__device__ __forceinline__ float round_to_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000); }

// The bits that the tensor cores read.
__device__ __forceinline__ float truncate_to_tf32(float x) { return __uint_as_float(__float_as_uint(x) & ~0x1fffu); }

// c += a b, 16 x 8 += (16 x 8)(8 x 8), in TF32. With g = lane / 4, t = lane % 4: c holds (g, 2t), (g, 2t + 1), (g + 8,
// 2t), (g + 8, 2t + 1); a holds (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b holds (t, g), (t + 4, g).
__device__ __forceinline__ void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// c += a b, 16 x 8 += (16 x 16)(16 x 8); c as above. As ldmatrix gives them, a holds rows 0 to 7 and 8 to 15 of columns
// 0 to 7, then of 8 to 15; b, transposed, rows 0 to 7 and 8 to 15.
#define FLASH_QLA_MMA(element, type)                                                                        \
  __device__ __forceinline__ void multiply_add(element, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, \
                                               uint32_t b1) {                                               \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                              \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                                               \
        "{%0, %1, %2, %3};"                                                                                 \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                    \
  }
FLASH_QLA_MMA(__nv_bfloat16, "bf16")
FLASH_QLA_MMA(__half, "f16")
#undef FLASH_QLA_MMA

}  // namespace flash_qla::device
