// The events of a CTA that the emulator reports to races.cpp. They have no effect unless the kernels were built with
// --races.
#pragma once

#include <cstdint>

namespace emulator::races {

void begin_cta(int threads);

// Barriers of any kind: a thread arrives; the last thread or load completes a phase; a thread passes after it has
// waited for the phase. The parity tells a phase from the one before.
void arrive(const void* barrier);
void complete(const void* barrier, unsigned parity);
void pass(const void* barrier, unsigned parity);
void is_barrier(const void* words);  // these 8 bytes of shared memory are a barrier: accesses are not checked

// Engines work on after a thread has issued an instruction: stores and products until the thread waits for their group,
// loads until a barrier's phase is over.
enum class Engine { kStores, kProducts };
void commit(Engine engine);
void wait(Engine engine, int in_flight);
void fence();  // fence.proxy.async: engines see the thread's earlier accesses

void load(const void* barrier, const void* to, int bytes);
void store(const void* from, int bytes);
// A product: each thread gives its registers of a factor or of the result. Then the warpgroup begins the product, and
// reads its operands in shared memory.
void give_to_product(const void* registers, int bytes, bool is_result);
void begin_product();
void read_operand(const void* from, int bytes);

// Global memory, touched by a thread or by TMA. Before the thread's wait for the launch ahead, or a barrier after such
// a wait, the kernel may only touch the parameters that it declares (launches.h).
void wait_for_launch();
void touch(const void* global);

// Accesses of a thread itself.
void read(const void* from, int bytes);
void write(const void* to, int bytes);

}  // namespace emulator::races
