// The backward of the plain recurrence on the CPU, one sequence of one query/key head, with all its value heads, at a
// time. T is the storage type of q, k, v and their gradients, CT the compute type.
#pragma once

#include <numeric>
#include <utility>

#include "cpu/activations.h"
#include "cpu/common.h"

namespace flash_qla::cpu {

// Pointers to contiguous tensors, shapes as in BackwardCall and BackwardOutputs. What may be null says so.
template <typename T, typename CT>
struct Backward {
  int64_t H_k, H_v, K, V;
  CT scale;
  bool use_qk_l2norm, state_v_first;
  const T *q, *k, *v;
  const CT* g_cumsum;
  Activations<CT> gates;    // g is the raw one, and read only with the gate inside
  const CT* initial_state;  // null: zero
  const T* grad_o;
  const CT* grad_final_state;  // null: zero
  T *dq, *dk, *dv;
  WritableFloats db, dg;
  CT* dh0;        // null: not wanted
  CT* gate_sums;  // [N, H_v, 2], the sequences' dA_log and ddt_bias; null: not wanted
};

// One thread's working set; reused from sequence to sequence. max_tokens is the length of the longest.
template <typename CT>
class BackwardScratch {
 public:
  BackwardScratch(int64_t K, int64_t V, int64_t max_tokens)
      : dims(K, V),
        q_(kChunk * dims.padded_k),
        k_(kChunk * dims.padded_k),
        v_(kChunk * kBlockV<CT>),
        grad_o_(kChunk * kBlockV<CT>),
        error_(kChunk * kBlockV<CT>),
        dv_(kChunk * kBlockV<CT>),
        decay_(kChunk),
        beta_(kChunk),
        states_((kChunk + 1) * dims.block_size()),
        grad_state_(dims.state_size()),
        row_(dims.padded_k),
        chunk_states_(std::max<int64_t>(1, chunk_count(max_tokens)) * dims.state_size()),
        dq_(max_tokens * dims.padded_k),
        dk_(max_tokens * dims.padded_k) {
    // The padding of K has to be zero; nothing below writes there.
    std::fill_n(q(), kChunk * dims.padded_k, CT(0));
    std::fill_n(k(), kChunk * dims.padded_k, CT(0));
  }

  const PackedDims<CT> dims;
  CT* q() const { return q_.data(); }
  CT* k() const { return k_.data(); }
  CT* v() const { return v_.data(); }
  CT* grad_o() const { return grad_o_.data(); }
  CT* error() const { return error_.data(); }
  CT* dv() const { return dv_.data(); }
  CT* decay() const { return decay_.data(); }
  CT* beta() const { return beta_.data(); }
  CT* states() const { return states_.data(); }
  CT* grad_state() const { return grad_state_.data(); }
  CT* row() const { return row_.data(); }
  CT* chunk_state(int64_t chunk) const { return chunk_states_.data() + chunk * dims.state_size(); }
  CT* dq() const { return dq_.data(); }
  CT* dk() const { return dk_.data(); }

 private:
  Buffer<CT> q_, k_, v_, grad_o_, error_, dv_, decay_, beta_, states_, grad_state_, row_, chunk_states_, dq_, dk_;
};

template <typename T, typename CT>
class SequenceBackward {
 public:
  SequenceBackward(const Backward<T, CT>& p, const Sequence& sequence, int64_t k_head,
                   const BackwardScratch<CT>& scratch)
      : p_(p), sequence_(sequence), k_head_(k_head), s_(scratch), length_(sequence.end - sequence.begin) {}

  // The group's value heads one after the other, so that the sums over them are the same for any number of threads.
  void run() const {
    std::fill_n(s_.dq(), length_ * s_.dims.padded_k, CT(0));
    std::fill_n(s_.dk(), length_ * s_.dims.padded_k, CT(0));
    const int64_t group = p_.H_v / p_.H_k;
    for (int64_t head = k_head_ * group; head < (k_head_ + 1) * group; ++head) {
      run_head(head);
    }
    for (int64_t t = 0; t < length_; ++t) {
      const int64_t offset = ((sequence_.begin + t) * p_.H_k + k_head_) * p_.K;
      store_gradient(p_.q + offset, s_.dq() + t * s_.dims.padded_k, p_.dq + offset);
      store_gradient(p_.k + offset, s_.dk() + t * s_.dims.padded_k, p_.dk + offset);
    }
  }

