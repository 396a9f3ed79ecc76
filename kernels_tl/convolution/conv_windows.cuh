// The windows after the last tokens of sequences; see convolution/conv_windows.py.
#pragma once

#include "convolution/convolution.cuh"

namespace flash_qla::device {

// A number of the channel, of row `row` of a sequence as counted from its first token: of x, or before that of the
// window in the slot; kNoState: zero.
__device__ __forceinline__ float row_of_sequence(const ConvInputs& in, int x_dtype, const Span& span, int slot,
                                                 int channel, int row) {
  float x = 0.f;
  if (row >= 0) {
    with_dtype(x_dtype, 0,
               [&]<typename T>(T) { x = to_float(in.x.at<T>(in.sequences, span, span.begin + row)[channel]); });
  } else if (slot != kNoState) {
    x = in.windows.initial.load(slot, channel, in.windows.columns + row);
  }
  return x;
}

// The final window of sequence n, perhaps `in_place` of the initial one: if there are no tokens, that stays as it is.
__device__ __forceinline__ void store_window(ConvInputs in, int x_dtype, const Window& last, bool in_place, int n,
                                             int channel) {
  if (in_place) {
    in.windows.initial.numbers = last.numbers;  // the compiler takes different arguments for different memory
  }
  const Span span = in.sequences.of_sequence(n);
  const int slot = in.windows.slots(n), from = in.windows.initial_slot(n), columns = in.windows.columns;
  if (channel >= in.D || slot == kNoState || (in_place && span.length() == 0 && from != kNoState)) {
    return;
  }
  float window[kMostConvWidth];
#pragma unroll
  for (int i = 0; i < kMostConvWidth; ++i) {
    window[i] = i < columns ? row_of_sequence(in, x_dtype, span, from, channel, span.length() - columns + i) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kMostConvWidth; ++i) {
    if (i < columns) {
      store_number(const_cast<void*>(last.numbers), last.dtype, last.at(slot, channel, i), window[i]);
    }
  }
}

}  // namespace flash_qla::device
