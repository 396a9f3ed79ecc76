// The record of a call: the arguments of an op, checked and made canonical once, for both devices and both directions.
// ops.cpp fills in the arguments, make_call makes the record, and everything after it takes the record.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "tensors.h"
#include "tokens.h"

namespace flash_qla {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The arguments of all ops. An op leaves the arguments that it does not have at their defaults.
struct Arguments {
  Tensor q = undefined_tensor();  // [B, T, H_k, K]
  Tensor k = undefined_tensor();  // [B, T, H_k, K]
  Tensor v = undefined_tensor();  // [B, T, H_v, V]
  Tensor g =
      undefined_tensor();  // [B, T, H_v] log decay, pre-activation if use_gate; see GradientArguments for the backward
  Tensor beta = undefined_tensor();     // [B, T, H_v], pre-activation if use_beta_sigmoid
  std::optional<double> scale;          // 1 / sqrt(K) by default; a Call always has it
  std::optional<Tensor> initial_state;  // [N, H_v, K, V], or [N, H_v, V, K] if state_v_first
  std::optional<Tensor> cu_seqlens;     // [N + 1] int32 or int64
  std::optional<int64_t> max_seqlen;    // tokens of the longest sequence in cu_seqlens; only the speed depends on it
  bool output_final_state = false;
  // Results that only some ops return:
  bool output_A = false;  // and g_cumsum
  bool output_h = false;
  bool use_qk_l2norm = false;
  bool state_v_first = false;
  bool auto_cp = true;
  bool batch_invariant = false;           // kernels whose results do not depend on what else is in the batch
  std::optional<ScalarType> state_dtype;  // dtype of the returned final state; the compute dtype by default
  bool use_gate = false;                  // g = -exp(A_log) softplus(g_raw + dt_bias)
  std::optional<Tensor> A_log;            // [H_v]; needed with use_gate
  std::optional<Tensor> dt_bias;          // [H_v]; only with use_gate
  bool use_beta_sigmoid = false;          // beta = sigmoid(beta_raw)
  bool allow_neg_eigval = false;          // beta = 2 sigmoid(beta_raw)
  // Only for a pass over ranks (ranks.h):
  bool over_ranks = false;
  std::vector<int64_t> map_sequences;  // begin returns their maps
  std::optional<Tensor> workspace;     // [bytes], of begin; the ops after it write it
};

// The further arguments of the backward. The gates come as g_raw, or as g_cumsum, which saves their sum. With use_gate
// g_raw is always needed, for its gradient. Arguments::g is the tensor that the pass reads: g_cumsum if it was given.
struct GradientArguments {
  std::optional<Tensor> g_cumsum;  // [B, T, H_v], result of the forward
  std::optional<Tensor> g_raw;     // [B, T, H_v], g of the forward
  // [B, T, H_v, kChunk], dtype of q, result of the forward. It is checked, but not read: the GPU computes its matrices
  // from q and k again, and the CPU needs only the states.
  std::optional<Tensor> A;
  Tensor grad_o = undefined_tensor();      // [B, T, H_v, V]
  std::optional<Tensor> grad_final_state;  // shape of the states; zero by default
  bool packed = false;                     // dq, dk and dv are parts of one tensor

  bool is_cumulative() const { return g_cumsum.has_value(); }  // Arguments::g is g_cumsum
  // What the op calls Arguments::g
  const char* gates_name() const { return is_cumulative() || packed ? "g" : "g_raw"; }
};

// The canonical form. On a GPU q, k, v and grad_o are readable rows (tokens.h). All other tensors are contiguous; a
// tensor that TMA reads starts at a multiple of 16 bytes. grad_o has the dtype of q. Ready g and beta and the states
// have the compute dtype. Raw g and beta, A_log and dt_bias keep their dtypes. States stay in the caller's layout.
struct Call : Arguments, Tokens {
  // Chunks of h as the caller sees it: those of the whole batch; if varlen, an upper bound from T and N.
  int64_t h_chunks = 0;
  bool varlen = false;         // cu_seqlens was given
  ScalarType compute_dtype{};  // dtype of ready g and beta, states and arithmetic: double for double inputs, else float
  ScalarType beta_dtype{};     // dtype of beta as it is read, and of its gradient

  bool is_empty() const { return tokens() == 0 || N == 0; }  // no sequence has a token
  std::array<int64_t, 4> state_shape() const;
  int64_t state_size() const { return N * H_v * K * V; }
  int64_t state_stride_k() const { return state_v_first ? 1 : V; }
  int64_t state_stride_v() const { return state_v_first ? K : 1; }
};

// q, k and v in one tensor.
struct PackedTokens {
  Tensor mixed_qkv = undefined_tensor();    // [B, T, 2 H_k K + H_v V]
  int64_t num_k_heads = 0, head_k_dim = 0;  // H_k and K
};

// Sets q, k and v to the parts of mixed_qkv. The number of value heads comes from g.
void split(const char* op, Arguments& arguments, const PackedTokens& packed);

struct BackwardArguments : Arguments, GradientArguments {};
struct BackwardCall : Call, GradientArguments {};

// Throws std::runtime_error unless the call can run. The text names the argument, what was expected and what came. The
// checks precede every allocation and read no data, except under FLASH_QLA_CHECK=1 (contents.h).
Call make_call(const char* op, Arguments arguments);
// Only the checks of make_call that read sizes, dtypes and devices. The record is not canonical.
Call check_call(const char* op, Arguments arguments);
// make_call for a part of another call: of the contents it checks only cu_seqlens.
Call make_record(const char* op, Arguments arguments);
BackwardCall make_backward_call(const char* op, BackwardArguments arguments);

}  // namespace flash_qla
