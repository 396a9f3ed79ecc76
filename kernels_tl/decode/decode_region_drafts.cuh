// The work of a CTA of decode_region_drafts: a few tokens through convolution, delta rule and gated norm; see
// decode/decode_region_drafts.py.
#pragma once

#include "decode/decode_region.cuh"

namespace flash_qla::device {

// The windows of a call with drafts: a pool, with slots as those of states, and kept windows [rows, steps, D, W - 1],
// one step for each token. Channels and columns have any strides, by which a slot's numbers are less than 2^31 apart.
// Rows of `accepted` make the pool's windows those of drafts (see WindowColumns).
struct DraftWindows {
  RegionWindows pool;
  void* kept;
  int64_t row, step;
  int channel, column, rows, steps;

  __device__ __forceinline__ uint16_t* kept_at(int64_t row_of_sequence, int token, int number) const {
    return static_cast<uint16_t*>(kept) + row_of_sequence * row + token * step + number * channel;
  }
};

// The columns of a slot's window that a sequence starts from, and those that it writes.
struct WindowColumns {
  bool is_of_drafts;  // [the last W - 2 rows before the tokens, the tokens]; else the last rows
  int first;          // column of the first of the W - 1 rows that the tokens follow

  __device__ __forceinline__ WindowColumns(const FirstSlots& slots, int64_t accepted, int columns)
      : is_of_drafts(static_cast<bool>(slots.accepted)),
        first(is_of_drafts ? static_cast<int>(clamp(accepted, 1, columns - (kConvTaps - 2))) - 1
                           : columns - (kConvTaps - 1)) {}
};

// Shared memory of a CTA. A row has a token's q, key_dim elements later k; or the CTA's value rows.
template <typename Element, typename State, typename Rows, int K, int kWarps, int kValues, int kRows>
struct alignas(16) DraftShared {
  typename Rows::Tile tiles[kWarps];                                 // a wave's value rows of the state
  float o[kDecodeTokens][kValues];                                   // of the heads that the CTA has rows of
  Element keys[kDecodeTokens][2 * K], values[kDecodeTokens][kRows];  // mixed
  Element z[kDecodeTokens][kRows];
  Element x_keys[kDecodeTokens][2 * K], x_values[kDecodeTokens][kRows];  // after the convolution
  uint16_t window[2 * K + kRows][kConvTaps];                      // the rows before the tokens, of q, k and value rows
  float norm_weight[kRows];                                       // of the value rows
  DecodeStates::Destinations<State> destinations[kDecodeTokens];  // of states after tokens, in slots or kept
  float q_factors[kDecodeTokens], k_factors[kDecodeTokens], qk[kDecodeTokens];
  int before[kDecodeTokens][kConvTaps - 1];  // the rows before a token, see row_before
  uint64_t sent;                             // barrier: o is complete
};

template <typename Element, typename State, int K, int kWarps, int kValues, int kRows>
struct DecodeDrafts : RegionCta<Element, State, K, kWarps> {
  using Cta = RegionCta<Element, State, K, kWarps>;
  using typename Cta::Rows;
  using Shared = DraftShared<Element, State, Rows, K, kWarps, kValues, kRows>;
  static constexpr int kThreads = Cta::kThreads;
  using Cta::norm, Cta::share, Cta::sizes, Cta::warp, Cta::keys, Cta::end_row, Cta::row_of, Cta::head_of, Cta::rows_of;

  const DecodePlan& plan;
  const RegionTokens& tokens;
  const DraftWindows& windows;
  const RegionFilter& filter;
  const DecodeStates& states;  // of value head 0
  Element* const y;            // the key head's rows of token 0
  const int64_t y_token;       // elements from a token's rows of y to the next one's
  const int N;
  Shared& shared;

