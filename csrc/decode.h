// A call of decode_gated_delta_rule: a few tokens of each sequence, on states in a pool.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "call.h"

namespace flash_qla {

// Indices are int32 or int64. An index of at most null_index is null: the sequence has no slot.
struct DecodeArguments {
  Tensor q = undefined_tensor();  // [B, T, H_k, K], any strides
  Tensor k = undefined_tensor();  // [B, T, H_k, K]
  Tensor v = undefined_tensor();  // [B, T, H_v, V]
  Tensor a = undefined_tensor();  // [B, T, H_v], any floating dtype: pre-activation gates, or g without A_log
  Tensor b = undefined_tensor();  // [B, T, H_v], any floating dtype: pre-activation betas if use_beta_sigmoid, or beta
  std::optional<Tensor> A_log;    // [H_v], any floating dtype
  std::optional<Tensor> dt_bias;  // [H_v], any floating dtype; only with A_log
  Tensor state_pool = undefined_tensor();  // [slots, H_v, V, K], floating, 8 bits or more; written
  std::optional<Tensor> state_indices;     // [N] or [N, S]: the slot of the sequence's first state; n by default
  std::optional<double> scale;             // K^-0.5 by default
  int64_t null_index = -1;
  bool use_qk_l2norm = true;
  std::optional<Tensor> cu_seqlens;            // [N + 1]
  std::optional<Tensor> num_accepted_tokens;   // [N]: the column of state_indices, plus one
  std::optional<Tensor> write_indices;         // [N, S]: slots of the states after the tokens
  std::optional<Tensor> intermediate_states;   // [rows, steps, H_v, V, K], written: the states after the tokens
  std::optional<Tensor> intermediate_indices;  // [N]: rows of intermediate_states; negative: no row
  std::optional<Tensor> parents;               // [N, S]: the token before each token; -1: the first state
  bool update_state = true;                    // the last state replaces the first in its slot
  bool state_v_first = true;                   // false: all states are [.., K, V]
  std::optional<bool> use_beta_sigmoid;        // default: whether A_log is given; a DecodeCall always has a value
  bool allow_neg_eigval = false;               // beta = 2 sigmoid(b)
  std::optional<Tensor> out;                   // [B, T, H_v, V], dtype of q: o is written there
};

// Tensors keep the caller's strides. The last three dimensions of the pool and of intermediate_states are contiguous.
struct DecodeCall : DecodeArguments, Tokens {
  bool varlen() const { return cu_seqlens.has_value(); }
  int64_t slots() const { return state_pool.size(0); }
  // Whether the state after the last token replaces the first in its slot.
  bool writes_back() const { return update_state && !write_indices; }
};

// The replay buffer of decode_gated_delta_rule_buffered: the steps that the state of a slot lacks, oldest first. A
// sequence's buffer holds write_pos[n] of them. Step i decays the state by e^g and adds d k^T to it.
struct Backlog {
  Tensor d_cache = undefined_tensor();    // [slots, H_v, L, V], dtype of q or the compute dtype; written
  Tensor k_cache = undefined_tensor();    // [slots, H_k, L, K], as d_cache; written
  Tensor g_cache = undefined_tensor();    // [slots, H_v, L], compute dtype; written
  Tensor write_pos = undefined_tensor();  // [N]
  std::optional<Tensor> force_flush;      // [N]: if not 0, the sequence's state is written

  int64_t length() const { return d_cache.size(2); }
};
struct BufferedDecodeCall : DecodeCall, Backlog {};

// Throws std::runtime_error unless the call can run. The text names the argument, what was expected and what came. No
// data is read.
DecodeCall make_decode_call(const char* op, DecodeArguments arguments);

// make_decode_call for q, k and v in one tensor [B, T, 2 H_k K + H_v V], the output of the convolution before the op.
// mixed_qkv, a and b may lack the dimension T if each sequence has one token. Sets the arguments q, k, v, a and b.
DecodeCall make_packed_decode_call(const char* op, const Tensor& mixed_qkv, DecodeArguments arguments);

// make_decode_call for one token of each sequence, with deferred state writes.
BufferedDecodeCall make_buffered_decode_call(const char* op, DecodeArguments arguments, Backlog backlog);

// Throws if a table has an index out of range, or names a slot that is written twice. On a GPU this synchronizes.
void check_decode_tables(const DecodeCall& call);
void check_decode_tables(const BufferedDecodeCall& call);

// Throws, with the argument's name, if the call runs on a CPU only.
void check_decode_on_gpu(const DecodeCall& call);

// Each returns the op's result.
Tensor decode_cpu(DecodeCall call);
Tensor decode_cuda(DecodeCall call);
Tensor decode_buffered_cpu(BufferedDecodeCall call);
Tensor decode_buffered_cuda(BufferedDecodeCall call);

}  // namespace flash_qla
