// The cost model: the time of a call on a path, from its shape and the card's figures.
//
// always_cut: each sequence that is longer than a segment is cut. Else the device takes a batch whose lengths only
// cu_seqlens have as long (Dispatch::cut_above) where the model says that it pays.
#pragma once

#include <cstdint>

#include "gpu/candidates.h"

namespace flash_qla {

// The expected microseconds on the GPU. If only cu_seqlens have the lengths, this is an average over likely lengths.
double predict(const ForwardShape& shape, const ForwardPath& path, bool always_cut);
double predict(const BackwardShape& shape, const BackwardPath& path, bool always_cut);

// Dispatch::cut_above: the most chunks of a longest sequence with which the batch is faster if it is not long.
int64_t cut_above(const ForwardShape& shape, const ForwardPath& path, bool always_cut);
int64_t cut_above(const BackwardShape& shape, const BackwardPath& path, bool always_cut);

}  // namespace flash_qla
