// How long a call takes in a mode, from shapes alone.
#pragma once

#include <cstdint>

#include "gpu/modes.h"

namespace flash_qla {

// Microseconds on the GPU: what is to be expected of a batch of which the host does not know the lengths.
double predict(const ForwardShape& shape, const Mode& mode);
double predict(const BackwardShape& shape, const Mode& mode);

// Chunks of the longest sequence that is better left whole, 0 where there is nothing to decide on the device.
int64_t cut_above(const ForwardShape& shape, const Mode& mode);
int64_t cut_above(const BackwardShape& shape, const Mode& mode);

}  // namespace flash_qla
