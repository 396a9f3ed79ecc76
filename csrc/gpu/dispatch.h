// The launch record of a call. It is decided from the shape and the card's figures alone, so that the host never waits
// for cu_seqlens. Where only cu_seqlens have the lengths, chunk_plan decides on the device whether a batch is long.
//
// candidates.h lists the paths of a call, override.h forces some, cost_model.h predicts the time of each. The dispatch
// takes the fastest; forward.cpp or backward.cpp follows its record.
#pragma once

#include <cstdint>
#include <variant>

#include "gpu/shape.h"

namespace flash_qla {

// The paths of a forward.
struct OneKernel {};            // fused_forward over whole sequences
struct OneKernelOverSegments {  // the maps of the heads that need them, then fused_forward over segments
  int64_t segment_chunks;
};
struct TwoKernels {    // chunk_matrices and chunk_forward, with the maps of all heads between if there are segments
  int64_t value_tile;  // rows of S^T per CTA
  int64_t segment_chunks = 0;      // 0: whole sequences
  int64_t long_tile = value_tile;  // the rows in a long batch (Dispatch::cut_above). If it differs, both are launched
};
using ForwardPath = std::variant<OneKernel, OneKernelOverSegments, TwoKernels>;

// The path of a backward.
struct BackwardPath {
  int64_t segment_chunks = 0;  // 0: whole sequences
};

inline int64_t segment_chunks_of(const OneKernel&) { return 0; }
inline int64_t segment_chunks_of(const auto& path) { return path.segment_chunks; }
inline int64_t segment_chunks_of(const ForwardPath& path) {
  return std::visit([](const auto& branch) { return segment_chunks_of(branch); }, path);
}

inline constexpr int64_t kFusedTile = 128;  // value rows per CTA of fused_forward; _C lacks layout.h, which has it too
inline bool is_fused(const ForwardPath& path) { return !std::holds_alternative<TwoKernels>(path); }
inline int64_t value_tile_of(const ForwardPath& path) {
  return is_fused(path) ? kFusedTile : std::get<TwoKernels>(path).value_tile;
}
inline int64_t long_tile_of(const ForwardPath& path) {
  return is_fused(path) ? kFusedTile : std::get<TwoKernels>(path).long_tile;
}

inline bool has_two_tiles(const BackwardPath&) { return false; }
inline bool has_two_tiles(const ForwardPath& path) { return value_tile_of(path) != long_tile_of(path); }

// The decisions of both directions.
struct Dispatch {
  int64_t segment_chunks;  // chunks per segment; 0: whole sequences
  int64_t cut_above;       // a batch is long if a sequence has more chunks than this. The device cuts long batches only
  int64_t chunk_slots;     // see plan.h
  int64_t segments;        // segment slots, see plan.h
  int64_t heads_per_cta;   // of chunk_matrices: value heads of a group that share a CTA's K K^T and Q K^T
  int64_t early_ctas;      // of chunk_matrices: CTAs that find their chunks by themselves while chunk_plan runs
  bool over_ranks;
  bool portable;         // see shape.h
  bool short_maps_last;  // of segment_maps and backward_maps, see there
  bool planned;          // chunk_plan runs. If not, fused_forward is the only kernel, and each CTA has one work tile
  int64_t workspace_bytes;
  double predicted_us;  // the cost model's time on the GPU

  bool uses_cp() const { return segment_chunks > 0; }
  bool has_maps() const { return uses_cp() || over_ranks; }
  // Slots of Z, or of dZ. Over ranks there is one more: Z of the last segment is in the slot after it, dZ of the first
  // segment in the slot before it.
  int64_t map_slots() const { return has_maps() ? segments + over_ranks : 0; }
};

struct ForwardDispatch : Dispatch {
  ForwardPath path;
  bool early;    // of fused_forward: every CTA finds its first segment by itself
  int64_t ctas;  // of the last kernel with value_tile; chunk_forward and fused_forward are persistent: at most one CTA
                 // per SM
  int64_t long_ctas;  // the same with long_tile

  bool is_only_fused() const { return std::holds_alternative<OneKernel>(path); }
  bool fuses_segments() const { return std::holds_alternative<OneKernelOverSegments>(path); }
};

struct BackwardDispatch : Dispatch {
  bool normalizes_inside;  // the kernels take queries and keys as they are, and do the l2norm
  bool l2norm;             // l2norm and l2norm_backward run
  bool by_tokens;          // all chunks' gradients come in parallel, after the recurrences of both directions
  int64_t gradient_parts;  // of db and dg: one for each tile of value rows or, by tokens, for each part of the key
  bool gate_gradients;     // gate_gradients runs: activations are inside, or sums over gradient_parts are needed
};

ForwardDispatch dispatch_forward(const ForwardShape& shape);
BackwardDispatch dispatch_backward(const BackwardShape& shape);

}  // namespace flash_qla
