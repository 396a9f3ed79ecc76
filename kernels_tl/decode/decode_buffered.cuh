// One token of a sequence on value rows of a state that lags: the steps that it lacks are in a backlog; see
// decode/decode_buffered.py.
#pragma once

#include "decode/decode_rows.cuh"

namespace flash_qla::device {

static_assert(kDecodeBacklog == kWarp);  // a lane has a step of the backlog

__device__ __forceinline__ Table no_table() { return Table(nullptr, TableKind::kNone, 1); }

// The backlogs of all slots, and a head's place in them. gates points to the value head's part of slot 0, the other two
// to slot 0. Strides go from slot to slot, in elements.
struct DecodeBacklog {
  void *changes, *keys;  // of the element type of k, or fp32
  float* gates;
  int64_t change_stride, key_stride, gate_stride;
  Table positions, flushes;
  int length;     // most steps of a backlog
  int key_head;   // the head of k
  bool is_first;  // whether the value head is the first one of its group, which writes the key
  bool fp32_changes, fp32_keys;

  // The steps of a sequence's backlog. The table may have any number.
  __device__ __forceinline__ int steps(int n) const {
    return static_cast<int>(clamp(positions.fresh(as_of_lane(n)), 0, length - 1));
  }
  __device__ __forceinline__ bool must_flush(int n) const { return flushes && flushes.fresh(as_of_lane(n)) != 0; }

  // Offsets of the first key and of the first change of a head's backlog.
  __device__ __forceinline__ int64_t first_key(int64_t slot, int key_dim) const {
    return slot * key_stride + int64_t{key_head} * length * key_dim;
  }
  __device__ __forceinline__ int64_t first_change(int64_t slot, int head, int value_dim) const {
    return slot * change_stride + int64_t{head} * length * value_dim;
  }
};

// Prefetches a head's backlog into L2, as prefetch_state does with the state. One CTA of the head calls it.
template <typename Element>
__device__ __forceinline__ void prefetch_backlog(const FirstSlots& slots, const DecodeBacklog& backlog, int head, int n,
                                                 int key_dim, int value_dim) {
  if (threadIdx.x != 0) {
    return;
  }
  const int64_t slot = slots(n);
  const int steps = backlog.steps(n);
  if (slot == kNoState || steps == 0) {
    return;
  }
  const auto prefetch = [steps](const void* numbers, bool fp32, int64_t first, int dim) {
    const int size = fp32 ? sizeof(float) : sizeof(Element);
    prefetch_bytes(static_cast<const char*>(numbers) + first * size, steps * dim * size);
  };
  prefetch(backlog.changes, backlog.fp32_changes, backlog.first_change(slot, head, value_dim), value_dim);
  if (backlog.is_first) {
    prefetch(backlog.keys, backlog.fp32_keys, backlog.first_key(slot, key_dim), key_dim);
  }
  const float* const gates = backlog.gates + slot * backlog.gate_stride;
  prefetch_line(gates);
  prefetch_line(gates + steps - 1);
}

// The keys of a backlog, and the token's k and q, in shared memory, as 16-byte pieces of eight elements. Channels after
// a head's last one, and keys after the last one up to a whole tile, are zeros.
template <typename Element, int K>
struct BacklogKeys {
  static constexpr int kTile = 16;         // keys of an mma
  static constexpr int kPieces = K / 8;    // of a row
  static constexpr int kPiecesOfStep = 4;  // of two mmas: one for each of the lanes that share a row
  static constexpr int kRowsTogether = kDecodeThreads / kPieces;  // that all threads copy at a time
  static_assert(kPieces % kPiecesOfStep == 0 && kPieces <= kWarp && 2 * kPieces <= kDecodeThreads);

  uint4 keys[kDecodeBacklog][kPieces];
  uint4 token[2][kPieces];                        // k, q
  static constexpr int kOfKey = 0, kOfQuery = 1;  // rows of `token`

