// The library's C functions, beside its ops: what was compiled, whether it runs here, what a call would launch.
// flash_qla._C asks all but the three that take and give numbers alone: those flash_qla/_binary.py asks, by ctypes, as
// the ops' Python works without _C. Each of the two binaries has a libstdc++ of its own, so between them go plain
// structs and no exceptions. What points to text or to several of something stays until the thread's next question, if
// not for good; an error is a sentence, or nullptr.
#pragma once

#include <cstdint>
#include <type_traits>

#include "gpu/dispatch.h"
#include "gpu/override.h"
#include "gpu/registry.h"

namespace flash_qla {

struct BuildInfo {
  const char* version;
  const char* tilelang;
  const char* cuda;
  const char* arch;
  const char* torch_target;
};

struct GpuInfo {
  const char* name;
  int major, minor, sm_count;
};

static_assert(std::is_trivially_copyable_v<KernelInfo> && std::is_trivially_copyable_v<ForwardShape> &&
              std::is_trivially_copyable_v<ForwardDispatch> && std::is_trivially_copyable_v<BackwardShape> &&
              std::is_trivially_copyable_v<BackwardDispatch> && std::is_trivially_copyable_v<Overrides>);

extern "C" {
#pragma GCC visibility push(default)

const KernelInfo* flash_qla_kernels(int64_t* count) noexcept;
BuildInfo flash_qla_build_info() noexcept;

// As in gpu/device.h.
int flash_qla_driver_cuda_version() noexcept;
const GpuInfo* flash_qla_gpus(int64_t* count) noexcept;
const char* flash_qla_obstacle(int driver_cuda_version, int major, int minor) noexcept;

// As in gpu/dispatch.h, for shapes that a call can have and head dimensions that were compiled.
const char* flash_qla_forward_dispatch(const ForwardShape* shape, ForwardDispatch* dispatch) noexcept;
const char* flash_qla_backward_dispatch(const BackwardShape* shape, BackwardDispatch* dispatch) noexcept;

// As in gpu/override.h.
const char* flash_qla_exchange_overrides(const Override* forward, const Override* backward,
                                         Overrides* previous) noexcept;

// The most key channels of a head on a GPU.
int64_t flash_qla_most_key_dim() noexcept;

// Bytes of a GPU's workspace between the halves of a pass (halves.h), of a call with tokens whose shapes are possible.
int64_t flash_qla_forward_workspace_bytes(int64_t B, int64_t T, int64_t N, int64_t H_k, int64_t H_v, int64_t K,
                                          int64_t V, bool varlen, int sm_count, bool auto_cp,
                                          bool use_qk_l2norm) noexcept;
int64_t flash_qla_backward_workspace_bytes(int64_t B, int64_t T, int64_t N, int64_t H_k, int64_t H_v, int64_t K,
                                           int64_t V, bool varlen, int sm_count, bool auto_cp, bool use_qk_l2norm,
                                           bool activations) noexcept;

// Who gets warnings from now on, instead of PyTorch, which prints them; an error that is returned ends the call.
void flash_qla_on_warning(const char* (*handle)(const char* text) noexcept) noexcept;

#pragma GCC visibility pop
}  // extern "C"

}  // namespace flash_qla
