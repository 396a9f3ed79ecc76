// The launch record of a call. It is decided from the shape and the card's figures alone, so that the host never waits
// for cu_seqlens. Only cu_seqlens say whether a sequence is long enough to be cut, so chunk_plan decides that on the
// device.
//
// candidates.h lists the ways to run a call, cost_model.h predicts the time of each, override.h forces one. The
// dispatch takes the fastest mode; forward.cpp or backward.cpp follows its record.
#pragma once

#include <array>
#include <cstdint>

#include "gpu/shape.h"

namespace flash_qla {

// The decisions of both directions.
struct Dispatch {
  int64_t segment_chunks;  // chunks a segment; 0 without context parallelism
  int64_t cut_above;       // a sequence with more chunks is long; the device cuts no sequence if none is long
  int64_t chunk_slots;     // see plan.h
  int64_t segments;        // segment slots, see plan.h
  int64_t heads_per_cta;   // of chunk_matrices: value heads of a group that share a CTA's K K^T and Q K^T
  int64_t early_ctas;      // of chunk_matrices: CTAs that find their chunks by themselves while chunk_plan runs
  bool in_halves;
  bool short_maps_last;  // of segment_maps and backward_maps, see there
  bool planned;  // chunk_plan runs. If not, fused_forward is the only kernel, and each CTA has one piece of work
  int64_t workspace_bytes;
  double predicted_us;  // the cost model's time on the GPU

  bool uses_cp() const { return segment_chunks > 0; }
  bool has_maps() const { return uses_cp() || in_halves; }
  // Slots of Z, or of dZ. In halves there is one more: Z of the last segment is in the slot after it, dZ of the first
  // segment in the slot before it.
  int64_t map_slots() const { return has_maps() ? segments + in_halves : 0; }
};

struct ForwardDispatch : Dispatch {
  // A launch of chunk_forward or of fused_forward.
  struct Launch {
    bool fused;
    int64_t value_tile;  // rows of S^T a CTA
    int64_t ctas;        // at most one an SM; each goes through segments, heads and tiles in turns
    int64_t only_if;     // the Way in which the launch runs; 0: in both
  };

  int64_t value_tile;   // the tile of the last launch, which takes long sequences: 64 or 128
  int64_t whole_tile;   // value tile if no sequence is long
  bool fused;           // fused_forward replaces chunk_matrices and chunk_forward if no sequence is long
  bool fused_segments;  // fused_forward takes segments, too; the other kernels compute the maps of heads that need them
  bool early;           // of fused_forward: every CTA finds its first segment by itself
  int64_t ctas;         // of the last launch
  std::array<Launch, 2> launches;
  int64_t launch_count;

  bool is_only_fused() const { return fused && !uses_cp() && launch_count == 1; }
  bool fuses_whole_sequences() const { return fused && !fused_segments; }
};

struct BackwardDispatch : Dispatch {
  bool normalizes_inside;  // the kernels take queries and keys as they are, and do the l2norm
  bool l2norm;             // l2norm and l2norm_backward run
  bool gate_gradients;     // gate_gradients runs: activations are inside, or sums over gradient_parts are needed
};

ForwardDispatch dispatch_forward(const ForwardShape& shape);
BackwardDispatch dispatch_backward(const BackwardShape& shape);

}  // namespace flash_qla
