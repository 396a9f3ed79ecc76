// decode_gated_delta_net on a GPU: one kernel for a token of each sequence, or the parts one after the other.
#include "decode_region.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "checks.h"
#include "chunks.h"
#include "contents.h"
#include "gpu/arguments.h"
#include "gpu/decode.h"
#include "gpu/head_dims.h"
#include "gpu/override.h"
#include "gpu/runtime/device.h"
#include "gpu/runtime/stream.h"
#include "gpu/states.h"
#include "kernels.h"
#include "output.h"

namespace flash_qla {

namespace {

constexpr int64_t kConvTaps = 4;                               // of the kernel's convolution
constexpr int64_t kTurnRows = kDecodeWarps * kDecodeWarpRows;  // value rows of a CTA at a time

int64_t values_of(const DecodeCall& rule) { return rule.group() * rule.V; }  // of a key head

kernels::DecodeRegionParams instance_of(const DecodeCall& rule) {
  return {.dtype = instance_dtype(rule.dtype),
          .K = instance_K(rule.K),
          .state_dtype = instance_dtype(rule.state_pool.scalar_type())};
}

// The CTAs of a key head, a cluster, and the value rows of each.
struct Cluster {
  int64_t ctas, rows;
};

// As many CTAs as a cluster may have if the SMs hold all of them at a time. Else half as many, because each CTA
// computes q and k.
Cluster cluster_of(const DecodeCall& rule, int64_t at_a_time) {
  const int64_t turns = ceil_div(values_of(rule), kTurnRows), most = std::min<int64_t>(kRegionCtas, turns);
  int64_t ctas = std::bit_floor(static_cast<uint64_t>(most));
  if (ctas > 1 && rule.N * rule.H_k * ctas > at_a_time) {
    ctas /= 2;
  }
  return {.ctas = ctas, .rows = ceil_div(turns, ctas) * kTurnRows};
}

// The rows of key heads of a tensor [B, T, ..], from channel `offset` on. Without a dimension of key heads these are
// `head` elements apart.
kernels::RegionRows rows_of(const Tensor& x, bool by_key_heads, int64_t head, int64_t offset = 0) {
  return {.data = static_cast<const char*>(x.const_data_ptr()) + offset * static_cast<int64_t>(x.element_size()),
          .token = x.stride(0),
          .head = by_key_heads ? x.stride(2) : head};
}

// Whether the dimensions from `first` on are contiguous.
bool is_contiguous_from(const Tensor& x, int64_t first) {
  int64_t stride = 1;
  for (int64_t dim = x.dim() - 1; dim >= first; --dim) {
    if (x.size(dim) > 1 && x.stride(dim) != stride) {
      return false;
    }
    stride *= x.size(dim);
  }
  return true;
}

// The lanes that share a head's sum of squares, as in the kernel gated_rms_norm.
int64_t norm_lanes(int64_t V) {
  constexpr int64_t kChannels = 8, kLanes = 32;
  return static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(ceil_div(V, V <= kChannels * kLanes ? kChannels : 2 * kChannels))));
}

bool fits_one_kernel(const DecodeRegion& region) {
  const DecodeCall& rule = region.rule();
  const RegionArguments& r = region.arguments();
  const Gpu& gpu = gpu_of(r.mixed);
  const bool runs = !current_overrides().portable &&
                    std::ranges::any_of(kernels::kDecodeRegionArchitectures,
                                        [&](const char* name) { return runs_on(name, gpu.major, gpu.minor); });
  if (!runs || rule.T != 1 || has_wide_keys(rule.K) || !kernels::is_compiled(instance_of(rule))) {
    return false;
  }
  const Cluster smallest = cluster_of(rule, 0);
  const Convolution& c = region.convolution();
  const Tensor& windows = *c.initial_state;
  const bool fits_filter = c.W == kConvTaps && has_dtype(c.weight, c.dtype) && is_aligned(c.weight) &&
                           (!c.bias || has_dtype(*c.bias, c.dtype));
  const bool fits_windows =
      has_dtype(windows, c.dtype) && c.D * windows.stride(1) + c.columns * windows.stride(2) <= INT32_MAX;
  return fits_filter && fits_windows && rule.V % kDecodeWarpRows == 0 && values_of(rule) <= kRegionValues &&
         smallest.rows <= kRegionRows && is_contiguous_from(r.mixed, r.mixed.dim() - 1) &&
         is_contiguous_from(r.z, r.z.dim() == 5 ? 3 : 2) && is_contiguous_from(r.a, r.a.dim() - 1) &&
         is_contiguous_from(r.b, r.b.dim() - 1);
}

