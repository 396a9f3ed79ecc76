// Runs kernels on a CPU. The threads of a cluster are fibers of one thread. A fiber yields whenever it waits for
// another. Clusters, of one CTA for most kernels, run one after the other, in the order of their numbers. Asynchronous
// instructions are done when they are issued. This tests indices, layouts, counts of barriers and arithmetic; races.cpp
// tests fences and races.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#include "launches.h"
#include "races.h"

namespace emulator {

struct Index {
  unsigned x, y, z;
};
extern Index thread_index, block_index, block_dim;
extern unsigned thread_of_cluster;  // counted over its CTAs

// Counts the waits that have ended. If the count stays while each thread runs once, all threads wait: a deadlock.
extern uint64_t progress;

void yield();                              // to the other threads of the CTA
[[noreturn]] void exit_thread();           // the PTX instruction
[[noreturn]] void fail(const char* what);  // prints the text with the CTA and thread, and ends the process

template <typename Condition>
void wait_for(Condition condition) {
  while (!condition()) {
    yield();
  }
  ++progress;
}

// Threads that wait for one another.
struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
};
Meeting& named_barrier(int number);
Meeting& warp_meeting();
int threads_alive();

// Waits until `threads` threads have come. The last one does the work first.
template <typename Work>
void meet(Meeting& meeting, int threads, Work work) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == threads) {
    work();
    meeting.arrived = 0;
    ++meeting.generation;
    ++progress;
  } else {
    wait_for([&] { return meeting.generation != generation; });
  }
}
inline void meet(Meeting& meeting, int threads) {
  meet(meeting, threads, [] {});
}
// meet() that also orders the threads' accesses before it with those after it (races.h).
template <typename Work>
void synchronize(Meeting& meeting, int threads, Work work) {
  const unsigned generation = meeting.generation;
  races::arrive(&meeting);
  meet(meeting, threads, [&] {
    work();
    races::complete(&meeting, generation);
  });
  races::pass(&meeting, generation);
}
inline void synchronize(Meeting& meeting, int threads) {
  synchronize(meeting, threads, [] {});
}
int lanes_alive();  // of the warp

struct Mbarrier;
// Clusters. Their CTAs run together; a cluster has its CTAs' shared memory one after the other.
char* own_shared();
char* in_cta_of_cluster(char* shared, int rank);
void arrive_at_cluster();
void wait_for_cluster();
// Stores a float to shared memory of another CTA and completes its bytes at the barrier there (st.async).
void send(float* to, float x, Mbarrier& barrier, int rank);

inline void sync_warp() { meet(warp_meeting(), lanes_alive()); }

constexpr int kMostThreads = 2048;  // of a cluster

inline int lane() { return thread_index.x % 32; }

// f(all), where all[i] is the `mine` of lane i, and anything if lane i has ended. All lanes of a warp call it.
template <typename T, typename F>
auto with_warp(T mine, F f) {
  struct Shown {
    alignas(16) char of_warps[kMostThreads / 32][32][64];
  };
  static Shown shown;
  static_assert(sizeof(T) <= sizeof shown.of_warps[0][0] && std::is_trivially_copyable_v<T>);
  auto& slots = shown.of_warps[thread_of_cluster / 32];
  std::memcpy(slots[lane()], &mine, sizeof(T));
  sync_warp();
  T all[32];
  for (int i = 0; i < 32; ++i) {
    std::memcpy(&all[i], slots[i], sizeof(T));
  }
  sync_warp();
  return f(all);
}

// Shared memory: addresses are offsets from the dynamic part. Static variables are near enough for 32 bits.
constexpr int kSharedBytes = 640 << 10;  // of a cluster
extern char dynamic_shared[];
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - dynamic_shared);
}
inline char* shared_pointer(uint32_t address) { return dynamic_shared + static_cast<int32_t>(address); }

struct Mbarrier {
  int32_t bytes;    // awaited, of transactions
  int16_t pending;  // awaited arrivals
  uint16_t count : 15, phase : 1;

