// The arguments of gates and betas, checked in one place for all ops.
#pragma once

#include "checks.h"
#include "tokens.h"

namespace flash_qla {

struct ActivationArguments {
  NamedTensor g, beta;  // [B, T, H_v], any floating dtype; pre-activation with their flags, else activated
  const torch::stable::Tensor* A_log;    // [H_v], any floating dtype; needed with use_gate
  const torch::stable::Tensor* dt_bias;  // [H_v], any floating dtype, or null
  bool use_gate = true;
  bool use_beta_sigmoid = true;
  bool allow_neg_eigval = false;
  const char* gate_flag = "use_gate_in_kernel";  // the argument that switches the gate on, for messages
};

void check_activations(const Tokens& tokens, const torch::stable::Tensor& q, const ActivationArguments& arguments);

// Checks g_raw, the g of the forward, beside g_cumsum: [B, T, H_v], any floating dtype. Only use_gate needs both.
void check_g_raw(const Tokens& tokens, const torch::stable::Tensor& q, bool use_gate,
                 const torch::stable::Tensor* g_raw);

}  // namespace flash_qla
