// The arithmetic of one chunk of one value head on the CPU, over packed scratch in the compute type CT (float or
// double). Compiled for several x86-64 levels and chosen when the library is loaded.
#pragma once

#include <cstdint>

namespace flash_qla::cpu {

// Tokens per chunk.
inline constexpr int64_t kChunk = 64;

// Value columns advanced together. The columns of the state do not depend on one another, so a block's state, K rows
// of 128 bytes, stays in the L1 cache over all tokens of a chunk (16 KiB at K = 128 in float).
template <typename CT>
inline constexpr int64_t kBlockV = 128 / sizeof(CT);

// Rows of K are padded with zeros to a multiple of this: that many rows of the state are read for each update of an
// accumulator.
inline constexpr int64_t kRowsK = 4;

template <typename CT>
struct ValueBlock {
  int64_t tokens;
  int64_t padded_k;  // K, rounded up to a multiple of kRowsK
  const CT* q;       // [tokens, padded_k]
  const CT* k;       // [tokens, padded_k]
  const CT* v;       // [tokens, kBlockV]
  const CT* decay;   // [tokens] e^g
  const CT* beta;    // [tokens]
  CT scale;
  CT* state;  // [padded_k, kBlockV], in and out
  CT* o;      // [tokens, kBlockV]
};

// Token by token: S <- a S + beta k (v - a S^T k)^T, o = scale * S^T q, with a = e^g.
void advance(const ValueBlock<float>& block);
void advance(const ValueBlock<double>& block);

// A [tokens, kChunk] = (I + stril(diag(beta) K K^T))^-1, by forward substitution; columns from `tokens` on are zero.
// k is [tokens, padded_k], k_transposed [padded_k, kChunk] with zeros from column `tokens` on.
void chunk_inverse(int64_t tokens, int64_t padded_k, const float* k, const float* k_transposed, const float* beta,
                   float* A);
void chunk_inverse(int64_t tokens, int64_t padded_k, const double* k, const double* k_transposed, const double* beta,
                   double* A);

}  // namespace flash_qla::cpu
