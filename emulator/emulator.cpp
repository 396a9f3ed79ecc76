// The emulator's CTAs, TMA and tensor cores, and the functions of the CUDA runtime that the library calls. It is one
// long file, because all parts work on the state of the one CTA that runs.
#include "emulator.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#undef threadIdx
#undef blockIdx
#undef blockDim

namespace emulator {

Index thread_index, block_index, block_dim;
unsigned thread_of_cluster;
uint64_t progress = 0;
alignas(1024) char dynamic_shared[kSharedBytes];

namespace {

constexpr size_t kStackBytes = 256 << 10;

constexpr int kMostCtas = 8;

struct Fiber {
  void* stack;
  bool done;
  unsigned arrival;  // generation of the cluster's barrier at which it has arrived
};

// The CTAs that run together: a cluster, of one CTA for most kernels. Threads are counted over all of them.
struct Cluster {
  Fiber fibers[kMostThreads];
  int ctas, threads_of_cta, alive, alive_of_ctas[kMostCtas], alive_of_warps[kMostThreads / 32];
  size_t shared_bytes;  // of a CTA
  Meeting all, named[kMostCtas][16], warps[kMostThreads / 32], warpgroups[kMostThreads / 128];

  int threads() const { return ctas * threads_of_cta; }
};
Cluster cluster;
void* scheduler_stack;
void (*run_kernel)(void** arguments);
void** kernel_arguments;

// Saves the registers that a call preserves on this stack, stores the stack pointer in *stack, and goes on with the
// stack `other`.
extern "C" void emulator_switch(void** stack, void* other);
asm(R"(
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

Fiber& this_fiber() { return cluster.fibers[thread_of_cluster]; }
unsigned rank_of_cta() { return thread_of_cluster / cluster.threads_of_cta; }

void run_thread() {
  run_kernel(kernel_arguments);
  exit_thread();
}

char* const stacks = static_cast<char*>(mmap(nullptr, kStackBytes* kMostThreads, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));

// Pieces that a thread copies (cp.async), until it waits for them.
struct Piece {
  void* to;
  const void* from;  // null: zeros
  int bytes, group;
};
struct Copies {
  std::vector<Piece> in_flight;
  int group = 0;  // that the next copy belongs to
};
Copies copies_of_threads[kMostThreads];

void run_cluster(Index first) {
  const int threads = cluster.threads();
  std::memset(dynamic_shared, 0xff, sizeof dynamic_shared);  // NaN
  races::begin_cta(threads);
  launches::begin_cta();
  cluster.alive = threads;
  std::fill_n(cluster.alive_of_ctas, kMostCtas, cluster.threads_of_cta);
  std::fill_n(cluster.alive_of_warps, kMostThreads / 32, 32);
  cluster.all = Meeting();
  std::fill_n(cluster.named[0], kMostCtas * 16, Meeting());
  std::fill_n(cluster.warps, kMostThreads / 32, Meeting());
  std::fill_n(cluster.warpgroups, kMostThreads / 128, Meeting());
  for (int i = 0; i < threads; ++i) {
    // The switch pops six registers and the address of run_thread. The stack is then aligned as after a call.
    void** const top = reinterpret_cast<void**>(stacks + kStackBytes * (i + 1)) - 2;
    *top = reinterpret_cast<void*>(&run_thread);
    cluster.fibers[i] = {top - 6, false, 0};
    copies_of_threads[i].in_flight.clear();
    copies_of_threads[i].group = 0;
  }
  while (cluster.alive > 0) {
    const uint64_t before = progress;
    for (int i = 0; i < threads; ++i) {
      if (!cluster.fibers[i].done) {
        thread_of_cluster = i;
        thread_index = {static_cast<unsigned>(i % cluster.threads_of_cta), 0, 0};
        block_index = {first.x + rank_of_cta(), first.y, first.z};
        emulator_switch(&scheduler_stack, cluster.fibers[i].stack);
      }
    }
    if (progress == before) {
      fail("all threads wait");
    }
  }
}

// 16-bit numbers, bf16 or fp16, from their bits and back.
float number_of(uint16_t bits, bool bf16) {
  if (bf16) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
  __half_raw raw;
  raw.x = bits;
  return __half2float(raw);
}
uint16_t bits_of(float x, bool bf16) {
  return bf16 ? __nv_bfloat16_raw(__float2bfloat16_rn(x)).x : __half_raw(__float2half_rn(x)).x;
}

float element_of(uint32_t pair, int i, bool bf16) { return number_of(static_cast<uint16_t>(pair >> 16 * i), bf16); }

// The swizzle of TMA and WGMMA for rows of 16 << mode bytes. Mode 0: none.
int swizzled(int address, int mode) { return address ^ ((address >> 7 & ((1 << mode) - 1)) << 4); }

// A descriptor of TMA. The CUtensorMap holds its address. Each launch makes new ones, which are never deleted.
struct TensorMap {
  char* address;
  int rank, element_bytes, swizzle;
  bool bf16;
  int64_t sizes[5], strides[5];
  int box[5];
};

const TensorMap& tensor_map(const CUtensorMap& map) {
  const TensorMap* description;
  std::memcpy(&description, &map, sizeof description);
  if (description == nullptr) {
    fail("a tensor that this call does not have");
  }
  return *description;
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  auto* const description =
      new TensorMap{static_cast<char*>(address), static_cast<int>(rank), 2, swizzle, false, {}, {}, {}};
  description->bf16 = dtype == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == CU_TENSOR_MAP_DATA_TYPE_FLOAT32) {
    description->element_bytes = 4;
  } else if (!description->bf16 && dtype != CU_TENSOR_MAP_DATA_TYPE_FLOAT16) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  description->strides[0] = description->element_bytes;
  bool valid = rank <= 5 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
               reinterpret_cast<uintptr_t>(address) % 16 == 0;
  for (cuuint32_t i = 0; i < rank; ++i) {
    description->sizes[i] = static_cast<int64_t>(sizes[i]);
    description->box[i] = static_cast<int>(box[i]);
    if (i > 0) {
      description->strides[i] = static_cast<int64_t>(strides[i - 1]);
      valid = valid && strides[i - 1] % 16 == 0;
    }
    valid = valid && box[i] <= 256;
  }
  valid = valid && (swizzle == 0 || description->box[0] * description->element_bytes <= 16 << swizzle);
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &description, sizeof description);
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Element (row, k) of an operand of WGMMA in shared memory; `row` counts along M or N. Operands need a swizzle here.
float operand(uint64_t descriptor, int row, int k, bool transposed, bool bf16) {
  const auto bytes = [=](int bit) { return static_cast<int>(descriptor >> bit & 0x3fff) << 4; };
  const int start = bytes(0), leading = bytes(16), stride = bytes(32), layout = static_cast<int>(descriptor >> 62);
  if (layout == 0) {
    fail("an operand of WGMMA without a swizzle");
  }
  const int width = 256 >> layout, mode = 4 - layout;  // bytes of a row of the pattern, 128, 64 or 32; its swizzle
  const int elements = width / 2;
  const int address = transposed
                          ? start + row / elements * leading + k / 8 * stride + k % 8 * width + row % elements * 2
                          : start + row / 8 * stride + row % 8 * width + k * 2;
  uint16_t bits;
  const char* const from = dynamic_shared + swizzled(address, mode);
  std::memcpy(&bits, from, 2);
  races::read_operand(from, 2);
  return number_of(bits, bf16);
}

// The element of a fragment of 64 x N, in the registers of its thread. Lane l has rows l / 4 and l / 4 + 8 of its
// warp's 16 rows, in pairs of columns.
float& in_fragment(const Wgmma* all, int row, int column) {
  const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  return all[thread].c[column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
}

void multiply(const Wgmma* all) {
  const Wgmma& p = all[0];
  static float a[64][16], b[16][256];
  races::begin_product();
  for (int t = 0; t < 128 && p.a != nullptr; ++t) {
    for (int i = 0; i < 8; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, k = t % 4 * 2 + i / 4 * 8 + i % 2;
      a[row][k] = element_of(all[t].a[i / 2], i % 2, p.bf16);
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 64 && p.a == nullptr; ++i) {
      a[i][k] = operand(p.a_descriptor, i, k, p.a_transposed, p.bf16);
    }
    for (int j = 0; j < p.N; ++j) {
      b[k][j] = operand(p.b_descriptor, j, k, p.b_transposed, p.bf16);
    }
  }
  for (int i = 0; i < 64; ++i) {
    float c[256] = {};
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < p.N; ++j) {
        c[j] += a[i][k] * b[k][j];
      }
    }
    for (int j = 0; j < p.N; ++j) {
      float& x = in_fragment(all, i, j);
      x = p.accumulate ? x + c[j] : c[j];
    }
  }
}

// c += a b, 16 x 8 += (16 x kK)(kK x 8), by a warp. a(lanes, row, k) and b(lanes, k, column) find elements in the
// lanes' operands.
template <int kK, typename Operands, typename A, typename B>
void multiply_by_warp(float (&c)[4], const Operands& mine, A a, B b) {
  with_warp(mine, [&](const Operands* lanes) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
      float sum = 0.f;
      for (int k = 0; k < kK; ++k) {
        sum += a(lanes, row, k) * b(lanes, k, column);
      }
      c[i] += sum;
    }
    return 0;
  });
}

