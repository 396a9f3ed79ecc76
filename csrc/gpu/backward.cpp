// The backward: the l2norm if it has kernels of its own, the plan, the chunks' gates and matrices, with context
// parallelism the segments' maps and their scans. Then the replay of the states, the recurrence in reverse with the
// gradients of the inputs, the gradients of pre-activation gates and betas, and the backward of the l2norm. Other GPUs
// than Hopper's have kernels of their own for the matrices, the maps, the scans, the replay and the gradients of the
// inputs.

#include "gpu/arguments.h"
#include "gpu/dispatch.h"
#include "gpu/head_dims.h"
#include "gpu/pass.h"
#include "gpu/runtime/stream.h"
#include "gpu/workspace.h"
#include "kernels.h"
#include "passes.h"
#include "ranks.h"
#include "tensors.h"

namespace flash_qla {

namespace {

BackwardShape shape_of(const BackwardCall& call) {
  BackwardShape shape{shape_of(static_cast<const Call&>(call))};
  shape.activations = call.use_gate || call.use_beta_sigmoid;
  return shape;
}

// The launches of a call, each in a function of the kernel's name.
class Backward {
 public:
  Backward(const BackwardCall& call, const BackwardOutputs& out) : Backward(call, shape_of(call), out) {
    workspace_.provide(call);
  }

  void run() {
    begin();
    if (d_.has_maps()) {
      scan_states(call_.initial_state);
      scan_gradients(call_.grad_final_state, /*concurrent=*/true);
    }
    replay_states(call_.initial_state);
    input_gradients(call_.grad_final_state, out_.dh0);
  }

  // The part that needs neither states nor their gradients.
  void begin() {
    if (d_.l2norm) {
      l2norm();
    }
    pass_.make_plan(states(), SegmentFlag::kFirst);
    chunk_matrices();
    if (d_.has_maps()) {
      backward_maps();
    }
  }

  // compose_maps expects dZ of segment s in slot s. dZ is in slot s - 1 of grad_states(), which is slot
  // s of the whole region.
  Begun begun() {
    begin();
    return {pass_.compose(/*reverse=*/true, reverse_maps(), workspace_[workspace_.grad_states], call_.grad_final_state),
            workspace_.storage()};
  }

  // The part that needs states but no gradients of states.
  void replay() {
    const std::optional<Tensor> first = states_or_zeros(call_, call_.initial_state);
    if (d_.has_maps()) {
      scan_states(first);
    }
    replay_states(first);
  }

  void finish() {
    const std::optional<Tensor> last = states_or_zeros(call_, call_.grad_final_state);
    const Tensor dh0 =
        call_.initial_state ? out_.dh0 : new_empty(call_.op, call_.q, call_.state_shape(), call_.compute_dtype);
    if (d_.has_maps()) {
      scan_gradients(last, /*concurrent=*/false);
    }
    input_gradients(last, dh0);
  }

 private:
  Backward(const BackwardCall& call, const BackwardShape& shape, const BackwardOutputs& out)
      : call_(call),
        out_(out),
        d_(dispatch_backward(shape)),
        workspace_(shape, d_),
        stream_(current_stream(call.q)),
        pass_(call, workspace_, d_, stream_, /*scans=*/d_.over_ranks ? 1 : 2),
        activations_(activations_of(call, call.use_gate ? *call.g_raw : call.g)) {}

  void scan_states(const std::optional<Tensor>& first) const {
    pass_.scan(/*reverse=*/false, pass_.maps(), contiguous_states(call_, data(first)), /*concurrent=*/false);
  }
  // `concurrent`: overlaps the preceding scan of states.
  void scan_gradients(const std::optional<Tensor>& last, bool concurrent) const {
    pass_.scan(/*reverse=*/true, reverse_maps(), contiguous_states(call_, data(last)), concurrent);
  }

  // dh0 gets the gradients of the initial states, if there are initial states.
  void input_gradients(const std::optional<Tensor>& last, const Tensor& dh0) const {
    if (d_.by_tokens) {
      replay_gradients(last, dh0);
      token_gradients();
    } else {
      chunk_backward(last, dh0);
    }
    if (d_.gate_gradients) {
      gate_gradients();
    }
    if (d_.l2norm) {
      l2norm_backward();
    }
  }

