// Where a call's states are: in tensors of its own or in slots of a pool. Kernels read them and write them in place.
#pragma once

#include <cstdint>
#include <optional>

#include "call.h"
#include "kernels.h"
#include "layout.h"
#include "passes.h"

namespace flash_qla {

// The TableKind of a table that a call has.
int64_t table_kind(const Tensor& tensor);

// The states of a call, as kernels take them (kernels_tl/bundles.py).
struct States {
  kernels::States numbers;           // where the states lie, and their layout
  kernels::Slots slots;              // the slot of each sequence: by a table, or the sequence's number
  kernels::StatePresence presence;   // which states there are
  kernels::Checkpoints kept;         // states every so many tokens, V-first; 0 tokens: none
  kernels::CheckpointTable kept_in;  // their slots: by a table, or in the order of the sequences
};

// The op's own states, one run in fp32 in the layout of the call.
kernels::States own_states(const Call& call, const void* initial, void* final = nullptr);

// States in the order of the sequences; `has_initial` and `has_final` say whether there are any.
States states_in_order(const Call& call, const kernels::States& numbers, bool has_initial, bool has_final);

// The states of the op's own tensors.
States states_of(const Call& call, const ForwardOutputs& out);

// In halves the plan is made before it is known which states there will be, and says that sequences have all of them.
// These are such that are read: those that are given, or zeros.
std::optional<Tensor> states_or_zeros(const Call& call, const std::optional<Tensor>& states);

// What kernels take from the pools of inference engines. Throws, naming the argument, where they do not.
void check_states_on_gpu(const char* op, const char* name, const Tensor& tensor);

// The forward behind its checks, of a call that has tokens: o and, of the outputs, what is there.
void run_forward(const Call& call, const States& states, const ForwardOutputs& out);

}  // namespace flash_qla
