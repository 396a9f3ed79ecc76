// Rows of the gated norm: which of them a thread has, its channels of each, and the gate.
#pragma once

#include "core/activations.cuh"

namespace flash_qla::device {

// Strides of a tensor [batch, tokens, heads, V], in elements. The last one is 1.
struct NormStrides {
  int64_t batch, token, head;
};

// The rows of a launch, [batch, tokens, heads], and how they are shared out: `lanes` neighbouring threads, a power of
// two up to 32, have a row of V channels.
struct NormRows {
  unsigned count, tokens, heads, ctas;
  int V, lanes;

  // Rows that a CTA has at a time.
  __device__ __forceinline__ unsigned of_cta() const { return blockDim.x / lanes; }
};

// Goes through the rows of a thread, which are `step` apart: the grid takes consecutive rows at a time.
class RowWalk {
 public:
  __device__ __forceinline__ RowWalk(const NormRows& rows, unsigned cta)
      : rows_(rows), row_(cta * rows.of_cta() + threadIdx.x / rows.lanes), step_(rows.ctas * rows.of_cta()) {
    index_ = index_of(row_);
    step_index_ = index_of(step_);
  }

  __device__ __forceinline__ unsigned row() const { return row_; }
  __device__ __forceinline__ bool is_row() const { return row_ < rows_.count; }
  // Whether a row of any of the CTA's threads is left.
  __device__ __forceinline__ bool any_left() const { return row_ - threadIdx.x / rows_.lanes < rows_.count; }
  __device__ __forceinline__ int64_t offset(const NormStrides& x) const {
    return index_.batch * x.batch + index_.token * x.token + index_.head * x.head;
  }

  __device__ __forceinline__ void advance() {
    row_ += step_;
    index_.head += step_index_.head;
    const bool next_token = index_.head >= rows_.heads;
    index_.head -= next_token ? rows_.heads : 0;
    index_.token += step_index_.token + next_token;
    const bool next_batch = index_.token >= rows_.tokens;
    index_.token -= next_batch ? rows_.tokens : 0;
    index_.batch += step_index_.batch + next_batch;
  }

 private:
  struct RowIndex {
    unsigned batch, token, head;
  };
  __device__ __forceinline__ RowIndex index_of(unsigned row) const {
    const unsigned token = row / rows_.heads, batch = token / rows_.tokens;
    return {batch, token - batch * rows_.tokens, row - token * rows_.heads};
  }

  const NormRows& rows_;
  unsigned row_, step_;
  RowIndex index_, step_index_;
};

// The kChannels channels of a row that a thread has, in pieces of 16 bytes or of one element, lanes pieces apart.
// Channels from V on are zeros.
template <typename T, int kChannels, bool kVectors>
class Channels {
 public:
  static constexpr int kPiece = kVectors ? 16 / sizeof(T) : 1, kPieces = kChannels / kPiece;

  // The channel of the row that is the thread's channel i.
  static __device__ __forceinline__ int channel(const NormRows& rows, int i) {
    const int lane = threadIdx.x & (rows.lanes - 1);
    return (i / kPiece * rows.lanes + lane) * kPiece + i % kPiece;
  }

  __device__ __forceinline__ void load(const NormRows& rows, const void* tensor, int64_t offset, bool is_row) {
    const T* const row = static_cast<const T*>(tensor) + offset;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int first = channel(rows, p * kPiece);
      const bool there = is_row && first < rows.V;
      if constexpr (kVectors) {
        const uint4 piece = there ? *reinterpret_cast<const uint4*>(row + first) : uint4{};
        words_[4 * p] = piece.x;
        words_[4 * p + 1] = piece.y;
        words_[4 * p + 2] = piece.z;
        words_[4 * p + 3] = piece.w;
      } else {
        const uint32_t bits = there ? load_bits(row + first) : 0;
        words_[p / kOfWord] = p % kOfWord == 0 ? bits : words_[p / kOfWord] | bits << 16;
      }
    }
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words_[i]);
    } else {
      return element(T(), words_[i / 2], i % 2);
    }
  }

  static __device__ __forceinline__ void store(const NormRows& rows, void* tensor, int64_t offset, bool is_row,
                                               const float (&x)[kChannels]) {
    T* const row = static_cast<T*>(tensor) + offset;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int i = p * kPiece, first = channel(rows, i);
      if (is_row && first < rows.V) {
        if constexpr (!kVectors) {
          row[first] = from_float(T(), x[i]);
        } else if constexpr (sizeof(T) == 4) {
          *reinterpret_cast<float4*>(row + first) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
        } else {
          *reinterpret_cast<uint4*>(row + first) = {pack(T(), x[i], x[i + 1]), pack(T(), x[i + 2], x[i + 3]),
                                                    pack(T(), x[i + 4], x[i + 5]), pack(T(), x[i + 6], x[i + 7])};
        }
      }
    }
  }

 private:
  static constexpr int kOfWord = 4 / sizeof(T);
  uint32_t words_[kChannels / kOfWord];
};

// The thread's channels of the weight, of any floating dtype.
template <typename Row, int kChannels>
__device__ __forceinline__ void load_weight(float (&w)[kChannels], const NormRows& rows, const void* weight,
                                            int dtype) {
  with_dtype(dtype, 0, [&]<typename W>(W) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int channel = Row::channel(rows, i);
      w[i] = channel < rows.V ? to_float(static_cast<const W*>(weight)[channel]) : 0.f;
    }
  });
}

// The sums of numbers over the lanes of a row, in each of them. The whole warp calls it.
template <typename... Floats>
__device__ __forceinline__ void sum_over_row(const NormRows& rows, Floats&... x) {
  for (int bit = 1; bit < rows.lanes; bit *= 2) {
    ((x += __shfl_xor_sync(~0u, x, bit)), ...);
  }
}

// The gate act(z) = m s, s = sigmoid(z) = 1 / (1 + e), e = exp(-z), with m = z for SiLU and 1 for the sigmoid.
struct GatedNorm {
  float eps;
  int is_sigmoid, norm_before_gate;

  __device__ __forceinline__ float rstd(float squares, float per_channel) const {
    return rsqrtf(squares * per_channel + eps);
  }

  // e, limited so that 1 + e has a reciprocal.
  static __device__ __forceinline__ float power(float z) {
    constexpr float kMost = 125.f;
    const float x = -kLog2e * z;
    return exp2_fast(x > kMost ? kMost : x);  // NaN stays
  }
  static __device__ __forceinline__ float sigmoid_of(float e) { return __fdividef(1.f, 1.f + e); }
  __device__ __forceinline__ float factor(float z) const { return is_sigmoid ? 1.f : z; }  // m

  __device__ __forceinline__ float operator()(float z, float e) const { return factor(z) * sigmoid_of(e); }
  // act'(z) = s (m (1 - s) + m'), 1 - s = e s.
  __device__ __forceinline__ float slope(float z, float e) const {
    const float s = sigmoid_of(e);
    return s * (factor(z) * (e * s) + (is_sigmoid ? 0.f : 1.f));
  }
};

// Calls use(T(), kNormBeforeGate) with the format of the elements (see with_format) and the order as constants.
template <typename Number, typename Use>
__device__ __forceinline__ void with_variant(int dtype, int norm_before_gate, Use use) {
  with_format<Number>(dtype, [&](auto format) {
    if (norm_before_gate) {
      use(format, std::true_type());
    } else {
      use(format, std::false_type());
    }
  });
}

}  // namespace flash_qla::device
