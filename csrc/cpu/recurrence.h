// The plain recurrence on the CPU, one sequence of one value head at a time. T is the storage type of q, k, v, o, CT
// the compute type.
#pragma once

#include <vector>

#include "cpu/activations.h"
#include "cpu/common.h"

namespace flash_qla::cpu {

// States that a sequence leaves behind every so many tokens, a multiple of kChunk; 0: none.
struct Checkpoints {
  int64_t every = 0;
  WritableFloats to;                         // states [H_v, V, K]
  std::vector<std::vector<int64_t>> places;  // of a sequence, one after the other, in elements; negative: not wanted
};

// Pointers to contiguous tensors, shapes as in Call and ForwardOutputs. What may be null says so.
template <typename T, typename CT>
struct Forward {
  int64_t H_k, H_v, K, V;
  int64_t values;  // columns that v has: V, or fewer, and then the others are zeros
  CT scale;
  bool use_qk_l2norm, state_v_first;
  const T *q, *k, *v;
  Activations<CT> gates;
  const CT* initial_state;  // null: zero
  T* o;                     // null: not wanted
  CT* g_cumsum;             // null: not wanted
  T* A;                     // null: not wanted
  T* h;                     // null: not wanted
  CT* final_state;          // null: not wanted
  const Checkpoints& checkpoints;
};

// One thread's working set; reused from sequence to sequence.
template <typename CT>
class Scratch {
 public:
  Scratch(int64_t K, int64_t V, bool inverse)
      : dims(K, V),
        q_(kChunk * dims.padded_k),
        k_(kChunk * dims.padded_k),
        v_(kChunk * kBlockV<CT>),
        o_(kChunk * kBlockV<CT>),
        decay_(kChunk),
        beta_(kChunk),
        state_(dims.state_size()),
        k_transposed_(inverse ? dims.padded_k * kChunk : 0),
        A_(inverse ? kChunk * kChunk : 0) {
    // The padding of K has to be zero; nothing below writes there.
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
  CT* state() const { return state_.data(); }
  CT* k_transposed() const { return k_transposed_.data(); }
  CT* A() const { return A_.data(); }

 private:
  Buffer<CT> q_, k_, v_, o_, decay_, beta_, state_, k_transposed_, A_;
};

// The state behind so many tokens of the sequence, if it is a checkpoint.
template <typename T, typename CT>
void keep_checkpoint(const Forward<T, CT>& p, const Sequence& sequence, int64_t head, int64_t tokens,
                     const Scratch<CT>& scratch) {
  const Checkpoints& to = p.checkpoints;
  if (to.every == 0 || tokens == 0 || tokens % to.every != 0) {
    return;
  }
  const int64_t place = to.places[sequence.index][tokens / to.every - 1];
  if (place >= 0) {
    for_state(scratch.dims, scratch.state(), p.K, p.V,
              [&](int64_t k, int64_t v, CT s) { to.to.set(place + (head * p.V + v) * p.K + k, s); });
  }
}

template <typename T, typename CT>
void run_sequence(const Forward<T, CT>& p, const Sequence& sequence, int64_t head, const Scratch<CT>& scratch) {
  const int64_t K = p.K, V = p.V, padded_k = scratch.dims.padded_k;
  const int64_t k_head = head / (p.H_v / p.H_k);
  const int64_t state_offset = (sequence.index * p.H_v + head) * K * V;

  const HeadActivations<CT> gates(p.gates, head);

  load_state(scratch.dims, p.initial_state ? p.initial_state + state_offset : nullptr, K, V, p.state_v_first,
             scratch.state());

  for (int64_t begin = sequence.begin, chunk = sequence.first_chunk; begin < sequence.end; begin += kChunk, ++chunk) {
    const int64_t tokens = std::min<int64_t>(kChunk, sequence.end - begin);
    keep_checkpoint(p, sequence, head, begin - sequence.begin, scratch);
    if (p.h) {
      store_state(scratch.dims, scratch.state(), K, V, true, p.h + (chunk * p.H_v + head) * V * K);
    }

    CT cumsum = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t row = begin + t;
      load_row(p.q + (row * p.H_k + k_head) * K, K, p.use_qk_l2norm, scratch.q() + t * padded_k);
      load_row(p.k + (row * p.H_k + k_head) * K, K, p.use_qk_l2norm, scratch.k() + t * padded_k);
      const CT g = gates.g(row * p.H_v + head);
      scratch.decay()[t] = std::exp(g);
      scratch.beta()[t] = gates.beta(row * p.H_v + head);
      cumsum = add_gate(cumsum, g);
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

    const int64_t values = (begin * p.H_v + head) * p.values, outputs = (begin * p.H_v + head) * V;
    for (int64_t block = 0; block < scratch.dims.blocks; ++block) {
      pack_values(p.v + values, p.H_v * p.values, p.values, block, tokens, CT(1), scratch.v());
      advance(ValueBlock<CT>{
          .tokens = tokens,
          .padded_k = padded_k,
          .q = scratch.q(),
          .k = scratch.k(),
          .v = scratch.v(),
          .decay = scratch.decay(),
          .beta = scratch.beta(),
          .scale = p.scale,
          .state = scratch.state() + block * scratch.dims.block_size(),
          .o = scratch.o(),
      });
      if (p.o) {
        unpack_values(scratch.o(), p.H_v * V, V, block, tokens, p.o + outputs);
      }
    }
  }

  keep_checkpoint(p, sequence, head, sequence.end - sequence.begin, scratch);
  if (p.final_state) {
    store_state(scratch.dims, scratch.state(), K, V, p.state_v_first, p.final_state + state_offset);
  }
}

}  // namespace flash_qla::cpu
