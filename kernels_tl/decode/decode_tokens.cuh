// A token of decode, prepared by a warp: q and k normalised, gates activated; see decode/decode.py.
#pragma once

#include "decode/decode_plan.cuh"

namespace flash_qla::device {

// The layout of kWarpRows value rows of a state in a warp. A lane has kPieces pieces of each of its kRows rows,
// which are kTogether rows apart. A piece has 16 bytes; on states of 8 bits it has 8 bytes, because the registers of
// more channels of q and k would not fit. Neighbouring lanes have neighbouring pieces. Channels from key_dim on count
// as zeros.
template <typename State, int K, int kWarpRows = kDecodeWarpRows>
struct RowLanes {
  static constexpr int kDim = K;
  static constexpr int kPieceChannels = sizeof(State) == 1 ? 8 : 16 / sizeof(State);
  static constexpr int kPieces = K > kWarp* kPieceChannels ? K / (kWarp * kPieceChannels) : 1;
  static constexpr int kChannels = kPieces * kPieceChannels;  // channels of a lane
  static constexpr int kLanes = K / kChannels;                // lanes of a row
  static constexpr int kTogether = kWarp / kLanes, kRows = kWarpRows / kTogether;
  static_assert(K % kChannels == 0 && kWarp % kLanes == 0 && kWarpRows % kTogether == 0);

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarp % kLanes; }  // number in its row
  static __device__ __forceinline__ int row_of_group() { return threadIdx.x % kWarp / kLanes; }
  static __device__ __forceinline__ int channel(int piece) { return kPieceChannels * (lane() + kLanes * piece); }
  // The key channel of the lane's i-th channel.
  static __device__ __forceinline__ int channel_of(int i) { return channel(i / kPieceChannels) + i % kPieceChannels; }
  // Channels of a row form quads. Returns the quad of the row that is the lane's i-th.
  static __device__ __forceinline__ int quad_of_row(int i) {
    constexpr int kQuads = kPieceChannels / 4;
    return channel(i / kQuads) / 4 + i % kQuads;
  }

  static __device__ __forceinline__ float dot_of_lane(const float (&x)[kChannels], const float (&y)[kChannels]) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      sum += x[i] * y[i];
    }
    return sum;
  }
  static __device__ __forceinline__ float dot(const float (&x)[kChannels], const float (&y)[kChannels]) {
    return sum_of_lanes<kLanes>(dot_of_lane(x, y));
  }
};

// A prepared token: the lane's channels of q, normalised and scaled, and of k, normalised; decay = exp(g), beta, q^T k.
template <int kChannels>
struct LaneToken {
  float q[kChannels], k[kChannels];
  float decay, beta, qk;
};

// A loaded token, before it is normalised and activated. All loads are in flight before the first use. L is a RowLanes.
template <typename Element, typename L>
class RawToken {
 public:
  __device__ __forceinline__ void load_keys(const DecodeTokens& tokens, int64_t at, int key_dim) {
    load_pieces<0>(tokens, at, key_dim);
  }
  __device__ __forceinline__ void load(const DecodeTokens& tokens, int64_t at, int key_dim) {
    load_keys(tokens, at, key_dim);
    const int head = as_of_lane(tokens.head);
    a_ = load_bits(tokens.a, tokens.activations, Activation::kG, at * tokens.a_stride + head);
    b_ = load_bits(tokens.b, tokens.activations, Activation::kBeta, at * tokens.b_stride + head);
    gate_ = load_gate_bits(tokens.A_log, tokens.dt_bias, tokens.activations, head);
  }

