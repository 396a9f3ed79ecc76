// A few tokens of a sequence on some value rows of its state, which goes from the pool to registers and back once; see
// serving/decode.py.
#pragma once

#include <type_traits>

#include "device/decode_mma.cuh"
#include "device/decode_one.cuh"
#include "device/decode_tokens.cuh"

namespace flash_qla::device {

template <int kValue>
struct Constant {  // a number that a generic lambda may take as a template argument
  static constexpr int value = kValue;
};

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
  __device__ __forceinline__ void pack(Tile& tile) const {
    __syncwarp();  // what is there has been read
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      tile[place(i)] = P::pack_state(S_[i / P::kCount] + i % P::kCount * P::kSize);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void write(State* to, const Tile& tile) const {
    for_all_pieces([&](int i, int offset, bool there) {
      if (there) {
        __stcg(reinterpret_cast<uint4*>(to + offset), tile[i]);
      }
    });
  }

  // Takes the lanes' state S through the next kTokens tokens of a chain, from `first` on, where a block begins if there
  // are several:
  //
  //   S_t = decay_t S_t-1 + change_t k_t^T
  //   change_t = beta_t (v_t - since_t S k_t) - sum over j < t of kk_tj change_j
  //   o_t = since_t S q_t + sum over j <= t of kq_tj change_j
  //
  // so that all products with a state are with S. Of one token since is decay. The last state is
  //
  //   decay_0 ... decay_T-1 S + sum over t of decay_t+1 ... decay_T-1 change_t k_t^T
  //
  // Gives the number of o that the lane writes.
  template <int kTokens, typename Shared>
  __device__ __forceinline__ float step(const Shared& tokens, int first) {
    using Own = OwnSum<kTokens>;
    float Sk[kDecodeLaneRows * kTokens] = {}, Sq[kDecodeLaneRows * kTokens] = {};
#pragma unroll
    for (int four = 0; four < kChannels / 4; ++four) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const Four k = four_of(tokens.k[first + t], four), q = four_of(tokens.q[first + t], four);
#pragma unroll
        for (int r = 0; r < kDecodeLaneRows; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            Sk[r * kTokens + t] += S_[r][4 * four + i] * k.x[i];
            Sq[r * kTokens + t] += S_[r][4 * four + i] * q.x[i];
          }
        }
      }
    }
    const int own = first + Own::token(lane());
    const float since = kTokens == 1 ? tokens.decay[own] : tokens.since[own];
    const float v = reinterpret_cast<const float*>(tokens.v[own])[row_ + Own::row(lane()) * kDecodeGroups + group()];
    const float alone = tokens.beta[own] * (v - since * sum_and_scatter<kDecodeLanes>(Sk, lane()));
    float out = since * sum_and_scatter<kDecodeLanes>(Sq, lane());
    float change[kDecodeLaneRows][kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int r = 0; r < kDecodeLaneRows; ++r) {
        change[r][t] = __shfl_sync(~0u, alone, Own::lane_of(r, t), kDecodeLanes);
#pragma unroll
        for (int j = 0; j < t; ++j) {
          change[r][t] -= tokens.kk[first + t][j] * change[r][j];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float change_of_row = change[0][t];
#pragma unroll
      for (int r = 1; r < kDecodeLaneRows; ++r) {
        change_of_row = Own::row(lane()) == r ? change[r][t] : change_of_row;
      }
      if (first + t <= own) {
        out += change_of_row * (first + t == own ? tokens.qk[own] : tokens.kq[own][t]);
      }
    }
    float until = 1.f;  // the decays behind token t, and in the end all of them
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
#pragma unroll
      for (int r = 0; r < kDecodeLaneRows; ++r) {
        change[r][t] *= until;
      }
      until *= tokens.decay[first + t];
    }
    if (kTokens > 1) {
      asm volatile("" ::: "memory");  // k is read again: registers do not hold it
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int four = 0; four < kChannels / 4; ++four) {
        const Four k = four_of(tokens.k[first + t], four);
#pragma unroll
        for (int r = 0; r < kDecodeLaneRows; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& S = S_[r][4 * four + i];
            S = (t == 0 ? until * S : S) + change[r][t] * k.x[i];
          }
        }
      }
    }
    return out;
  }

  // What step has given; `o` is of the head's first row of the step's first token.
  template <int kTokens, typename Element>
  __device__ __forceinline__ void write_output(Element* o, int64_t o_stride, float out) const {
    using Own = OwnSum<kTokens>;
    const int row = first_row_ + row_ + Own::row(lane()) * kDecodeGroups + group();
    if (lane() % Own::kLanes == 0 && row < V_) {
      o[Own::token(lane()) * o_stride + row] = from_float(Element(), out);
    }
  }

 private:
  static constexpr int kChannels = K / kDecodeLanes;

  struct Four {
    float x[4];
  };
  // The lane's channels 4 * four to 4 * four + 3 of a token.
  __device__ __forceinline__ static Four four_of(const float4 (&token)[K / 4], int four) {
    const float4 x = token[P::place(four / P::kFours, four % P::kFours, lane())];
    return {{x.x, x.y, x.z, x.w}};
  }

  // sum_and_scatter of the sums of kTokens tokens of each of the lane's rows: whose sum a lane of the row has.
  template <int kTokens>
  struct OwnSum {
    static constexpr int kLanes = kDecodeLanes / (kDecodeLaneRows * kTokens);  // that have the same
    __device__ __forceinline__ static int row(int lane) { return lane / (kLanes * kTokens); }
    __device__ __forceinline__ static int token(int lane) { return lane / kLanes % kTokens; }
    __device__ __forceinline__ static int lane_of(int row, int token) { return (row * kTokens + token) * kLanes; }
  };

  __device__ __forceinline__ static int lane() { return threadIdx.x % kDecodeLanes; }
  __device__ __forceinline__ static int group() { return threadIdx.x % kWarp / kDecodeLanes; }
  static constexpr int kRowPieces = K / P::kSize;
  // In a tile, of the lane's piece i.
  __device__ __forceinline__ static int place(int i) {
    const int row = i / P::kCount * kDecodeGroups + group();
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

  const int row_, first_row_, K_, V_;
  float S_[kDecodeLaneRows][kChannels];
};

