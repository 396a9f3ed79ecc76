// The prefill on the CPU: the forward between a gather from the pool and a scatter back.
#include "prefill.h"

#include <algorithm>
#include <vector>

#include "chunks.h"
#include "cpu/forward.h"
#include "cpu/pool.h"
#include "cpu/sequences.h"
#include "output.h"
#include "passes.h"
#include "tensors.h"

namespace flash_qla {

namespace {

// The slots of each sequence's last and first state. kNoState: no slot; as the first state, zeros.
struct SequenceSlots {
  std::vector<int64_t> last, first;
};

SequenceSlots list_slots(const PrefillCall& call, const std::vector<cpu::Sequence>& sequences, cpu::Slots& pool) {
  const cpu::Indices indices(call.state_indices), first_indices(call.initial_indices());
  const bool* const has_state = call.has_initial_state ? call.has_initial_state->const_data_ptr<bool>() : nullptr;
  const int64_t step = call.has_initial_state ? call.has_initial_state->stride(0) : 0;
  SequenceSlots found;
  for (const cpu::Sequence& sequence : sequences) {
    const int64_t n = sequence.index;
    const std::string name = cpu::entry("state_indices", n);
    int64_t last = pool.checked(name, indices(n)), first = kNoState;
    if (last != kNoState && (!call.has_initial_state || has_state[n * step])) {
      const std::string first_name = call.initial_state_indices ? cpu::entry("initial_state_indices", n) : name;
      first = pool.checked(first_name, first_indices(n));
      if (first != kNoState && sequence.begin == sequence.end) {
        first = last = kNoState;  // the state stays, and another sequence may have the slot
      }
      if (first != kNoState && first != last) {
        pool.read(first_name, first, n);
      }
    }
    if (last != kNoState) {
      pool.write(name, last, n);
    }
    found.last.push_back(last);
    found.first.push_back(first);
  }
  return found;
}

// The places of the states after checkpoint_every tokens, after twice as many, and so on.
cpu::Checkpoints list_checkpoints(const PrefillCall& call, const std::vector<cpu::Sequence>& sequences,
                                  const std::vector<int64_t>& slots, cpu::Slots& pool) {
  const Tensor& to = call.checkpoints ? *call.checkpoints : call.state_pool;
  cpu::Checkpoints found{
      .every = call.checkpoint_every, .rounds = call.batch_invariant, .to = writable_floats_of(to), .places = {}};
  const cpu::Indices indices(call.checkpoint_indices);
  int64_t row = 0;  // row of checkpoints
  for (const cpu::Sequence& sequence : sequences) {
    const int64_t n = sequence.index, count = sequence.length() / call.checkpoint_every;
    std::vector<int64_t> places(count, kNoState);
    for (int64_t j = 0; j < count; ++j, ++row) {
      if (slots[n] == kNoState) {
        continue;
      }
      int64_t index = row;
      if (call.checkpoints) {
        cpu::checked_index(call.op, "the number of a state of checkpoints", row, 0, to.size(0) - 1);
      } else {
        const std::string name = cpu::entry("checkpoint_indices", n, j);
        index = j < indices.columns ? pool.checked(name, indices(n, j)) : kNoState;
        if (index != kNoState) {
          pool.write(name, index, n);
        }
      }
      places[j] = index == kNoState ? kNoState : index * to.stride(0);
    }
    found.places.push_back(std::move(places));
  }
  return found;
}

// Calls copy(pool, element of the pool, element of `states`) for all elements of the states that have a slot.
template <typename CT>
void for_states(const PrefillCall& call, const std::vector<int64_t>& slots, const Tensor& states, auto copy) {
  const int64_t size = call.H_v * call.V * call.K;
  CT* const all = states.mutable_data_ptr<CT>();
  const cpu::WritableFloats pool = writable_floats_of(call.state_pool);
  in_parallel(call.op, call.N, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t i = 0; slots[n] != kNoState && i < size; ++i) {
        copy(pool, slots[n] * call.state_pool.stride(0) + i, all[n * size + i]);
      }
    }
  });
}

template <typename T, typename CT>
Tensor run(PrefillCall& call) {
  const std::vector<cpu::Sequence> sequences = list_sequences(call);
  cpu::Slots pool(call.op, call.state_pool.size(0), call.null_index);
  const SequenceSlots slots = list_slots(call, sequences, pool);
  cpu::Checkpoints checkpoints;
  if (call.checkpoint_every > 0) {
    checkpoints = list_checkpoints(call, sequences, slots.last, pool);
  }

  call.initial_state = new_empty(call.op, call.q, call.state_shape(), call.compute_dtype);
  zero(*call.initial_state);
  for_states<CT>(call, slots.first, *call.initial_state,
                 [](const cpu::WritableFloats& from, int64_t at, CT& s) { s = from.get<CT>(at); });
  call.output_final_state = true;
  ForwardOutputs out;
  out.o = allocate_output(call, call.out, call.q);
  if (call.h) {
    out.h = memory_of(*call.h);
  }
  out.final_state = allocate_final_state(call);
  run_forward_cpu(call, checkpoints, out);
  for_states<CT>(call, slots.last, out.final_state,
                 [](const cpu::WritableFloats& to, int64_t at, CT s) { to.set(at, s); });

  T* const o = out.o.mutable_data_ptr<T>();
  const int64_t row = call.H_v * call.V, state = row * call.K;
  for (const cpu::Sequence& sequence : sequences) {
    if (slots.last[sequence.index] == kNoState) {
      std::fill(o + sequence.begin * row, o + sequence.end * row, T(0));
      if (call.h) {
        std::fill_n(out.h.mutable_data_ptr<T>() + sequence.first_chunk * state, chunk_count(sequence.length()) * state,
                    T(0));
      }
    }
  }
  return output_as_returned(call, call.out, std::move(out.o));
}

}  // namespace

void check_prefill_tables(const PrefillCall& call) {
  PrefillCall on_cpu = call;
  on_cpu.state_indices = to_cpu(on_cpu.state_indices);
  for (std::optional<Tensor>* tensor :
       {&on_cpu.initial_state_indices, &on_cpu.checkpoint_indices, &on_cpu.has_initial_state}) {
    if (*tensor) {
      *tensor = to_cpu(**tensor);
    }
  }
  const std::vector<cpu::Sequence> sequences = list_sequences(on_cpu);
  cpu::Slots pool(on_cpu.op, on_cpu.state_pool.size(0), on_cpu.null_index);
  const std::vector<int64_t> slots = list_slots(on_cpu, sequences, pool).last;
  if (on_cpu.checkpoint_every > 0) {
    list_checkpoints(on_cpu, sequences, slots, pool);
  }
}

Tensor prefill_cpu(PrefillCall call) {
  Tensor o = undefined_tensor();
  with_types(call.dtype, [&]<typename T, typename CT>() { o = run<T, CT>(call); });
  return o;
}

}  // namespace flash_qla