struct Instance {
  launches::Kernel kernel;
  void (*run)(void** arguments);
};

std::map<std::string, Instance>& instances() {
  static std::map<std::string, Instance> all;
  return all;
}

// The CUDA version of the driver. An older one than the toolkit's refuses all code.
int driver_version() {
  const char* const version = std::getenv("EMULATED_DRIVER");
  return version != nullptr ? std::atoi(version) : CUDART_VERSION;
}

// A library is the code, whose function the emulator has compiled itself.
CUresult load_data(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*, void**,
                   unsigned) {
  *library = static_cast<CUlibrary>(const_cast<void*>(code));
  return driver_version() < CUDART_VERSION ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

// Whether the code, a cubin or PTX, has a function of this name.
bool has_function(const char* code, const std::string& name) {
  if (!std::string_view(code, 4).starts_with("\x7f"
                                             "ELF")) {
    return std::strstr(code, (".entry " + name + "(").c_str()) != nullptr;
  }
  uint64_t bytes;  // up to the table of sections, which follows their names
  std::memcpy(&bytes, code + 40, sizeof bytes);
  return std::string_view(code, bytes).find(".text." + name + '\0') != std::string_view::npos;
}

CUresult get_kernel(CUkernel* kernel, CUlibrary library, const char* name) {
  const auto instance = instances().find(name);
  if (instance == instances().end() || !has_function(reinterpret_cast<const char*>(library), name)) {
    return CUDA_ERROR_NOT_FOUND;
  }
  *kernel = reinterpret_cast<CUkernel>(&instance->second);
  return CUDA_SUCCESS;
}

// A line in the file that the environment names: kernel, instance, grid and seconds.
void record_launch(const Instance* launched, dim3 grid, std::chrono::steady_clock::duration time) {
  const char* const path = std::getenv("EMULATED_LAUNCHES");
  std::FILE* const file = path != nullptr ? std::fopen(path, "a") : nullptr;
  if (file == nullptr) {
    return;
  }
  for (const auto& [name, instance] : instances()) {
    if (&instance == launched) {
      const double seconds = std::chrono::duration<double>(time).count();
      std::fprintf(file, "%s %s %ux%ux%u %.3f\n", instance.kernel.name.c_str(), name.c_str(), grid.x, grid.y, grid.z,
                   seconds);
    }
  }
  std::fclose(file);
}

}  // namespace