// By a CTA; o is at the head's row of the first token, `o_stride` from one token to the next.
template <typename Element, typename State, int K, int kStages>
class Decode {
 public:
  const DecodePlan& plan;
  const DecodeTokens& tokens;
  const DecodeStates& states;
  Element* const o;
  void* const tiles;  // in shared memory, kStages + 1 times a tile a warp
  const int64_t o_stride;
  const int n, first_row, groups, K_, V_, N;

  __device__ __forceinline__ void run() const {
    const int64_t begin = plan.begin(n), slot = plan.first_slots(n);
    const int count = plan.count(n);
    __shared__ Shared shared;
    if (slot == kNobody) {
      clear(begin, begin + count);
    } else if (kTensorCores && count > 1 && count <= kDecodeBlock) {
      by_tensor_cores<kDecodeBlock>(shared.few, begin, count, slot);
    } else if (kTensorCores && count > 1 && count <= kDecodeTokens) {
      by_tensor_cores<kDecodeTokens>(shared.more, begin, count, slot);
    } else if (kByRows && count == 1) {
      go_through<Path::kOneToken>(shared.prepared, begin, count, slot);
    } else if (plan.parents || plan.write_indices || states.steps > 0 || count > kDecodeTokens) {
      go_through<Path::kOneByOne>(shared.prepared, begin, count, slot);
    } else if (count > 1) {
      go_through<Path::kBlocks>(shared.prepared, begin, count, slot);
    } else if (count == 1) {
      go_through<Path::kOneToken>(shared.prepared, begin, count, slot);
    }
    if (plan.offsets && n == N - 1) {  // rows that no sequence has
      clear(begin + count, plan.tokens);
    }
  }

 private:
  using D = Decoder<State, K>;
  using Prepared = PreparedTokens<Element, State, K>;
  using Tiles = typename D::Tile[kDecodeWarps];  // each warp has its own
  // Blocks of tokens take a state as far as its last token; all else goes token by token: trees, states that are kept
  // behind tokens, and more tokens than are made ready at a time.
  enum class Path { kOneToken, kBlocks, kOneByOne };

