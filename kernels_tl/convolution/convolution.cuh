// The causal depthwise convolution: sequences, rows, windows and filters, which its kernels share. The formulas are in
// convolution/causal_conv1d.py and causal_conv1d_backward.py.
#pragma once

#include "core/activations.cuh"
#include "core/slots.cuh"
#include "core/warp.cuh"

namespace flash_qla::device {

constexpr int kNoSequence = -1;
constexpr int kConvWarps = 4;  // per CTA, each on tokens of its own
constexpr int kMostConvWidth = 4;

__device__ __forceinline__ float load_number(const void* data, int dtype, int64_t i) {
  float x;
  with_dtype(dtype, 0, [&]<typename T>(T) { x = to_float(static_cast<const T*>(data)[i]); });
  return x;
}
__device__ __forceinline__ void store_number(void* data, int dtype, int64_t i, float x) {
  with_dtype(dtype, 0, [&]<typename T>(T type) { static_cast<T*>(data)[i] = from_float(type, x); });
}

// Tokens [begin, end) of sequence n; of kNoSequence: padding.
struct Span {
  int n, begin, end;

  __device__ __forceinline__ int length() const { return end - begin; }
};

// The sequences of a call: cu_seqlens or, without the table, `length` tokens each. Offsets may have any value; a span
// never leaves the tokens.
struct ConvSequences {
  Table offsets;
  int N, length, tokens;

  __device__ __forceinline__ ConvSequences(const Table& offsets, int N, int length, int tokens)
      : offsets(offsets), N(N), length(length), tokens(tokens) {}

  __device__ __forceinline__ int within(int64_t token, int least) const {
    return static_cast<int>(token < least ? least : token > tokens ? tokens : token);
  }

  // The span that has a token. It ends after the token, so that a walk from span to span ends.
  __device__ __forceinline__ Span of_token(int token) const {
    if (!offsets) {
      const int n = token / length;
      return {n, n * length, n * length + length};
    }
    // offsets[low] <= token < offsets[high]; before the first offset is -infinity, after the last one infinity.
    int low = -1, high = N + 1;
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (offsets(middle) <= token ? low : high) = middle;
    }
    const int end = high > N ? tokens : within(offsets(high), token + 1);
    return low < 0 || low == N ? Span{kNoSequence, token, end} : Span{low, within(offsets(low), 0), end};
  }

  __device__ __forceinline__ Span of_sequence(int n) const {
    if (!offsets) {
      return {n, n * length, n * length + length};
    }
    const int begin = within(offsets(n), 0);
    return {n, begin, within(offsets(n + 1), begin)};
  }
};

// Rows of channels, one per token: [B, T, D], batch and token with any strides.
struct ConvRows {
  const void* data;
  int64_t batch, row;

  // A token's row. Packed sequences are one batch.
  template <typename T>
  __device__ __forceinline__ const T* at(const ConvSequences& sequences, const Span& span, int token) const {
    return static_cast<const T*>(data) +
           (sequences.offsets ? token * row : span.n * batch + (token - span.begin) * row);
  }
};

// Numbers [slots, D, columns] of any strides, in a Dtype.
struct Window {
  const void* data;
  int dtype;
  int64_t slot, channel, column;

  __device__ __forceinline__ int64_t at(int64_t of_slot, int of_channel, int of_column) const {
    return of_slot * slot + of_channel * channel + of_column * column;
  }
  __device__ __forceinline__ float load(int64_t of_slot, int of_channel, int of_column) const {
    return load_number(data, dtype, at(of_slot, of_channel, of_column));
  }
};

// The windows that sequences start from: the last `columns` rows before each one.
struct Windows {
  Window initial;
  int columns, first_states;
  const void* has_state;
  int64_t has_state_stride;
  Slots slots;
  Table first_indices;