  void init(int arrivals) {
    races::is_barrier(this);
    *this = {0, static_cast<int16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
  }
  void arrive();
  void expect(int32_t more) { bytes += more; }
  void complete(int32_t some);
  void wait(unsigned parity) {
    wait_for([&] { return phase != (parity & 1); });
    races::pass(this, parity);
  }

 private:
  void end_phase();
};
static_assert(sizeof(Mbarrier) == 8);
template <typename Barrier>
Mbarrier& mbarrier(Barrier& barrier) {
  return reinterpret_cast<Mbarrier&>(barrier);
}

// Whether an address belongs to the emulator itself, to stacks or static variables, and not to a tensor.
bool is_emulator_memory(const void* address);

// A box of TMA between a tensor and shared memory.
enum class Box { kLoad, kStore, kAdd };
int64_t box_bytes(const CUtensorMap& map);
const char* described_address(const CUtensorMap& map);  // null: none
void move_box(Box move, const CUtensorMap& map, const void* shared, std::initializer_list<int> coordinates,
              const void* barrier = nullptr);  // for a load: its barrier
// Fails unless address and size are multiples of `piece` bytes, as copies in such pieces need. (-fsanitize=alignment
// checks loads and stores of vectors.)
void check_pieces(const void* global, int64_t bytes, int piece = 16);
// cp.async: copies a piece of global memory to shared memory, or writes zeros, when the thread waits for the group that
// it commits next. Until then NaN is there.
void copy_piece(void* to, const void* from, bool is_there, int bytes);
void commit_copies();
void wait_for_copies(int in_flight);  // all but so many of the last groups
// Copies bytes of global memory to shared memory, and completes them at the barrier.
void load_bytes(Mbarrier& barrier, void* to, const void* from, int bytes);

// ldmatrix and stmatrix: four 8 x 8 matrices of 16-bit elements between shared memory and a warp's fragments.
void load_matrices(uint32_t (&x)[4], uint32_t address, bool transposed);
void store_matrices(uint32_t address, const uint32_t (&x)[4], bool transposed);

// c += a b by a warp, with factors in TF32 or in 16 bits.
void mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]);
void mma_16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16);

// c = a b, or c += a b with `accumulate`, by a warpgroup: 64 x N x 16, with 16-bit factors. a is in registers or, if
// the pointer is null, at its descriptor.
struct Wgmma {
  const uint32_t* a;
  uint64_t a_descriptor, b_descriptor;
  float* c;
  int N;
  bool a_transposed, b_transposed, accumulate, bf16;
};
void wgmma(const Wgmma& product);

// Adds an instance under its name, by which the emulated driver finds it. Returns whether the name is new.
bool add_kernel(const char* name, launches::Kernel kernel, void (*run)(void** arguments));

}  // namespace emulator

// CUDA C++

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_dim
#undef __shared__
#undef __launch_bounds__
#undef __global__
#undef __device__
#undef __forceinline__
#undef __grid_constant__
#undef __align__
#undef __noinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __noinline__
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::max;
using std::min;
using uchar = unsigned char;
using bfloat16_t = __nv_bfloat16;
using half_t = __half;

