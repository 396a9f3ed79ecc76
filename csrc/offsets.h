// cu_seqlens as the host may read them: on the CPU always, on a GPU only in the checking mode.
#pragma once

#include <cstdint>
#include <vector>

#include "forward.h"

namespace flash_qla {

// The N + 1 offsets of a CPU tensor. Throws unless they start at 0, never decrease and end at T or before.
std::vector<int64_t> checked_offsets(const Problem& problem, const Tensor& cu_seqlens);

// FLASH_QLA_CHECK=1: GPU calls validate cu_seqlens too, at the price of a synchronization. Otherwise bad offsets are
// clamped on the device.
bool offsets_are_checked();

}  // namespace flash_qla
