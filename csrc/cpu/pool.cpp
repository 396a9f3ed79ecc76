#include "cpu/pool.h"

#include <utility>

#include "tensors.h"

namespace flash_qla::cpu {

namespace {

void list_ends(const PoolArguments& pool, const std::vector<int64_t>& lengths, Slots& slots,
               SequenceSlots& sequence_slots) {
  const Indices indices(pool.state_indices), first_indices(pool.initial_indices());
  const bool* const has_state = pool.has_initial_state ? pool.has_initial_state->const_data_ptr<bool>() : nullptr;
  const int64_t step = pool.has_initial_state ? pool.has_initial_state->stride(0) : 0;
  for (size_t n = 0; n < lengths.size(); ++n) {
    const auto sequence = static_cast<int64_t>(n);
    const std::string name = entry("state_indices", sequence);
    int64_t last = slots.checked(name, indices(sequence)), first = kNoState;
    if (last != kNoState && (!has_state || has_state[sequence * step])) {
      const std::string first_name = pool.initial_state_indices ? entry("initial_state_indices", sequence) : name;
      first = slots.checked(first_name, first_indices(sequence));
      if (first != kNoState && lengths[n] == 0) {
        first = last = kNoState;  // the state stays, and another sequence may have the slot
      }
      if (first != kNoState && first != last) {
        slots.read(first_name, first, sequence);
      }
    }
    if (last != kNoState) {
      slots.write(name, last, sequence);
    }
    sequence_slots.last.push_back(last);
    sequence_slots.first.push_back(first);
  }
}

void list_checkpoints(const char* op, const PoolArguments& pool, const std::vector<int64_t>& lengths, Slots& slots,
                      const char* checkpoints, SequenceSlots& sequence_slots) {
  const Indices indices(pool.checkpoint_indices);
  int64_t row = 0;  // of checkpoints
  for (size_t n = 0; n < lengths.size(); ++n) {
    const int64_t count = lengths[n] / pool.checkpoint_every;
    std::vector<int64_t> checkpoint_slots(count, kNoState);
    for (int64_t j = 0; j < count; ++j, ++row) {
      if (sequence_slots.last[n] == kNoState) {
        continue;
      }
      if (pool.checkpoints) {
        checkpoint_slots[j] = checked_index(op, std::string("the number of a state of ") + checkpoints, row, 0,
                                            pool.checkpoints->size(0) - 1);
      } else if (j < indices.columns) {
        const auto sequence = static_cast<int64_t>(n);
        const std::string name = entry("checkpoint_indices", sequence, j);
        checkpoint_slots[j] = slots.checked(name, indices(sequence, j));
        if (checkpoint_slots[j] != kNoState) {
          slots.write(name, checkpoint_slots[j], sequence);
        }
      }
    }
    sequence_slots.checkpoints.push_back(std::move(checkpoint_slots));
  }
}

}  // namespace

SequenceSlots list_slots(const char* op, const PoolArguments& pool, const std::vector<int64_t>& lengths,
                         const char* checkpoints) {
  Slots slots(op, pool.state_pool.size(0), pool.null_index);
  SequenceSlots sequence_slots;
  list_ends(pool, lengths, slots, sequence_slots);
  if (pool.checkpoint_every > 0) {
    list_checkpoints(op, pool, lengths, slots, checkpoints, sequence_slots);
  }
  return sequence_slots;
}

PoolArguments with_tables_on_cpu(PoolArguments pool) {
  pool.state_indices = to_cpu(pool.state_indices);
  for (std::optional<Tensor>* const table :
       {&pool.initial_state_indices, &pool.checkpoint_indices, &pool.has_initial_state}) {
    if (*table) {
      *table = to_cpu(**table);
    }
  }
  return pool;
}

}  // namespace flash_qla::cpu
