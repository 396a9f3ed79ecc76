#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/recurrence.h"
#include "cpu/call.h"

namespace flash_qla {

namespace {

template <typename T, typename CT>
void run(const Problem& p, const ForwardArgs& args, const ForwardOutputs& out) {
  const cpu::Forward<T, CT> forward{
      .H_k = p.H_k,
      .H_v = p.H_v,
      .K = p.K,
      .V = p.V,
      .scale = static_cast<CT>(p.scale),
      .use_qk_l2norm = args.use_qk_l2norm,
      .state_v_first = args.state_v_first,
      .q = args.q.const_data_ptr<T>(),
      .k = args.k.const_data_ptr<T>(),
      .v = args.v.const_data_ptr<T>(),
      .g = args.g.const_data_ptr<CT>(),
      .beta = args.beta.const_data_ptr<CT>(),
      .initial_state = args.initial_state ? args.initial_state->const_data_ptr<CT>() : nullptr,
      .o = out.o.mutable_data_ptr<T>(),
      .g_cumsum = args.output_low_level ? out.g_cumsum.mutable_data_ptr<CT>() : nullptr,
      .A = args.output_low_level ? out.A.mutable_data_ptr<T>() : nullptr,
      .h = args.output_h ? out.h.mutable_data_ptr<T>() : nullptr,
      .final_state = args.output_final_state ? out.final_state.mutable_data_ptr<CT>() : nullptr,
  };
  const std::vector<cpu::Sequence> sequences = list_sequences(p, args);

  // What no sequence covers: tokens after the last offset, and the slack in the bound on the number of chunks.
  if (p.varlen) {
    const int64_t tokens = covered_tokens(sequences);
    zero_from(forward.o, tokens, p.T, p.H_v * p.V);
    if (args.output_low_level) {
      zero_from(forward.g_cumsum, tokens, p.T, p.H_v);
      zero_from(forward.A, tokens, p.T, p.H_v * kChunk);
    }
    if (args.output_h) {
      int64_t chunks = 0;
      if (!sequences.empty()) {
        const cpu::Sequence& last = sequences.back();
        chunks = last.first_chunk + cpu::chunk_count(last.end - last.begin);
      }
      zero_from(forward.h, chunks, p.NT, p.H_v * p.K * p.V);
    }
  }

  torch::stable::parallel_for(0, p.N * p.H_v, 1, [&](int64_t begin, int64_t end) {
    const cpu::Scratch<CT> scratch(p.K, p.V, args.output_low_level);
    for (int64_t i = begin; i < end; ++i) {
      cpu::run_sequence(forward, sequences[i / p.H_v], i % p.H_v, scratch);
    }
  });
}

}  // namespace

ForwardOutputs forward_cpu(const Problem& problem, const ForwardArgs& given) {
  say_once_that_this_is_slow(problem.op);
  const ForwardArgs args = canonicalize(problem, given);
  const ForwardOutputs out = allocate_forward(problem, args);
  with_types(problem, [&]<typename T, typename CT>() { run<T, CT>(problem, args, out); });
  return out;
}

}  // namespace flash_qla

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CPU, m) {
  m.impl("chunk_gated_delta_rule", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_op<flash_qla::forward_cpu>));
  m.impl("chunk_gated_delta_rule_fwd", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_fwd_op<flash_qla::forward_cpu>));
}