void yield() { emulator_switch(&this_fiber().stack, scheduler_stack); }

void exit_thread() {
  this_fiber().done = true;
  ++progress;
  // Meetings that wait for this thread now wait for the others only.
  const auto leave = [](Meeting& meeting, int& alive) {
    if (--alive > 0 && meeting.arrived == alive) {
      races::complete(&meeting, meeting.generation);
      meeting.arrived = 0;
      ++meeting.generation;
    }
  };
  leave(named_barrier(0), cluster.alive_of_ctas[rank_of_cta()]);
  leave(warp_meeting(), cluster.alive_of_warps[thread_of_cluster / 32]);
  leave(cluster.all, cluster.alive);
  yield();
  __builtin_unreachable();
}

void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s (CTA %u, %u, %u, thread %u; %d threads of %d are left)\n", what, block_index.x,
               block_index.y, block_index.z, thread_index.x, cluster.alive, cluster.threads());
  std::abort();
}

Meeting& named_barrier(int number) { return cluster.named[rank_of_cta()][number]; }
Meeting& warp_meeting() { return cluster.warps[thread_of_cluster / 32]; }
int threads_alive() { return cluster.alive_of_ctas[rank_of_cta()]; }
int lanes_alive() { return cluster.alive_of_warps[thread_of_cluster / 32]; }

