#include "gpu/dispatch.h"

#include <algorithm>
#include <optional>

#include "gpu/cost_model.h"
#include "gpu/head_dims.h"
#include "gpu/modes.h"
#include "gpu/override.h"
#include "gpu/plan.h"
#include "gpu/workspace.h"

namespace flash_qla {

namespace {

// What an offer to the device has to promise, of the time without: for as good as nothing it is not made.
constexpr double kWorthOffering = 0.998;

// While chunk_plan runs, fused_forward finds out by itself where its CTAs begin (plan/plan.cuh), as chunk_matrices
// does; it needs the sequences in order, so with up to a warp's.
constexpr int64_t kMostSorted = 32;

struct Choice {
  Mode mode;
  double us;
};

template <typename Shape>
Choice fastest(const Shape& shape, const Override& forced) {
  std::optional<Choice> found;
  for (const Mode& mode : modes_of(shape, forced)) {
    const double us = predict(shape, mode);
    const bool is_first_offer =
        found && device_knows_more(shape) && mode.segment_chunks > 0 && found->mode.segment_chunks == 0;
    if (!found || us < found->us * (is_first_offer ? kWorthOffering : 1)) {
      found = {mode, us};
    }
  }
  return *found;
}

// Where the device decides whether anything is cut and each answer has its tile, both are launched: a cut one's first
// segment is not also its sequence's last.
void add_launches(const ForwardShape& shape, ForwardDispatch& d) {
  const auto ctas = [&](int64_t value_tile) {
    return std::min<int64_t>(d.segments * shape.H_v * value_tiles(shape.V, value_tile), shape.card.sm_count);
  };
  d.ctas = ctas(d.value_tile);
  if (d.whole_tile == d.value_tile) {
    d.launches = {{{d.value_tile, d.ctas, 0}}};
    d.launch_count = 1;
  } else {
    d.launches = {{{d.whole_tile, ctas(d.whole_tile), SegmentFlag::kFirst + SegmentFlag::kLast},
                   {d.value_tile, d.ctas, SegmentFlag::kFirst}}};
    d.launch_count = 2;
  }
}

ForwardDispatch decide(const ForwardShape& shape, const Override& forced) {
  const auto [mode, us] = fastest(shape, forced);
  ForwardDispatch d{};
  d.value_tile = mode.value_tile;
  d.segment_chunks = mode.segment_chunks;
  d.cut_above = forced.always_cuts() ? forced.cut_above : cut_above(shape, mode);
  d.whole_tile = mode.whole_tile;
  d.fused = mode.fused;
  d.chunk_slots = chunk_slots(shape.B, shape.T, shape.N, shape.varlen);
  d.segments = segment_slots(shape.B, shape.T, shape.N, shape.varlen, d.segment_chunks);
  d.heads_per_cta = heads_per_cta(shape, d.chunk_slots);
  d.early_ctas = early_ctas(shape);
  d.early = !shape.varlen || shape.N <= kMostSorted;
  d.clear_h = shape.output_h && shape.varlen;
  add_launches(shape, d);
  d.in_halves = shape.in_halves;
  d.workspace_bytes = ForwardWorkspace(shape, d).bytes();
  d.predicted_us = us;
  return d;
}

BackwardDispatch decide(const BackwardShape& shape, const Override& forced) {
  const auto [mode, us] = fastest(shape, forced);
  BackwardDispatch d{};
  d.segment_chunks = mode.segment_chunks;
  d.cut_above = forced.always_cuts() ? forced.cut_above : cut_above(shape, mode);
  d.chunk_slots = chunk_slots(shape.B, shape.T, shape.N, shape.varlen);
  d.segments = segment_slots(shape.B, shape.T, shape.N, shape.varlen, d.segment_chunks);
  d.heads_per_cta = heads_per_cta(shape.forward(), d.chunk_slots);
  d.early_ctas = early_ctas(shape.forward());
  d.gate_gradients = shape.activations || value_tiles(shape.V) > 1;
  d.in_halves = shape.in_halves;
  d.workspace_bytes = BackwardWorkspace(shape, d).bytes();
  d.predicted_us = us;
  return d;
}

bool is_batch_invariant(const ForwardShape& shape) { return shape.batch_invariant; }
bool is_batch_invariant(const BackwardShape&) { return false; }

// A model's layers call with the same shape one after the other, and a batch has a hundred candidates.
template <typename Dispatch, typename Shape>
Dispatch decide_once(const Shape& shape, Override forced) {
  struct Decision {
    Shape shape;
    Override forced;
    Dispatch found;
  };
  thread_local std::optional<Decision> last;
  if (!shape.auto_cp || is_batch_invariant(shape)) {
    forced.segment_chunks = 0;
  }
  if (!last || last->shape != shape || last->forced != forced) {
    last = {shape, forced, decide(shape, forced)};
  }
  return last->found;
}

}  // namespace

ForwardDispatch dispatch_forward(const ForwardShape& shape) {
  return decide_once<ForwardDispatch>(shape, current_overrides().forward);
}

BackwardDispatch dispatch_backward(const BackwardShape& shape) {
  return decide_once<BackwardDispatch>(shape, current_overrides().backward);
}

}  // namespace flash_qla
