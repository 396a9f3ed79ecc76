// begin and finish on the CPU. begin computes the maps by the recurrence over V + K rows of a state, in place:
// V-first rows of a state do not depend on each other. It starts from [S; I], and v (do) is zero in the rows of I.
// finish is the whole pass.
#include "ranks.h"

#include <vector>

#include "cpu/backward.h"
#include "cpu/forward.h"
#include "cpu/sequences.h"

namespace flash_qla {

namespace {

// The sequences whose maps are requested, numbered by their maps.
std::vector<cpu::Sequence> mapped_sequences(const Call& call) {
  const std::vector<cpu::Sequence> sequences = list_sequences(call);
  std::vector<cpu::Sequence> mapped;
  for (const int64_t n : call.map_sequences) {
    mapped.push_back(sequences[n]);
    mapped.back().index = static_cast<int64_t>(mapped.size()) - 1;
  }
  return mapped;
}

// Calls f(sequence, value head, scratch) for each map, in parallel. make_scratch() allocates a thread's scratch.
void for_maps(const Call& call, const auto& make_scratch, const auto& f) {
  const std::vector<cpu::Sequence> sequences = mapped_sequences(call);
  in_parallel(call.op, static_cast<int64_t>(sequences.size()) * call.H_v, [&](int64_t begin, int64_t end) {
    const auto scratch = make_scratch();
    for (int64_t i = begin; i < end; ++i) {
      f(sequences[i / call.H_v], i % call.H_v, scratch);
    }
  });
}

template <typename T, typename CT>
void run_forward(const Call& call, CT* map) {
  const cpu::Checkpoints none;
  cpu::Forward<T, CT> forward{.in = inputs_of_maps<T, CT>(call), .checkpoints = none, .final_state = map};
  forward.in.initial_state = map;
  for_maps(
      call, [&] { return cpu::Scratch<CT>(forward.in.K, forward.in.V, false); },
      [&](const cpu::Sequence& sequence, int64_t head, const cpu::Scratch<CT>& scratch) {
        cpu::run_sequence(forward, sequence, head, scratch);
      });
}

template <typename T, typename CT>
void run_backward(const BackwardCall& call, CT* map) {
  const cpu::Backward<T, CT> backward{
      .in = inputs_of_maps<T, CT>(call),
      .g_cumsum = call.is_cumulative() ? call.g.const_data_ptr<CT>() : nullptr,
      .grad_o = call.grad_o.const_data_ptr<T>(),
      .grad_final_state = map,
      .dh0 = map,
  };
  for_maps(
      call, [&] { return cpu::BackwardScratch<CT>(backward.in.K, backward.in.V, 0); },
      [&](const cpu::Sequence& sequence, int64_t head, const cpu::BackwardScratch<CT>& scratch) {
        cpu::SequenceBackward(backward, sequence, scratch).run_gradient(head);
      });
}

// begin: `run` advances maps that begin as [state; I].
Begun begin(const Call& call, const std::optional<Tensor>& states, const auto& run) {
  say_once_that_this_is_slow(call.op);
  Begun begun = begun_of_nothing(call, states);
  with_types(call.dtype,
             [&]<typename T, typename CT>() { run.template operator()<T, CT>(begun.maps.mutable_data_ptr<CT>()); });
  return begun;
}

}  // namespace

Begun begin_forward_cpu(const Call& call, const ForwardOutputs&) {
  return begin(call, call.initial_state, [&]<typename T, typename CT>(CT* map) { run_forward<T>(call, map); });
}

void finish_forward_cpu(const Call& call, ForwardOutputs& out) { run_forward_cpu(call, {}, out); }

Begun begin_backward_cpu(const BackwardCall& call, const BackwardOutputs&) {
  return begin(call, call.grad_final_state, [&]<typename T, typename CT>(CT* map) { run_backward<T>(call, map); });
}

void replay_backward_cpu(const BackwardCall&) {}  // finish_backward_cpu replays

void finish_backward_cpu(const BackwardCall& call, BackwardOutputs& out) { run_backward_cpu(call, out); }

}  // namespace flash_qla
