// A few tokens of a sequence on some value rows of its state, which goes from the pool to registers and back once; see
// serving/decode.py.
#pragma once

#include "device/decode_tokens.cuh"
#include "device/table.cuh"

namespace flash_qla::device {

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

// 16 bytes of global to shared memory, or zeros. From L2: what is read once has no use for L1.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last kInFlight groups of the thread's copies are there.
template <int kInFlight>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
}

// Of kCount sums over a row's lanes this lane's, number lane / (kDecodeLanes / kCount). Every step halves what a lane
// still has to add up.
template <int kCount>
__device__ __forceinline__ float sum_and_scatter(float (&x)[kCount], int lane) {
  int count = kCount;
#pragma unroll
  for (int bit = kDecodeLanes / 2; bit > 0; bit /= 2) {
    if (count == 1) {
      x[0] += __shfl_xor_sync(~0u, x[0], bit);
    } else {
      count /= 2;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float low = x[i], high = x[i + count];
        x[i] = (lane & bit ? high : low) + __shfl_xor_sync(~0u, lane & bit ? low : high, bit);
      }
    }
  }
  return x[0];
}

// kDecodeGroups * kDecodeLaneRows value rows of a state in a warp, from `row` of the CTA's on: of kDecodeLaneRows of
// them, kDecodeGroups apart, a lane has its pieces. To and from memory they go through shared memory, where they lie as
// in the state, and in between by 512 bytes next to each other, which memory is faster with.
template <typename State, int K>
class Decoder {
 public:
  using P = Pieces<State, K>;
  static constexpr int kPieces = kDecodeLaneRows * P::kCount;
  using Tile = uint4[kPieces * kWarp];

  __device__ __forceinline__ Decoder(int row, int first_row, int key_dim, int value_dim)
      : row_(row), first_row_(first_row), K_(key_dim), V_(value_dim) {}

  // By copies that go on by themselves; zeros for what there is not.
  __device__ __forceinline__ void fetch(Tile& to, const State* from) const {
    for_all_pieces([&](int i, int offset, bool there) { copy_async(&to[i], from + (there ? offset : 0), there); });
  }
  __device__ __forceinline__ void set(const Tile& from) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      P::unpack_state(S_[i / P::kCount] + i % P::kCount * P::kSize, from[place(i)]);
    }
  }
  __device__ __forceinline__ void write(State* to, Tile& tile) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      tile[place(i)] = P::pack_state(S_[i / P::kCount] + i % P::kCount * P::kSize);
    }
    __syncwarp();
    for_all_pieces([&](int i, int offset, bool there) {
      if (there) {
        __stcg(reinterpret_cast<uint4*>(to + offset), tile[i]);
      }
    });
  }

  // S' = decay S + (beta (v - decay S k)) k^T, and of o = S' q the row that the lane writes. Both products with S are
  // of the state before: S' q = decay S q + change (k q).
  template <typename Shared>
  __device__ __forceinline__ float step(const Shared& tokens, int t) {
    float k[kChannels], sums[2 * kDecodeLaneRows] = {};  // of S k, then of S q
#pragma unroll
    for (int four = 0; four < kChannels / 4; ++four) {
      const int place = P::place(four / P::kFours, four % P::kFours, lane());
      const float4 k4 = tokens.k[t][place], q4 = tokens.q[t][place];
      const float q[4] = {q4.x, q4.y, q4.z, q4.w};
      k[4 * four] = k4.x, k[4 * four + 1] = k4.y, k[4 * four + 2] = k4.z, k[4 * four + 3] = k4.w;
#pragma unroll
      for (int r = 0; r < kDecodeLaneRows; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[r] += S_[r][4 * four + i] * k[4 * four + i];
          sums[kDecodeLaneRows + r] += S_[r][4 * four + i] * q[i];
        }
      }
    }
    const float decay = tokens.decay[t], sum = sum_and_scatter(sums, lane());
    const float other = __shfl_xor_sync(~0u, sum, kDecodeLanes / 2);
    const bool has_q = lane() >= kDecodeLanes / 2;
    const float Sk = has_q ? other : sum, Sq = has_q ? sum : other;
    const float v = reinterpret_cast<const float*>(tokens.v[t])[row_of_lane()];
    const float change = tokens.beta[t] * (v - decay * Sk);