  // Copies the keys of the backlog's steps, and the token. The copies are asynchronous, unless the backlog has fp32
  // keys. All threads of the CTA call it.
  __device__ __forceinline__ void fetch(const DecodeTokens& tokens, const DecodeBacklog& backlog, int64_t slot,
                                        int64_t at, int steps, int key_dim) {
    const int own_row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
    const bool has_channels = 8 * piece < key_dim;
    if (own_row < 2) {
      const auto* const from = own_row == kOfKey ? static_cast<const Element*>(tokens.k) + at * tokens.k_stride
                                                 : static_cast<const Element*>(tokens.q) + at * tokens.q_stride;
      copy_async(&token[own_row][piece], from + (has_channels ? 8 * piece : 0), has_channels);
    }
    const int64_t first = backlog.first_key(slot, key_dim);
    const int end = (steps + kTile - 1) / kTile * kTile;
    const auto for_each_key = [&](auto copy) {  // copy(to, offset, there)
      static_assert(kRowsTogether % 2 == 0);    // so that a thread's rows have one `place`
      uint4* to = &keys[own_row][place(own_row, piece)];
      int offset = has_channels ? own_row * key_dim + 8 * piece : 0;
#pragma unroll 1
      for (int row = own_row; row < end; row += kRowsTogether) {
        const bool there = has_channels && row < steps;
        copy(to, there ? offset : 0, there);
        to += kRowsTogether * kPieces;
        offset += kRowsTogether * key_dim;
      }
    };
    if (backlog.fp32_keys) {
      const float* const from = static_cast<const float*>(backlog.keys) + first;
      for_each_key([&](uint4* to, int offset, bool there) { *to = there ? packed(from + offset) : uint4{}; });
    } else {
      const Element* const from = static_cast<const Element*>(backlog.keys) + first;
      for_each_key([&](uint4* to, int offset, bool there) { copy_async(to, from + offset, there); });
    }
  }

  struct Products {
    float k, q;
  };
  // The products of the lane's key with k and with q; 0 if the backlog has no such key.
  __device__ __forceinline__ Products products(int steps) const {
    Products found = {};
    const int lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (int tile = 0; tile < steps; tile += kTile) {
      float sums[4] = {}, of_lane[4];
      multiply_tile(sums, tile);
      const int from = lane % 8 * 4;  // it has the sums of keys lane % 8 and lane % 8 + 8 of the tile
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of_lane[i] = __shfl_sync(~0u, sums[i], from);
      }
      if (lane / kTile == tile / kTile) {
        found = lane % kTile < 8 ? Products{of_lane[0], of_lane[1]} : Products{of_lane[2], of_lane[3]};
      }
    }
    return found;
  }

  // The channels of a key of the backlog, or of the token's k or q, from `channel` on.
  template <int kCount>
  __device__ __forceinline__ void load_key(float (&key)[kCount], int row, int channel) const {
    load(key, keys[row][place(row, channel / 8)], channel);
  }
  template <int kCount>
  __device__ __forceinline__ void load_token(float (&x)[kCount], int row, int channel) const {
    load(x, token[row][channel / 8], channel);
  }

  // Writes the token's key as a step of the backlog. One warp calls it, after the copies have arrived.
  __device__ __forceinline__ void write(const DecodeBacklog& backlog, int64_t slot, int step, int key_dim) const {
    const int piece = threadIdx.x % kWarp;
    if (8 * piece >= key_dim) {
      return;
    }
    const int64_t to = backlog.first_key(slot, key_dim) + step * key_dim + 8 * piece;
    const uint4 key = token[0][piece];
    if (backlog.fp32_keys) {
      const uint32_t pairs[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        reinterpret_cast<float2*>(static_cast<float*>(backlog.keys) + to)[i] = unpack(Element(), pairs[i]);
      }
    } else {
      *reinterpret_cast<uint4*>(static_cast<Element*>(backlog.keys) + to) = key;
    }
  }