  // Where one token is OneToken's, as it is in calls that have no other.
  static constexpr bool kByRows = std::is_same<State, float>::value;
  // Where tokens and states are factors as they come.
  static constexpr bool kTensorCores =
      std::is_same<Element, __nv_bfloat16>::value && std::is_same<State, __nv_bfloat16>::value;
  union Shared {
    typename Prepared::Shared prepared;
    MmaTokens<kDecodeBlock, K> few;
    MmaTokens<kDecodeTokens, K> more;
  };

  __device__ __forceinline__ static int warp() { return threadIdx.x / kWarp; }
  __device__ __forceinline__ D decoder_of(int group) const {
    const int row = warp() * kDecodeLaneRows * kDecodeGroups;
    return D(group * kDecodeGroupRows + row, first_row, K_, V_);
  }

  __device__ __forceinline__ void clear(int64_t begin, int64_t end) const {
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      for (int64_t t = begin; t < end; ++t) {
        decoder_of(group).template write_output<1>(o + t * o_stride, o_stride, 0.f);
      }
    }
  }

  // All tokens go through the state together, whatever becomes of the states behind them.
  template <int kTokens>
  __device__ __forceinline__ void by_tensor_cores(MmaTokens<kTokens, K>& shared, int64_t begin, int count,
                                                  int64_t slot) const {
    if constexpr (kTensorCores) {
      using Decoder = MmaDecoder<kTokens, K>;
      constexpr int kTurns = kDecodeTile / (kMmaRows * kDecodeWarps);  // of a warp, at most
      auto* const tile = static_cast<typename Decoder::Tile*>(tiles);
      const State* const state = static_cast<const State*>(states.pool) + slot * states.slot_stride;
      const int rows = groups * kDecodeGroupRows;
      const auto unit = [](int turn) { return turn * kDecodeWarps + warp(); };
      shared.fetch(tokens, begin, count, first_row, rows, K_, V_);
      commit_copies();
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        if (unit(turn) * kMmaRows < rows) {
          Decoder(unit(turn) * kMmaRows, first_row, K_, V_).fetch(tile[unit(turn)], state);
        }
        commit_copies();
      }
      const auto own = shared.prepare_gates(plan, tokens, states, n, begin, count, slot);
      wait_for_copies<kTurns>();
      __syncthreads();
      shared.prepare(tokens, own);
#pragma unroll 1
      for (int turn = 0; turn < kTurns && unit(turn) * kMmaRows < rows; ++turn) {
        turn == 0 ? wait_for_copies<kTurns - 1>() : wait_for_copies<0>();
        __syncwarp();
        Decoder decoder(unit(turn) * kMmaRows, first_row, K_, V_);
        decoder.set(tile[unit(turn)], shared);
        decoder.write_outputs(shared, o + begin * o_stride, o_stride, count);
#pragma unroll 1
        for (int t = 0; t < count; ++t) {
          const auto places = shared.of_warp().places[t];
          if (places.slot != nullptr || places.kept != nullptr) {
            decoder.make_state(tile[unit(turn)], shared, t);
          }
          places.for_each([&](State* to) { decoder.write(to, tile[unit(turn)]); });
        }
      }
    }
  }

  __device__ __forceinline__ void one_token(const typename Prepared::Shared& shared, const typename D::Tile& tile,
                                            int group, int64_t begin, int64_t slot) const {
    static_assert(OneToken::kRows == kDecodeLaneRows * kDecodeGroups);
    const int row = group * kDecodeGroupRows + warp() * OneToken::kRows, lane = threadIdx.x % kWarp;
    const int own = row + OneToken::own_row();
    const int place = D::P::place(4 * lane);
    OneToken rows(first_row + row, K_, V_);
    rows.set(tile);
    const PreparedToken token = {shared.q[0][place], shared.k[0][place], shared.decay[0], shared.beta[0], shared.qk[0]};
    rows.write_output(o + begin * o_stride, rows.step(token, reinterpret_cast<const float*>(shared.v[0])[own]));
    states.template places<float>(plan, n, 0, 1, slot).for_each([&](float* to) { rows.write(to); });
  }

  // While the tokens go through some rows of the state the next kStages - 1 times as many are on their way.
  template <Path kPath>
  __device__ __forceinline__ void go_through(typename Prepared::Shared& shared, int64_t begin, int count,
                                             int64_t slot) const {
    Tiles* const stages = static_cast<Tiles*>(tiles);  // of the state, kStages of them on their way in
    auto& written = stages[kStages][warp()];           // and one on its way out
    State* const pool = static_cast<State*>(states.pool);
    const auto fetch = [&](int group) {
      if (group < groups) {
        decoder_of(group).fetch(stages[group % kStages][warp()], pool + slot * states.slot_stride);
      }
      commit_copies();
    };
    Prepared prepared(shared, tokens, begin, count, first_row, K_, V_);
    typename Prepared::Raw raw = prepared.load(Prepared::first_of_warp());
#pragma unroll
    for (int group = 0; group < kStages - 1; ++group) {
      fetch(group);
    }
    prepared.prepare(0, raw);
    if (kPath == Path::kBlocks) {
      prepared.relate();
    }
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      __syncwarp();  // the place has been read
      fetch(group + kStages - 1);
      wait_for_copies<kStages - 1>();
      __syncwarp();
      const auto& at_start = stages[group % kStages][warp()];
      if constexpr (kByRows && kPath == Path::kOneToken) {
        one_token(shared, at_start, group, begin, slot);
        continue;
      }
      D decoder = decoder_of(group);
      decoder.set(at_start);
      const auto outputs_of = [&](int t) { return o + (begin + t) * o_stride; };
      if constexpr (kPath == Path::kOneByOne) {
#pragma unroll 1
        for (int t = 0; t < count; ++t) {
          int depth = 0;  // of t below the state that is there
          if (plan.parent(n, t) != t - 1) {
            decoder.set(at_start);
            depth = plan.depth(n, t);
          }
          float out;
#pragma unroll 1
          for (; depth >= 0; --depth) {
            const int token = plan.ancestor(n, t, depth);
            prepared.want(token);
            out = decoder.template step<1>(shared, token % kDecodeTokens);
          }
          decoder.template write_output<1>(outputs_of(t), o_stride, out);
          const auto places = states.template places<State>(plan, n, t, count, slot);
          if (places.slot != nullptr || places.kept != nullptr) {
            decoder.pack(written);
          }
          places.for_each([&](State* to) { decoder.write(to, written); });
        }
      } else {
        const auto step = [&](auto tokens_together, int t) {
          constexpr int kTokens = tokens_together.value;
          const float out = decoder.template step<kTokens>(shared, t);
          decoder.template write_output<kTokens>(outputs_of(t), o_stride, out);
          return t + kTokens;
        };
        int t = 0;
        if constexpr (kPath == Path::kBlocks) {
#pragma unroll 1
          while (t + kDecodeBlock <= count) {
            t = step(Constant<kDecodeBlock>(), t);
          }
          if (t + kDecodeBlock / 2 <= count) {
            t = step(Constant<kDecodeBlock / 2>(), t);
          }
        }
        if (t < count) {
          step(Constant<1>(), t);
        }
        if (plan.update_state) {
          decoder.pack(written);
          decoder.write(pool + slot * states.slot_stride, written);
        }
      }
    }
  }
};

template <typename Element, typename State, int K, int kStages>
__device__ __forceinline__ void decode(const DecodePlan& plan, const DecodeTokens& tokens, const DecodeStates& states,
                                       void* outputs, void* tiles, int64_t o_stride, const DecodeShare& share,
                                       int key_dim, int value_dim, int N) {
  Decode<Element, State, K, kStages>{plan,         tokens,   states,    static_cast<Element*>(outputs),
                                     tiles,        o_stride, share.n,   share.first_row,
                                     share.groups, key_dim,  value_dim, N}
      .run();
}

}  // namespace flash_qla::device
