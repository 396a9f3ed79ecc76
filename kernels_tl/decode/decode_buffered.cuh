// One token of a sequence on value rows of a state with deferred writes. The replay buffer has the steps that the state
// lacks; see decode/decode_buffered.py.
#pragma once

#include "decode/decode_buffered_mma.cuh"

namespace flash_qla::device {

// StateRows of such a state, multiplied in fp32. A CTA always has four parts of eight rows, one for each warp.
template <typename Element, typename State, int K>
class LaggingRows : public StateRows<State, K> {
 public:
  using Base = StateRows<State, K>;
  using typename Base::L;
  static constexpr int kRows = kDecodeWarpRows;       // rows of a part
  static constexpr int kTileRows = kDecodeGroupRows;  // rows of a CTA
  using Token = TokenRows<Element, K, kTileRows>;
  using Keys = BacklogKeys<Element, K>;
  using Changes = BacklogChanges<Element, kRows>;
  using Tile = State[kTileRows * K];  // S_0 in shared memory: rows are as in memory

  __device__ __forceinline__ LaggingRows(int first_row, int key_dim, int value_dim, int)
      : Base(first_row + part() * kRows, key_dim, value_dim) {}

  __device__ __forceinline__ static int part() { return threadIdx.x / kWarp; }
  __device__ __forceinline__ static bool multiplies() { return true; }
  __device__ __forceinline__ static int lane_row_in_tile() { return part() * kRows + Base::lane_row(); }
  // The lane's own row. The first half of the lanes that share rows hold changes, the other half outputs.
  __device__ __forceinline__ int lane_row() const { return this->row_ + Base::lane_row(); }
  __device__ __forceinline__ bool has_change() const {
    return L::lane() < L::kLanes / 2 && L::lane() % Base::kLanesOfSum == 0 && lane_row() < this->V_;
  }

  // The lane's part of S_0 k in each of its rows, then of S_0 q. The factors of k and q are not applied yet.
  using Products = float[2 * L::kRows];
  __device__ __forceinline__ void multiply(Products& products, const Tile& tile, const Token& token) const {
    if (L::channel(0) < this->K_) {
      float k[L::kChannels], q[L::kChannels];
      token.load(k, token.kKey, L::channel(0));
      token.load(q, token.kQuery, L::channel(0));
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        float S[L::kChannels];
        Base::unpack_piece(State(), S, piece(tile, r));
        products[r] = L::dot_of_lane(S, k);
        products[L::kRows + r] = L::dot_of_lane(S, q);
      }
    }
  }

  struct Row {
    float change, out;
  };
  // The own row's change and output. `products` are the lane's parts of S_0 k and S_0 q. The lanes that share rows
  // share the steps: each lane adds its own steps to its part of the sums.
  __device__ __forceinline__ Row advance(const Products& products, const Changes& changes,
                                         const BacklogFactors& factors, const LaggingToken& token, int steps,
                                         float v) const {
    Products sums;
#pragma unroll
    for (int i = 0; i < 2 * L::kRows; ++i) {
      sums[i] = token.decay * products[i];
    }
#pragma unroll
    for (int first = 0; first < kDecodeBacklog; first += L::kLanes) {
      if (const int step = first + L::lane(); step < steps) {
        float d[L::kRows];
        load(d, changes, step);
        const float2 factor = factors.of_sums(step);
#pragma unroll
        for (int r = 0; r < L::kRows; ++r) {
          sums[r] += factor.x * d[r];
          sums[L::kRows + r] += factor.y * d[r];
        }
      }
    }
    const bool of_query = L::lane() >= L::kLanes / 2;
    const float sum = sum_and_scatter<L::kLanes>(sums, L::lane()) * (of_query ? token.query : token.key);
    const float change = token.beta * (v - sum);
    return {change, sum + __shfl_xor_sync(~0u, change, L::kLanes / 2) * token.qk};
  }

  // Writes decay S_0 + change k^T + sum of c_i d_i k_i^T over the steps of the replay buffer.
  __device__ __forceinline__ void flush(State* state, const Tile& tile, const Token& token, const Keys& keys,
                                        const Changes& changes, const BacklogFactors& factors, float decay,
                                        float change, int steps) {
    float key[L::kChannels];
    token.load(key, token.kKey, channel());
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      const float change_of_row = __shfl_sync(~0u, change, Base::kLanesOfSum * r, L::kLanes);
      Base::unpack_piece(State(), this->S_[r], piece(tile, r));
#pragma unroll
      for (int i = 0; i < L::kChannels; ++i) {
        this->S_[r][i] = decay * this->S_[r][i] + change_of_row * key[i];
      }
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      keys.load(key, step, channel());
      float d[L::kRows];
      load(d, changes, step);
      const float since = factors.of_state(step);
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        d[r] *= since;
#pragma unroll
        for (int i = 0; i < L::kChannels; ++i) {
          this->S_[r][i] += d[r] * key[i];
        }
      }
    }
    this->write(state);
  }

 private:
  static_assert(L::kPieces == 1);

  // The lane's first channel. A lane without channels reads channel 0, and writes nothing.
  __device__ __forceinline__ int channel() const { return L::channel(0) < this->K_ ? L::channel(0) : 0; }
  __device__ __forceinline__ uint4 piece(const Tile& tile, int r) const {
    const int row = part() * kRows + r * L::kTogether + L::row_of_group();
    return *reinterpret_cast<const uint4*>(tile + row * this->K_ + channel());
  }
  // The changes of a step in the lane's rows.
  __device__ __forceinline__ void load(float (&d)[L::kRows], const Changes& changes, int step) const {
    float all[kRows];
    changes.load(all, step, 0);
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
#pragma unroll
      for (int above = 0; above < L::kTogether; ++above) {
        if (above == 0 || L::row_of_group() == above) {
          d[r] = all[r * L::kTogether + above];
        }
      }
    }
  }
};

