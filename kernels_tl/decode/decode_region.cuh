// The work of a CTA of decode_region: a token's convolution, delta rule and gated norm; see decode/decode_region.py.
#pragma once

#include "convolution/convolution.cuh"
#include "decode/decode_rows.cuh"
#include "norm/norm_rows.cuh"

namespace flash_qla::device {

// A key head's rows of a tensor of tokens: q or k [K], or v or z [value rows of the group]. Strides are in elements.
struct RegionRows {
  const void* data;
  int64_t token, head;

  // The row of a token.
  template <typename T>
  __device__ __forceinline__ const T* at(int n, int hk) const {
    return static_cast<const T*>(data) + n * token + hk * head;
  }
};

// x / divisor without a division, for x < 2^16; `inverse` is 1 / divisor.
__device__ __forceinline__ int quotient(int x, float inverse) {
  return static_cast<int>((static_cast<float>(x) + 0.5f) * inverse);
}

// The inputs of a call. a and b have their value heads in groups of key heads, `a_head` and `b_head` apart.
struct RegionTokens {
  RegionRows q, k, v, z;
  const void *a, *b;
  int64_t a_token, a_head, b_token, b_head;
  const void *A_log, *dt_bias;
  int activations;
  float scale;
};

// The windows of sequences, [slots, D, columns], each in the slot of the state. Channels and columns have any strides,
// by which a slot's numbers are less than 2^31 apart.
struct RegionWindows {
  void* pool;
  int64_t slot;
  int channel, column, columns;
};

// Weights [D, kConvTaps] and bias [D] or null, as the tokens in dtype and alignment.
constexpr int kConvTaps = 4;
struct RegionFilter {
  const void *weight, *bias;

  __device__ __forceinline__ uint2 taps_of(int channel) const { return static_cast<const uint2*>(weight)[channel]; }
  __device__ __forceinline__ uint16_t bias_of(int channel) const {
    return bias == nullptr ? 0 : static_cast<const uint16_t*>(bias)[channel];
  }
};

// silu of a channel's convolution, from its rows, the token's last, its taps and its bias, all as in memory.
template <typename Element>
__device__ __forceinline__ Element convolve_channel(const uint16_t (&rows)[kConvTaps], uint2 taps, uint16_t bias) {
  const auto number = [](uint32_t bits) { return unpack(Element(), bits).x; };
  RecentRows<kConvTaps, 1> before;
  Filter<kConvTaps, 1> weights;
  const uint32_t pairs[2] = {taps.x, taps.y};
#pragma unroll
  for (int w = 0; w < kConvTaps; ++w) {
    weights.weight[w][0] = element(Element(), pairs[w / 2], w % 2);
  }
  weights.bias[0] = number(bias);
#pragma unroll
  for (int w = 0; w < kConvTaps - 1; ++w) {
    before.rows[w][0] = number(rows[w]);
  }
  const float now[1] = {number(rows[kConvTaps - 1])};
  return from_float(Element(), silu(weights.apply(before, now, 0)));
}

struct RegionNorm {
  const void* weight;       // [V]
  int weight_dtype, lanes;  // that share a head's sum
  GatedNorm gate;
};

struct RegionSizes {
  int H_k, group, K, V;
  float inverse_V;

  __device__ __forceinline__ int values() const { return group * V; }  // value rows of a key head
  // Elements before value row `row` of a key head, in a slot's states.
  __device__ __forceinline__ int64_t in_state(int hk, int row) const {
    return (static_cast<int64_t>(hk) * values() + row) * K;
  }
};

// CTA `rank` of the `ctas` CTAs of a cluster has these value rows of the key head's group, kWaveRows of RegionCta at a
// time.
struct RegionShare {
  int n, hk, rank, ctas, rows;  // rows of a CTA; the last CTAs may have fewer, or none
  float inverse_rows;

