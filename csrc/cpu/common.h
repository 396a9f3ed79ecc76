// The common parts of the recurrence on the CPU: sequences, scratch memory, and copies between tensors and packed
// scratch. T is a storage type (anything that converts to and from CT), CT the compute type.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>

#include "chunks.h"
#include "cpu/activations.h"
#include "cpu/chunk.h"

namespace flash_qla::cpu {

struct Sequence {
  int64_t index;        // n, the index of its state
  int64_t begin, end;   // rows of q, k, v, over the flattened batch
  int64_t first_chunk;  // index of its first chunk in h

  int64_t length() const { return end - begin; }
};

// The inputs of both directions and of decoding: pointers to contiguous tensors, shapes as in Call. T is the storage
// type of q, k, v and o.
template <typename T, typename CT>
struct Inputs {
  int64_t H_k, H_v, K, V;
  int64_t values;  // columns of v and of the gradient of o: V, or fewer; missing columns are zeros
  CT scale;
  bool use_qk_l2norm;
  const T *q, *k, *v;
  Activations<CT> gates;
  bool state_v_first = true;
  const CT* initial_state = nullptr;  // null: zero

  int64_t k_head(int64_t head) const { return head / (H_v / H_k); }
  // A head's state in states [N, H_v, K, V] or [N, H_v, V, K]; null if `states` is null.
  template <typename Data>
  Data* state_of(Data* states, int64_t n, int64_t head) const {
    return states ? states + (n * H_v + head) * K * V : nullptr;
  }
};

// An uninitialized buffer, aligned to a cache line.
template <typename CT>
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : data_(static_cast<CT*>(::operator new(size * sizeof(CT), std::align_val_t{kAlignment}))) {}
  ~Buffer() { ::operator delete(data_, std::align_val_t{kAlignment}); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  CT* data() const { return data_; }

 private:
  static constexpr size_t kAlignment = 64;
  CT* data_;
};

// Adds a token's gate to the sum of a chunk's gates. A token with e^g = 0 forgets all tokens before it. Its sum is
// -inf, and the next token starts a new sum: a large sum would lose the digits of later gates.
template <typename CT>
CT add_gate(CT sum, CT g) {
  constexpr CT kForgotten = -std::numeric_limits<CT>::infinity();
  return std::exp(g) == 0 ? kForgotten : (sum == kForgotten ? CT(0) : sum) + g;
}

// e^g of a token, from its sum and the sum before it.
template <typename CT>
CT decay_of(CT sum, CT before) {
  return std::exp(before == -std::numeric_limits<CT>::infinity() ? sum : sum - before);
}

// The packed dimensions: padded rows of the state for k, blocks of kBlockV columns for v.
template <typename CT>
struct PackedDims {
  PackedDims(int64_t K, int64_t V)
      : padded_k((K + kRowsK - 1) / kRowsK * kRowsK), blocks((V + kBlockV<CT> - 1) / kBlockV<CT>) {}

  int64_t padded_k, blocks;
  int64_t block_size() const { return padded_k * kBlockV<CT>; }
  int64_t state_size() const { return blocks * block_size(); }
};

// A thread's packed chunk: q, k, decay and beta of its tokens, and a block of value columns of v and of o or its
// gradient.
template <typename CT>
class ChunkScratch {
 public:
  ChunkScratch(int64_t K, int64_t V)
      : dims(K, V),
        q_(kChunk * dims.padded_k),
        k_(kChunk * dims.padded_k),
        v_(kChunk * kBlockV<CT>),
        o_(kChunk * kBlockV<CT>),
        decay_(kChunk),
        beta_(kChunk) {
    // The padding of K must be zero; no function writes there.
    std::fill_n(q(), kChunk * dims.padded_k, CT(0));
    std::fill_n(k(), kChunk * dims.padded_k, CT(0));
  }

  const PackedDims<CT> dims;
  CT* q() const { return q_.data(); }
  CT* k() const { return k_.data(); }
  CT* v() const { return v_.data(); }
  CT* o() const { return o_.data(); }
  CT* decay() const { return decay_.data(); }
  CT* beta() const { return beta_.data(); }
  PackedChunk<CT> chunk(int64_t tokens) const { return {tokens, dims.padded_k, q(), k(), decay(), beta()}; }

