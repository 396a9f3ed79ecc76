// The work of a CTA of decode: the tokens of a sequence on some value rows of its state; see decode/decode.py.
#pragma once

#include <type_traits>

#include "decode/decode_blocks.cuh"
#include "decode/decode_key_first.cuh"
#include "decode/decode_mma.cuh"
#include "decode/decode_rows.cuh"

namespace flash_qla::device {

// How a kernel takes a sequence of several tokens through its state.
enum class DecodePath {
  kOneToken,     // each sequence has one token
  kRows,         // one token after the other, whichever states are kept
  kBlocks,       // blocks of tokens together; only the last state is kept
  kTensorCores,  // all tokens together, whichever states are kept
  kKeyFirst,     // as kRows, on states [K, V]
};

// The work of one CTA. o points to the head's row of token 0; tokens are `o_stride` elements apart.
template <typename Element, typename State, int K, DecodePath kPath, int kGroupRows>
class Decode {
 public:
  const DecodePlan& plan;
  const DecodeTokens& tokens;
  const DecodeStates& states;
  Element* const o;
  void* const tiles;  // shared memory for rows of the state, groups_in_shared of DECODE in config.py
  const int64_t o_stride;
  const DecodeShare& share;
  const int K_, V_, N;

  __device__ __forceinline__ void run() const {
    const int64_t begin = plan.begin(share.n), slot = plan.first_slots(share.n);
    const int count = kPath == DecodePath::kOneToken ? 1 : plan.count(share.n);
    if (slot == kNoState) {
      clear(begin, begin + count);
    } else if (!kIsKeyFirst && count == 1) {
      one_token(begin, slot);
    } else if (count >= (kIsKeyFirst ? 1 : 2)) {
      several_tokens(begin, count, slot);
    }
    if (kPath != DecodePath::kOneToken && plan.offsets && share.n == N - 1) {  // rows after the last sequence
      clear(begin + count, plan.tokens);
    }
  }

 private:
  static constexpr bool kIsKeyFirst = kPath == DecodePath::kKeyFirst;
  static constexpr int kWarpRows = kGroupRows / kDecodeWarps;
  using Rows = std::conditional_t<kIsKeyFirst, KeyFirstRows<State, K>, StateRows<State, K, kWarpRows>>;
  template <int kTileRows>
  using Prepared = PreparedTokens<Element, State, typename Rows::L, kTileRows>;
  struct Blocks {
    typename Prepared<kDecodeTile>::Shared tokens;
    Relations relations;
  };
  struct Nothing {};
  template <DecodePath kWhose, typename T>
  using Of = std::conditional_t<kPath == kWhose, T, Nothing>;
  union Shared {
    typename Prepared<kDecodeGroupRows>::Shared tokens;
    Of<DecodePath::kBlocks, Blocks> blocks;
    Of<DecodePath::kTensorCores, MmaTokens<kDecodeBlock, K>> few;
    Of<DecodePath::kTensorCores, MmaTokens<kDecodeTokens, K>> more;
  };
  // Whether a CTA may have more value rows than its warps have at a time.
  static constexpr bool kHasGroups = kPath == DecodePath::kBlocks || kPath == DecodePath::kTensorCores ||
                                     (kPath == DecodePath::kOneToken && sizeof(State) == 1);

  __device__ __forceinline__ static int warp() { return threadIdx.x / kWarp; }
  __device__ __forceinline__ int groups() const { return kHasGroups ? share.rows / kGroupRows : 1; }
  __device__ __forceinline__ int first_row_of(int group) const { return share.first_row + group * kGroupRows; }
  __device__ __forceinline__ int row_of(int group) const { return first_row_of(group) + warp() * kWarpRows; }
  __device__ __forceinline__ Rows rows_of(int group) const { return Rows(row_of(group), K_, V_, states.dtype); }
  __device__ __forceinline__ const State* state_of(int64_t slot) const {
    return static_cast<const State*>(states.pool) + slot * states.slot_stride;
  }

  __device__ __forceinline__ void clear(int64_t begin, int64_t end) const {
#pragma unroll 1
    for (int group = 0; group < groups(); ++group) {
      for (int64_t t = begin; t < end; ++t) {
        rows_of(group).write_output(o + t * o_stride, 0.f, tokens.dtype);
      }
    }
  }