  // From grad_final_state to dh0 and nothing else. grad_o has `values` columns; the others of V are zeros.
  void run_gradient(int64_t head, int64_t values) const {
    const HeadActivations<CT> gates(p_.gates, head);
    const int64_t state_offset = (sequence_.index * p_.H_v + head) * p_.K * p_.V;
    load_state(s_.dims, p_.grad_final_state + state_offset, p_.K, p_.V, p_.state_v_first, s_.grad_state());
    for (int64_t chunk = chunk_count(length_) - 1; chunk >= 0; --chunk) {
      const int64_t tokens = load_chunk(gates, head, chunk), first = sequence_.begin + chunk * kChunk;
      for (int64_t block = 0; block < s_.dims.blocks; ++block) {
        pack_values(p_.grad_o + (first * p_.H_v + head) * values, p_.H_v * values, values, block, tokens, p_.scale,
                    s_.grad_o());
        reverse_gradient(GradientBlock<CT>{
            .tokens = tokens,
            .padded_k = s_.dims.padded_k,
            .q = s_.q(),
            .k = s_.k(),
            .grad_o = s_.grad_o(),
            .decay = s_.decay(),
            .beta = s_.beta(),
            .grad_state = s_.grad_state() + block * s_.dims.block_size(),
        });
      }
    }
    store_state(s_.dims, s_.grad_state(), p_.K, p_.V, p_.state_v_first, p_.dh0 + state_offset);
  }

 private:
  void run_head(int64_t head) const {
    const HeadActivations<CT> gates(p_.gates, head);
    const int64_t state_offset = (sequence_.index * p_.H_v + head) * p_.K * p_.V;
    const auto state_of = [&](const CT* states) { return states ? states + state_offset : nullptr; };

    const int64_t chunks = chunk_count(length_);
    load_state(s_.dims, state_of(p_.initial_state), p_.K, p_.V, p_.state_v_first, s_.chunk_state(0));
    for (int64_t chunk = 0; chunk + 1 < chunks; ++chunk) {
      const int64_t tokens = load_chunk(gates, head, chunk);
      for (int64_t block = 0; block < s_.dims.blocks; ++block) {
        replay_block(head, chunk, tokens, block);
        std::copy_n(s_.states() + tokens * s_.dims.block_size(), s_.dims.block_size(),
                    s_.chunk_state(chunk + 1) + block * s_.dims.block_size());
      }
    }

    load_state(s_.dims, state_of(p_.grad_final_state), p_.K, p_.V, p_.state_v_first, s_.grad_state());
    CT sums[2] = {};
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      run_chunk(gates, head, chunk, sums);
    }
    if (p_.gate_sums) {
      std::copy_n(sums, 2, p_.gate_sums + (sequence_.index * p_.H_v + head) * 2);
    }
    if (p_.dh0) {
      store_state(s_.dims, s_.grad_state(), p_.K, p_.V, p_.state_v_first, p_.dh0 + state_offset);
    }
  }

  void run_chunk(const HeadActivations<CT>& gates, int64_t head, int64_t chunk, CT (&sums)[2]) const {
    const int64_t first = chunk * kChunk, tokens = load_chunk(gates, head, chunk);
    const int64_t values = ((sequence_.begin + first) * p_.H_v + head) * p_.V;
    CT db[kChunk] = {}, dg[kChunk] = {};
    for (int64_t block = 0; block < s_.dims.blocks; ++block) {
      replay_block(head, chunk, tokens, block);
      pack_values(p_.grad_o + values, p_.H_v * p_.V, p_.V, block, tokens, p_.scale, s_.grad_o());
      reverse(ReverseBlock<CT>{
          .tokens = tokens,
          .padded_k = s_.dims.padded_k,
          .q = s_.q(),
          .k = s_.k(),
          .grad_o = s_.grad_o(),
          .decay = s_.decay(),
          .beta = s_.beta(),
          .states = s_.states(),
          .error = s_.error(),
          .grad_state = s_.grad_state() + block * s_.dims.block_size(),
          .dq = s_.dq() + first * s_.dims.padded_k,
          .dk = s_.dk() + first * s_.dims.padded_k,
          .dv = s_.dv(),
          .db = db,
          .dg = dg,
      });
      unpack_values(s_.dv(), p_.H_v * p_.V, p_.V, block, tokens, p_.dv + values);
    }
    store_gate_gradients(gates, head, first, tokens, db, dg, sums);
  }

