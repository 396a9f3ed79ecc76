// What was compiled into the library: one entry per kernel instance, and the tools it came from.
// Filled in by build_tools/codegen.py; read through inspect.cpp.
#pragma once

#include <span>

namespace flash_qla {

struct KernelInfo {
  const char* name;    // of the instance, e.g. replay_states_bf16_K128
  const char* kernel;  // e.g. replay_states
  const char* params;  // "key=value key=value"
  int threads;         // per block
  int registers;       // per thread, as ptxas assigned them
  int static_shared_bytes;
  int dynamic_shared_bytes;
  int spill_bytes;  // stores + loads
  int stack_bytes;
};

struct Toolchain {
  const char* tilelang;
  const char* cuda;
  const char* arch;
};

std::span<const KernelInfo> kernel_registry();
const Toolchain& toolchain();

}  // namespace flash_qla
