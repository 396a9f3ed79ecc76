// All inline assembly: instructions that CUDA C++ lacks, and statements that keep the compiler from moving values.
// The emulator has a header of the same name with the same functions.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/float8.cuh"

namespace flash_qla::device {

// Instructions to the compiler.

// Makes values opaque: the compiler computes everything that depends on them after this point.
__device__ __forceinline__ void make_opaque(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void make_opaque(int& x, int& y, int& z, int& w) {
  asm volatile("" : "+r"(x), "+r"(y), "+r"(z), "+r"(w));
}

// A copy in a register of its own, which the compiler cannot compute again.
__device__ __forceinline__ int kept(int x) {
  int y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Forces x into its register at this point. Memory accesses do not move across it.
__device__ __forceinline__ void pin_here(float& x) { asm volatile("" : "+f"(x)::"memory"); }

// Makes the compiler load values from memory again.
__device__ __forceinline__ void forget_memory() { asm volatile("" ::: "memory"); }

// Threads.

__device__ __forceinline__ void exit_thread() { asm volatile("exit;" ::: "memory"); }
__device__ __forceinline__ void trap() { asm volatile("trap;" ::: "memory"); }

// Waits at named barrier kBarrier for `threads` threads.
template <int kBarrier>
__device__ __forceinline__ void sync_named(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}
// Waits at named barrier `barrier` for the 128 threads of a warpgroup.
__device__ __forceinline__ void sync_warpgroup(int barrier) {
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

// Arithmetic.

// 2^x; relative error 2^-22.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers of 8 bits in the low bytes of a word, `low` in the lowest: e5m2 or e4m3. Both are rounded to nearest. A
// number beyond the format's largest, also an infinity, becomes the largest; NaN stays NaN. unpack_8 returns the pair
// in fp16, which holds every number of both formats.
template <bool kE5M2>
__device__ __forceinline__ uint32_t pack_8(float low, float high) {
#if __CUDA_ARCH__ >= 900
  uint16_t pair;
  if constexpr (kE5M2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return round_to_8<kE5M2>(low) | round_to_8<kE5M2>(high) << 8;
#endif
}
template <bool kE5M2>
__device__ __forceinline__ uint32_t unpack_8(uint32_t pair) {
#if __CUDA_ARCH__ >= 900
  uint32_t halves;
  if constexpr (kE5M2) {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  } else {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  }
  return halves;
#else
  return widen_from_8<kE5M2>(pair & 0xff) | widen_from_8<kE5M2>(pair >> 8 & 0xff) << 16;
#endif
}

// c += a b, 16 x 8 += (16 x 8)(8 x 8), in TF32. With g = lane / 4, t = lane % 4: c holds (g, 2t), (g, 2t + 1), (g + 8,
// 2t), (g + 8, 2t + 1); a holds (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b holds (t, g), (t + 4, g).
__device__ __forceinline__ void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// c += a b, 16 x 8 += (16 x 16)(16 x 8); c as above. a and b are matrices as ldmatrix loads them: a holds rows 0 to 7
// and 8 to 15 of columns 0 to 7, then of columns 8 to 15; b, transposed, holds rows 0 to 7 and 8 to 15.
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

// Begins x = a b^T, or x += a b^T with `accumulate`, 64 x 64 x 16; a and b are descriptors of shared memory.
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
__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kInFlight>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}

// Shared memory.

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads a float. The compiler neither moves this load nor puts its result in a uniform register.
__device__ __forceinline__ float load_shared(const float* from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(shared_address(from)) : "memory");
  return x;
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Lane l holds columns
// 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix, or of its transpose with _transposed.
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
// The transpose of one such matrix: x is the lane's pair, the result is its pair of the transpose.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
  return x;
}
#if __CUDA_ARCH__ >= 900
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
#else  // sm_80 has no stmatrix
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t x[4] = {a, b, c, d};
  const int lane = threadIdx.x & 31;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = __shfl_sync(~0u, address, 8 * i + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(x[i]) : "memory");
  }
  __syncwarp();
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                          uint32_t d) {
  store_matrices(address, transposed(a), transposed(b), transposed(c), transposed(d));
}
#endif

// Copies.

// Copies 16 bytes from global to shared memory or, unless `there`, writes zeros. It skips L1: each byte is read once.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
// The same for 8 bytes, which pass through L1: no other copy of 8 bytes exists.
__device__ __forceinline__ void copy_async(uint2* to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 8 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the last kInFlight groups of this thread's copies are in flight.
template <int kInFlight>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
}

// Prefetches the line of an address into L2.
__device__ __forceinline__ void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Prefetches bytes of global memory into L2.
__device__ __forceinline__ void prefetch_bytes(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#else
  for (int line = 0; line < bytes; line += 128) {
    prefetch_line(static_cast<const char*>(from) + line);
  }
#endif
}

// Announces `bytes` bytes to the barrier, a tl::Barrier.
template <typename Barrier>
__device__ __forceinline__ void expect_bytes(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}
// Copies bytes of global memory to shared memory, `offset` bytes after `to`. Their arrival counts at the barrier.
template <typename Barrier>
__device__ __forceinline__ void copy_bytes(void* to, int offset, const void* from, int bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to) + offset),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

// Stores a box from shared to global memory by TMA; one thread calls it. The box begins at the given coordinates of
// `map`'s tensor, innermost first; parts out of bounds are not stored. Writers of the box pass fence_boxes before the
// call. They may overwrite the box once the calling thread has passed wait_for_boxes.
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
// Adds a box to the tensor; otherwise like store_box. Each sum is rounded to the dtype of the tensor.
__device__ __forceinline__ void add_box(const CUtensorMap& map, const void* box, int x0, int x1, int x2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];\n\t"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(shared_address(box)), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
__device__ __forceinline__ void fence_boxes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_boxes() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Other CTAs.

__device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* to, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
// A barrier of all threads of the cluster. It does not order writes, which would wait for those to global memory.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// A barrier in shared memory that is over when the bytes that it expects have been sent. One thread makes it; the
// others of the cluster see it behind the cluster's barrier.
__device__ __forceinline__ void expect_sent(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
      "fence.mbarrier_init.release.cluster;\n\t"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Sends a float to shared memory of CTA `rank` of the cluster, and its 4 bytes to the barrier there. Both addresses are
// those in this CTA.
__device__ __forceinline__ void send(float* to, float x, uint64_t* barrier, int rank) {
  asm volatile(
      "{\n\t.reg .b32 to, barrier;\n\t"
      "mapa.shared::cluster.u32 to, %0, %3;\n\tmapa.shared::cluster.u32 barrier, %2, %3;\n\t"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %1, [barrier];\n\t}" ::"r"(shared_address(to)),
      "r"(__float_as_uint(x)), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}
__device__ __forceinline__ void wait_for_sent(uint64_t* barrier) {
  asm volatile(
      "{\n\t.reg .pred over;\n\tagain:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%0], 0;\n\t"
      "@!over bra again;\n\t}" ::"r"(shared_address(barrier))
      : "memory");
}
// Orders accesses by instructions with accesses by TMA.
__device__ __forceinline__ void fence_proxies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

}  // namespace flash_qla::device
