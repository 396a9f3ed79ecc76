// Two to eight tokens of a sequence on value rows of its state, by tensor cores: 16 rows per warp at a time. Tokens and
// states are in bf16, so they are operands without a conversion; see decode/decode.py. A warp's timeline, in which only
// the tokens are shared with other warps:
//
//   cp.async    tokens, rows 0, rows 1
//   warp        gates, destinations|products, pairs       |rows 0: S0 k, S0 q, changes|o|states 0, 1, ...|rows 1: ...
//   waits for                      |tokens, __syncthreads |rows 0                     | |                |rows 1
//
// A state costs one MMA per 16 rows and 8 channels, and leaves from the tile of the rows.
#pragma once

#include "core/warp.cuh"
#include "decode/decode_plan.cuh"

namespace flash_qla::device {

// Up to kTokens tokens of a sequence in shared memory. `rows`: for each block of four tokens four keys, then four
// queries, unchanged, with swizzled 16-byte pieces. `warps`: the numbers that each warp computes from them.
template <int kTokens, int K>
struct MmaTokens {
  static_assert(kDecodeBlock == 4 && (kTokens == 4 || kTokens == 8));  // a block is half of a factor's eight rows
  static constexpr int kBlocks = kTokens / kDecodeBlock, kRows = 2 * kTokens, kPieces = K / 8;
  enum Factor { kValue, kKey, kQuery, kSince, kFactors };  // numbers of a token
  enum Pair { kChange, kOutput, kDecay, kPairs };          // numbers of a token and itself or an earlier one

  // S0 is the initial state. Sums are over t's ancestors j, and the last two also over j = t:
  //
  //   change_t = kValue_t v_t - kKey_t (S0 k_t) - sum of kChange_tj change_j
  //   o_t      = kQuery_t (S0 q_t) + sum of kOutput_tj change_j
  //   S_t      = kSince_t S0 + sum of kDecay_tj change_j k_j^T
  //
  // A change includes the factor of its key's normalisation. kSince_t and kDecay_tj are products of decays: from the
  // start and from after j, up to t. A pair is 0 if j is neither t nor an ancestor.
  struct OfWarp {
    float products[kRows][kRows];  // products of rows with rows
    float factors[kFactors][kTokens], pairs[kPairs][kTokens][kTokens];
    DecodeStates::Destinations<__nv_bfloat16> destinations[kTokens];  // destinations of the states after tokens
  };
  uint4 rows[kRows][kPieces], values[kTokens][kDecodeTile / 8];
  OfWarp warps[kDecodeWarps];

  // Starts asynchronous copies of keys, queries and `value_rows` rows of v from first_row on; zeros for missing tokens
  // and channels. All threads call it.
  __device__ __forceinline__ void fetch(const DecodeTokens& tokens, int64_t begin, int count, int first_row,
                                        int value_rows, int key_dim, int value_dim) {
    const int first = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
    constexpr int kStep = kDecodeThreads / kPieces;  // rows at a time
#pragma unroll
    for (int i = 0; i < kRows; i += kStep) {
      const int row = i + first, t = row / (2 * kDecodeBlock) * kDecodeBlock + row % kDecodeBlock;
      const bool is_key = row % (2 * kDecodeBlock) < kDecodeBlock, there = t < count && 8 * piece < key_dim;
      const int64_t offset = (begin + t) * (is_key ? tokens.k_stride : tokens.q_stride) + 8 * piece;
      const auto* const from = static_cast<const __nv_bfloat16*>(is_key ? tokens.k : tokens.q);
      copy_async(&rows[row][piece ^ (row & 7)], from + (there ? offset : 0), there);
    }
    static_assert(kPieces == kDecodeTile / 8 && kTokens <= kStep);
    if (first < kTokens && 8 * piece < value_rows) {
      const int row = first_row + 8 * piece;
      const bool there = first < count && row < value_dim;
      const int64_t offset = (begin + first) * tokens.v_stride + row;
      copy_async(&values[first][piece], static_cast<const __nv_bfloat16*>(tokens.v) + (there ? offset : 0), there);
    }
  }

  // Numbers of a lane's token, lane % kTokens, and of its pairs: number `lane` and every kWarp-th after it.
  struct LaneGates {
    static constexpr int kPairsOfLane = 2 * kTokens * kTokens / kWarp;  // pairs of changes, then of outputs
    float beta, since, decays[kPairsOfLane];
  };

