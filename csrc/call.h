// The record of a call: the arguments of an op, checked and made canonical once, for the CPU and the GPU and for both
// directions. ops.cpp fills in the arguments, make_call makes the record, and all that follows takes it.
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

// What the ops take. Those of an op that lack some leave them at their defaults.
struct Arguments {
  Tensor q = undefined_tensor();  // [B, T, H_k, K]
  Tensor k = undefined_tensor();  // [B, T, H_k, K]
  Tensor v = undefined_tensor();  // [B, T, H_v, V]
  // [B, T, H_v] log decay, raw if use_gate; of the backward always the g_cumsum that the forward returned
  Tensor g = undefined_tensor();
  Tensor beta = undefined_tensor();     // [B, T, H_v], raw if use_beta_sigmoid
  std::optional<double> scale;          // 1 / sqrt(K) by default; a Call always has it
  std::optional<Tensor> initial_state;  // [N, H_v, K, V], or [N, H_v, V, K] if state_v_first
  std::optional<Tensor> cu_seqlens;     // [N + 1] int32 or int64
  bool output_final_state = false;
  // No arguments of all ops: of the results of chunk_gated_delta_rule_fwd, h being one that it may leave out.
  bool output_g_cumsum = false;
  bool output_A = false;
  bool output_h = false;
  bool use_qk_l2norm = false;
  bool state_v_first = false;
  bool auto_cp = true;
  bool batch_invariant = false;           // kernels whose results do not depend on what else is in the batch
  std::optional<ScalarType> state_dtype;  // of the final state as returned; the compute dtype by default
  bool use_gate = false;                  // g = -exp(A_log) softplus(g_raw + dt_bias)
  std::optional<Tensor> A_log;            // [H_v], there if use_gate
  std::optional<Tensor> dt_bias;          // [H_v], may be there if use_gate
  bool use_beta_sigmoid = false;          // beta = sigmoid(beta_raw),
  bool allow_neg_eigval = false;          // and twice that
  // No arguments of a whole pass: of its halves (halves.h), and of which sequences the first one gives the map.
  bool in_halves = false;
  std::vector<int64_t> map_sequences;
};

// What the backward takes besides.
struct Gradients {
  // [B, T, H_v, kChunk], dtype of q, as the forward returned it. Checked, but not read: the GPU makes its matrices from
  // q and k again, the CPU needs the states only. The pass in halves goes without.
  Tensor A = undefined_tensor();
  bool has_A = true;
  Tensor grad_o = undefined_tensor();      // [B, T, H_v, V]
  std::optional<Tensor> grad_final_state;  // shape of a state; none: zero
  std::optional<Tensor> g_raw;             // [B, T, H_v], the forward's g; there if use_gate
};

// Tensors are contiguous, those that TMA reads at multiples of 16 bytes. grad_o has the dtype of q, g, beta and the
// states the compute dtype; what comes raw, A_log and dt_bias keep the dtypes that they have. States stay in the
// caller's layout.
struct Call : Arguments, Tokens {
  // Chunks of h as the caller sees it: over the whole batch or, if varlen, the upper bound that needs only T and N.
  int64_t h_chunks = 0;
  bool varlen = false;         // there are cu_seqlens,
  bool wide_offsets = false;   // and they are int64
  ScalarType compute_dtype{};  // of ready g and beta, states and all arithmetic: double for double inputs, else float
  ScalarType beta_dtype{};     // of beta as it is read, and of its gradient

  bool is_empty() const { return tokens() == 0 || N == 0; }  // no sequence has a token
  std::array<int64_t, 4> state_shape() const;
  int64_t state_size() const { return N * H_v * K * V; }
  int64_t state_stride_k() const { return state_v_first ? 1 : V; }
  int64_t state_stride_v() const { return state_v_first ? K : 1; }
};

struct BackwardArguments : Arguments, Gradients {};
struct BackwardCall : Call, Gradients {};

// Throw std::runtime_error, naming the argument, what was expected and what came, unless the call can be run: before
// anything is allocated, and without reading data, except under FLASH_QLA_CHECK=1 (contents.h).
Call make_call(const char* op, Arguments arguments);
// The same without a look at contents but for cu_seqlens, for a call that is part of another one.
Call make_record(const char* op, Arguments arguments);
BackwardCall make_backward_call(const char* op, BackwardArguments arguments);

}  // namespace flash_qla
