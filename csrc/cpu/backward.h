// The backward of the plain recurrence on the CPU, one sequence of one query/key head with all its value heads at a
// time. The formulas of a token's gradients are in reverse_tokens (cpu/chunk.cpp). T is the storage type of q, k, v and
// their gradients, CT the compute type.
#pragma once

#include <numeric>
#include <utility>

#include "cpu/common.h"

namespace flash_qla::cpu {

// Pointers to tensors, shapes as in BackwardCall and BackwardOutputs. All are contiguous, but for the rows of dq, dk
// and dv, which may be parts of longer ones.
template <typename T, typename CT>
struct Backward {
  Inputs<T, CT> in;    // gates.g is the forward's g; read with use_gate, or without g_cumsum
  const CT* g_cumsum;  // null: not given
  const T* grad_o;
  const CT* grad_final_state;  // null: zero
  T *dq = nullptr, *dk = nullptr, *dv = nullptr;
  int64_t keys_row = 0, values_row = 0;  // strides of the tokens of dq and dk, and of dv
  WritableFloats db = {}, dg = {};
  CT* dh0 = nullptr;        // null: not requested
  CT* gate_sums = nullptr;  // [N, H_v, 2], dA_log and ddt_bias of each sequence; null: not requested
};

// A thread's working set, which all its sequences use. max_tokens: the length of the longest sequence.
template <typename CT>
class BackwardScratch : public ChunkScratch<CT> {
 public:
  BackwardScratch(int64_t K, int64_t V, int64_t max_tokens)
      : ChunkScratch<CT>(K, V),
        error_(kChunk * kBlockV<CT>),
        dv_(kChunk * kBlockV<CT>),
        states_((kChunk + 1) * this->dims.block_size()),
        grad_state_(this->dims.state_size()),
        row_(this->dims.padded_k),
        chunk_states_(std::max<int64_t>(1, chunk_count(max_tokens)) * this->dims.state_size()),
        dq_(max_tokens * this->dims.padded_k),
        dk_(max_tokens * this->dims.padded_k) {}

  CT* error() const { return error_.data(); }
  CT* dv() const { return dv_.data(); }
  CT* states() const { return states_.data(); }
  CT* grad_state() const { return grad_state_.data(); }
  CT* row() const { return row_.data(); }
  CT* chunk_state(int64_t chunk) const { return chunk_states_.data() + chunk * this->dims.state_size(); }
  CT* dq() const { return dq_.data(); }
  CT* dk() const { return dk_.data(); }

 private:
  Buffer<CT> error_, dv_, states_, grad_state_, row_, chunk_states_, dq_, dk_;
};

template <typename T, typename CT>
class SequenceBackward {
 public:
  SequenceBackward(const Backward<T, CT>& p, const Sequence& sequence, const BackwardScratch<CT>& scratch)
      : p_(p), in_(p.in), sequence_(sequence), s_(scratch) {}

  // Runs the value heads of a query/key head one after the other, so that the sums over them have the same bits for any
  // number of threads.
  void run(int64_t k_head) const {
    const int64_t length = sequence_.length(), group = in_.H_v / in_.H_k;
    std::fill_n(s_.dq(), length * s_.dims.padded_k, CT(0));
    std::fill_n(s_.dk(), length * s_.dims.padded_k, CT(0));
    for (int64_t head = k_head * group; head < (k_head + 1) * group; ++head) {
      run_head(head);
    }
    for (int64_t t = 0; t < length; ++t) {
      const int64_t row = sequence_.begin + t, from = (row * in_.H_k + k_head) * in_.K;
      const int64_t to = row * p_.keys_row + k_head * in_.K;
      store_row(in_.q + from, s_.dq() + t * s_.dims.padded_k, p_.dq + to);
      store_row(in_.k + from, s_.dk() + t * s_.dims.padded_k, p_.dk + to);
    }
  }

  // Computes dh0 of a value head from grad_final_state, and nothing else.
  void run_gradient(int64_t head) const {
    const HeadActivations<CT> gates(in_.gates, head);
    load_gradient(head);
    for (int64_t index = chunk_count(sequence_.length()) - 1; index >= 0; --index) {
      const PackedChunk<CT> chunk = load(gates, head, index);
      for (int64_t block = 0; block < s_.dims.blocks; ++block) {
        reverse_gradient(gradient_block(head, index, chunk, block));
      }
    }
    store_gradient(head);
  }

 private:
  void run_head(int64_t head) const {
    const HeadActivations<CT> gates(in_.gates, head);
    const int64_t chunks = chunk_count(sequence_.length());
    load_state(s_.dims, in_.state_of(in_.initial_state, sequence_.index, head), in_.K, in_.V, in_.state_v_first,
               s_.chunk_state(0));
    for (int64_t index = 0; index + 1 < chunks; ++index) {
      const PackedChunk<CT> chunk = load(gates, head, index);
      for (int64_t block = 0; block < s_.dims.blocks; ++block) {
        replay_block(head, index, chunk, block);
        std::copy_n(s_.states() + chunk.tokens * s_.dims.block_size(), s_.dims.block_size(),
                    s_.chunk_state(index + 1) + block * s_.dims.block_size());
      }
    }

    load_gradient(head);
    CT sums[2] = {};
    for (int64_t index = chunks - 1; index >= 0; --index) {
      run_chunk(gates, head, index, sums);
    }
    if (p_.gate_sums) {
      std::copy_n(sums, 2, p_.gate_sums + (sequence_.index * in_.H_v + head) * 2);
    }
    if (p_.dh0) {
      store_gradient(head);
    }
  }

