// S' = decay S + change k^T on a warp's value rows, one token after the other; see decode/decode.py.
#pragma once

#include "decode/decode_tokens.cuh"

namespace flash_qla::device {

// Adds x over kLanes neighbouring lanes. Each lane gets one of the kCount sums: that of x[lane / (kLanes / kCount)].
// Every step halves the number of sums that a lane still adds.
template <int kLanes, int kCount>
__device__ __forceinline__ float sum_and_scatter(const float (&x)[kCount], int lane) {
  constexpr int kHalf = kLanes / 2;
  if constexpr (kLanes == 1) {
    return x[0];
  } else if constexpr (kCount == 1) {
    const float sum[1] = {x[0] + __shfl_xor_sync(~0u, x[0], kHalf)};
    return sum_and_scatter<kHalf>(sum, lane);
  } else {
    float sums[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float low = x[i], high = x[i + kCount / 2];
      sums[i] = (lane & kHalf ? high : low) + __shfl_xor_sync(~0u, lane & kHalf ? low : high, kHalf);
    }
    return sum_and_scatter<kHalf>(sums, lane);
  }
}

// kWarpRows value rows of a state in a warp's registers, in fp32, in the layout of RowLanes.
template <typename State, int K, int kWarpRows = kDecodeWarpRows>
class StateRows {
 public:
  using L = RowLanes<State, K, kWarpRows>;
  static constexpr int kPieces = L::kRows * L::kPieces;
  static constexpr bool kIsFloat8 = sizeof(State) == 1;
  using Piece = std::conditional_t<kIsFloat8, uint2, uint4>;
  using Raw = Piece[kPieces];          // a lane's pieces of its rows, as in memory
  using Tile = Piece[kPieces][kWarp];  // the pieces of all lanes, in shared memory

  // The rows begin at row `row` of a head's state. `dtype` is the Dtype of Float8 or Bits16.
  __device__ __forceinline__ StateRows(int row, int key_dim, int value_dim, int dtype = 0)
      : row_(row), K_(key_dim), V_(value_dim), dtype_(dtype) {}

