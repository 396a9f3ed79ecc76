// A tile of a tensor of 16-bit elements with any strides, copied to contiguous memory.
#pragma once

#include "core/warp.cuh"

namespace flash_qla::device {

// A dimension of `extent` elements that is two of the tensor's: `inner` elements of one stride in each of another one.
struct Dimension {
  int extent, inner;
  int64_t stride, outer_stride;

  __device__ __forceinline__ int64_t offset(int i) const {
    const int outer = i / inner;
    return outer * outer_stride + (i - outer * inner) * stride;
  }
};

// The elements first, first + step, ... of a dimension whose inner one has at least `step` elements.
class Walk {
 public:
  __device__ __forceinline__ Walk(const Dimension& along, int first, int step)
      : along_(along), place_(first % along.inner), step_(step), offset_(along.offset(first)) {}
  __device__ __forceinline__ int64_t offset() const { return offset_; }
  __device__ __forceinline__ void advance() {
    place_ += step_;
    const bool wraps = place_ >= along_.inner;
    place_ -= wraps ? along_.inner : 0;
    offset_ += step_ * along_.stride + (wraps ? along_.outer_stride - along_.inner * along_.stride : 0);
  }

 private:
  const Dimension& along_;
  int place_;
  const int step_;
  int64_t offset_;
};

// tile[i of `rows`, j of `columns`] = from, with neighbouring lanes along `fast`. kRowsFast: that is the rows.
template <bool kRowsFast>
__device__ __forceinline__ void read_tile(const uint16_t* from, uint16_t* tile, const Dimension& fast,
                                          const Dimension& slow, int first_fast, int first_slow) {
  constexpr int kStep = kCopyStep, kCount = kCopyTile / kStep;
  const int own = threadIdx.x % kCopyTile, begin = threadIdx.x / kCopyTile;
  const int left = first_fast + own < fast.extent ? slow.extent - first_slow : 0;
  uint16_t x[kCount];
  Walk walk(slow, first_slow + begin, kStep);
  from += left > 0 ? fast.offset(first_fast + own) : 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = begin + i * kStep < left ? from[walk.offset()] : uint16_t{0};
    walk.advance();
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = begin + i * kStep;
    tile[kRowsFast ? own * kCopyPitch + at : at * kCopyPitch + own] = x[i];
  }
}

// The whole CTA calls it. `token` and `column` are the tile's first ones.
__device__ __forceinline__ void copy_tile(const void* from, void* to, void* shared, const Dimension& tokens,
                                          const Dimension& columns, int token, int column) {
  constexpr int kPiece = 8, kPieces = kCopyTile / kPiece;
  const auto* const source = static_cast<const uint16_t*>(from);
  auto* const tile = static_cast<uint16_t*>(shared);
  if (tokens.stride < columns.stride) {
    read_tile<true>(source, tile, tokens, columns, token, column);
  } else {
    read_tile<false>(source, tile, columns, tokens, column, token);
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < kCopyTile * kPieces; i += kCopyThreads) {
    const int row = i / kPieces, first = kPiece * (i % kPieces);
    if (token + row < tokens.extent && column + first < columns.extent) {
      const auto* const words = reinterpret_cast<const uint32_t*>(tile + row * kCopyPitch + first);
      auto* const row_of = static_cast<uint16_t*>(to) + static_cast<int64_t>(token + row) * columns.extent;
      *reinterpret_cast<uint4*>(row_of + column + first) = {words[0], words[1], words[2], words[3]};
    }
  }
}

}  // namespace flash_qla::device