  // Computes gates and destinations. Each warp computes them for itself, while rows and states are copied. beta is 0
  // for missing tokens.
  __device__ __forceinline__ LaneGates prepare_gates(const DecodePlan& plan, const DecodeTokens& tokens,
                                                     const DecodeStates& states, int n, int64_t begin, int count,
                                                     int64_t slot) {
    OfWarp& here = warps[threadIdx.x / kWarp];
    const int activations = tokens.activations, t = lane() % kTokens;
    const bool there = t < count;
    const GateBits bits = load_gate_bits(tokens.A_log, tokens.dt_bias, activations, as_of_lane(tokens.head));
    uint32_t a = 0, b = 0;
    if (there) {
      a = load_bits(tokens.a, activations, Activation::kG, (begin + t) * tokens.a_stride + tokens.head);
      b = load_bits(tokens.b, activations, Activation::kBeta, (begin + t) * tokens.b_stride + tokens.head);
    }
    if (there && lane() < kTokens) {
      here.destinations[t] = states.destinations<__nv_bfloat16>(plan, n, t, count, slot);
    }
    uint32_t path = (2u << t) - 1;  // the token and its ancestors
    if (plan.parents) {
      const int parent = there ? plan.parent(n, t) : -1;
      path = 1u << t;
      int next = parent;
      for (int i = 1; i < kTokens; ++i) {
        const int grandparent = __shfl_sync(~0u, parent, max(next, 0));
        path |= next >= 0 ? 1u << next : 0;
        next = next >= 0 ? grandparent : next;
      }
    }
    const float g = there ? log_decay(from_bits(a, activations, Activation::kG), bits, activations) : 0.f;
    LaneGates gates_of_lane;
    gates_of_lane.beta = there ? step_size(from_bits(b, activations, Activation::kBeta), activations) : 0.f;
    float gates[kTokens], since = 0.f;
#pragma unroll
    for (int s = 0; s < kTokens; ++s) {
      gates[s] = __shfl_sync(~0u, g, s);
      since += path >> s & 1 ? gates[s] : 0.f;
    }
    gates_of_lane.since = expf(since);
#pragma unroll
    for (int i = 0; i < LaneGates::kPairsOfLane; ++i) {
      const Indices at = pair_of_lane(i);
      const uint32_t of_first = __shfl_sync(~0u, path, at.first);
      float decay = 0.f;
#pragma unroll
      for (int s = 1; s < kTokens; ++s) {
        decay += s > at.second && of_first >> s & 1 ? gates[s] : 0.f;
      }
      gates_of_lane.decays[i] = of_first >> at.second & 1 ? expf(decay) : 0.f;
    }
    return gates_of_lane;
  }

  // Computes `products`, `factors` and `pairs`, once the rows have arrived.
  __device__ __forceinline__ void prepare(const DecodeTokens& tokens, const LaneGates& gates_of_lane) {
    OfWarp& here = warps[threadIdx.x / kWarp];
    multiply_rows(here);
    __syncwarp();
    const int t = lane() % kTokens;
    float key = 1.f, query = tokens.scale;
    if (tokens.normalize) {
      constexpr float kEps = static_cast<float>(kNormEps);
      key = rsqrtf(here.products[key_row(t)][key_row(t)] + kEps);
      query *= rsqrtf(here.products[query_row(t)][query_row(t)] + kEps);
    }
    const float change = gates_of_lane.beta * key * key;
    if (lane() < kTokens) {
      here.factors[kValue][t] = gates_of_lane.beta * key;
      here.factors[kKey][t] = change * gates_of_lane.since;
      here.factors[kQuery][t] = query * gates_of_lane.since;
      here.factors[kSince][t] = gates_of_lane.since;
    }
#pragma unroll
    for (int i = 0; i < LaneGates::kPairsOfLane; ++i) {
      const auto [which, first, second] = pair_of_lane(i);
      const float of_change = __shfl_sync(~0u, change, first), of_output = __shfl_sync(~0u, query, first);
      const float decay = gates_of_lane.decays[i];
      const float product = here.products[which == kChange ? key_row(first) : query_row(first)][key_row(second)];
      // 0 if `second` is no ancestor, even if the product is NaN.
      here.pairs[which][first][second] =
          decay == 0.f ? 0.f : decay * (which == kChange ? of_change : of_output) * product;
      if (which == kChange) {
        here.pairs[kDecay][first][second] = decay;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ const OfWarp& of_warp() const { return warps[threadIdx.x / kWarp]; }
  __device__ __forceinline__ float v(int t, int row) const {
    return to_float(reinterpret_cast<const __nv_bfloat16*>(values[t])[row]);
  }

  // A block's eight rows, transposed, as the right factors of two products: channels 16 step to 16 step + 15, and the
  // next 16.
  __device__ __forceinline__ void load_rows(uint32_t (&x)[4], int block, int step, int lane) const {
    load_matrices(x, piece_of(2 * kDecodeBlock * block + lane % 8, 2 * step + lane / 8));
  }
  // The keys as the right factors of four products with eight channels each, from channel 32 quarter on. Four keys come
  // twice.
  __device__ __forceinline__ void load_keys(uint32_t (&x)[4], int quarter, int lane) const {
    load_matrices_transposed(x, piece_of(key_row(lane % 8 % kTokens), 4 * quarter + lane / 8));
  }

 private:
  struct Indices {
    int which, first, second;  // kChange or kOutput, tokens
  };
  __device__ __forceinline__ static Indices pair_of_lane(int i) {
    const int number = i * kWarp + lane();
    return {number / (kTokens * kTokens), number / kTokens % kTokens, number % kTokens};
  }
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarp; }
  __device__ __forceinline__ static int key_row(int t) {
    return t / kDecodeBlock * 2 * kDecodeBlock + t % kDecodeBlock;
  }
  __device__ __forceinline__ static int query_row(int t) { return key_row(t) + kDecodeBlock; }
  __device__ __forceinline__ uint32_t piece_of(int row, int piece) const {
    return shared_address(&rows[row][piece ^ (row & 7)]);
  }

  // products = rows rows^T. The left factor is all rows, the right factor one block of eight rows after the other.
  __device__ __forceinline__ void multiply_rows(OfWarp& here) const {
    float products[kBlocks][2][4] = {};  // sums of even and odd steps
#pragma unroll
    for (int step = 0; step < K / 16; step += 2) {
      uint32_t x[kBlocks][4];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        load_rows(x[block], block, step, lane());
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t left[4] = {};
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          left[block] = x[block][2 * half];
          left[2 + block] = x[block][2 * half + 1];
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          multiply_add(__nv_bfloat16(), products[block][half], left, x[block][2 * half], x[block][2 * half + 1]);
        }
      }
    }
    const int row = lane() / 4, column = lane() % 4 * 2;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        here.products[i / 2 * 8 + row][8 * block + column + i % 2] = products[block][0][i] + products[block][1][i];
      }
    }
  }
};