  __device__ __forceinline__ void run() const {
    const int n = share.n, in_sequence = plan.count(n), count = min(in_sequence, kDecodeTokens);
    const int64_t begin = plan.begin(n);
    fetch_tokens(begin, count);
    // Both loads are in flight together.
    const FirstSlots& slots = plan.first_slots;
    const int64_t accepted = slots.accepted ? slots.accepted.fresh(n) : 1;
    const int64_t first_index = slots.indices ? slots.indices.fresh(n) : n;
    const WindowColumns columns(slots, accepted, windows.pool.columns);
    const int64_t window_slot = slot_of(first_index);
    const int64_t slot = count > 0 ? first_slot(accepted, first_index) : kNoState;
    if (threadIdx.x == 0) {
      expect_sent(&shared.sent, slot == kNoState ? 0 : count * Cta::bytes_of_o());
    }
    arrive_at_cluster();
    clear(slot == kNoState ? begin : begin + count, begin + in_sequence);
    if (plan.offsets && n == N - 1) {  // rows after the last sequence
      clear(begin + in_sequence, plan.tokens);
    }
    if (slot == kNoState) {
      wait_for_copies<0>();
      wait_for_cluster();
      return;
    }
    fetch(slot, 0);
    const Gates gates = load_gates(begin, count, head_of(0));
    const Channels channels = load_channels(columns, window_slot);
    const uint32_t norm_weight = load_norm_weight();
    list_tokens(count, slot);
    set_windows(channels);
    set_norm_weight(norm_weight);
    wait_for_copies<1>();  // the tokens'
    __syncthreads();
    convolve(count, channels);
    __syncthreads();
    prepare_keys(count);
    __syncthreads();
    wait_for_cluster();  // the barriers of all CTAs are there
    arrive_at_cluster();
    decode(begin, count, gates, slot);
    write_windows(count, columns, window_slot);  // behind the states' stores, which take longest
    Cta::wait_for_o(&shared.sent);
    write_y(begin, count);
    wait_for_cluster();  // all have read the windows
#pragma unroll 1
    for (int i = share.rank * kThreads + threadIdx.x; has_windows() && i < keys(); i += share.ctas * kThreads) {
      write_window(count, columns, window_slot, i);
    }
  }

 private:
  // A lane has the gates of a token.
  struct Gates {
    uint32_t a = 0, b = 0;
    GateBits bits;
  };

  __device__ __forceinline__ bool has_windows() const { return filter.weight != nullptr; }
  // The CTA's value rows, in its arrays.
  __device__ __forceinline__ int cta_rows() const { return max(end_row() - share.first_row(), 0); }
  // Whether the thread has a value row of its own: that of its number.
  __device__ __forceinline__ bool has_row() const {
    static_assert(kRows <= kThreads);
    return static_cast<int>(threadIdx.x) < cta_rows();
  }

  __device__ __forceinline__ void clear(int64_t begin, int64_t end) const {
#pragma unroll 1
    for (int64_t t = begin; t < end; ++t) {
      if (has_row()) {
        y[t * y_token + share.first_row() + threadIdx.x] = from_float(Element(), 0.f);
      }
    }
  }

  // Starts asynchronous copies of the tokens' rows. Neighbouring threads have a token's pieces of 16 bytes, one each.
  __device__ __forceinline__ void fetch_tokens(int64_t begin, int count) const {
    constexpr int kPiece = 16 / sizeof(Element), kOfToken = kThreads / kDecodeTokens;
    static_assert(K <= kOfToken * kPiece && kRows <= kOfToken * kPiece);
    const int t = threadIdx.x / kOfToken, i = threadIdx.x % kOfToken * kPiece;
    const auto fetch_row = [&](Element* to, const RegionRows& rows, int first, int channels) {
      const Element* const from =
          static_cast<const Element*>(rows.data) + (begin + t) * rows.token + share.hk * rows.head + first;
      if (t < count && i < channels) {
        copy_async(reinterpret_cast<uint4*>(to + i), from + i, true);
      }
    };
    fetch_row(shared.keys[t], tokens.q, 0, sizes.K);
    fetch_row(shared.keys[t] + sizes.K, tokens.k, 0, sizes.K);
    fetch_row(shared.values[t], tokens.v, share.first_row(), cta_rows());
    fetch_row(shared.z[t], tokens.z, share.first_row(), cta_rows());
    commit_copies();
  }
  // A lane copies its own part of a wave's rows, so it waits for its own copies only.
  __device__ __forceinline__ void fetch(int64_t slot, int wave) const {
    const State* const pool = static_cast<const State*>(states.pool);
    rows_of(wave).fetch(shared.tiles[warp()], pool + slot * states.slot_stride + Cta::in_state(head_of(wave)));
    commit_copies();
  }

  __device__ __forceinline__ Gates load_gates(int64_t begin, int count, int head) const {
    const int t = threadIdx.x % kWarp, activations = tokens.activations;
    Gates gates;
    if (t < count) {
      const auto at = [&](int64_t token, int64_t of_head) { return (begin + t) * token + share.hk * of_head + head; };
      gates.a = load_bits(tokens.a, activations, Activation::kG, at(tokens.a_token, tokens.a_head));
      gates.b = load_bits(tokens.b, activations, Activation::kBeta, at(tokens.b_token, tokens.b_head));
    }
    gates.bits = load_gate_bits(tokens.A_log, tokens.dt_bias, activations, as_of_lane(share.hk * sizes.group + head));
    return gates;
  }

