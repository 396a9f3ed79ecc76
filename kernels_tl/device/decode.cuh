// A few tokens of a sequence on some value rows of its state, which goes from the pool to registers and back once; see
// serving/decode.py.
#pragma once

#include "device/activations.cuh"
#include "device/table.cuh"

namespace flash_qla::device {

constexpr int kWarp = 32;
constexpr int kDecodeGroups = kWarp / kDecodeLanes;  // rows of a warp that are next to each other

__device__ __forceinline__ int64_t clamp(int64_t x, int64_t least, int64_t most) {
  return x < least ? least : x > most ? most : x;
}

// Where the tokens of a sequence are, and where its states come from and go to. What the tables hold may be anything:
// nothing is read or written out of bounds.
struct DecodePlan {
  Table offsets, state_indices, accepted, write_indices, state_rows, parents;
  int tokens;  // all of them
  int length;  // of a sequence, without offsets
  int64_t null_index, slots;
  bool update_state;

  __device__ __forceinline__ int64_t begin(int n) const {
    return offsets ? clamp(offsets(n), 0, tokens) : static_cast<int64_t>(n) * length;
  }
  __device__ __forceinline__ int count(int n) const {
    const int64_t first = begin(n);
    return offsets ? static_cast<int>(clamp(offsets(n + 1), first, tokens) - first) : length;
  }
  __device__ __forceinline__ int64_t slot(int64_t index) const { return checked_slot(index, null_index, slots); }
  __device__ __forceinline__ int64_t first_slot(int n) const {
    const int column = accepted ? static_cast<int>(clamp(accepted(n), 1, state_indices.columns)) - 1 : 0;
    return slot(state_indices(n, column));
  }
  __device__ __forceinline__ int64_t slot_behind(int n, int t, int count, int64_t first_slot) const {
    if (write_indices) {
      return t < write_indices.columns ? slot(write_indices(n, t)) : kNobody;
    }
    return update_state && t == count - 1 ? first_slot : kNobody;
  }
  // The token before t, or -1 for the state at the start.
  __device__ __forceinline__ int parent(int n, int t) const {
    return parents && t < parents.columns ? static_cast<int>(clamp(parents(n, t), -1, t - 1)) : t - 1;
  }
  __device__ __forceinline__ int ancestor(int n, int t, int generations) const {
    for (; generations > 0; --generations) {
      t = parent(n, t);
    }
    return t;
  }
  // Tokens between the state at the start and t.
  __device__ __forceinline__ int depth(int n, int t) const {
    int found = 0;
    for (t = parent(n, t); t >= 0; t = parent(n, t)) {
      ++found;
    }
    return found;
  }
};

// What the recurrence takes of a head's tokens: pointers to the first token's row of the head, and from one token to
// the next.
struct DecodeTokens {
  const void *q, *k, *v;
  const void *a, *b;
  int64_t q_stride, k_stride, v_stride, a_stride, b_stride;
  int head;  // a, b and these are of all value heads
  const void *A_log, *dt_bias;
  int activations;
  float scale;
  bool normalize;
};

// Pieces of 16 bytes of a state's row: a lane has some of them, the lanes of a row 128 bytes next to each other. Lanes
// behind the last channel, and so the channels that they have, are as good as zeros.
template <typename State, int K>
struct Pieces {
  static constexpr int kSize = 16 / sizeof(State);           // channels
  static constexpr int kCount = K / (kDecodeLanes * kSize);  // of a lane
  static __device__ __forceinline__ int channel(int piece, int lane) { return (piece * kDecodeLanes + lane) * kSize; }