  __device__ __forceinline__ int first_row() const { return rank * rows; }
};

// The value rows of a CTA of kWarps warps, their heads, and the norm of a head. Element: dtype of tokens.
template <typename Element, typename State, int K, int kWarps = kDecodeWarps>
struct RegionCta {
  using Rows = StateRows<State, K>;
  static constexpr int kThreads = kWarps * kWarp, kWaveRows = kWarps * kDecodeWarpRows;

  const RegionNorm& norm;
  const RegionSizes& sizes;
  const RegionShare& share;
  const int state_dtype;  // of Float8

  __device__ __forceinline__ static int warp() { return threadIdx.x / kWarp; }
  __device__ __forceinline__ int keys() const { return 2 * sizes.K; }  // channels of q and k
  __device__ __forceinline__ int end_row() const { return min(share.first_row() + share.rows, sizes.values()); }
  // A warp's first row of a wave, as a row of the group. All rows of a warp are of one head, because V is a multiple
  // of their number.
  __device__ __forceinline__ int row_of(int wave) const {
    return share.first_row() + wave * kWaveRows + warp() * kDecodeWarpRows;
  }
  __device__ __forceinline__ int waves() const { return (share.rows + kWaveRows - 1) / kWaveRows; }
  __device__ __forceinline__ int head_of_row(int row) const { return quotient(row, sizes.inverse_V); }
  __device__ __forceinline__ int head_of(int wave) const { return min(head_of_row(row_of(wave)), sizes.group - 1); }
  __device__ __forceinline__ Rows rows_of(int wave) const {
    const int row = row_of(wave), head = head_of(wave);
    return Rows(row - head * sizes.V, sizes.K, sizes.V, state_dtype);
  }
  // Elements before the states of a head of the group, in a slot.
  __device__ __forceinline__ int64_t in_state(int head) const { return sizes.in_state(share.hk, head * sizes.V); }

  // The number of a channel of q or k in the filter and the windows; i counts those of q, then those of k.
  __device__ __forceinline__ int number_of_key(int i) const {
    const bool is_k = i >= sizes.K;
    return ((is_k ? sizes.H_k : 0) + share.hk) * sizes.K + (is_k ? i - sizes.K : i);
  }
  // The same of a value row of the group.
  __device__ __forceinline__ int number_of_row(int row) const {
    return sizes.H_k * keys() + share.hk * sizes.values() + row;
  }

  // Whether the lane is the first of those that StateRows::step gives the output of its own row.
  __device__ __forceinline__ static bool has_output() {
    using L = typename Rows::L;
    return L::lane() >= L::kLanes / 2 && L::lane() % (L::kLanes / (2 * L::kRows)) == 0;
  }
  // The only CTA of its cluster writes o itself, because memcheck reports a send to a cluster of one as invalid.
  __device__ __forceinline__ bool is_alone() const { return share.ctas == 1; }
  // Sends o of a row, rounded, to the CTAs with rows of its head; nothing for rows from end_row() on.
  __device__ __forceinline__ void send_o(float* to, uint64_t* sent, int head, int row, float o) const {
    if (row < end_row()) {
      const float rounded = to_float(from_float(Element(), o));
      if (is_alone()) {
        to[row] = rounded;
        return;
      }
      const int first = quotient(head * sizes.V, share.inverse_rows);
      const int last = quotient((head + 1) * sizes.V - 1, share.inverse_rows);
      for (int rank = first; rank <= last; ++rank) {
        send(to + row, rounded, sent, rank);
      }
    }
  }
  __device__ __forceinline__ void wait_for_o(uint64_t* sent) const {
    if (is_alone()) {
      __syncthreads();
    } else {
      wait_for_sent(sent);
    }
  }
  // Bytes of a token's o that are sent: of the heads that the CTA has rows of.
  __device__ __forceinline__ int bytes_of_o() const {
    if (is_alone()) {
      return 0;
    }
    const int rows = end_row() - share.first_row();
    const int heads = rows <= 0 ? 0 : head_of_row(end_row() - 1) - head_of_row(share.first_row()) + 1;
    return heads * sizes.V * static_cast<int>(sizeof(float));
  }