// The memory that a token of a head writes: its state in the pool, from slot 0 on, and its output, from sequence 0 on.
// Strides are in elements.
struct LaggingOutputs {
  void* pool;
  int64_t slot_stride;
  void* o;
  int64_t o_stride;
};

// The work of one CTA, which has `parts` parts of Rows::kRows value rows. `loaded` waits for two arrivals,
// `keys_loaded` for one.
template <typename Element, typename State, int K, typename Barrier>
__device__ __forceinline__ void decode_buffered(Barrier& loaded, Barrier& keys_loaded, const FirstSlots& slots,
                                                const DecodeTokens& tokens, const DecodeBacklog& backlog,
                                                const LaggingOutputs& outputs, int n, int first_row, int parts,
                                                int key_dim, int value_dim) {
  using Rows =
      std::conditional_t<std::is_same_v<Element, State>, MmaLaggingRows<Element, K>, LaggingRows<Element, State, K>>;
  alignas(128) __shared__ typename Rows::Tile tile;
  alignas(16) __shared__ typename Rows::Token token_rows;
  alignas(16) __shared__ typename Rows::Keys::Shared shared_keys;
  __shared__ typename Rows::Changes::Shared shared_changes[kDecodeWarps];
  __shared__ BacklogFactors factors;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool has_gates = warp == factors.kGatesWarp;
  const Rows rows(first_row, key_dim, value_dim, parts);
  const int row_count = min(parts * Rows::kRows, value_dim - first_row);
  Element* const o = static_cast<Element*>(outputs.o) + n * outputs.o_stride;

  const SequenceEntries entries(slots, backlog, n);
  LaggingGates raw;
  if (has_gates) {
    raw.load(tokens, n);
  }
  if (threadIdx.x == kWarp) {
    token_rows.fetch(loaded, tokens, n, first_row, row_count, key_dim);
  }
  const int64_t slot = entries.slot(slots, n);
  const int steps = entries.steps(backlog);
  const bool flush = steps == backlog.length - 1 || entries.must_flush();
  State* const state = static_cast<State*>(outputs.pool) + slot * outputs.slot_stride;
  const typename Rows::Keys keys(shared_keys, backlog, slot, steps, key_dim);
  if (threadIdx.x == 0) {
    const int bytes = slot == kNoState ? 0 : row_count * key_dim * static_cast<int>(sizeof(State));
    loaded.arrive_and_expect_tx(bytes);
    if (bytes > 0) {
      copy_bytes(tile, 0, state + first_row * key_dim, bytes, loaded);
    }
  }
  if (slot == kNoState) {
    loaded.wait(0);  // a CTA must not end before its copies
    return rows.write_output(o, 0.f);
  }
  if (threadIdx.x == 2 * kWarp) {
    keys.fetch(keys_loaded);
  }
  __syncwarp();
  const typename Rows::Changes changes(shared_changes[rows.part()], backlog, slot, tokens.head, steps, value_dim);
  if (rows.multiplies()) {
    changes.fetch(first_row + rows.part() * Rows::kRows);
  }
  if (has_gates) {
    float* const gates = backlog.gates + slot * backlog.gate_stride;
    const float of_step = lane < steps ? __ldcg(gates + lane) : 0.f, g = raw.g(tokens.activations);
    factors.set_decays(expf(g), raw.beta(tokens.activations), of_step);
    if (first_row == 0 && lane == 0 && !flush) {
      gates[steps] = g;
    }
  }
  keys.convert();
  loaded.wait(0);
  keys_loaded.wait(0);
  factors.set_products(keys, token_rows, steps, key_dim);
  typename Rows::Products products = {};
  if (rows.multiplies()) {
    rows.multiply(products, tile, token_rows);
  }
  changes.await();
  __syncthreads();
  const LaggingToken token = factors.token(tokens);
  float change = 0.f;
  if (rows.multiplies()) {
    const auto row = rows.advance(products, changes, factors, token, steps, token_rows.v(rows.lane_row_in_tile()));
    change = token.key * row.change;
    rows.write_output(o, row.out);
  }
  if (flush) {
    int same_row = first_row;
    make_opaque(same_row);  // otherwise the compiler keeps the rows' offsets in registers from their first use to here
    return Rows(same_row, key_dim, value_dim, parts)
        .flush(state, tile, token_rows, keys, changes, factors, token.decay, change, steps);
  }
  if (rows.has_change()) {
    changes.write(rows.lane_row(), change);
  }
  if (first_row == 0 && warp == 0 && backlog.is_first) {
    keys.write(token_rows);
  }
}

}  // namespace flash_qla::device
