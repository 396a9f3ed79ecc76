// The backward on a Hopper GPU: plan, gates, the chunks' matrices, the states again, the states' gradient in reverse,
// the inputs' gradients.
#include "backward.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "gpu/chunk_call.h"
#include "gpu/kernel_runtime.h"
#include "kernels.h"

namespace flash_qla {

namespace {

// No sequence has a token: the states passed through, and no input mattered.
void pass_gradients_through(const BackwardArgs& args, BackwardOutputs& out) {
  for (Tensor* zeros : {&out.dq, &out.dk, &out.dv, &out.db, &out.dg}) {
    torch::stable::zero_(*zeros);
  }
  if (args.forward.initial_state && args.grad_final_state) {
    torch::stable::copy_(out.dh0, *args.grad_final_state);
  } else {
    torch::stable::zero_(out.dh0);
  }
}

}  // namespace

BackwardOutputs backward_cuda(const Problem& p, const BackwardArgs& given) {
  const torch::stable::accelerator::DeviceGuard guard(given.forward.q.get_device_index());
  check_supported_on_gpu(p);
  const BackwardArgs args = canonicalize(p, given);
  BackwardOutputs out = allocate_backward(p, args);
  ChunkCall call(p, args.forward, /*keep_rstd=*/true);
  if (call.is_empty()) {
    pass_gradients_through(args, out);
    return out;
  }

  const Tensor A = aligned(args.A);
  const Tensor grad_o = aligned(args.grad_o);
  const int64_t slots = call.plan.slots;
  Workspace& workspace = call.workspace;
  const auto attention = workspace.reserve<uint16_t>(slots * p.H_v * kMatrix);
  const auto u = workspace.reserve<uint16_t>(slots * p.H_v * kTile);
  const auto h = workspace.reserve<uint16_t>(slots * p.H_v * kSquare);
  const auto dh = workspace.reserve<uint16_t>(slots * p.H_v * kSquare);
  const auto passed = workspace.reserve<float>(slots * p.H_v * kPassedParts);
  workspace.allocate(args.forward.q);

  call.run_plan();
  call.run_gates();
  kernels::replay_matrices({.q = call.q.const_data_ptr(),
                            .k = call.k.const_data_ptr(),
                            .A = A.const_data_ptr(),
                            .gates = workspace[call.gates],
                            .chunks = workspace[call.chunks],
                            .gated_inverse = workspace[call.gated_inverse],
                            .attention = workspace[attention],
                            .group = call.group,
                            .scale = static_cast<float>(p.scale),
                            .tokens = call.plan.rows,
                            .H_k = p.H_k,
                            .H_v = p.H_v,
                            .chunk_slots = slots},
                           {.dtype = call.dtype, .K = p.K}, call.stream);
  call.run_states(workspace[h]);
  kernels::state_gradients({.q = call.q.const_data_ptr(),
                            .k = call.k.const_data_ptr(),
                            .grad_o = grad_o.const_data_ptr(),
                            .gates = workspace[call.gates],
                            .gated_inverse = workspace[call.gated_inverse],
                            .attention = workspace[attention],
                            .h = workspace[h],
                            .sequences = workspace[call.sequences],
                            .dht = data(args.grad_final_state),
                            .dh0 = data(out.dh0, args.forward.initial_state.has_value()),
                            .dh = workspace[dh],
                            .u = workspace[u],
                            .passed = workspace[passed],
                            .group = call.group,
                            .scale = static_cast<float>(p.scale),
                            .state_stride_v = args.forward.state_v_first ? kHeadDim : 1,
                            .state_stride_k = args.forward.state_v_first ? 1 : kHeadDim,
                            .has_dht = args.grad_final_state.has_value(),
                            .has_dh0 = args.forward.initial_state.has_value(),
                            .tokens = call.plan.rows,
                            .H_k = p.H_k,
                            .H_v = p.H_v,
                            .chunk_slots = slots,
                            .N = p.N,
                            .state_size = p.N * p.H_v * kSquare},
                           {.dtype = call.dtype, .K = p.K, .V = p.V}, call.stream);
  kernels::input_gradients({.q = call.q.const_data_ptr(),
                            .k = call.k.const_data_ptr(),
                            .v = call.v.const_data_ptr(),
                            .grad_o = grad_o.const_data_ptr(),
                            .q_rstd = data(call.q_rstd),
                            .k_rstd = data(call.k_rstd),
                            .gates = workspace[call.gates],
                            .chunks = workspace[call.chunks],
                            .h = workspace[h],
                            .dh = workspace[dh],
                            .v_new = workspace[call.v_new],
                            .u = workspace[u],
                            .passed = workspace[passed],
                            .dq = out.dq.mutable_data_ptr(),
                            .dk = out.dk.mutable_data_ptr(),
                            .dv = out.dv.mutable_data_ptr(),
                            .db = out.db.mutable_data_ptr(),
                            .dg = out.dg.mutable_data_ptr(),
                            .group = call.group,
                            .scale = static_cast<float>(p.scale),
                            .use_l2norm = args.forward.use_qk_l2norm,
                            .ctas = std::min<int64_t>(slots * p.H_k, runtime::device_properties().sm_count),
                            .tokens = call.plan.rows,
                            .H_k = p.H_k,
                            .H_v = p.H_v,
                            .chunk_slots = slots},
                           {.dtype = call.dtype, .K = p.K, .V = p.V}, call.stream);
  return out;
}

}  // namespace flash_qla

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CUDA, m) {
  m.impl("chunk_gated_delta_rule_bwd", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_bwd_op<flash_qla::backward_cuda>));
}
