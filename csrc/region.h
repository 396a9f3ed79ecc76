// The region of a Gated DeltaNet layer between its projections: convolution, delta rule and gated norm.
#pragma once

#include <optional>
#include <string>

#include "call.h"
#include "convolution.h"
#include "norm.h"
#include "output.h"
#include "prefill.h"

namespace flash_qla {

// The arguments that are not the delta rule's.
struct RegionArguments {
  Tensor mixed = undefined_tensor();        // [B, T, 2 H_k K + H_v V], the input of the convolution
  Tensor z = undefined_tensor();            // [B, T, H_v, V], the input of the norm's gate, dtype of mixed
  Tensor a = undefined_tensor();            // [B, T, H_v], g before its activation
  Tensor b = undefined_tensor();            // [B, T, H_v], beta before its activation
  Tensor conv_weight = undefined_tensor();  // [D, W] or [D, 1, W]
  std::optional<Tensor> conv_bias;          // [D]
  Tensor norm_weight = undefined_tensor();  // [V]
  std::optional<Tensor> initial_window;     // [N, D, W - 1] or [N, D, W]
  double norm_eps = 0;
  std::string norm_activation;  // silu or sigmoid
  // Of the backward:
  Tensor o = undefined_tensor();       // [B, T, H_v, V], result of the forward
  Tensor grad_y = undefined_tensor();  // [B, T, H_v, V]
  std::optional<Tensor> dwindow;       // shape of the windows; zero by default
  // On pools, whose other arguments are PoolArguments:
  Tensor window_pool = undefined_tensor();   // [slots, D, W - 1] or [slots, D, W]; written
  std::optional<Tensor> window_checkpoints;  // [total, D, columns], with those of states; written
};

// The three parts. Each takes the results of the parts before it.
class Region {
 public:
  // Throws like make_call, before anything runs. `rule` lacks q, k, v, g and beta. With `pool` the states and windows
  // are in pools; its `out` is memory for y.
  Region(const char* op, RegionArguments arguments, Arguments rule, const PackedTokens& heads,
         std::optional<PoolArguments> pool = std::nullopt);

  const Convolution& convolution() const { return convolution_; }
  Call rule(const Tensor& x) const { return make_call(op_, rule_on<Arguments>(x)); }
  NormCall norm(Tensor o) const { return make_norm_call(op_, norm_of(std::move(o)), /*is_backward=*/false); }

  NormCall norm_backward() const;
  BackwardCall rule_backward(const Tensor& x, Tensor grad_o, const std::optional<Tensor>& grad_final_state) const;
  Convolution convolution_backward(Tensor dx) const;

  // On pools. To change nothing in a call that raises, the order is: y is allocated, the convolution runs without its
  // windows, the prefill checks its result, and the windows are written last.
  Tensor allocate_y() const { return allocate_output(tokens(), out_, arguments_.mixed); }
  PrefillCall prefill(const Tensor& x) const { return make_prefill_call(op_, rule_on<Arguments>(x), *pool_); }
  NormCall norm(Tensor o, Tensor y) const;
  Tensor y_as_returned(Tensor y) const { return output_as_returned(tokens(), out_, std::move(y)); }

 private:
  // The rule's arguments on the convolution's result.
  template <typename T>
  T rule_on(const Tensor& x) const {
    T arguments;
    static_cast<Arguments&>(arguments) = rule_;
    split(op_, arguments, {.mixed_qkv = x, .num_k_heads = heads_.num_k_heads, .head_k_dim = heads_.head_k_dim});
    return arguments;
  }
  NormArguments norm_of(Tensor o) const;
  Tokens tokens() const;

  const char* op_;
  RegionArguments arguments_;
  Arguments rule_;
  PackedTokens heads_;
  std::optional<PoolArguments> pool_;  // of states, without `out`
  std::optional<Tensor> out_;
  Convolution convolution_;  // on pools without its windows
};

}  // namespace flash_qla