  // The sequence's window is in the slot of column 0 of its row of state_indices. Its state starts from another column,
  // if drafts were accepted.
  __device__ __forceinline__ int64_t slot_of(int64_t index) const {
    return plan.first_slots.indices ? plan.first_slots.checked(index) : index;
  }
  __device__ __forceinline__ int64_t first_slot(int64_t accepted, int64_t first_index) const {
    const Table& indices = plan.first_slots.indices;
    const int column = indices ? static_cast<int>(clamp(accepted, 1, indices.columns)) - 1 : 0;
    return slot_of(column == 0 ? first_index : indices.fresh(share.n, column));
  }
  // Sets `before` and `destinations`.
  __device__ __forceinline__ void list_tokens(int count, int64_t slot) const {
    if (const int t = threadIdx.x; t < count) {
      shared.destinations[t] = states.template destinations<State>(plan, share.n, t, count, slot);
      int row = t;
#pragma unroll
      for (int w = kConvTaps - 2; w >= 0; --w) {
        row = row >= 0 ? plan.parent(share.n, row) : row - 1;
        shared.before[t][w] = row;
      }
    }
  }

  // The convolution. A thread has the same channels in every function: of q and k, then the CTA's value rows,
  // kThreads apart.
  static constexpr int kThreadChannels = (2 * K + kRows + kThreads - 1) / kThreads;
  // What a thread's channels need of memory, as it is there, so that all loads are in flight at once.
  struct Channels {
    uint16_t rows[kThreadChannels][kConvTaps - 1] = {}, bias[kThreadChannels] = {};
    uint2 taps[kThreadChannels] = {};
  };
  __device__ __forceinline__ int number_of(int channel) const {
    return channel < keys() ? Cta::number_of_key(channel) : Cta::number_of_row(share.first_row() + channel - keys());
  }
  __device__ __forceinline__ uint16_t (&window_of(int channel) const)[kConvTaps] {
    return shared.window[channel < keys() ? channel : 2 * K + channel - keys()];
  }
  __device__ __forceinline__ uint16_t& mixed(int t, int channel) const {
    return reinterpret_cast<uint16_t&>(channel < keys() ? shared.keys[t][channel] : shared.values[t][channel - keys()]);
  }
  // A channel's number of row `row`: of a token or, if that is negative, of the window, whose last row is -1.
  __device__ __forceinline__ uint16_t row_of_channel(int row, int channel) const {
    return row >= 0 ? mixed(row, channel) : window_of(channel)[kConvTaps - 1 + row];
  }
  template <typename Use>
  __device__ __forceinline__ void for_channels(Use use) const {
#pragma unroll
    for (int i = 0; i < kThreadChannels; ++i) {
      if (const int channel = i * kThreads + threadIdx.x; channel < keys() + cta_rows()) {
        use(i, channel);
      }
    }
  }

  __device__ __forceinline__ Channels load_channels(const WindowColumns& columns, int64_t window_slot) const {
    Channels all;
    if (!has_windows()) {
      return all;
    }
    for_channels([&](int i, int channel) {
      const int number = number_of(channel);
      if (window_slot != kNoState) {
        const uint16_t* const from = column_of(window_slot, number) + columns.first * windows.pool.column;
#pragma unroll
        for (int w = 0; w < kConvTaps - 1; ++w) {
          all.rows[i][w] = from[w * windows.pool.column];
        }
      }
      all.taps[i] = filter.taps_of(number);
      all.bias[i] = filter.bias_of(number);
    });
    return all;
  }
  __device__ __forceinline__ void set_windows(const Channels& all) const {
    for_channels([&](int i, int channel) {
#pragma unroll
      for (int w = 0; w < kConvTaps - 1; ++w) {
        window_of(channel)[w] = all.rows[i][w];
      }
    });
  }
  __device__ __forceinline__ uint32_t load_norm_weight() const {
    if (!has_row()) {
      return 0;
    }
    const int row = share.first_row() + threadIdx.x;
    return load_bits(norm.weight, norm.weight_dtype, 0, row - Cta::head_of_row(row) * sizes.V);
  }
  __device__ __forceinline__ void set_norm_weight(uint32_t bits) const {
    if (has_row()) {
      shared.norm_weight[threadIdx.x] = from_bits(bits, norm.weight_dtype, 0);
    }
  }
  // Column 0 of a channel.
  __device__ __forceinline__ uint16_t* column_of(int64_t slot, int number) const {
    return static_cast<uint16_t*>(windows.pool.pool) + slot * windows.pool.slot + number * windows.pool.channel;
  }

