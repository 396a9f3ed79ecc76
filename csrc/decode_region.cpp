#include "decode_region.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "checks.h"
#include "contents.h"
#include "output.h"
#include "overlap.h"
#include "tensors.h"

namespace flash_qla {

namespace {

constexpr ConvolutionNames kNames = {.x = "mixed", .weight = "conv_weight", .bias = "conv_bias", .pool = "window_pool"};

// A stand-in for a tensor of this shape, of the same dtype and device: all of its elements are the first one of `like`.
Tensor shaped(const Tensor& like, std::initializer_list<int64_t> shape) {
  const std::vector<int64_t> strides(shape.size(), 0);
  return view(like, shape, strides);
}

// A tensor of groups of heads, [B, T, H_k, group, ..], with the heads in one dimension; the tensor itself if it has
// `rank` dimensions.
Tensor with_heads(const char* op, const Tensor& x, int64_t rank) {
  if (x.dim() == rank) {
    return x;
  }
  Tensor contiguous = x;
  make_contiguous(op, contiguous, x.scalar_type());
  std::vector<int64_t> shape(contiguous.sizes().begin(), contiguous.sizes().end());
  shape[2] *= shape[3];
  shape.erase(shape.begin() + 3);
  std::vector<int64_t> strides(contiguous.strides().begin(), contiguous.strides().end());
  strides.erase(strides.begin() + 2);
  return view(contiguous, shape, strides);
}

struct Sizes {
  int64_t B, T, H_k, H_v, K, V;
};

// Reads the sizes of mixed and state_pool.
Sizes read_sizes(const char* op, const Tensor& mixed, const Tensor& state_pool) {
  check_device(op, "state_pool", state_pool, mixed, kNames.x);
  check_rank(op, "state_pool", state_pool, 4, "[slots, H_v, V, K]");
  const int64_t rank = mixed.dim(), H_v = state_pool.size(1), V = state_pool.size(2), K = state_pool.size(3);
  check(rank == 3 || rank == 4, op, "mixed has ", rank,
        " dimensions, expected 3 or 4 ([B, T, 2 H_k K + H_v V] or [B, T, H_k, 2 K + H_v / H_k V])");
  const int64_t channels = rank == 3 ? mixed.size(2) : mixed.size(2) * mixed.size(3), keys = channels - H_v * V;
  check(K > 0 && keys > 0 && keys % (2 * K) == 0 && (rank == 3 || keys == 2 * K * mixed.size(2)), op, "mixed has ",
        channels, " channels, expected 2 H_k K + H_v V, of state_pool K = ", K, " and H_v V = ", H_v * V);
  const int64_t H_k = keys / (2 * K);
  check(H_v % H_k == 0, op, "mixed has ", H_k, " key heads, expected a divisor of the state_pool's H_v = ", H_v);
  return {.B = mixed.size(0), .T = mixed.size(1), .H_k = H_k, .H_v = H_v, .K = K, .V = V};
}

}  // namespace

DecodeRegion::DecodeRegion(const char* op, RegionArguments arguments, WindowArguments windows, DecodeArguments rule)
    : op_(op), arguments_(std::move(arguments)), windows_(std::move(windows)) {
  const RegionArguments& r = arguments_;
  const auto [B, T, H_k, H_v, K, V] = read_sizes(op, r.mixed, rule.state_pool);
  const int64_t group = H_v / H_k;
  const auto check_tokens = [&](const char* name, const Tensor& x, bool of_values) {
    check_device(op, name, x, r.mixed, kNames.x);
    if (x.dim() == (of_values ? 5 : 4)) {
      of_values ? check_shape(op, name, x, {B, T, H_k, group, V}, "[B, T, H_k, H_v / H_k, V]")
                : check_shape(op, name, x, {B, T, H_k, group}, "[B, T, H_k, H_v / H_k]");
    } else {
      of_values ? check_shape(op, name, x, {B, T, H_v, V}, "[B, T, H_v, V]")
                : check_shape(op, name, x, {B, T, H_v}, "[B, T, H_v]");
    }
  };
  check_tokens("z", r.z, true);
  check_same_dtype(op, "z", r.z, r.mixed, kNames.x);
  for (const auto& [name, tensor] : {std::pair{"a", &r.a}, std::pair{"b", &r.b}}) {
    check_tokens(name, *tensor, false);
    check_floating(op, name, *tensor);
  }

  make_convolution(rule, B, T, 2 * H_k * K + H_v * V);
  rule.q = rule.k = shaped(r.mixed, {B, T, H_k, K});
  rule.v = shaped(r.mixed, {B, T, H_v, V});
  const auto of_gates = [&](const Tensor& x) {
    return x.dim() == 4 && !contents_are_checked() ? shaped(x, {B, T, H_v}) : with_heads(op, x, 3);
  };
  rule.a = of_gates(r.a);
  rule.b = of_gates(r.b);
  if (rule.out) {
    check_device(op, "out", *rule.out, r.z, "z");
    check_same_dtype(op, "out", *rule.out, r.z, "z");
  }
  rule_ = make_decode_call(op, std::move(rule));
  check_norm(op,
             {.o = rule_.v, .z = rule_.v, .weight = r.norm_weight, .eps = r.norm_eps, .activation = r.norm_activation},
             /*is_backward=*/false, kNormOfRegion);
}

void DecodeRegion::make_convolution(const DecodeArguments& rule, int64_t B, int64_t T, int64_t D) {
  const auto& [weight, pool_of_windows, kept] = windows_;
  if (!weight) {
    for (const auto& [name, tensor] : {NamedTensor{"conv_bias", or_null(arguments_.conv_bias)},
                                       {"window_pool", or_null(pool_of_windows)},
                                       {"intermediate_windows", or_null(kept)}}) {
      check(tensor == nullptr, op_, name, " is a tensor, expected None without conv_weight");
    }
    return;
  }
  check(pool_of_windows.has_value(), op_, "window_pool is None, expected a tensor with conv_weight");
  check_rank(op_, kNames.pool, *pool_of_windows, 3, "[slots, D, columns]");
  PoolArguments pool;
  pool.state_pool = *pool_of_windows;
  pool.state_indices = *rule.state_indices;
  if (pool.state_indices.dim() == 2 && pool.state_indices.size(1) > 0) {
    const std::array shape = {pool.state_indices.size(0)}, strides = {pool.state_indices.stride(0)};
    pool.state_indices = view(pool.state_indices, shape, strides);  // window and state of a sequence: column 0
  }
  pool.null_index = rule.null_index;
  if (rule.num_accepted_tokens) {
    check(!rule.parents, op_,
          "parents is a tensor, expected None with num_accepted_tokens: accepted drafts are a chain");
    const int64_t W = weight->dim() > 1 ? weight->size(weight->dim() - 1) : 0;
    const int64_t steps = rule.state_indices->dim() == 2 ? rule.state_indices->size(1) : 1;
    const Tensor& x = *pool_of_windows;
    check(x.size(2) >= W - 2 + steps, op_, "window_pool has ", x.size(2), " columns, expected at least ", W - 2 + steps,
          " with num_accepted_tokens: W - 1, and one for each column of state_indices but the first");
    const std::array shape = {x.size(0), x.size(1), std::max<int64_t>(W - 1, 0)},
                     strides = {x.stride(0), x.stride(1), x.stride(2)};
    pool.state_pool = view(x, shape, strides);
  }
  convolution_ = make_convolution_on_pool(op_,
                                          {.x = shaped(arguments_.mixed, {B, T, D}),
                                           .weight = *weight,
                                           .bias = arguments_.conv_bias,
                                           .initial_state = std::nullopt,
                                           .cu_seqlens = rule.cu_seqlens,
                                           .dht = std::nullopt},
                                          std::move(pool), kNames);
  check(convolution_.initial_state->size(0) == rule.state_pool.size(0), op_, "window_pool has ",
        convolution_.initial_state->size(0), " slots, expected ", rule.state_pool.size(0), ", those of state_pool");
  if (kept) {
    const char* const name = "intermediate_windows";
    check_device(op_, name, *kept, arguments_.mixed, kNames.x);
    check_same_dtype(op_, name, *kept, *pool_of_windows, kNames.pool);
    check_rank(op_, name, *kept, 4, "[rows, steps, D, W - 1]");
    check_shape(op_, name, *kept, {kept->size(0), kept->size(1), D, convolution_.W - 1}, "[rows, steps, D, W - 1]");
    check(!rule.parents || !are_sliding(*kept), op_, name,
          " share memory from step to step, expected windows of their own with parents: only a chain's slide");
  }
}

bool DecodeRegion::is_plain() const {
  return has_convolution() && rule_.writes_back() && !rule_.cu_seqlens && !rule_.num_accepted_tokens &&
         !rule_.parents && !rule_.intermediate_states && !windows_.intermediate_windows;
}

Tensor DecodeRegion::packed_mixed() const {
  const Tensor& mixed = arguments_.mixed;
  if (mixed.dim() == 3) {
    return mixed;
  }
  const DecodeCall& c = rule_;
  const int64_t D = 2 * c.H_k * c.K + c.H_v * c.V;
  Tensor packed = new_empty(op_, mixed, {c.B, c.T, D}, mixed.scalar_type());
  const int64_t values = c.group() * c.V, channel = mixed.stride(3);
  const auto copy_part = [&](int64_t from, int64_t to, int64_t channels) {
    const std::array shape = {c.B, c.T, c.H_k, channels};
    Tensor part = view(packed, shape, {c.T * D, D, channels, 1}, to);
    copy(part, view(mixed, shape, {mixed.stride(0), mixed.stride(1), mixed.stride(2), channel}, from * channel));
  };
  copy_part(0, 0, c.K);
  copy_part(c.K, c.H_k * c.K, c.K);
  copy_part(2 * c.K, 2 * c.H_k * c.K, values);
  return packed;
}

DecodeCall DecodeRegion::rule_on(const Tensor& x, Tensor o) const {
  DecodeCall rule = rule_;
  const TokenParts parts = split_tokens(x, rule.H_k, rule.K, rule.H_v, rule.V);
  rule.q = parts.q;
  rule.k = parts.k;
  rule.v = parts.v;
  rule.a = with_heads(op_, arguments_.a, 3);
  rule.b = with_heads(op_, arguments_.b, 3);
  rule.out = std::move(o);
  return rule;
}

NormCall DecodeRegion::norm_of(const Tensor& o, const Tensor& y) const {
  const Tensor& z = arguments_.z;  // perhaps in groups of heads: the norm reads it there
  std::vector<int64_t> strides(z.dim(), 1);
  for (int64_t dim = z.dim() - 2; dim >= 0; --dim) {
    strides[dim] = strides[dim + 1] * z.size(dim + 1);
  }
  return make_norm_call(op_,
                        {.o = view(o, z.sizes(), strides),
                         .z = z,
                         .weight = arguments_.norm_weight,
                         .eps = arguments_.norm_eps,
                         .activation = arguments_.norm_activation,
                         .y = view(y, z.sizes(), strides)},
                        /*is_backward=*/false, kNormOfRegion);
}

}  // namespace flash_qla