  __device__ __forceinline__ void several_tokens(int64_t begin, int count, int64_t slot) const {
    if constexpr (kPath != DecodePath::kOneToken) {
      __shared__ Shared shared;
      if constexpr (kPath == DecodePath::kTensorCores) {
        if (count <= kDecodeBlock) {
          return by_tensor_cores<kDecodeBlock>(shared.few, begin, count, slot);
        }
        if (count <= kDecodeTokens) {
          return by_tensor_cores<kDecodeTokens>(shared.more, begin, count, slot);
        }
      }
      if constexpr (kPath == DecodePath::kBlocks) {
        if (count <= kDecodeTokens) {
          return in_blocks(shared.blocks, begin, count, slot);
        }
      }
      one_by_one(shared.tokens, begin, count, slot);
    }
  }

  // Warps share nothing: each prepares the token for itself, while its first rows are loaded.
  __device__ __forceinline__ void one_token(int64_t begin, int64_t slot) const {
    if constexpr (!kIsKeyFirst) {
      const State* const state = state_of(slot);
      typename Rows::Raw next;
      rows_of(0).load(next, state);
      RawToken<Element, typename Rows::L> raw;
      raw.load(tokens, begin, K_);
      float next_v = value_of(begin, 0);
      const auto token = raw.prepare(tokens);
#pragma unroll 1
      for (int group = 0; group < groups(); ++group) {
        Rows rows = rows_of(group);
        rows.set(next);
        const float v = next_v;
        if (group + 1 < groups()) {
          rows_of(group + 1).load(next, state);
          next_v = value_of(begin, group + 1);
        }
        rows.write_output(o + begin * o_stride, rows.step(token, v), tokens.dtype);
        states.template destinations<State>(plan, share.n, 0, 1, slot).for_each([&](State* to) { rows.write(to); });
      }
    }
  }
  // v of the lane's own row.
  __device__ __forceinline__ float value_of(int64_t at, int group) const {
    const int row = row_of(group) + Rows::lane_row();
    return row < V_ ? to_float(static_cast<const Element*>(tokens.v)[at * tokens.v_stride + row], tokens.dtype) : 0.f;
  }

  __device__ __forceinline__ void one_by_one(typename Prepared<kDecodeGroupRows>::Shared& shared, int64_t begin,
                                             int count, int64_t slot) const {
#pragma unroll 1
    for (int group = 0; group < groups(); ++group) {
      Rows rows = rows_of(group);
      auto& at_start = Rows::tile(tiles);
      rows.fetch(at_start, state_of(slot));
      commit_copies();
      Prepared<kDecodeGroupRows> prepared(shared, plan, tokens, states, share.n, begin, count, slot,
                                          first_row_of(group), K_, V_);
      prepared.want(0);
      Rows::await();
      rows.set(at_start);
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        int depth = 0;  // tokens between the state in registers and t
        if (plan.parent(share.n, t) != t - 1) {
          rows.set(at_start);
          depth = plan.depth(share.n, t);
        }
        float out;
#pragma unroll 1
        for (; depth >= 0; --depth) {
          const int token = plan.ancestor(share.n, t, depth);
          prepared.want(token);
          out = rows.step(prepared.token(token), prepared.v(token, warp() * kDecodeWarpRows + Rows::lane_row()));
        }
        rows.write_output(o + (begin + t) * o_stride, out, tokens.dtype);
        prepared.destinations(t).for_each([&](State* to) {
          if constexpr (kIsKeyFirst) {
            rows.write(to, tiles);
          } else {
            rows.write(to);
          }
        });
      }
    }
  }