 private:
  template <int kCount>
  __device__ __forceinline__ static void load(float (&x)[kCount], const uint4& piece, int channel) {
    struct alignas(2 * kCount) Pairs {
      uint32_t of[kCount / 2];
    };
    const Pairs pairs = *reinterpret_cast<const Pairs*>(reinterpret_cast<const Element*>(&piece) + channel % 8);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 pair = unpack(Element(), pairs.of[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }

  // Rows begin in the same banks. Two neighbouring rows are read together, so odd rows have their pieces elsewhere.
  __device__ __forceinline__ static int place(int row, int piece) { return piece ^ row % 2 * kPiecesOfStep; }

  __device__ __forceinline__ static uint4 packed(const float* from) {
    const float4 a = __ldcg(reinterpret_cast<const float4*>(from)),
                 b = __ldcg(reinterpret_cast<const float4*>(from) + 1);
    return {pack(Element(), a.x, a.y), pack(Element(), a.z, a.w), pack(Element(), b.x, b.y), pack(Element(), b.z, b.w)};
  }

  // sums = the tile's 16 keys times [k q], as a fragment. Both factors have their channels in the same order: a lane
  // has eight neighbours, where the fragments of two mmas have pairs. Two sums, so that fewer mmas wait for each other.
  __device__ __forceinline__ void multiply_tile(float (&sums)[4], int tile) const {
    const int lane = threadIdx.x % kWarp, row = lane / 4;
    float others[4] = {};
#pragma unroll
    for (int step = 0; step < kPieces / kPiecesOfStep; ++step) {
      const int piece = step * kPiecesOfStep + lane % 4;
      const uint4 right = row < 2 ? token[row][piece] : uint4{};
      const uint4 low = keys[tile + row][place(row, piece)], high = keys[tile + row + 8][place(row, piece)];
      multiply_add(Element(), sums, {low.x, high.x, low.y, high.y}, right.x, right.y);
      multiply_add(Element(), others, {low.z, high.z, low.w, high.w}, right.z, right.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] += others[i];
    }
  }
};

// StateRows, and the changes of the backlog's steps in these rows. The lanes of a row share the steps: each has kTurns.
template <typename Element, typename State, int K>
class LaggingRows : public StateRows<State, K> {
 public:
  using Base = StateRows<State, K>;
  using typename Base::L;
  static constexpr int kTurns = kDecodeBacklog / L::kLanes;
  static_assert(kDecodeBacklog % L::kLanes == 0 && kDecodeWarpRows == 8);

  using Base::Base;

  // Loads the changes of the backlog's first `steps` steps.
  __device__ __forceinline__ void load_changes(const DecodeBacklog& backlog, int64_t slot, int head, int steps) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      alignas(16) float all[kDecodeWarpRows] = {};
      if (const int step = step_of(turn); step < steps && this->row_ < this->V_) {
        const int64_t offset = offset_of(backlog, slot, head, step) + this->row_;
        if (backlog.fp32_changes) {
          const auto* const from = reinterpret_cast<const float4*>(static_cast<const float*>(backlog.changes) + offset);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            reinterpret_cast<float4*>(all)[i] = __ldcg(from + i);
          }
        } else {
          const uint4 piece =
              __ldcg(reinterpret_cast<const uint4*>(static_cast<const Element*>(backlog.changes) + offset));
          const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            reinterpret_cast<float2*>(all)[i] = unpack(Element(), pairs[i]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
#pragma unroll
        for (int above = 0; above < L::kTogether; ++above) {
          if (above == 0 || L::above() == above) {
            d_[turn][r] = all[r * L::kTogether + above];
          }
        }
      }
    }
  }

  // The factors of the change of the lane's step in S k and in S q.
  struct Step {
    float of_change, of_output;
  };
  // The lane's parts of S k in each of its rows, then of S q.
  struct Sums {
    float of[2 * L::kRows];
  };
  // The parts that the backlog adds.
  __device__ __forceinline__ Sums sums_of_changes(const Step& own) const {
    Sums sums = {};
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const float of_change = of_step(own.of_change, turn), of_output = of_step(own.of_output, turn);
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        sums.of[r] += of_change * d_[turn][r];
        sums.of[L::kRows + r] += of_output * d_[turn][r];
      }
    }
    return sums;
  }
  struct Row {
    float change, out;
  };
  // The own row's change and output. S_0 is in `tile`, `decay` is the decay since S_0.
  __device__ __forceinline__ Row advance(const typename Base::Tile& tile, const BacklogKeys<Element, K>& keys,
                                         const TokenFactors& factors, float decay, float beta, float qk, Sums sums,
                                         float v) const {
    float k[L::kChannels], q[L::kChannels];
    keys.load_token(k, keys.kOfKey, L::channel(0));
    keys.load_token(q, keys.kOfQuery, L::channel(0));
    const float of_k = decay * factors.k, of_q = decay * factors.q;
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      float S[L::kChannels];
      Base::unpack_piece(S, tile[r][threadIdx.x % kWarp]);
      sums.of[r] += of_k * L::dot_of_lane(S, k);
      sums.of[L::kRows + r] += of_q * L::dot_of_lane(S, q);
    }
    const float sum = sum_and_scatter<L::kLanes>(sums.of, L::lane());
    const float change = beta * (v - sum);
    return {change, sum + __shfl_xor_sync(~0u, change, L::kLanes / 2) * qk};
  }

  // S = decay S_0 + change k^T + sum of since_i d_i k_i^T over the steps of the backlog
  __device__ __forceinline__ void catch_up(const typename Base::Tile& tile, const BacklogKeys<Element, K>& keys,
                                           float decay, float since, float change, int steps) {
    this->set(tile);
    float key[L::kChannels];
    keys.load_token(key, keys.kOfKey, L::channel(0));
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      const float change_of_row = __shfl_sync(~0u, change, Base::kLanesOfSum * r, L::kLanes);
#pragma unroll
      for (int i = 0; i < L::kChannels; ++i) {
        this->S_[r][i] = decay * this->S_[r][i] + change_of_row * key[i];
      }
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const float of_lane = of_step(since, turn);
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        d_[turn][r] *= of_lane;
      }
