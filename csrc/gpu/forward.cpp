// The forward on a Hopper GPU: plan, the chunks' matrices, with context parallelism the segments' maps and their scan,
// then states and output; or after the plan one kernel for all of it.

#include "gpu/device.h"
#include "gpu/dispatch.h"
#include "gpu/head_dims.h"
#include "gpu/launch.h"
#include "gpu/plan.h"
#include "gpu/states.h"
#include "gpu/workspace.h"
#include "halves.h"
#include "kernels.h"
#include "passes.h"
#include "tensors.h"

namespace flash_qla {

namespace {

ForwardShape shape_of(const Call& call, const States& states) {
  return {.B = call.B,
          .T = call.T,
          .N = call.N,
          .H_k = call.H_k,
          .H_v = call.H_v,
          .varlen = call.varlen,
          .sm_count = gpu_of(call.q).sm_count,
          .auto_cp = call.auto_cp,
          .low_level = call.output_A,
          .use_qk_l2norm = call.use_qk_l2norm,
          .output_h = call.output_h,
          .fp16 = call.dtype == ScalarType::Half,
          .K = call.K,
          .V = call.V,
          .batch_invariant = call.batch_invariant,
          .checkpoints = states.checkpoint_every > 0,
          .in_halves = call.in_halves};
}

// The launches of a call, each in a function of its name.
class Forward {
 public:
  Forward(const Call& call, const States& states, const ForwardOutputs& out,
          const std::optional<Tensor>& workspace = {})
      : Forward(call, states, shape_of(call, states), out) {
    if (workspace) {
      workspace_.adopt(call, *workspace);
    } else {
      workspace_.allocate(call);
    }
  }

  void run() {
    begin();
    finish();
  }

  // What needs no states.
  void begin() {
    if (d_.clear_h) {
      Tensor h = out_.h;
      zero(h);
    }
    plan();
    if (d_.fused) {
      return;
    }
    chunk_matrices();
    if (d_.has_maps()) {
      segment_maps();
    }
  }

  // In halves: what begin leaves to finish.
  const Tensor& workspace() const { return workspace_.storage(); }

  Tensor maps() const {
    Tensor maps = allocate_maps(call_);
    if (maps.size(0) > 0) {
      compose_maps(maps);
    }
    return maps;
  }

  void finish() {
    if (d_.fused) {
      fused_forward(d_.launches[0]);
      return;
    }
    if (d_.has_maps()) {  // in halves also for the wait: chunk_forward reads initial states early
      segment_scan();
    }
    for (int64_t i = 0; i < d_.launch_count; ++i) {
      chunk_forward(d_.launches[i]);
    }
  }

 private:
  Forward(const Call& call, const States& states, const ForwardShape& shape, const ForwardOutputs& out)
      : call_(call),
        states_(states),
        d_(dispatch_forward(shape)),
        out_(out),
        workspace_(shape, d_),
        stream_(current_stream(call.q)),
        dtype_(dtype_name(call.dtype)),
        offset_words_((call.N + 1) * (call.wide_offsets ? 2 : 1)) {}

  void plan() const {
    make_plan(call_, states_,
              {.sequences = workspace_[workspace_.sequences],
               .chunks = workspace_[workspace_.chunks],
               .chunk_slots = d_.chunk_slots,
               .segments = workspace_[workspace_.segments],
               .segment_slots = d_.segments,
               .segment_chunks = d_.segment_chunks,
               .cut_above = d_.cut_above,
               .map_segments = d_.in_halves ? workspace_[workspace_.map_segments] : nullptr,
               .dropped = SegmentFlag::kLast,
               .checkpoints = workspace_[workspace_.checkpoints]},
              stream_);
  }

  uint16_t* block_rows(int64_t j) const { return flash_qla::block_rows(workspace_[workspace_.matrices], j); }

