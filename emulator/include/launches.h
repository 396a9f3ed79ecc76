// Programmatic dependent launches: which launches have surely ended when a kernel starts that may overlap the one
// ahead. On a GPU such a kernel starts as soon as all CTAs of the kernel ahead have triggered or ended. Here launches
// run one after the other, and the rules below decide. A kernel declares what it touches before its wait: EARLY in
// kernels_tl/core/common.py.
//
// `start` of launch n is the last launch that has surely ended, with all before it, when n starts:
//
//   n does not overlap                             n - 1
//   a CTA of n - 1 waited before it triggered      n - 2, because the wait was for n - 2
//   no CTA of n - 1 triggered                      n - 2, because n - 1 waited for n - 2 before its end
//   otherwise                                      start of n - 1
//
// All kernels of others before a call of an op count as one launch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emulator::launches {

// A parameter that a kernel touches before its wait.
struct Early {
  std::string parameter;
  std::vector<std::string> after;  // kernels, "caller" or "hint"
  int condition;                   // only if this argument is not 0; -1: always
};

// A parameter in memory: a pointer, or a descriptor of TMA.
struct Tensor {
  std::string parameter;
  int argument;
  bool is_described;
};

struct Kernel {
  std::string name;  // the kernel's name, without the instance's parameters
  std::vector<Tensor> tensors;
  std::vector<Early> early;
};

void begin_call();  // of an op
// Fails unless each parameter that the kernel may touch early is safe by then: its `after` has ended.
void begin(const Kernel& kernel, bool overlaps, void** arguments);
void begin_cta();
void wait();     // by a thread, for the launch ahead
void trigger();  // by a thread: the next launch may start
void end();      // fails if the kernel overlaps the one ahead and no thread has waited

// Whether a thread that has not waited may touch this address of global memory. Memory between the addresses of two
// parameters counts as the first one's. `parameter` gets its name.
bool may_touch(const void* global, std::string& parameter);

}  // namespace emulator::launches
