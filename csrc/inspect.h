// The library's C functions, besides its ops: what was compiled, whether it runs here, and what a call would launch.
// flash_qla._C wraps all but three. Those three use plain integers, for flash_qla/_binary.py, which calls them by
// ctypes because the ops work without _C.
//
// The library and _C each have a libstdc++ of their own, so only plain structs pass between them, and no exceptions.
// Pointers to text or to several items are valid until the thread's next question. An error is a sentence; nullptr:
// none.
#pragma once

#include <cstdint>
#include <type_traits>

#include "gpu/dispatch.h"
#include "gpu/override.h"
#include "gpu/runtime/registry.h"

namespace flash_qla {

struct BuildInfo {
  const char* version;
  const char* tilelang;
  const char* cuda;
  const char* torch_target;
};

struct GpuInfo {
  const char* name;
  int major, minor;
  Card card;
};

static_assert(std::is_trivially_copyable_v<KernelInfo> && std::is_trivially_copyable_v<ForwardShape> &&
              std::is_trivially_copyable_v<ForwardDispatch> && std::is_trivially_copyable_v<BackwardShape> &&
              std::is_trivially_copyable_v<BackwardDispatch> && std::is_trivially_copyable_v<Overrides>);

extern "C" {
#pragma GCC visibility push(default)

const KernelInfo* flash_qla_kernels(int64_t* count) noexcept;
BuildInfo flash_qla_build_info() noexcept;

// See gpu/runtime/device.h.
bool flash_qla_runs_on(const char* architecture, int major, int minor) noexcept;
int flash_qla_driver_cuda_version() noexcept;
const GpuInfo* flash_qla_gpus(int64_t* count) noexcept;
const char* flash_qla_obstacle(int driver_cuda_version, int major, int minor) noexcept;
const char* flash_qla_refusal(int driver_cuda_version) noexcept;

// See gpu/dispatch.h. An error: no call has this shape, or no kernel was compiled for its head dimensions.
const char* flash_qla_forward_dispatch(const ForwardShape* shape, ForwardDispatch* dispatch) noexcept;
const char* flash_qla_backward_dispatch(const BackwardShape* shape, BackwardDispatch* dispatch) noexcept;

// See gpu/override.h.
const char* flash_qla_exchange_overrides(const Override* forward, const Override* backward, const bool* portable,
                                         Overrides* previous) noexcept;

// Sets whether this process has said that the CPU is slow, 1 or 0, and returns whether it had.
int64_t flash_qla_exchange_slow_path_was_said(int64_t said) noexcept;

// The most key channels of a head on a GPU.
int64_t flash_qla_most_key_dim() noexcept;

// The SMs of the GPU `device`, its other figures (gpu/card.h), and whether calls on it run the portable kernels. -1:
// this machine has no such GPU.
int64_t flash_qla_card(int64_t device, int64_t* sm_mhz, int64_t* memory_gb_s, int64_t* portable) noexcept;

// Bytes of a GPU's workspace between begin and finish (ranks.h). The shape (gpu/shape.h) has `count` fields by
// name, and defaults for the others. -1: the shape has no such field, or no call has this shape.
int64_t flash_qla_forward_workspace_bytes(int64_t count, const char* const* names, const int64_t* values) noexcept;
int64_t flash_qla_backward_workspace_bytes(int64_t count, const char* const* names, const int64_t* values) noexcept;

// Makes `handle` get the warnings instead of PyTorch, which prints them. An error that it returns ends the call.
void flash_qla_on_warning(const char* (*handle)(const char* text) noexcept) noexcept;

#pragma GCC visibility pop
}  // extern "C"

}  // namespace flash_qla
