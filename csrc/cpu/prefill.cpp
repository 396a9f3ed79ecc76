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

cpu::SequenceSlots list_slots(const PrefillCall& call, const std::vector<cpu::Sequence>& sequences) {
  std::vector<int64_t> lengths;
  for (const cpu::Sequence& sequence : sequences) {
    lengths.push_back(sequence.length());
  }
  return cpu::list_slots(call.op, call, lengths);
}

cpu::Checkpoints checkpoints_of(const PrefillCall& call, std::vector<std::vector<int64_t>> slots) {
  if (call.checkpoint_every == 0) {
    return {};
  }
  const Tensor& to = call.checkpoints ? *call.checkpoints : call.state_pool;
  for (std::vector<int64_t>& of_sequence : slots) {
    for (int64_t& slot : of_sequence) {
      slot = slot == kNoState ? kNoState : slot * to.stride(0);
    }
  }
  return {.every = call.checkpoint_every,
          .rounds = call.batch_invariant,
          .to = writable_floats_of(to),
          .offsets = std::move(slots)};
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
  cpu::SequenceSlots slots = list_slots(call, sequences);
  const cpu::Checkpoints checkpoints = checkpoints_of(call, std::move(slots.checkpoints));

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
  static_cast<PoolArguments&>(on_cpu) = cpu::with_tables_on_cpu(call);
  list_slots(on_cpu, list_sequences(on_cpu));
}

Tensor prefill_cpu(PrefillCall call) {
  Tensor o = undefined_tensor();
  with_types(call.dtype, [&]<typename T, typename CT>() { o = run<T, CT>(call); });
  return o;
}

}  // namespace flash_qla
