#include "backward.h"

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "checks.h"

namespace flash_qla {

void check_backward(const Problem& p, const BackwardArgs& args) {
  const Tensor& q = args.forward.q;
  check_device(p.op, "A", args.A, q);
  check_same_dtype(p.op, "A", args.A, q);
  check_shape(p.op, "A", args.A, {p.B, p.T, p.H_v, kChunk}, "[B, T, H_v, 64]");

  check_device(p.op, "do", args.grad_o, q);
  check_floating(p.op, "do", args.grad_o);
  check_shape(p.op, "do", args.grad_o, {p.B, p.T, p.H_v, p.V}, "[B, T, H_v, V], like v");

  if (args.grad_final_state) {
    const Tensor& dht = *args.grad_final_state;
    check_device(p.op, "dht", dht, q);
    check_floating(p.op, "dht", dht);
    check_state_shape(p, "dht", dht, args.forward.state_v_first);
  }
}

BackwardArgs canonicalize(const Problem& problem, BackwardArgs args) {
  args.forward = canonicalize(problem, args.forward);
  args.A = contiguous_as(args.A, problem.dtype);
  args.grad_o = contiguous_as(args.grad_o, problem.dtype);
  if (args.grad_final_state) {
    args.grad_final_state = contiguous_as(*args.grad_final_state, problem.compute_dtype);
  }
  return args;
}

BackwardOutputs allocate_backward(const Problem& p, const BackwardArgs& args) {
  const auto empty = [&](ScalarType dtype, std::vector<int64_t> shape) {
    return torch::stable::new_empty(args.forward.q, shape, dtype);
  };
  return {
      .dq = empty(p.dtype, {p.B, p.T, p.H_k, p.K}),
      .dk = empty(p.dtype, {p.B, p.T, p.H_k, p.K}),
      .dv = empty(p.dtype, {p.B, p.T, p.H_v, p.V}),
      .db = empty(p.compute_dtype, {p.B, p.T, p.H_v}),
      .dg = empty(p.compute_dtype, {p.B, p.T, p.H_v}),
      .dh0 = empty(p.compute_dtype,
                   args.forward.initial_state ? state_shape(p, args.forward.state_v_first) : std::vector<int64_t>{0}),
  };
}

}  // namespace flash_qla
