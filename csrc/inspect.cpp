#include "inspect.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "chunks.h"
#include "cpu/sequences.h"
#include "gpu/head_dims.h"
#include "gpu/override.h"
#include "gpu/runtime/device.h"

namespace flash_qla {
namespace {

const char* keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

const char* error_of(auto action) {
  try {
    action();
    return nullptr;
  } catch (const std::exception& error) {
    return keep(error.what());
  }
}

// Sets the field with this name.
template <typename Direction>
void set(Direction& shape, std::string_view name, int64_t value) {
  bool is_set = false;
  const auto set_if_named = [&]<typename AField>(const AField& field) {
    if (name == field.name) {
      field.in(shape) = static_cast<typename AField::Type>(value);
      is_set = true;
    }
  };
  const auto fields = std::tuple_cat(Direction::sizes(), Direction::options());
  std::apply([&](const auto&... field) { (set_if_named(field), ...); }, fields);
  if (!is_set) {
    throw std::invalid_argument("flash_qla: a shape has no field " + std::string(name));
  }
}

// Asks `ask` for a shape over ranks.
template <typename Direction, typename Record>
int64_t workspace_bytes(const char* (*ask)(const Direction*, Record*) noexcept, int64_t count, const char* const* names,
                        const int64_t* values) noexcept {
  Direction shape{};
  Record dispatch{};
  const char* const error = error_of([&] {
    for (int64_t i = 0; i < count; ++i) {
      set(shape, names[i], values[i]);
    }
    shape.over_ranks = true;
  });
  return error == nullptr && ask(&shape, &dispatch) == nullptr ? dispatch.workspace_bytes : -1;
}

void require(bool holds, const std::string& function, const char* name, int64_t value, const char* expected) {
  if (!holds) {
    throw std::invalid_argument(function + name + " is " + std::to_string(value) + ", expected " + expected);
  }
}

// Throws for a shape that no call of `direction`_dispatch has.
void require_possible(const char* direction, const Shape& shape) {
  const std::string function = std::string("flash_qla._C.") + direction + "_dispatch: ";
  require(shape.B >= 0, function, "B", shape.B, "at least 0");
  require(shape.T >= 0, function, "T", shape.T, "at least 0");
  require(shape.N > 0, function, "N", shape.N, "at least 1");
  require(shape.H_k > 0, function, "H_k", shape.H_k, "at least 1");
  require(shape.H_v > 0 && shape.H_v % shape.H_k == 0, function, "H_v", shape.H_v, "a multiple of H_k");
  require(shape.card.sm_count > 0, function, "sm_count", shape.card.sm_count, "at least 1");
  require(shape.card.sm_mhz > 0, function, "sm_mhz", shape.card.sm_mhz, "at least 1");
  require(shape.card.memory_gb_s > 0, function, "memory_gb_s", shape.card.memory_gb_s, "at least 1");
  const std::string step = "a multiple of " + std::to_string(kHeadDimStep) + " up to ";
  require(is_key_dim(shape.K), function, "K", shape.K, (step + std::to_string(kMostKeyDim)).c_str());
  require(is_value_dim(shape.V), function, "V", shape.V, (step + std::to_string(kMostValueDim)).c_str());
}

// Throws for checkpoints that no prefill has.
void require_possible_checkpoints(const ForwardShape& shape) {
  const std::string function = "flash_qla._C.forward_dispatch: ";
  const int64_t every = shape.checkpoint_every;
  require(every >= 0, function, "checkpoint_every", every, "at least 0");
  require(every > 0 || !shape.resumable, function, "resumable", shape.resumable, "False without checkpoint_every");
  require(every % kChunk == 0 || shape.resumable, function, "resumable", shape.resumable,
          ("True with checkpoint_every " + std::to_string(every)).c_str());
}

}  // namespace

extern "C" {

const KernelInfo* flash_qla_kernels(int64_t* count) noexcept {
  *count = static_cast<int64_t>(kernel_registry().size());
  return kernel_registry().data();
}

BuildInfo flash_qla_build_info() noexcept {
  return {FLASH_QLA_VERSION, toolchain().tilelang, toolchain().cuda, FLASH_QLA_TORCH_TARGET};
}

bool flash_qla_runs_on(const char* architecture, int major, int minor) noexcept {
  return runs_on(architecture, major, minor);
}

int flash_qla_driver_cuda_version() noexcept { return driver_cuda_version(); }

const GpuInfo* flash_qla_gpus(int64_t* count) noexcept {
  thread_local std::vector<Gpu> visible;
  thread_local std::vector<GpuInfo> plain;
  visible = gpus();
  plain.clear();
  for (const Gpu& gpu : visible) {
    plain.push_back({gpu.name.c_str(), gpu.major, gpu.minor, gpu.card});
  }
  *count = static_cast<int64_t>(plain.size());
  return plain.data();
}

const char* flash_qla_obstacle(int driver_cuda_version, int major, int minor) noexcept {
  return keep(obstacle(driver_cuda_version, major, minor));
}

const char* flash_qla_refusal(int driver_cuda_version) noexcept { return keep(refusal(driver_cuda_version)); }

const char* flash_qla_forward_dispatch(const ForwardShape* shape, ForwardDispatch* dispatch) noexcept {
  return error_of([&] {
    require_possible("forward", *shape);
    require_possible_checkpoints(*shape);
    *dispatch = dispatch_forward(*shape);
  });
}

const char* flash_qla_backward_dispatch(const BackwardShape* shape, BackwardDispatch* dispatch) noexcept {
  return error_of([&] {
    require_possible("backward", *shape);
    *dispatch = dispatch_backward(*shape);
  });
}

const char* flash_qla_exchange_overrides(const Override* forward, const Override* backward, const bool* portable,
                                         Overrides* previous) noexcept {
  return error_of([&] { *previous = exchange_overrides(forward, backward, portable); });
}

int64_t flash_qla_exchange_slow_path_was_said(int64_t said) noexcept { return exchange_slow_path_was_said(said != 0); }

int64_t flash_qla_most_key_dim() noexcept { return kMostKeyDim; }

int64_t flash_qla_card(int64_t device, int64_t* sm_mhz, int64_t* memory_gb_s, int64_t* portable) noexcept {
  Card card{};
  const char* const error = error_of([&] {
    card = gpu_at(device).card;
    *portable = runs_portable_kernels(gpu_at(device));
  });
  *sm_mhz = card.sm_mhz;
  *memory_gb_s = card.memory_gb_s;
  return error == nullptr ? card.sm_count : -1;
}

int64_t flash_qla_forward_workspace_bytes(int64_t count, const char* const* names, const int64_t* values) noexcept {
  return workspace_bytes(flash_qla_forward_dispatch, count, names, values);
}

int64_t flash_qla_backward_workspace_bytes(int64_t count, const char* const* names, const int64_t* values) noexcept {
  return workspace_bytes(flash_qla_backward_dispatch, count, names, values);
}

}  // extern "C"

}  // namespace flash_qla
