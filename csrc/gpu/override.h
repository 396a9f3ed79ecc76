// What override_forward_dispatch and override_backward_dispatch (dispatch.h) have set.
#pragma once

#include <cstdint>

namespace flash_qla {

struct Override {
  int64_t value_tile;      // 0: the cost model's choice
  int64_t segment_chunks;  // 0: none; -1: the cost model's choice
  int64_t fused;           // 0, 1; -1: the cost model's choice
  int64_t cut_above;
  int64_t whole_tile;  // 0: value_tile

  bool always_cuts() const { return segment_chunks > 0; }
  bool operator==(const Override&) const = default;
};

// The backward's has segment_chunks and cut_above, and one tile.
Override current_override();
Override current_backward_override();

}  // namespace flash_qla
