// A call of decode_gated_delta_rule: a few tokens of each sequence, on states that lie in a pool.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "call.h"

namespace flash_qla {

// Indices are int32 or int64. "Null" is an index of at most null_index: nobody's.
struct DecodeArguments {
  Tensor q = undefined_tensor();              // [B, T, H_k, K], any strides
  Tensor k = undefined_tensor();              // [B, T, H_k, K]
  Tensor v = undefined_tensor();              // [B, T, H_v, V]
  Tensor a = undefined_tensor();              // [B, T, H_v], raw gates, any floating dtype
  Tensor b = undefined_tensor();              // [B, T, H_v], raw betas, any floating dtype
  Tensor A_log = undefined_tensor();          // [H_v], any floating dtype
  std::optional<Tensor> dt_bias;              // [H_v], any floating dtype
  Tensor state_pool = undefined_tensor();     // [slots, H_v, V, K], any floating dtype; written
  Tensor state_indices = undefined_tensor();  // [N] or [N, S]: the slot that a sequence starts from
  std::optional<double> scale;                // none: K^-0.5
  int64_t null_index = -1;
  bool use_qk_l2norm = true;
  std::optional<Tensor> cu_seqlens;            // [N + 1]
  std::optional<Tensor> num_accepted_tokens;   // [N]: which column of state_indices, less one
  std::optional<Tensor> write_indices;         // [N, S]: slots of the states behind the tokens
  std::optional<Tensor> intermediate_states;   // [rows, steps, H_v, V, K]; written: likewise
  std::optional<Tensor> intermediate_indices;  // [N]: rows of these, negative ones nobody's
  std::optional<Tensor> parents;               // [N, S]: the token before each, -1 the state at the start
  bool update_state = true;                    // the last state goes back to where the first came from
};

// Tensors are as they came. Of the pool and the intermediate states the last three dimensions are contiguous.
struct DecodeCall : DecodeArguments, Tokens {
  bool varlen() const { return cu_seqlens.has_value(); }
  int64_t slots() const { return state_pool.size(0); }
  // Whether the state behind the last token is written to where the first was read.
  bool writes_back() const { return update_state && !write_indices; }
};

// Throws std::runtime_error, naming the argument, what was expected and what came, unless the call can be run: without
// reading data.
DecodeCall make_decode_call(const char* op, DecodeArguments arguments);

// The same where q, k and v come as one tensor, [B, T, 2 H_k K + H_v V], as the convolution before the op leaves them,
// or without T for one token of each sequence, a and b likewise. Sets the arguments' q, k, v, a and b.
DecodeCall make_packed_decode_call(const char* op, const Tensor& mixed_qkv, DecodeArguments arguments);

// Throws where the tables hold what they may not: an index outside, a slot that is written twice. On a GPU this
// synchronizes.
void check_decode_tables(const DecodeCall& call);

// Returns o [B, T, H_v, V], dtype of q.
Tensor decode_cpu(DecodeCall call);
Tensor decode_cuda(DecodeCall call);

}  // namespace flash_qla
