#include "activations.h"

namespace flash_qla {

using torch::stable::Tensor;

namespace {

void check_of_tokens(const Tokens& tokens, const Tensor& q, const NamedTensor& argument) {
  const auto& [name, tensor] = argument;
  check_device(tokens.op, name, *tensor, q);
  check_floating(tokens.op, name, *tensor);
  check_shape_of_tokens(tokens.op, name, *tensor, {tokens.B, tokens.T, tokens.H_v}, "[B, T, H_v]", q);
}

// Checks A_log or dt_bias, if it was given.
void check_of_heads(const Tokens& tokens, const Tensor& q, const ActivationArguments& arguments,
                    const NamedTensor& argument) {
  const auto& [name, tensor] = argument;
  check(arguments.use_gate || !tensor, tokens.op, name, " is a tensor, expected None without ", arguments.gate_flag);
  if (tensor) {
    check_device(tokens.op, name, *tensor, q);
    check_floating(tokens.op, name, *tensor);
    check_shape(tokens.op, name, *tensor, {tokens.H_v}, "[H_v]");
  }
}

}  // namespace

void check_activations(const Tokens& tokens, const Tensor& q, const ActivationArguments& arguments) {
  check_of_tokens(tokens, q, arguments.g);
  check_of_tokens(tokens, q, arguments.beta);
  check(!arguments.use_gate || arguments.A_log, tokens.op,
        "A_log is None, expected a tensor [H_v] with use_gate_in_kernel");
  check_of_heads(tokens, q, arguments, {"A_log", arguments.A_log});
  check_of_heads(tokens, q, arguments, {"dt_bias", arguments.dt_bias});
  check(arguments.use_beta_sigmoid || !arguments.allow_neg_eigval, tokens.op,
        "allow_neg_eigval is True, expected False without use_beta_sigmoid_in_kernel (a beta that is ready may be up "
        "to 2 by itself)");
}

void check_g_raw(const Tokens& tokens, const Tensor& q, bool use_gate, const Tensor* g_raw) {
  check(use_gate || !g_raw, tokens.op, "g_raw is a tensor, expected None with g and without use_gate_in_kernel");
  check(!use_gate || g_raw, tokens.op,
        "g_raw is None, expected the g of the forward, a tensor [B, T, H_v], with use_gate_in_kernel");
  if (g_raw) {
    check_of_tokens(tokens, q, {"g_raw", g_raw});
  }
}

}  // namespace flash_qla