char* own_shared() { return dynamic_shared + rank_of_cta() * cluster.shared_bytes; }
char* in_cta_of_cluster(char* shared, int rank) {
  if (rank < 0 || rank >= cluster.ctas) {
    fail("shared memory of a CTA that the cluster does not have");
  }
  return shared + (rank - static_cast<int>(rank_of_cta())) * static_cast<ptrdiff_t>(cluster.shared_bytes);
}
void arrive_at_cluster() {
  Meeting& all = cluster.all;
  this_fiber().arrival = all.generation;
  races::arrive(&all);
  if (++all.arrived == cluster.alive) {
    races::complete(&all, all.generation);
    all.arrived = 0;
    ++all.generation;
    ++progress;
  }
}
void wait_for_cluster() {
  const unsigned arrival = this_fiber().arrival;
  wait_for([=] { return cluster.all.generation != arrival; });
  races::pass(&cluster.all, arrival);
}

void Mbarrier::end_phase() {
  if (pending == 0 && bytes == 0) {
    races::complete(this, phase);
    phase ^= 1;
    pending = static_cast<int16_t>(count);
    ++progress;
  }
}
void Mbarrier::arrive() {
  if (pending == 0) {
    fail("more arrivals than a barrier awaits");
  }
  races::arrive(this);
  --pending;
  end_phase();
}
void Mbarrier::complete(int32_t some) {
  bytes -= some;
  end_phase();
}

extern "C" char _end;  // the end of this library's image

bool is_emulator_memory(const void* address) {
  static const char* const image = [] {
    Dl_info info;
    dladdr(dynamic_shared, &info);
    return static_cast<const char*>(info.dli_fbase);
  }();
  const char* const at = static_cast<const char*>(address);
  constexpr ptrdiff_t kHostStack = 1 << 20;  // the stack of the launch's callers, which holds the arguments
  const auto is_in = [at](const char* begin, ptrdiff_t bytes) { return begin <= at && at < begin + bytes; };
  return is_in(stacks, kStackBytes * kMostThreads) || is_in(image, &_end - image) ||
         is_in(static_cast<const char*>(scheduler_stack), kHostStack);
}

const char* described_address(const CUtensorMap& map) {
  const TensorMap* description;
  std::memcpy(&description, &map, sizeof description);
  return description == nullptr ? nullptr : description->address;
}

int64_t box_bytes(const CUtensorMap& map) {
  const TensorMap& m = tensor_map(map);
  int64_t bytes = m.element_bytes;
  for (int i = 0; i < m.rank; ++i) {
    bytes *= m.box[i];
  }
  return bytes;
}

void check_pieces(const void* global, int64_t bytes, int piece) {
  if (reinterpret_cast<uintptr_t>(global) % piece != 0 || bytes % piece != 0) {
    fail(piece == 16 ? "a copy by pieces of 16 bytes that does not start or end at a multiple of 16"
                     : "a copy by pieces of 8 bytes that does not start or end at a multiple of 8");
  }
}

void copy_piece(void* to, const void* from, bool is_there, int bytes) {
  if (is_there) {
    check_pieces(from, bytes, bytes);
    races::touch(from);
  }
  std::memset(to, 0xff, bytes);  // NaN, because nothing may read it before the wait
  Copies& copies = copies_of_threads[thread_of_cluster];
  copies.in_flight.push_back({to, is_there ? from : nullptr, bytes, copies.group});
}
void commit_copies() { ++copies_of_threads[thread_of_cluster].group; }
void wait_for_copies(int in_flight) {
  Copies& copies = copies_of_threads[thread_of_cluster];
  std::erase_if(copies.in_flight, [&](const Piece& piece) {
    if (piece.group >= copies.group - in_flight) {
      return false;
    }
    if (piece.from != nullptr) {
      std::memcpy(piece.to, piece.from, piece.bytes);
    } else {
      std::memset(piece.to, 0, piece.bytes);
    }
    return true;
  });
}