  // A lane has pieces of 8 channels, one or two by V, as a thread of gated_rms_norm has. o: of a head.
  __device__ __forceinline__ float rstd_of(const float* o) const {
    constexpr int kPiece = 8;
    const int V = sizes.V, lanes = norm.lanes, lane = threadIdx.x & (lanes - 1);
    float squares = 0.f;
    for (int first = lane * kPiece; first < V; first += lanes * kPiece) {
      const float4 pair[2] = {reinterpret_cast<const float4*>(o + first)[0],
                              reinterpret_cast<const float4*>(o + first)[1]};
      const float (&x)[kPiece] = reinterpret_cast<const float (&)[kPiece]>(pair);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        squares += x[i] * x[i];
      }
    }
    for (int bit = 1; bit < lanes; bit *= 2) {
      squares += __shfl_xor_sync(~0u, squares, bit);
    }
    return norm.gate.rstd(squares, sizes.inverse_V);
  }
  // Calls use(row, o of the row, rstd) for the lane's row, if the CTA has it; the warp's 32 rows begin at `row`.
  template <typename Use>
  __device__ __forceinline__ void normalize(const float* o, int row, Use use) const {
    const int lane_row = row + threadIdx.x % kWarp, last = min(row + kWarp, end_row());
#pragma unroll 1
    for (int head = head_of_row(row); head * sizes.V < last; ++head) {
      const float rstd = rstd_of(o + head * sizes.V);
      if (lane_row < last && lane_row >= head * sizes.V && lane_row < (head + 1) * sizes.V) {
        use(lane_row, o[lane_row], rstd);
      }
    }
  }
};

// Shared memory of a CTA. The cluster's CTAs write o of their value rows into `o` of those that have the same head.
template <typename Element, typename Rows, int K, int kValues, int kRows>
struct alignas(16) RegionShared {
  typename Rows::Tile tiles[kDecodeWarps];  // a wave's value rows of the state
  float o[kValues];                         // of the heads that the CTA has rows of
  Element keys[2 * K], v[kRows];            // q, and key_dim elements later k
  float after[kRows];                       // factor of the norm: weight act(z)
  uint16_t window[2 * K][kConvTaps];        // the rows of q and k, the token's last
  uint64_t sent;                            // barrier: o is complete
};

template <typename Element, typename State, int K, int kValues, int kRows>
struct DecodeRegion : RegionCta<Element, State, K> {
  using Cta = RegionCta<Element, State, K>;
  using typename Cta::Rows;
  using Shared = RegionShared<Element, Rows, K, kValues, kRows>;
  using Cta::norm, Cta::share, Cta::sizes, Cta::warp, Cta::keys, Cta::end_row, Cta::row_of, Cta::head_of, Cta::rows_of;

  const FirstSlots& slots;
  const RegionTokens& tokens;
  const RegionWindows& windows;
  const RegionFilter& filter;
  State* const pool;  // slot 0
  const int64_t slot_stride;
  Element* const y;  // the key head's rows of the sequence
  Shared& shared;

  __device__ __forceinline__ void run() const {
    const int64_t slot = slots(share.n);
    if (threadIdx.x == 0) {
      expect_sent(&shared.sent, slot == kNoState ? 0 : Cta::bytes_of_o());
    }
    arrive_at_cluster();
    RoundInputs inputs;
    load_tokens(inputs, 0);
    if (slot == kNoState) {
      for (int row = share.first_row() + threadIdx.x; row < end_row(); row += kDecodeThreads) {
        y[row] = from_float(Element(), 0.f);
      }
      wait_for_cluster();
      return;
    }
    fetch(slot, 0);
    load_windows(inputs, 0, slot);
    const Gates gates = load_gates(head_of(0));
    convolve(inputs, 0, slot);
    const int rounds = (max(keys(), kKeysOfThread * share.rows) + kKeysOfRound - 1) / kKeysOfRound;
#pragma unroll 1
    for (int round = 1; round < rounds; ++round) {
      load_tokens(inputs, round);
      load_windows(inputs, round, slot);
      convolve(inputs, round, slot);
    }
    __syncthreads();
    wait_for_cluster();  // the barriers of all CTAs are there
    arrive_at_cluster();
    decode(gates, slot);
    Cta::wait_for_o(&shared.sent);
    write_y();
    wait_for_cluster();  // all have read the windows
    write_windows(slot);
  }