  __device__ __forceinline__ Element& x(int t, int channel) const {
    return channel < keys() ? shared.x_keys[t][channel] : shared.x_values[t][channel - keys()];
  }
  __device__ __forceinline__ void convolve(int count, const Channels& all) const {
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      int before[kConvTaps - 1];
#pragma unroll
      for (int w = 0; w < kConvTaps - 1; ++w) {
        before[w] = shared.before[t][w];
      }
      for_channels([&](int i, int channel) {
        uint16_t rows[kConvTaps];
        rows[kConvTaps - 1] = mixed(t, channel);
        if (!has_windows()) {
          reinterpret_cast<uint16_t&>(x(t, channel)) = rows[kConvTaps - 1];
          return;
        }
#pragma unroll
        for (int w = 0; w < kConvTaps - 1; ++w) {
          rows[w] = row_of_channel(before[w], channel);
        }
        x(t, channel) = convolve_channel<Element>(rows, all.taps[i], all.bias[i]);
      });
    }
  }
  // Writes the windows that no other CTA reads: those of v, and the kept ones.
  __device__ __forceinline__ void write_windows(int count, const WindowColumns& columns, int64_t window_slot) const {
    if (!has_windows()) {
      return;
    }
#pragma unroll 1
    for (int channel = threadIdx.x; channel < keys() + cta_rows(); channel += kThreads) {
      const bool is_key = channel < keys();
      if (!is_key) {
        write_window(count, columns, window_slot, channel);
      }
      if (!is_key || channel / kThreads % share.ctas == share.rank) {
        keep_windows(count, channel, number_of(channel));
      }
    }
  }
  // Writes a channel's window after the last token.
  __device__ __forceinline__ void write_window(int count, const WindowColumns& columns, int64_t slot,
                                               int channel) const {
    if (slot == kNoState || !plan.update_state) {
      return;
    }
    uint16_t* const to = column_of(slot, number_of(channel));
    const int in_pool = windows.pool.columns, last = count - 1;
    if (columns.is_of_drafts) {
#pragma unroll 1
      for (int i = 0; i < min(count + kConvTaps - 2, in_pool); ++i) {
        to[i * windows.pool.column] = row_of_channel(i - (kConvTaps - 2), channel);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < in_pool; ++i) {  // W - 1 or W columns
        const int w = i + kConvTaps - in_pool;
        const int row = w == kConvTaps - 1 ? last : shared.before[last][w];
        to[i * windows.pool.column] = row_of_channel(row, channel);
      }
    }
  }
  // Writes a channel's windows after each token.
  __device__ __forceinline__ void keep_windows(int count, int channel, int number) const {
    const int64_t row = plan.state_rows ? plan.state_rows(share.n) : share.n;
    if (row < 0 || row >= windows.rows) {
      return;
    }
#pragma unroll 1
    for (int t = 0; t < min(count, windows.steps); ++t) {
      uint16_t* const to = windows.kept_at(row, t, number);
#pragma unroll
      for (int w = 1; w < kConvTaps - 1; ++w) {
        to[(w - 1) * windows.column] = row_of_channel(shared.before[t][w], channel);
      }
      to[(kConvTaps - 2) * windows.column] = mixed(t, channel);
    }
  }

  // The factors of q and k of each token, as RawToken::prepare_keys computes them.
  __device__ __forceinline__ void prepare_keys(int count) const {
    using L = typename Rows::L;
    for (int t = warp(); t < count; t += kWarps) {
      const LaneToken<L::kChannels> token = load_keys(t);
      constexpr float kEps = static_cast<float>(kNormEps);
      const float q_factor = tokens.scale * rsqrtf(L::dot(token.q, token.q) + kEps);
      const float k_factor = rsqrtf(L::dot(token.k, token.k) + kEps);
      const float qk = L::dot(token.q, token.k) * q_factor * k_factor;
      if (threadIdx.x % kWarp == 0) {
        shared.q_factors[t] = q_factor;
        shared.k_factors[t] = k_factor;
        shared.qk[t] = qk;
      }
    }
  }
  // The lane's channels of q and k, without their factors.
  __device__ __forceinline__ LaneToken<Rows::L::kChannels> load_keys(int t) const {
    using L = typename Rows::L;
    LaneToken<L::kChannels> token;
    const Element *const q = shared.x_keys[t], *const k = q + sizes.K;
#pragma unroll
    for (int i = 0; i < L::kChannels; i += 2) {
      const int channel = L::channel_of(i);
      const bool there = channel < sizes.K;
      const float2 of_q = there ? unpack(Element(), *reinterpret_cast<const uint32_t*>(q + channel)) : float2{};
      const float2 of_k = there ? unpack(Element(), *reinterpret_cast<const uint32_t*>(k + channel)) : float2{};
      token.q[i] = of_q.x;
      token.q[i + 1] = of_q.y;
      token.k[i] = of_k.x;
      token.k[i + 1] = of_k.y;
    }
    return token;
  }

