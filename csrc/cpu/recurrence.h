// The plain recurrence on the CPU, one sequence of one value head at a time. T is the storage type of q, k, v, o
// (anything that converts to and from CT), CT the compute type.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>

#include "chunk.h"

namespace flash_qla::cpu {

struct Sequence {
  int64_t index;        // n, into the states
  int64_t begin, end;   // rows of q, k, v, over the flattened batch
  int64_t first_chunk;  // into h
};

// Pointers to contiguous tensors, shapes as in ForwardArgs and ForwardOutputs. What may be null says so.
template <typename T, typename CT>
struct Forward {
  int64_t H_k, H_v, K, V;
  CT scale;
  bool use_qk_l2norm, state_v_first;
  const T *q, *k, *v;
  const CT *g, *beta;
  const CT* initial_state;  // null: zero
  T* o;
  CT* g_cumsum;     // null: not wanted
  T* A;             // null: not wanted
  T* h;             // null: not wanted
  CT* final_state;  // null: not wanted
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

// One thread's working set; reused from sequence to sequence.
template <typename CT>
class Scratch {
 public:
  Scratch(int64_t K, int64_t V, bool inverse)
      : padded_k((K + kRowsK - 1) / kRowsK * kRowsK),
        blocks((V + kBlockV<CT> - 1) / kBlockV<CT>),
        q_(kChunk * padded_k),
        k_(kChunk * padded_k),
        v_(kChunk * kBlockV<CT>),
        o_(kChunk * kBlockV<CT>),
        decay_(kChunk),
        beta_(kChunk),
        state_(blocks * padded_k * kBlockV<CT>),
        k_transposed_(inverse ? padded_k * kChunk : 0),
        A_(inverse ? kChunk * kChunk : 0) {
    // The padding of K has to be zero; nothing below writes there.
    std::fill_n(q(), kChunk * padded_k, CT(0));
    std::fill_n(k(), kChunk * padded_k, CT(0));
  }

  const int64_t padded_k, blocks;
  CT* q() const { return q_.data(); }
  CT* k() const { return k_.data(); }
  CT* v() const { return v_.data(); }
  CT* o() const { return o_.data(); }
  CT* decay() const { return decay_.data(); }
  CT* beta() const { return beta_.data(); }
  CT* state(int64_t block) const { return state_.data() + block * padded_k * kBlockV<CT>; }
  CT* k_transposed() const { return k_transposed_.data(); }
  CT* A() const { return A_.data(); }

