// A call of decode_gated_delta_net: a few tokens of each sequence through convolution, delta rule and gated norm, on
// windows and states in pools.
#pragma once

#include <optional>
#include <utility>

#include "decode.h"
#include "output.h"
#include "region.h"

namespace flash_qla {

// The arguments that neither a Region nor the delta rule has. Without conv_weight there is no convolution.
struct WindowArguments {
  std::optional<Tensor> conv_weight;           // [D, W] or [D, 1, W]
  std::optional<Tensor> window_pool;           // [slots, D, columns]; written
  std::optional<Tensor> intermediate_windows;  // [rows, steps, D, W - 1]: the windows after the tokens; written
};

// The three parts. mixed, z, a and b have their heads one after the other or, with a dimension more, in the groups of
// their key heads:
//
//   mixed    [B, T, 2 H_k K + H_v V]     [B, T, H_k, 2 K + group V]
//   z        [B, T, H_v, V]              [B, T, H_k, group, V]
//   a, b     [B, T, H_v]                 [B, T, H_k, group]
class DecodeRegion {
 public:
  // Throws like make_decode_call, before anything runs. `rule` lacks q, k, v, a and b.
  DecodeRegion(const char* op, RegionArguments arguments, WindowArguments windows, DecodeArguments rule);

  const RegionArguments& arguments() const { return arguments_; }
  const WindowArguments& windows() const { return windows_; }
  bool has_convolution() const { return windows_.conv_weight.has_value(); }
  // Of windows, filter and slots; x has the shape of mixed in the first form, and not always its contents. With drafts
  // its windows are the first W - 1 columns of the pool's. Only with conv_weight.
  const Convolution& convolution() const { return convolution_; }
  // q, k, v, a and b have the shapes and dtypes of the delta rule's, and not always their contents.
  const DecodeCall& rule() const { return rule_; }
  // Whether the call has the windows of drafts, [the last W - 2 rows before the tokens, the tokens].
  bool has_draft_windows() const { return has_convolution() && rule_.num_accepted_tokens.has_value(); }

  // Whether causal_conv1d on a pool is the convolution of the call.
  bool is_plain() const;

  // Runs the parts of a plain call one after the other, and returns the op's result. A call that raises changes
  // nothing: the parts' memory is allocated before Decode, which checks its call before it writes states; windows are
  // written last.
  template <auto Convolve, auto StoreWindows, auto Decode, auto Norm>
  Tensor run_parts() const {
    Convolution convolution = convolution_;
    convolution.x = packed_mixed();
    convolution.output_final_state = false;
    make_canonical(convolution);
    Tensor y = run_rule_and_norm<Decode, Norm>(Convolve(convolution).y);
    StoreWindows(std::move(convolution));
    return y;
  }
  // The same after the convolution, on its result [B, T, D].
  template <auto Decode, auto Norm>
  Tensor run_rule_and_norm(const Tensor& x) const {
    Tensor y = allocate_output(rule_, rule_.out, x), o = allocate_output(rule_, std::nullopt, x);
    NormCall norm = norm_of(o, y);
    Decode(rule_on(x, std::move(o)));
    Norm(std::move(norm));
    return output_as_returned(rule_, rule_.out, std::move(y));
  }
  // mixed in the first form.
  Tensor packed_mixed() const;

 private:
  void make_convolution(const DecodeArguments& rule, int64_t B, int64_t T, int64_t D);
  DecodeCall rule_on(const Tensor& x, Tensor o) const;       // a call whose result is written to o
  NormCall norm_of(const Tensor& o, const Tensor& y) const;  // of contiguous tensors

  const char* op_;
  RegionArguments arguments_;
  WindowArguments windows_;
  Convolution convolution_;
  DecodeCall rule_;
};

// Throws, if a table has an index out of range, if a sequence has too many tokens for a GPU, or if two sequences write
// one window. This synchronizes.
void check_windows_of_drafts(const DecodeRegion& region);

// Each returns the op's result.
Tensor decode_region_cpu(const DecodeRegion& region);
Tensor decode_region_cuda(const DecodeRegion& region);

}  // namespace flash_qla
