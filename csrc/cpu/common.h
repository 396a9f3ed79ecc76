// What the passes of the recurrence on the CPU share: where sequences lie, scratch memory, and copies between tensors
// and packed scratch. T is a storage type (anything that converts to and from CT), CT the compute type.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>

#include "chunks.h"
#include "cpu/chunk.h"

namespace flash_qla::cpu {

struct Sequence {
  int64_t index;        // n, into the states
  int64_t begin, end;   // rows of q, k, v, over the flattened batch
  int64_t first_chunk;  // into h
};

// Uninitialized, aligned to a cache line.
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

// The sum of a chunk's gates with that of one more token. A token with e^g = 0 forgets all before it: the sum is -inf
// there, for any such g, and starts anew behind it, or the digits of later gates would be lost in it.
template <typename CT>
CT add_gate(CT sum, CT g) {
  constexpr CT kForgotten = -std::numeric_limits<CT>::infinity();
  return std::exp(g) == 0 ? kForgotten : (sum == kForgotten ? CT(0) : sum) + g;
}

// e^g of a token again, from that sum and the one before it.
template <typename CT>
CT decay_of(CT sum, CT before) {
  return std::exp(before == -std::numeric_limits<CT>::infinity() ? sum : sum - before);
}

// K and V as they are packed: rows of the state for k, blocks of kBlockV columns for v.
template <typename CT>
struct PackedDims {
  PackedDims(int64_t K, int64_t V)
      : padded_k((K + kRowsK - 1) / kRowsK * kRowsK), blocks((V + kBlockV<CT> - 1) / kBlockV<CT>) {}

  int64_t padded_k, blocks;
  int64_t block_size() const { return padded_k * kBlockV<CT>; }
  int64_t state_size() const { return blocks * block_size(); }
};

// x to CT; with l2norm, x / sqrt(|x|^2 + 1e-6). Returns the factor that x was multiplied by.
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

// Columns [block * kBlockV, ...) of `tokens` rows of a [.., H, V] tensor to packed [tokens, kBlockV], times `factor`,
// and back. x points to the first token's row of the head; `stride` is H * V. Columns beyond V, perhaps all of the
// block, are packed as zeros.
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

// Calls f(k, v, element) for the whole K x V state, which is packed as [blocks, padded_k, kBlockV].
template <typename CT, typename F>
void for_state(const PackedDims<CT>& dims, CT* state, int64_t K, int64_t V, const F& f) {
  for (int64_t v = 0; v < V; ++v) {
    CT* column = state + v / kBlockV<CT> * dims.block_size() + v % kBlockV<CT>;
    for (int64_t k = 0; k < K; ++k) {
      f(k, v, column[k * kBlockV<CT>]);
    }
  }
}

// Copies between a [K, V] (or [V, K], v_first) matrix and a packed state. No matrix: zero.
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

}  // namespace flash_qla::cpu
