// The head dimensions that run on the GPU. A key is padded to the channels of the next instance, a value to whole
// tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "chunks.h"
#include "kernels.h"
#include "layout.h"

namespace flash_qla {

inline constexpr int64_t kMostKeyDim = kernels::kKeyDims.back();

inline bool is_key_dim(int64_t K) { return K > 0 && K <= kMostKeyDim && K % kHeadDimStep == 0; }
inline bool is_value_dim(int64_t V) { return V > 0 && V <= kMostValueDim && V % kHeadDimStep == 0; }

// The K of the instances that take keys of K channels.
inline int64_t instance_K(int64_t K) { return *std::ranges::lower_bound(kernels::kKeyDims, K); }

// Whether the instance's state takes so many registers that its kernels differ (is_wide of kernels_tl/config.py).
inline bool has_wide_keys(int64_t K) { return instance_K(K) > kNarrowKey; }

inline int64_t value_tiles(int64_t V, int64_t tile = kWideTile) { return ceil_div(V, tile); }
// Parts of a key's channels (key_parts of kernels_tl/config.py).
inline int64_t key_parts(int64_t K) { return ceil_div(instance_K(K), kKeyPart); }
// Value rows of states that only kernels read.
inline int64_t value_rows(int64_t V) { return value_tiles(V) * kWideTile; }

}  // namespace flash_qla