  // dbeta and dg of a chunk, through the activations that are inside, and what the chunk adds to dA_log and ddt_bias.
  void store_gate_gradients(const HeadActivations<CT>& gates, int64_t head, int64_t first, int64_t tokens,
                            const CT (&db)[kChunk], const CT (&dg)[kChunk], CT (&sums)[2]) const {
    CT chunk_sums[2] = {};
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t row = (sequence_.begin + first + t) * p_.H_v + head;
      p_.db.set(row, db[t] * gates.beta_derivative(row));
      CT gradient = dg[t];
      if (p_.gates.use_gate && gradient != 0) {  // it is where e^g is, and the activation may then be infinite
        chunk_sums[0] += gradient * gates.g(row);
        gradient *= gates.g_derivative(row);
        chunk_sums[1] += gradient;
      }
      p_.dg.set(row, gradient);
    }
    sums[0] += chunk_sums[0];
    sums[1] += chunk_sums[1];
  }

  // q, k, decay and beta of a chunk; returns its number of tokens.
  int64_t load_chunk(const HeadActivations<CT>& gates, int64_t head, int64_t chunk) const {
    const int64_t begin = sequence_.begin + chunk * kChunk, tokens = std::min<int64_t>(kChunk, sequence_.end - begin);
    CT cumsum = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t row = begin + t, x = (row * p_.H_k + k_head_) * p_.K;
      load_row(p_.q + x, p_.K, p_.use_qk_l2norm, s_.q() + t * s_.dims.padded_k);
      load_row(p_.k + x, p_.K, p_.use_qk_l2norm, s_.k() + t * s_.dims.padded_k);
      const CT before = std::exchange(cumsum, p_.g_cumsum[row * p_.H_v + head]);
      s_.decay()[t] = decay_of(cumsum, before);
      s_.beta()[t] = gates.beta(row * p_.H_v + head);
    }
    return tokens;
  }

  // The states of a block of value columns after each of the chunk's tokens, and the errors v - a S^T k.
  void replay_block(int64_t head, int64_t chunk, int64_t tokens, int64_t block) const {
    const int64_t values = ((sequence_.begin + chunk * kChunk) * p_.H_v + head) * p_.V;
    pack_values(p_.v + values, p_.H_v * p_.V, p_.V, block, tokens, CT(1), s_.v());
    std::copy_n(s_.chunk_state(chunk) + block * s_.dims.block_size(), s_.dims.block_size(), s_.states());
    replay(ReplayBlock<CT>{
        .tokens = tokens,
        .padded_k = s_.dims.padded_k,
        .k = s_.k(),
        .v = s_.v(),
        .decay = s_.decay(),
        .beta = s_.beta(),
        .states = s_.states(),
        .error = s_.error(),
    });
  }

  // The gradient dx of a row x of q or k, from that of what the recurrence uses, dy. With l2norm that is y = r x, with
  // r = 1 / sqrt(|x|^2 + 1e-6), so dx = r (dy - y (y . dy)).
  void store_gradient(const T* x, const CT* dy, T* dx) const {
    if (!p_.use_qk_l2norm) {
      std::transform(dy, dy + p_.K, dx, [](CT value) { return static_cast<T>(value); });
      return;
    }
    const CT* y = s_.row();
    const CT r = load_row(x, p_.K, true, s_.row());
    const CT projection = std::inner_product(y, y + p_.K, dy, CT(0));
    for (int64_t d = 0; d < p_.K; ++d) {
      dx[d] = static_cast<T>(r * (dy[d] - y[d] * projection));
    }
  }

  const Backward<T, CT>& p_;
  const Sequence& sequence_;
  const int64_t k_head_;
  const BackwardScratch<CT>& s_;
  const int64_t length_;
};

}  // namespace flash_qla::cpu
