// The gradients of the filter and of the initial windows; see convolution/conv_gradients.py.
#pragma once

#include "convolution/causal_conv1d_backward.cuh"
#include "convolution/conv_windows.cuh"

namespace flash_qla::device {

constexpr int kSumLanes = 32, kSumRows = 4;

// Adds `groups` rows of partial sums [W + 1, D], kSumLanes of them per CTA: each warp adds every kSumRows-th row, and
// then the first one adds the warps' sums, in order.
__device__ __forceinline__ void add_sums(const float* partial, int groups, int width, int D, int cta, float* dweight,
                                         float* dbias) {
  __shared__ float shared[kSumRows][kSumLanes];
  const int64_t size = static_cast<int64_t>(width + 1) * D,
                i = static_cast<int64_t>(cta) * kSumLanes + threadIdx.x % 32;
  const int row = threadIdx.x / 32;
  float sum = 0.f;
  if (i < size) {
#pragma unroll 8
    for (int group = row; group < groups; group += kSumRows) {
      sum += partial[group * size + i];
    }
  }
  shared[row][threadIdx.x % 32] = sum;
  __syncthreads();
  if (row == 0 && i < size) {
#pragma unroll
    for (int other = 1; other < kSumRows; ++other) {
      sum += shared[other][threadIdx.x];
    }
    const int w = static_cast<int>(i / D), channel = static_cast<int>(i - static_cast<int64_t>(w) * D);
    if (w < width) {
      dweight[static_cast<int64_t>(channel) * width + w] = sum;
    } else if (dbias != nullptr) {
      dbias[channel] = sum;
    }
  }
}

// dh0 of a channel of sequence n: dht where the row is still in the final window, and the parts of the first tokens.
template <int kWidth>
__device__ __forceinline__ void initial_gradient(const ConvInputs& in, int x_dtype, const ConvGradients& gradients,
                                                 int n, int channel, float* dh0) {
  constexpr int kBefore = kWidth - 1;
  const Span span = in.sequences.of_sequence(n);
  const int slot = in.windows.initial_slot(n), columns = in.windows.columns, length = span.length();
  Filter<kWidth, 1> filter;
  filter.load(in.filter, channel);
  RecentRows<kWidth, 1> before;
#pragma unroll
  for (int i = 0; i < kBefore; ++i) {
    before.rows[i][0] = row_of_sequence(in, x_dtype, span, slot, channel, i - kBefore);
  }
  float sums[kMostConvWidth] = {};  // of rows -kBefore to -1, then of row -kWidth: not in the convolution
#pragma unroll
  for (int token = 0; token < kBefore; ++token) {
    if (token < length) {
      const float x[1] = {row_of_sequence(in, x_dtype, span, slot, channel, token)};
      float dpre = 0.f;
      with_dtype(x_dtype, 0, [&]<typename T>(T) {
        dpre = to_float(gradients.dy.at<T>(in.sequences, span, span.begin + token)[channel]);
      });
      dpre *= in.use_silu ? silu_slope(filter.apply(before, x, 0)) : 1.f;
#pragma unroll
      for (int w = 0; w + token < kBefore; ++w) {
        sums[w + token] += filter.weight[w][0] * dpre;
      }
      before.push(x);
    }
  }
  dh0 += (static_cast<int64_t>(n) * in.D + channel) * columns;
  if (columns == kWidth) {
    *dh0++ = length == 0 && gradients.dht.data != nullptr ? gradients.dht.load(n, channel, 0) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kBefore; ++i) {
    const int column = columns - kBefore + i - length;  // of the final window
    dh0[i] = sums[i] + (column >= 0 && gradients.dht.data != nullptr ? gradients.dht.load(n, channel, column) : 0.f);
  }
}

// A CTA adds sums, or it takes channels of a sequence's dh0.
__device__ __forceinline__ void conv_gradients(const ConvInputs& in, int x_dtype, const ConvGradients& gradients,
                                               const float* partial, int groups, int sum_ctas, int cta, float* dweight,
                                               float* dbias, float* dh0) {
  if (cta < sum_ctas) {
    add_sums(partial, groups, in.filter.width, in.D, cta, dweight, dbias);
    return;
  }
  const int blocks = (in.D + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
  const int n = (cta - sum_ctas) / blocks;
  const int channel = (cta - sum_ctas - n * blocks) * blockDim.x + threadIdx.x;
  if (channel < in.D) {
    with_width(in.filter.width,
               [&]<int kWidth>() { initial_gradient<kWidth>(in, x_dtype, gradients, n, channel, dh0); });
  }
}

}  // namespace flash_qla::device
