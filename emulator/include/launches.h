// Programmatic dependent launches: which launches have ended when a kernel starts that need not wait for the one ahead.
// Launches run one after the other here; on a GPU such a kernel starts as soon as all CTAs of the one ahead have
// triggered it or ended. What a kernel touches before its wait it declares: EARLY in kernels_tl/core/common.py.
//
// Of launch n, `start` is the last launch that has surely ended, with all before it, when n starts:
//
//   n does not overlap                             n - 1
//   a CTA of n - 1 has waited before it triggered  n - 2, because n - 1 has waited for that
//   no CTA of n - 1 has triggered                  n - 2, likewise
//   n - 1 triggered without having waited          start of n - 1
//
// Kernels of others count as one launch before each call of an op.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emulator::launches {

// A parameter that a kernel touches before its wait.
struct Early {
  std::string parameter;
  std::vector<std::string> after;  // kernels, "caller" or "hint"
  int condition;                   // argument that has to be other than 0; -1: none
};

// A parameter in memory: a pointer, or a descriptor of TMA.
struct Tensor {
  std::string parameter;
  int argument;
  bool is_described;
};

struct Kernel {
  std::string name;  // without what makes an instance
  std::vector<Tensor> tensors;
  std::vector<Early> early;
};

void begin_call();  // of an op
// Fails unless all that the kernel may touch early is there.
void begin(const Kernel& kernel, bool overlaps, void** arguments);
void begin_cta();
void wait();     // of a thread for the launch ahead
void trigger();  // by a thread: the next launch may start
void end();      // fails if the kernel overlaps the one ahead and no thread has waited

// Whether a thread that has not waited may touch global memory. Memory that lies between two parameters is taken for
// that of the first one, whose name `parameter` gets.
bool may_touch(const void* global, std::string& parameter);

}  // namespace emulator::launches
