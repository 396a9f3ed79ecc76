// The two passes of the Gated Delta Rule on the two devices, and what they return.
#pragma once

#include "call.h"

namespace flash_qla {

// h and final_state, where they were not asked for, are empty tensors of shape [0] with the dtype and device that they
// would have had. g_cumsum, A and h are undefined unless output_low_level.
struct ForwardOutputs {
  Tensor g_cumsum;     // [B, T, H_v], compute dtype: inclusive sum of g within each chunk
  Tensor A;            // [B, T, H_v, kChunk], dtype of q: row of (I + stril(diag(beta) K K^T))^-1, K after any l2norm
  Tensor o;            // [B, T, H_v, V], dtype of q
  Tensor h;            // state at each chunk's start, dtype of q; V-first, see allocate_forward
  Tensor final_state;  // [N, H_v, K, V] or [N, H_v, V, K], compute dtype, contiguous
};

// Gradients with respect to q, k (before the l2norm, where there is one), v, beta, g (not its cumulative sum) and
// initial_state; of beta and g where they come raw with respect to that. All contiguous; tokens that no sequence covers
// have zeros.
struct BackwardOutputs {
  Tensor dq;                // [B, T, H_k, K], dtype of q
  Tensor dk;                // [B, T, H_k, K], dtype of q
  Tensor dv;                // [B, T, H_v, V], dtype of q
  Tensor db;                // [B, T, H_v], compute dtype, or that of the raw beta
  Tensor dg;                // [B, T, H_v], compute dtype, or that of the raw g
  Tensor dh0;               // shape of initial_state, compute dtype; without initial_state an empty tensor of shape [0]
  Tensor dA_log, ddt_bias;  // [H_v], compute dtype; empty tensors of shape [0] where there is no A_log, no dt_bias
};

ForwardOutputs forward_cpu(const Call& call);
ForwardOutputs forward_cuda(const Call& call);
BackwardOutputs backward_cpu(const BackwardCall& call);
BackwardOutputs backward_cuda(const BackwardCall& call);

// Uninitialized. h is always stored V-first: [B, chunks of a row, H_v, V, K] (varlen: [1, h_chunks, H_v, V, K]).
ForwardOutputs allocate_forward(const Call& call);
BackwardOutputs allocate_backward(const BackwardCall& call);

// A view of h with its last two dimensions swapped, unless state_v_first.
Tensor h_as_returned(const Call& call, Tensor h);

// Rounded to state_dtype if the caller gave one.
Tensor final_state_as_returned(const Call& call, Tensor final_state);

}  // namespace flash_qla
