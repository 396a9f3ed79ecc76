// What a call launches, all of it: decided from shapes and the card's figures alone, so that the host never waits for
// cu_seqlens. What only these say, whether any sequence is long enough to be cut, chunk_plan decides on the device.
//
// modes.h lists the ways to run a call, cost_model.h says how long each takes, override.h is for tests; here the
// fastest becomes the launch record that forward.cpp or backward.cpp follows.
#pragma once

#include <array>
#include <cstdint>

#include "gpu/card.h"

namespace flash_qla {

struct ForwardShape {
  int64_t B, T, N, H_k, H_v;
  bool varlen;
  Card card;
  bool auto_cp;
  bool low_level;  // A is wanted
  bool use_qk_l2norm;
  bool output_h, fp16;  // the fused kernel makes no h, and A in bf16 only
  int64_t K = 128, V = 128;
  bool batch_invariant = false;  // no segments and two kernels: their tiles do not change the bits
  bool checkpoints = false;      // states behind chunks are kept
  bool in_halves = false;        // for ranks (halves.h): sequences are always cut, as that makes their maps

  int64_t group() const { return H_v / H_k; }  // value heads a query/key head
  bool operator==(const ForwardShape&) const = default;
};

struct ForwardDispatch {
  // A launch of chunk_forward, or of fused_forward.
  struct Launch {
    int64_t value_tile;  // rows of S^T a CTA
    int64_t ctas;        // at most one an SM: they go through segments, heads and tiles in turns
    int64_t only_if;     // it does nothing unless the first segment has exactly these flags; 0: it always runs
  };

  int64_t value_tile;      // of the launch that takes cut sequences: 64 or 128
  int64_t segment_chunks;  // chunks a segment; 0 without context parallelism
  int64_t cut_above;       // which the device leaves out where cu_seqlens has no sequence of more chunks than that
  int64_t whole_tile;      // and then takes this value tile
  bool fused;              // fused_forward in place of chunk_matrices and chunk_forward
  int64_t chunk_slots;     // see plan.h
  int64_t segments;        // segment slots, likewise
  int64_t heads_per_cta;   // of chunk_matrices: value heads of a group that share a CTA's K K^T and Q K^T
  int64_t early_ctas;      // of chunk_matrices: so many find their chunks by themselves, while chunk_plan runs
  bool early;              // of fused_forward: every CTA finds its first segment by itself
  bool clear_h;            // there may be slots of h that no chunk uses
  int64_t ctas;            // of the last launch
  std::array<Launch, 2> launches;
  int64_t launch_count;
  bool in_halves;
  int64_t workspace_bytes;
  double predicted_us;  // by the cost model, on the GPU

  bool uses_cp() const { return segment_chunks > 0; }
  bool has_maps() const { return uses_cp() || in_halves; }
  // Of Z, as that of a last segment lies behind it.
  int64_t map_slots() const { return has_maps() ? segments + in_halves : 0; }
};

ForwardDispatch dispatch_forward(const ForwardShape& shape);

struct BackwardShape {
  int64_t B, T, N, H_k, H_v;
  bool varlen;
  Card card;
  bool auto_cp;
  bool use_qk_l2norm;
  bool activations;  // of gate or beta inside
  int64_t K = 128, V = 128;
  bool in_halves = false;  // as the forward's

  // Of the forward that goes through the same chunks.
  ForwardShape forward() const {
    return {.B = B,
            .T = T,
            .N = N,
            .H_k = H_k,
            .H_v = H_v,
            .varlen = varlen,
            .card = card,
            .auto_cp = auto_cp,
            .low_level = false,
            .use_qk_l2norm = false,
            .output_h = true,
            .fp16 = false,
            .K = K,
            .V = V,
            .in_halves = in_halves};
  }
  bool operator==(const BackwardShape&) const = default;
};

struct BackwardDispatch {
  int64_t segment_chunks;  // chunks a segment; 0 without context parallelism
  int64_t cut_above;       // as the forward's
  int64_t chunk_slots;     // see plan.h
  int64_t segments;        // segment slots, likewise
  int64_t heads_per_cta;   // of chunk_matrices
  int64_t early_ctas;      // likewise
  bool gate_gradients;     // is launched: activations are inside, or tiles of the value rows have to be added up
  bool in_halves;
  int64_t workspace_bytes;
  double predicted_us;  // by the cost model, on the GPU

  bool uses_cp() const { return segment_chunks > 0; }
  bool has_maps() const { return uses_cp() || in_halves; }
  // Of dZ, as that of a first segment lies before it.
  int64_t map_slots() const { return has_maps() ? segments + in_halves : 0; }
};

BackwardDispatch dispatch_backward(const BackwardShape& shape);

}  // namespace flash_qla