 private:
  struct Gates {
    uint32_t a, b;
    GateBits bits;
  };

  __device__ __forceinline__ State* state_of(int64_t slot, int head) const {
    return pool + slot * slot_stride + Cta::in_state(head);
  }
  // A lane copies its own part of a wave's rows, so it waits for its own copies only.
  __device__ __forceinline__ void fetch(int64_t slot, int wave) const {
    rows_of(wave).fetch(shared.tiles[warp()], state_of(slot, head_of(wave)));
    commit_copies();
  }
  __device__ __forceinline__ Gates load_gates(int head) const {
    head = as_of_lane(head);
    const int value_head = share.hk * sizes.group + head, activations = tokens.activations;
    Gates gates;
    gates.a =
        load_bits(tokens.a, activations, Activation::kG, share.n * tokens.a_token + share.hk * tokens.a_head + head);
    gates.b =
        load_bits(tokens.b, activations, Activation::kBeta, share.n * tokens.b_token + share.hk * tokens.b_head + head);
    gates.bits = load_gate_bits(tokens.A_log, tokens.dt_bias, activations, value_head);
    return gates;
  }

  // The convolution. In a round a thread has kKeysOfThread channels of q and k, kDecodeThreads apart, and a value row.
  static constexpr int kKeysOfThread = 2, kKeysOfRound = kKeysOfThread * kDecodeThreads;

  // A channel: its part of the token, its number there, and its number in the filter and the windows.
  struct Channel {
    const Element* x;  // the token's number
    int at, number;
    bool is_there;
  };
  __device__ __forceinline__ Channel key_channel(int i) const {
    const bool is_k = i >= sizes.K;
    const int at = is_k ? i - sizes.K : i;
    const Element *q = tokens.q.template at<Element>(share.n, share.hk),
                  *k = tokens.k.template at<Element>(share.n, share.hk);
    return {(is_k ? k : q) + at, at, Cta::number_of_key(i), i < keys()};
  }
  __device__ __forceinline__ Channel value_channel(int round) const {
    const int at = share.first_row() + value_of(round);
    return {tokens.v.template at<Element>(share.n, share.hk) + at, at, Cta::number_of_row(at), at < end_row()};
  }
  // The thread's numbers in a round: of its i-th channel among q and k, and of its value row among those of the CTA.
  __device__ __forceinline__ static int key_of(int round, int i) {
    return round * kKeysOfRound + i * kDecodeThreads + threadIdx.x;
  }
  __device__ __forceinline__ static int value_of(int round) { return round * kDecodeThreads + threadIdx.x; }

  // Numbers as they are in memory. They are converted later, so that all loads are in flight at once.
  struct ChannelInputs {
    uint16_t rows[kConvTaps];  // of the window, and the token's
    uint2 taps;
    uint16_t bias;
  };
  struct RoundInputs {
    ChannelInputs keys[kKeysOfThread], value;
    uint32_t z, weight;  // of the norm
  };

