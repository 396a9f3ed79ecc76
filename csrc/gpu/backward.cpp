// The backward on a Hopper GPU: the l2norm, plan, the chunks' gates and matrices, with context parallelism the
// segments' maps and their scans, then the states again, the recurrence in reverse with the inputs' gradients, the
// gradients of raw gates and betas, the l2norm's own backward.

#include "gpu/device.h"
#include "gpu/dispatch.h"
#include "gpu/head_dims.h"
#include "gpu/launch.h"
#include "gpu/plan.h"
#include "gpu/workspace.h"
#include "halves.h"
#include "kernels.h"
#include "passes.h"
#include "tensors.h"

namespace flash_qla {

namespace {

BackwardShape shape_of(const BackwardCall& call) {
  return {.B = call.B,
          .T = call.T,
          .N = call.N,
          .H_k = call.H_k,
          .H_v = call.H_v,
          .varlen = call.varlen,
          .sm_count = gpu_of(call.q).sm_count,
          .auto_cp = call.auto_cp,
          .use_qk_l2norm = call.use_qk_l2norm,
          .activations = call.use_gate || call.use_beta_sigmoid,
          .K = call.K,
          .V = call.V,
          .in_halves = call.in_halves};
}

// The launches of a call, each in a function of its name.
class Backward {
 public:
  Backward(const BackwardCall& call, const BackwardOutputs& out, const std::optional<Tensor>& workspace = {})
      : Backward(call, shape_of(call), out) {
    if (workspace) {
      workspace_.adopt(call, *workspace);
    } else {
      workspace_.allocate(call);
    }
  }

  void run() {
    begin();
    if (d_.has_maps()) {
      scan_states();
      scan_gradients(/*beside=*/true);
    }
    replay_states();
    input_gradients();
  }

