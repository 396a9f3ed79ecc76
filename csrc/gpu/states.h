// The states of a call, in tensors of its own or in slots of a pool. Kernels read and write them in place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "call.h"
#include "kernels.h"
#include "layout.h"
#include "passes.h"

namespace flash_qla {

// A table [rows] or [rows, columns] of indices whose rows are contiguous, as kernels take it.
kernels::IndexTable index_table(const std::optional<Tensor>& table);

// The states of a call as kernels take them (kernels_tl/bundles.py).
struct States {
  kernels::States tensors;           // addresses and layout
  kernels::Slots slots;              // the slot of each sequence: by a table, or the sequence's number
  kernels::StatePresence presence;   // which states exist
  kernels::Checkpoints kept;         // states after every so many tokens, V-first; 0 tokens: no checkpoints
  kernels::CheckpointTable kept_in;  // their slots: by a table, or in the order of the sequences
  bool rounds = false;               // after a checkpoint a sequence goes on with the state as stored, rounded

  // Whether the state is rounded at checkpoints, or they are at no multiples of kChunk. Then no sequence is cut, and
  // chunk_forward does the work.
  bool resumable() const { return rounds || kept.checkpoint_every % kChunk != 0; }
  // Whether some states have 8 bits. The Dtypes of 8 bits are the last ones.
  bool float8() const { return std::max(tensors.state_dtype, kept.kept_dtype) >= Dtype::kFloat8E4m3fn; }
};

// The op's own states: fp32, contiguous, in the layout of the call.
kernels::States contiguous_states(const Call& call, const void* initial, void* final = nullptr);

// States in the order of the sequences. `has_initial` and `has_final`: whether they exist.
States states_in_order(const Call& call, const kernels::States& tensors, bool has_initial, bool has_final);

// The states of the op's own tensors.
States states_of(const Call& call, const ForwardOutputs& out);

// The states that kernels read over ranks: the given states, or zeros. The plan says that all sequences have states,
// because begin does not know yet which of them will exist.
std::optional<Tensor> states_or_zeros(const Call& call, const std::optional<Tensor>& states);

// Throws, with the argument's name, unless kernels can take the states of the pool.
void check_states_on_gpu(const char* op, const char* name, const Tensor& tensor);
// Throws unless the slots of a tensor [slots, ..] start at multiples of 16 bytes.
void check_slots_on_gpu(const char* op, const char* name, const Tensor& tensor);

// Runs the forward of a checked call that has tokens. It writes o, and the other outputs that are defined.
void run_forward(const Call& call, const States& states, const ForwardOutputs& out);

}  // namespace flash_qla
