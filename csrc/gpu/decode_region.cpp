// decode_gated_delta_net on a GPU: one kernel, for one token of each sequence or for up to kDecodeTokens; or the parts
// one after the other.
#include "decode_region.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <utility>

#include "checks.h"
#include "chunks.h"
#include "contents.h"
#include "gpu/arguments.h"
#include "gpu/decode_launch.h"
#include "gpu/head_dims.h"
#include "gpu/override.h"
#include "gpu/runtime/device.h"
#include "gpu/runtime/stream.h"
#include "gpu/states.h"
#include "kernels.h"
#include "output.h"

namespace flash_qla {

namespace {

constexpr int64_t kConvTaps = 4;  // of the kernel's convolution

int64_t values_of(const DecodeCall& rule) { return rule.group() * rule.V; }  // of a key head

// Instance: DecodeRegionParams or DecodeRegionDraftsParams.
template <typename Instance>
Instance instance_of(const DecodeCall& rule) {
  return {.dtype = instance_dtype(rule.dtype),
          .K = instance_K(rule.K),
          .state_dtype = instance_dtype(rule.state_pool.scalar_type())};
}

// The CTAs of a key head, a cluster, and the value rows of each.
struct Cluster {
  int64_t ctas, rows;
};

// As many CTAs as a cluster may have if the SMs hold all of them at a time. Else half as many, if a CTA then has at
// most `facts.rows`, because each CTA computes q and k. A CTA has facts.wave_rows value rows at a time.
Cluster cluster_of(const DecodeCall& rule, int64_t at_a_time, const auto& facts) {
  const int64_t waves = ceil_div(values_of(rule), facts.wave_rows), most = std::min<int64_t>(waves, kRegionCtas);
  const auto cluster = [&](int64_t ctas) { return Cluster{ctas, ceil_div(waves, ctas) * facts.wave_rows}; };
  const int64_t ctas = std::bit_floor(static_cast<uint64_t>(most));
  const bool is_full = rule.N * rule.H_k * ctas > at_a_time;
  const bool halves = is_full && ctas > 1 && cluster(ctas / 2).rows <= facts.rows;
  return cluster(halves ? ctas / 2 : ctas);
}

// mixed, z, a and b, in either form.
struct TokenTensors {
  Tensor mixed, z, a, b;
};

// The rows of key heads of a tensor [B, T, ..], from channel `offset` on. Without a dimension of key heads these are
// `head` elements apart.
kernels::RegionRows rows_of(const Tensor& x, bool by_key_heads, int64_t head, int64_t offset = 0) {
  return {.data = static_cast<const char*>(x.const_data_ptr()) + offset * static_cast<int64_t>(x.element_size()),
          .token = x.size(1) == 1 ? x.stride(0) : x.stride(1),
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

// Whether the rows of key heads begin at multiples of 16 bytes.
bool has_aligned_rows(const Tensor& x, bool by_key_heads) {
  constexpr int64_t kElements = 8;
  const auto fits = [&](int64_t dim) { return x.size(dim) <= 1 || x.stride(dim) % kElements == 0; };
  return is_aligned(x) && fits(0) && fits(1) && (!by_key_heads || fits(2));
}

// Copies the tensors whose rows a kernel cannot read. in_pieces: rows are read in 16 bytes, of several tokens.
void make_readable(const char* op, TokenTensors& t, bool in_pieces) {
  for (const auto& [x, rank] : {std::pair{&t.mixed, 3}, {&t.z, 4}, {&t.a, 3}, {&t.b, 3}}) {
    const bool by_key_heads = x->dim() > rank, has_pieces = in_pieces && (x == &t.mixed || x == &t.z);
    if (!is_contiguous_from(*x, by_key_heads ? 3 : 2) || !tokens_are_even(*x) ||
        (has_pieces && !has_aligned_rows(*x, by_key_heads))) {
      make_aligned(op, *x, x->scalar_type());
    }
  }
}

bool runs_here(const DecodeRegion& region, const auto& architectures) {
  const Gpu& gpu = gpu_of(region.arguments().mixed);
  return !current_overrides().portable &&
         std::ranges::any_of(architectures, [&](const char* name) { return runs_on(name, gpu.major, gpu.minor); });
}

// Whether a kernel takes the call's sizes, dtypes and windows.
template <typename Instance>
bool fits(const DecodeRegion& region) {
  const DecodeCall& rule = region.rule();
  const auto instance = instance_of<Instance>(rule);
  if (has_wide_keys(rule.K) || !kernels::is_compiled(instance) || rule.K % kDecodeWarpRows != 0 ||
      rule.V % kDecodeWarpRows != 0 || values_of(rule) > kernels::facts_of(instance).values) {
    return false;
  }
  if (!region.has_convolution()) {
    return true;
  }
  const Convolution& c = region.convolution();
  const auto has_small_strides = [&](const Tensor& windows) {
    const int64_t dim = windows.dim();
    return c.D * windows.stride(dim - 2) + windows.size(dim - 1) * windows.stride(dim - 1) <= INT32_MAX;
  };
  const Tensor& windows = *region.windows().window_pool;
  const auto& kept = region.windows().intermediate_windows;
  return c.W == kConvTaps && has_dtype(c.weight, c.dtype) && (!c.bias || has_dtype(*c.bias, c.dtype)) &&
         has_dtype(windows, c.dtype) && has_small_strides(windows) && (!kept || has_small_strides(*kept));
}

// The parameters that a kernel reads as contiguous.
struct Parameters {
  std::optional<Tensor> conv_weight, conv_bias, A_log, dt_bias;
  Tensor norm_weight = undefined_tensor();

  explicit Parameters(const DecodeRegion& region)
      : A_log(region.rule().A_log), dt_bias(region.rule().dt_bias), norm_weight(region.arguments().norm_weight) {
    const char* const op = region.rule().op;
    if (region.has_convolution()) {
      const Convolution& convolution = region.convolution();
      conv_weight = convolution.weight;
      make_aligned(op, *conv_weight, convolution.dtype);
      conv_bias = convolution.bias;
    }
    make_contiguous(op, norm_weight, norm_weight.scalar_type());
    for (std::optional<Tensor>* tensor : {&conv_bias, &A_log, &dt_bias}) {
      if (*tensor) {
        make_contiguous(op, **tensor, (*tensor)->scalar_type());
      }
    }
  }
};

kernels::RegionInputs inputs_of(const DecodeRegion& region, const TokenTensors& t, const Parameters& p) {
  const DecodeCall& rule = region.rule();
  const RegionArguments& r = region.arguments();
  const bool by_heads = t.mixed.dim() == 4;
  const int64_t K = rule.K, values = values_of(rule), keys = by_heads ? K : rule.H_k * K;
  return {.q = rows_of(t.mixed, by_heads, K),
          .k = rows_of(t.mixed, by_heads, K, keys),
          .v = rows_of(t.mixed, by_heads, values, 2 * keys),
          .z = rows_of(t.z, t.z.dim() == 5, values),
          .a = rows_of(t.a, t.a.dim() == 4, rule.group()),
          .b = rows_of(t.b, t.b.dim() == 4, rule.group()),
          .A_log = data(p.A_log),
          .dt_bias = data(p.dt_bias),
          .activations = gate_activation(t.a, *p.A_log, p.dt_bias) | beta_activation(t.b, rule.allow_neg_eigval),
          .scale = static_cast<float>(*rule.scale),
          .conv_weight = data(p.conv_weight),
          .conv_bias = data(p.conv_bias),
          .norm_weight = p.norm_weight.const_data_ptr(),
          .norm_weight_dtype = dtype_code(p.norm_weight),
          .norm_lanes = norm_lanes(rule.V),
          .eps = static_cast<float>(r.norm_eps),
          .is_sigmoid = (r.norm_activation == "sigmoid")};
}

kernels::RegionWindows windows_of(const std::optional<Tensor>& pool) {
  if (!pool) {
    return {};
  }
  return {.window_pool = pool->mutable_data_ptr(),
          .slot = pool->stride(0),
          .channel = pool->stride(1),
          .column = pool->stride(2),
          .columns = pool->size(2)};
}

kernels::KeptWindows kept_windows_of(const std::optional<Tensor>& kept) {
  if (!kept) {
    return {};
  }
  return {.kept_windows = kept->mutable_data_ptr(),
          .window_row = kept->stride(0),
          .window_step = kept->stride(1),
          .window_channel = kept->stride(2),
          .window_column = kept->stride(3),
          .window_rows = kept->size(0),
          .window_steps = kept->size(1)};
}

// Those of the first sequences prefetch.
kernels::RegionGrid grid_of(const DecodeRegion& region, const auto& facts) {
  const DecodeCall& rule = region.rule();
  const int64_t at_a_time = gpu_of(region.arguments().mixed).card.sm_count * facts.ctas;
  const Cluster cluster = cluster_of(rule, at_a_time, facts);
  const int64_t waves = has_dtype(rule.state_pool, ScalarType::Float) ? 1 : 2;
  return {.N = rule.N,
          .H_k = rule.H_k,
          .group = rule.group(),
          .key_dim = rule.K,
          .value_dim = rule.V,
          .inverse_value_dim = 1.f / static_cast<float>(rule.V),
          .ctas = cluster.ctas,
          .rows = cluster.rows,
          .inverse_rows = 1.f / static_cast<float>(cluster.rows),
          .early = early_sequence_parts(rule.N, rule.H_k * cluster.ctas, waves, at_a_time)};
}

void launch_one_token(const DecodeRegion& region, const TokenTensors& tokens, const Tensor& y) {
  const DecodeCall& rule = region.rule();
  const Parameters parameters(region);
  std::optional<Tensor> slots = region.convolution().pool->state_indices;  // perhaps a column of a table
  const auto instance = instance_of<kernels::DecodeRegionParams>(rule);
  kernels::decode_region(
      {.inputs = inputs_of(region, tokens, parameters),
       .windows = windows_of(region.windows().window_pool),
       .slots = {.state_indices = readable_table(rule.op, slots), .null_index = rule.null_index, .slots = rule.slots()},
       .state_pool = rule.state_pool.mutable_data_ptr(),
       .slot_stride = rule.state_pool.stride(0),
       .state_dtype_code = dtype_code(rule.state_pool),
       .y = y.mutable_data_ptr(),
       .grid = grid_of(region, kernels::facts_of(instance))},
      instance, current_stream(y));
}

void launch_drafts(const DecodeRegion& region, const TokenTensors& tokens, const Tensor& y) {
  DecodeCall rule = region.rule();
  const Parameters parameters(region);
  const auto instance = instance_of<kernels::DecodeRegionDraftsParams>(rule);
  const Tensor* const kept = or_null(rule.intermediate_states);
  kernels::decode_region_drafts({.inputs = inputs_of(region, tokens, parameters),
                                 .windows = windows_of(region.windows().window_pool),
                                 .kept = kept_windows_of(region.windows().intermediate_windows),
                                 .indices = tables_of(rule),
                                 .slots = rule.slots(),
                                 .state_pool = rule.state_pool.mutable_data_ptr(),
                                 .kept_states = kept ? kept->mutable_data_ptr() : nullptr,
                                 .slot_stride = rule.state_pool.stride(0),
                                 .row_stride = kept ? kept->stride(0) : 0,
                                 .step_stride = kept ? kept->stride(1) : 0,
                                 .state_rows = kept ? kept->size(0) : 0,
                                 .state_steps = kept ? kept->size(1) : 0,
                                 .state_dtype_code = dtype_code(rule.state_pool),
                                 .y = y.mutable_data_ptr(),
                                 .tokens = rule.tokens(),
                                 .length = rule.T,
                                 .update_state = rule.update_state,
                                 .grid = grid_of(region, kernels::facts_of(instance))},
                                instance, current_stream(y));
}

[[noreturn]] void fail_for_drafts(const DecodeRegion& region) {
  fail(region.rule().op,
       "with an argument from cu_seqlens to parents, or without conv_weight, a GPU takes K of at most 128, H_v / H_k V "
       "of at most 512, K and V multiples of 8, at most 8 tokens of a sequence, 4 taps, and conv_weight, conv_bias and "
       "window_pool in the dtype of mixed; the call has K = ",
       region.rule().K, ", V = ", region.rule().V, ", T = ", region.rule().T);
}

}  // namespace

Tensor decode_region_cuda(const DecodeRegion& region) {
  const DecodeCall& rule = region.rule();
  const RegionArguments& r = region.arguments();
  check_decode_on_gpu(rule);
  TokenTensors tokens = {r.mixed, r.z, r.a, r.b};
  const bool is_plain = region.is_plain();
  const bool one_token = is_plain && rule.T == 1 && runs_here(region, kernels::kDecodeRegionArchitectures) &&
                         fits<kernels::DecodeRegionParams>(region);
  const bool is_short = rule.T <= kDecodeTokens || rule.cu_seqlens;
  const bool drafts = is_short && fits<kernels::DecodeRegionDraftsParams>(region) &&
                      (!is_plain || (rule.T > 1 && runs_here(region, kernels::kDecodeRegionDraftsArchitectures)));
  if (!is_plain) {
    check_gpu(rule.op, r.mixed, kernels::kDecodeRegionDraftsArchitectures);
    if (!drafts) {
      fail_for_drafts(region);
    }
  }
  if (contents_are_checked()) {
    drafts ? check_windows_of_drafts(region) : check_decode_tables(rule);
  }
  if (!one_token && !drafts) {
    return region.run_parts<convolve_cuda, store_windows_cuda, decode_cuda, gated_rms_norm_cuda>();
  }
  const DeviceGuard guard = make_current(r.mixed);
  Tensor y = allocate_output(rule, rule.out, r.mixed);
  if (rule.N == 0) {
    zero(y);
  } else if (rule.tokens() > 0) {
    make_readable(rule.op, tokens, /*in_pieces=*/drafts);
    drafts ? launch_drafts(region, tokens, y) : launch_one_token(region, tokens, y);
  }
  return output_as_returned(rule, rule.out, std::move(y));
}

}  // namespace flash_qla
