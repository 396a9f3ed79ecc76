// The backward pass of the Gated Delta Rule: what both devices share, built on the forward's arguments and checks.
//
// An op's call runs check_forward and check_backward, then backward_cpu or backward_cuda, which begin with
// canonicalize.
#pragma once

#include <optional>
#include <tuple>

#include "forward.h"

namespace flash_qla {

struct BackwardArgs {
  ForwardArgs forward;  // of the call to differentiate, except g: [B, T, H_v], the g_cumsum that it returned
  Tensor A;             // [B, T, H_v, kChunk], dtype of q, as the forward returned it
  Tensor grad_o;        // [B, T, H_v, V]
  std::optional<Tensor> grad_final_state;  // [N, H_v, K, V], or [N, H_v, V, K] if state_v_first; none: zero
};

// Gradients with respect to q, k (before the l2norm, where there is one), v, beta, g (not its cumulative sum) and
// initial_state. All contiguous; tokens that no sequence covers have zeros.
struct BackwardOutputs {
  Tensor dq;   // [B, T, H_k, K], dtype of q
  Tensor dk;   // [B, T, H_k, K], dtype of q
  Tensor dv;   // [B, T, H_v, V], dtype of q
  Tensor db;   // [B, T, H_v], compute dtype
  Tensor dg;   // [B, T, H_v], compute dtype
  Tensor dh0;  // shape of initial_state, compute dtype; without initial_state an empty tensor of shape [0]
};

// check_forward for what the backward adds: A, do and dht, as the caller gave them. To be called after check_forward
// has accepted args.forward.
void check_backward(const Problem& problem, const BackwardArgs& args);

// The args as kernels want them: args.forward as in the forward, A contiguous, grad_o contiguous in the dtype of q,
// grad_final_state contiguous in the compute dtype, in the caller's layout. Copies only what has to change.
BackwardArgs canonicalize(const Problem& problem, BackwardArgs args);

// Uninitialized outputs.
BackwardOutputs allocate_backward(const Problem& problem, const BackwardArgs& args);

BackwardOutputs backward_cpu(const Problem& problem, const BackwardArgs& args);
BackwardOutputs backward_cuda(const Problem& problem, const BackwardArgs& args);

// The op's body, for TORCH_BOX. Parameters are those of the schema in ops.cpp, in its order.
template <auto Backward>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> chunk_gated_delta_rule_bwd_op(
    Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A, Tensor grad_o, std::optional<Tensor> dht,
    std::optional<double> scale, std::optional<Tensor> initial_state, std::optional<Tensor> cu_seqlens,
    bool state_v_first, bool auto_cp, bool use_qk_l2norm_in_kernel) {
  BackwardArgs args{
      .forward =
          {
              .q = q,
              .k = k,
              .v = v,
              .g = g,
              .beta = beta,
              .scale = scale,
              .initial_state = initial_state,
              .cu_seqlens = cu_seqlens,
              .use_qk_l2norm = use_qk_l2norm_in_kernel,
              .state_v_first = state_v_first,
              .auto_cp = auto_cp,
          },
      .A = A,
      .grad_o = grad_o,
      .grad_final_state = dht,
  };
  const Problem problem = check_forward("flash_qla::chunk_gated_delta_rule_bwd", args.forward);
  check_backward(problem, args);
  const BackwardOutputs out = Backward(problem, args);
  return {out.dq, out.dk, out.dv, out.db, out.dg, out.dh0};
}

}  // namespace flash_qla