  // A token without its gates.
  __device__ __forceinline__ LaneToken<L::kChannels> prepare_keys(const DecodeTokens& tokens) const {
    LaneToken<L::kChannels> token;
    unpack_channels(token.q, q_, tokens.dtype);
    unpack_channels(token.k, k_, tokens.dtype);
    float q_factor = tokens.scale, k_factor = 1.f;
    if (tokens.normalize) {
      constexpr float kEps = static_cast<float>(kNormEps);
      q_factor *= rsqrtf(L::dot(token.q, token.q) + kEps);
      k_factor = rsqrtf(L::dot(token.k, token.k) + kEps);
    }
    token.qk = L::dot(token.q, token.k) * q_factor * k_factor;
#pragma unroll
    for (int i = 0; i < L::kChannels; ++i) {
      token.q[i] *= q_factor;
      token.k[i] *= k_factor;
    }
    return token;
  }
  __device__ __forceinline__ LaneToken<L::kChannels> prepare(const DecodeTokens& tokens) const {
    LaneToken<L::kChannels> token = prepare_keys(tokens);
    const int activations = tokens.activations;
    token.decay = expf(log_decay(from_bits(a_, activations, Activation::kG), gate_, activations));
    token.beta = step_size(from_bits(b_, activations, Activation::kBeta), activations);
    return token;
  }

 private:
  static_assert(sizeof(Element) == 2);
  struct alignas(2 * L::kPieceChannels) Channels {
    uint32_t pairs[L::kChannels / 2] = {};
  };
  struct alignas(2 * L::kPieceChannels) Piece {
    uint32_t pairs[L::kPieceChannels / 2];
  };
  __device__ __forceinline__ static Piece load_piece(const void* elements, int64_t offset, int piece) {
    return *reinterpret_cast<const Piece*>(static_cast<const Element*>(elements) + offset + L::channel(piece));
  }
  // Recursive, because a loop would change the order of instructions for one piece.
  template <int kPiece>
  __device__ __forceinline__ void load_pieces(const DecodeTokens& tokens, int64_t at, int key_dim) {
    if (L::channel(kPiece) < key_dim) {
      reinterpret_cast<Piece*>(q_.pairs)[kPiece] = load_piece(tokens.q, at * tokens.q_stride, kPiece);
      reinterpret_cast<Piece*>(k_.pairs)[kPiece] = load_piece(tokens.k, at * tokens.k_stride, kPiece);
    }
    if constexpr (kPiece + 1 < L::kPieces) {
      load_pieces<kPiece + 1>(tokens, at, key_dim);
    }
  }
  __device__ __forceinline__ static void unpack_channels(float (&x)[L::kChannels], const Channels& channels,
                                                         int dtype) {
#pragma unroll
    for (int i = 0; i < L::kChannels / 2; ++i) {
      const float2 pair = unpack(Element(), channels.pairs[i], dtype);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }

  Channels q_, k_;
  uint32_t a_ = 0, b_ = 0;
  GateBits gate_;
};

// The prepared tokens of a sequence in shared memory, kDecodeTokens at a time. Each warp of the CTA prepares some of
// them for all warps, because q, k and the gates are the same for all value rows. v has the CTA's kTileRows rows.
template <typename Element, typename State, typename L, int kTileRows>
class PreparedTokens {
 public:
  static constexpr int K = L::kDim;
  using Destinations = DecodeStates::Destinations<State>;
  static constexpr int kRowsOfLane = kTileRows / kWarp;  // neighbouring rows of v that a lane loads

  struct alignas(sizeof(Element) * kRowsOfLane) Values {
    Element of_row[kRowsOfLane];
  };
  struct Raw {
    RawToken<Element, L> token;
    Values v = {};
  };
  struct Shared {
    float4 q[kDecodeTokens][K / 4], k[kDecodeTokens][K / 4];
    float v[kDecodeTokens][kTileRows];
    float decay[kDecodeTokens], beta[kDecodeTokens], qk[kDecodeTokens];
    Destinations destinations[kDecodeTokens];  // destinations of the states after tokens; only `want` sets them
  };

  __device__ __forceinline__ PreparedTokens(Shared& shared, const DecodePlan& plan, const DecodeTokens& tokens,
                                            const DecodeStates& states, int n, int64_t begin, int count, int64_t slot,
                                            int first_row, int key_dim, int value_dim)
      : shared_(shared),
        plan_(plan),
        tokens_(tokens),
        states_(states),
        begin_(begin),
        slot_(slot),
        n_(n),
        count_(count),
        first_row_(first_row),
        K_(key_dim),
        V_(value_dim) {}

