// The forward of the causal depthwise convolution; see convolution/causal_conv1d.py.
#pragma once

#include "convolution/convolution.cuh"

namespace flash_qla::device {

// Tokens [begin, end) of a sequence, kChannels channels from `channel` on.
template <typename T, int kWidth, int kChannels>
__device__ __forceinline__ void convolve(const ConvInputs& in, const Filter<kWidth, kChannels>& filter,
                                         const Span& span, int begin, int end, int channel, T* y) {
  constexpr int kRows = 16 / sizeof(T);
  RowsAhead<T, kChannels, kRows> rows(in.x.at<T>(in.sequences, span, begin) + channel, in.x.row, end - begin);
  RecentRows<kWidth, kChannels> before;
  before.template load<T>(in, span, begin, channel);
  y += static_cast<int64_t>(begin) * in.D + channel;
  const auto step = [&]<bool kWhole>(int first) {  // kWhole: all rows are tokens of the tile
#pragma unroll
    for (int i = 0; i < kRows; ++i, y += in.D) {
      float x[kChannels], out[kChannels];
      rows.take(i, x);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        out[c] = filter.apply(before, x, c);
      }
      if (in.use_silu) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          out[c] = silu(out[c]);
        }
      }
      if (kWhole || first + i < end) {
        Piece<T, kChannels>::of(out).store(y);
      }
      before.push(x);
    }
  };
  int first = begin;
  for (; first <= end - kRows; first += kRows) {
    step.template operator()<true>(first);
  }
  if (first < end) {
    step.template operator()<false>(first);
  }
}

template <typename T, int kChannels>
__device__ __forceinline__ void convolve_tile(const ConvInputs& in, const ConvTile& tile, T* y) {
  const int channel = tile.first_channel<kChannels>() + threadIdx.x % 32 * kChannels;
  const int first = tile.first_token(in.sequences.tokens), last = tile.last_token(first, in.sequences.tokens);
  if (channel >= in.D || first >= last) {
    return;
  }
  with_width(in.filter.width, [&]<int kWidth>() {
    Filter<kWidth, kChannels> filter;
    filter.load(in.filter, channel);
    for (int token = first; token < last;) {
      const Span span = in.sequences.of_token(token);
      const int end = span.end < last ? span.end : last;
      if (span.n != kNoSequence) {
        convolve<T>(in, filter, span, token, end, channel, y);
        token = end;
      }
      for (; token < end; ++token) {
        Piece<T, kChannels>{}.store(y + static_cast<int64_t>(token) * in.D + channel);
      }
    }
  });
}

template <typename T, int kChannels>
__device__ __forceinline__ void causal_conv1d(const ConvInputs& in, const ConvTile& tile, void* y) {
  if (tile.in_pieces) {
    convolve_tile<T, kChannels>(in, tile, static_cast<T*>(y));
  } else {
    convolve_tile<T, 1>(in, tile, static_cast<T*>(y));
  }
}

}  // namespace flash_qla::device
