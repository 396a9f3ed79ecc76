#pragma once

#include <array>

#include "tokens.h"

namespace flash_qla {

using CopiedTokens = std::array<torch::stable::Tensor*, 3>;

// Replaces tensors [B, T, heads, channels] of 16-bit elements by contiguous copies, which one kernel makes. B, T and
// the device are the same, and channels are pieces of 16 bytes. T is at least kCopyStep, or batch and token are even
// (see tokens.h). Null: no tensor; one at least is there.
void copy_tokens(const char* op, const CopiedTokens& tensors);

}  // namespace flash_qla