#pragma unroll
    for (int r = 0; r < kDecodeLaneRows; ++r) {
      const float change_of_row = __shfl_sync(~0u, change, r * kLanesOfRow, kDecodeLanes);
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        S_[r][i] = decay * S_[r][i] + change_of_row * k[i];
      }
    }
    return decay * Sq + change * tokens.qk[t];
  }

  // `o` is of the head's first row.
  template <typename Element>
  __device__ __forceinline__ void write_output(Element* o, float out) const {
    const int row = first_row_ + row_of_lane();
    if (lane() < kDecodeLanes / 2 && lane() % kLanesOfRow == 0 && row < V_) {
      o[row] = from_float(Element(), out);
    }
  }

 private:
  static constexpr int kChannels = K / kDecodeLanes;
  static constexpr int kLanesOfRow = kDecodeLanes / (2 * kDecodeLaneRows);  // that have the same sum

  __device__ __forceinline__ static int lane() { return threadIdx.x % kDecodeLanes; }
  // Of kDecodeLaneRows, the one whose sums the lane has.
  __device__ __forceinline__ static int own_row() { return lane() % (kDecodeLanes / 2) / kLanesOfRow; }
  static constexpr int kRowPieces = K / P::kSize;
  // In a tile, of the lane's piece i.
  __device__ __forceinline__ static int place(int i) {
    const int row = i / P::kCount * kDecodeGroups + threadIdx.x % kWarp / kDecodeLanes;
    return row * kRowPieces + i % P::kCount * kDecodeLanes + lane();
  }
  // use(place in a tile, offset in a head's state, whether there is such a piece), the lanes having pieces side by
  // side.
  template <typename Use>
  __device__ __forceinline__ void for_all_pieces(Use use) const {
#pragma unroll
    for (int i = threadIdx.x % kWarp; i < kPieces * kWarp; i += kWarp) {
      const int row = first_row_ + row_ + i / kRowPieces, channel = i % kRowPieces * P::kSize;
      use(i, row * K_ + channel, row < V_ && channel < K_);
    }
  }
  // Of the CTA, the row whose sums the lane has.
  __device__ __forceinline__ int row_of_lane() const {
    return row_ + own_row() * kDecodeGroups + threadIdx.x % kWarp / kDecodeLanes;
  }

  const int row_, first_row_, K_, V_;
  float S_[kDecodeLaneRows][kChannels];
};

// Where states are: a pool, and rows of states behind tokens. Pointers are to the head's state of the first of them.
struct DecodeStates {
  void *pool, *kept;
  int64_t slot_stride, row_stride, step_stride;
  int rows, steps;  // none, if states are not kept
};

// By a CTA: `groups` times as many value rows as its lanes have, from first_row on, of sequence n;
// o is at the head's row of the first token, `o_stride` from one token to the next.
template <typename Element, typename State, int K, int kStages>
class Decode {
 public:
  const DecodePlan& plan;
  const DecodeTokens& tokens;
  const DecodeStates& states;
  Element* const o;
  void* const tiles;  // in shared memory, kStages + 1 times a tile a warp
  const int64_t o_stride;
  const int first_row, groups, K_, V_, n, N;

  __device__ __forceinline__ void run() const {
    const int64_t begin = plan.begin(n), slot = plan.first_slot(n);
    const int count = plan.count(n);
    __shared__ typename Prepared::Shared shared_tokens;
    Tiles* const shared_tiles = static_cast<Tiles*>(tiles);
    const Shared shared = {shared_tokens, shared_tiles, shared_tiles[kStages]};
    if (slot == kNobody) {
      clear(begin, begin + count);
    } else if (plan.parents || count > kDecodeTokens) {
      go_through<true>(shared, begin, count, slot);
    } else if (count > 0) {
      go_through<false>(shared, begin, count, slot);
    }
    if (plan.offsets && n == N - 1) {  // rows that no sequence has
      clear(begin + count, plan.tokens);
    }
  }

