// cu_seqlens on the host. A call on the CPU reads them; a call on a GPU only in the checking mode.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace flash_qla {

// The N + 1 offsets of contiguous cu_seqlens. Throws unless they start at 0, never decrease, and end at T or before. On
// a GPU this synchronizes.
std::vector<int64_t> checked_offsets(const char* op, const torch::stable::Tensor& cu_seqlens, int64_t N, int64_t T);

}  // namespace flash_qla
