// A call of decode_gated_delta_net: a few tokens of each sequence through convolution, delta rule and gated norm, on
// windows and states in pools.
#pragma once

#include <utility>

#include "decode.h"
#include "region.h"

namespace flash_qla {

// The three parts. mixed, z, a and b have their heads one after the other or, with a dimension more, in the groups of
// their key heads:
//
//   mixed    [B, T, 2 H_k K + H_v V]     [B, T, H_k, 2 K + group V]
//   z        [B, T, H_v, V]              [B, T, H_k, group, V]
//   a, b     [B, T, H_v]                 [B, T, H_k, group]
class DecodeRegion {
 public:
  // Throws like make_decode_call, before anything runs. `rule` lacks q, k, v, a and b.
  DecodeRegion(const char* op, RegionArguments arguments, DecodeArguments rule);

  const RegionArguments& arguments() const { return arguments_; }
  // Of windows, filter and slots; x has the shape of mixed in the first form, and not always its contents.
  const Convolution& convolution() const { return convolution_; }
  // q, k, v, a and b have the shapes and dtypes of the delta rule's, and not always their contents.
  const DecodeCall& rule() const { return rule_; }

  // Runs the parts one after the other, and returns the op's result.
  template <auto Convolve, auto Decode, auto Norm>
  Tensor run_parts() const {
    Convolution convolution = convolution_;
    convolution.x = packed_mixed();
    DecodeCall rule = rule_on(Convolve(std::move(convolution)).y);
    return as_returned(Norm(norm_of(Decode(std::move(rule)))));
  }

 private:
  Tensor packed_mixed() const;
  DecodeCall rule_on(const Tensor& x) const;
  NormCall norm_of(Tensor o) const;
  // y or, with `out`, which gets it, an empty tensor.
  Tensor as_returned(Tensor y) const;

  const char* op_;
  RegionArguments arguments_;
  Convolution convolution_;
  DecodeCall rule_;
};

// Each returns the op's result.
Tensor decode_region_cpu(const DecodeRegion& region);
Tensor decode_region_cuda(const DecodeRegion& region);

}  // namespace flash_qla