  __device__ __forceinline__ Windows(const Window& initial, int columns, int first_states, const void* has_state,
                                     int64_t has_state_stride, const Slots& slots, const Table& first_indices)
      : initial(initial),
        columns(columns),
        first_states(first_states),
        has_state(has_state),
        has_state_stride(has_state_stride),
        slots(slots),
        first_indices(first_indices) {}

  // Whether a sequence starts from the window in its slot, rather than from zeros.
  __device__ __forceinline__ bool has_initial(int n) const {
    return first_states == FirstStates::kAll ||
           (first_states == FirstStates::kFlagged && static_cast<const bool*>(has_state)[n * has_state_stride]);
  }
  // That slot, or kNoState.
  __device__ __forceinline__ int initial_slot(int n) const {
    int slot = has_initial(n) ? slots(n) : kNoState;
    if (slot != kNoState && first_indices) {
      slot = static_cast<int>(checked_slot(first_indices(n), slots.null_index, slots.slots));
    }
    return slot;
  }
};

// weight [D, W] and bias [D], contiguous, each in its Dtype. Without a bias its address is null: D is never 0.
struct ConvFilter {
  const void *weight, *bias;
  int weight_dtype, bias_dtype, width;
};

struct ConvInputs {
  ConvSequences sequences;
  ConvRows x;
  Windows windows;
  ConvFilter filter;
  int D;
  bool use_silu;
};

// What a CTA does: `warp_tokens` tokens for each of its warps, and a part of the channels for each lane.
struct ConvTile {
  int cta, column_ctas, warp_tokens;
  bool in_pieces;  // whether a lane reads a whole piece of a row at once

  __device__ __forceinline__ int group() const { return cta / column_ctas; }  // of tokens
  __device__ __forceinline__ int first_token(int tokens) const {
    const int64_t first = (static_cast<int64_t>(group()) * kConvWarps + threadIdx.x / 32) * warp_tokens;
    return static_cast<int>(first < tokens ? first : tokens);
  }
  __device__ __forceinline__ int last_token(int first, int tokens) const {
    return tokens - first < warp_tokens ? tokens : first + warp_tokens;
  }
  template <int kChannels>
  __device__ __forceinline__ int first_channel() const {
    return (cta - group() * column_ctas) * 32 * kChannels;
  }
};

// Calls use.operator()<W>().
template <typename Use>
__device__ __forceinline__ void with_width(int width, Use use) {
  if (width == 4) [[likely]] {
    use.template operator()<4>();
  } else if (width == 3) {
    use.template operator()<3>();
  } else {
    use.template operator()<2>();
  }
}

template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using Word = uint4;
};
template <>
struct WordOf<8> {
  using Word = uint2;
};
template <>
struct WordOf<4> {
  using Word = uint32_t;
};
template <>
struct WordOf<2> {
  using Word = uint16_t;
};

// kChannels neighbouring channels of a row, as they are in memory.
template <typename T, int kChannels>
struct Piece {
  using Word = typename WordOf<kChannels * sizeof(T)>::Word;
  Word bits;

  __device__ __forceinline__ static Piece load(const T* from) { return {*reinterpret_cast<const Word*>(from)}; }
  __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<Word*>(to) = bits; }
  __device__ __forceinline__ void unpack_to(float (&x)[kChannels]) const {
    if constexpr (kChannels == 1) {
      x[0] = to_float(reinterpret_cast<const T&>(bits));
    } else if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        x[c] = __uint_as_float(reinterpret_cast<const uint32_t*>(&bits)[c]);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kChannels; c += 2) {
        const float2 pair = unpack(T(), reinterpret_cast<const uint32_t*>(&bits)[c / 2]);
        x[c] = pair.x;
        x[c + 1] = pair.y;
      }
    }
  }
  __device__ __forceinline__ static Piece of(const float (&x)[kChannels]) {
    Piece piece;
    if constexpr (kChannels == 1) {
      reinterpret_cast<T&>(piece.bits) = from_float(T(), x[0]);
    } else if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        reinterpret_cast<uint32_t*>(&piece.bits)[c] = __float_as_uint(x[c]);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kChannels; c += 2) {
        reinterpret_cast<uint32_t*>(&piece.bits)[c / 2] = pack(T(), x[c], x[c + 1]);
      }
    }
    return piece;
  }
};