 private:
  Buffer<CT> q_, k_, v_, o_, decay_, beta_, state_, k_transposed_, A_;
};

// x to CT; with l2norm, x / sqrt(|x|^2 + 1e-6).
template <typename T, typename CT>
void load_row(const T* x, int64_t K, bool l2norm, CT* row) {
  for (int64_t d = 0; d < K; ++d) {
    row[d] = static_cast<CT>(x[d]);
  }
  if (l2norm) {
    CT squares = 0;
    for (int64_t d = 0; d < K; ++d) {
      squares += row[d] * row[d];
    }
    const CT factor = CT(1) / std::sqrt(squares + CT(1e-6));
    for (int64_t d = 0; d < K; ++d) {
      row[d] *= factor;
    }
  }
}

// Calls f(k, v, element of the blocked state) for the whole K x V state.
template <typename CT, typename F>
void for_state(const Scratch<CT>& scratch, int64_t K, int64_t V, const F& f) {
  for (int64_t v = 0; v < V; ++v) {
    CT* column = scratch.state(v / kBlockV<CT>) + v % kBlockV<CT>;
    for (int64_t k = 0; k < K; ++k) {
      f(k, v, column[k * kBlockV<CT>]);
    }
  }
}

template <typename T, typename CT>
void run_sequence(const Forward<T, CT>& p, const Sequence& sequence, int64_t head, const Scratch<CT>& scratch) {
  const int64_t K = p.K, V = p.V, padded_k = scratch.padded_k;
  const int64_t k_head = head / (p.H_v / p.H_k);
  const int64_t state_offset = (sequence.index * p.H_v + head) * K * V;
  const auto state_at = [&](int64_t k, int64_t v) { return state_offset + (p.state_v_first ? v * K + k : k * V + v); };

  std::fill_n(scratch.state(0), scratch.blocks * padded_k * kBlockV<CT>, CT(0));
  if (p.initial_state) {
    for_state(scratch, K, V, [&](int64_t k, int64_t v, CT& s) { s = p.initial_state[state_at(k, v)]; });
  }

  for (int64_t begin = sequence.begin, chunk = sequence.first_chunk; begin < sequence.end; begin += kChunk, ++chunk) {
    const int64_t tokens = std::min(kChunk, sequence.end - begin);
    if (p.h) {
      T* h = p.h + (chunk * p.H_v + head) * V * K;
      for_state(scratch, K, V, [&](int64_t k, int64_t v, CT s) { h[v * K + k] = static_cast<T>(s); });
    }

    CT cumsum = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t row = begin + t;
      load_row(p.q + (row * p.H_k + k_head) * K, K, p.use_qk_l2norm, scratch.q() + t * padded_k);
      load_row(p.k + (row * p.H_k + k_head) * K, K, p.use_qk_l2norm, scratch.k() + t * padded_k);
      const CT g = p.g[row * p.H_v + head];
      scratch.decay()[t] = std::exp(g);
      scratch.beta()[t] = p.beta[row * p.H_v + head];
      cumsum += g;
      if (p.g_cumsum) {
        p.g_cumsum[row * p.H_v + head] = cumsum;
      }
    }

    if (p.A) {
      for (int64_t d = 0; d < padded_k; ++d) {
        for (int64_t t = 0; t < kChunk; ++t) {
          scratch.k_transposed()[d * kChunk + t] = t < tokens ? scratch.k()[t * padded_k + d] : CT(0);
        }
      }
      chunk_inverse(tokens, padded_k, scratch.k(), scratch.k_transposed(), scratch.beta(), scratch.A());
      for (int64_t t = 0; t < tokens; ++t) {
        T* A = p.A + ((begin + t) * p.H_v + head) * kChunk;
        for (int64_t j = 0; j < kChunk; ++j) {
          A[j] = static_cast<T>(scratch.A()[t * kChunk + j]);
        }
      }
    }

    for (int64_t block = 0; block < scratch.blocks; ++block) {
      const int64_t first = block * kBlockV<CT>;
      const int64_t columns = std::min(kBlockV<CT>, V - first);
      for (int64_t t = 0; t < tokens; ++t) {
        const T* v = p.v + ((begin + t) * p.H_v + head) * V + first;
        CT* packed = scratch.v() + t * kBlockV<CT>;
        for (int64_t j = 0; j < columns; ++j) {
          packed[j] = static_cast<CT>(v[j]);
        }
        std::fill(packed + columns, packed + kBlockV<CT>, CT(0));
      }
      advance(ValueBlock<CT>{
          .tokens = tokens,
          .padded_k = padded_k,
          .q = scratch.q(),
          .k = scratch.k(),
          .v = scratch.v(),
          .decay = scratch.decay(),
          .beta = scratch.beta(),
          .scale = p.scale,
          .state = scratch.state(block),
          .o = scratch.o(),
      });
      for (int64_t t = 0; t < tokens; ++t) {
        T* o = p.o + ((begin + t) * p.H_v + head) * V + first;
        for (int64_t j = 0; j < columns; ++j) {
          o[j] = static_cast<T>(scratch.o()[t * kBlockV<CT> + j]);
        }
      }
    }
  }

  if (p.final_state) {
    for_state(scratch, K, V, [&](int64_t k, int64_t v, CT s) { p.final_state[state_at(k, v)] = s; });
  }
}

}  // namespace flash_qla::cpu
