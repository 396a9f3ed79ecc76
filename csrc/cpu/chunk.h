// The arithmetic of one chunk of one value head on the CPU, over packed scratch in the compute type CT (float or
// double). It is compiled for several x86-64 levels; the loader chooses one.
#pragma once

#include <cstdint>

#include "layout.h"

namespace flash_qla::cpu {

// Value columns that are advanced together. Columns of S do not depend on one another. A block's state has padded_k
// rows of 128 bytes, and stays in the L1 cache over all tokens of a chunk (16 KiB at K = 128).
template <typename CT>
inline constexpr int64_t kBlockV = 128 / sizeof(CT);

// Rows of the state that are read for each update of an accumulator. K is padded with zeros to a multiple of kRowsK.
inline constexpr int64_t kRowsK = 4;

// A chunk's tokens of one value head.
template <typename CT>
struct PackedChunk {
  int64_t tokens;
  int64_t padded_k;  // K, rounded up to a multiple of kRowsK
  const CT* q;       // [tokens, padded_k]
  const CT* k;       // [tokens, padded_k]
  const CT* decay;   // [tokens] e^g
  const CT* beta;    // [tokens]
};

template <typename CT>
struct ValueBlock {
  PackedChunk<CT> chunk;
  const CT* v;  // [tokens, kBlockV]
  CT scale;
  CT* state;  // [padded_k, kBlockV], in and out
  CT* o;      // [tokens, kBlockV], times scale
};

// Computes o and the state after the last token, token by token (step.h).
void advance(const ValueBlock<float>& block);
void advance(const ValueBlock<double>& block);

template <typename CT>
struct ReplayBlock {
  PackedChunk<CT> chunk;
  const CT* v;  // [tokens, kBlockV]
  CT* states;   // [tokens + 1, padded_k, kBlockV]: the first is read, the others are written
  CT* error;    // [tokens, kBlockV] v - a S^T k, written
};

// Computes the state after each token, with the bits of advance.
void replay(const ReplayBlock<float>& block);
void replay(const ReplayBlock<double>& block);

template <typename CT>
struct GradientBlock {
  PackedChunk<CT> chunk;
  const CT* grad_o;  // [tokens, kBlockV], times scale
  CT* grad_state;    // [padded_k, kBlockV], in and out
};

template <typename CT>
struct ReverseBlock {
  GradientBlock<CT> gradient;
  const CT* states;  // [tokens + 1, padded_k, kBlockV], from replay
  const CT* error;   // [tokens, kBlockV], from replay
  CT* dq;            // [tokens, padded_k], added to
  CT* dk;            // [tokens, padded_k], added to
  CT* dv;            // [tokens, kBlockV], written
  CT* db;            // [tokens], added to
  CT* dg;            // [tokens], added to
};

// Goes through the tokens in reverse. With S_t = a S_{t-1} + k v_new^T, v_new = beta e, e = v - a S_{t-1}^T k, and dS
// the gradient of S_t from the tokens after t:
//     dS <- dS + scale q do^T          dq = scale S_t do
//     dv_new = dS^T k                  db = dv_new . e          dv = beta dv_new
//     dS' = a (dS - k dv^T)            dk = dS v_new - a S_{t-1} dv
//     dg = <dS', S_{t-1}>
// dS' is the dS of t - 1.
void reverse(const ReverseBlock<float>& block);
void reverse(const ReverseBlock<double>& block);

// Computes dS' alone, which needs no states.
void reverse_gradient(const GradientBlock<float>& block);
void reverse_gradient(const GradientBlock<double>& block);

// A [tokens, kChunk] = (I + stril(diag(beta) K K^T))^-1, by forward substitution; columns from `tokens` on are zero.
// k is [tokens, padded_k], k_transposed [padded_k, kChunk] with zeros from column `tokens` on.
void chunk_inverse(int64_t tokens, int64_t padded_k, const float* k, const float* k_transposed, const float* beta,
                   float* A);
void chunk_inverse(int64_t tokens, int64_t padded_k, const double* k, const double* k_transposed, const double* beta,
                   double* A);

}  // namespace flash_qla::cpu
