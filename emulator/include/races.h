// What the emulator tells of a CTA's order to races.cpp. Nothing comes of it unless the kernels were built with
// --races.
#pragma once

#include <cstdint>

namespace emulator::races {

void begin_cta(int threads);

// Of a barrier of any kind: a thread has arrived; a phase is over, as its last thread or load finds; a thread has
// waited for it. Phases take turns with their parity.
void arrive(const void* barrier);
void complete(const void* barrier, unsigned parity);
void pass(const void* barrier, unsigned parity);
void is_barrier(const void* words);  // 8 bytes of shared memory, which are no data

// What goes on by itself, behind a thread's back: loads until a barrier's phase is over, stores and products until the
// thread waits for their group.
enum class Engine { kStores, kProducts };
void commit(Engine engine);
void wait(Engine engine, int in_flight);
void fence();  // of the thread's own accesses before those of engines

void load(const void* barrier, const void* to, int bytes);
void store(const void* from, int bytes);
// A thread's part of a product's factor, or of its result. Then the warpgroup's operands in shared memory are read.
void give_to_product(const void* registers, int bytes, bool is_result);
void begin_product();
void read_operand(const void* from, int bytes);

// Global memory, by a thread or by TMA: before the thread's wait for the launch ahead, or what is in order behind it,
// only what the kernel declares. Memory between two parameters is taken for that of the first one.
void wait_for_launch();
void touch(const void* global);

// A thread's own
void read(const void* from, int bytes);
void write(const void* to, int bytes);

}  // namespace emulator::races