  static __device__ __forceinline__ void unpack_state(float* x, uint4 data) {
    const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(State) == 4) {
        x[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack(State(), words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }

  static __device__ __forceinline__ uint4 pack_state(const float* x) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(State) == 4) {
        words[i] = __float_as_uint(x[i]);
      } else {
        words[i] = pack(State(), x[2 * i], x[2 * i + 1]);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

__device__ __forceinline__ float sum_over_row(float x) {
#pragma unroll
  for (int bit = 1; bit < kDecodeLanes; bit *= 2) {
    x += __shfl_xor_sync(~0u, x, bit);
  }
  return x;
}

// A lane's part of kRows value rows of a state, kDecodeGroups apart from `row` on.
template <typename Element, typename State, int K, int kRows>
class Decoder {
 public:
  using P = Pieces<State, K>;
  static constexpr int kChannels = K / kDecodeLanes;
  static constexpr int kWords = kChannels / 2;  // of a lane's part of a query or key, two elements each

  // A token as it lies in memory: so that it can be on its way.
  struct Raw {
    uint32_t q[kWords], k[kWords], v[kRows], a, b;
  };

  __device__ __forceinline__ Decoder(const DecodeTokens& tokens, int row, int key_dim, int value_dim)
      : tokens_(tokens),
        gate_(load_gate_bits(tokens.A_log, tokens.dt_bias, tokens.activations, tokens.head), tokens.activations),
        row_(row),
        K_(key_dim),
        V_(value_dim) {}

  __device__ __forceinline__ Raw load(int64_t token) const {
    Raw raw;
    load_vector(raw.q, row_at(tokens_.q, token * tokens_.q_stride));
    load_vector(raw.k, row_at(tokens_.k, token * tokens_.k_stride));
    const Element* const v = row_at(tokens_.v, token * tokens_.v_stride);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      raw.v[r] = has_row(r) ? load_bits(v + row_of(r)) : 0;
    }
    raw.a = load_bits(tokens_.a, tokens_.activations, Activation::kG, token * tokens_.a_stride + tokens_.head);
    raw.b = load_bits(tokens_.b, tokens_.activations, Activation::kBeta, token * tokens_.b_stride + tokens_.head);
    return raw;
  }

  // The state's first value row is at `from`. From L2: what is read once has no use for L1.
  __device__ __forceinline__ void read(uint4 (&data)[kRows * P::kCount], const State* from) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int piece = 0; piece < P::kCount; ++piece) {
        const int channel = P::channel(piece, lane());
        data[r * P::kCount + piece] = has_row(r) && channel < K_
                                          ? __ldcg(reinterpret_cast<const uint4*>(from + row_of(r) * K_ + channel))
                                          : uint4{};
      }
    }
  }
  __device__ __forceinline__ void set(const uint4 (&data)[kRows * P::kCount]) {
#pragma unroll
    for (int i = 0; i < kRows * P::kCount; ++i) {
      P::unpack_state(S_[i / P::kCount] + i % P::kCount * P::kSize, data[i]);
    }
  }
  __device__ __forceinline__ void write(State* to) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int piece = 0; piece < P::kCount; ++piece) {
        const int channel = P::channel(piece, lane());
        if (has_row(r) && channel < K_) {
          __stcg(reinterpret_cast<uint4*>(to + row_of(r) * K_ + channel), P::pack_state(S_[r] + piece * P::kSize));
        }
      }
    }
  }

  // S' = decay S + (beta (v - decay S k)) k^T, and of o = scale S' q the row that the lane writes. Both products with S
  // are of the state before: S' q = decay S q + change (k q).
  __device__ __forceinline__ float step(const Raw& raw) {
    float q[kChannels], k[kChannels], v[kRows];
    unpack_vector(q, raw.q);
    unpack_vector(k, raw.k);
    from_bits_of(v, raw.v);
    float qk = sum_of_products(q, k), q_factor = tokens_.scale, k_factor = 1.f;
    if (tokens_.normalize) {
      constexpr float kEps = static_cast<float>(kNormEps);
      q_factor *= rsqrtf(sum_of_products(q, q) + kEps);
      k_factor = rsqrtf(sum_of_products(k, k) + kEps);
      qk *= k_factor;
    }
    const float decay = expf(gate_(from_bits(raw.a, tokens_.activations, Activation::kG)));
    const float beta = activated_beta(from_bits(raw.b, tokens_.activations, Activation::kBeta), tokens_.activations);
    float out = 0.f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float change = beta * (v[r] - decay * (k_factor * sum_of_products(S_[r], k)));
      const float row_out = q_factor * (decay * sum_of_products(S_[r], q) + change * qk);
      const float k_change = change * k_factor;
      out = r == lane() ? row_out : out;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        S_[r][i] = decay * S_[r][i] + k_change * k[i];
      }
    }
    return out;
  }

  // By the lane that has it: lane r of a row's lanes has row r.
  __device__ __forceinline__ void write_output(Element* o, float out) const {
    if (lane() < kRows && row_of(lane()) < V_) {
      o[row_of(lane())] = from_float(Element(), out);
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % kDecodeLanes; }
  __device__ __forceinline__ int row_of(int r) const { return row_ + r * kDecodeGroups; }
  __device__ __forceinline__ bool has_row(int r) const { return row_of(r) < V_; }

  __device__ __forceinline__ static const Element* row_at(const void* elements, int64_t offset) {
    return static_cast<const Element*>(elements) + offset;
  }

  // A lane's elements of a query or key, in the places of the state's pieces.
  __device__ __forceinline__ void load_vector(uint32_t (&words)[kWords], const Element* from) const {
    constexpr int kPieceWords = P::kSize / 2;
#pragma unroll
    for (int piece = 0; piece < P::kCount; ++piece) {
      const int channel = P::channel(piece, lane());
      uint32_t* const to = words + piece * kPieceWords;
      if constexpr (kPieceWords == 4) {
        const uint4 data = channel < K_ ? *reinterpret_cast<const uint4*>(from + channel) : uint4{};
        to[0] = data.x, to[1] = data.y, to[2] = data.z, to[3] = data.w;
      } else {
        const uint2 data = channel < K_ ? *reinterpret_cast<const uint2*>(from + channel) : uint2{};
        to[0] = data.x, to[1] = data.y;
      }
    }
  }
  __device__ __forceinline__ static void unpack_vector(float (&x)[kChannels], const uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float2 pair = unpack(Element(), words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
  __device__ __forceinline__ static void from_bits_of(float (&x)[kRows], const uint32_t (&bits)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r] = unpack(Element(), bits[r]).x;
    }
  }
  // Over all channels, in all lanes of a row.
  __device__ __forceinline__ static float sum_of_products(const float (&x)[kChannels], const float (&y)[kChannels]) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      sum += x[i] * y[i];
    }
    return sum_over_row(sum);
  }

  const DecodeTokens& tokens_;
  const HeadGate gate_;
  const int row_, K_, V_;
  float S_[kRows][kChannels];
};