  void run_chunk(const HeadActivations<CT>& gates, int64_t head, int64_t index, CT (&sums)[2]) const {
    const PackedChunk<CT> chunk = load(gates, head, index);
    const int64_t first = index * kChunk * chunk.padded_k;
    CT db[kChunk] = {}, dg[kChunk] = {};
    for (int64_t block = 0; block < s_.dims.blocks; ++block) {
      replay_block(head, index, chunk, block);
      reverse(ReverseBlock<CT>{
          .gradient = gradient_block(head, index, chunk, block),
          .states = s_.states(),
          .error = s_.error(),
          .dq = s_.dq() + first,
          .dk = s_.dk() + first,
          .dv = s_.dv(),
          .db = db,
          .dg = dg,
      });
      T* const dv = p_.dv + (sequence_.begin + index * kChunk) * p_.values_row + head * in_.V;
      unpack_values(s_.dv(), p_.values_row, in_.V, block, chunk.tokens, dv);
    }
    store_gate_gradients(gates, row_of(head, index), chunk.tokens, db, dg, sums);
  }

  // Stores dbeta and dg of a chunk, through the activations that are inside. Adds the chunk's part to dA_log and
  // ddt_bias.
  void store_gate_gradients(const HeadActivations<CT>& gates, int64_t first, int64_t tokens, const CT (&db)[kChunk],
                            const CT (&dg)[kChunk], CT (&sums)[2]) const {
    CT chunk_sums[2] = {};
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = first + t * in_.H_v;
      p_.db.set(at, db[t] * gates.beta_derivative(at));
      CT gradient = dg[t];
      if (in_.gates.use_gate && gradient != 0) {  // 0 if e^g is 0, where the activation may be infinite
        chunk_sums[0] += gradient * gates.g(at);
        gradient *= gates.g_derivative(at);
        chunk_sums[1] += gradient;
      }
      p_.dg.set(at, gradient);
    }
    sums[0] += chunk_sums[0];
    sums[1] += chunk_sums[1];
  }

  // The index of a chunk's first token in [B, T, H_v].
  int64_t row_of(int64_t head, int64_t index) const { return (sequence_.begin + index * kChunk) * in_.H_v + head; }

  // Packs a chunk's tokens; e^g comes from g_cumsum if that was given.
  PackedChunk<CT> load(const HeadActivations<CT>& gates, int64_t head, int64_t index) const {
    const int64_t begin = sequence_.begin + index * kChunk;
    CT cumsum = 0;
    return load_chunk(in_, gates, head, begin, chunk_tokens(begin, sequence_.end), s_, [&](int64_t at) {
      if (!p_.g_cumsum) {
        return std::exp(gates.g(at));
      }
      const CT before = std::exchange(cumsum, p_.g_cumsum[at]);
      return decay_of(cumsum, before);
    });
  }

  // Computes the states of a block of value columns after each token of the chunk, and the errors v - a S^T k.
  void replay_block(int64_t head, int64_t index, const PackedChunk<CT>& chunk, int64_t block) const {
    pack_values(in_.v + row_of(head, index) * in_.values, in_.H_v * in_.values, in_.values, block, chunk.tokens, CT(1),
                s_.v());
    std::copy_n(s_.chunk_state(index) + block * s_.dims.block_size(), s_.dims.block_size(), s_.states());
    replay(ReplayBlock<CT>{.chunk = chunk, .v = s_.v(), .states = s_.states(), .error = s_.error()});
  }

  // A block of value columns of dS and of do.
  GradientBlock<CT> gradient_block(int64_t head, int64_t index, const PackedChunk<CT>& chunk, int64_t block) const {
    pack_values(p_.grad_o + row_of(head, index) * in_.values, in_.H_v * in_.values, in_.values, block, chunk.tokens,
                in_.scale, s_.o());
    return {.chunk = chunk, .grad_o = s_.o(), .grad_state = s_.grad_state() + block * s_.dims.block_size()};
  }

  // Copies a value head's dS from grad_final_state, or to dh0.
  void load_gradient(int64_t head) const {
    load_state(s_.dims, in_.state_of(p_.grad_final_state, sequence_.index, head), in_.K, in_.V, in_.state_v_first,
               s_.grad_state());
  }
  void store_gradient(int64_t head) const {
    store_state(s_.dims, s_.grad_state(), in_.K, in_.V, in_.state_v_first, in_.state_of(p_.dh0, sequence_.index, head));
  }

  // dx = dy, or with the l2norm dx = r (dy - y (y . dy)): the gradient of a row x of q or k, from the gradient dy of
  // the row y = r x that the recurrence uses, with r = 1 / sqrt(|x|^2 + 1e-6).
  void store_row(const T* x, const CT* dy, T* dx) const {
    if (!in_.use_qk_l2norm) {
      std::transform(dy, dy + in_.K, dx, [](CT value) { return static_cast<T>(value); });
      return;
    }
    const CT* y = s_.row();
    const CT r = load_row(x, in_.K, true, s_.row());
    const CT projection = std::inner_product(y, y + in_.K, dy, CT(0));
    for (int64_t d = 0; d < in_.K; ++d) {
      dx[d] = static_cast<T>(r * (dy[d] - y[d] * projection));
    }
  }

  const Backward<T, CT>& p_;
  const Inputs<T, CT>& in_;
  const Sequence& sequence_;
  const BackwardScratch<CT>& s_;
};

}  // namespace flash_qla::cpu
