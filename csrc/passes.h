// The two passes of the Gated Delta Rule on both devices, and their outputs.
#pragma once

#include <array>
#include <cstdint>

#include "call.h"
#include "tensors.h"

namespace flash_qla {

// An h or final_state that was not asked for is an empty tensor of shape [0], with the dtype and device of a real one.
struct ForwardOutputs {
  Tensor g_cumsum = undefined_tensor();  // [B, T, H_v], compute dtype: inclusive sum of g within each chunk
  Tensor A = undefined_tensor();  // [B, T, H_v, kChunk], dtype of q: row of (I + stril(diag(beta) K K^T))^-1, K after
                                  // the l2norm
  Tensor o = undefined_tensor();  // [B, T, H_v, V], dtype of q
  Tensor h = undefined_tensor();  // state at each chunk's start, dtype of q; see h_shape
  Tensor final_state = undefined_tensor();  // [N, H_v, K, V] or [N, H_v, V, K], compute dtype, contiguous
};

// The gradients of q and k (before the l2norm), v, beta, g (not of its cumulative sum) and initial_state. Raw beta and
// g get the gradients of the pre-activation numbers. All are contiguous, except that dq, dk and dv may be parts of
// dmixed_qkv. Tokens of no sequence have zeros.
struct BackwardOutputs {
  Tensor dq = undefined_tensor();          // [B, T, H_k, K], dtype of q
  Tensor dk = undefined_tensor();          // [B, T, H_k, K], dtype of q
  Tensor dv = undefined_tensor();          // [B, T, H_v, V], dtype of q
  Tensor dmixed_qkv = undefined_tensor();  // [B, T, 2 H_k K + H_v V], dtype of q; only if the call is packed
  Tensor db = undefined_tensor();          // [B, T, H_v], compute dtype, or dtype of the pre-activation beta
  Tensor dg = undefined_tensor();          // [B, T, H_v], compute dtype, or dtype of the pre-activation g
  // The last three have the compute dtype. Without their argument they are empty tensors of shape [0].
  Tensor dh0 = undefined_tensor();       // shape of initial_state
  Tensor dA_log = undefined_tensor();    // [H_v]
  Tensor ddt_bias = undefined_tensor();  // [H_v]
};

ForwardOutputs forward_cpu(const Call& call);
ForwardOutputs forward_cuda(const Call& call);
BackwardOutputs backward_cpu(const BackwardCall& call);
BackwardOutputs backward_cuda(const BackwardCall& call);

// h as it is stored, V-first: [B, chunks of a row, H_v, V, K].
std::array<int64_t, 5> h_shape(const Call& call);

// Uninitialized outputs. g_cumsum, A and h are undefined unless output_A.
ForwardOutputs allocate_forward(const Call& call);
BackwardOutputs allocate_backward(const BackwardCall& call);
// The outputs without tokens: the final state; dh0, dA_log and ddt_bias.
Tensor allocate_final_state(const Call& call);
void allocate_sums(const BackwardCall& call, BackwardOutputs& out);

// A view of h with its last two dimensions swapped, unless state_v_first.
Tensor h_as_returned(const Call& call, Tensor h);

// The final state, rounded to state_dtype if the caller gave one.
Tensor final_state_as_returned(const Call& call, Tensor final_state);

}  // namespace flash_qla