  // What needs neither states nor their gradients.
  void begin() {
    if (call_.use_qk_l2norm) {
      l2norm();
    }
    plan();
    chunk_matrices();
    if (d_.has_maps()) {
      backward_maps();
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

  // In halves, what needs states but no gradients of them.
  void replay() {
    scan_states();  // also for the wait: replay_states may read initial states early
    replay_states();
  }

  void finish() {
    scan_gradients(/*beside=*/false);
    input_gradients();
  }

 private:
  Backward(const BackwardCall& call, const BackwardShape& shape, const BackwardOutputs& out)
      : call_(call),
        out_(out),
        d_(dispatch_backward(shape)),
        workspace_(shape, d_),
        stream_(current_stream(call.q)),
        dtype_(dtype_name(call.dtype)),
        activations_(activations_of(call, call.use_gate ? *call.g_raw : call.g)) {}

  void scan_states() const { segment_scan(false, states_or_zeros(call_, call_.initial_state), false); }
  // `beside` the scan of states, which was the launch before this one.
  void scan_gradients(bool beside) const { segment_scan(true, states_or_zeros(call_, call_.grad_final_state), beside); }

  void input_gradients() const {
    chunk_backward();
    if (d_.gate_gradients) {
      gate_gradients();
    }
    if (call_.use_qk_l2norm) {
      l2norm_backward();
    }
  }

  void l2norm() const {
    kernels::l2norm({.q = call_.q.const_data_ptr(),
                     .k = call_.k.const_data_ptr(),
                     .normalized = workspace_[workspace_.normalized],
                     .rstd = workspace_[workspace_.rstd],
                     .rows = call_.tokens() * call_.H_k,
                     .pieces = call_.K / kNormPiece},
                    {.dtype = dtype_, .K = instance_K(call_.K)}, stream_);
  }

  // Normalized, where that was asked for.
  const void* q() const { return call_.use_qk_l2norm ? workspace_[workspace_.normalized] : call_.q.const_data_ptr(); }
  const void* k() const {
    return call_.use_qk_l2norm ? workspace_[workspace_.normalized] + call_.tokens() * call_.H_k * call_.K
                               : call_.k.const_data_ptr();
  }

  // Only whether there are any: the kernels have those of the gradients besides.
  States states() const {
    States found;
    found.first_states = call_.in_halves || call_.initial_state ? FirstStates::kAll : FirstStates::kNone;
    found.has_final = call_.in_halves || call_.grad_final_state.has_value();
    found.slots = call_.N;
    return found;
  }

  void plan() const {
    make_plan(call_, states(),
              {.sequences = workspace_[workspace_.sequences],
               .chunks = workspace_[workspace_.chunks],
               .chunk_slots = d_.chunk_slots,
               .segments = workspace_[workspace_.segments],
               .segment_slots = d_.segments,
               .segment_chunks = d_.segment_chunks,
               .cut_above = d_.cut_above,
               .map_segments = d_.in_halves ? workspace_[workspace_.map_segments] : nullptr,
               .dropped = SegmentFlag::kFirst},
              stream_);
  }

  int64_t state_size() const { return call_.H_v * call_.V * call_.K; }  // of a sequence's state

  // Behind each segment. A first segment has a dZ where its map is wanted, and so a slot before it.
  float* grad_states() const {
    return workspace_[workspace_.grad_states] + (d_.in_halves ? state_rows(call_.H_v, call_.K, call_.V) : 0);
  }

  uint16_t* block_rows(int64_t j) const { return flash_qla::block_rows(workspace_[workspace_.matrices], j); }

  // The chunks' matrices and gates. A is made again rather than read: L and P are wanted by rows of blocks, which is
  // what the forward's kernel makes.
  void chunk_matrices() const {
    kernels::chunk_matrices({.q = q(),
                             .k = k(),
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
                             .o = out_.dv.mutable_data_ptr(),  // gets zeros where no sequence is, as o does
                             .A = nullptr,
                             .g_cumsum = nullptr,
                             .backward_gates = workspace_[workspace_.backward_gates],
                             .turns = workspace_[workspace_.turns],
                             .counters = workspace_[workspace_.counters],
                             .dq = out_.dq.mutable_data_ptr(),
                             .dk = out_.dk.mutable_data_ptr(),
                             .db = out_.db.mutable_data_ptr(),
                             .dg = out_.dg.mutable_data_ptr(),
                             .group = call_.group(),
                             .heads = d_.heads_per_cta,
                             .scale = static_cast<float>(*call_.scale),
                             .has_g_cumsum = false,
                             .has_A = false,
                             .activations = activations_,
                             .cumulative = true,
                             .has_backward_gates = true,
                             .gate_gradients = d_.gate_gradients,
                             .early_ctas = d_.early_ctas,
                             .has_offsets = call_.varlen,
                             .wide_offsets = call_.wide_offsets,
                             .uniform_length = call_.T,
                             .state_indices = nullptr,
                             .index_kind = TableKind::kNone,
                             .index_stride = 0,
                             .null_index = -1,
                             .slots = call_.N,
                             .tokens = call_.tokens(),
                             .H_k = call_.H_k,
                             .key_dim = call_.K,
                             .H_v = call_.H_v,
                             .chunk_slots = d_.chunk_slots,
                             .offset_words = (call_.N + 1) * (call_.wide_offsets ? 2 : 1),
                             .value_dim = call_.V,
                             .head_blocks = head_blocks(),
                             .N = call_.N},
                            {.dtype = dtype_, .K = instance_K(call_.K), .normalize = false}, stream_);
  }

  void backward_maps() const {
    kernels::backward_maps({.q = q(),
                            .k = k(),
                            .v = call_.v.const_data_ptr(),
                            .grad_o = call_.grad_o.const_data_ptr(),
                            .gates = workspace_[workspace_.gates],
                            .backward_gates = workspace_[workspace_.backward_gates],
                            .matrices_0 = block_rows(0),
                            .matrices_1 = block_rows(1),
                            .matrices_2 = block_rows(2),
                            .matrices_3 = block_rows(3),
                            .segments = workspace_[d_.in_halves ? workspace_.map_segments : workspace_.segments],
                            .states = workspace_[workspace_.states],
                            .grad_states = grad_states(),
                            .maps = workspace_[workspace_.maps],
                            .skips = workspace_[workspace_.skips],
                            .reverse_skips = workspace_[workspace_.reverse_skips],
                            .group = call_.group(),
                            .scale = static_cast<float>(*call_.scale),
                            .tokens = call_.tokens(),
                            .H_k = call_.H_k,
                            .key_dim = call_.K,
                            .H_v = call_.H_v,
                            .value_dim = call_.V,
                            .chunk_slots = d_.chunk_slots,
                            .segment_slots = d_.segments,
                            .value_rows = value_rows(call_.V)},
                           {.dtype = dtype_, .K = instance_K(call_.K)}, stream_);
  }

  void compose_maps(const Tensor& maps) const {
    const auto [mapped_0, mapped_1] = mapped_sequences(call_);
    kernels::compose_maps({.sequences = workspace_[workspace_.sequences],
                           .segments = workspace_[workspace_.segments],
                           .maps = workspace_[workspace_.maps],
                           .skips = workspace_[workspace_.reverse_skips],
                           .initial_state = data(call_.grad_final_state),
                           .offsets = workspace_[workspace_.grad_states],  // of the segment before, which is one on
                           .composed = maps.mutable_data_ptr(),
                           .key_dim = call_.K,
                           .value_dim = call_.V,
                           .state_stride_v = call_.state_stride_v(),
                           .state_stride_k = call_.state_stride_k(),
                           .has_initial_state = call_.grad_final_state.has_value(),
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
                          {.dtype = dtype_, .K = instance_K(call_.K), .reverse = true}, stream_);
  }

  // Of states, or in reverse of their gradients.
  void segment_scan(bool reverse, const std::optional<Tensor>& first_states, bool beside) const {
    kernels::segment_scan({.sequences = workspace_[workspace_.sequences],
                           .segments = workspace_[workspace_.segments],
                           .maps = workspace_[workspace_.maps],
                           .skips = workspace_[reverse ? workspace_.reverse_skips : workspace_.skips],
                           .initial_state = data(first_states),
                           .states = reverse ? grad_states() : workspace_[workspace_.states],
                           .key_dim = call_.K,
                           .value_dim = call_.V,
                           .state_stride_v = call_.state_stride_v(),
                           .state_stride_k = call_.state_stride_k(),
                           .slot_stride = state_size(),
                           .state_dtype = Dtype::kFloat32,
                           .beside = beside,
                           .N = call_.N,
                           .segment_slots = d_.segments,
                           .H_v = call_.H_v,
                           .state_size = call_.state_size(),
                           .value_rows = value_rows(call_.V)},
                          {.dtype = dtype_, .K = instance_K(call_.K), .reverse = reverse}, stream_);
  }

  void replay_states() const {
    kernels::replay_states({.k = k(),
                            .v = call_.v.const_data_ptr(),
                            .gates = workspace_[workspace_.gates],
                            .matrices_0 = block_rows(0),
                            .matrices_1 = block_rows(1),
                            .matrices_2 = block_rows(2),
                            .matrices_3 = block_rows(3),
                            .segments = workspace_[workspace_.segments],
                            .initial_state = data(call_.initial_state),
                            .states = workspace_[workspace_.states],
                            .h = workspace_[workspace_.h],
                            .v_new = workspace_[workspace_.v_new],
                            .group = call_.group(),
                            .state_stride_v = call_.state_stride_v(),
                            .state_stride_k = call_.state_stride_k(),
                            .has_initial_state = call_.initial_state.has_value(),
                            .tokens = call_.tokens(),
                            .H_k = call_.H_k,
                            .key_dim = call_.K,
                            .H_v = call_.H_v,
                            .value_dim = call_.V,
                            .chunk_slots = d_.chunk_slots,
                            .segment_slots = d_.segments,
                            .state_size = call_.state_size(),
                            .value_rows = value_rows(call_.V)},
                           {.dtype = dtype_, .K = instance_K(call_.K)}, stream_);
  }

  void chunk_backward() const {
    kernels::chunk_backward({.q = q(),
                             .k = k(),
                             .v = call_.v.const_data_ptr(),
                             .grad_o = call_.grad_o.const_data_ptr(),
                             .gates = workspace_[workspace_.backward_gates],
                             .matrices_0 = block_rows(0),
                             .matrices_1 = block_rows(1),
                             .matrices_2 = block_rows(2),
                             .matrices_3 = block_rows(3),
                             .segments = workspace_[workspace_.segments],
                             .h = workspace_[workspace_.h],
                             .v_new = workspace_[workspace_.v_new],
                             .grad_states = grad_states(),
                             .dht = data(call_.grad_final_state),
                             .dh0 = data_if(call_.initial_state.has_value(), out_.dh0),
                             .turns = workspace_[workspace_.turns],
                             .dq = out_.dq.mutable_data_ptr(),
                             .dk = out_.dk.mutable_data_ptr(),
                             .dv = out_.dv.mutable_data_ptr(),
                             .db = d_.gate_gradients ? workspace_[workspace_.db_parts] : out_.db.mutable_data_ptr(),
                             .dg = d_.gate_gradients ? workspace_[workspace_.dg_parts] : out_.dg.mutable_data_ptr(),
                             .group = call_.group(),
                             .scale = static_cast<float>(*call_.scale),
                             .state_stride_v = call_.state_stride_v(),
                             .state_stride_k = call_.state_stride_k(),
                             .has_dht = call_.grad_final_state.has_value(),
                             .has_dh0 = call_.initial_state.has_value(),
                             .tokens = call_.tokens(),
                             .H_k = call_.H_k,
                             .key_dim = call_.K,
                             .H_v = call_.H_v,
                             .value_dim = call_.V,
                             .chunk_slots = d_.chunk_slots,
                             .segment_slots = d_.segments,
                             .value_rows = value_rows(call_.V),
                             .state_size = call_.state_size(),
                             .parts = value_tiles(call_.V)},
                            {.dtype = dtype_, .K = instance_K(call_.K)}, stream_);
  }

  // CTAs of gate_gradients for each chunk.
  int64_t head_blocks() const { return ceil_div(call_.H_v, kGateHeads); }

  void gate_gradients() const {
    kernels::gate_gradients({.chunks = workspace_[workspace_.chunks],
                             .db_parts = workspace_[workspace_.db_parts],
                             .dg_parts = workspace_[workspace_.dg_parts],
                             .g = data(call_.g_raw),
                             .beta = call_.beta.const_data_ptr(),
                             .A_log = data(call_.A_log),
                             .dt_bias = data(call_.dt_bias),
                             .db = out_.db.mutable_data_ptr(),
                             .dg = out_.dg.mutable_data_ptr(),
                             .gate_sums = workspace_[workspace_.gate_sums],
                             .counters = workspace_[workspace_.counters],
                             .dA_log = data_if(call_.use_gate, out_.dA_log),
                             .ddt_bias = data_if(call_.dt_bias.has_value(), out_.ddt_bias),
                             .activations = activations_,
                             .chunk_slots = d_.chunk_slots,
                             .value_tiles = value_tiles(call_.V),
                             .tokens = call_.tokens(),
                             .H_v = call_.H_v,
                             .head_blocks = head_blocks()},
                            {}, stream_);
  }

  void l2norm_backward() const {
    kernels::l2norm_backward({.normalized = workspace_[workspace_.normalized],
                              .rstd = workspace_[workspace_.rstd],
                              .dq = out_.dq.mutable_data_ptr(),
                              .dk = out_.dk.mutable_data_ptr(),
                              .rows = call_.tokens() * call_.H_k,
                              .pieces = call_.K / kNormPiece},
                             {.dtype = dtype_, .K = instance_K(call_.K)}, stream_);
  }

  const BackwardCall& call_;
  const BackwardOutputs& out_;
  const BackwardDispatch d_;
  BackwardWorkspace workspace_;
  const cudaStream_t stream_;
  const char* const dtype_;
  const int64_t activations_;  // Activation in layout.py
};

// No sequence has a token: the states passed through, and no input mattered.
void pass_gradients_through(const BackwardCall& call, BackwardOutputs& out) {
  for (Tensor* zeros : {&out.dq, &out.dk, &out.dv, &out.db, &out.dg, &out.dA_log, &out.ddt_bias}) {
    zero(*zeros);
  }
  if (call.initial_state && call.grad_final_state) {
    copy(out.dh0, *call.grad_final_state);
  } else {
    zero(out.dh0);
  }
}

}  // namespace

BackwardOutputs backward_cuda(const BackwardCall& call) {
  const DeviceGuard guard = make_current(call.q);
  BackwardOutputs out = allocate_backward(call);
  if (call.is_empty()) {
    pass_gradients_through(call, out);
  } else {
    Backward(call, out).run();
  }
  return out;
}

Begun begin_backward_cuda(const BackwardCall& call, const BackwardOutputs& out) {
  const DeviceGuard guard = make_current(call.q);
  if (call.is_empty()) {
    return {maps_of_nothing(call, call.grad_final_state), no_workspace(call)};
  }
  Backward backward(call, out);
  backward.begin();
  return {backward.maps(), backward.workspace()};
}

void replay_backward_cuda(const BackwardCall& call, const Tensor& workspace) {
  const DeviceGuard guard = make_current(call.q);
  if (!call.is_empty()) {
    const BackwardOutputs none;
    Backward(call, none, workspace).replay();
  }
}

void finish_backward_cuda(const BackwardCall& call, const Tensor& workspace, BackwardOutputs& out) {
  const DeviceGuard guard = make_current(call.q);
  if (call.is_empty()) {
    pass_gradients_through(call, out);
  } else {
    Backward(call, out, workspace).finish();
  }
}

}  // namespace flash_qla
