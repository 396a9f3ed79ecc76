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

template <typename Path>
struct Choice {
  Path path;
  double us;
};

// Whether the device has to cut each sequence that is longer than a segment.
bool always_cut(const Shape& shape, const Override& forced) { return forced.always_cuts() || shape.over_ranks; }

template <typename DirectionShape>
auto fastest(const DirectionShape& shape, const Override& forced) {
  const auto paths = paths_of(shape, forced);
  Choice best = {paths.front(), predict(shape, paths.front(), always_cut(shape, forced))};
  for (const auto& path : paths) {
    if (const double us = predict(shape, path, always_cut(shape, forced)); us < best.us) {
      best = {path, us};
    }
  }
  return best;
}

// The tokens after which chunks begin anew; 0: never.
int64_t run_of(const ForwardShape& shape) { return shape.checkpoint_every; }
int64_t run_of(const BackwardShape&) { return 0; }

// The decisions of both directions, except the workspace.
template <typename DirectionShape, typename Path>
Dispatch decide_common(const DirectionShape& shape, const Override& forced, const Choice<Path>& choice) {
  const int64_t chunks = chunk_slots(shape.B, shape.T, shape.N, shape.varlen, run_of(shape));
  const int64_t segment_chunks = segment_chunks_of(choice.path);
  const bool is_forced = forced.sets_cut_above() && (segment_chunks > 0 || has_two_tiles(choice.path));
  return {.segment_chunks = segment_chunks,
          .cut_above = is_forced ? forced.cut_above : cut_above(shape, choice.path, always_cut(shape, forced)),
          .chunk_slots = chunks,
          .segments = segment_slots(shape.B, shape.T, shape.N, shape.varlen, segment_chunks),
          .heads_per_cta = heads_per_cta(shape, chunks),
          .early_ctas = early_ctas(shape),
          .over_ranks = shape.over_ranks,
          .portable = shape.portable,
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
  const auto choice = fastest(shape, forced);
  ForwardDispatch d{};
  static_cast<Dispatch&>(d) = decide_common(shape, forced, choice);
  d.path = choice.path;
  const auto tiles_of = [&](int64_t tile) { return d.segments * shape.H_v * value_tiles(shape.V, tile); };
  const auto ctas_of = [&](int64_t tiles) {
    return shape.portable ? tiles : std::min<int64_t>(tiles, shape.card.sm_count);
  };
  const int64_t tiles = tiles_of(value_tile_of(d.path));
  d.ctas = ctas_of(tiles);
  d.long_ctas = ctas_of(tiles_of(long_tile_of(d.path)));
  d.short_maps_last = !d.fuses_segments() && puts_short_maps_last(shape, d, 1);
  d.early = d.is_only_fused() && begins_early(shape);
  // No early CTAs of chunk_matrices where they read needs_maps, or only the plan knows where chunks begin.
  if (d.fuses_segments() || shape.resumable) {
    d.early_ctas = 0;
  }
  d.planned = !d.early || d.ctas < tiles || shape.checkpoint_every > 0 || !has_fused_kernel(shape, /*planned=*/false);
  d.workspace_bytes = ForwardWorkspace(shape, d).bytes();
  return d;
}

BackwardDispatch decide(const BackwardShape& shape, const Override& forced) {
  BackwardDispatch d{};
  static_cast<Dispatch&>(d) = decide_common(shape, forced, fastest(shape, forced));
  d.normalizes_inside = !shape.portable && normalizes_inside(shape);
  d.l2norm = shape.use_qk_l2norm && !d.normalizes_inside;
  d.short_maps_last = puts_short_maps_last(shape.forward(), d, 2);
  d.by_tokens = has_wide_keys(shape.K) || shape.portable;
  d.gradient_parts = d.by_tokens ? key_parts(shape.K) : value_tiles(shape.V);
  d.gate_gradients = shape.activations || d.gradient_parts > 1;
  d.workspace_bytes = BackwardWorkspace(shape, d).bytes();
  return d;
}

bool may_cut(const ForwardShape& shape) { return shape.auto_cp && !shape.batch_invariant && !shape.resumable; }
bool may_cut(const BackwardShape& shape) { return shape.auto_cp; }

// Keeps the last decision, because a decision compares up to three hundred candidates, and all layers of a model call
// with one shape.
template <typename Record, typename DirectionShape>
Record decide_once(const DirectionShape& shape, Override forced) {
  struct Decision {
    DirectionShape shape;
    Override forced;
    Record dispatch;
  };
  thread_local std::optional<Decision> last;
  if (!may_cut(shape) && forced.segment_chunks != 0) {
    forced.segment_chunks = 0;
    forced.cut_above = forced.long_tile > 0 ? forced.cut_above : 0;
  }
  if (!last || last->shape != shape || last->forced != forced) {
    last = {shape, forced, decide(shape, forced)};
  }
  return last->dispatch;
}

}  // namespace

ForwardDispatch dispatch_forward(const ForwardShape& shape) {
  return decide_once<ForwardDispatch>(shape, current_overrides().forward);
}

BackwardDispatch dispatch_backward(const BackwardShape& shape) {
  return decide_once<BackwardDispatch>(shape, current_overrides().backward);
}

}  // namespace flash_qla