template <typename To, typename From>
To emulator_bits(From x) {
  To y;
  static_assert(sizeof x == sizeof y);
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline float __uint_as_float(uint32_t x) { return emulator_bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return emulator_bits<uint32_t>(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __log2f(float x) { return std::log2(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
void __stcg(T* to, T x) {
  *to = x;
}
// Byte i of the result is byte (selector >> 4 i & 7) of y and x, of which x has the four low ones.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  uint32_t selected = 0;
  for (int i = 0; i < 4; ++i) {
    selected |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return selected;
}
inline int atomicAdd(int* to, int x) { return std::exchange(*to, *to + x); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { emulator::yield(); }
inline size_t __cvta_generic_to_shared(const void* pointer) { return emulator::shared_address(pointer); }

// Masks are full. A lane whose source is outside its group of `width` lanes keeps its x.
template <typename T>
T emulator_shuffle(T x, int from, int width) {
  const int first = emulator::lane() & ~(width - 1);
  return emulator::with_warp(
      x, [=](const T* all) { return all[from >= first && from < first + width ? from : emulator::lane()]; });
}
template <typename T>
T __shfl_sync(unsigned, T x, int from, int width = 32) {
  return emulator_shuffle(x, (emulator::lane() & ~(width - 1)) + from % width, width);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask, int width = 32) {
  return emulator_shuffle(x, emulator::lane() ^ mask, width);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int by, int width = 32) {
  return emulator_shuffle(x, emulator::lane() - by, width);
}
template <typename T>
T __shfl_down_sync(unsigned, T x, int by, int width = 32) {
  return emulator_shuffle(x, emulator::lane() + by, width);
}
inline unsigned __ballot_sync(unsigned, int x) {
  return emulator::with_warp(x != 0, [](const bool* all) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) {
      bits |= static_cast<unsigned>(all[i]) << i;
    }
    return bits;
  });
}
inline int __all_sync(unsigned mask, int x) { return __ballot_sync(mask, x) == ~0u; }
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
inline void __syncwarp() { emulator::synchronize(emulator::warp_meeting(), emulator::lanes_alive()); }
inline void __syncthreads() { emulator::synchronize(emulator::named_barrier(0), emulator::threads_alive()); }
inline int __syncthreads_or(int x) {
  static int any = 0;
  any |= x != 0;
  __syncthreads();
  const int result = any;
  emulator::synchronize(emulator::named_barrier(0), emulator::threads_alive(), [] { any = 0; });
  return result;
}
inline void cudaGridDependencySynchronize() {
  emulator::launches::wait();
  emulator::races::wait_for_launch();
}
inline void cudaTriggerProgrammaticLaunchCompletion() { emulator::launches::trigger(); }
// Functions that cuda_bf16.h and cuda_fp16.h have for device code only.
inline unsigned emulator_pack(__nv_bfloat16 x, __nv_bfloat16 y) {
  return __nv_bfloat16_raw(x).x | static_cast<unsigned>(__nv_bfloat16_raw(y).x) << 16;
}
inline unsigned emulator_pack(__half x, __half y) {
  return __half_raw(x).x | static_cast<unsigned>(__half_raw(y).x) << 16;
}
#define __pack_nv_bfloat162 emulator_pack
#define __pack_half2 emulator_pack

// TileLang's templates

namespace tl {

enum class DataType { kBFloat16, kFloat16, kFloat32 };

union GmmaDescriptor {
  uint64_t desc_ = 0;
  uint32_t reg32_[2];

  operator uint64_t() const { return desc_; }
  GmmaDescriptor operator+(int units) const {
    GmmaDescriptor moved = *this;
    moved.reg32_[0] += units;
    return moved;
  }
};
template <int kLayout, int kLeading, int kStride, typename T>
void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, T* tile) {
  descriptor.desc_ = uint64_t{kLayout} << 62 | uint64_t{kStride} << 32 | uint64_t{kLeading} << 16 |
                     (emulator::shared_address(tile) & 0x3ffff) >> 4;
}
template <typename T>
void increase_descriptor_offset(GmmaDescriptor& descriptor, T bytes) {
  descriptor.reg32_[0] += bytes >> 4;
}
template <DataType kA, DataType, DataType kC, int kM, int kN, int kK, bool kTransposeA, bool kTransposeB, int, int>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, bool accumulate) {
  static_assert(kM == 64 && kK == 16 && kC == DataType::kFloat32);
  emulator::wgmma({nullptr, a, b, reinterpret_cast<float*>(c), kN, kTransposeA, kTransposeB, accumulate,
                   kA == DataType::kBFloat16});
}
template <DataType kA, DataType, DataType kC, int kM, int kN, int kK, bool kTransposeA, bool kTransposeB, int, int>
void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* c, bool accumulate) {
  static_assert(kM == 64 && kK == 16 && kC == DataType::kFloat32 && !kTransposeA);
  emulator::wgmma(
      {a, 0, b, reinterpret_cast<float*>(c), kN, false, kTransposeB, accumulate, kA == DataType::kBFloat16});
}
template <typename T>
void warpgroup_fence_operand(T*, int) {}
inline void warpgroup_commit_batch() { emulator::races::commit(emulator::races::Engine::kProducts); }
inline void warpgroup_arrive() {}
template <int kInFlight>
void wait_wgmma() {
  emulator::races::wait(emulator::races::Engine::kProducts, kInFlight);
}
template <int>
void warpgroup_reg_alloc() {}
template <int>
void warpgroup_reg_dealloc() {}

template <typename Barrier, typename... Coordinates>
void tma_load(const CUtensorMap& map, Barrier& barrier, const void* shared, Coordinates... at) {
  emulator::move_box(emulator::Box::kLoad, map, shared, {at...}, &barrier);
  emulator::mbarrier(barrier).complete(emulator::box_bytes(map));
}
template <typename... Coordinates>
void tma_store(const CUtensorMap& map, const void* shared, Coordinates... at) {
  emulator::move_box(emulator::Box::kStore, map, shared, {at...});
}
// Of T.gemm on architectures without WGMMA
inline void ptx_ldmatrix_x4(const void* from, void* to) {
  emulator::load_matrices(*static_cast<uint32_t (*)[4]>(to), emulator::shared_address(from), false);
}
inline void ptx_ldmatrix_x4_trans(const void* from, void* to) {
  emulator::load_matrices(*static_cast<uint32_t (*)[4]>(to), emulator::shared_address(from), true);
}
template <DataType kA, DataType, DataType kC, int kM, int kN, int kK, bool kTransposeA, bool kTransposeB>
void mma_sync(float* c, const unsigned* a, const unsigned* b) {
  static_assert(kM == 16 && kN == 8 && kK == 16 && kC == DataType::kFloat32 && !kTransposeA && kTransposeB);
  emulator::mma_16(*reinterpret_cast<float (*)[4]>(c), *reinterpret_cast<const uint32_t (*)[4]>(a),
                   *reinterpret_cast<const uint32_t (*)[2]>(b), kA == DataType::kBFloat16);
}
inline float2 mul2(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
inline float2 add2(float2 x, float2 y) { return {x.x + y.x, x.y + y.y}; }
inline float2 sub2(float2 x, float2 y) { return {x.x - y.x, x.y - y.y}; }
inline float2 fma2(float2 x, float2 y, float2 z) { return {std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y)}; }

inline void prefetch_tma_descriptor(const CUtensorMap&) {}
inline void fence_proxy_async() { emulator::races::fence(); }
inline void fence_barrier_init() {}
inline void tma_store_arrive() { emulator::races::commit(emulator::races::Engine::kStores); }
template <int kInFlight, bool>
void tma_store_wait() {
  emulator::races::wait(emulator::races::Engine::kStores, kInFlight);
}

template <int kThreads>
bool tl_shuffle_elect() {
  return kThreads == 0 ? threadIdx.x == 0 : threadIdx.x % kThreads == 0;
}
template <int kNumber, int kThreads>
void __sync_thread_partial() {
  emulator::synchronize(emulator::named_barrier(kNumber), kThreads);
}
inline void __sync_thread_partial(int number, int threads) {
  emulator::synchronize(emulator::named_barrier(number), threads);
}

}  // namespace tl

struct Barrier {
  mutable emulator::Mbarrier barrier;

  void init(int arrivals) const { barrier.init(arrivals); }
  void wait(int parity) const { barrier.wait(parity); }
  void arrive() const { barrier.arrive(); }
  void expect_transaction(int bytes) const { barrier.expect(bytes); }
  void arrive_and_expect_tx(int bytes) const {
    barrier.expect(bytes);
    barrier.arrive();
  }
};

// CUB

namespace cub {

enum BlockScanAlgorithm { BLOCK_SCAN_WARP_SCANS };

template <typename T, int kThreads, BlockScanAlgorithm>
class BlockScan {
 public:
  struct TempStorage {
    T inputs[kThreads];
  };
  explicit BlockScan(TempStorage& space) : space_(space) {}

  template <typename Add>
  void InclusiveScan(T x, T& scanned, Add add) {
    space_.inputs[threadIdx.x] = x;
    __syncthreads();
    scanned = space_.inputs[0];
    for (unsigned i = 1; i <= threadIdx.x; ++i) {
      scanned = add(scanned, space_.inputs[i]);
    }
    __syncthreads();
  }
  void InclusiveSum(T x, T& sum) {
    InclusiveScan(x, sum, [](T a, T b) { return a + b; });
  }

 private:
  TempStorage& space_;
};

}  // namespace cub
