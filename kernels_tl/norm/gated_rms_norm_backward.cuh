// The backward of the gated RMS norm; see gated_rms_norm_backward.py.
#pragma once

#include "norm/gated_rms_norm.cuh"

namespace flash_qla::device {

struct NormGradients {
  const void* dy;
  NormStrides of_dy;
  void *grad_o, *dz;
  float* dweight;  // [ctas, V]
};

// The gradients of a thread's channels of a row, and its terms of dweight. The whole warp calls it.
template <bool kNormBeforeGate, typename Row, int kChannels>
__device__ __forceinline__ void differentiate_row(const Row& o, const Row& z, const Row& dy, const NormRows& rows,
                                                  const GatedNorm& norm, const float (&w)[kChannels], float per_channel,
                                                  bool is_row, float (&grad_o)[kChannels], float (&dz)[kChannels],
                                                  float (&dweight)[kChannels]) {
  float e[kChannels], squares = 0.f, products = 0.f;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    e[c] = GatedNorm::power(z[c]);
  }
  const auto gate = [&](int c) { return norm(z[c], e[c]); };
  // What is normalized, and the gradient of what it becomes.
  const auto x = [&](int c) { return kNormBeforeGate ? o[c] : o[c] * gate(c); };
  const auto dn = [&](int c) { return kNormBeforeGate ? dy[c] * w[c] * gate(c) : dy[c] * w[c]; };
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    squares += x(c) * x(c);
    products += dn(c) * x(c);
  }
  sum_over_row(rows, squares, products);
  const float rstd = norm.rstd(squares, per_channel), mean = products * per_channel * rstd * rstd;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const float n = x(c) * rstd, dx = rstd * (dn(c) - x(c) * mean), slope = norm.slope(z[c], e[c]);
    grad_o[c] = kNormBeforeGate ? dx : dx * gate(c);
    dz[c] = (kNormBeforeGate ? dy[c] * w[c] * n : dx * o[c]) * slope;
    const float term = kNormBeforeGate ? dy[c] * gate(c) * n : dy[c] * n;
    dweight[c] += is_row ? term : 0.f;
  }
}

template <typename T, bool kNormBeforeGate, int kChannels, bool kVectors, int kInFlight>
__device__ __forceinline__ void differentiate_rows(const NormInputs& in, const NormGradients& to, const NormRows& rows,
                                                   const GatedNorm& norm, float* shared, unsigned cta) {
  using Row = Channels<T, kChannels, kVectors>;
  const float per_channel = 1.f / rows.V;
  float w[kChannels], dweight[kChannels] = {};
  load_weight<Row>(w, rows, in.weight, in.weight_dtype);
  RowWalk walk(rows, cta);
  while (walk.any_left()) {
    Row o[kInFlight], z[kInFlight], dy[kInFlight];
    unsigned row[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      row[i] = walk.row();
      o[i].load(rows, in.o, walk.offset(in.of_o), walk.is_row());
      z[i].load(rows, in.z, walk.offset(in.of_z), walk.is_row());
      dy[i].load(rows, to.dy, walk.offset(to.of_dy), walk.is_row());
      walk.advance();
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const bool is_row = row[i] < rows.count;
      const int64_t offset = int64_t{row[i]} * rows.V;
      float grad_o[kChannels], dz[kChannels];
      differentiate_row<kNormBeforeGate>(o[i], z[i], dy[i], rows, norm, w, per_channel, is_row, grad_o, dz, dweight);
      Row::store(rows, to.grad_o, offset, is_row, grad_o);
      Row::store(rows, to.dz, offset, is_row, dz);
    }
  }
  // Adds the terms of the CTA's threads: of a warp's rows, then of its warps.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    for (int bit = rows.lanes; bit < 32; bit *= 2) {
      dweight[c] += __shfl_xor_sync(~0u, dweight[c], bit);
    }
    const int channel = Row::channel(rows, c);
    if (lane < rows.lanes && channel < rows.V) {
      shared[warp * rows.V + channel] = dweight[c];
    }
  }
  __syncthreads();
  for (int channel = threadIdx.x; channel < rows.V; channel += blockDim.x) {
    float sum = 0.f;
    for (int i = 0; i < static_cast<int>(blockDim.x / 32); ++i) {
      sum += shared[i * rows.V + channel];
    }
    to.dweight[int64_t{cta} * rows.V + channel] = sum;
  }
}

template <typename Number, int kChannels, bool kVectors, int kInFlight>
__device__ __forceinline__ void gated_rms_norm_backward(const NormInputs& in, const NormGradients& to,
                                                        const NormRows& rows, const GatedNorm& norm, float* shared,
                                                        int cta) {
  with_variant<Number>(in.dtype, norm.norm_before_gate, [&]<typename T, typename Before>(T, Before) {
    differentiate_rows<T, Before::value, kChannels, kVectors, kInFlight>(in, to, rows, norm, shared, cta);
  });
}

}  // namespace flash_qla::device
