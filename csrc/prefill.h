// A call of prefill_gated_delta_rule: the forward on states in a pool.
#pragma once

#include <cstdint>
#include <optional>

#include "call.h"

namespace flash_qla {

// Indices are int32 or int64. An index of at most null_index is null: the sequence has no slot.
struct PoolArguments {
  Tensor state_pool = undefined_tensor();       // [slots, H_v, V, K], floating, 8 bits or more; written
  Tensor state_indices = undefined_tensor();    // [N]: the slot of each sequence
  std::optional<Tensor> initial_state_indices;  // [N]: the slot that it starts from; state_indices by default
  std::optional<Tensor> has_initial_state;      // [N], bool: whether that state is read, or zero
  int64_t null_index = -1;
  int64_t checkpoint_every = 0;  // tokens; 0: no checkpoints
  // The states after checkpoint_every tokens, after twice as many, and so on. One of these has their places:
  std::optional<Tensor> checkpoint_indices;  // [N, blocks]: slots
  std::optional<Tensor> checkpoints;         // [total, H_v, V, K], as state_pool, written in the sequences' order
  std::optional<Tensor> out;                 // [B, T, H_v, V], dtype of q: memory for o, any strides
  // [B, chunks, H_v, V, K], dtype of q, as h of chunk_gated_delta_rule_fwd: memory for the state at the start of each
  // chunk. Checkpoints are then at multiples of kChunk tokens.
  std::optional<Tensor> h;
};

// The call's initial_state and final state are unused. States are V-first.
struct PrefillCall : Call, PoolArguments {
  const Tensor& initial_indices() const { return initial_state_indices ? *initial_state_indices : state_indices; }
};

// Throws like make_call.
PrefillCall make_prefill_call(const char* op, Arguments arguments, PoolArguments pool);

// Throws if a table has an index out of range, or names a slot that is written twice. On a GPU this synchronizes.
void check_prefill_tables(const PrefillCall& call);

// Each returns the op's result.
Tensor prefill_cpu(PrefillCall call);
Tensor prefill_cuda(PrefillCall call);

}  // namespace flash_qla
