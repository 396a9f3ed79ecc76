// The l2norm of rows of 16-bit elements, and its backward. kLanes neighbouring lanes share a row. A lane has one piece
// of kNormPiece channels, or none (`there` is false). `dtype` is the Dtype of the elements: bf16 or fp16.
#pragma once

#include "core/warp.cuh"

namespace flash_qla::device {

__device__ __forceinline__ void load_piece(float (&x)[kNormPiece], const void* from, int dtype, bool there) {
  const uint4 words = there ? *static_cast<const uint4*>(from) : uint4{};
  const uint32_t pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < kNormPiece; i += 2) {
    const float2 pair = unpack(Bits16(), pairs[i / 2], dtype);
    x[i] = pair.x;
    x[i + 1] = pair.y;
  }
}

__device__ __forceinline__ void store_piece(void* to, int dtype, const float (&x)[kNormPiece]) {
  *static_cast<uint4*>(to) = with_format<Bits16>(dtype, [&](auto format) {
    return uint4{pack(format, x[0], x[1]), pack(format, x[2], x[3]), pack(format, x[4], x[5]),
                 pack(format, x[6], x[7])};
  });
}

// y = rstd x, rstd = 1 / sqrt(sum(x * x) + eps). The lane of the row's first piece stores rstd.
template <int kLanes>
__device__ __forceinline__ void normalize_piece(const void* from, void* y, void* rstd, int dtype, bool there,
                                                bool is_first) {
  float x[kNormPiece], squares = 0.f;
  load_piece(x, from, dtype, there);
#pragma unroll
  for (const float number : x) {
    squares += number * number;
  }
  const float factor = rsqrtf(sum_of_lanes<kLanes>(squares) + float{kNormEps});
  if (there) {
#pragma unroll
    for (float& number : x) {
      number *= factor;
    }
    store_piece(y, dtype, x);
    if (is_first) {
      *static_cast<float*>(rstd) = factor;
    }
  }
}

// dy becomes dx = rstd (dy - y sum(y * dy)). Rows that no sequence covers have dy = 0, and y may be NaN. They stay 0.
template <int kLanes>
__device__ __forceinline__ void replace_by_dx(const void* y_from, const void* rstd, void* gradient, int dtype,
                                              bool there) {
  float y[kNormPiece], dy[kNormPiece], products = 0.f, sizes = 0.f;
  load_piece(y, y_from, dtype, there);
  load_piece(dy, gradient, dtype, there);
#pragma unroll
  for (int i = 0; i < kNormPiece; ++i) {
    products += y[i] * dy[i];
    sizes += fabsf(dy[i]);
  }
  const float product = sum_of_lanes<kLanes>(products), size = sum_of_lanes<kLanes>(sizes);
  if (there && size != 0.f) {
    const float factor = *static_cast<const float*>(rstd);
#pragma unroll
    for (int i = 0; i < kNormPiece; ++i) {
      dy[i] = factor * (dy[i] - y[i] * product);
    }
    store_piece(gradient, dtype, dy);
  }
}

}  // namespace flash_qla::device