// A lane's pieces of the next kRows rows before `end`, which it fetches ahead.
template <typename T, int kChannels, int kRows>
struct RowsAhead {
  const T* from;
  int64_t step;
  int left;  // rows that are not fetched yet
  Piece<T, kChannels> rows[kRows];

  __device__ __forceinline__ RowsAhead(const T* from, int64_t step, int count) : from(from), step(step), left(count) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows[i] = fetch();
    }
  }
  __device__ __forceinline__ Piece<T, kChannels> fetch() {
    const Piece<T, kChannels> row = left > 0 ? Piece<T, kChannels>::load(from) : Piece<T, kChannels>{};
    from += step;
    --left;
    return row;
  }
  // The next row, in place i of the ring; the row after the others takes its place. Zeros from `end` on.
  __device__ __forceinline__ void take(int i, float (&x)[kChannels]) {
    const Piece<T, kChannels> row = rows[i];
    rows[i] = fetch();
    row.unpack_to(x);
  }
};

// The kWidth - 1 rows before a token, the earliest first, in fp32.
template <int kWidth, int kChannels>
struct RecentRows {
  float rows[kWidth - 1][kChannels];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        rows[i][c] = 0.f;
      }
    }
  }
  __device__ __forceinline__ void push(const float (&x)[kChannels]) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
#pragma unroll
      for (int i = 0; i < kWidth - 2; ++i) {
        rows[i][c] = rows[i + 1][c];
      }
      rows[kWidth - 2][c] = x[c];
    }
  }

  // The rows before `token` of a sequence: tokens of x, and before its first one the window that it starts from.
  template <typename T>
  __device__ __forceinline__ void load(const ConvInputs& in, const Span& span, int token, int channel) {
    clear();
    const int before = token - (kWidth - 1);
    const int slot = before < span.begin ? in.windows.initial_slot(span.n) : kNoState;
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) {
      if (before + i >= span.begin) {
        Piece<T, kChannels>::load(in.x.at<T>(in.sequences, span, before + i) + channel).unpack_to(rows[i]);
      } else if (slot != kNoState) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          rows[i][c] = in.windows.initial.load(slot, channel + c, in.windows.columns + before + i - span.begin);
        }
      }
    }
  }
};

template <int kWidth, int kChannels>
struct Filter {
  float weight[kWidth][kChannels], bias[kChannels];

  __device__ __forceinline__ void load(const ConvFilter& from, int channel) {
    with_dtype(from.weight_dtype, 0, [&]<typename T>(T) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
#pragma unroll
        for (int w = 0; w < kWidth; ++w) {
          weight[w][c] = to_float(static_cast<const T*>(from.weight)[static_cast<int64_t>(channel + c) * kWidth + w]);
        }
      }
    });
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      bias[c] = from.bias == nullptr ? 0.f : load_number(from.bias, from.bias_dtype, channel + c);
    }
  }
  // bias + sum over w of weight[w] x[w]; x are the rows before and `now`. Always in this order.
  __device__ __forceinline__ float apply(const RecentRows<kWidth, kChannels>& before, const float (&now)[kChannels],
                                         int c) const {
    float sum = bias[c];
#pragma unroll
    for (int w = 0; w < kWidth - 1; ++w) {
      sum += weight[w][c] * before.rows[w][c];
    }
    return sum + weight[kWidth - 1][c] * now[c];
  }
};

__device__ __forceinline__ float fast_sigmoid(float x) { return __fdividef(1.f, 1.f + exp2_fast(-kLog2e * x)); }
__device__ __forceinline__ float silu(float x) { return x * fast_sigmoid(x); }
__device__ __forceinline__ float silu_slope(float x) {
  const float s = fast_sigmoid(x);
  return s + s * (x * (1.f - s));
}

}  // namespace flash_qla::device
