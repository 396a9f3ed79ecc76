// The step of the recurrence on the CPU. The forward, the backward's replay and decoding call it. chunk.cpp inlines it
// into a version for each x86-64 level.
#pragma once

#include <cstdint>

#include "cpu/chunk.h"

namespace flash_qla::cpu {

// recalled = S^T k, for a block of value columns.
template <typename CT>
[[gnu::always_inline]] inline void recall(int64_t padded_k, const CT* state, const CT* k, CT* recalled) {
  constexpr int64_t kV = kBlockV<CT>;
  CT sum[kV] = {};
  for (int64_t row = 0; row < padded_k; row += kRowsK) {
    const CT* S = state + row * kV;
    for (int64_t j = 0; j < kV; ++j) {
      sum[j] += (k[row] * S[j] + k[row + 1] * S[kV + j]) + (k[row + 2] * S[2 * kV + j] + k[row + 3] * S[3 * kV + j]);
    }
  }
  for (int64_t j = 0; j < kV; ++j) {
    recalled[j] = sum[j];
  }
}

//     error = v - a S^T k        S' = a S + beta k error^T        o = S'^T q
//
// Token t of a chunk, for a block of value columns, with a = e^g. S' [padded_k, kBlockV] may be S itself. v, error and
// o [kBlockV]; error and o may be null.
template <typename CT>
[[gnu::always_inline]] inline void step(const PackedChunk<CT>& chunk, int64_t t, const CT* v, const CT* S, CT* S_after,
                                        CT* error, CT* o) {
  constexpr int64_t kV = kBlockV<CT>;
  const CT* k = chunk.k + t * chunk.padded_k;
  const CT* q = chunk.q + t * chunk.padded_k;
  const CT decay = chunk.decay[t];

  CT recalled[kV], v_new[kV], sum[kV] = {};
  recall(chunk.padded_k, S, k, recalled);
  for (int64_t j = 0; j < kV; ++j) {
    const CT e = v[j] - decay * recalled[j];
    v_new[j] = chunk.beta[t] * e;
    if (error) {
      error[j] = e;
    }
  }

  for (int64_t row = 0; row < chunk.padded_k; row += kRowsK) {
    const CT* before = S + row * kV;
    CT* after = S_after + row * kV;
    for (int64_t j = 0; j < kV; ++j) {
      const CT s0 = decay * before[j] + k[row] * v_new[j];
      const CT s1 = decay * before[kV + j] + k[row + 1] * v_new[j];
      const CT s2 = decay * before[2 * kV + j] + k[row + 2] * v_new[j];
      const CT s3 = decay * before[3 * kV + j] + k[row + 3] * v_new[j];
      after[j] = s0;
      after[kV + j] = s1;
      after[2 * kV + j] = s2;
      after[3 * kV + j] = s3;
      if (o) {
        sum[j] += (q[row] * s0 + q[row + 1] * s1) + (q[row + 2] * s2 + q[row + 3] * s3);
      }
    }
  }
  for (int64_t j = 0; o && j < kV; ++j) {
    o[j] = sum[j];
  }
}

}  // namespace flash_qla::cpu
