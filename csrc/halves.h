// The two passes in halves, for context parallelism over ranks (flash_qla/cp.py). The first half does what needs no
// state from elsewhere, and gives the maps of some sequences: the affine map that a sequence's tokens make of its
// state, S' = M S + Z, and of the gradient in reverse, dS = M^T dS' + dZ. Ranks exchange those, fold them into the
// states that their own sequences begin with, or into the gradients behind them, and the second half does the rest.
// Between the halves of the backward, while the gradients are on their way, replay makes the states again.
//
// Maps are a tensor [map_sequences, H_v, V + K, K], compute dtype: V rows of Z^T (dZ^T), then K rows of M^T (M). So for
// a state, or a gradient, that is V-first: after = before @ map[V:] + map[:V]. Where the sequence has an initial state
// S, the map has M S + Z in the place of Z; with a gradient dS' of the final state likewise M^T dS' + dZ.
#pragma once

#include "call.h"
#include "passes.h"

namespace flash_qla {

// What the first half leaves besides outputs of its own. The workspace [bytes] is for the second half, whose call has
// the same shapes; the CPU's is empty.
struct Begun {
  Tensor maps;
  Tensor workspace;
};

// The first halves take outputs that have tokens, and fill in what they make of them; the second ones, which like
// replay overwrite the workspace, the others. Calls are in_halves, and only the first half reads map_sequences.
Begun begin_forward_cpu(const Call& call, const ForwardOutputs& out);
Begun begin_forward_cuda(const Call& call, const ForwardOutputs& out);
void finish_forward_cpu(const Call& call, const Tensor& workspace, ForwardOutputs& out);
void finish_forward_cuda(const Call& call, const Tensor& workspace, ForwardOutputs& out);
Begun begin_backward_cpu(const BackwardCall& call, const BackwardOutputs& out);
Begun begin_backward_cuda(const BackwardCall& call, const BackwardOutputs& out);
void replay_backward_cpu(const BackwardCall& call, const Tensor& workspace);
void replay_backward_cuda(const BackwardCall& call, const Tensor& workspace);
void finish_backward_cpu(const BackwardCall& call, const Tensor& workspace, BackwardOutputs& out);
void finish_backward_cuda(const BackwardCall& call, const Tensor& workspace, BackwardOutputs& out);

// What the others write has to be what begin made, by shapes and dtypes.
void check_workspace(const Call& call, const Tensor& workspace);
void check_begun(const Call& call, const Tensor& workspace, const ForwardOutputs& out);
void check_begun(const BackwardCall& call, const Tensor& workspace, const BackwardOutputs& out);

// Uninitialized maps.
Tensor allocate_maps(const Call& call);

// The first half before any token: maps [state; I] of states in the caller's layout, and an empty workspace.
Begun begun_of_nothing(const Call& call, const std::optional<Tensor>& states);

}  // namespace flash_qla
