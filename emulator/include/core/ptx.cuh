// The functions of kernels_tl/core/ptx.cuh on a CPU. Functions that only order accesses are empty, because the emulator
// does everything in order, or report to races.cpp.
#pragma once

#include "emulator.h"
// After the emulator's CUDA C++
#include "core/float8.cuh"

namespace flash_qla::device {

inline void make_opaque(int&) {}
inline void make_opaque(int&, int&, int&, int&) {}
inline int kept(int x) { return x; }
inline void pin_here(float&) {}
inline void forget_memory() {}

inline void exit_thread() { emulator::exit_thread(); }
inline void trap() { emulator::fail("trap"); }

template <int kBarrier>
void sync_named(int threads) {
  emulator::synchronize(emulator::named_barrier(kBarrier), threads);
}
inline void sync_warpgroup(int barrier) { emulator::synchronize(emulator::named_barrier(barrier), 128); }

inline float exp2_fast(float x) { return std::exp2(x); }
template <bool kE5M2>
uint32_t pack_8(float low, float high) {
  return round_to_8<kE5M2>(low) | round_to_8<kE5M2>(high) << 8;
}
template <bool kE5M2>
uint32_t unpack_8(uint32_t pair) {
  return widen_from_8<kE5M2>(pair & 0xff) | widen_from_8<kE5M2>(pair >> 8 & 0xff) << 16;
}
inline void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  emulator::mma_tf32(c, {a0, a1, a2, a3}, {b0, b1});
}
template <typename T>
void multiply_add(T, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::mma_16(c, a, {b0, b1}, std::is_same_v<T, __nv_bfloat16>);
}
template <typename T>
void begin_wgmma(float (&x)[32], uint64_t a, uint64_t b, int accumulate) {
  emulator::wgmma({nullptr, a, b, x, 64, false, false, accumulate != 0, std::is_same_v<T, __nv_bfloat16>});
}
inline void fence_wgmma() {}
inline void commit_wgmma() { tl::warpgroup_commit_batch(); }
template <int kInFlight>
void wait_wgmma() {
  tl::wait_wgmma<kInFlight>();
}

inline uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }
inline float load_shared(const float* from) { return *from; }
inline void load_matrices(uint32_t (&x)[4], uint32_t address) { emulator::load_matrices(x, address, false); }
inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) { emulator::load_matrices(x, address, true); }
inline uint32_t transposed(uint32_t x) {
  const int lane = threadIdx.x & 31, row = lane / 4, from = 8 * (lane & 3) + row / 2, shift = 16 * (row & 1);
  const uint32_t low = __shfl_sync(~0u, x, from), high = __shfl_sync(~0u, x, from + 4);
  return (low >> shift & 0xffff) | (high >> shift) << 16;
}
inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulator::store_matrices(address, {a, b, c, d}, false);
}
inline void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  emulator::store_matrices(address, {a, b, c, d}, true);
}

inline void copy_async(void* to, const void* from, bool there) { emulator::copy_piece(to, from, there, 16); }
inline void copy_async(uint2* to, const void* from, bool there) { emulator::copy_piece(to, from, there, 8); }
inline void commit_copies() { emulator::commit_copies(); }
template <int kInFlight>
void wait_for_copies() {
  emulator::wait_for_copies(kInFlight);
}
inline void prefetch_bytes(const void* from, int bytes) { emulator::check_pieces(from, bytes); }
inline void prefetch_line(const void*) {}

template <typename Barrier>
void expect_bytes(Barrier& barrier, int bytes) {
  emulator::mbarrier(barrier).expect(bytes);
}
template <typename Barrier>
void copy_bytes(void* to, int offset, const void* from, int bytes, Barrier& barrier) {
  emulator::load_bytes(emulator::mbarrier(barrier), static_cast<char*>(to) + offset, from, bytes);
}

inline void begin_box(emulator::Box move, const CUtensorMap& map, const void* box, std::initializer_list<int> from) {
  emulator::move_box(move, map, box, from);
  tl::tma_store_arrive();
}
inline void store_box(const CUtensorMap& map, const void* box, int x0, int x1, int x2) {
  begin_box(emulator::Box::kStore, map, box, {x0, x1, x2});
}
inline void store_box(const CUtensorMap& map, const void* box, int x0, int x1, int x2, int x3, int x4) {
  begin_box(emulator::Box::kStore, map, box, {x0, x1, x2, x3, x4});
}
inline void add_box(const CUtensorMap& map, const void* box, int x0, int x1, int x2) {
  begin_box(emulator::Box::kAdd, map, box, {x0, x1, x2});
}
inline void fence_boxes() { tl::fence_proxy_async(); }
inline void wait_for_boxes() { tl::tma_store_wait<0, true>(); }
inline void wait_until_stored() { tl::tma_store_wait<0, true>(); }

inline int load_acquire(const int* from) { return *from; }
inline void store_release(int* to, int x) { *to = x; }
inline void arrive_at_cluster() { emulator::arrive_at_cluster(); }
inline void wait_for_cluster() { emulator::wait_for_cluster(); }
inline void expect_sent(uint64_t* barrier, int bytes) {
  emulator::Mbarrier& here = emulator::mbarrier(*barrier);
  here.init(1);
  here.expect(bytes);
  here.arrive();
}
inline void send(float* to, float x, uint64_t* barrier, int rank) {
  emulator::send(to, x, emulator::mbarrier(*barrier), rank);
}
inline void wait_for_sent(uint64_t* barrier) { emulator::mbarrier(*barrier).wait(0); }
inline void fence_proxies() { tl::fence_proxy_async(); }

}  // namespace flash_qla::device
