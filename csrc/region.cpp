#include "region.h"

#include <utility>

#include "checks.h"

namespace flash_qla {

namespace {

constexpr ConvolutionNames kNames = {.x = "mixed",
                                     .weight = "conv_weight",
                                     .bias = "conv_bias",
                                     .state = "initial_window",
                                     .final_gradient = "dwindow",
                                     .pool = "window_pool",
                                     .checkpoints = "window_checkpoints"};

// Checks z, a and b, and the channels of mixed.
void check_tokens(const char* op, const RegionArguments& r, const PackedTokens& heads) {
  const Tensor& mixed = r.mixed;
  check_device(op, "z", r.z, mixed, kNames.x);
  check_same_dtype(op, "z", r.z, mixed, kNames.x);
  check_rank(op, "z", r.z, 4, "[B, T, H_v, V]");
  const int64_t B = mixed.size(0), T = mixed.size(1), D = mixed.size(2), H_v = r.z.size(2), V = r.z.size(3);
  check_shape(op, "z", r.z, {B, T, H_v, V}, "[B, T, H_v, V]");
  const int64_t H_k = heads.num_k_heads, K = heads.head_k_dim;
  const bool fits = H_k >= 1 && K >= 1 && H_k <= D && K <= D && D - 2 * H_k * K == H_v * V;
  check(fits, op, "mixed has ", D, " channels, expected 2 H_k K + H_v V, with num_k_heads H_k = ", H_k,
        ", head_k_dim K = ", K, " and the heads of z, H_v = ", H_v, " of V = ", V);
  for (const auto& [name, tensor] : {std::pair{"a", &r.a}, std::pair{"b", &r.b}}) {
    check_device(op, name, *tensor, mixed, kNames.x);
    check_floating(op, name, *tensor);
    check_shape(op, name, *tensor, {B, T, H_v}, "[B, T, H_v]");
  }
}

Convolution make_convolution_of(const char* op, const RegionArguments& r, const Arguments& rule,
                                const std::optional<PoolArguments>& of_states) {
  ConvolutionArguments arguments = {.x = r.mixed,
                                    .weight = r.conv_weight,
                                    .bias = r.conv_bias,
                                    .initial_state = r.initial_window,
                                    .output_final_state = rule.output_final_state,
                                    .cu_seqlens = rule.cu_seqlens,
                                    .dht = std::nullopt};
  if (!of_states) {
    return make_convolution(op, std::move(arguments), kNames);
  }
  PoolArguments pool = *of_states;
  pool.state_pool = r.window_pool;
  pool.checkpoints = r.window_checkpoints;
  Convolution call = make_convolution_on_pool(op, std::move(arguments), std::move(pool), kNames);
  call.output_final_state = false;
  return call;
}

void check_like_z(const char* op, const char* name, const Tensor& x, const Tensor& z) {
  check_device(op, name, x, z, "z");
  check_same_dtype(op, name, x, z, "z");
  check_shape(op, name, x, z.sizes(), "[B, T, H_v, V], like z");
}

}  // namespace

Region::Region(const char* op, RegionArguments arguments, Arguments rule, const PackedTokens& heads,
               std::optional<PoolArguments> pool)
    : op_(op),
      arguments_(std::move(arguments)),
      rule_(std::move(rule)),
      heads_(heads),
      pool_(std::move(pool)),
      convolution_(make_convolution_of(op, arguments_, rule_, pool_)) {
  const RegionArguments& r = arguments_;
  check_tokens(op, r, heads_);
  rule_.g = r.a;
  rule_.beta = r.b;
  rule_.use_gate = rule_.use_beta_sigmoid = rule_.use_qk_l2norm = true;
  if (pool_) {
    out_ = std::move(pool_->out);
    pool_->out.reset();
    if (out_) {
      check_like_z(op, "out", *out_, r.z);
    }
    check_prefill_call(op, rule_on<Arguments>(r.mixed), *pool_);
  } else {
    check_call(op, rule_on<Arguments>(r.mixed));
  }
  NormCall norm = make_norm_call(op, norm_of(r.z), /*is_backward=*/false, kNormOfRegion);
  arguments_.z = std::move(norm.z);
  make_canonical(convolution_);
}

Tokens Region::tokens() const {
  const auto shape = arguments_.z.sizes();
  return {.op = op_,
          .B = shape[0],
          .T = shape[1],
          .H_k = heads_.num_k_heads,
          .H_v = shape[2],
          .K = heads_.head_k_dim,
          .V = shape[3],
          .N = convolution_.N,
          .dtype = convolution_.dtype};
}

NormCall Region::norm(Tensor o, Tensor y) const {
  NormCall call = norm(std::move(o));
  call.y = std::move(y);
  return call;
}

NormArguments Region::norm_of(Tensor o) const {
  return {.o = std::move(o),
          .z = arguments_.z,
          .weight = arguments_.norm_weight,
          .eps = arguments_.norm_eps,
          .activation = arguments_.norm_activation};
}

NormCall Region::norm_backward() const {
  check_like_z(op_, "o", arguments_.o, arguments_.z);
  NormArguments arguments = norm_of(arguments_.o);
  arguments.grad_y = arguments_.grad_y;
  return make_norm_call(op_, std::move(arguments), /*is_backward=*/true);
}

BackwardCall Region::rule_backward(const Tensor& x, Tensor grad_o,
                                   const std::optional<Tensor>& grad_final_state) const {
  auto arguments = rule_on<BackwardArguments>(x);
  arguments.g_raw = arguments.g;
  arguments.packed = true;
  arguments.grad_o = std::move(grad_o);
  arguments.grad_final_state = grad_final_state;
  return make_backward_call(op_, std::move(arguments));
}

Convolution Region::convolution_backward(Tensor dx) const {
  ConvolutionArguments arguments = convolution_;
  arguments.dy = std::move(dx);
  arguments.dht = arguments_.dwindow;
  return make_convolution_backward(op_, std::move(arguments), kNames);
}

}  // namespace flash_qla