  // The next group's rows of the state are copied while the tokens are applied to this group's.
  __device__ __forceinline__ void in_blocks(Blocks& shared, int64_t begin, int count, int64_t slot) const {
    using Block = StateBlock<K>;
    using Tiles = typename Block::Tile[kDecodeWarps];  // each warp has its own
    constexpr int kStages = 2;
    Tiles* const stages = static_cast<Tiles*>(tiles);  // tiles of the state: kStages are being fetched,
    auto& written = stages[kStages][warp()];           // one is being written
    State* const state = const_cast<State*>(state_of(slot));
    const auto block_of = [&](int group) {
      return Block(group * kDecodeGroupRows + warp() * kDecodeWarpRows, share.first_row, K_, V_);
    };
    const auto fetch = [&](int group) {
      if (group < groups()) {
        block_of(group).fetch(stages[group % kStages][warp()], state);
      }
      commit_copies();
    };
    Prepared<kDecodeTile> prepared(shared.tokens, plan, tokens, states, share.n, begin, count, slot, share.first_row,
                                   K_, V_);
    const auto raw = prepared.load(warp());
#pragma unroll
    for (int group = 0; group < kStages - 1; ++group) {
      fetch(group);
    }
    prepared.prepare(raw);
    shared.relations.set(shared.tokens, count);
#pragma unroll 1
    for (int group = 0; group < groups(); ++group) {
      __syncwarp();  // all lanes have read the tile that the next fetch overwrites
      fetch(group + kStages - 1);
      wait_for_copies<kStages - 1>();
      __syncwarp();
      Block rows = block_of(group);
      rows.set(stages[group % kStages][warp()]);
      const auto step = [&](auto tokens_together, int t) {
        constexpr int kTokens = tokens_together.value;
        const float out = rows.template step<kTokens>(shared.tokens, shared.relations, t);
        rows.template write_output<kTokens>(o + (begin + t) * o_stride, o_stride, out);
        return t + kTokens;
      };
      int t = 0;
#pragma unroll 1
      while (t + kDecodeBlock <= count) {
        t = step(std::integral_constant<int, kDecodeBlock>(), t);
      }
      if (t + kDecodeBlock / 2 <= count) {
        t = step(std::integral_constant<int, kDecodeBlock / 2>(), t);
      }
      if (t < count) {
        step(std::integral_constant<int, 1>(), t);
      }
      if (plan.update_state) {
        rows.write(state, written);
      }
    }
  }

  // All tokens are processed together, whichever states are kept.
  template <int kTokens>
  __device__ __forceinline__ void by_tensor_cores(auto& shared, int64_t begin, int count, int64_t slot) const {
    if constexpr (kPath == DecodePath::kTensorCores) {
      using Decoder = MmaDecoder<kTokens, K>;
      constexpr int kWaves = kDecodeTile / (kMmaRows * kDecodeWarps);  // a warp's waves, at most
      auto* const tile = static_cast<typename Decoder::Tile*>(tiles);
      const State* const state = state_of(slot);
      const int first_row = share.first_row, rows = groups() * kGroupRows;
      const auto unit = [](int wave) { return wave * kDecodeWarps + warp(); };
      shared.fetch(tokens, begin, count, first_row, rows, K_, V_);
      commit_copies();
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        if (unit(wave) * kMmaRows < rows) {
          Decoder(unit(wave) * kMmaRows, first_row, K_, V_).fetch(tile[unit(wave)], state);
        }
        commit_copies();
      }
      const auto gates = shared.prepare_gates(plan, tokens, states, share.n, begin, count, slot);
      wait_for_copies<kWaves>();
      __syncthreads();
      shared.prepare(tokens, gates);
#pragma unroll 1
      for (int wave = 0; wave < kWaves && unit(wave) * kMmaRows < rows; ++wave) {
        wave == 0 ? wait_for_copies<kWaves - 1>() : wait_for_copies<0>();
        __syncwarp();
        Decoder decoder(unit(wave) * kMmaRows, first_row, K_, V_);
        decoder.set(tile[unit(wave)], shared);
        decoder.write_outputs(shared, o + begin * o_stride, o_stride, count);
#pragma unroll 1
        for (int t = 0; t < count; ++t) {
          const auto destinations = shared.of_warp().destinations[t];
          if (destinations.slot != nullptr || destinations.kept != nullptr) {
            decoder.make_state(tile[unit(wave)], shared, t);
          }
          destinations.for_each([&](State* to) { decoder.write(to, tile[unit(wave)]); });
        }
      }
    }
  }
};

template <typename Element, typename State, int K, DecodePath kPath, int kGroupRows>
__device__ __forceinline__ void decode(const DecodePlan& plan, const DecodeTokens& tokens, const DecodeStates& states,
                                       void* outputs, void* tiles, int64_t o_stride, const DecodeShare& share,
                                       int key_dim, int value_dim, int N) {
  Decode<Element, State, K, kPath, kGroupRows>{
      plan, tokens, states, static_cast<Element*>(outputs), tiles, o_stride, share, key_dim, value_dim, N}
      .run();
}

}  // namespace flash_qla::device
