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

// Windows after every so many tokens: 0 for none. Their slots are entries of a table [N, columns] or, without a table,
// the checkpoints' numbers in the order of the sequences.
struct WindowCheckpoints {
  Window to;
  Table indices;
  int64_t slots;
  int every;

  __device__ __forceinline__ WindowCheckpoints(const Window& to, const Table& indices, int64_t slots, int every)
      : to(to), indices(indices), slots(slots), every(every) {}

  // The number of checkpoints of the sequences before n. A whole warp calls it.
  __device__ __forceinline__ int64_t count_before(const ConvSequences& sequences, int n) const {
    if (!sequences.offsets) {
      return static_cast<int64_t>(n) * (sequences.length / every);
    }
    int count = 0;
    for (int i = threadIdx.x & 31; i < n; i += 32) {
      count += sequences.of_sequence(i).length() / every;
    }
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      count += __shfl_xor_sync(~0u, count, bit);
    }
    return count;
  }
  // The slot of checkpoint i of sequence n, or kNoState.
  __device__ __forceinline__ int64_t slot(int n, int i, int64_t before, int64_t null_index) const {
    if (!indices) {
      return checked_slot(before + i, -1, slots);
    }
    return i < indices.columns ? checked_slot(indices(n, i), null_index, slots) : kNoState;
  }
};

// The part of a thread: a channel of sequence n, and of its checkpoints those whose numbers leave `share` when divided
// by `shares`.
struct WindowShare {
  int n, channel, share, shares;
};

// Stores a channel's window after so many tokens of a sequence, which starts from the window `initial`.
__device__ __forceinline__ void store_window(const ConvInputs& in, int x_dtype, const Span& span, int channel,
                                             const float (&initial)[kMostConvWidth], int tokens, const Window& to,
                                             int64_t slot) {
  const int columns = in.windows.columns;
  float window[kMostConvWidth];
#pragma unroll
  for (int i = 0; i < kMostConvWidth; ++i) {
    window[i] = i < columns ? row_of_sequence(in, x_dtype, span, kNoState, channel, tokens - columns + i) : 0.f;
#pragma unroll
    for (int j = 0; j < kMostConvWidth; ++j) {
      window[i] = j < columns && j == tokens + i ? initial[j] : window[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kMostConvWidth; ++i) {
    if (i < columns) {
      store_number(const_cast<void*>(to.data), to.dtype, to.at(slot, channel, i), window[i]);
    }
  }
}

// The final window of a sequence, perhaps `in_place` of the initial one: if there are no tokens, that stays as it is.
// And its checkpoints.
__device__ __forceinline__ void store_windows(ConvInputs in, int x_dtype, const Window& last, bool in_place,
                                              WindowCheckpoints checkpoints, const WindowShare& of) {
  if (in_place) {  // the compiler takes different arguments for different memory
    in.windows.initial.data = last.data;
    checkpoints.to.data = checkpoints.indices ? last.data : checkpoints.to.data;
  }
  const Span span = in.sequences.of_sequence(of.n);
  const int slot = in.windows.slots(of.n), from = in.windows.initial_slot(of.n);
  const int count = checkpoints.every > 0 ? span.length() / checkpoints.every : 0;
  const int64_t before = count > 0 && !checkpoints.indices ? checkpoints.count_before(in.sequences, of.n) : 0;
  if (of.channel >= in.D || slot == kNoState) {
    return;
  }
  const int columns = in.windows.columns;
  float initial[kMostConvWidth];
#pragma unroll
  for (int i = 0; i < kMostConvWidth; ++i) {
    initial[i] = i < columns ? row_of_sequence(in, x_dtype, span, from, of.channel, i - columns) : 0.f;
  }
  const auto store = [&](int tokens, const Window& to, int64_t to_slot) {
    store_window(in, x_dtype, span, of.channel, initial, tokens, to, to_slot);
  };
  for (int i = of.share; i < count; i += of.shares) {
    const int64_t kept_slot = checkpoints.slot(of.n, i, before, in.windows.slots.null_index);
    if (kept_slot != kNoState) {
      store((i + 1) * checkpoints.every, checkpoints.to, kept_slot);
    }
  }
  if (of.share == 0 && !(in_place && span.length() == 0 && from != kNoState)) {
    store(span.length(), last, slot);
  }
}

}  // namespace flash_qla::device
