// The backward on the CPU: the recurrence in reverse, in parallel over sequences and query/key heads. A sequence's pass
// is in cpu/backward.h, the formulas of a token's gradients in cpu/chunk.cpp. It does not need A, because the
// recurrence has no chunk inverse.
#include "cpu/backward.h"

#include <algorithm>
#include <vector>

#include "cpu/sequences.h"
#include "passes.h"

namespace flash_qla {

namespace {

// Zeroes the gradients of tokens after the last offset.
template <typename T, typename CT>
void clear_padding(const Call& call, const std::vector<cpu::Sequence>& sequences,
                   const cpu::Backward<T, CT>& backward) {
  const int64_t tokens = covered_tokens(sequences);
  for (int64_t row = tokens; row < call.T; ++row) {
    std::fill_n(backward.dq + row * backward.keys_row, call.H_k * call.K, T(0));
    std::fill_n(backward.dk + row * backward.keys_row, call.H_k * call.K, T(0));
    std::fill_n(backward.dv + row * backward.values_row, call.H_v * call.V, T(0));
  }
  for (int64_t row = tokens * call.H_v; row < call.T * call.H_v; ++row) {
    backward.db.set(row, CT(0));
    backward.dg.set(row, CT(0));
  }
}

// dA_log and ddt_bias = the sums of gate_sums [N, H_v, 2] over the sequences, in their order.
template <typename CT>
void sum_sequences(const Call& call, const std::vector<CT>& gate_sums, const BackwardOutputs& out) {
  for (int64_t head = 0; head < call.H_v; ++head) {
    CT sums[2] = {};
    for (int64_t n = 0; n < call.N; ++n) {
      sums[0] += gate_sums[(n * call.H_v + head) * 2];
      sums[1] += gate_sums[(n * call.H_v + head) * 2 + 1];
    }
    out.dA_log.mutable_data_ptr<CT>()[head] = sums[0];
    if (call.dt_bias) {
      out.ddt_bias.mutable_data_ptr<CT>()[head] = sums[1];
    }
  }
}

template <typename T, typename CT>
void run(const BackwardCall& call, const BackwardOutputs& out) {
  std::vector<CT> gate_sums(call.use_gate ? call.N * call.H_v * 2 : 0);
  const cpu::Backward<T, CT> backward{
      .in = inputs_of<T, CT>(call, call.use_gate ? *call.g_raw : call.g),
      .g_cumsum = call.is_cumulative() ? call.g.const_data_ptr<CT>() : nullptr,
      .grad_o = call.grad_o.const_data_ptr<T>(),
      .grad_final_state = call.grad_final_state ? call.grad_final_state->const_data_ptr<CT>() : nullptr,
      .dq = out.dq.mutable_data_ptr<T>(),
      .dk = out.dk.mutable_data_ptr<T>(),
      .dv = out.dv.mutable_data_ptr<T>(),
      .keys_row = row_strides(out.dq).row,
      .values_row = row_strides(out.dv).row,
      .db = writable_floats_of(out.db),
      .dg = writable_floats_of(out.dg),
      .dh0 = call.initial_state ? out.dh0.mutable_data_ptr<CT>() : nullptr,
      .gate_sums = call.use_gate ? gate_sums.data() : nullptr,
  };
  const std::vector<cpu::Sequence> sequences = list_sequences(call);
  if (call.varlen) {
    clear_padding(call, sequences, backward);
  }
  int64_t longest = 0;
  for (const cpu::Sequence& sequence : sequences) {
    longest = std::max(longest, sequence.length());
  }
  in_parallel(call.op, call.N * call.H_k, [&](int64_t begin, int64_t end) {
    const cpu::BackwardScratch<CT> scratch(call.K, call.V, longest);
    for (int64_t i = begin; i < end; ++i) {
      cpu::SequenceBackward(backward, sequences[i / call.H_k], scratch).run(i % call.H_k);
    }
  });
  if (call.use_gate) {
    sum_sequences(call, gate_sums, out);
  }
}

}  // namespace

void run_backward_cpu(const BackwardCall& call, const BackwardOutputs& out) {
  say_once_that_this_is_slow(call.op);
  with_types(call.dtype, [&]<typename T, typename CT>() { run<T, CT>(call, out); });
}

BackwardOutputs backward_cpu(const BackwardCall& call) {
  BackwardOutputs out = allocate_backward(call);
  run_backward_cpu(call, out);
  return out;
}

}  // namespace flash_qla