  void fused_forward(const ForwardDispatch::Launch& launch) const {
    kernels::fused_forward(
        {.q = call_.q.const_data_ptr(),
         .k = call_.k.const_data_ptr(),
         .v = call_.v.const_data_ptr(),
         .g = call_.g.const_data_ptr(),
         .beta = call_.beta.const_data_ptr(),
         .A_log = data(call_.A_log),
         .dt_bias = data(call_.dt_bias),
         .chunks = workspace_[workspace_.chunks],
         .segments = workspace_[workspace_.segments],
         .offsets = data(call_.cu_seqlens),
         .initial_state = states_.initial,
         .final_state = states_.final,
         .kept_states = states_.kept,
         .checkpoints = workspace_[workspace_.checkpoints],
         .o = out_.o.mutable_data_ptr(),
         .A = data_if(call_.output_A, out_.A),
         .g_cumsum = data_if(call_.output_g_cumsum, out_.g_cumsum),
         .group = call_.group(),
         .state_stride_v = states_.stride_v,
         .state_stride_k = states_.stride_k,
         .slot_stride = states_.slot_stride,
         .state_dtype = states_.dtype,
         .kept_slot_stride = states_.kept_slot_stride,
         .kept_dtype = states_.kept_dtype,
         .checkpoint_every = states_.checkpoint_every,
         .ctas = launch.ctas,
         .early = d_.early,
         .has_offsets = call_.varlen,
         .wide_offsets = call_.wide_offsets,
         .uniform_length = call_.T,
         .activations = activations_of(call_, call_.g),
         .scale = static_cast<float>(*call_.scale),
         .state_indices = states_.slot_indices.numbers,
         .index_kind = states_.slot_indices.kind,
         .index_stride = states_.slot_indices.row_stride,
         .null_index = states_.null_index,
         .slots = states_.slots,
         .tokens = call_.tokens(),
         .H_k = call_.H_k,
         .key_dim = call_.K,
         .H_v = call_.H_v,
         .value_dim = call_.V,
         .chunk_slots = d_.chunk_slots,
         .segment_slots = d_.segments,
         .offset_words = offset_words_,
         .state_size = call_.state_size(),
         .N = call_.N},
        {.dtype = dtype_, .K = instance_K(call_.K), .normalize = call_.use_qk_l2norm, .low_level = call_.output_A},
        stream_);
  }

  void chunk_matrices() const {
    kernels::chunk_matrices({.q = call_.q.const_data_ptr(),
                             .k = call_.k.const_data_ptr(),
                             .g = call_.g.const_data_ptr(),
                             .beta = call_.beta.const_data_ptr(),
                             .A_log = data(call_.A_log),
                             .dt_bias = data(call_.dt_bias),
                             .chunks = workspace_[workspace_.chunks],
                             .offsets = data(call_.cu_seqlens),
                             .gates = workspace_[workspace_.gates],
                             .matrices_0 = block_rows(0),
                             .matrices_1 = block_rows(1),
                             .matrices_2 = block_rows(2),
                             .matrices_3 = block_rows(3),
                             .o = out_.o.mutable_data_ptr(),
                             .A = data_if(call_.output_A, out_.A),
                             .g_cumsum = data_if(call_.output_g_cumsum, out_.g_cumsum),
                             .backward_gates = nullptr,
                             .turns = nullptr,
                             .counters = nullptr,
                             .dq = nullptr,
                             .dk = nullptr,
                             .db = nullptr,
                             .dg = nullptr,
                             .group = call_.group(),
                             .heads = d_.heads_per_cta,
                             .scale = static_cast<float>(*call_.scale),
                             .has_g_cumsum = call_.output_g_cumsum,
                             .has_A = call_.output_A,
                             .activations = activations_of(call_, call_.g),
                             .cumulative = false,
                             .has_backward_gates = false,
                             .gate_gradients = false,
                             .early_ctas = d_.early_ctas,
                             .has_offsets = call_.varlen,
                             .wide_offsets = call_.wide_offsets,
                             .uniform_length = call_.T,
                             .state_indices = states_.slot_indices.numbers,
                             .index_kind = states_.slot_indices.kind,
                             .index_stride = states_.slot_indices.row_stride,
                             .null_index = states_.null_index,
                             .slots = states_.slots,
                             .tokens = call_.tokens(),
                             .H_k = call_.H_k,
                             .key_dim = call_.K,
                             .H_v = call_.H_v,
                             .chunk_slots = d_.chunk_slots,
                             .offset_words = offset_words_,
                             .value_dim = call_.V,
                             .head_blocks = 0,
                             .N = call_.N},
                            {.dtype = dtype_, .K = instance_K(call_.K), .normalize = call_.use_qk_l2norm}, stream_);
  }