constexpr int kMmaRows = 16;  // value rows of a warp: the left factor of its products, from the initial state

// x or, if the factor is 0, 0: the two tokens are then unrelated, and x may be NaN.
__device__ __forceinline__ float seen(float factor, float x) { return factor == 0.f ? 0.f : x; }

template <int kTokens, int K>
class MmaDecoder {
 public:
  using State = __nv_bfloat16;
  using Tokens = MmaTokens<kTokens, K>;
  static constexpr int kPieces = K / 8;   // pieces of a row
  using Tile = uint4[kMmaRows][kPieces];  // shared memory; pieces are swizzled

  // The warp's rows begin at `row` of the CTA's rows.
  __device__ __forceinline__ MmaDecoder(int row, int first_row, int key_dim, int value_dim)
      : lane_(lane_here()), row_(row), first_row_(first_row), K_(key_dim), V_(value_dim) {}

  // Starts asynchronous copies; zeros for channels and rows that the state lacks.
  __device__ __forceinline__ void fetch(Tile& tile, const State* from) const {
    for_all_pieces(tile,
                   [&](uint4& to, int offset, bool there) { copy_async(&to, from + (there ? offset : 0), there); });
  }

  // Computes the products of the fetched state with all keys and queries, and from these the tokens' changes.
  __device__ __forceinline__ void set(const Tile& tile, const Tokens& tokens) {
    float products[kBlocks][2][4] = {};  // sums of even and odd steps
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      load_matrices(S_[step], row_address(tile, step));
      load_matrices(S_[step + 1], row_address(tile, step + 1));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        uint32_t rows[4];
        tokens.load_rows(rows, block, step, lane_);
        multiply_add(State(), products[block][0], S_[step], rows[0], rows[1]);
        multiply_add(State(), products[block][1], S_[step + 1], rows[2], rows[3]);
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        products_[block][i] = products[block][0][i] + products[block][1][i];
      }
    }
    const auto& of = tokens.of_warp();
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float product =
            __shfl_sync(~0u, products_[t / kDecodeBlock][2 * half + t % 2], lane_ / 4 * 4 + t % kDecodeBlock / 2);
        float change = of.factors[Tokens::kValue][t] * tokens.v(t, row_ + 8 * half + lane_ / 4) -
                       of.factors[Tokens::kKey][t] * product;
