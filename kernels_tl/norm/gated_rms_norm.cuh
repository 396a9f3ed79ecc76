// The gated RMS norm of a CTA's rows; see gated_rms_norm.py.
#pragma once

#include "norm/norm_rows.cuh"

namespace flash_qla::device {

struct NormInputs {
  const void *o, *z, *weight;
  NormStrides of_o, of_z;
  int dtype, weight_dtype;
};

template <typename T, bool kNormBeforeGate, int kChannels, bool kVectors, int kInFlight>
__device__ __forceinline__ void normalize_rows(const NormInputs& in, void* y, const NormRows& rows,
                                               const GatedNorm& norm, unsigned cta) {
  using Row = Channels<T, kChannels, kVectors>;
  const float per_channel = 1.f / rows.V;
  float w[kChannels];
  load_weight<Row>(w, rows, in.weight, in.weight_dtype);
  RowWalk walk(rows, cta);
  while (walk.any_left()) {
    Row o[kInFlight], z[kInFlight];
    unsigned row[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      row[i] = walk.row();
      o[i].load(rows, in.o, walk.offset(in.of_o), walk.is_row());
      z[i].load(rows, in.z, walk.offset(in.of_z), walk.is_row());
      walk.advance();
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      float x[kChannels], after[kChannels], squares = 0.f;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float gate = norm(z[i][c], GatedNorm::power(z[i][c]));
        x[c] = kNormBeforeGate ? o[i][c] : o[i][c] * gate;
        after[c] = kNormBeforeGate ? w[c] * gate : w[c];
        squares += x[c] * x[c];
      }
      sum_over_row(rows, squares);
      const float rstd = norm.rstd(squares, per_channel);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        x[c] *= rstd * after[c];
      }
      Row::store(rows, y, int64_t{row[i]} * rows.V, row[i] < rows.count, x);
    }
  }
}

template <typename Number, int kChannels, bool kVectors, int kInFlight>
__device__ __forceinline__ void gated_rms_norm(const NormInputs& in, void* y, const NormRows& rows,
                                               const GatedNorm& norm, int cta) {
  with_variant<Number>(in.dtype, norm.norm_before_gate, [&]<typename T, typename Before>(T, Before) {
    normalize_rows<T, Before::value, kChannels, kVectors, kInFlight>(in, y, rows, norm, cta);
  });
}

}  // namespace flash_qla::device
