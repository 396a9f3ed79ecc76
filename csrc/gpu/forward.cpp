// The forward: the plan, the chunks' matrices, with context parallelism the segments' maps and their scan, then states
// and output. The fused kernel does everything after the plan. Other GPUs than Hopper's have kernels of their own for
// the matrices, the maps, the scan, and states and output.

#include "gpu/arguments.h"
#include "gpu/dispatch.h"
#include "gpu/head_dims.h"
#include "gpu/pass.h"
#include "gpu/runtime/stream.h"
#include "gpu/states.h"
#include "gpu/workspace.h"
#include "kernels.h"
#include "passes.h"
#include "ranks.h"
#include "tensors.h"

namespace flash_qla {

namespace {

ForwardShape shape_of(const Call& call, const States& states) {
  ForwardShape shape{shape_of(call)};
  shape.low_level = call.output_A;
  shape.output_h = call.output_h;
  shape.batch_invariant = call.batch_invariant;
  shape.checkpoint_every = states.kept.checkpoint_every;
  shape.resumable = states.resumable();
  shape.float8 = states.float8();
  return shape;
}

// Arguments of chunk_matrices that only the backward has.
constexpr kernels::BackwardTables kNoBackwardTables = {
    .backward_gates = nullptr, .semaphores = nullptr, .counters = nullptr, .has_backward_gates = false};
constexpr kernels::Gradients kNoGradients = {};

// The launches of a call, each in a function of the kernel's name.
class Forward {
 public:
  Forward(const Call& call, const States& states, const ForwardOutputs& out)
      : Forward(call, states, shape_of(call, states), out) {
    workspace_.provide(call);
  }

  void run() {
    begin();
    finish();
  }

  // The part that needs no states. The fused kernel, which reads them, does not run over ranks.
  void begin() {
    if (d_.planned) {
      pass_.make_plan(states_, SegmentFlag::kLast, memory());
    }
    if (d_.is_only_fused()) {
      return;
    }
    if (d_.fuses_segments()) {
      segment_memory();
    }
    chunk_matrices();
    if (d_.has_maps()) {
      segment_maps();
    }
  }

  // compose_maps expects Z of segment s in slot s. Z is in slot s + 1 of the region.
  Begun begun() {
    begin();
    const float* const offsets = workspace_[workspace_.states] + state_rows(call_.H_v, call_.K, call_.V);
    return {pass_.compose(/*reverse=*/false, pass_.maps(), offsets, call_.initial_state), workspace_.storage()};
  }

