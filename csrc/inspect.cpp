#include "inspect.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device.h"
#include "gpu/head_dims.h"

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

void require(bool holds, const std::string& function, const char* name, int64_t value, const char* expected) {
  if (!holds) {
    throw std::invalid_argument(function + name + " is " + std::to_string(value) + ", expected " + expected);
  }
}

// A shape that a call can have, of `direction`_dispatch.
template <typename Shape>
void require_possible(const char* direction, const Shape& shape) {
  const std::string function = std::string("flash_qla._C.") + direction + "_dispatch: ";
  require(shape.B >= 0, function, "B", shape.B, "at least 0");
  require(shape.T >= 0, function, "T", shape.T, "at least 0");
  require(shape.N > 0, function, "N", shape.N, "at least 1");
  require(shape.H_k > 0, function, "H_k", shape.H_k, "at least 1");
  require(shape.H_v > 0 && shape.H_v % shape.H_k == 0, function, "H_v", shape.H_v, "a multiple of H_k");
  require(shape.card.sm_count > 0, function, "sm_count", shape.card.sm_count, "at least 1");
  const std::string step = "a multiple of " + std::to_string(kHeadDimStep) + " up to ";
  require(is_key_dim(shape.K), function, "K", shape.K, (step + std::to_string(kMostKeyDim)).c_str());
  require(is_value_dim(shape.V), function, "V", shape.V, (step + std::to_string(kMostValueDim)).c_str());
}

}  // namespace

extern "C" {

const KernelInfo* flash_qla_kernels(int64_t* count) noexcept {
  *count = static_cast<int64_t>(kernel_registry().size());
  return kernel_registry().data();
}

BuildInfo flash_qla_build_info() noexcept {
  return {FLASH_QLA_VERSION, toolchain().tilelang, toolchain().cuda, toolchain().arch, FLASH_QLA_TORCH_TARGET};
}

int flash_qla_driver_cuda_version() noexcept { return driver_cuda_version(); }

const GpuInfo* flash_qla_gpus(int64_t* count) noexcept {
  thread_local std::vector<Gpu> found;
  thread_local std::vector<GpuInfo> plain;
  found = gpus();
  plain.clear();
  for (const Gpu& gpu : found) {
    plain.push_back({gpu.name.c_str(), gpu.major, gpu.minor, gpu.card.sm_count});
  }
  *count = static_cast<int64_t>(plain.size());
  return plain.data();
}

const char* flash_qla_obstacle(int driver_cuda_version, int major, int minor) noexcept {
  return keep(obstacle(driver_cuda_version, major, minor));
}

const char* flash_qla_forward_dispatch(const ForwardShape* shape, ForwardDispatch* dispatch) noexcept {
  return error_of([&] {
    require_possible("forward", *shape);
    *dispatch = dispatch_forward(*shape);
  });
}

const char* flash_qla_backward_dispatch(const BackwardShape* shape, BackwardDispatch* dispatch) noexcept {
  return error_of([&] {
    require_possible("backward", *shape);
    *dispatch = dispatch_backward(*shape);
  });
}

const char* flash_qla_exchange_overrides(const Override* forward, const Override* backward,
                                         Overrides* previous) noexcept {
  return error_of([&] { *previous = exchange_overrides(forward, backward); });
}

int64_t flash_qla_most_key_dim() noexcept { return kMostKeyDim; }

int64_t flash_qla_forward_workspace_bytes(int64_t B, int64_t T, int64_t N, int64_t H_k, int64_t H_v, int64_t K,
                                          int64_t V, bool varlen, int sm_count, bool auto_cp,
                                          bool use_qk_l2norm) noexcept {
  const ForwardShape shape{.B = B,
                           .T = T,
                           .N = N,
                           .H_k = H_k,
                           .H_v = H_v,
                           .varlen = varlen,
                           .card = {sm_count, kH100.cycles_per_us, kH100.bytes_per_us},
                           .auto_cp = auto_cp,
                           .low_level = false,
                           .use_qk_l2norm = use_qk_l2norm,
                           .output_h = false,
                           .fp16 = false,
                           .K = K,
                           .V = V,
                           .in_halves = true};
  return dispatch_forward(shape).workspace_bytes;
}

int64_t flash_qla_backward_workspace_bytes(int64_t B, int64_t T, int64_t N, int64_t H_k, int64_t H_v, int64_t K,
                                           int64_t V, bool varlen, int sm_count, bool auto_cp, bool use_qk_l2norm,
                                           bool activations) noexcept {
  const BackwardShape shape{.B = B,
                            .T = T,
                            .N = N,
                            .H_k = H_k,
                            .H_v = H_v,
                            .varlen = varlen,
                            .card = {sm_count, kH100.cycles_per_us, kH100.bytes_per_us},
                            .auto_cp = auto_cp,
                            .use_qk_l2norm = use_qk_l2norm,
                            .activations = activations,
                            .K = K,
                            .V = V,
                            .in_halves = true};
  return dispatch_backward(shape).workspace_bytes;
}

}  // extern "C"

}  // namespace flash_qla
