#include "cpu/chunk.h"

#include "cpu/step.h"

// One binary serves every x86-64 machine: the dynamic loader picks the widest version that the processor has. The loops
// below are written for the compiler's vectorizer (constant trip counts, sums over lanes in halves). The versions have
// feature names because GCC 11 refuses "arch=x86-64-v3" here. "fma" includes AVX.
#if defined(__x86_64__)
#define FLASH_QLA_CPU_CLONES __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define FLASH_QLA_CPU_CLONES
#endif

namespace flash_qla::cpu {

namespace {

// The sum of the lanes; overwrites them.
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
  for (int64_t t = 0; t < block.chunk.tokens; ++t) {
    CT o[kV];
    step<CT>(block.chunk, t, block.v + t * kV, block.state, block.state, nullptr, o);
    for (int64_t j = 0; j < kV; ++j) {
      block.o[t * kV + j] = block.scale * o[j];
    }
  }
}

template <typename CT>
[[gnu::always_inline]] inline void replay_tokens(const ReplayBlock<CT>& block) {
  constexpr int64_t kV = kBlockV<CT>;
  const int64_t size = block.chunk.padded_k * kV;
  for (int64_t t = 0; t < block.chunk.tokens; ++t) {
    const CT* S = block.states + t * size;
    step<CT>(block.chunk, t, block.v + t * kV, S, block.states + (t + 1) * size, block.error + t * kV, nullptr);
  }
}

// The formulas of reverse in chunk.h. `all` is null for dS' alone.
template <typename CT>
[[gnu::always_inline]] inline void reverse_tokens(const GradientBlock<CT>& block, const ReverseBlock<CT>* all) {
  constexpr int64_t kV = kBlockV<CT>;
  const PackedChunk<CT>& chunk = block.chunk;
  for (int64_t t = chunk.tokens - 1; t >= 0; --t) {
    const CT* q = chunk.q + t * chunk.padded_k;
    const CT* k = chunk.k + t * chunk.padded_k;
    const CT* grad_o = block.grad_o + t * kV;
    const CT* error = all ? all->error + t * kV : nullptr;
    const CT* S = all ? all->states + t * chunk.padded_k * kV : nullptr;
    const CT* S_after = all ? S + chunk.padded_k * kV : nullptr;
    const CT decay = chunk.decay[t], beta = chunk.beta[t];

    CT dv_new[kV] = {};
    for (int64_t row = 0; row < chunk.padded_k; ++row) {
      CT* dS = block.grad_state + row * kV;
      CT lanes[kV];
      for (int64_t j = 0; j < kV; ++j) {
        dS[j] += q[row] * grad_o[j];
        dv_new[j] += k[row] * dS[j];
        if (all) {
          lanes[j] = S_after[row * kV + j] * grad_o[j];
        }
      }
      if (all) {
        all->dq[t * chunk.padded_k + row] += sum_of<CT>(lanes);
      }
    }

    CT v_new[kV], dv[kV], db[kV], dg[kV] = {};
    for (int64_t j = 0; j < kV; ++j) {
      dv[j] = beta * dv_new[j];
      if (all) {
        v_new[j] = beta * error[j];
        db[j] = dv_new[j] * error[j];
        all->dv[t * kV + j] = dv[j];
      }
    }
    for (int64_t row = 0; row < chunk.padded_k; ++row) {
      CT* dS = block.grad_state + row * kV;
      CT lanes[kV];
      for (int64_t j = 0; j < kV; ++j) {
        const CT before = decay * (dS[j] - k[row] * dv[j]);
        if (all) {
          const CT s = S[row * kV + j];
          lanes[j] = dS[j] * v_new[j] - decay * s * dv[j];
          dg[j] += s * before;
        }
        dS[j] = before;
      }
      if (all) {
        all->dk[t * chunk.padded_k + row] += sum_of<CT>(lanes);
      }
    }
    if (all) {
      all->db[t] += sum_of<CT>(db);
      all->dg[t] += sum_of<CT>(dg);
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

FLASH_QLA_CPU_CLONES void reverse(const ReverseBlock<float>& block) { reverse_tokens(block.gradient, &block); }
FLASH_QLA_CPU_CLONES void reverse(const ReverseBlock<double>& block) { reverse_tokens(block.gradient, &block); }

FLASH_QLA_CPU_CLONES void reverse_gradient(const GradientBlock<float>& block) { reverse_tokens<float>(block, nullptr); }
FLASH_QLA_CPU_CLONES void reverse_gradient(const GradientBlock<double>& block) {
  reverse_tokens<double>(block, nullptr);
}

FLASH_QLA_CPU_CLONES void chunk_inverse(int64_t tokens, int64_t padded_k, const float* k, const float* k_transposed,
                                        const float* beta, float* A) {
  invert_chunk(tokens, padded_k, k, k_transposed, beta, A);
}
FLASH_QLA_CPU_CLONES void chunk_inverse(int64_t tokens, int64_t padded_k, const double* k, const double* k_transposed,
                                        const double* beta, double* A) {
  invert_chunk(tokens, padded_k, k, k_transposed, beta, A);
}

}  // namespace flash_qla::cpu
