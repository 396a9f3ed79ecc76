// The gate-driven shortcut of context parallelism. The map S -> S' of token t has norm at most
//
//   exp(g_t) max(1, |1 - beta_t |k_t|^2|)
//
// chunk_matrices writes the sum of the base-2 logarithms of this bound for each chunk. Once the sums of a segment's
// last chunks add up to less than kNegligible, the state after the segment ignores all earlier chunks. The error is at
// most 2^-24 of the norm of the state before these last chunks.
//
// The reverse: once the sums of the first chunks add up to less than kNegligible, the gradient of the state before the
// segment ignores all later chunks.
#pragma once

namespace flash_qla::device {

// log2 of a bound.
constexpr float kNegligible = -24.f;

// The first chunk that matters to the state after the segment, or -1 if the state before the segment may matter too.
// bounds[c * stride] is the sum of chunk c. A whole warp calls it; lane i takes the i-th of 32 chunks from the last on.
__device__ __forceinline__ int first_chunk_that_matters(const float* bounds, int64_t stride, int chunks) {
  const int lane = threadIdx.x & 31;
  float later_chunks = 0.f;
  for (int last = chunks - 1; last >= 0; last -= 32) {
    const int chunk = last - lane;
    float sum = chunk >= 0 ? bounds[chunk * stride] : 0.f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float later = __shfl_up_sync(~0u, sum, step);
      sum += lane >= step ? later : 0.f;
    }
    const unsigned negligible = __ballot_sync(~0u, chunk >= 0 && later_chunks + sum < kNegligible);
    if (negligible != 0) {
      return last - (__ffs(negligible) - 1);
    }
    later_chunks += __shfl_sync(~0u, sum, 31);
  }
  return -1;
}

// The last chunk that matters to the gradient of the state before the segment, or -1 if the gradient of the state after
// the segment may matter too. A gradient goes back through the transposed maps, which have the same norms.
__device__ __forceinline__ int last_chunk_that_matters(const float* bounds, int64_t stride, int chunks) {
  const int from_last = first_chunk_that_matters(bounds + (chunks - 1) * stride, -stride, chunks);
  return from_last < 0 ? -1 : chunks - 1 - from_last;
}

}  // namespace flash_qla::device
