// Scales of the rows of S^T in fp16, whose numbers end at 65504.
//
// A row of V_new^T, of O^T and of the next S^T depends on the same row of S^T and V^T alone, and is linear in it. So
// each row may have a scale, a power of two, with which nothing that is rounded to fp16 exceeds its range. A row whose
// norm is below 2^kUnscaledBits is not scaled. A warp with such rows only pays for that test alone.
//
// A thread has two rows, row and row + 8 of core/tiles.cuh, and shares them with three lanes. Their scales are a pair
// of bf16: word threadIdx.x / 4 of `scales` in shared memory, because the chunks take all registers. Whether a row of
// the warp has a scale other than 1 stays in a register, so that warps without such rows read no scales.
#pragma once

#include "core/state_tiles.cuh"

namespace flash_qla::device {

constexpr uint32_t kNoScales = 0x3f803f80;  // a pair of ones
// With keys of length 1, |V_new| <= beta (|v| + |row of S^T|). So V_new has at most twice the norm of the row. A scaled
// row is as large as it may be, because values that are much smaller than the state are to keep their digits.
constexpr int kUnscaledBits = 14;

__device__ __forceinline__ float2 factors_of(uint32_t scales) { return unpack(__nv_bfloat16(), scales); }
__device__ __forceinline__ float2 inverses_of(uint32_t scales) { return factors_of(2 * kNoScales - scales); }
__device__ __forceinline__ bool is_scaled(uint32_t scales) { return __any_sync(~0u, scales != kNoScales); }

// The scale, in bf16, of a row with this square of its norm. A scaled norm is between half of 2^kUnscaledBits and that.
__device__ __forceinline__ uint32_t scale_of(float square) {
  const int exponent = (static_cast<int>(__float_as_uint(square) >> 23 & 255) - 127) >> 1;  // of the norm
  return (127 + min(kUnscaledBits - 1 - exponent, 0)) << 7;
}

__device__ __forceinline__ uint32_t* thread_scales(void* scales) {
  int thread = threadIdx.x;
  make_opaque(thread);  // no address stays in a register
  return static_cast<uint32_t*>(scales) + thread / 4;
}
__device__ __forceinline__ uint32_t load_scales(void* scales) { return *thread_scales(scales); }
__device__ __forceinline__ void store_scales(void* scales, uint32_t pair) {
  __syncwarp();
  if (threadIdx.x % 4 == 0) {
    *thread_scales(scales) = pair;
  }
  __syncwarp();
}

template <int kCount>
__device__ __forceinline__ void multiply_rows(float* fragment, float2 factors) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    fragment[i] *= i % 4 < 2 ? factors.x : factors.y;
  }
}

// The squares of the norms of the thread's rows of S^T.
template <int kK>
__device__ __forceinline__ float2 squares_of_rows(const float* S) {
  float2 squares = {};
#pragma unroll
  for (int i = 0; i < kK / 2; i += 4) {
    squares.x += S[i] * S[i] + S[i + 1] * S[i + 1];
    squares.y += S[i + 2] * S[i + 2] + S[i + 3] * S[i + 3];
  }
  return {sum_of_lanes<4>(squares.x), sum_of_lanes<4>(squares.y)};
}

// Whether the warp has a number that is at least 2, infinite or NaN: this is the highest bit of its exponent. kCount
// registers hold pairs in fp16, or numbers in fp32.
template <int kCount, bool kPairs>
__device__ __forceinline__ bool has_large(const void* registers) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    bits |= static_cast<const uint32_t*>(registers)[i];
  }
  return __any_sync(~0u, (bits & (kPairs ? 0x40004000 : 0x40000000)) != 0);
}

