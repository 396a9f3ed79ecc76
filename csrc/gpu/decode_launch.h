// What the launches of decoding share.
#pragma once

#include <cstdint>

#include "chunks.h"
#include "decode.h"
#include "kernels.h"

namespace flash_qla {

constexpr int64_t kMostSequences = 65535;  // a dimension of the grid

// The number of sequences, or parts of them, that prefetch their states into L2. Each has `ctas` CTAs. These are the
// CTAs that the SMs take first, so they may begin before the preceding grid has ended. 0 if the call has more than
// `waves` waves, because such calls take 2 % more time with the prefetch (benchmarks/notes/decoding.md).
inline int64_t early_sequence_parts(int64_t parts, int64_t ctas, int64_t waves, int64_t at_a_time) {
  return parts * ctas <= waves * at_a_time ? ceil_div(at_a_time, ctas) : 0;
}

// The table of a kernel that reads its rows as contiguous. Replaces another table by a copy.
kernels::IndexTable readable_table(const char* op, std::optional<Tensor>& table);

// The call's tables. Those whose rows are not contiguous are replaced by copies.
kernels::DecodeTables tables_of(DecodeCall& call);

}  // namespace flash_qla
