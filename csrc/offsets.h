// cu_seqlens on the host. A call on the CPU reads them; a call on a GPU only in the checking mode.
#pragma once

#include <cstdint>
#include <vector>

#include "call.h"

namespace flash_qla {

// The N + 1 offsets of a varlen call. Throws unless they start at 0, never decrease, and end at T or before. On a GPU
// this synchronizes.
std::vector<int64_t> checked_offsets(const Call& call);

}  // namespace flash_qla