#pragma unroll 1
      for (int lane = 0; lane < L::kLanes && turn * L::kLanes + lane < steps; ++lane) {
        keys.load_key(key, turn * L::kLanes + lane, L::channel(0));
#pragma unroll
        for (int r = 0; r < L::kRows; ++r) {
          const float d = __shfl_sync(~0u, d_[turn][r], lane, L::kLanes);
#pragma unroll
          for (int i = 0; i < L::kChannels; ++i) {
            this->S_[r][i] += d * key[i];
          }
        }
      }
    }
  }

  // Writes the changes as a step of the backlog.
  __device__ __forceinline__ void write_changes(const DecodeBacklog& backlog, int64_t slot, int head, int step,
                                                float change) const {
    const int row = this->row_ + Base::own_row();
    if (L::lane() < L::kLanes / 2 && L::lane() % Base::kLanesOfSum == 0 && row < this->V_) {
      const int64_t offset = offset_of(backlog, slot, head, step) + row;
      if (backlog.fp32_changes) {
        static_cast<float*>(backlog.changes)[offset] = change;
      } else {
        static_cast<Element*>(backlog.changes)[offset] = from_float(Element(), change);
      }
    }
  }

 private:
  __device__ __forceinline__ static int step_of(int turn) { return turn * L::kLanes + L::lane(); }
  // x of the lane whose number is step_of(turn).
  __device__ __forceinline__ static float of_step(float x, int turn) {
    return kTurns == 1 ? x : __shfl_sync(~0u, x, step_of(turn));
  }
  __device__ __forceinline__ int64_t offset_of(const DecodeBacklog& backlog, int64_t slot, int head, int step) const {
    return backlog.first_change(slot, head, this->V_) + step * this->V_;
  }

  float d_[kTurns][L::kRows];
};

// The work of one CTA. pool and o point to the head's part of slot 0 and of sequence 0.
template <typename Element, typename State, int K>
__device__ __forceinline__ void decode_buffered(const FirstSlots& slots, const DecodeTokens& tokens,
                                                const DecodeBacklog& backlog, void* pool, int64_t slot_stride,
                                                void* outputs, int64_t o_stride, int n, int first_row, int key_dim,
                                                int value_dim) {
  using Rows = LaggingRows<Element, State, K>;
  __shared__ BacklogKeys<Element, K> keys;
  __shared__ typename Rows::Tile tiles[kDecodeWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int row = first_row + warp * kDecodeWarpRows;
  Rows rows(row, key_dim, value_dim);
  Element* const o = static_cast<Element*>(outputs) + n * o_stride;
  const int steps = backlog.steps(n);
  const bool must_flush = backlog.must_flush(n);
  const int64_t slot = slots(n);
  if (slot == kNoState) {
    return rows.write_output(o, 0.f);
  }

  State* const state = static_cast<State*>(pool) + slot * slot_stride;
  float* const gates = backlog.gates + slot * backlog.gate_stride;
  rows.fetch(tiles[warp], state);
  RawToken<Element, typename Rows::L> raw;
  raw.load(tokens, n, key_dim);
  const int own_row = row + Rows::own_row();
  const float v =
      own_row < value_dim ? to_float(static_cast<const Element*>(tokens.v)[n * tokens.v_stride + own_row]) : 0.f;
  const float g = lane < steps ? __ldcg(gates + lane) : 0.f;
  keys.fetch(tokens, backlog, slot, n, steps, key_dim);
  commit_copies();
  rows.load_changes(backlog, slot, tokens.head, steps);

  TokenFactors factors;
  const auto token = raw.prepare(tokens, factors);
  float decays = expf(g);  // from the lane's step to the backlog's last one
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const float later = __shfl_down_sync(~0u, decays, distance);
    decays *= lane + distance < kWarp ? later : 1.f;
  }
  const float decay = token.decay * __shfl_sync(~0u, decays, 0);
  const float later = __shfl_down_sync(~0u, decays, 1);
  const float since = token.decay * (lane + 1 < kWarp ? later : 1.f);

  wait_for_copies<0>();
  __syncthreads();
  const auto products = keys.products(steps);
  const auto sums = rows.sums_of_changes({since * factors.k * products.k, since * factors.q * products.q});
  const auto own = rows.advance(tiles[warp], keys, factors, decay, token.beta, token.qk, sums, v);
  const float change = factors.k * own.change;
  rows.write_output(o, own.out);
  if (steps == backlog.length - 1 || must_flush) {
    int same_row = row;
    make_opaque(same_row);  // or offsets of rows would be kept in registers from their first use until here
    Rows caught_up(same_row, key_dim, value_dim);
    caught_up.load_changes(backlog, slot, tokens.head, steps);
    caught_up.catch_up(tiles[warp], keys, decay, since, change, steps);
    caught_up.write(state);
    return;
  }
  rows.write_changes(backlog, slot, tokens.head, steps, change);
  if (row == 0) {
    if (lane == 0) {
      gates[steps] = factors.g;
    }
    if (backlog.is_first) {
      keys.write(backlog, slot, steps, key_dim);
    }
  }
}

}  // namespace flash_qla::device
