// The affine map that the tokens of a sequence make of its state, S' = M S + Z, and of the gradient in reverse,
// dS = M^T dS' + dZ: what crosses from rank to rank under context parallelism.
//
// A map is a tensor [B, H_v, V + K, K], compute dtype: V rows of Z^T (dZ^T), then K rows of M^T (M). So for a state, or
// a gradient, that is V-first: after = before @ map[V:] + map[:V]. The recurrence itself makes it, as V-first rows of a
// state do not depend on each other: from [0; I], with v (do) zero in the rows of I.
#pragma once

#include "call.h"

namespace flash_qla {

// States are V-first, and sequences the rows of the batch. Where the call has an initial_state S, the map has M S + Z
// in the place of Z; with a grad_final_state dS' likewise M^T dS' + dZ.
Tensor forward_map_cpu(const Call& call);
Tensor forward_map_cuda(const Call& call);
Tensor backward_map_cpu(const BackwardCall& call);
Tensor backward_map_cuda(const BackwardCall& call);

// [B, H_v, V + K, K]: the map of no tokens, [state; I].
Tensor map_of_nothing(const Call& call, const std::optional<Tensor>& state);

}  // namespace flash_qla