  __device__ __forceinline__ void load(Raw& raw, const State* state) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      raw[p] = is_there(p) ? __ldcg(reinterpret_cast<const Piece*>(state + offset(p))) : Piece{};
    }
  }
  // The warp's tile among those of the CTA.
  __device__ __forceinline__ static Tile& tile(void* tiles) { return static_cast<Tile*>(tiles)[threadIdx.x / kWarp]; }
  // Starts asynchronous copies. A lane copies its own part, so it waits for its own copies only.
  __device__ __forceinline__ void fetch(Tile& tile, const State* state) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      copy_async(&tile[p][threadIdx.x % kWarp], state + (is_there(p) ? offset(p) : 0), is_there(p));
    }
  }
  __device__ __forceinline__ static void await() { wait_for_copies<0>(); }
  __device__ __forceinline__ void set(const Tile& tile) {
    Raw raw;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      raw[p] = tile[p][threadIdx.x % kWarp];
    }
    set(raw);
  }
  __device__ __forceinline__ void set(const Raw& raw) {
    with_format<State>(dtype_, [&](auto format) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        unpack_piece(format, channels_of(p), raw[p]);
      }
    });
  }
  // A lane's piece of a row: L::kPieceChannels numbers.
  template <typename Format>
  __device__ __forceinline__ static void unpack_piece(Format format, float* channels, const uint4& raw) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(State) == 4) {
        channels[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack(format, words[i]);
        channels[2 * i] = pair.x;
        channels[2 * i + 1] = pair.y;
      }
    }
  }
  template <bool kE5M2>
  __device__ __forceinline__ static void unpack_piece(std::integral_constant<bool, kE5M2>, float* channels,
                                                      const uint2& raw) {
    const uint32_t words[2] = {raw.x, raw.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack(__half(), unpack_8<kE5M2>(i % 2 ? words[i / 2] >> 16 : words[i / 2]));
      channels[2 * i] = pair.x;
      channels[2 * i + 1] = pair.y;
    }
  }
  // The inverse of unpack_piece.
  template <typename Format>
  __device__ __forceinline__ static uint4 pack_piece(Format format, const float* channels) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(State) == 4) {
        words[i] = __float_as_uint(channels[i]);
      } else {
        words[i] = pack(format, channels[2 * i], channels[2 * i + 1]);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
  template <bool kE5M2>
  __device__ __forceinline__ static uint2 pack_piece(std::integral_constant<bool, kE5M2>, const float* x) {
    const auto word = [=](int i) { return pack_8<kE5M2>(x[i], x[i + 1]) | pack_8<kE5M2>(x[i + 2], x[i + 3]) << 16; };
    return {word(0), word(4)};
  }
  __device__ __forceinline__ void write(State* state) const {
    with_format<State>(dtype_, [&](auto format) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const Piece piece = pack_piece(format, channels_of(p));
        if (is_there(p)) {
          __stcg(reinterpret_cast<Piece*>(state + offset(p)), piece);
        }
      }
    });
  }

  // The lane's own row of the warp, for v and o. The first half of a row's lanes compute changes, the others outputs.
  __device__ __forceinline__ static int lane_row() {
    return L::lane() % (L::kLanes / 2) / kLanesOfSum * L::kTogether + L::row_of_group();
  }

  // change = beta (v - decay S k), o = decay S q + change (k q), S' = decay S + change k^T
  __device__ __forceinline__ float step(const LaneToken<L::kChannels>& token, float v) {
    float sums[2 * L::kRows];
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      sums[r] = L::dot_of_lane(S_[r], token.k);
      sums[L::kRows + r] = L::dot_of_lane(S_[r], token.q);
    }
    const float decayed = token.decay * sum_and_scatter<L::kLanes>(sums, L::lane());
    const float change = token.beta * (v - decayed);
    const float out = decayed + __shfl_xor_sync(~0u, change, L::kLanes / 2) * token.qk;
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      const float change_of_row = __shfl_sync(~0u, change, kLanesOfSum * r, L::kLanes);
#pragma unroll
      for (int i = 0; i < L::kChannels; ++i) {
        S_[r][i] = token.decay * S_[r][i] + change_of_row * token.k[i];
      }
    }
    return out;
  }
  // Stores `out`, in each lane the output of its own row: the result of step. `dtype` is the Dtype of Bits16.
  template <typename Element>
  __device__ __forceinline__ void write_output(Element* o, float out, int dtype = 0) const {
    const int row = row_ + lane_row();
    if (L::lane() >= L::kLanes / 2 && L::lane() % kLanesOfSum == 0 && row < V_) {
      with_format<Element>(dtype,
                           [=](auto format) { reinterpret_cast<decltype(format)*>(o)[row] = from_float(format, out); });
    }
  }

 protected:
  static constexpr int kLanesOfSum = L::kLanes / (2 * L::kRows);  // lanes that get the same sum
  const int row_, K_, V_, dtype_;
  float S_[L::kRows][L::kChannels];

 private:
  __device__ __forceinline__ float* channels_of(int p) {
    return S_[p / L::kPieces] + p % L::kPieces * L::kPieceChannels;
  }
  __device__ __forceinline__ const float* channels_of(int p) const {
    return const_cast<StateRows*>(this)->channels_of(p);
  }

  __device__ __forceinline__ int row(int r) const { return row_ + r * L::kTogether + L::row_of_group(); }
  // offset and is_there take p, the number of one of the lane's pieces.
  __device__ __forceinline__ int offset(int p) const { return row(p / L::kPieces) * K_ + L::channel(p % L::kPieces); }
  __device__ __forceinline__ bool is_there(int p) const {
    return row(p / L::kPieces) < V_ && L::channel(p % L::kPieces) < K_;
  }
};

}  // namespace flash_qla::device