void send(float* to, float x, Mbarrier& barrier, int rank) {
  const auto there = [=](void* address) { return in_cta_of_cluster(static_cast<char*>(address), rank); };
  auto& sent = *reinterpret_cast<Mbarrier*>(there(&barrier));
  std::memcpy(there(to), &x, sizeof x);
  races::load(&sent, there(to), sizeof x);
  sent.complete(sizeof x);
}

void load_bytes(Mbarrier& barrier, void* to, const void* from, int bytes) {
  check_pieces(from, bytes);
  races::touch(from);
  std::memcpy(to, from, bytes);
  races::load(&barrier, to, bytes);
  barrier.complete(bytes);
}

void move_box(Box move, const CUtensorMap& map, const void* shared, std::initializer_list<int> coordinates,
              const void* barrier) {
  const TensorMap& m = tensor_map(map);
  const int first = static_cast<int>(shared_address(shared));
  const int64_t bytes = box_bytes(map);
  if (static_cast<int>(coordinates.size()) != m.rank || first < 0 || first % 128 != 0 ||
      first + bytes > static_cast<int64_t>(sizeof dynamic_shared)) {
    fail("a box that has not its place in shared memory");
  }
  int at[5] = {};
  for (int64_t offset = 0; offset < bytes; offset += m.element_bytes) {
    bool is_inside = true;
    char* global = m.address;
    for (int i = 0; i < m.rank; ++i) {
      const int64_t x = int64_t{coordinates.begin()[i]} + at[i];
      is_inside = is_inside && x >= 0 && x < m.sizes[i];
      global += x * m.strides[i];
    }
    char* const here = dynamic_shared + swizzled(first + static_cast<int>(offset), m.swizzle);
    if (move == Box::kLoad) {
      races::load(barrier, here, m.element_bytes);
    } else {
      races::store(here, m.element_bytes);
    }
    if (is_inside) {
      races::touch(global);
    }
    if (!is_inside) {
      if (move == Box::kLoad) {
        std::memset(here, 0, m.element_bytes);
      }
    } else if (move == Box::kLoad) {
      std::memcpy(here, global, m.element_bytes);
    } else if (move == Box::kStore) {
      std::memcpy(global, here, m.element_bytes);
    } else {
      uint16_t x, y;
      std::memcpy(&x, here, 2);
      std::memcpy(&y, global, 2);
      y = bits_of(number_of(y, m.bf16) + number_of(x, m.bf16), m.bf16);
      std::memcpy(global, &y, 2);
    }
    for (int i = 0; i < m.rank && ++at[i] == m.box[i]; ++i) {
      at[i] = 0;
    }
  }
}

void load_matrices(uint32_t (&x)[4], uint32_t address, bool transposed) {
  with_warp(address, [&](const uint32_t* rows) {
    for (int i = 0; i < 8; ++i) {
      const int row = lane() / 4, column = lane() % 4 * 2 + i % 2;
      const char* const from =
          shared_pointer(rows[i / 2 * 8 + (transposed ? column : row)]) + 2 * (transposed ? row : column);
      uint16_t element;
      std::memcpy(&element, from, 2);
      races::read(from, 2);
      x[i / 2] = i % 2 == 0 ? element : x[i / 2] | static_cast<uint32_t>(element) << 16;
    }
    return 0;
  });
}

void store_matrices(uint32_t address, const uint32_t (&x)[4], bool transposed) {
  with_warp(address, [&](const uint32_t* rows) {
    for (int i = 0; i < 8; ++i) {
      const int row = lane() / 4, column = lane() % 4 * 2 + i % 2;
      const auto element = static_cast<uint16_t>(x[i / 2] >> i % 2 * 16);
      char* const to = shared_pointer(rows[i / 2 * 8 + (transposed ? column : row)]) + 2 * (transposed ? row : column);
      std::memcpy(to, &element, 2);
      races::write(to, 2);
    }
    return 0;
  });
  sync_warp();
}

struct Tf32Operands {
  float a[4], b[2];
};
void mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  const auto cut = [](float x) { return __uint_as_float(__float_as_uint(x) & ~0x1fffu); };
  const Tf32Operands mine = {{cut(a[0]), cut(a[1]), cut(a[2]), cut(a[3])}, {cut(b[0]), cut(b[1])}};
  multiply_by_warp<8>(
      c, mine,
      [](const Tf32Operands* lanes, int row, int k) { return lanes[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]; },
      [](const Tf32Operands* lanes, int k, int column) { return lanes[column * 4 + k % 4].b[k / 4]; });
}