 private:
  using D = Decoder<State, K>;
  using Prepared = PreparedTokens<Element, State, K>;
  using Tiles = typename D::Tile[kDecodeWarps];  // each warp has its own
  struct Shared {
    typename Prepared::Shared& tokens;
    Tiles *stages, &written;  // of the state, kStages of them on their way in, one on its way out
  };

  __device__ __forceinline__ static int warp() { return threadIdx.x / kWarp; }
  __device__ __forceinline__ D decoder_of(int group) const {
    const int row = warp() * kDecodeLaneRows * kDecodeGroups;
    return D(group * (kDecodeThreads / kDecodeLanes * kDecodeLaneRows) + row, first_row, K_, V_);
  }

  __device__ __forceinline__ void clear(int64_t begin, int64_t end) const {
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      for (int64_t t = begin; t < end; ++t) {
        decoder_of(group).write_output(o + t * o_stride, 0.f);
      }
    }
  }

  // While the tokens go through some rows of the state the next kStages - 1 times as many are on their way.
  // kIsTree also takes more tokens than are made ready at a time, and a chain as a tree without branches.
  template <bool kIsTree>
  __device__ __forceinline__ void go_through(const Shared& shared, int64_t begin, int count, int64_t slot) const {
    State* const pool = static_cast<State*>(states.pool);
    const auto fetch = [&](int group) {
      if (group < groups) {
        decoder_of(group).fetch(shared.stages[group % kStages][warp()], pool + slot * states.slot_stride);
      }
      commit_copies();
    };
    Prepared prepared(shared.tokens, tokens, begin, count, first_row, K_, V_);
    typename Prepared::Raw raw = prepared.load(Prepared::first_of_warp());
#pragma unroll
    for (int group = 0; group < kStages - 1; ++group) {
      fetch(group);
    }
    prepared.prepare(0, raw);
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      __syncwarp();  // the place has been read
      fetch(group + kStages - 1);
      wait_for_copies<kStages - 1>();
      __syncwarp();
      const auto& at_start = shared.stages[group % kStages][warp()];
      D decoder = decoder_of(group);
      decoder.set(at_start);
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        float out;
        if constexpr (kIsTree) {
          int depth = 0;  // of t below the state that is there
          if (plan.parent(n, t) != t - 1) {
            decoder.set(at_start);
            depth = plan.depth(n, t);
          }
#pragma unroll 1
          for (; depth >= 0; --depth) {
            const int token = plan.ancestor(n, t, depth);
            prepared.want(token);
            out = decoder.step(shared.tokens, token % kDecodeTokens);
          }
        } else {
          out = decoder.step(shared.tokens, t);
        }
        decoder.write_output(o + (begin + t) * o_stride, out);
        if (const int64_t to = plan.slot_behind(n, t, count, slot); to != kNobody) {
          decoder.write(pool + to * states.slot_stride, shared.written[warp()]);
        }
        if (t < states.steps) {
          const int64_t row = plan.state_rows ? plan.state_rows(n) : n;
          if (row >= 0 && row < states.rows) {
            decoder.write(static_cast<State*>(states.kept) + row * states.row_stride + t * states.step_stride,
                          shared.written[warp()]);
          }
        }
      }
    }
  }
};

template <typename Element, typename State, int K, int kStages>
__device__ __forceinline__ void decode(const DecodePlan& plan, const DecodeTokens& tokens, const DecodeStates& states,
                                       void* outputs, void* tiles, int64_t o_stride, int first_row, int groups,
                                       int key_dim, int value_dim, int n, int N) {
  Decode<Element, State, K, kStages>{plan,    tokens,    states,    static_cast<Element*>(outputs),
                                     tiles,   o_stride,  first_row, groups,
                                     key_dim, value_dim, n,         N}
      .run();
}

}  // namespace flash_qla::device
