#include "gpu/dispatch.h"

#include <algorithm>
#include <optional>

#include "gpu/candidates.h"
#include "gpu/cost_model.h"
#include "gpu/head_dims.h"
#include "gpu/override.h"
#include "gpu/plan.h"
#include "gpu/workspace.h"

namespace flash_qla {

namespace {

// Offer the device a choice only if the predicted gain is at least 0.2 %.
constexpr double kWorthOffering = 0.998;

struct Choice {
  Mode mode;
  double us;
};

template <typename DirectionShape>
Choice fastest(const DirectionShape& shape, const Override& forced) {
  std::optional<Choice> found;
  for (const Mode& mode : modes_of(shape, forced)) {
    const double us = predict(shape, mode);
    const bool is_first_offer = found && device_knows_more(shape) && mode.has_choice() && !found->mode.has_choice();
    if (!found || us < found->us * (is_first_offer ? kWorthOffering : 1)) {
      found = {mode, us};
    }
  }
  return *found;
}

// Pieces of work of chunk_forward and fused_forward.
int64_t pieces(const ForwardShape& shape, int64_t segments, int64_t value_tile) {
  return segments * shape.H_v * value_tiles(shape.V, value_tile);
}

// If long sequences have a launch of their own, both launches are made. The plan's way tells which of them runs.
void add_launches(const ForwardShape& shape, bool has_two_ways, ForwardDispatch& d) {
  const auto ctas = [&](int64_t segments, int64_t value_tile) {
    return std::min<int64_t>(pieces(shape, segments, value_tile), shape.card.sm_count);
  };
  d.ctas = ctas(d.segments, d.value_tile);
  if (has_two_ways) {
    d.launches = {
        {{d.fused, d.whole_tile, ctas(shape.N, d.whole_tile), Way::kShort}, {false, d.value_tile, d.ctas, Way::kLong}}};
    d.launch_count = 2;
  } else {
    d.launches = {{{d.fused, d.value_tile, d.ctas, 0}}};
    d.launch_count = 1;
  }
}

// The tokens after which chunks begin anew; 0: never.
int64_t run_of(const ForwardShape& shape) { return shape.checkpoint_every; }
int64_t run_of(const BackwardShape&) { return 0; }

// The decisions of both directions, except the workspace.
template <typename DirectionShape>
Dispatch decide_common(const DirectionShape& shape, const Override& forced, const Choice& choice) {
  const int64_t chunks = chunk_slots(shape.B, shape.T, shape.N, shape.varlen, run_of(shape));
  const int64_t segment_chunks = choice.mode.segment_chunks;
  return {
      .segment_chunks = segment_chunks,
      .cut_above = forced.always_cuts() || forced.chooses_whole() ? forced.cut_above : cut_above(shape, choice.mode),
      .chunk_slots = chunks,
      .segments = segment_slots(shape.B, shape.T, shape.N, shape.varlen, segment_chunks),
      .heads_per_cta = heads_per_cta(shape, chunks),
      .early_ctas = early_ctas(shape),
      .in_halves = shape.in_halves,
      .short_maps_last = false,
      .planned = true,
      .workspace_bytes = 0,
      .predicted_us = choice.us};
}

// Whether segment_maps (1 direction) or backward_maps (2) computes short maps last. That pays if the CTAs exceed the
// SMs, and costs more CTAs without work if no sequence is cut.
bool puts_short_maps_last(const ForwardShape& shape, const Dispatch& d, int64_t directions) {
  const int64_t ctas = d.segments * shape.H_v * (value_tiles(shape.K) + directions * value_tiles(shape.V));
  const bool is_surely_cut = longest_chunks(shape) > d.cut_above;
  return d.has_maps() && is_surely_cut && ctas > shape.card.sm_count;
}

ForwardDispatch decide(const ForwardShape& shape, const Override& forced) {
  const Choice choice = fastest(shape, forced);
  ForwardDispatch d{};
  static_cast<Dispatch&>(d) = decide_common(shape, forced, choice);
  d.value_tile = choice.mode.value_tile;
  d.whole_tile = choice.mode.whole_tile;
  d.fused = choice.mode.fused;
  d.fused_segments = choice.mode.fused_segments;
  add_launches(shape, choice.mode.has_two_ways(), d);
  d.short_maps_last = !d.fused_segments && puts_short_maps_last(shape, d, 1);
  d.early = d.is_only_fused() && begins_early(shape);
  // All CTAs of chunk_matrices wait for the plan if it says whether they run, or if it alone knows where chunks begin.
  if (d.fused || shape.resumable) {
    d.early_ctas = 0;
  }
  const bool has_one_piece_each = d.ctas == pieces(shape, d.segments, d.value_tile);
  d.planned =
      !d.early || !has_one_piece_each || shape.checkpoint_every > 0 || !has_fused_kernel(shape, /*planned=*/false);
  d.workspace_bytes = ForwardWorkspace(shape, d).bytes();
  return d;
}

BackwardDispatch decide(const BackwardShape& shape, const Override& forced) {
  BackwardDispatch d{};
  static_cast<Dispatch&>(d) = decide_common(shape, forced, fastest(shape, forced));
  d.normalizes_inside = normalizes_inside(shape);
  d.l2norm = shape.use_qk_l2norm && !d.normalizes_inside;
  d.short_maps_last = puts_short_maps_last(shape.forward(), d, 2);
  d.gate_gradients = shape.activations || gradient_parts(shape.K, shape.V) > 1;
  d.workspace_bytes = BackwardWorkspace(shape, d).bytes();
  return d;
}

bool may_cut(const ForwardShape& shape) { return shape.auto_cp && !shape.batch_invariant && !shape.resumable; }
bool may_cut(const BackwardShape& shape) { return shape.auto_cp; }

// Keeps the last decision, because a decision compares up to a hundred modes, and all layers of a model call with one
// shape.
template <typename Record, typename DirectionShape>
Record decide_once(const DirectionShape& shape, Override forced) {
  struct Decision {
    DirectionShape shape;
    Override forced;
    Record found;
  };
  thread_local std::optional<Decision> last;
  if (!may_cut(shape) && forced.segment_chunks != 0) {
    forced.segment_chunks = forced.cut_above = 0;
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
