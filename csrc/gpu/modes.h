// The ways to run a call: which the host considers, in which order.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "gpu/dispatch.h"
#include "gpu/override.h"
#include "layout.h"

namespace flash_qla {

struct Mode {
  int64_t value_tile, whole_tile, segment_chunks;
  bool fused;
  bool always_cut;  // not only where the device finds that it pays
};

// At least one. An offer that only the device can take up comes after what it is compared with.
std::vector<Mode> modes_of(const ForwardShape& shape, const Override& forced);
std::vector<Mode> modes_of(const BackwardShape& shape, const Override& forced);

// Of a sequence, rounded up.
int64_t average_chunks(const ForwardShape& shape);

// Only cu_seqlens say how long the sequences are, and where all are short the device can leave out segments.
template <typename Shape>
bool device_knows_more(const Shape& shape) {
  return shape.varlen && shape.N > 1;
}

// Of chunk_matrices: the most that still leave a CTA for every SM.
int64_t heads_per_cta(const ForwardShape& shape, int64_t chunk_slots);

// Likewise: those that the SMs take at first, which find their chunks by themselves.
int64_t early_ctas(const ForwardShape& shape);

}  // namespace flash_qla
