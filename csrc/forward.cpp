#include "forward.h"

#include <torch/csrc/stable/ops.h>

namespace flash_qla {

Tensor contiguous_as(const Tensor& tensor, ScalarType dtype) {
  const Tensor typed = tensor.scalar_type() == dtype ? tensor : torch::stable::to(tensor, dtype);
  // Asking first is cheaper: torch::stable::contiguous goes through the dispatcher.
  return typed.is_contiguous() ? typed : torch::stable::contiguous(typed);
}

std::vector<int64_t> state_shape(const Problem& p, bool state_v_first) {
  return state_v_first ? std::vector{p.N, p.H_v, p.V, p.K} : std::vector{p.N, p.H_v, p.K, p.V};
}

ForwardArgs canonicalize(const Problem& problem, ForwardArgs args) {
  args.q = contiguous_as(args.q, problem.dtype);
  args.k = contiguous_as(args.k, problem.dtype);
  args.v = contiguous_as(args.v, problem.dtype);
  args.g = contiguous_as(args.g, problem.compute_dtype);
  args.beta = contiguous_as(args.beta, problem.compute_dtype);
  if (args.initial_state) {
    args.initial_state = contiguous_as(*args.initial_state, problem.compute_dtype);
  }
  if (args.cu_seqlens) {
    args.cu_seqlens = contiguous_as(*args.cu_seqlens, args.cu_seqlens->scalar_type());
  }
  return args;
}

ForwardOutputs allocate_forward(const Problem& p, const ForwardArgs& args) {
  const auto empty = [&](ScalarType dtype, std::vector<int64_t> shape) {
    return torch::stable::new_empty(args.q, shape, dtype);
  };
  const auto empty_if = [&](bool wanted, ScalarType dtype, std::vector<int64_t> shape) {
    return empty(dtype, wanted ? std::move(shape) : std::vector<int64_t>{0});
  };
  const int64_t rows = p.varlen ? 1 : p.B;
  const int64_t chunks_per_row = p.varlen ? p.NT : (p.T + kChunk - 1) / kChunk;
  ForwardOutputs out;
  if (args.output_low_level) {
    out.g_cumsum = empty(p.compute_dtype, {p.B, p.T, p.H_v});
    out.A = empty(p.dtype, {p.B, p.T, p.H_v, kChunk});
    out.h = empty_if(args.output_h, p.dtype, {rows, chunks_per_row, p.H_v, p.V, p.K});
  }
  out.o = empty(p.dtype, {p.B, p.T, p.H_v, p.V});
  out.final_state = empty_if(args.output_final_state, p.compute_dtype, state_shape(p, args.state_v_first));
  return out;
}

Tensor h_as_returned(const ForwardArgs& args, const Tensor& h) {
  return args.output_h && !args.state_v_first ? torch::stable::transpose(h, -2, -1) : h;
}

}  // namespace flash_qla