  void finish() {
    if (d_.has_maps()) {  // over ranks chunk_forward also needs the scan's wait, because it reads initial states early
      pass_.scan(/*reverse=*/false, pass_.maps(), states_.tensors, /*concurrent=*/false, memory());
    }
    if (is_fused(d_.path)) {
      fused_forward();
    } else if (d_.portable) {
      portable_forward();
    } else if (const auto [tile, segment_chunks, long_tile] = std::get<TwoKernels>(d_.path); tile == long_tile) {
      chunk_forward(tile, d_.ctas, kAny);
    } else {
      chunk_forward(tile, d_.ctas, 0);
      chunk_forward(long_tile, d_.long_ctas, 1);
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
        pass_(call, workspace_, d_, stream_, /*scans=*/1) {}

  kernels::Outputs outputs() const {
    return {.o = out_.o.mutable_data_ptr(),
            .A = data_if(call_.output_A, out_.A),
            .g_cumsum = data_if(call_.output_A, out_.g_cumsum),
            .has_A = call_.output_A,
            .has_g_cumsum = call_.output_A};
  }

  int64_t h_slots() const { return call_.output_h ? call_.h_chunks : 0; }

  kernels::Gates gates() const { return gates_of(call_, call_.g, activations_of(call_, call_.g)); }

  void fused_forward() const {
    kernels::fused_forward({.sizes = pass_.sizes(),
                            .tokens = pass_.tokens(),
                            .gates = gates(),
                            .sequences = sequences_of(call_),
                            .slots = states_.slots,
                            .presence = states_.presence,
                            .plan = pass_.plan(),
                            .states = states_.tensors,
                            .kept = states_.kept,
                            .outputs = outputs(),
                            .ctas = d_.ctas,
                            .value_tiles = value_tiles(call_.V),
                            .early = d_.early,
                            .scale = static_cast<float>(*call_.scale),
                            .memory = memory(),
                            .maps = pass_.maps()},
                           {.dtype = pass_.dtype(),
                            .K = pass_.K(),
                            .normalize = call_.use_qk_l2norm,
                            .low_level = call_.output_A,
                            .cut = d_.fuses_segments(),
                            .planned = d_.planned},
                           stream_);
  }

  kernels::Memory memory() const {
    return d_.fuses_segments() ? kernels::Memory{.memory = workspace_[workspace_.memory],
                                                 .needs_maps = workspace_[workspace_.needs_maps],
                                                 .has_memory = true}
                               : kNoMemory;
  }

  void segment_memory() const {
    kernels::segment_memory(
        {.sizes = pass_.sizes(), .tokens = pass_.tokens(), .gates = gates(), .plan = pass_.plan(), .memory = memory()},
        {.dtype = pass_.dtype(), .K = pass_.K(), .normalize = call_.use_qk_l2norm}, stream_);
  }

  // If the fused kernel takes segments, it writes A and g_cumsum.
  void chunk_matrices() const {
    kernels::Outputs written = outputs();
    written.has_A = written.has_g_cumsum = call_.output_A && !d_.fuses_segments();
    kernels::chunk_matrices(
        {.chunks = pass_.chunks(),
         .gates = gates(),
         .sequences = sequences_of(call_),
         .slots = states_.slots,
         .outputs = written,
         .backward = kNoBackwardTables,
         .gradients = kNoGradients,
         .memory = memory(),
         .heads = d_.heads_per_cta,
         .scale = static_cast<float>(*call_.scale),
         .cumulative = false,
         .gate_gradients = false,
         .early_ctas = d_.early_ctas,
         .h = data_if(call_.output_h, out_.h),
         .has_h = call_.output_h,
         .head_blocks = 0,
         .h_slots = h_slots()},
        {.dtype = pass_.dtype(), .K = pass_.K(), .normalize = call_.use_qk_l2norm, .portable = d_.portable}, stream_);
  }

  void segment_maps() const {
    if (d_.portable) {
      return pass_.portable_maps(pass_.map_chunks(), /*has_reverse=*/false);
    }
    kernels::segment_maps(
        {.chunks = pass_.map_chunks(), .maps = pass_.maps(), .memory = memory(), .short_last = d_.short_maps_last},
        {.dtype = pass_.dtype(), .K = pass_.K(), .partial = d_.over_ranks || has_wide_keys(call_.K)}, stream_);
  }

  void portable_forward() const {
    kernels::portable_forward({.chunks = pass_.chunks(),
                               .states = states_.tensors,
                               .kept = states_.kept,
                               .maps = pass_.maps(),
                               .o = out_.o.mutable_data_ptr(),
                               .h = data_if(call_.output_h, out_.h),
                               .has_h = call_.output_h,
                               .value_tiles = value_tiles(call_.V, value_tile_of(d_.path)),
                               .rounds = states_.rounds,
                               .h_slots = h_slots()},
                              {.dtype = pass_.dtype(), .K = pass_.K()}, stream_);
  }

  // if_long: the kernel works if the plan's is_long has this value; kAny: in every batch.
  static constexpr int kAny = -1;
  void chunk_forward(int64_t value_tile, int64_t ctas, int if_long) const {
    kernels::chunk_forward({.chunks = pass_.chunks(),
                            .states = states_.tensors,
                            .kept = states_.kept,
                            .maps = pass_.maps(),
                            .o = out_.o.mutable_data_ptr(),
                            .h = data_if(call_.output_h, out_.h),
                            .has_h = call_.output_h,
                            .ctas = ctas,
                            .value_tiles = value_tiles(call_.V, value_tile),
                            .rounds = states_.rounds,
                            .if_long = if_long,
                            .h_slots = h_slots()},
                           {.dtype = pass_.dtype(), .K = pass_.K(), .value_tile = value_tile}, stream_);
  }

  const Call& call_;
  const States& states_;
  const ForwardDispatch d_;
  const ForwardOutputs& out_;
  ForwardWorkspace workspace_;
  const cudaStream_t stream_;
  const Pass pass_;
};

// The outputs if no sequence has a token: states pass through, and all rows are padding.
void pass_states_through(const Call& call, ForwardOutputs& out) {
  zero(out.o);
  for (Tensor* zeros : {&out.g_cumsum, &out.A, &out.h}) {
    if (zeros->defined()) {
      zero(*zeros);
    }
  }
  copy_or_zero(out.final_state, call.output_final_state ? call.initial_state : std::nullopt);
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
  return call.is_empty() ? begun_of_nothing(call, call.initial_state)
                         : Forward(call, states_of(call, out), out).begun();
}

void finish_forward_cuda(const Call& call, ForwardOutputs& out) {
  const DeviceGuard guard = make_current(call.q);
  if (call.is_empty()) {
    return pass_states_through(call, out);
  }
  const std::optional<Tensor> initial = states_or_zeros(call, call.initial_state);
  const Tensor final =
      call.output_final_state ? out.final_state : new_empty(call.op, call.q, call.state_shape(), call.compute_dtype);
  States states = states_of(call, out);
  states.tensors = contiguous_states(call, data(initial), final.mutable_data_ptr());
  Forward(call, states, out).finish();
}

}  // namespace flash_qla
