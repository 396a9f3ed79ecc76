// Where a call's states are: in tensors of its own or in slots of a pool. Kernels read them and write them in place.
#pragma once

#include <cstdint>
#include <optional>

#include "call.h"
#include "layout.h"
#include "passes.h"

namespace flash_qla {

// Indices [rows, columns], a row's side by side.
struct IndexTable {
  const void* numbers = nullptr;
  int64_t kind = TableKind::kNone;
  int64_t row_stride = 1, columns = 1;
};

// The TableKind of a table that a call has.
int64_t table_kind(const Tensor& tensor);

struct States {
  const void* initial = nullptr;  // slots, of which sequences have one each: those of slot_indices or, without, their
  void* final = nullptr;          // own numbers
  int64_t first_states = FirstStates::kNone;
  bool has_final = false;
  int64_t slots = 0, slot_stride = 0, stride_v = 0, stride_k = 0;  // strides in elements
  int64_t dtype = 0;                                               // Dtype; of 16 bits V-first only

  // On a pool.
  bool on_pool = false;  // `initial` and `final` are the same slots
  IndexTable slot_indices;
  int64_t null_index = -1;
  const void* has_state = nullptr;  // bool, of each sequence, if first_states is kFlagged
  int64_t has_state_stride = 1;

  // Checkpoints: V-first. To slots of kept_indices or, without, in the order of the sequences.
  int64_t checkpoint_every = 0;  // tokens; 0: none
  void* kept = nullptr;
  IndexTable kept_indices;
  int64_t kept_slots = 0, kept_slot_stride = 0, kept_dtype = 0;
};

// Of the op's own tensors.
States states_of(const Call& call, const ForwardOutputs& out);

// In halves the plan is made before it is known which states there will be, and says that sequences have all of them.
// These are such that are read: those that are given, or zeros.
std::optional<Tensor> states_or_zeros(const Call& call, const std::optional<Tensor>& states);

// What kernels take from the pools of inference engines. Throws, naming the argument, where they do not.
void check_states_on_gpu(const char* op, const char* name, const Tensor& tensor);

// The forward behind its checks, of a call that has tokens: o and, of the outputs, what is there.
void run_forward(const Call& call, const States& states, const ForwardOutputs& out);

}  // namespace flash_qla