// Where states are: a pool, and rows of states behind tokens. Pointers are to the head's state of the first of them.
struct DecodeStates {
  void *pool, *kept;
  int64_t slot_stride, row_stride, step_stride;
  int rows, steps;  // none, if states are not kept
};

// By a CTA of kThreads threads: value rows from first_row on of sequence n; o is at the head's row of the first token,
// `o_stride` from one token to the next.
template <typename Element, typename State, int K, int kThreads, int kRows>
__device__ __forceinline__ void decode(const DecodePlan& plan, const DecodeTokens& tokens, const DecodeStates& states,
                                       void* outputs, int64_t o_stride, int first_row, int key_dim, int value_dim,
                                       int n, int N) {
  using D = Decoder<Element, State, K, kRows>;
  constexpr int kPieces = kRows * D::P::kCount;
  State* const pool = static_cast<State*>(states.pool);
  State* const kept = static_cast<State*>(states.kept);
  Element* const o = static_cast<Element*>(outputs);
  const int64_t begin = plan.begin(n), slot = plan.first_slot(n);
  const int count = plan.count(n), warp = threadIdx.x / kWarp;
  const int row = first_row + warp * kRows * kDecodeGroups + threadIdx.x % kWarp / kDecodeLanes;
  D decoder(tokens, row, key_dim, value_dim);
  typename D::Raw raw = count > 0 ? decoder.load(begin) : typename D::Raw();  // while the slot is on its way
  if (slot == kNobody) {
    for (int t = 0; t < count; ++t) {
      decoder.write_output(o + (begin + t) * o_stride, 0.f);
    }
  } else if (count > 0) {
    __shared__ uint4 at_start[kPieces][kThreads];  // for trees: each thread has its own
    uint4 data[kPieces];
    decoder.read(data, pool + slot * states.slot_stride);
    if (plan.parents) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        at_start[i][threadIdx.x] = data[i];
      }
    }
    decoder.set(data);
    const int64_t kept_row = plan.state_rows ? plan.state_rows(n) : n;
    const bool is_kept = kept_row >= 0 && kept_row < states.rows;
    int loaded = 0;  // the token in raw
    for (int t = 0; t < count; ++t) {
      int depth = 0;  // of t below the state that is there
      if (plan.parents && plan.parent(n, t) != t - 1) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          data[i] = at_start[i][threadIdx.x];
        }
        decoder.set(data);
        depth = plan.depth(n, t);
      }
      float out;
      for (; depth >= 0; --depth) {
        if (const int token = plan.ancestor(n, t, depth); token != loaded) {
          raw = decoder.load(begin + token);
          loaded = token;
        }
        out = decoder.step(raw);
      }
      if (t + 1 < count) {
        raw = decoder.load(begin + t + 1);  // on its way while the state is written
        loaded = t + 1;
      }
      decoder.write_output(o + (begin + t) * o_stride, out);
      if (const int64_t to = plan.slot_behind(n, t, count, slot); to != kNobody) {
        decoder.write(pool + to * states.slot_stride);
      }
      if (is_kept && t < states.steps) {
        decoder.write(kept + kept_row * states.row_stride + t * states.step_stride);
      }
    }
  }
  if (plan.offsets && n == N - 1) {  // rows that no sequence has
    for (int64_t t = begin + count; t < plan.tokens; ++t) {
      decoder.write_output(o + t * o_stride, 0.f);
    }
  }
}

}  // namespace flash_qla::device