  void segment_maps() const {
    kernels::segment_maps({.k = call_.k.const_data_ptr(),
                           .v = call_.v.const_data_ptr(),
                           .gates = workspace_[workspace_.gates],
                           .matrices_0 = block_rows(0),
                           .matrices_1 = block_rows(1),
                           .matrices_2 = block_rows(2),
                           .matrices_3 = block_rows(3),
                           .segments = workspace_[d_.in_halves ? workspace_.map_segments : workspace_.segments],
                           .states = workspace_[workspace_.states],
                           .maps = workspace_[workspace_.maps],
                           .skips = workspace_[workspace_.skips],
                           .group = call_.group(),
                           .tokens = call_.tokens(),
                           .H_k = call_.H_k,
                           .key_dim = call_.K,
                           .H_v = call_.H_v,
                           .value_dim = call_.V,
                           .chunk_slots = d_.chunk_slots,
                           .segment_slots = d_.segments,
                           .value_rows = value_rows(call_.V)},
                          {.dtype = dtype_, .K = instance_K(call_.K), .partial = d_.in_halves}, stream_);
  }

  void compose_maps(const Tensor& maps) const {
    const auto [mapped_0, mapped_1] = mapped_sequences(call_);
    kernels::compose_maps({.sequences = workspace_[workspace_.sequences],
                           .segments = workspace_[workspace_.segments],
                           .maps = workspace_[workspace_.maps],
                           .skips = workspace_[workspace_.skips],
                           .initial_state = data(call_.initial_state),
                           .offsets = workspace_[workspace_.states] + state_rows(call_.H_v, call_.K, call_.V),
                           .composed = maps.mutable_data_ptr(),
                           .key_dim = call_.K,
                           .value_dim = call_.V,
                           .state_stride_v = call_.state_stride_v(),
                           .state_stride_k = call_.state_stride_k(),
                           .has_initial_state = call_.initial_state.has_value(),
                           .mapped_0 = mapped_0,
                           .mapped_1 = mapped_1,
                           .N = call_.N,
                           .segment_slots = d_.segments,
                           .H_v = call_.H_v,
                           .state_size = call_.state_size(),
                           .value_rows = value_rows(call_.V),
                           .mapped = maps.size(0),
                           .map_rows = call_.V + call_.K,
                           .key_channels = call_.K},
                          {.dtype = dtype_, .K = instance_K(call_.K), .reverse = false}, stream_);
  }

  void segment_scan() const {
    kernels::segment_scan({.sequences = workspace_[workspace_.sequences],
                           .segments = workspace_[workspace_.segments],
                           .maps = workspace_[workspace_.maps],
                           .skips = workspace_[workspace_.skips],
                           .initial_state = states_.initial,
                           .states = workspace_[workspace_.states],
                           .key_dim = call_.K,
                           .value_dim = call_.V,
                           .state_stride_v = states_.stride_v,
                           .state_stride_k = states_.stride_k,
                           .slot_stride = states_.slot_stride,
                           .state_dtype = states_.dtype,
                           .beside = false,
                           .N = call_.N,
                           .segment_slots = d_.segments,
                           .H_v = call_.H_v,
                           .state_size = call_.state_size(),
                           .value_rows = value_rows(call_.V)},
                          {.dtype = dtype_, .K = instance_K(call_.K), .reverse = false}, stream_);
  }

