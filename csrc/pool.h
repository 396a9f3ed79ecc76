// Arguments of inference engines: the states of many requests in one tensor, and tables of indices into it.
#pragma once

#include <cstdint>
#include <optional>

#include "call.h"

namespace flash_qla {

// The states of sequences in a pool, or their windows. Indices are int32 or int64. An index of at most null_index is
// null: the sequence has no slot.
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

  const Tensor& initial_indices() const { return initial_state_indices ? *initial_state_indices : state_indices; }
};

// Checks the tables, and which arguments there are. q: the op's first tensor, by the name `first`; `checkpoints`: the
// name of that argument.
void check_tables(const char* op, const PoolArguments& pool, int64_t N, const Tensor& q, const char* first = "q",
                  const char* checkpoints = "checkpoints");

// Checks a table of indices with this many rows, one a sequence.
void check_table(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t rank,
                 const char* symbols);

// Checks a flag of each sequence.
void check_flags(const char* op, const char* name, const Tensor& tensor, int64_t N);

// Checks states [.., H_v, V, K], or [.., H_v, K, V] unless v_first, of `rank` dimensions, in any floating dtype of 8
// bits or more. They are written in place and cannot be copied first. So each state must be contiguous.
void check_states(const char* op, const char* name, const Tensor& tensor, int64_t H_v, int64_t V, int64_t K,
                  int64_t rank, const char* symbols, bool v_first = true);

// Checks a tensor [slots, *slot] that is written in place: each slot must be contiguous.
void check_slots(const char* op, const char* name, const Tensor& tensor, int64_t slots,
                 torch::headeronly::IntHeaderOnlyArrayRef slot, const char* symbols);

}  // namespace flash_qla
