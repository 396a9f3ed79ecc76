// The compiled kernel instances, one for each architecture of an instance, and the tools that built them.
// build_tools/registry.py writes the list; inspect.cpp reads it.
#pragma once

#include <span>

namespace flash_qla {

struct KernelInfo {
  const char* name;    // the instance's, such as replay_states_bf16_K128
  const char* kernel;  // such as replay_states
  const char* params;  // "key=value key=value"
  const char* architecture;
  int threads;    // per CTA
  int registers;  // per thread, as ptxas assigned them; 0 for PTX, as what follows but dynamic_shared_bytes
  int static_shared_bytes;
  int dynamic_shared_bytes;
  int spill_bytes;  // stores + loads
  int stack_bytes;
};

struct Toolchain {
  const char* tilelang;
  const char* cuda;
};

std::span<const KernelInfo> kernel_registry();
const Toolchain& toolchain();

}  // namespace flash_qla