  void chunk_forward(const ForwardDispatch::Launch& launch) const {
    kernels::chunk_forward({.q = call_.q.const_data_ptr(),
                            .k = call_.k.const_data_ptr(),
                            .v = call_.v.const_data_ptr(),
                            .gates = workspace_[workspace_.gates],
                            .matrices_0 = block_rows(0),
                            .matrices_1 = block_rows(1),
                            .matrices_2 = block_rows(2),
                            .matrices_3 = block_rows(3),
                            .segments = workspace_[workspace_.segments],
                            .initial_state = states_.initial,
                            .final_state = states_.final,
                            .kept_states = states_.kept,
                            .checkpoints = workspace_[workspace_.checkpoints],
                            .states = workspace_[workspace_.states],
                            .o = out_.o.mutable_data_ptr(),
                            .h = data_if(call_.output_h, out_.h),
                            .group = call_.group(),
                            .state_stride_v = states_.stride_v,
                            .state_stride_k = states_.stride_k,
                            .slot_stride = states_.slot_stride,
                            .state_dtype = states_.dtype,
                            .kept_slot_stride = states_.kept_slot_stride,
                            .kept_dtype = states_.kept_dtype,
                            .checkpoint_every = states_.checkpoint_every,
                            .has_h = call_.output_h,
                            .ctas = launch.ctas,
                            .value_tiles = value_tiles(call_.V, launch.value_tile),
                            .only_if = launch.only_if,
                            .tokens = call_.tokens(),
                            .H_k = call_.H_k,
                            .key_dim = call_.K,
                            .H_v = call_.H_v,
                            .value_dim = call_.V,
                            .chunk_slots = d_.chunk_slots,
                            .segment_slots = d_.segments,
                            .state_size = call_.state_size(),
                            .value_rows = value_rows(call_.V),
                            .h_slots = call_.output_h ? call_.h_chunks : 0},
                           {.dtype = dtype_, .K = instance_K(call_.K), .value_tile = launch.value_tile}, stream_);
  }

  const Call& call_;
  const States& states_;
  const ForwardDispatch d_;
  const ForwardOutputs& out_;
  ForwardWorkspace workspace_;
  const cudaStream_t stream_;
  const char* const dtype_;
  const int64_t offset_words_;  // cu_seqlens in words of 32 bits
};

// No sequence has a token: every state passes through, and all rows are padding.
void pass_states_through(const Call& call, ForwardOutputs& out) {
  zero(out.o);
  for (Tensor* zeros : {&out.g_cumsum, &out.A, &out.h}) {
    if (zeros->defined()) {
      zero(*zeros);
    }
  }
  if (call.output_final_state && call.initial_state) {
    copy(out.final_state, *call.initial_state);
  } else {
    zero(out.final_state);
  }
}

}  // namespace

void run_forward(const Call& call, const States& states, const ForwardOutputs& out) {
  Forward(call, states, out).run();
}

ForwardOutputs forward_cuda(const Call& call) {
  const DeviceGuard guard = make_current(call.q);
  ForwardOutputs out = allocate_forward(call);
  if (call.is_empty()) {
    pass_states_through(call, out);
  } else {
    run_forward(call, states_of(call, out), out);
  }
  return out;
}

Begun begin_forward_cuda(const Call& call, const ForwardOutputs& out) {
  const DeviceGuard guard = make_current(call.q);
  if (call.is_empty()) {
    return {maps_of_nothing(call, call.initial_state), no_workspace(call)};
  }
  const States states = states_of(call, out);
  Forward forward(call, states, out);
  forward.begin();
  return {forward.maps(), forward.workspace()};
}

void finish_forward_cuda(const Call& call, const Tensor& workspace, ForwardOutputs& out) {
  const DeviceGuard guard = make_current(call.q);
  if (call.is_empty()) {
    pass_states_through(call, out);
  } else {
    const std::optional<Tensor> initial = states_or_zeros(call, call.initial_state);
    const Tensor final =
        call.output_final_state ? out.final_state : new_empty(call.op, call.q, call.state_shape(), call.compute_dtype);
    States states = states_of(call, out);
    states.initial = data(initial);
    states.final = final.mutable_data_ptr();
    Forward(call, states, out, workspace).finish();
  }
}

}  // namespace flash_qla
