#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "backward.h"
#include "cpu/recurrence_bwd.h"
#include "cpu/call.h"

namespace flash_qla {

namespace {

// A is not needed: the recurrence has no chunk inverse.
template <typename T, typename CT>
void run(const Problem& p, const BackwardArgs& args, const BackwardOutputs& out) {
  const ForwardArgs& forward = args.forward;
  const auto data = [](const std::optional<Tensor>& state) { return state ? state->const_data_ptr<CT>() : nullptr; };
  const cpu::Backward<T, CT> backward{
      .H_k = p.H_k,
      .H_v = p.H_v,
      .K = p.K,
      .V = p.V,
      .scale = static_cast<CT>(p.scale),
      .use_qk_l2norm = forward.use_qk_l2norm,
      .state_v_first = forward.state_v_first,
      .q = forward.q.const_data_ptr<T>(),
      .k = forward.k.const_data_ptr<T>(),
      .v = forward.v.const_data_ptr<T>(),
      .g_cumsum = forward.g.const_data_ptr<CT>(),
      .beta = forward.beta.const_data_ptr<CT>(),
      .initial_state = data(forward.initial_state),
      .grad_o = args.grad_o.const_data_ptr<T>(),
      .grad_final_state = data(args.grad_final_state),
      .dq = out.dq.mutable_data_ptr<T>(),
      .dk = out.dk.mutable_data_ptr<T>(),
      .dv = out.dv.mutable_data_ptr<T>(),
      .db = out.db.mutable_data_ptr<CT>(),
      .dg = out.dg.mutable_data_ptr<CT>(),
      .dh0 = forward.initial_state ? out.dh0.mutable_data_ptr<CT>() : nullptr,
  };
  const std::vector<cpu::Sequence> sequences = list_sequences(p, forward);

  if (p.varlen) {
    const int64_t tokens = covered_tokens(sequences);
    zero_from(backward.dq, tokens, p.T, p.H_k * p.K);
    zero_from(backward.dk, tokens, p.T, p.H_k * p.K);
    zero_from(backward.dv, tokens, p.T, p.H_v * p.V);
    zero_from(backward.db, tokens, p.T, p.H_v);
    zero_from(backward.dg, tokens, p.T, p.H_v);
  }

  int64_t longest = 0;
  for (const cpu::Sequence& sequence : sequences) {
    longest = std::max(longest, sequence.end - sequence.begin);
  }
  torch::stable::parallel_for(0, p.N * p.H_k, 1, [&](int64_t begin, int64_t end) {
    const cpu::BackwardScratch<CT> scratch(p.K, p.V, longest);
    for (int64_t i = begin; i < end; ++i) {
      cpu::SequenceBackward(backward, sequences[i / p.H_k], i % p.H_k, scratch).run();
    }
  });
}

}  // namespace

BackwardOutputs backward_cpu(const Problem& problem, const BackwardArgs& given) {
  say_once_that_this_is_slow(problem.op);
  const BackwardArgs args = canonicalize(problem, given);
  const BackwardOutputs out = allocate_backward(problem, args);
  with_types(problem, [&]<typename T, typename CT>() { run<T, CT>(problem, args, out); });
  return out;
}

}  // namespace flash_qla

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CPU, m) {
  m.impl("chunk_gated_delta_rule_bwd", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_bwd_op<flash_qla::backward_cpu>));
}