  // The recurrence on the CTA's value rows, of which a warp has kDecodeWarpRows at a time, one token after the other.
  __device__ __forceinline__ void decode(int64_t begin, int count, Gates gates, int64_t slot) const {
    const int waves = Cta::waves(), activations = tokens.activations;
#pragma unroll 1
    for (int wave = 0; wave < waves; ++wave) {
      const float decay = expf(log_decay(from_bits(gates.a, activations, Activation::kG), gates.bits, activations));
      const float beta = step_size(from_bits(gates.b, activations, Activation::kBeta), activations);
      const int head = head_of(wave), lane_row = row_of(wave) + Rows::lane_row();
      Rows rows = rows_of(wave);
      Rows::await();
      rows.set(shared.tiles[warp()]);
      const bool has_next = wave + 1 < waves;
      if (has_next) {
        gates = load_gates(begin, count, head_of(wave + 1));
        if (!plan.parents) {
          fetch(slot, wave + 1);
        }
      }
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        int depth = 0;  // tokens between the state in registers and t
        if (shared.before[t][kConvTaps - 2] != t - 1) {
          rows.set(shared.tiles[warp()]);
          depth = plan.depth(share.n, t);
        }
        float out;
#pragma unroll 1
        for (; depth >= 0; --depth) {
          const int at = plan.ancestor(share.n, t, depth);
          LaneToken<Rows::L::kChannels> token = load_keys(at);
          const float q_factor = shared.q_factors[at], k_factor = shared.k_factors[at];
#pragma unroll
          for (int i = 0; i < Rows::L::kChannels; ++i) {
            token.q[i] *= q_factor;
            token.k[i] *= k_factor;
          }
          token.qk = shared.qk[at];
          token.decay = __shfl_sync(~0u, decay, at);
          token.beta = __shfl_sync(~0u, beta, at);
          const float v = lane_row < end_row() ? to_float(shared.x_values[at][lane_row - share.first_row()]) : 0.f;
          out = rows.step(token, v);
        }
        Cta::send_o(shared.o[t], &shared.sent, head, Cta::has_output() ? lane_row : end_row(), out);
        shared.destinations[t].for_each([&](State* to) { rows.write(to + Cta::in_state(head)); });
      }
      if (has_next && plan.parents) {
        fetch(slot, wave + 1);
      }
    }
  }

  // The norm of the CTA's value rows.
  __device__ __forceinline__ void write_y(int64_t begin, int count) const {
    const int first_row = share.first_row(), parts = (cta_rows() + kWarp - 1) / kWarp;
    for (int i = warp(); i < count * parts; i += kWarps) {
      const int t = i / parts, row = first_row + i % parts * kWarp;
      Cta::normalize(shared.o[t], row, [&](int lane_row, float o, float rstd) {
        const float z = to_float(shared.z[t][lane_row - first_row]);
        const float after = shared.norm_weight[lane_row - first_row] * norm.gate(z, GatedNorm::power(z));
        y[(begin + t) * y_token + lane_row] = from_float(Element(), o * (rstd * after));
      });
    }
  }
};

template <typename Element, typename State, int K, int kWarps, int kValues, int kRows, int kSharedBytes>
__device__ __forceinline__ void decode_region_drafts(const DecodePlan& plan, const RegionTokens& tokens,
                                                     const DraftWindows& windows, const RegionFilter& filter,
                                                     const RegionNorm& norm, const RegionSizes& sizes,
                                                     const RegionShare& share, const DecodeStates& states, void* y,
                                                     int N, void* shared) {
  using Work = DecodeDrafts<Element, State, K, kWarps, kValues, kRows>;
  static_assert(sizeof(typename Work::Shared) <= kSharedBytes);
  const int64_t values = sizes.values();
  Work{{norm, sizes, share, states.dtype},
       plan,
       tokens,
       windows,
       filter,
       states,
       static_cast<Element*>(y) + share.hk * values,
       sizes.H_k * values,
       N,
       *static_cast<typename Work::Shared*>(shared)}
      .run();
}

}  // namespace flash_qla::device
