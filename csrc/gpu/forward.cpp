// The forward on a Hopper GPU: plan, the chunks' matrices, with context parallelism the segments' maps and their scan,
// then states and output; or after the plan one kernel for all of it.
#include "forward.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "checks.h"
#include "gpu/chunk_call.h"
#include "gpu/kernel_runtime.h"
#include "kernels.h"
#include "offsets.h"

namespace flash_qla {

namespace {

// While chunk_plan runs, the kernel behind it finds out by itself where its CTAs begin (device/early_plan.cuh), as long
// as that takes less time: chunk_matrices in the CTAs that an SM takes at first, with up to so many sequences, and
// fused_forward, which needs them in order, with up to a warp's.
constexpr int64_t kFirstCtas = 4, kMostSearched = 64, kMostSorted = 32;

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
  if (p.varlen && offsets_are_checked()) {
    checked_offsets(p, torch::stable::to(*args.cu_seqlens, torch::stable::Device("cpu")));
  }
  ForwardOutputs out = allocate_forward(p, args);
  const int64_t rows = p.B * p.T;
  if (rows == 0 || p.N == 0) {
    pass_states_through(args, out);
    return out;
  }
  const Tensor q = aligned(args.q), k = aligned(args.k), v = aligned(args.v);
  const std::optional<Tensor> initial_state =
      args.initial_state ? std::optional(aligned(*args.initial_state)) : std::nullopt;
  if (args.output_h && p.varlen) {
    torch::stable::zero_(out.h);  // slots that no chunk uses
  }
  const ForwardShape shape{.B = p.B,
                           .T = p.T,
                           .N = p.N,
                           .H_k = p.H_k,
                           .H_v = p.H_v,
                           .varlen = p.varlen,
                           .sm_count = runtime::device_properties().sm_count,
                           .auto_cp = args.auto_cp,
                           .low_level = args.output_low_level,
                           .use_qk_l2norm = args.use_qk_l2norm,
                           .output_h = args.output_h,
                           .fp16 = p.dtype == ScalarType::Half};
  const ForwardDispatch dispatch = dispatch_forward(shape);
  ForwardWorkspace workspace(shape, dispatch);
  workspace.allocate(args.q);
  const char* const dtype = p.dtype == ScalarType::BFloat16 ? "bfloat16" : "float16";
  const cudaStream_t stream = current_stream(args.q);
  const int64_t group = p.H_v / p.H_k;
  const int64_t state_stride_v = args.state_v_first ? kHeadDim : 1, state_stride_k = args.state_v_first ? 1 : kHeadDim;
  const int64_t state_size = p.N * p.H_v * kSquare;
  const bool wide_offsets = p.varlen && has_dtype(*args.cu_seqlens, ScalarType::Long);
  const int64_t offset_words = (p.N + 1) * (wide_offsets ? 2 : 1);
  kernels::chunk_plan({.offsets = data(args.cu_seqlens),
                       .sequences = workspace[workspace.sequences],
                       .chunks = workspace[workspace.chunks],
                       .segments = workspace[workspace.segments],
                       .rows = rows,
                       .has_offsets = p.varlen,
                       .uniform_length = p.T,
                       .segment_chunks = dispatch.segment_chunks,
                       .cut_above = dispatch.cut_above,
                       .offsets_size = p.N + 1,
                       .N = p.N,
                       .chunk_slots = dispatch.slots,
                       .segment_slots = dispatch.segments},
                      {.offset_dtype = wide_offsets ? "int64" : "int32"}, stream);
  if (dispatch.fused) {
    kernels::fused_forward(
        {.q = q.const_data_ptr(),
         .k = k.const_data_ptr(),
         .v = v.const_data_ptr(),
         .g = args.g.const_data_ptr(),
         .beta = args.beta.const_data_ptr(),
         .chunks = workspace[workspace.chunks],
         .segments = workspace[workspace.segments],
         .offsets = data(args.cu_seqlens),
         .initial_state = data(initial_state),
         .final_state = data(out.final_state, args.output_final_state),
         .o = out.o.mutable_data_ptr(),
         .A = data(out.A, args.output_low_level),
         .g_cumsum = data(out.g_cumsum, args.output_low_level),
         .group = group,
         .state_v_first = args.state_v_first,
         .has_initial_state = initial_state.has_value(),
         .has_final_state = args.output_final_state,
         .ctas = dispatch.ctas,
         .early = !p.varlen || p.N <= kMostSorted,
         .has_offsets = p.varlen,
         .wide_offsets = wide_offsets,
         .uniform_length = p.T,
         .scale = static_cast<float>(p.scale),
         .tokens = rows,
         .H_k = p.H_k,
         .H_v = p.H_v,
         .chunk_slots = dispatch.slots,
         .segment_slots = dispatch.segments,
         .offset_words = offset_words,
         .state_size = state_size},
        {.dtype = dtype, .K = p.K, .V = p.V, .normalize = args.use_qk_l2norm, .low_level = args.output_low_level},
        stream);
    return out;
  }
  const auto block_rows = [&](int64_t j) {  // from the j-th on
    return static_cast<uint16_t*>(workspace[workspace.matrices]) + kBlock * (kChunk * j - kBlock * j * (j - 1) / 2);
  };
  kernels::chunk_matrices({.q = q.const_data_ptr(),
                           .k = k.const_data_ptr(),
                           .g = args.g.const_data_ptr(),
                           .beta = args.beta.const_data_ptr(),
                           .chunks = workspace[workspace.chunks],
                           .offsets = data(args.cu_seqlens),
                           .gates = workspace[workspace.gates],
                           .matrices_0 = block_rows(0),
                           .matrices_1 = block_rows(1),
                           .matrices_2 = block_rows(2),
                           .matrices_3 = block_rows(3),
                           .o = out.o.mutable_data_ptr(),
                           .A = data(out.A, args.output_low_level),
                           .g_cumsum = data(out.g_cumsum, args.output_low_level),
                           .group = group,
                           .heads = dispatch.heads_per_cta,
                           .scale = static_cast<float>(p.scale),
                           .low_level = args.output_low_level,
                           .early_ctas = p.varlen && p.N > kMostSearched ? 0 : kFirstCtas * shape.sm_count,
                           .N = p.N,
                           .has_offsets = p.varlen,
                           .wide_offsets = wide_offsets,
                           .uniform_length = p.T,
                           .tokens = rows,
                           .H_k = p.H_k,
                           .H_v = p.H_v,
                           .chunk_slots = dispatch.slots,
                           .offset_words = offset_words},
                          {.dtype = dtype, .K = p.K, .V = p.V, .normalize = args.use_qk_l2norm}, stream);
  if (dispatch.uses_cp()) {
    kernels::segment_maps({.k = k.const_data_ptr(),
                           .v = v.const_data_ptr(),
                           .gates = workspace[workspace.gates],
                           .matrices_0 = block_rows(0),
                           .matrices_1 = block_rows(1),
                           .matrices_2 = block_rows(2),
                           .matrices_3 = block_rows(3),
                           .segments = workspace[workspace.segments],
                           .states = workspace[workspace.states],
                           .maps = workspace[workspace.maps],
                           .skips = workspace[workspace.skips],
                           .group = group,
                           .tokens = rows,
                           .H_k = p.H_k,
                           .H_v = p.H_v,
                           .chunk_slots = dispatch.slots,
                           .segment_slots = dispatch.segments},
                          {.dtype = dtype, .K = p.K, .V = p.V}, stream);
    kernels::segment_scan({.sequences = workspace[workspace.sequences],
                           .segments = workspace[workspace.segments],
                           .maps = workspace[workspace.maps],
                           .skips = workspace[workspace.skips],
                           .initial_state = data(initial_state),
                           .states = workspace[workspace.states],
                           .state_stride_v = state_stride_v,
                           .state_stride_k = state_stride_k,
                           .has_initial_state = initial_state.has_value(),
                           .N = p.N,
                           .segment_slots = dispatch.segments,
                           .H_v = p.H_v,
                           .state_size = state_size},
                          {.dtype = dtype, .K = p.K, .V = p.V}, stream);
  }
  const auto chunk_forward = [&](int64_t value_tile, int64_t ctas, int64_t only_if) {
    kernels::chunk_forward({.q = q.const_data_ptr(),
                            .k = k.const_data_ptr(),
                            .v = v.const_data_ptr(),
                            .gates = workspace[workspace.gates],
                            .matrices_0 = block_rows(0),
                            .matrices_1 = block_rows(1),
                            .matrices_2 = block_rows(2),
                            .matrices_3 = block_rows(3),
                            .segments = workspace[workspace.segments],
                            .initial_state = data(initial_state),
                            .final_state = data(out.final_state, args.output_final_state),
                            .states = workspace[workspace.states],
                            .o = out.o.mutable_data_ptr(),
                            .h = data(out.h, args.output_h),
                            .group = group,
                            .state_stride_v = state_stride_v,
                            .state_stride_k = state_stride_k,
                            .has_initial_state = initial_state.has_value(),
                            .has_final_state = args.output_final_state,
                            .has_h = args.output_h,
                            .ctas = ctas,
                            .only_if = only_if,
                            .tokens = rows,
                            .H_k = p.H_k,
                            .H_v = p.H_v,
                            .chunk_slots = dispatch.slots,
                            .segment_slots = dispatch.segments,
                            .state_size = state_size,
                            .h_slots = args.output_h ? p.NT : 0},
                           {.dtype = dtype, .K = p.K, .V = p.V, .value_tile = value_tile}, stream);
  };
  if (dispatch.whole_tile == dispatch.value_tile) {
    chunk_forward(dispatch.value_tile, dispatch.ctas, 0);
  } else {
    chunk_forward(dispatch.whole_tile, dispatch.whole_ctas, kFirst + kLast);
    chunk_forward(dispatch.value_tile, dispatch.ctas, kFirst);
  }
  return out;
}

}  // namespace flash_qla

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CUDA, m) {
  m.impl("chunk_gated_delta_rule", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_op<flash_qla::forward_cuda>));
  m.impl("chunk_gated_delta_rule_fwd", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_fwd_op<flash_qla::forward_cuda>));
}
