// Races in shared memory. Barriers must order a read after the last write, and a write after all reads. The order in
// which the emulator's threads happen to run does not count.
//
// The compiler reports each access: -fsanitize=thread calls functions at the end of this file. Times are vector clocks.
// Each thread has a clock, and so has each engine that runs by itself: a barrier's loads of a phase, a thread's stores,
// a warpgroup's products. An engine sees a thread's write only after a fence.proxy.async, so times also hold how much
// of each thread is fenced. It is one file, because all clocks are one state.
#include "races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator.h"
#undef threadIdx
#undef blockIdx

namespace emulator::races {

namespace {

#ifdef EMULATOR_RACES
constexpr bool kOn = true;
#else
constexpr bool kOn = false;
#endif

constexpr int kGranule = 2;      // bytes
constexpr int kMostLanes = 256;  // clocks of engines; the last one is the clock of the launch ahead

// For each clock, the time up to which its events have happened before, and up to which engines see its writes.
struct Times {
  std::vector<uint32_t> known, fenced;

  void reset(int clocks) {
    known.assign(clocks, 0);
    fenced.assign(clocks, 0);
  }
  void join(const Times& other) {
    for (size_t i = 0; i < known.size(); ++i) {
      known[i] = std::max(known[i], other.known[i]);
      fenced[i] = std::max(fenced[i], other.fenced[i]);
    }
  }
  void meet(const Times& other) {
    for (size_t i = 0; i < known.size(); ++i) {
      known[i] = std::min(known[i], other.known[i]);
      fenced[i] = std::min(fenced[i], other.fenced[i]);
    }
  }
};

struct Access {
  int clock;
  uint32_t time;
  const void* instruction;  // the address in the program
};

struct Granule {
  uint64_t cta = 0;
  bool is_barrier = false;
  Access writer = {-1, 0, nullptr};
  std::vector<Access> readers;  // since the last write; no reader happened before another
};

struct BarrierRecord {
  Times arrived, ready[2];
  int clock;  // the clock of the loads that it waits for
  uint32_t phases = 0;
  Access initialization = {-1, 0, nullptr};  // if it lies in shared memory
};

int threads, lanes;
uint64_t ctas = 0;
std::vector<Times> of_thread;
std::unordered_map<const void*, BarrierRecord> barriers;
struct Groups {
  int clock = -1;
  uint32_t committed = 0;
};
// Registers that a thread has given to a product. Until the product is over, factors may not change, and results may
// not be read or written.
struct Registers {
  const char* begin;
  int bytes;
  uint32_t group;
  bool is_result;
};
std::vector<Registers> in_products[kMostThreads];
Groups groups[2][kMostThreads];
Granule granules[kSharedBytes / kGranule];
Times of_product;
// Lanes of a warp may write the same bytes at once if they write the same value: `value` is that of the lane before.
struct Same {
  const char* bytes;
  uint16_t value;
  Access before, now;
};
std::vector<Same> written_at_once;

int self() { return static_cast<int>(thread_of_cluster); }

std::string name_of(int clock) { return clock < threads ? "thread " + std::to_string(clock) : "an engine"; }

std::string location_of(const void* instruction) {
  Dl_info info;
  if (instruction == nullptr || dladdr(instruction, &info) == 0) {
    return "the emulator";
  }
  char text[64];
  std::snprintf(text, sizeof text, "%#tx",
                static_cast<const char*>(instruction) - static_cast<const char*>(info.dli_fbase));
  return text;
}

void report(const char* what, int byte, const Access& before, const Access& now) {
  std::fprintf(stderr, "emulator: race: %s, byte %d of shared memory, CTA %u %u %u: %s at %s, then %s at %s\n", what,
               byte, block_index.x, block_index.y, block_index.z, name_of(before.clock).c_str(),
               location_of(before.instruction).c_str(), name_of(now.clock).c_str(),
               location_of(now.instruction).c_str());
  std::abort();
}

Access current_access(const void* instruction) { return {self(), of_thread[self()].known[self()], instruction}; }
bool happened(const Access& access, const Times& times) { return times.known[access.clock] >= access.time; }

int launch_clock() { return threads + kMostLanes - 1; }

int new_clock() {
  if (lanes == kMostLanes - 1) {
    fail("more barriers and stores than races.cpp has clocks for");
  }
  return threads + lanes++;
}

BarrierRecord& barrier_record(const void* barrier) {
  auto [entry, is_new] = barriers.try_emplace(barrier);
  if (is_new) {
    BarrierRecord& record = entry->second;
    record.arrived.reset(threads + kMostLanes);
    record.ready[0] = record.ready[1] = record.arrived;
    record.clock = new_clock();
  }
  return entry->second;
}

BarrierRecord& initialized_barrier(const void* barrier) {
  BarrierRecord& record = barrier_record(barrier);
  if (record.initialization.clock >= 0 && record.initialization.clock != self() &&
      !happened(record.initialization, of_thread[self()])) {
    report("a barrier is used before it is there", 0, record.initialization, current_access(nullptr));
  }
  return record;
}

// Products have one clock for each warpgroup, stores have one for each thread that stores.
Groups& groups_of(Engine engine) {
  Groups& mine = groups[static_cast<int>(engine)][self()];
  if (mine.clock < 0) {
    Groups& first = groups[static_cast<int>(engine)][engine == Engine::kProducts ? self() / 128 * 128 : self()];
    if (first.clock < 0) {
      first.clock = new_clock();
    }
    mine.clock = first.clock;
  }
  return mine;
}

// Registers lie on the emulator's stacks.
void see_registers(const void* at, int bytes, bool is_write, const void* instruction) {
  auto& all = in_products[self()];
  if (all.empty()) {
    return;
  }
  const int clock = groups_of(Engine::kProducts).clock;
  for (const Registers& x : all) {
    const char* const begin = static_cast<const char*>(at);
    if (begin < x.begin + x.bytes && x.begin < begin + bytes && (is_write || x.is_result)) {
      report("registers of a product that is not over", 0, {clock, x.group, nullptr}, current_access(instruction));
    }
  }
}

void check_written_at_once() {
  for (const Same& same : written_at_once) {
    if (std::memcmp(same.bytes, &same.value, sizeof same.value) != 0) {
      report("lanes write different things at once", static_cast<int>(same.bytes - dynamic_shared), same.before,
             same.now);
    }
  }
  written_at_once.clear();
}

bool is_fenced(const Access& access, const Times& times) {
  return access.clock >= threads || times.fenced[access.clock] >= access.time;
}

template <typename Use>
void for_granules(const void* from, int bytes, Use use) {
  const int64_t first = static_cast<const char*>(from) - dynamic_shared;
  if (first < 0 || first >= kSharedBytes) {
    return;
  }
  for (int64_t byte = first / kGranule * kGranule; byte < std::min<int64_t>(first + bytes, kSharedBytes);
       byte += kGranule) {
    Granule& granule = granules[byte / kGranule];
    if (granule.cta != ctas) {
      granule.cta = ctas;
      granule.is_barrier = false;
      granule.writer.clock = -1;
      granule.readers.clear();
    }
    if (!granule.is_barrier) {
      use(granule, static_cast<int>(byte));
    }
  }
}

void see_read(const void* from, int bytes, const Access& now, const Times& times, bool by_engine) {
  for_granules(from, bytes, [&](Granule& granule, int byte) {
    const Access& writer = granule.writer;
    if (writer.clock >= 0 && !(writer.clock == now.clock && !by_engine)) {
      if (!happened(writer, times)) {
        report("a read is not behind the write", byte, writer, now);
      } else if (by_engine && !is_fenced(writer, times)) {
        report("no fence between a write and an engine's read", byte, writer, now);
      }
    }
    std::erase_if(granule.readers, [&](const Access& x) { return x.clock == now.clock || happened(x, times); });
    granule.readers.push_back(now);
  });
}

void see_write(const void* to, int bytes, const Access& now, const Times& times, bool by_engine) {
  for_granules(to, bytes, [&](Granule& granule, int byte) {
    const Access& writer = granule.writer;
    if (writer.clock >= 0 && (by_engine || writer.clock != now.clock)) {
      const bool at_once = !by_engine && writer.clock / 32 == now.clock / 32 && writer.instruction == now.instruction;
      if (!happened(writer, times) && at_once) {
        Same same = {dynamic_shared + byte, 0, writer, now};
        std::memcpy(&same.value, same.bytes, sizeof same.value);
        written_at_once.push_back(same);
      } else if (!happened(writer, times)) {
        report("a write is not behind the last one", byte, writer, now);
      } else if (by_engine && !is_fenced(writer, times)) {
        report("no fence between a write and an engine's", byte, writer, now);
      }
    }
    for (const Access& reader : granule.readers) {
      if ((by_engine || reader.clock != now.clock) && !happened(reader, times)) {
        report("a write is not behind a read", byte, reader, now);
      }
    }
    granule.readers.clear();
    granule.writer = now;
  });
}

void see_global(const void* at, const void* instruction) {
  const int64_t in_shared = static_cast<const char*>(at) - dynamic_shared;
  if ((in_shared >= 0 && in_shared < kSharedBytes) || of_thread[self()].known[launch_clock()] > 0 ||
      is_emulator_memory(at)) {
    return;
  }
  std::string parameter = "memory of no parameter";
  if (!launches::may_touch(at, parameter)) {
    fail((parameter + " is touched at " + location_of(instruction) +
          ", which is not behind the wait for the launch ahead")
             .c_str());
  }
}

void see(const void* at, int bytes, bool is_write, const void* instruction) {
  if (kOn && threads > 0) {
    see_global(at, instruction);
    check_written_at_once();
    see_registers(at, bytes, is_write, instruction);
    (is_write ? see_write : see_read)(at, bytes, current_access(instruction), of_thread[self()], false);
  }
}
void read_at(const void* from, int bytes, const void* instruction) { see(from, bytes, false, instruction); }
void write_at(const void* to, int bytes, const void* instruction) { see(to, bytes, true, instruction); }

}  // namespace

void begin_cta(int count) {
  if (!kOn) {
    return;
  }
  threads = count;
  lanes = 0;
  ++ctas;
  barriers.clear();
  for (auto& of_engine : groups) {
    std::fill_n(of_engine, kMostThreads, Groups());
  }
  for (auto& all : in_products) {
    all.clear();
  }
  of_thread.resize(threads);
  for (int i = 0; i < threads; ++i) {
    of_thread[i].reset(threads + kMostLanes);
    of_thread[i].known[i] = 1;
  }
}

void arrive(const void* barrier) {
  if (kOn) {
    check_written_at_once();
    Times& mine = of_thread[self()];
    initialized_barrier(barrier).arrived.join(mine);
    ++mine.known[self()];
  }
}

void complete(const void* barrier, unsigned parity) {
  if (kOn) {
    BarrierRecord& record = barrier_record(barrier);
    record.arrived.known[record.clock] = ++record.phases;
    record.ready[parity & 1] = record.arrived;
    record.arrived.reset(threads + kMostLanes);
  }
}

void pass(const void* barrier, unsigned parity) {
  if (kOn) {
    of_thread[self()].join(initialized_barrier(barrier).ready[parity & 1]);
  }
}

void is_barrier(const void* words) {
  if (kOn) {
    for_granules(words, 8, [](Granule& granule, int) { granule.is_barrier = true; });
    barriers.erase(words);
    barrier_record(words).initialization = current_access(nullptr);
  }
}

void commit(Engine engine) {
  if (kOn) {
    ++groups_of(engine).committed;
  }
}

void wait(Engine engine, int in_flight) {
  if (kOn) {
    const Groups& mine = groups_of(engine);
    uint32_t& known = of_thread[self()].known[mine.clock];
    known = std::max(known, mine.committed - std::min<uint32_t>(in_flight, mine.committed));
    if (engine == Engine::kProducts) {
      std::erase_if(in_products[self()], [&](const Registers& x) { return x.group <= known; });
    }
  }
}

void fence() {
  if (kOn) {
    Times& mine = of_thread[self()];
    mine.fenced = mine.known;
    ++mine.known[self()];
  }
}

void load(const void* barrier, const void* to, int bytes) {
  if (kOn) {
    const BarrierRecord& record = barrier_record(barrier);
    see_write(to, bytes, {record.clock, record.phases + 1, nullptr}, of_thread[self()], true);
  }
}

void store(const void* from, int bytes) {
  if (kOn) {
    const Groups& mine = groups_of(Engine::kStores);
    see_read(from, bytes, {mine.clock, mine.committed + 1, nullptr}, of_thread[self()], true);
  }
}

void give_to_product(const void* registers, int bytes, bool is_result) {
  if (kOn) {
    const char* const begin = static_cast<const char*>(registers);
    auto& all = in_products[self()];
    std::erase_if(all, [&](const Registers& x) { return x.begin == begin && x.is_result == is_result; });
    all.push_back({begin, bytes, groups_of(Engine::kProducts).committed + 1, is_result});
  }
}

void begin_product() {
  if (kOn) {
    const int first = self() / 128 * 128;
    of_product = of_thread[first];
    for (int i = 1; i < 128; ++i) {
      of_product.meet(of_thread[first + i]);
    }
  }
}

void read_operand(const void* from, int bytes) {
  if (kOn) {
    const Groups& mine = groups_of(Engine::kProducts);
    see_read(from, bytes, {mine.clock, mine.committed + 1, nullptr}, of_product, true);
  }
}

void wait_for_launch() {
  if (kOn) {
    of_thread[self()].known[launch_clock()] = 1;
  }
}

void touch(const void* global) {
  if (kOn) {
    see_global(global, nullptr);
  }
}

void read(const void* from, int bytes) { read_at(from, bytes, nullptr); }
void write(const void* to, int bytes) { write_at(to, bytes, nullptr); }

}  // namespace emulator::races

