// Tiles of tensors of 16-bit elements with any strides, copied to contiguous memory. A tile's time is that of its
// instructions, so a step from element to element takes few of them.
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

struct CopiedTensor {
  const void* from;
  void* to;
  Dimension tokens, columns;

  __device__ __forceinline__ int tiles() const { return (columns.extent + kCopyTile - 1) / kCopyTile; }
};

// tile[i of the rows, j of the columns] = from, with neighbouring lanes along `fast`. kRowsFast: that is the rows.
// `slow` has at least kCopyStep inner elements.
template <bool kRowsFast>
__device__ __forceinline__ void read_tile(const uint16_t* from, uint16_t* tile, const Dimension& fast,
                                          const Dimension& slow, int first_fast, int first_slow) {
  constexpr int kCount = kCopyTile / kCopyStep;
  const int along_fast = threadIdx.x % kCopyTile, begin = threadIdx.x / kCopyTile;
  const int left = first_fast + along_fast < fast.extent ? slow.extent - first_slow - begin : 0;
  if (left > 0) {
    from += fast.offset(first_fast + along_fast) + slow.offset(first_slow + begin);
  }
  int before_wrap = slow.inner - (first_slow + begin) % slow.inner;  // elements left of the inner dimension
  const int64_t step = kCopyStep * slow.stride, wrap = step + slow.outer_stride - slow.inner * slow.stride;
  uint16_t x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = i * kCopyStep < left ? *from : uint16_t{0};
    before_wrap -= kCopyStep;
    const bool wraps = before_wrap <= 0;
    from += wraps ? wrap : step;
    before_wrap += wraps ? slow.inner : 0;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = begin + i * kCopyStep;
    tile[kRowsFast ? along_fast * kCopyPitch + at : at * kCopyPitch + along_fast] = x[i];
  }
}

// Copies tile `cta` of all tensors: those of the same tokens follow each other. The whole CTA calls it.
__device__ __forceinline__ void copy_tile(const CopiedTensor& q, const CopiedTensor& k, const CopiedTensor& v,
                                          void* shared, int cta) {
  constexpr int kPiece = 8, kPieces = kCopyTile / kPiece;
  const int of_q = q.tiles(), of_k = k.tiles(), row = cta / (of_q + of_k + v.tiles());
  int column = cta - row * (of_q + of_k + v.tiles());
  CopiedTensor x = q;
  if (column >= of_q + of_k) {
    x = v;
    column -= of_q + of_k;
  } else if (column >= of_q) {
    x = k;
    column -= of_q;
  }
  const int first_token = row * kCopyTile, first_column = column * kCopyTile;
  const auto* const from = static_cast<const uint16_t*>(x.from);
  auto* const tile = static_cast<uint16_t*>(shared);
  if (x.tokens.stride < x.columns.stride) {
    read_tile<true>(from, tile, x.tokens, x.columns, first_token, first_column);
  } else {
    read_tile<false>(from, tile, x.columns, x.tokens, first_column, first_token);
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < kCopyTile * kPieces; i += kCopyThreads) {
    const int token = i / kPieces, of_tile = kPiece * (i % kPieces);
    if (first_token + token < x.tokens.extent && first_column + of_tile < x.columns.extent) {
      const auto* const words = reinterpret_cast<const uint32_t*>(tile + token * kCopyPitch + of_tile);
      auto* const to = static_cast<uint16_t*>(x.to) + static_cast<int64_t>(first_token + token) * x.columns.extent;
      *reinterpret_cast<uint4*>(to + first_column + of_tile) = {words[0], words[1], words[2], words[3]};
    }
  }
}

}  // namespace flash_qla::device
