// The forward on the CPU: the plain recurrence, in parallel over sequences and value heads.
#include "cpu/forward.h"

#include "cpu/sequences.h"
#include "passes.h"

namespace flash_qla {

namespace {

// Zeroes outputs of no sequence: tokens after the last offset, and chunks of h that the upper bound adds.
template <typename T, typename CT>
void clear_padding(const Call& call, const std::vector<cpu::Sequence>& sequences, const cpu::Forward<T, CT>& forward) {
  const int64_t tokens = covered_tokens(sequences);
  zero_from(forward.o, tokens, call.T, call.H_v * call.V);
  if (call.output_A) {
    zero_from(forward.g_cumsum, tokens, call.T, call.H_v);
  }
  if (call.output_A) {
    zero_from(forward.A, tokens, call.T, call.H_v * kChunk);
  }
  if (call.output_h) {
    int64_t chunks = 0;
    if (!sequences.empty()) {
      const cpu::Sequence& last = sequences.back();
      chunks = last.first_chunk + chunk_count(last.length());
    }
    zero_from(forward.h, chunks, call.h_chunks, call.H_v * call.K * call.V);
  }
}

template <typename T, typename CT>
void run(const Call& call, const cpu::Checkpoints& checkpoints, const ForwardOutputs& out) {
  const cpu::Forward<T, CT> forward{
      .in = inputs_of<T, CT>(call, call.g),
      .checkpoints = checkpoints,
      .o = out.o.mutable_data_ptr<T>(),
      .g_cumsum = call.output_A ? out.g_cumsum.mutable_data_ptr<CT>() : nullptr,
      .A = call.output_A ? out.A.mutable_data_ptr<T>() : nullptr,
      .h = call.output_h ? out.h.mutable_data_ptr<T>() : nullptr,
      .final_state = call.output_final_state ? out.final_state.mutable_data_ptr<CT>() : nullptr,
  };
  const std::vector<cpu::Sequence> sequences = list_sequences(call);
  if (call.varlen) {
    clear_padding(call, sequences, forward);
  }
  in_parallel(call.op, call.N * call.H_v, [&](int64_t begin, int64_t end) {
    const cpu::Scratch<CT> scratch(call.K, call.V, call.output_A);
    for (int64_t i = begin; i < end; ++i) {
      cpu::run_sequence(forward, sequences[i / call.H_v], i % call.H_v, scratch);
    }
  });
}

}  // namespace

void run_forward_cpu(const Call& call, const cpu::Checkpoints& checkpoints, const ForwardOutputs& out) {
  say_once_that_this_is_slow(call.op);
  with_types(call.dtype, [&]<typename T, typename CT>() { run<T, CT>(call, checkpoints, out); });
}

ForwardOutputs forward_cpu(const Call& call) {
  ForwardOutputs out = allocate_forward(call);
  run_forward_cpu(call, {}, out);
  return out;
}

}  // namespace flash_qla
