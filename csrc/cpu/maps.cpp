// The maps on the CPU: the recurrence over V + K rows of a state, in place.
#include "maps.h"

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "cpu/recurrence.h"
#include "cpu/recurrence_bwd.h"
#include "cpu/sequences.h"

namespace flash_qla {

namespace {

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
  const std::vector<cpu::Sequence> sequences = list_sequences(call);
  torch::stable::parallel_for(0, call.N * call.H_v, 1, [&](int64_t begin, int64_t end) {
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
  const std::vector<cpu::Sequence> sequences = list_sequences(call);
  const int64_t group = call.group();
  torch::stable::parallel_for(0, call.N * call.H_v, 1, [&](int64_t begin, int64_t end) {
    const cpu::BackwardScratch<CT> scratch(backward.K, backward.V, 0);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i % call.H_v;
      cpu::SequenceBackward(backward, sequences[i / call.H_v], head / group, scratch).run_gradient(head, call.V);
    }
  });
}

}  // namespace

Tensor forward_map_cpu(const Call& call) {
  say_once_that_this_is_slow(call.op);
  Tensor map = map_of_nothing(call, call.initial_state);
  with_types(call.dtype, [&]<typename T, typename CT>() { run_forward<T, CT>(call, map.mutable_data_ptr<CT>()); });
  return map;
}

Tensor backward_map_cpu(const BackwardCall& call) {
  say_once_that_this_is_slow(call.op);
  Tensor map = map_of_nothing(call, call.grad_final_state);
  with_types(call.dtype, [&]<typename T, typename CT>() { run_backward<T, CT>(call, map.mutable_data_ptr<CT>()); });
  return map;
}

}  // namespace flash_qla
