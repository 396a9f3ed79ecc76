// The two passes of the Gated Delta Rule on the two devices, and what they return.
#pragma once

#include "call.h"
#include "tensors.h"

namespace flash_qla {

// h and final_state, where they were not asked for, are empty tensors of shape [0] with the dtype and device that they
// would have had. g_cumsum and A are undefined where they are not wanted, h without A.
struct ForwardOutputs {
  Tensor g_cumsum = undefined_tensor();  // [B, T, H_v], compute dtype: inclusive sum of g within each chunk
  Tensor A = undefined_tensor();  // [B, T, H_v, kChunk], dtype of q: row of (I + stril(diag(beta) K K^T))^-1, K after
                                  // any l2norm
  Tensor o = undefined_tensor();  // [B, T, H_v, V], dtype of q
  Tensor h = undefined_tensor();  // state at each chunk's start, dtype of q; V-first, see allocate_forward
  Tensor final_state = undefined_tensor();  // [N, H_v, K, V] or [N, H_v, V, K], compute dtype, contiguous
};

// Gradients with respect to q, k (before the l2norm, where there is one), v, beta, g (not its cumulative sum) and
// initial_state; of beta and g where they come raw with respect to that. All contiguous; tokens that no sequence covers
// have zeros.
struct BackwardOutputs {
  Tensor dq = undefined_tensor();  // [B, T, H_k, K], dtype of q
  Tensor dk = undefined_tensor();  // [B, T, H_k, K], dtype of q
  Tensor dv = undefined_tensor();  // [B, T, H_v, V], dtype of q
  Tensor db = undefined_tensor();  // [B, T, H_v], compute dtype, or that of the raw beta
  Tensor dg = undefined_tensor();  // [B, T, H_v], compute dtype, or that of the raw g
  Tensor dh0 =
      undefined_tensor();  // shape of initial_state, compute dtype; without initial_state an empty tensor of shape [0]
  // [H_v], compute dtype; empty tensors of shape [0] where there is no A_log, no dt_bias
  Tensor dA_log = undefined_tensor(), ddt_bias = undefined_tensor();
};

ForwardOutputs forward_cpu(const Call& call);
ForwardOutputs forward_cuda(const Call& call);
BackwardOutputs backward_cpu(const BackwardCall& call);
BackwardOutputs backward_cuda(const BackwardCall& call);

// Uninitialized. h is always stored V-first: [B, chunks of a row, H_v, V, K].
ForwardOutputs allocate_forward(const Call& call);
BackwardOutputs allocate_backward(const BackwardCall& call);
// Those of them that have no tokens: the final state; dh0, dA_log and ddt_bias.
Tensor allocate_final_state(const Call& call);
void allocate_sums(const BackwardCall& call, BackwardOutputs& out);

// A view of h with its last two dimensions swapped, unless state_v_first.
Tensor h_as_returned(const Call& call, Tensor h);

// Rounded to state_dtype if the caller gave one.
Tensor final_state_as_returned(const Call& call, Tensor final_state);

}  // namespace flash_qla
