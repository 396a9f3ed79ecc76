// The plain recurrence on the CPU, one sequence of one value head at a time. T is the storage type of q, k, v and o, CT
// the compute type.
#pragma once

#include <vector>

#include "cpu/common.h"

namespace flash_qla::cpu {

// The offsets of the states after `every` tokens of a sequence, after twice as many, and so on.
struct Checkpoints {
  int64_t every = 0;                          // 0: no checkpoints
  bool rounds = false;                        // after a checkpoint the recurrence goes on with the rounded state
  WritableFloats to;                          // states [H_v, V, K]
  std::vector<std::vector<int64_t>> offsets;  // by sequence and checkpoint, in elements; negative: not requested
};

// Pointers to contiguous tensors, shapes as in ForwardOutputs. A null output is not requested.
template <typename T, typename CT>
struct Forward {
  Inputs<T, CT> in;
  const Checkpoints& checkpoints;
  T* o = nullptr;
  CT* g_cumsum = nullptr;
  T* A = nullptr;
  T* h = nullptr;
  CT* final_state = nullptr;
};

// A thread's working set, which all its sequences use.
template <typename CT>
class Scratch : public ChunkScratch<CT> {
 public:
  Scratch(int64_t K, int64_t V, bool inverse)
      : ChunkScratch<CT>(K, V),
        state_(this->dims.state_size()),
        k_transposed_(inverse ? this->dims.padded_k * kChunk : 0),
        A_(inverse ? kChunk * kChunk : 0) {}

  CT* state() const { return state_.data(); }
  CT* k_transposed() const { return k_transposed_.data(); }
  CT* A() const { return A_.data(); }

 private:
  Buffer<CT> state_, k_transposed_, A_;
};

// The tokens of the chunk that begins after `done` tokens of the sequence. A checkpoint ends a chunk.
template <typename T, typename CT>
int64_t next_tokens(const Forward<T, CT>& p, const Sequence& sequence, int64_t done) {
  const int64_t every = p.checkpoints.every;
  const int64_t end = every == 0 ? sequence.length() : std::min(sequence.length(), (done / every + 1) * every);
  return chunk_tokens(done, end);
}

// Stores the state after this many tokens of the sequence, if it is a checkpoint.
template <typename T, typename CT>
void keep_checkpoint(const Forward<T, CT>& p, const Sequence& sequence, int64_t head, int64_t tokens,
                     const Scratch<CT>& scratch) {
  const Checkpoints& to = p.checkpoints;
  if (to.every == 0 || tokens == 0 || tokens % to.every != 0) {
    return;
  }
  const int64_t offset = to.offsets[sequence.index][tokens / to.every - 1];
  if (offset >= 0) {
    store_pool_state(scratch.dims, scratch.state(), p.in.K, p.in.V, /*v_first=*/true, to.to,
                     offset + head * p.in.V * p.in.K);
  }
}

// Rounds the state after this many tokens of the sequence, if it is a checkpoint and the rounded state goes on.
template <typename T, typename CT>
void round_at_checkpoint(const Forward<T, CT>& p, int64_t tokens, const Scratch<CT>& scratch) {
  const Checkpoints& to = p.checkpoints;
  if (to.rounds && tokens > 0 && tokens % to.every == 0) {
    for_state(scratch.dims, scratch.state(), p.in.K, p.in.V, [&](int64_t, int64_t, CT& s) { s = to.to.rounded(s); });
  }
}

// Advances a head's state over a chunk, in place, and stores o unless o is null. `first`: the index of the chunk's
// first token in [B, T, H_v].
template <typename T, typename CT>
void advance_chunk(const Inputs<T, CT>& in, const PackedChunk<CT>& chunk, int64_t first, const Scratch<CT>& scratch,
                   CT* state, T* o) {
  for (int64_t block = 0; block < scratch.dims.blocks; ++block) {
    pack_values(in.v + first * in.values, in.H_v * in.values, in.values, block, chunk.tokens, CT(1), scratch.v());
    advance(ValueBlock<CT>{
        .chunk = chunk,
        .v = scratch.v(),
        .scale = in.scale,
        .state = state + block * scratch.dims.block_size(),
        .o = scratch.o(),
    });
    if (o) {
      unpack_values(scratch.o(), in.H_v * in.V, in.V, block, chunk.tokens, o + first * in.V);
    }
  }
}

// Stores the chunk's rows of A.
template <typename T, typename CT>
void store_inverse(const Forward<T, CT>& p, int64_t head, int64_t begin, const PackedChunk<CT>& chunk,
                   const Scratch<CT>& scratch) {
  for (int64_t d = 0; d < chunk.padded_k; ++d) {
    for (int64_t t = 0; t < kChunk; ++t) {
      scratch.k_transposed()[d * kChunk + t] = t < chunk.tokens ? chunk.k[t * chunk.padded_k + d] : CT(0);
    }
  }
  chunk_inverse(chunk.tokens, chunk.padded_k, chunk.k, scratch.k_transposed(), chunk.beta, scratch.A());
  for (int64_t t = 0; t < chunk.tokens; ++t) {
    T* A = p.A + ((begin + t) * p.in.H_v + head) * kChunk;
    for (int64_t j = 0; j < kChunk; ++j) {
      A[j] = static_cast<T>(scratch.A()[t * kChunk + j]);
    }
  }
}

template <typename T, typename CT>
void run_sequence(const Forward<T, CT>& p, const Sequence& sequence, int64_t head, const Scratch<CT>& scratch) {
  const Inputs<T, CT>& in = p.in;
  const HeadActivations<CT> gates(in.gates, head);

  load_state(scratch.dims, in.state_of(in.initial_state, sequence.index, head), in.K, in.V, in.state_v_first,
             scratch.state());

  int64_t tokens = 0;  // of a chunk
  for (int64_t begin = sequence.begin, index = sequence.first_chunk; begin < sequence.end; begin += tokens, ++index) {
    tokens = next_tokens(p, sequence, begin - sequence.begin);
    keep_checkpoint(p, sequence, head, begin - sequence.begin, scratch);
    round_at_checkpoint(p, begin - sequence.begin, scratch);
    if (p.h) {
      store_state(scratch.dims, scratch.state(), in.K, in.V, true, p.h + (index * in.H_v + head) * in.V * in.K);
    }

    CT cumsum = 0;
    const PackedChunk<CT> chunk = load_chunk(in, gates, head, begin, tokens, scratch, [&](int64_t at) {
      const CT g = gates.g(at);
      cumsum = add_gate(cumsum, g);
      if (p.g_cumsum) {
        p.g_cumsum[at] = cumsum;
      }
      return std::exp(g);
    });
    if (p.A) {
      store_inverse(p, head, begin, chunk, scratch);
    }

    advance_chunk(in, chunk, begin * in.H_v + head, scratch, scratch.state(), p.o);
  }

  keep_checkpoint(p, sequence, head, sequence.length(), scratch);
  if (p.final_state) {
    store_state(scratch.dims, scratch.state(), in.K, in.V, in.state_v_first,
                in.state_of(p.final_state, sequence.index, head));
  }
}

}  // namespace flash_qla::cpu
