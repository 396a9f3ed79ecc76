// What tests and experts force the dispatch to decide (dispatch.h), for the whole process: the backward of a GPU's call
// runs in a thread of autograd, which inherits no thread-local state of ours.
#pragma once

#include <cstdint>

namespace flash_qla {

// Each default leaves the decision to the cost model. The backward has one value tile and no fused kernel: its override
// sets segment_chunks and cut_above alone.
struct Override {
  int64_t value_tile = 0;       // value rows a CTA, 64 or 128
  int64_t segment_chunks = -1;  // chunks a segment; 0: no context parallelism, as for a call with auto_cp = false
  int64_t fused = -1;           // 0: never the fused kernel; 1: wherever it can serve a call
  int64_t cut_above = 0;        // with segments: chunks up to which no sequence is cut; 0: whatever is longer is cut
  int64_t whole_tile = 0;       // with cut_above: the value tile where no sequence is cut; 0: value_tile

  bool always_cuts() const { return segment_chunks > 0; }
  bool operator==(const Override&) const = default;
};

struct Overrides {
  Override forward, backward;
};

Overrides current_overrides();

// Sets both at once and returns what was in force. nullptr keeps that direction's override. Throws for an override that
// no call can follow, and then sets neither.
Overrides exchange_overrides(const Override* forward, const Override* backward);

}  // namespace flash_qla