struct Operands16 {
  uint32_t a[4], b[2];
};
void mma_16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16) {
  const Operands16 mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  multiply_by_warp<16>(
      c, mine,
      [=](const Operands16* lanes, int row, int k) {
        return element_of(lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k % 2, bf16);
      },
      [=](const Operands16* lanes, int k, int column) {
        return element_of(lanes[column * 4 + k % 8 / 2].b[k / 8], k % 2, bf16);
      });
}

void wgmma(const Wgmma& product) {
  static Wgmma all[kMostThreads];
  const int warpgroup = static_cast<int>(thread_of_cluster / 128);
  all[thread_of_cluster] = product;
  races::give_to_product(product.c, product.N / 2 * static_cast<int>(sizeof(float)), true);
  if (product.a != nullptr) {
    races::give_to_product(product.a, 4 * sizeof(uint32_t), false);
  }
  meet(cluster.warpgroups[warpgroup], 128, [&] { multiply(all + 128 * warpgroup); });
}

bool add_kernel(const char* name, launches::Kernel kernel, void (*run)(void** arguments)) {
  return instances().emplace(name, Instance{std::move(kernel), run}).second;
}

}  // namespace emulator

// The CUDA runtime with one GPU, whose memory is the CPU's: Hopper's, or of the compute capability that the environment
// names, such as 8.6. It runs the same code of a kernel whatever its architecture.
extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  *version = emulator::driver_version();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::strcpy(properties->name, "emulated");
  properties->major = 9;
  properties->minor = 0;
  if (const char* const capability = std::getenv("EMULATED_CAPABILITY")) {
    std::sscanf(capability, "%d.%d", &properties->major, &properties->minor);
  }
  const char* const sms = std::getenv("EMULATED_SMS");
  properties->multiProcessorCount = sms != nullptr ? std::atoi(sms) : 132;
  properties->clockRate = 1980000;
  properties->memoryClockRate = 2619000;
  properties->memoryBusWidth = 5120;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated runtime"; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* driver_status) {
  static const std::map<std::string, void*> functions = {
      {"cuLibraryLoadData", reinterpret_cast<void*>(&emulator::load_data)},
      {"cuLibraryGetKernel", reinterpret_cast<void*>(&emulator::get_kernel)},
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&emulator::encode)}};
  *function = functions.at(name);
  *driver_status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const auto& instance = *static_cast<const emulator::Instance*>(function);
  emulator::run_kernel = instance.run;
  emulator::kernel_arguments = arguments;
  emulator::block_dim = {config->blockDim.x, 1, 1};
  auto& cluster = emulator::cluster;
  cluster.threads_of_cta = static_cast<int>(config->blockDim.x);
  cluster.ctas = 1;
  bool overlaps = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      cluster.ctas = static_cast<int>(attribute.val.clusterDim.x);
    }
    overlaps |= attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization;
  }
  const dim3 grid = config->gridDim;
  cluster.shared_bytes = (config->dynamicSmemBytes + 1023) / 1024 * 1024;
  constexpr size_t kMostOfCta = 227 << 10;
  const bool fits = config->dynamicSmemBytes <= kMostOfCta && cluster.ctas <= emulator::kMostCtas &&
                    grid.x % cluster.ctas == 0 && cluster.threads() <= emulator::kMostThreads &&
                    cluster.ctas * cluster.shared_bytes <= sizeof emulator::dynamic_shared;
  if (!fits) {
    return cudaErrorInvalidValue;
  }
  emulator::launches::begin(instance.kernel, overlaps, arguments);
  const auto start = std::chrono::steady_clock::now();
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += cluster.ctas) {
        emulator::run_cluster({x, y, z});
      }
    }
  }
  emulator::launches::end();
  emulator::record_launch(&instance, grid, std::chrono::steady_clock::now() - start);
  return cudaSuccess;
}

int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  emulator::launches::begin_call();  // because each call of an op asks for the stream once
  *stream = nullptr;
  return 0;
}

}  // extern "C"
