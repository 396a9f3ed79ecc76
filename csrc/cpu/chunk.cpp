#include "chunk.h"

// One binary serves every x86-64 machine: the dynamic loader picks the widest version the processor has. The loops
// below are written for the compiler's vectorizer (constant trip counts, no reductions over lanes). Feature names and
// not "arch=x86-64-v3": GCC 11 refuses that here. "fma" brings AVX with it.
#if defined(__x86_64__)
#define FLASH_QLA_CPU_CLONES __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define FLASH_QLA_CPU_CLONES
#endif

namespace flash_qla::cpu {

namespace {

template <typename CT>
[[gnu::always_inline]] inline void advance_tokens(const ValueBlock<CT>& block) {
  constexpr int64_t kV = kBlockV<CT>;
  for (int64_t t = 0; t < block.tokens; ++t) {
    const CT* k = block.k + t * block.padded_k;
    const CT* q = block.q + t * block.padded_k;
    const CT decay = block.decay[t];

    CT recalled[kV] = {};  // S^T k
    for (int64_t row = 0; row < block.padded_k; row += kRowsK) {
      const CT* S = block.state + row * kV;
      for (int64_t j = 0; j < kV; ++j) {
        recalled[j] +=
            (k[row] * S[j] + k[row + 1] * S[kV + j]) + (k[row + 2] * S[2 * kV + j] + k[row + 3] * S[3 * kV + j]);
      }
    }

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

FLASH_QLA_CPU_CLONES void chunk_inverse(int64_t tokens, int64_t padded_k, const float* k, const float* k_transposed,
                                        const float* beta, float* A) {
  invert_chunk(tokens, padded_k, k, k_transposed, beta, A);
}
FLASH_QLA_CPU_CLONES void chunk_inverse(int64_t tokens, int64_t padded_k, const double* k, const double* k_transposed,
                                        const double* beta, double* A) {
  invert_chunk(tokens, padded_k, k, k_transposed, beta, A);
}

}  // namespace flash_qla::cpu