  void l2norm() const {
    const kernels::Tokens from = pass_.tokens();
    kernels::l2norm({.q = from.q,
                     .k = from.k,
                     .normalized = workspace_[workspace_.normalized],
                     .rstd = workspace_[workspace_.rstd],
                     .dtype = dtype_code(call_.q),
                     .tokens = call_.tokens(),
                     .H_k = call_.H_k,
                     .pieces = call_.K / kNormPiece,
                     .q_row = from.q_row,
                     .q_head = from.q_head,
                     .k_row = from.k_row,
                     .k_head = from.k_head,
                     .rows = call_.tokens() * call_.H_k},
                    {.K = pass_.K()}, stream_);
  }

  // The chunks, with normalized queries and keys if the kernel l2norm runs.
  kernels::Chunks normalized(kernels::Chunks chunks) const {
    if (d_.l2norm) {
      uint16_t* const first = workspace_[workspace_.normalized];
      kernels::Tokens& tokens = chunks.tokens;
      tokens.q = first;
      tokens.k = first + call_.tokens() * call_.H_k * call_.K;
      tokens.q_row = tokens.k_row = call_.H_k * call_.K;
      tokens.q_head = tokens.k_head = call_.K;
    }
    return chunks;
  }

  kernels::Chunks chunks() const { return normalized(pass_.chunks()); }

  kernels::Chunks with_backward_gates(kernels::Chunks chunks) const {
    chunks.matrices.gates = workspace_[workspace_.backward_gates];
    return chunks;
  }
  kernels::Chunks backward_chunks() const { return with_backward_gates(chunks()); }

  // States without addresses: they only tell which states exist. The gradients of states are arguments of their own.
  States states() const {
    return states_in_order(call_, contiguous_states(call_, nullptr), call_.over_ranks || call_.initial_state,
                           call_.over_ranks || call_.grad_final_state);
  }

  // dS' after each segment. Over ranks the region has one more slot in front: dZ of the first segment is there.
  float* grad_states() const {
    return workspace_[workspace_.grad_states] + (d_.over_ranks ? state_rows(call_.H_v, call_.K, call_.V) : 0);
  }

  kernels::Maps reverse_maps() const {
    return {
        .states = grad_states(), .maps = workspace_[workspace_.maps], .skips = workspace_[workspace_.reverse_skips]};
  }

  kernels::Gradients gradients() const {
    const RowStrides dq = row_strides(out_.dq), dk = row_strides(out_.dk), dv = row_strides(out_.dv);
    return {.dq = out_.dq.mutable_data_ptr(),
            .dq_row = dq.row,
            .dq_head = dq.head,
            .dk = out_.dk.mutable_data_ptr(),
            .dk_row = dk.row,
            .dk_head = dk.head,
            .dv = out_.dv.mutable_data_ptr(),
            .dv_row = dv.row,
            .dv_head = dv.head,
            .db = out_.db.mutable_data_ptr(),
            .dg = out_.dg.mutable_data_ptr()};
  }

  // The chunks' matrices and gates. The forward's kernel computes A again, because it writes L and P by rows of blocks.
  void chunk_matrices() const {
    kernels::chunk_matrices(
        {.chunks = chunks(),
         .gates = gates_of(call_, call_.g, activations_),
         .sequences = sequences_of(call_),
         .slots = states().slots,
         .outputs = {.o = nullptr, .A = nullptr, .g_cumsum = nullptr, .has_A = false, .has_g_cumsum = false},
         .backward = {.backward_gates = workspace_[workspace_.backward_gates],
                      .semaphores = workspace_[workspace_.semaphores],
                      .counters = d_.gate_gradients ? workspace_[workspace_.counters] : nullptr,
                      .has_backward_gates = true},
         .gradients = gradients(),
         .memory = kNoMemory,
         .heads = d_.heads_per_cta,
         .scale = static_cast<float>(*call_.scale),
         .cumulative = call_.is_cumulative(),
         .gate_gradients = d_.gate_gradients,
         .early_ctas = d_.early_ctas,
         .h = nullptr,
         .has_h = false,
         .head_blocks = head_blocks(),
         .h_slots = 0},
        {.dtype = pass_.dtype(), .K = pass_.K(), .normalize = d_.normalizes_inside, .portable = d_.portable}, stream_);
  }

  void backward_maps() const {
    if (d_.portable) {
      const kernels::Chunks mapped = normalized(pass_.map_chunks());
      pass_.portable_maps(mapped, /*has_reverse=*/true);
      return portable_replay_gradients(with_backward_gates(mapped), ends(nullptr, nullptr), /*writes_maps=*/true);
    }
    kernels::backward_maps({.chunks = normalized(pass_.map_chunks()),
                            .output_gradient = output_gradient(),
                            .backward_gates = workspace_[workspace_.backward_gates],
                            .maps = pass_.maps(),
                            .grad_states = grad_states(),
                            .reverse_skips = workspace_[workspace_.reverse_skips],
                            .scale = static_cast<float>(*call_.scale),
                            .short_last = d_.short_maps_last},
                           {.dtype = pass_.dtype(), .K = pass_.K(), .normalize = d_.normalizes_inside}, stream_);
  }

