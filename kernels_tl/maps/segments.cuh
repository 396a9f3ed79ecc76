// The gate-driven shortcut of context parallelism.
//
// One token's map S -> S' has norm at most exp(g_t) max(1, |1 - beta_t |k_t|^2|); chunk_matrices leaves the sum of the
// base-2 logarithms of that for each chunk. Where the last chunks of a segment add up to less than kNegligible, what
// came before them is left out of the state behind the segment: an error of at most 2^-24 of the norm of the state
// there. In reverse likewise what the first chunks leave of a gradient from behind them.
#pragma once

namespace flash_qla::device {

constexpr float kNegligible = -24.f;

// The first of the segment's chunks that matters to the state behind it, or -1 if even what was before the segment may.
// bounds[c * stride] is that of chunk c. By a whole warp.
__device__ __forceinline__ int first_chunk_that_matters(const float* bounds, int64_t stride, int chunks) {
  const int lane = threadIdx.x & 31;
  float behind = 0.f;
  for (int last = chunks - 1; last >= 0; last -= 32) {
    const int chunk = last - lane;
    float sum = chunk >= 0 ? bounds[chunk * stride] : 0.f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float later = __shfl_up_sync(~0u, sum, step);
      sum += lane >= step ? later : 0.f;
    }
    const unsigned found = __ballot_sync(~0u, chunk >= 0 && behind + sum < kNegligible);
    if (found != 0) {
      return last - (__ffs(found) - 1);
    }
    behind += __shfl_sync(~0u, sum, 31);
  }
  return -1;
}

// In reverse: the last of the segment's chunks that matters to the gradient of the state before it, or -1 if even what
// is behind the segment may. A gradient goes back through the transposed maps, which have the same norms.
__device__ __forceinline__ int last_chunk_that_matters(const float* bounds, int64_t stride, int chunks) {
  const int from_last = first_chunk_that_matters(bounds + (chunks - 1) * stride, -stride, chunks);
  return from_last < 0 ? -1 : chunks - 1 - from_last;
}

}  // namespace flash_qla::device
