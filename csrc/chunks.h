// Numbers of chunks.
#pragma once

#include <cstdint>

#include "layout.h"

namespace flash_qla {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The last chunk of a sequence may be shorter than the others.
inline int64_t chunk_count(int64_t tokens) { return ceil_div(tokens, kChunk); }

}  // namespace flash_qla