  kernels::OutputGradient output_gradient() const {
    const RowStrides strides = row_strides(call_.grad_o);
    return {.grad_o = call_.grad_o.const_data_ptr(), .grad_o_row = strides.row, .grad_o_head = strides.head};
  }

  kernels::Replay replay() const {
    if (workspace_.has_v_new) {
      return {.h = workspace_[workspace_.h],
              .v_new = workspace_[workspace_.v_new],
              .v_new_row = call_.H_v * call_.V,
              .v_new_head = call_.V};
    }
    const RowStrides dv = row_strides(out_.dv);
    return {
        .h = workspace_[workspace_.h], .v_new = out_.dv.mutable_data_ptr(), .v_new_row = dv.row, .v_new_head = dv.head};
  }
  kernels::ReverseReplay reverse_replay() const {
    return {.dh = workspace_[workspace_.dh], .u = workspace_[workspace_.u]};
  }

  void replay_states(const std::optional<Tensor>& first) const {
    if (d_.portable) {
      kernels::portable_replay({.chunks = chunks(),
                                .states = contiguous_states(call_, data(first)),
                                .maps = pass_.maps(),
                                .replay = replay(),
                                .writes_maps = false,
                                .has_reverse = true,
                                .value_tiles = value_tiles(call_.V, kNarrowTile)},
                               {.dtype = pass_.dtype(), .K = pass_.K()}, stream_);
      return;
    }
    kernels::replay_states(
        {.chunks = chunks(), .states = contiguous_states(call_, data(first)), .maps = pass_.maps(), .replay = replay()},
        {.dtype = pass_.dtype(), .K = pass_.K()}, stream_);
  }

  kernels::StateGradients ends(const void* last, void* dh0) const {
    return {
        .dht = last, .dh0 = dh0, .state_stride_v = call_.state_stride_v(), .state_stride_k = call_.state_stride_k()};
  }

  // The gradients. If gate_gradients runs, db and dg are parts, which gate_gradients adds.
  kernels::Gradients gradients_in_parts() const {
    kernels::Gradients parts = gradients();
    if (d_.gate_gradients) {
      parts.db = workspace_[workspace_.db_parts];
      parts.dg = workspace_[workspace_.dg_parts];
    }
    return parts;
  }

  void chunk_backward(const std::optional<Tensor>& last, const Tensor& dh0) const {
    kernels::chunk_backward({.chunks = backward_chunks(),
                             .output_gradient = output_gradient(),
                             .replay = replay(),
                             .grad_states = grad_states(),
                             .ends = ends(data(last), dh0.mutable_data_ptr()),
                             .semaphores = workspace_[workspace_.semaphores],
                             .gradients = gradients_in_parts(),
                             .scale = static_cast<float>(*call_.scale),
                             .parts = d_.gradient_parts},
                            {.dtype = pass_.dtype(), .K = pass_.K(), .normalize = d_.normalizes_inside}, stream_);
  }

  // Launches portable_replay_gradients, which writes the gradients after each chunk or, with `writes_maps`, dZ.
  void portable_replay_gradients(const kernels::Chunks& chunks, const kernels::StateGradients& ends,
                                 bool writes_maps) const {
    kernels::portable_replay_gradients({.chunks = chunks,
                                        .forward_gates = workspace_[workspace_.gates],
                                        .output_gradient = output_gradient(),
                                        .ends = ends,
                                        .grad_states = grad_states(),
                                        .reverse_skips = workspace_[workspace_.reverse_skips],
                                        .reverse_replay = reverse_replay(),
                                        .writes_maps = writes_maps,
                                        .scale = static_cast<float>(*call_.scale),
                                        .value_tiles = value_tiles(call_.V, kNarrowTile)},
                                       {.dtype = pass_.dtype(), .K = pass_.K()}, stream_);
  }

  void replay_gradients(const std::optional<Tensor>& last, const Tensor& dh0) const {
    if (d_.portable) {
      return portable_replay_gradients(backward_chunks(), ends(data(last), dh0.mutable_data_ptr()),
                                       /*writes_maps=*/false);
    }
    kernels::replay_gradients({.chunks = backward_chunks(),
                               .output_gradient = output_gradient(),
                               .grad_states = grad_states(),
                               .ends = ends(data(last), dh0.mutable_data_ptr()),
                               .reverse_replay = reverse_replay(),
                               .scale = static_cast<float>(*call_.scale)},
                              {.dtype = pass_.dtype(), .K = pass_.K()}, stream_);
  }