  template <typename Use>
  __device__ __forceinline__ void for_channels(RoundInputs& all, int round, Use use) const {
#pragma unroll
    for (int i = 0; i < kKeysOfThread; ++i) {
      if (const Channel c = key_channel(key_of(round, i)); c.is_there) {
        use(all.keys[i], c);
      }
    }
    if (const Channel c = value_channel(round); c.is_there) {
      use(all.value, c);
    }
  }
  __device__ __forceinline__ void load_tokens(RoundInputs& all, int round) const {
    for_channels(all, round, [&](ChannelInputs& inputs, const Channel& c) {
      inputs.rows[kConvTaps - 1] = *reinterpret_cast<const uint16_t*>(c.x);
      inputs.taps = filter.taps_of(c.number);
      inputs.bias = filter.bias_of(c.number);
    });
    if (const Channel c = value_channel(round); c.is_there) {
      all.z = load_bits(tokens.z.template at<Element>(share.n, share.hk) + c.at);
      all.weight = load_bits(norm.weight, norm.weight_dtype, 0, c.at - Cta::head_of_row(c.at) * sizes.V);
    }
  }
  __device__ __forceinline__ void load_windows(RoundInputs& all, int round, int64_t slot) const {
    for_channels(all, round, [&](ChannelInputs& inputs, const Channel& c) {
      const uint16_t* const window = window_of(slot, c.number) + (windows.columns - (kConvTaps - 1)) * windows.column;
#pragma unroll
      for (int w = 0; w < kConvTaps - 1; ++w) {
        inputs.rows[w] = window[w * windows.column];
      }
    });
  }
  // A channel's window.
  __device__ __forceinline__ uint16_t* window_of(int64_t slot, int channel) const {
    return static_cast<uint16_t*>(windows.pool) + slot * windows.slot + channel * windows.channel;
  }

  // The windows of v have no other reader, so they are written here.
  __device__ __forceinline__ void convolve(const RoundInputs& all, int round, int64_t slot) const {
#pragma unroll
    for (int i = 0; i < kKeysOfThread; ++i) {
      if (const int key = key_of(round, i); key < keys()) {
        shared.keys[key] = convolved(all.keys[i]);
        const uint16_t (&rows)[kConvTaps] = all.keys[i].rows;
        reinterpret_cast<uint2&>(shared.window[key]) = {rows[0] | static_cast<uint32_t>(rows[1]) << 16,
                                                        rows[2] | static_cast<uint32_t>(rows[3]) << 16};
      }
    }
    if (const Channel c = value_channel(round); c.is_there) {
      const int row = value_of(round);
      shared.v[row] = convolved(all.value);
      const float z = number(all.z), weight = from_bits(all.weight, norm.weight_dtype, 0);
      shared.after[row] = weight * norm.gate(z, GatedNorm::power(z));
      write_window(slot, c.number, all.value.rows);
    }
  }
  __device__ __forceinline__ static float number(uint32_t bits) { return unpack(Element(), bits).x; }
  __device__ __forceinline__ static Element convolved(const ChannelInputs& inputs) {
    return convolve_channel<Element>(inputs.rows, inputs.taps, inputs.bias);
  }
  // Writes the last rows of a channel, as many as the window has columns.
  __device__ __forceinline__ void write_window(int64_t slot, int channel, const uint16_t (&rows)[kConvTaps]) const {
    uint16_t* const window = window_of(slot, channel);
#pragma unroll
    for (int w = 0; w < kConvTaps; ++w) {
      if (const int column = w - (kConvTaps - windows.columns); column >= 0) {
        window[column * windows.column] = rows[w];
      }
    }
  }
  // The windows of q and k, a part of their channels for each CTA of the cluster.
  __device__ __forceinline__ void write_windows(int64_t slot) const {
    for (int i = share.rank * kDecodeThreads + threadIdx.x; i < keys(); i += share.ctas * kDecodeThreads) {
      const uint2 pairs = reinterpret_cast<const uint2&>(shared.window[i]);
      const uint16_t rows[kConvTaps] = {static_cast<uint16_t>(pairs.x), static_cast<uint16_t>(pairs.x >> 16),
                                        static_cast<uint16_t>(pairs.y), static_cast<uint16_t>(pairs.y >> 16)};
      write_window(slot, key_channel(i).number, rows);
    }
  }

