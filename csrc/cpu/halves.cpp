// The halves on the CPU: the first makes the maps, by the recurrence over V + K rows of a state, in place, as V-first
// rows of a state do not depend on each other: from [S; I], with v (do) zero in the rows of I. The second is the pass.
#include "halves.h"

#include <vector>

#include "cpu/recurrence.h"
#include "cpu/recurrence_bwd.h"
#include "cpu/sequences.h"

namespace flash_qla {

namespace {

// Those of which maps are wanted, numbered by these.
std::vector<cpu::Sequence> mapped_sequences(const Call& call) {
  const std::vector<cpu::Sequence> sequences = list_sequences(call);
  std::vector<cpu::Sequence> mapped;
  for (const int64_t n : call.map_sequences) {
    mapped.push_back(sequences[n]);
    mapped.back().index = static_cast<int64_t>(mapped.size()) - 1;
  }
  return mapped;
}

template <typename T, typename CT>
void run_forward(const Call& call, CT* map) {
  const cpu::Checkpoints none;
  const cpu::Forward<T, CT> forward{
      .H_k = call.H_k,
      .H_v = call.H_v,
      .K = call.K,
      .V = call.V + call.K,
      .values = call.V,
      .scale = 0,
      .use_qk_l2norm = call.use_qk_l2norm,
      .state_v_first = true,
      .q = call.q.const_data_ptr<T>(),
      .k = call.k.const_data_ptr<T>(),
      .v = call.v.const_data_ptr<T>(),
      .gates = activations_of<CT>(call, call.g),
      .initial_state = map,
      .o = nullptr,
      .g_cumsum = nullptr,
      .A = nullptr,
      .h = nullptr,
      .final_state = map,
      .checkpoints = none,
  };
  const std::vector<cpu::Sequence> sequences = mapped_sequences(call);
  const auto count = static_cast<int64_t>(sequences.size()) * call.H_v;
  in_parallel(call.op, count, [&](int64_t begin, int64_t end) {
    const cpu::Scratch<CT> scratch(forward.K, forward.V, false);
    for (int64_t i = begin; i < end; ++i) {
      cpu::run_sequence(forward, sequences[i / call.H_v], i % call.H_v, scratch);
    }
  });
}

template <typename T, typename CT>
void run_backward(const BackwardCall& call, CT* map) {
  const cpu::Backward<T, CT> backward{
      .H_k = call.H_k,
      .H_v = call.H_v,
      .K = call.K,
      .V = call.V + call.K,
      .scale = static_cast<CT>(*call.scale),
      .use_qk_l2norm = call.use_qk_l2norm,
      .state_v_first = true,
      .q = call.q.const_data_ptr<T>(),
      .k = call.k.const_data_ptr<T>(),
      .v = nullptr,
      .g_cumsum = call.g.const_data_ptr<CT>(),
      .gates = activations_of<CT>(call, call.g),
      .initial_state = nullptr,
      .grad_o = call.grad_o.const_data_ptr<T>(),
      .grad_final_state = map,
      .dq = nullptr,
      .dk = nullptr,
      .dv = nullptr,
      .db = {},
      .dg = {},
      .dh0 = map,
      .gate_sums = nullptr,
  };
  const std::vector<cpu::Sequence> sequences = mapped_sequences(call);
  const int64_t group = call.group(), count = static_cast<int64_t>(sequences.size()) * call.H_v;
  in_parallel(call.op, count, [&](int64_t begin, int64_t end) {
    const cpu::BackwardScratch<CT> scratch(backward.K, backward.V, 0);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i % call.H_v;
      cpu::SequenceBackward(backward, sequences[i / call.H_v], head / group, scratch).run_gradient(head, call.V);
    }
  });
}

}  // namespace

Begun begin_forward_cpu(const Call& call, const ForwardOutputs&) {
  say_once_that_this_is_slow(call.op);
  Tensor maps = maps_of_nothing(call, call.initial_state);
  with_types(call.dtype, [&]<typename T, typename CT>() { run_forward<T, CT>(call, maps.mutable_data_ptr<CT>()); });
  return {maps, no_workspace(call)};
}

void finish_forward_cpu(const Call& call, const Tensor&, ForwardOutputs& out) { run_forward_cpu(call, {}, out); }

Begun begin_backward_cpu(const BackwardCall& call, const BackwardOutputs&) {
  say_once_that_this_is_slow(call.op);
  Tensor maps = maps_of_nothing(call, call.grad_final_state);
  with_types(call.dtype, [&]<typename T, typename CT>() { run_backward<T, CT>(call, maps.mutable_data_ptr<CT>()); });
  return {maps, no_workspace(call)};
}

void replay_backward_cpu(const BackwardCall&, const Tensor&) {}  // in one with the rest

void finish_backward_cpu(const BackwardCall& call, const Tensor&, BackwardOutputs& out) { run_backward_cpu(call, out); }

}  // namespace flash_qla
