// The two passes in two ops each, begin and finish, for context parallelism over ranks (flash_qla/cp/). The tokens of a
// sequence map its state, and in reverse the gradient of its state:
//
//     S' = M S + Z        dS = M^T dS' + dZ
//
// begin does the work that needs no state of another rank, and returns the maps of some sequences. Ranks exchange maps
// and fold them into the states at the start of their sequences, or into the gradients at the end. finish does the
// rest. Between the two of the backward, replay computes the states again while gradients are exchanged.
//
// Maps are a tensor [map_sequences, H_v, V + K, K], compute dtype: V rows of Z^T (dZ^T), then K rows of M^T (M). For a
// V-first state or gradient: after = before @ map[V:] + map[:V]. If the sequence has an initial state S, the map has
// M S + Z instead of Z. If its final state has a gradient dS', the map has M^T dS' + dZ instead of dZ.
#pragma once

#include "call.h"
#include "passes.h"

namespace flash_qla {

// What begin returns besides outputs. The ops after it take the workspace [bytes], in a call of the same shapes. The
// CPU's is empty.
struct Begun {
  Tensor maps;
  Tensor workspace;
};

// begin fills outputs that have tokens, as far as it computes them; finish fills the others. Calls are over_ranks.
// begin reads map_sequences; replay and finish overwrite the workspace.
Begun begin_forward_cpu(const Call& call, const ForwardOutputs& out);
Begun begin_forward_cuda(const Call& call, const ForwardOutputs& out);
void finish_forward_cpu(const Call& call, ForwardOutputs& out);
void finish_forward_cuda(const Call& call, ForwardOutputs& out);
Begun begin_backward_cpu(const BackwardCall& call, const BackwardOutputs& out);
Begun begin_backward_cuda(const BackwardCall& call, const BackwardOutputs& out);
void replay_backward_cpu(const BackwardCall& call);
void replay_backward_cuda(const BackwardCall& call);
void finish_backward_cpu(const BackwardCall& call, BackwardOutputs& out);
void finish_backward_cuda(const BackwardCall& call, BackwardOutputs& out);

// Throws unless the workspace and the outputs of begin have its shapes and dtypes.
void check_workspace(const Call& call);
void check_begun(const Call& call, const ForwardOutputs& out);
void check_begun(const BackwardCall& call, const BackwardOutputs& out);

// Uninitialized maps.
Tensor allocate_maps(const Call& call);

// begin before any token: maps [state; I] of states in the caller's layout, and an empty workspace.
Begun begun_of_nothing(const Call& call, const std::optional<Tensor>& states);

}  // namespace flash_qla
