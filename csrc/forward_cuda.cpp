// The forward on a Hopper GPU: plan, gates, chunk inverse, states, output.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "chunk_call.h"
#include "forward.h"
#include "kernels.h"

namespace flash_qla {

namespace {

// No sequence has a token: every state passes through, and all rows are padding.
void pass_states_through(const ForwardArgs& args, ForwardOutputs& out) {
  torch::stable::zero_(out.o);
  if (args.output_low_level) {
    for (Tensor* zeros : {&out.g_cumsum, &out.A, &out.h}) {
      torch::stable::zero_(*zeros);
    }
  }
  if (args.output_final_state && args.initial_state) {
    torch::stable::copy_(out.final_state, *args.initial_state);
  } else {
    torch::stable::zero_(out.final_state);
  }
}

}  // namespace

ForwardOutputs forward_cuda(const Problem& p, const ForwardArgs& given) {
  const torch::stable::accelerator::DeviceGuard guard(given.q.get_device_index());
  check_supported_on_gpu(p);
  const ForwardArgs args = canonicalize(p, given);
  ForwardOutputs out = allocate_forward(p, args);
  ChunkCall call(p, args, /*keep_rstd=*/false);
  if (call.is_empty()) {
    pass_states_through(args, out);
    return out;
  }

  // b goes to the op's output where it is one. h does too: it is the largest intermediate.
  Workspace& workspace = call.workspace;
  const auto own_h = workspace.reserve<uint16_t>(args.output_h ? 0 : call.plan.slots * p.H_v * kSquare);
  workspace.allocate(args.q);
  void* const h = args.output_h ? out.h.mutable_data_ptr() : workspace[own_h];
  const int64_t h_slots = args.output_h ? p.NT : call.plan.slots;
  if (args.output_h && p.varlen) {
    torch::stable::zero_(out.h);  // slots that no chunk uses
  }

  call.run_plan();
  call.run_gates(/*is_cumulative=*/false, data(out.g_cumsum, args.output_low_level));
  kernels::chunk_inverse({.k = call.k.const_data_ptr(),
                          .gates = workspace[call.gates],
                          .chunks = workspace[call.chunks],
                          .A = data(out.A, args.output_low_level),
                          .gated_inverse = workspace[call.gated_inverse],
                          .group = call.group,
                          .has_A = args.output_low_level,
                          .R = call.plan.rows,
                          .HK = p.H_k,
                          .NT = call.plan.slots,
                          .HV = p.H_v},
                         {.dtype = call.dtype}, call.stream);
  call.run_states("rounded", h, h_slots, data(out.final_state, args.output_final_state));
  kernels::chunk_output({.q = call.q.const_data_ptr(),
                         .k = call.k.const_data_ptr(),
                         .gates = workspace[call.gates],
                         .chunks = workspace[call.chunks],
                         .h = h,
                         .v_new = workspace[call.v_new],
                         .o = out.o.mutable_data_ptr(),
                         .group = call.group,
                         .scale = static_cast<float>(p.scale),
                         .R = call.plan.rows,
                         .HK = p.H_k,
                         .NT = call.plan.slots,
                         .HV = p.H_v,
                         .h_slots = h_slots},
                        {.dtype = call.dtype}, call.stream);
  return out;
}

}  // namespace flash_qla

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CUDA, m) {
  m.impl("chunk_gated_delta_rule", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_op<flash_qla::forward_cuda>));
  m.impl("chunk_gated_delta_rule_fwd", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_fwd_op<flash_qla::forward_cuda>));
}