// The functions that code compiled with -fsanitize=thread calls.
extern "C" {

#define FLASH_QLA_ACCESS(bytes)                                                                               \
  void __tsan_read##bytes(void* from) { emulator::races::read_at(from, bytes, __builtin_return_address(0)); } \
  void __tsan_write##bytes(void* to) { emulator::races::write_at(to, bytes, __builtin_return_address(0)); }   \
  void __tsan_unaligned_read##bytes(void* from) {                                                             \
    emulator::races::read_at(from, bytes, __builtin_return_address(0));                                       \
  }                                                                                                           \
  void __tsan_unaligned_write##bytes(void* to) { emulator::races::write_at(to, bytes, __builtin_return_address(0)); }
FLASH_QLA_ACCESS(1)
FLASH_QLA_ACCESS(2)
FLASH_QLA_ACCESS(4)
FLASH_QLA_ACCESS(8)
FLASH_QLA_ACCESS(16)
#undef FLASH_QLA_ACCESS

void __tsan_read_range(void* from, size_t bytes) {
  emulator::races::read_at(from, static_cast<int>(bytes), __builtin_return_address(0));
}
void __tsan_write_range(void* to, size_t bytes) {
  emulator::races::write_at(to, static_cast<int>(bytes), __builtin_return_address(0));
}
// The guard of a static variable, which the variables in shared memory are here.
uint8_t __tsan_atomic8_load(const volatile uint8_t* from, int) { return *from; }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}

}  // extern "C"