 private:
  Buffer<CT> q_, k_, v_, o_, decay_, beta_;
};

// row = x, or x / sqrt(|x|^2 + 1e-6) with the l2norm. Returns the factor.
template <typename T, typename CT>
CT load_row(const T* x, int64_t K, bool l2norm, CT* row) {
  for (int64_t d = 0; d < K; ++d) {
    row[d] = static_cast<CT>(x[d]);
  }
  if (!l2norm) {
    return 1;
  }
  CT squares = 0;
  for (int64_t d = 0; d < K; ++d) {
    squares += row[d] * row[d];
  }
  const CT factor = CT(1) / std::sqrt(squares + CT(kNormEps));
  for (int64_t d = 0; d < K; ++d) {
    row[d] *= factor;
  }
  return factor;
}

// Packs q, k, decay and beta of tokens [begin, begin + tokens) of a head; decay_of_row(i) is e^{g[i]}.
template <typename T, typename CT>
PackedChunk<CT> load_chunk(const Inputs<T, CT>& in, const HeadActivations<CT>& gates, int64_t head, int64_t begin,
                           int64_t tokens, const ChunkScratch<CT>& scratch, const auto& decay_of_row) {
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = begin + t, at = row * in.H_v + head, key = (row * in.H_k + in.k_head(head)) * in.K;
    load_row(in.q + key, in.K, in.use_qk_l2norm, scratch.q() + t * scratch.dims.padded_k);
    load_row(in.k + key, in.K, in.use_qk_l2norm, scratch.k() + t * scratch.dims.padded_k);
    scratch.decay()[t] = decay_of_row(at);
    scratch.beta()[t] = gates.beta(at);
  }
  return scratch.chunk(tokens);
}

// Copies columns [block * kBlockV, ...) of `tokens` rows of a [.., H, V] tensor to packed [tokens, kBlockV], times
// `factor`, and back. x points to the first token's row of the head; `stride` is H * V. Columns from V on, perhaps the
// whole block, are packed as zeros.
template <typename T, typename CT>
void pack_values(const T* x, int64_t stride, int64_t V, int64_t block, int64_t tokens, CT factor, CT* packed) {
  const int64_t columns = std::clamp<int64_t>(V - block * kBlockV<CT>, 0, kBlockV<CT>);
  for (int64_t t = 0; t < tokens; ++t) {
    const T* row = x + t * stride + block * kBlockV<CT>;
    for (int64_t j = 0; j < columns; ++j) {
      packed[t * kBlockV<CT> + j] = factor * static_cast<CT>(row[j]);
    }
    std::fill(packed + t * kBlockV<CT> + columns, packed + (t + 1) * kBlockV<CT>, CT(0));
  }
}

template <typename T, typename CT>
void unpack_values(const CT* packed, int64_t stride, int64_t V, int64_t block, int64_t tokens, T* x) {
  const int64_t columns = std::min(kBlockV<CT>, V - block * kBlockV<CT>);
  for (int64_t t = 0; t < tokens; ++t) {
    T* row = x + t * stride + block * kBlockV<CT>;
    for (int64_t j = 0; j < columns; ++j) {
      row[j] = static_cast<T>(packed[t * kBlockV<CT> + j]);
    }
  }
}

// Calls f(k, v, element) for each element of a K x V state, packed as [blocks, padded_k, kBlockV].
template <typename CT, typename F>
void for_state(const PackedDims<CT>& dims, CT* state, int64_t K, int64_t V, const F& f) {
  for (int64_t v = 0; v < V; ++v) {
    CT* column = state + v / kBlockV<CT> * dims.block_size() + v % kBlockV<CT>;
    for (int64_t k = 0; k < K; ++k) {
      f(k, v, column[k * kBlockV<CT>]);
    }
  }
}

// Copies between a [K, V] (or [V, K], v_first) matrix and a packed state. A null matrix is zero.
template <typename CT>
void load_state(const PackedDims<CT>& dims, const CT* matrix, int64_t K, int64_t V, bool v_first, CT* state) {
  std::fill_n(state, dims.state_size(), CT(0));
  if (matrix) {
    for_state(dims, state, K, V, [&](int64_t k, int64_t v, CT& s) { s = matrix[v_first ? v * K + k : k * V + v]; });
  }
}

template <typename T, typename CT>
void store_state(const PackedDims<CT>& dims, CT* state, int64_t K, int64_t V, bool v_first, T* matrix) {
  for_state(dims, state, K, V,
            [&](int64_t k, int64_t v, CT s) { matrix[v_first ? v * K + k : k * V + v] = static_cast<T>(s); });
}

// Copies between a state of a pool, from element `at` on, and a packed state.
template <typename CT>
void load_pool_state(const PackedDims<CT>& dims, const WritableFloats& pool, int64_t at, int64_t K, int64_t V,
                     bool v_first, CT* state) {
  std::fill_n(state, dims.state_size(), CT(0));
  for_state(dims, state, K, V,
            [&](int64_t k, int64_t v, CT& s) { s = pool.get<CT>(at + (v_first ? v * K + k : k * V + v)); });
}

template <typename CT>
void store_pool_state(const PackedDims<CT>& dims, CT* state, int64_t K, int64_t V, bool v_first,
                      const WritableFloats& pool, int64_t at) {
  for_state(dims, state, K, V,
            [&](int64_t k, int64_t v, CT s) { pool.set(at + (v_first ? v * K + k : k * V + v), s); });
}

}  // namespace flash_qla::cpu
