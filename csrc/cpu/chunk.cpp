#include "cpu/chunk.h"

// One binary serves every x86-64 machine: the dynamic loader picks the widest version the processor has. The loops
// below are written for the compiler's vectorizer (constant trip counts, sums over lanes in halves). Feature names and
// not "arch=x86-64-v3": GCC 11 refuses that here. "fma" brings AVX with it.
#if defined(__x86_64__)
#define FLASH_QLA_CPU_CLONES __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define FLASH_QLA_CPU_CLONES
#endif

namespace flash_qla::cpu {

namespace {

// recalled = S^T k.
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

// Overwrites the summands.
template <typename CT>
[[gnu::always_inline]] inline CT sum_of(CT (&x)[kBlockV<CT>]) {
#pragma GCC unroll 8
  for (int64_t half = kBlockV<CT> / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
    for (int64_t j = 0; j < half; ++j) {
      x[j] += x[half + j];
    }
  }
  return x[0];
}

template <typename CT>
[[gnu::always_inline]] inline void advance_tokens(const ValueBlock<CT>& block) {
  constexpr int64_t kV = kBlockV<CT>;
  for (int64_t t = 0; t < block.tokens; ++t) {
    const CT* k = block.k + t * block.padded_k;
    const CT* q = block.q + t * block.padded_k;
    const CT decay = block.decay[t];

    CT recalled[kV];
    recall(block.padded_k, block.state, k, recalled);

    CT v_new[kV];
    for (int64_t j = 0; j < kV; ++j) {
      v_new[j] = block.beta[t] * (block.v[t * kV + j] - decay * recalled[j]);
    }

    CT o[kV] = {};
    for (int64_t row = 0; row < block.padded_k; row += kRowsK) {
      CT* S = block.state + row * kV;
      for (int64_t j = 0; j < kV; ++j) {
        const CT s0 = decay * S[j] + k[row] * v_new[j];
        const CT s1 = decay * S[kV + j] + k[row + 1] * v_new[j];
        const CT s2 = decay * S[2 * kV + j] + k[row + 2] * v_new[j];
        const CT s3 = decay * S[3 * kV + j] + k[row + 3] * v_new[j];
        S[j] = s0;
        S[kV + j] = s1;
        S[2 * kV + j] = s2;
        S[3 * kV + j] = s3;
        o[j] += (q[row] * s0 + q[row + 1] * s1) + (q[row + 2] * s2 + q[row + 3] * s3);
      }
    }
    for (int64_t j = 0; j < kV; ++j) {
      block.o[t * kV + j] = block.scale * o[j];
    }
  }
}

template <typename CT>
[[gnu::always_inline]] inline void replay_tokens(const ReplayBlock<CT>& block) {
  constexpr int64_t kV = kBlockV<CT>;
  for (int64_t t = 0; t < block.tokens; ++t) {
    const CT* k = block.k + t * block.padded_k;
    const CT* S = block.states + t * block.padded_k * kV;
    CT* next = block.states + (t + 1) * block.padded_k * kV;
    const CT decay = block.decay[t];

    CT recalled[kV], v_new[kV];
    recall(block.padded_k, S, k, recalled);
    for (int64_t j = 0; j < kV; ++j) {
      const CT error = block.v[t * kV + j] - decay * recalled[j];
      block.error[t * kV + j] = error;
      v_new[j] = block.beta[t] * error;
    }
    for (int64_t row = 0; row < block.padded_k; ++row) {
      for (int64_t j = 0; j < kV; ++j) {
        next[row * kV + j] = decay * S[row * kV + j] + k[row] * v_new[j];
      }
    }
  }
}

template <typename CT>
[[gnu::always_inline]] inline void reverse_tokens(const ReverseBlock<CT>& block) {
  constexpr int64_t kV = kBlockV<CT>;
  for (int64_t t = block.tokens - 1; t >= 0; --t) {
    const CT* q = block.q + t * block.padded_k;
    const CT* k = block.k + t * block.padded_k;
    const CT* grad_o = block.grad_o + t * kV;
    const CT* error = block.error + t * kV;
    const CT* S = block.states + t * block.padded_k * kV;
    const CT* S_after = S + block.padded_k * kV;
    CT* dq = block.dq + t * block.padded_k;
    CT* dk = block.dk + t * block.padded_k;
    const CT decay = block.decay[t], beta = block.beta[t];

    CT dv_new[kV] = {};
    for (int64_t row = 0; row < block.padded_k; ++row) {
      CT* dS = block.grad_state + row * kV;
      CT lanes[kV];
      for (int64_t j = 0; j < kV; ++j) {
        dS[j] += q[row] * grad_o[j];
        dv_new[j] += k[row] * dS[j];
        lanes[j] = S_after[row * kV + j] * grad_o[j];
      }
      dq[row] += sum_of<CT>(lanes);
    }

    CT v_new[kV], dv[kV], db[kV], dg[kV] = {};
    for (int64_t j = 0; j < kV; ++j) {
      v_new[j] = beta * error[j];
      db[j] = dv_new[j] * error[j];
      dv[j] = beta * dv_new[j];
      block.dv[t * kV + j] = dv[j];
    }
    for (int64_t row = 0; row < block.padded_k; ++row) {
      CT* dS = block.grad_state + row * kV;
      CT lanes[kV];
      for (int64_t j = 0; j < kV; ++j) {
        const CT s = S[row * kV + j];
        const CT before = decay * (dS[j] - k[row] * dv[j]);
        lanes[j] = dS[j] * v_new[j] - decay * s * dv[j];
        dg[j] += s * before;
        dS[j] = before;
      }
      dk[row] += sum_of<CT>(lanes);
    }
    block.db[t] += sum_of<CT>(db);
    block.dg[t] += sum_of<CT>(dg);
  }
}

template <typename CT>
[[gnu::always_inline]] inline void reverse_gradient_tokens(const GradientBlock<CT>& block) {
  constexpr int64_t kV = kBlockV<CT>;
  for (int64_t t = block.tokens - 1; t >= 0; --t) {
    const CT* q = block.q + t * block.padded_k;
    const CT* k = block.k + t * block.padded_k;
    const CT* grad_o = block.grad_o + t * kV;
    const CT decay = block.decay[t];

    CT dv[kV] = {};
    for (int64_t row = 0; row < block.padded_k; ++row) {
      CT* dS = block.grad_state + row * kV;
      for (int64_t j = 0; j < kV; ++j) {
        dS[j] += q[row] * grad_o[j];
        dv[j] += k[row] * dS[j];
      }
    }
    for (int64_t j = 0; j < kV; ++j) {
      dv[j] *= block.beta[t];
    }
    for (int64_t row = 0; row < block.padded_k; ++row) {
      CT* dS = block.grad_state + row * kV;
      for (int64_t j = 0; j < kV; ++j) {
        dS[j] = decay * (dS[j] - k[row] * dv[j]);
      }
    }
  }
}

template <typename CT>
[[gnu::always_inline]] inline void invert_chunk(int64_t tokens, int64_t padded_k, const CT* k, const CT* k_transposed,
                                                const CT* beta, CT* A) {
  for (int64_t i = 0; i < tokens; ++i) {
    CT kk[kChunk] = {};  // row i of K K^T
    for (int64_t d = 0; d < padded_k; ++d) {
      for (int64_t j = 0; j < kChunk; ++j) {
        kk[j] += k[i * padded_k + d] * k_transposed[d * kChunk + j];
      }
    }
    CT row[kChunk] = {};
    for (int64_t m = 0; m < i; ++m) {
      const CT factor = beta[i] * kk[m];
      for (int64_t j = 0; j < kChunk; ++j) {
        row[j] -= factor * A[m * kChunk + j];
      }
    }
    row[i] = 1;
    for (int64_t j = 0; j < kChunk; ++j) {
      A[i * kChunk + j] = row[j];
    }
  }
}

}  // namespace

FLASH_QLA_CPU_CLONES void advance(const ValueBlock<float>& block) { advance_tokens(block); }
FLASH_QLA_CPU_CLONES void advance(const ValueBlock<double>& block) { advance_tokens(block); }

FLASH_QLA_CPU_CLONES void replay(const ReplayBlock<float>& block) { replay_tokens(block); }
FLASH_QLA_CPU_CLONES void replay(const ReplayBlock<double>& block) { replay_tokens(block); }

FLASH_QLA_CPU_CLONES void reverse(const ReverseBlock<float>& block) { reverse_tokens(block); }
FLASH_QLA_CPU_CLONES void reverse(const ReverseBlock<double>& block) { reverse_tokens(block); }

FLASH_QLA_CPU_CLONES void reverse_gradient(const GradientBlock<float>& block) { reverse_gradient_tokens(block); }
FLASH_QLA_CPU_CLONES void reverse_gradient(const GradientBlock<double>& block) { reverse_gradient_tokens(block); }

FLASH_QLA_CPU_CLONES void chunk_inverse(int64_t tokens, int64_t padded_k, const float* k, const float* k_transposed,
                                        const float* beta, float* A) {
  invert_chunk(tokens, padded_k, k, k_transposed, beta, A);
}
FLASH_QLA_CPU_CLONES void chunk_inverse(int64_t tokens, int64_t padded_k, const double* k, const double* k_transposed,
                                        const double* beta, double* A) {
  invert_chunk(tokens, padded_k, k, k_transposed, beta, A);
}

}  // namespace flash_qla::cpu
