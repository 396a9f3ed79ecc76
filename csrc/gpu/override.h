// Decisions that tests and experts force on the dispatch (dispatch.h). They hold for the whole process, because
// autograd runs the backward of a GPU's call in a thread of its own, which inherits no thread-local state.
#pragma once

#include <cstdint>

namespace flash_qla {

// The defaults leave each decision to the cost model. The backward has one value tile and no fused kernel, so its
// override sets only segment_chunks and cut_above.
struct Override {
  int64_t value_tile = 0;       // value rows per CTA, 64 or 128
  int64_t segment_chunks = -1;  // chunks per segment; 0: whole sequences, as for a call with auto_cp = false
  int64_t fused = -1;           // 0: never the fused kernel; 1: for every call that it can serve
  int64_t cut_above = 0;        // with segment_chunks or long_tile: a batch is long if a sequence has more chunks
  int64_t long_tile = 0;        // with value_tile: the value rows in a long batch; 0: the same

  bool always_cuts() const { return segment_chunks > 0; }
  bool sets_cut_above() const { return always_cuts() || long_tile > 0; }
  bool operator==(const Override&) const = default;
};

struct Overrides {
  Override forward, backward;
  bool portable = false;  // the kernels that run on every GPU from Ampere on, also on Hopper
};

Overrides current_overrides();

struct Gpu;
// Whether calls on this GPU run the portable kernels of the delta rule.
bool runs_portable_kernels(const Gpu& gpu);

// Sets all at once and returns the previous overrides. nullptr keeps that override. Throws for an override that no call
// can follow, and then sets none.
Overrides exchange_overrides(const Override* forward, const Override* backward, const bool* portable);

}  // namespace flash_qla