  __device__ __forceinline__ static int warp() { return threadIdx.x / kWarp; }
  // Loads a token; after the sequence's last token it loads nothing.
  __device__ __forceinline__ Raw load(int token) const {
    Raw raw;
    if (token < count_) {
      const int64_t at = begin_ + token;
      raw.token.load(tokens_, at, K_);
      if (const int row = first_row_ + row_of_lane(); row < V_) {
        raw.v = *reinterpret_cast<const Values*>(static_cast<const Element*>(tokens_.v) + at * tokens_.v_stride + row);
      }
    }
    return raw;
  }
  // Prepares the first kDecodeTokens tokens. `raw` is the warp's first token, loaded already. All threads of the CTA
  // call it.
  __device__ __forceinline__ void prepare(Raw raw) {
#pragma unroll 1
    for (int t = warp(); t < kDecodeTokens && t < count_; t += kDecodeWarps) {
      store(t, raw);
      raw = load(t + kDecodeWarps);
    }
    __syncthreads();
  }
  // Prepares the block of kDecodeTokens tokens that holds `token`, unless it is there. All threads of the CTA call it.
  // It takes few registers, because a state may be in registers meanwhile.
  __device__ __forceinline__ void want(int token) {
    if (const int block = token / kDecodeTokens; block != block_) {
      block_ = block;
      __syncthreads();  // all threads have read the old contents
#pragma unroll
      for (int first = 0; first < kDecodeTokens; first += kDecodeWarps) {
        const int t = first + warp();
        if (block * kDecodeTokens + t < count_) {
          const int token = block * kDecodeTokens + t;
          const Raw raw = load(token);
          if (threadIdx.x % kWarp == 0) {
            shared_.destinations[t] = states_.template destinations<State>(plan_, n_, token, count_, slot_);
          }
          store(t, raw);
        }
      }
      __syncthreads();
    }
  }
  // The lane's part of a token of the current block.
  __device__ __forceinline__ LaneToken<L::kChannels> token(int token) const {
    const int t = token % kDecodeTokens;
    LaneToken<L::kChannels> lane_token;
#pragma unroll
    for (int quad = 0; quad < L::kChannels / 4; ++quad) {
      reinterpret_cast<float4*>(lane_token.q)[quad] = shared_.q[t][L::quad_of_row(quad)];
      reinterpret_cast<float4*>(lane_token.k)[quad] = shared_.k[t][L::quad_of_row(quad)];
    }
    lane_token.decay = shared_.decay[t];
    lane_token.beta = shared_.beta[t];
    lane_token.qk = shared_.qk[t];
    return lane_token;
  }
  __device__ __forceinline__ float v(int token, int row) const { return shared_.v[token % kDecodeTokens][row]; }
  __device__ __forceinline__ Destinations destinations(int token) const {
    return shared_.destinations[token % kDecodeTokens];
  }

 private:
  __device__ __forceinline__ static int row_of_lane() { return threadIdx.x % kWarp * kRowsOfLane; }

  __device__ __forceinline__ void store(int t, const Raw& raw) {
    const auto prepared = raw.token.prepare(tokens_);
    if (threadIdx.x % kWarp < L::kLanes) {
#pragma unroll
      for (int quad = 0; quad < L::kChannels / 4; ++quad) {
        shared_.q[t][L::quad_of_row(quad)] = reinterpret_cast<const float4*>(prepared.q)[quad];
        shared_.k[t][L::quad_of_row(quad)] = reinterpret_cast<const float4*>(prepared.k)[quad];
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      shared_.v[t][row_of_lane() + i] = to_float(raw.v.of_row[i], tokens_.dtype);
    }
    if (threadIdx.x % kWarp == 0) {
      shared_.decay[t] = prepared.decay;
      shared_.beta[t] = prepared.beta;
      shared_.qk[t] = prepared.qk;
    }
  }

  Shared& shared_;
  const DecodePlan& plan_;
  const DecodeTokens& tokens_;
  const DecodeStates& states_;
  const int64_t begin_, slot_;
  const int n_, count_, first_row_, K_, V_;
  int block_ = -1;
};

}  // namespace flash_qla::device