  void token_gradients() const {
    if (d_.portable) {
      kernels::portable_token_gradients({.chunks = backward_chunks(),
                                         .output_gradient = output_gradient(),
                                         .replay = replay(),
                                         .reverse_replay = reverse_replay(),
                                         .semaphores = workspace_[workspace_.semaphores],
                                         .gradients = gradients_in_parts(),
                                         .scale = static_cast<float>(*call_.scale),
                                         .parts = d_.gradient_parts},
                                        {.dtype = pass_.dtype(), .K = pass_.K()}, stream_);
      return;
    }
    kernels::token_gradients({.chunks = backward_chunks(),
                              .output_gradient = output_gradient(),
                              .replay = replay(),
                              .reverse_replay = reverse_replay(),
                              .semaphores = workspace_[workspace_.semaphores],
                              .gradients = gradients_in_parts(),
                              .scale = static_cast<float>(*call_.scale),
                              .parts = d_.gradient_parts},
                             {.dtype = pass_.dtype(), .K = pass_.K()}, stream_);
  }

  // CTAs of gate_gradients for each chunk.
  int64_t head_blocks() const { return ceil_div(call_.H_v, kGateHeads); }

  void gate_gradients() const {
    kernels::gate_gradients({.sizes = pass_.sizes(),
                             .plan = pass_.plan(),
                             .gates = gates_of(call_, call_.g_raw ? *call_.g_raw : call_.g, activations_),
                             .db_parts = workspace_[workspace_.db_parts],
                             .dg_parts = workspace_[workspace_.dg_parts],
                             .db = out_.db.mutable_data_ptr(),
                             .dg = out_.dg.mutable_data_ptr(),
                             .gate_sums = workspace_[workspace_.gate_sums],
                             .counters = workspace_[workspace_.counters],
                             .dA_log = data_if(call_.use_gate, out_.dA_log),
                             .ddt_bias = data_if(call_.dt_bias.has_value(), out_.ddt_bias),
                             .parts = d_.gradient_parts,
                             .head_blocks = head_blocks()},
                            {}, stream_);
  }

  void l2norm_backward() const {
    const RowStrides dq = row_strides(out_.dq), dk = row_strides(out_.dk);
    kernels::l2norm_backward({.normalized = workspace_[workspace_.normalized],
                              .rstd = workspace_[workspace_.rstd],
                              .dq = out_.dq.mutable_data_ptr(),
                              .dk = out_.dk.mutable_data_ptr(),
                              .dtype = dtype_code(call_.q),
                              .rows = call_.tokens() * call_.H_k,
                              .pieces = call_.K / kNormPiece,
                              .tokens = call_.tokens(),
                              .H_k = call_.H_k,
                              .dq_row = dq.row,
                              .dq_head = dq.head,
                              .dk_row = dk.row,
                              .dk_head = dk.head},
                             {.K = pass_.K()}, stream_);
  }

  const BackwardCall& call_;
  const BackwardOutputs& out_;
  const BackwardDispatch d_;
  BackwardWorkspace workspace_;
  const cudaStream_t stream_;
  const Pass pass_;
  const int64_t activations_;  // Activation in layout.py
};

// The outputs if no sequence has a token: gradients of states pass through, all others are zeros.
void pass_gradients_through(const BackwardCall& call, BackwardOutputs& out) {
  for (Tensor* zeros : {&out.dq, &out.dk, &out.dv, &out.db, &out.dg, &out.dA_log, &out.ddt_bias}) {
    zero(*zeros);
  }
  copy_or_zero(out.dh0, call.initial_state ? call.grad_final_state : std::nullopt);
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
  return call.is_empty() ? begun_of_nothing(call, call.grad_final_state) : Backward(call, out).begun();
}

void replay_backward_cuda(const BackwardCall& call) {
  const DeviceGuard guard = make_current(call.q);
  if (!call.is_empty()) {
    const BackwardOutputs none;
    Backward(call, none).replay();
  }
}

void finish_backward_cuda(const BackwardCall& call, BackwardOutputs& out) {
  const DeviceGuard guard = make_current(call.q);
  if (call.is_empty()) {
    return pass_gradients_through(call, out);
  }
  Backward(call, out).finish();
}

}  // namespace flash_qla
