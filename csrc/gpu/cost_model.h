// The cost model: the time of a call in a mode, from its shape and the card's figures.
#pragma once

#include <cstdint>

#include "gpu/candidates.h"

namespace flash_qla {

// The expected microseconds on the GPU. If only cu_seqlens say the lengths, this is an average over likely lengths.
double predict(const ForwardShape& shape, const Mode& mode);
double predict(const BackwardShape& shape, const Mode& mode);

// The most chunks of a longest sequence with which the batch is faster without cuts. 0: the device has no choice.
int64_t cut_above(const ForwardShape& shape, const Mode& mode);
int64_t cut_above(const BackwardShape& shape, const Mode& mode);

}  // namespace flash_qla
