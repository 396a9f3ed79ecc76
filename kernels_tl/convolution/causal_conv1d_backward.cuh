// The backward of the causal depthwise convolution; see convolution/causal_conv1d_backward.py.
#pragma once

#include "convolution/convolution.cuh"

namespace flash_qla::device {

// The gradients that come in: of y, and of the final windows, whose address is null if they have none.
struct ConvGradients {
  ConvRows dy;
  Window dht;
};

// A lane's sums of dweight and dbias, in the order of the tokens.
template <int kWidth, int kChannels>
struct FilterSums {
  float weight[kWidth][kChannels] = {}, bias[kChannels] = {};

  // Adds those of a token; dpre is the gradient of the sum before the activation.
  __device__ __forceinline__ void add(const float (&dpre)[kChannels], const RecentRows<kWidth, kChannels>& before,
                                      const float (&now)[kChannels]) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
#pragma unroll
      for (int w = 0; w < kWidth - 1; ++w) {
        weight[w][c] += dpre[c] * before.rows[w][c];
      }
      weight[kWidth - 1][c] += dpre[c] * now[c];
      bias[c] += dpre[c];
    }
  }
};

// Writes dx of tokens [begin, end) of a sequence, and adds their part of dweight and dbias. The walk goes on for
// kWidth - 1 tokens after them, because dx[t] has parts from tokens t to t + kWidth - 1.
template <typename T, int kWidth, int kChannels>
__device__ __forceinline__ void convolve_backward(const ConvInputs& in, const ConvGradients& gradients,
                                                  const Filter<kWidth, kChannels>& filter, const Span& span, int begin,
                                                  int end, int channel, T* dx, FilterSums<kWidth, kChannels>& sums) {
  constexpr int kBefore = kWidth - 1, kRows = 8 / sizeof(T);
  const int stop = span.end - end < kBefore ? span.end : end + kBefore;  // tokens from here on have no gradient
  const int first_with_dht = gradients.dht.data == nullptr ? span.end : span.end - in.windows.columns;
  RowsAhead<T, kChannels, kRows> rows(in.x.at<T>(in.sequences, span, begin) + channel, in.x.row, stop - begin);
  RowsAhead<T, kChannels, kRows> dy_rows(gradients.dy.at<T>(in.sequences, span, begin) + channel, gradients.dy.row,
                                         stop - begin);
  RecentRows<kWidth, kChannels> before, dpre_before;
  before.template load<T>(in, span, begin, channel);
  dpre_before.clear();
  dx += static_cast<int64_t>(begin - kBefore) * in.D + channel;
  // kInside: all rows are tokens of the tile, and finish none that the final window has.
  const auto step = [&]<bool kInside>(int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i, dx += in.D) {
      const int token = first + i;
      float x[kChannels], dpre[kChannels];
      rows.take(i, x);
      dy_rows.take(i, dpre);
      if (in.use_silu) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          dpre[c] *= silu_slope(filter.apply(before, x, c));
        }
      }
      if (!kInside && token >= stop) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          dpre[c] = 0.f;
        }
      }
      if (kInside || token < end) {
        sums.add(dpre, before, x);
      }
      const int finished = token - kBefore;  // its last part is here
      if (finished >= begin && (kInside || finished < end)) {
        float out[kChannels];
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          out[c] = filter.weight[0][c] * dpre[c];
#pragma unroll
          for (int w = 1; w < kWidth; ++w) {
            out[c] += filter.weight[w][c] * dpre_before.rows[kBefore - w][c];
          }
        }
        if (!kInside && finished >= first_with_dht) {
          const int column = finished - (span.end - in.windows.columns);
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
            out[c] += gradients.dht.load(span.n, channel + c, column);
          }
        }
        Piece<T, kChannels>::of(out).store(dx);
      }
      before.push(x);
      dpre_before.push(dpre);
    }
  };
  int first = begin;
  const int inside = (first_with_dht < end - kBefore ? first_with_dht + kBefore : end) - kRows;
  for (; first <= inside; first += kRows) {
    step.template operator()<true>(first);
  }
  for (; first < end + kBefore; first += kRows) {
    step.template operator()<false>(first);
  }
}

// Stores the sums of a CTA's warps, [W + 1, D] for each group of tokens: dweight, then dbias. The whole CTA calls it.
template <int kWidth, int kChannels>
__device__ __forceinline__ void store_sums(const FilterSums<kWidth, kChannels>& sums, const ConvTile& tile, int D,
                                           float* shared, float* partial) {
  constexpr int kColumns = 32 * kChannels;
  const int lane = threadIdx.x % 32;
  float* const lane_sums = shared + threadIdx.x / 32 * (kWidth + 1) * kColumns + lane * kChannels;
#pragma unroll
  for (int w = 0; w <= kWidth; ++w) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      lane_sums[w * kColumns + c] = w == kWidth ? sums.bias[c] : sums.weight[w < kWidth ? w : 0][c];
    }
  }
  __syncthreads();
  const int first_channel = tile.first_channel<kChannels>();
  partial += static_cast<int64_t>(tile.group()) * (kWidth + 1) * D + first_channel;
  for (int i = threadIdx.x; i < (kWidth + 1) * kColumns; i += 32 * kConvWarps) {
    const int w = i / kColumns, column = i % kColumns;
    float sum = shared[i];
#pragma unroll
    for (int warp = 1; warp < kConvWarps; ++warp) {
      sum += shared[warp * (kWidth + 1) * kColumns + i];
    }
    if (first_channel + column < D) {
      partial[static_cast<int64_t>(w) * D + column] = sum;
    }
  }
}

template <typename T, int kChannels>
__device__ __forceinline__ void convolve_tile_backward(const ConvInputs& in, const ConvGradients& gradients,
                                                       const ConvTile& tile, T* dx, float* shared, float* partial) {
  const int channel = tile.first_channel<kChannels>() + threadIdx.x % 32 * kChannels;
  const int first = tile.first_token(in.sequences.tokens);
  const int last = channel < in.D ? tile.last_token(first, in.sequences.tokens) : first;
  with_width(in.filter.width, [&]<int kWidth>() {
    FilterSums<kWidth, kChannels> sums;
    Filter<kWidth, kChannels> filter;
    if (first < last) {
      filter.load(in.filter, channel);
    }
    for (int token = first; token < last;) {
      const Span span = in.sequences.of_token(token);
      const int end = span.end < last ? span.end : last;
      if (span.n != kNoSequence) {
        convolve_backward<T>(in, gradients, filter, span, token, end, channel, dx, sums);
        token = end;
      }
      for (; token < end; ++token) {
        Piece<T, kChannels>{}.store(dx + static_cast<int64_t>(token) * in.D + channel);
      }
    }
    store_sums(sums, tile, in.D, shared, partial);
  });
}

template <typename T, int kChannels>
__device__ __forceinline__ void causal_conv1d_backward(const ConvInputs& in, const ConvGradients& gradients,
                                                       const ConvTile& tile, void* dx, float* shared, float* partial) {
  if (tile.in_pieces) {
    convolve_tile_backward<T, kChannels>(in, gradients, tile, static_cast<T*>(dx), shared, partial);
  } else {
    convolve_tile_backward<T, 1>(in, gradients, tile, static_cast<T*>(dx), shared, partial);
  }
}

}  // namespace flash_qla::device