void launch(const DecodeRegion& region, const Tensor& y) {
  const DecodeCall& rule = region.rule();
  const RegionArguments& r = region.arguments();
  Convolution convolution = region.convolution();
  make_canonical(convolution);
  Tensor norm_weight = r.norm_weight;
  make_contiguous(rule.op, norm_weight, norm_weight.scalar_type());
  std::optional<Tensor> A_log = rule.A_log, dt_bias = rule.dt_bias;
  for (std::optional<Tensor>* tensor : {&A_log, &dt_bias}) {
    if (*tensor) {
      make_contiguous(rule.op, **tensor, (*tensor)->scalar_type());
    }
  }

  const kernels::DecodeRegionParams instance = instance_of(rule);
  const int64_t at_a_time = gpu_of(r.mixed).card.sm_count * kernels::facts_of(instance).ctas;
  const Cluster cluster = cluster_of(rule, at_a_time);
  const bool mixed_by_heads = r.mixed.dim() == 4;
  const int64_t K = rule.K, values = values_of(rule), keys = mixed_by_heads ? K : rule.H_k * K;
  const Tensor& windows = *convolution.initial_state;
  const int64_t waves = instance.state_dtype == kernels::Dtype::kFloat32 ? 1 : 2;
  kernels::decode_region(
      {.inputs = {.q = rows_of(r.mixed, mixed_by_heads, K),
                  .k = rows_of(r.mixed, mixed_by_heads, K, keys),
                  .v = rows_of(r.mixed, mixed_by_heads, values, 2 * keys),
                  .z = rows_of(r.z, r.z.dim() == 5, values),
                  .a = rows_of(r.a, r.a.dim() == 4, rule.group()),
                  .b = rows_of(r.b, r.b.dim() == 4, rule.group()),
                  .A_log = data(A_log),
                  .dt_bias = data(dt_bias),
                  .activations = gate_activation(r.a, *A_log, dt_bias) | beta_activation(r.b, rule.allow_neg_eigval),
                  .scale = static_cast<float>(*rule.scale),
                  .conv_weight = convolution.weight.const_data_ptr(),
                  .conv_bias = data(convolution.bias),
                  .norm_weight = norm_weight.const_data_ptr(),
                  .norm_weight_dtype = dtype_code(norm_weight),
                  .norm_lanes = norm_lanes(rule.V),
                  .eps = static_cast<float>(r.norm_eps),
                  .is_sigmoid = (r.norm_activation == "sigmoid")},
       .windows = {.numbers = windows.mutable_data_ptr(),
                   .slot = windows.stride(0),
                   .channel = windows.stride(1),
                   .column = windows.stride(2),
                   .columns = convolution.columns},
       .slots = {.state_indices = index_table(convolution.pool->state_indices),
                 .null_index = rule.null_index,
                 .slots = rule.slots()},
       .state_pool = rule.state_pool.mutable_data_ptr(),
       .slot_stride = rule.state_pool.stride(0),
       .state_dtype_code = dtype_code(rule.state_pool),
       .y = y.mutable_data_ptr(),
       .N = rule.N,
       .H_k = rule.H_k,
       .group = rule.group(),
       .key_dim = K,
       .value_dim = rule.V,
       .inverse_value_dim = 1.f / static_cast<float>(rule.V),
       .ctas = cluster.ctas,
       .rows = cluster.rows,
       .inverse_rows = 1.f / static_cast<float>(cluster.rows),
       .early = first_places(rule.N, rule.H_k * cluster.ctas, waves, at_a_time)},
      instance, current_stream(r.mixed));
}

}  // namespace

Tensor decode_region_cuda(const DecodeRegion& region) {
  const DecodeCall& rule = region.rule();
  check_decode_on_gpu(rule);
  if (contents_are_checked()) {
    check_decode_tables(rule);
  }
  if (!fits_one_kernel(region)) {
    return region.run_parts<convolve_cuda, decode_cuda, gated_rms_norm_cuda>();
  }
  const DeviceGuard guard = make_current(region.arguments().mixed);
  Tensor y = allocate_output(rule, rule.out, region.arguments().mixed);
  if (rule.N > 0) {
    launch(region, y);
  }
  return output_as_returned(rule, rule.out, std::move(y));
}

}  // namespace flash_qla
