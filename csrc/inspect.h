// What flash_qla._C asks of the op library beside its ops: what was compiled, whether it runs here, what a call would
// launch. Each of the two binaries has a libstdc++ of its own, so between them go plain structs and no exceptions. What
// points to text or to several of something stays until the thread's next question, if not for good; an error is a
// sentence, or nullptr.
#pragma once

#include <cstdint>
#include <type_traits>

#include "gpu/dispatch.h"
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
              std::is_trivially_copyable_v<BackwardDispatch>);

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
const char* flash_qla_override_forward_dispatch(int64_t value_tile, int64_t segment_chunks, int64_t fused,
                                                int64_t cut_above, int64_t whole_tile) noexcept;
const char* flash_qla_backward_dispatch(const BackwardShape* shape, BackwardDispatch* dispatch) noexcept;
const char* flash_qla_override_backward_dispatch(int64_t segment_chunks, int64_t cut_above) noexcept;

// Who gets warnings from now on, instead of PyTorch, which prints them; an error that is returned ends the call.
void flash_qla_on_warning(const char* (*handle)(const char* text) noexcept) noexcept;

#pragma GCC visibility pop
}  // extern "C"

}  // namespace flash_qla