  // The recurrence on the CTA's value rows, of which a warp has kDecodeWarpRows at a time. q and k come from shared
  // memory, in the form of decode's token.
  __device__ __forceinline__ void decode(Gates gates, int64_t slot) const {
    using L = typename Rows::L;
    const DecodeTokens of_head = {.q = shared.keys,
                                  .k = shared.keys + sizes.K,
                                  .v = nullptr,
                                  .a = nullptr,
                                  .b = nullptr,
                                  .q_stride = 0,
                                  .k_stride = 0,
                                  .v_stride = 0,
                                  .a_stride = 0,
                                  .b_stride = 0,
                                  .head = 0,
                                  .A_log = nullptr,
                                  .dt_bias = nullptr,
                                  .activations = tokens.activations,
                                  .scale = tokens.scale,
                                  .normalize = true,
                                  .dtype = 0};
    RawToken<Element, L> raw;
    raw.load_keys(of_head, 0, sizes.K);
    LaneToken<L::kChannels> token = raw.prepare_keys(of_head);
    const int waves = Cta::waves();
#pragma unroll 1
    for (int wave = 0; wave < waves; ++wave) {
      token.decay =
          expf(log_decay(from_bits(gates.a, tokens.activations, Activation::kG), gates.bits, tokens.activations));
      token.beta = step_size(from_bits(gates.b, tokens.activations, Activation::kBeta), tokens.activations);
      const int head = head_of(wave);
      Rows rows = rows_of(wave);
      Rows::await();
      rows.set(shared.tiles[warp()]);
      if (wave + 1 < waves) {
        fetch(slot, wave + 1);
        gates = load_gates(head_of(wave + 1));
      }
      const int lane_row = row_of(wave) + Rows::lane_row();
      const float v = lane_row < end_row() ? to_float(shared.v[lane_row - share.first_row()]) : 0.f;
      const float out = rows.step(token, v);
      rows.write(state_of(slot, head));
      Cta::send_o(shared.o, &shared.sent, head, Cta::has_output() ? lane_row : end_row(), out);
    }
  }

  // The norm of the CTA's value rows.
  __device__ __forceinline__ void write_y() const {
    const int first_row = share.first_row();
    for (int row = first_row + warp() * kWarp; row < end_row(); row += kDecodeThreads) {
      Cta::normalize(shared.o, row, [&](int lane_row, float o, float rstd) {
        y[lane_row] = from_float(Element(), o * (rstd * shared.after[lane_row - first_row]));
      });
    }
  }
};

// Prefetches a CTA's value rows of the initial states, as prefetch_state does.
template <typename State>
__device__ __forceinline__ void prefetch_region_state(const FirstSlots& slots, const void* pool, int64_t slot_stride,
                                                      const RegionSizes& sizes, const RegionShare& share) {
  const int first = share.first_row(), rows = min(share.rows, sizes.values() - first);
  if (threadIdx.x == 0 && rows > 0) {
    if (const int64_t slot = slots(share.n); slot != kNoState) {
      const State* const from = static_cast<const State*>(pool) + slot * slot_stride + sizes.in_state(share.hk, first);
      prefetch_bytes(from, rows * sizes.K * static_cast<int>(sizeof(State)));
    }
  }
}

template <typename Element, typename State, int K, int kValues, int kRows>
__device__ __forceinline__ void decode_region(const FirstSlots& slots, const RegionTokens& tokens,
                                              const RegionWindows& windows, const RegionFilter& filter,
                                              const RegionNorm& norm, const RegionSizes& sizes,
                                              const RegionShare& share, void* pool, int64_t slot_stride,
                                              int state_dtype, void* y, void* shared) {
  // The key head's rows of y.
  Element* const y_rows =
      static_cast<Element*>(y) + (static_cast<int64_t>(share.n) * sizes.H_k + share.hk) * sizes.values();
  DecodeRegion<Element, State, K, kValues, kRows>{
      {norm, sizes, share, state_dtype},
      slots,
      tokens,
      windows,
      filter,
      static_cast<State*>(pool),
      slot_stride,
      y_rows,
      *static_cast<typename DecodeRegion<Element, State, K, kValues, kRows>::Shared*>(shared)}
      .run();
}

}  // namespace flash_qla::device