// Scales S^T anew if a row of the warp is `scaled` or, being `large`, may have to be. S_16, if any, gets S^T
// in fp16. O^T, if any, loses its scales. Returns whether a row is scaled now.
template <int kK>
__device__ __forceinline__ bool scale_rows(float* S, void* S_16, void* scales, bool scaled, bool large, float* O) {
  if (scaled || large) {
    const float2 inverses = inverses_of(load_scales(scales));
    if (O != nullptr) {
      multiply_rows<kChunk / 2>(O, inverses);
    }
    const float2 squares = squares_of_rows<kK>(S);
    const uint32_t new_scales =
        scale_of(squares.x * inverses.x * inverses.x) | scale_of(squares.y * inverses.y * inverses.y) << 16;
    const float2 factors = factors_of(new_scales);
    multiply_rows<kK / 2>(S, {factors.x * inverses.x, factors.y * inverses.y});
    if (S_16 != nullptr) {
#pragma unroll
      for (int i = 0; i < kK / 4; ++i) {
        static_cast<uint32_t*>(S_16)[i] = pack(__half(), S[2 * i], S[2 * i + 1]);
      }
    }
    store_scales(scales, new_scales);
    scaled = is_scaled(new_scales);
  }
  // The branches meet here: see read_state.
#pragma unroll
  for (int i = 0; i < kK / 2; ++i) {
    pin_here(S[i]);
  }
  return scaled;
}

// Scales S^T, and removes the scales. S_16 is as above, and stays scaled. begin_scales returns whether a row of the
// warp is scaled.
template <int kK>
__device__ __forceinline__ bool begin_scales(float* S, void* S_16, void* scales) {
  store_scales(scales, kNoScales);
  return scale_rows<kK>(S, S_16, scales, false, has_large<kK / 2, false>(S), nullptr);
}
template <int kK>
__device__ __forceinline__ void end_scales(float* S, void* scales) {
  const uint32_t row_scales = load_scales(scales);
  if (is_scaled(row_scales)) {
    multiply_rows<kK / 2>(S, inverses_of(row_scales));
  }
#pragma unroll
  for (int i = 0; i < kK / 2; ++i) {
    pin_here(S[i]);
  }
}

// state = 64 rows of S^T without their scales in fp16: store_state and round_and_store_state of core/state_tiles.cuh. A
// number beyond 65504 becomes an infinity.
template <int kK>
__device__ __forceinline__ void store_scaled_state(const float* S, void* state, int stride, int rows, int columns,
                                                   void* scales) {
  const float2 inverses = inverses_of(load_scales(scales));
  write_words<kK>(state, threadIdx.x % 128, stride, rows, columns, [=](int i) {
    const float inverse = i % 2 == 0 ? inverses.x : inverses.y;
    return pack(__half(), S[2 * i] * inverse, S[2 * i + 1] * inverse);
  });
}
template <int kK>
__device__ __forceinline__ void store_scaled_copy(const void* S_16, void* state, int stride, int rows, int columns,
                                                  void* scales) {
  const float2 inverses = inverses_of(load_scales(scales));
  write_words<kK>(state, threadIdx.x % 128, stride, rows, columns, [=](int i) {
    const float2 pair = unpack(__half(), static_cast<const uint32_t*>(S_16)[i]);
    const float inverse = i % 2 == 0 ? inverses.x : inverses.y;
    return pack(__half(), pair.x * inverse, pair.y * inverse);
  });
}

// Scales the warp's part of a tile of V if a row is `scaled`. `offset` is the thread's place in the tile
// (transposed_offset).
__device__ __forceinline__ void scale_values(void* tile, int offset, void* scales, bool scaled) {
  if (scaled) {
    const float2 factors = factors_of(load_scales(scales));
    const uint32_t at = shared_address(tile) + offset;
#pragma unroll 1
    for (int n = 0; n < 8; n += 2) {
      uint32_t x[4];
      load_matrices_transposed(x, at + 1024 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(__half(), x[i]);
        const float factor = i % 2 == 0 ? factors.x : factors.y;
        x[i] = pack(__half(), pair.x * factor, pair.y * factor);
      }
      store_matrices_transposed(at + 1024 * n, x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
    fence_boxes();  // before the stage's next load
  }
}

}  // namespace flash_qla::device
