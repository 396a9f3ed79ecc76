// The backward on the CPU: the recurrence in reverse, in parallel over sequences and query/key heads. A is not needed:
// the recurrence has no chunk inverse.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "cpu/recurrence_bwd.h"
#include "cpu/sequences.h"
#include "passes.h"

namespace flash_qla {

namespace {

// What no sequence covers: tokens after the last offset.
template <typename T, typename CT>
void clear_padding(const Call& call, const std::vector<cpu::Sequence>& sequences,
                   const cpu::Backward<T, CT>& backward) {
  const int64_t tokens = covered_tokens(sequences);
  zero_from(backward.dq, tokens, call.T, call.H_k * call.K);
  zero_from(backward.dk, tokens, call.T, call.H_k * call.K);
  zero_from(backward.dv, tokens, call.T, call.H_v * call.V);
  zero_from(backward.db, tokens, call.T, call.H_v);
  zero_from(backward.dg, tokens, call.T, call.H_v);
}

template <typename T, typename CT>
void run(const BackwardCall& call, const BackwardOutputs& out) {
  const auto data = [](const std::optional<Tensor>& state) { return state ? state->const_data_ptr<CT>() : nullptr; };
  const cpu::Backward<T, CT> backward{
      .H_k = call.H_k,
      .H_v = call.H_v,
      .K = call.K,
      .V = call.V,
      .scale = static_cast<CT>(*call.scale),
      .use_qk_l2norm = call.use_qk_l2norm,
      .state_v_first = call.state_v_first,
      .q = call.q.const_data_ptr<T>(),
      .k = call.k.const_data_ptr<T>(),
      .v = call.v.const_data_ptr<T>(),
      .g_cumsum = call.g.const_data_ptr<CT>(),
      .beta = call.beta.const_data_ptr<CT>(),
      .initial_state = data(call.initial_state),
      .grad_o = call.grad_o.const_data_ptr<T>(),
      .grad_final_state = data(call.grad_final_state),
      .dq = out.dq.mutable_data_ptr<T>(),
      .dk = out.dk.mutable_data_ptr<T>(),
      .dv = out.dv.mutable_data_ptr<T>(),
      .db = out.db.mutable_data_ptr<CT>(),
      .dg = out.dg.mutable_data_ptr<CT>(),
      .dh0 = call.initial_state ? out.dh0.mutable_data_ptr<CT>() : nullptr,
  };
  const std::vector<cpu::Sequence> sequences = list_sequences(call);
  if (call.varlen) {
    clear_padding(call, sequences, backward);
  }
  int64_t longest = 0;
  for (const cpu::Sequence& sequence : sequences) {
    longest = std::max(longest, sequence.end - sequence.begin);
  }
  torch::stable::parallel_for(0, call.N * call.H_k, 1, [&](int64_t begin, int64_t end) {
    const cpu::BackwardScratch<CT> scratch(call.K, call.V, longest);
    for (int64_t i = begin; i < end; ++i) {
      cpu::SequenceBackward(backward, sequences[i / call.H_k], i % call.H_k, scratch).run();
    }
  });
}

}  // namespace

BackwardOutputs backward_cpu(const BackwardCall& call) {
  say_once_that_this_is_slow(call.op);
  BackwardOutputs out = allocate_backward(call);
  with_types(call, [&]<typename T, typename CT>() { run<T, CT>(call, out); });
  return out;
}

}  // namespace flash_qla