#pragma unroll
        for (int j = 0; j < t; ++j) {
          const float factor = of.pairs[Tokens::kChange][t][j];
          change -= factor * seen(factor, changes_[half][j]);
        }
        changes_[half][t] = change;
        lane_changes_[half][t % 2] = t < 2 || first_token_of_lane() == t - t % 2 ? change : lane_changes_[half][t % 2];
      }
    }
  }

  // Stores the tokens' outputs. `o` points to the head's row of the first token.
  __device__ __forceinline__ void write_outputs(const Tokens& tokens, State* o, int64_t o_stride, int count) const {
    const auto& of = tokens.of_warp();
    const int row = first_row_ + row_ + lane_ / 4;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const int t = i / 2 * kDecodeBlock + lane_ % 2 * 2 + i % 2;  // used if lane_ % 4 >= 2: these lanes have S q
      float out[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        out[half] = of.factors[Tokens::kQuery][t] * products_[i / 2][2 * half + i % 2];
      }
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        const float factor = of.pairs[Tokens::kOutput][t][j];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          out[half] += factor * seen(factor, changes_[half][j]);
        }
      }
      if (lane_ % 4 >= 2 && t < count) {
        State* const to = o + t * o_stride + row;
        if (row < V_) {
          to[0] = from_float(State(), out[0]);
        }
        if (row + 8 < V_) {
          to[8] = from_float(State(), out[1]);
        }
      }
    }
  }

  // Writes S_t, the state after token t, over the fetched state. The changes are in two parts of 16 bits, high and low.
  __device__ __forceinline__ void make_state(Tile& tile, const Tokens& tokens, int t) const {
    const auto& of = tokens.of_warp();
    // Half of the lanes hold the high parts of the changes, the other half the low parts, if there are four tokens.
    const bool low = kTokens < 8 && lane_ % 4 >= 2;
    const float* const pairs = &of.pairs[Tokens::kDecay][t][first_token_of_lane()];
    const float decays[2] = {pairs[0], pairs[1]};
    const uint32_t there = (decays[0] == 0.f ? 0 : 0xffff) | (decays[1] == 0.f ? 0 : 0xffff0000);
    uint32_t left[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[i] = decays[i] * seen(decays[i], lane_changes_[half][i]);
      }
      const uint32_t high = pack(State(), x[0], x[1]);
      const float2 rounded = unpack(State(), high);
      const uint32_t rest = pack(State(), x[0] - rounded.x, x[1] - rounded.y);
      left[half] = low ? rest : high;
      left[2 + half] = kTokens < 8 ? 0 : rest;
    }
    const float since = of.factors[Tokens::kSince][t];
    __syncwarp();  // all lanes have read the old contents
#pragma unroll
    for (int quarter = 0; quarter < kPieces / 4; ++quarter) {
      uint32_t keys[4];
      tokens.load_keys(keys, quarter, lane_);
#pragma unroll
      for (int step = 2 * quarter; step < 2 * quarter + 2; ++step) {
        uint32_t out[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // halves of the 16 channels
          const float2 x = unpack(State(), S_[step][2 * half]), y = unpack(State(), S_[step][2 * half + 1]);
          float state[4] = {since * x.x, since * x.y, since * y.x, since * y.y};
          const uint32_t key = keys[step % 2 * 2 + half] & there;
          multiply_add(State(), state, left, key, kTokens < 8 ? 0 : key);
          out[2 * half] = pack(State(), state[0], state[1]);
          out[2 * half + 1] = pack(State(), state[2], state[3]);
        }
        store_matrices(row_address(tile, step), out[0], out[1], out[2], out[3]);
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void write(State* to, Tile& tile) const {
    for_all_pieces(tile, [&](const uint4& from, int offset, bool there) {
      if (there) {
        __stcg(reinterpret_cast<uint4*>(to + offset), from);
      }
    });
  }

 private:
  static constexpr int kBlocks = Tokens::kBlocks, kSteps = K / 16;

  // The lane's two tokens in the left factor of make_state are this one and the next.
  __device__ __forceinline__ int first_token_of_lane() const { return 2 * lane_ % kTokens; }
  // The address of the lane's row in the four matrices that hold 16 channels.
  __device__ __forceinline__ uint32_t row_address(const Tile& tile, int step) const {
    const int row = lane_ % kMmaRows, piece = 2 * step + lane_ / kMmaRows;
    return shared_address(&tile[row][piece ^ (row & 7)]);
  }
  // use(place in the tile, offset in a head's state, whether the state has it) for the lane's pieces. Neighbouring
  // lanes have neighbouring pieces.
  template <typename Use>
  __device__ __forceinline__ void for_all_pieces(Tile& tile, Use use) const {
    constexpr int kStep = kWarp / kPieces;  // rows at a time
    const int lane = lane_here(), piece = lane % kPieces, above = lane / kPieces;
    const int row = first_row_ + row_ + above, offset = row * K_ + 8 * piece;
    const int rows = 8 * piece < K_ ? V_ - row : 0;  // rows of the state from `row` on
#pragma unroll
    for (int i = 0; i < kMmaRows; i += kStep) {
      const int in_tile = i + above;
      use(tile[in_tile][piece ^ (in_tile & 7)], offset + i * K_, i < rows);
    }
  }

  const int lane_, row_, first_row_, K_, V_;
  uint32_t S_[kSteps][4];
  float products_[kBlocks][4], changes_[2][kTokens], lane_changes_[2][2];
};

}  // namespace flash_qla::device
