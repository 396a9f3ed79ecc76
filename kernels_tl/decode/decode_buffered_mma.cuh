// One token of a sequence on value rows of a state S_0 with a replay buffer, by tensor cores: 16 rows per warp. Tokens
// and states have the same 16-bit dtype, so rows of S_0 become left factors without a conversion; see
// decode/decode_buffered.py.
#pragma once

#include "decode/decode_factors.cuh"

namespace flash_qla::device {

// A CTA has `parts` parts of 16 rows: 1, 2 or 4. The first warp of a part computes its products and outputs. All warps
// of the part write its state, each some of the channels.
//
// A lane's two rows are neighbours. Row lane / 4 of a fragment is row 2 (lane / 4) of the part; row lane / 4 + 8 of the
// fragment is the part's next row.
template <typename Element, int K>
class MmaLaggingRows {
 public:
  static constexpr int kRows = kDecodePartRowsMma;        // rows of a part
  static constexpr int kTileRows = kRows * kDecodeWarps;  // most rows of a CTA
  using Left = LeftFactor<K>;
  using Token = TokenRows<Element, K, kTileRows>;
  using Keys = BacklogKeys<Element, K>;
  using Changes = BacklogChanges<Element, kRows>;
  using Tile = Element[kTileRows * K];  // S_0 in shared memory: rows are as in memory

  __device__ __forceinline__ MmaLaggingRows(int first_row, int key_dim, int value_dim, int parts)
      : parts_(parts), row_(first_row + row_in_tile()), K_(key_dim), V_(value_dim) {}

  __device__ __forceinline__ int part() const { return warp() * parts_ / kDecodeWarps; }
  __device__ __forceinline__ bool multiplies() const { return share() == 0; }
  __device__ __forceinline__ int lane_row_in_tile() const { return row_in_tile() + lane() % 2; }
  // The lane's own row. Four lanes share two rows: the first two lanes hold their changes, the other two their outputs.
  __device__ __forceinline__ int lane_row() const { return row_ + lane() % 2; }
  __device__ __forceinline__ bool has_change() const { return multiplies() && lane() % 4 < 2 && row_ < V_; }
  __device__ __forceinline__ void write_output(Element* o, float out) const {
    if (multiplies() && lane() % 4 >= 2 && row_ < V_) {
      o[lane_row()] = from_float(Element(), out);
    }
  }

  // Products of the lane's two rows with k and q, summed over all channels.
  using Products = float[4];
  __device__ __forceinline__ void multiply(Products& products, const Tile& tile, const Token& token) const {
    token.multiply(products, K_, [&](int step, int half) { return piece(tile, step, half); });
  }

  struct Row {
    float change, out;
  };
  // The own row's change and output. `products` are S_0 k and S_0 q. The four lanes that share rows share the steps.
  __device__ __forceinline__ Row advance(const Products& products, const Changes& changes,
                                         const BacklogFactors& factors, const LaggingToken& token, int steps,
                                         float v) const {
    float sums[4] = {};  // S k of both rows, then S q of both rows
#pragma unroll
    for (int first = 0; first < kDecodeBacklog; first += kStepsAtATime) {
      if (first < steps) {
#pragma unroll
        for (int i = 0; i < kStepsAtATime; i += 4) {
          if (const int step = first + i + lane() % 4; step < steps) {
            const float2 factor = factors.of_sums(step);
            float d[2];
            changes.load(d, step, row_in_part());
            sums[0] += factor.x * d[0];
            sums[1] += factor.x * d[1];
            sums[2] += factor.y * d[0];
            sums[3] += factor.y * d[1];
          }
        }
      }
    }
    const bool second = lane() % 2, of_query = lane() % 4 >= 2;
    const float with_key = second ? products[2] : products[0], with_query = second ? products[3] : products[1];
    const float unscaled = token.decay * (of_query ? with_query : with_key) + sum_and_scatter<4>(sums, lane() % 4);
    const float sum = unscaled * (of_query ? token.query : token.key);
    const float change = token.beta * (v - sum);
    return {change, sum + __shfl_xor_sync(~0u, change, 2) * token.qk};
  }

  // Writes decay S_0 + change k^T + sum of c_i d_i k_i^T over the steps of the replay buffer. The sums of outer
  // products are one product of changes and keys in TF32. Keys are exact; a change has two parts of 11 bits.
  __device__ __forceinline__ void flush(Element* state, const Tile& tile, const Token& token, const Keys& keys,
                                        const Changes& changes, const BacklogFactors& factors, float decay,
                                        float change, int steps) const {
    __shared__ float change_of_row[kTileRows];
    if (has_change()) {
      change_of_row[lane_row_in_tile()] = change;
    }
    keys.arrange(token);  // all threads of the CTA wait for each other
    const float lane_changes[2] = {change_of_row[row_in_tile()], change_of_row[row_in_tile() + 1]};
#pragma unroll 1
    for (int step = share(); step < Left::kSteps; step += shares()) {
      float S[4][4];  // four pairs of channels: the pair of the first row, then of the second
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 state_piece = is_there(step) ? piece(tile, step, half) : uint4{};
        const uint32_t pairs[4] = {state_piece.x, state_piece.y, state_piece.z, state_piece.w};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const float2 x = unpack(Element(), pairs[pair]);
          S[pair][2 * half] = decay * x.x;
          S[pair][2 * half + 1] = decay * x.y;
        }
      }
      // A right factor has eight steps and eight channels: one pair of channels for each lane that shares a row.
      const int column = lane() / 4, key_piece = step * Left::kPiecesOfStep + column / 2;
#pragma unroll 1
      for (int first = 0; first <= steps; first += kStepsAtATime) {
        float high[2][2], low[2][2];
        uint32_t pairs[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int step = first + 4 * i + lane() % 4;
          const float factor = factors.of_state(step);
          float d[2];
          changes.load(d, step, row_in_part());
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float x = step < steps ? factor * d[half] : step == steps ? lane_changes[half] : 0.f;
            high[i][half] = truncate_to_tf32(x);
            low[i][half] = x - high[i][half];
          }
          const uint4 key = keys.arranged(step, key_piece);
          pairs[i][0] = key.x, pairs[i][1] = key.y, pairs[i][2] = key.z, pairs[i][3] = key.w;
        }
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const float key[2] = {unpack(Element(), pairs[0][pair] >> column % 2 * 16).x,
                                unpack(Element(), pairs[1][pair] >> column % 2 * 16).x};
          mma_tf32(S[pair], high[0][0], high[0][1], high[1][0], high[1][1], key[0], key[1]);
          mma_tf32(S[pair], low[0][0], low[0][1], low[1][0], low[1][1], key[0], key[1]);
        }
      }
      if (is_there(step)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto packed = [&](int pair) { return pack(Element(), S[pair][2 * half], S[pair][2 * half + 1]); };
          __stcg(reinterpret_cast<uint4*>(state + (row_ + half) * K_ + 8 * Left::piece_of(step)),
                 uint4{packed(0), packed(1), packed(2), packed(3)});
        }
      }
    }
  }

 private:
  static constexpr int kStepsAtATime = 8;

  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarp; }
  __device__ __forceinline__ static int warp() { return threadIdx.x / kWarp; }
  // The number of the part's warps, and the warp's place among them.
  __device__ __forceinline__ int shares() const { return kDecodeWarps >> (__ffs(parts_) - 1); }
  __device__ __forceinline__ int share() const { return warp() & (shares() - 1); }
  // The first of the lane's two rows.
  __device__ __forceinline__ static int row_in_part() { return lane() / 4 * 2; }
  __device__ __forceinline__ int row_in_tile() const { return part() * kRows + row_in_part(); }
  __device__ __forceinline__ bool is_there(int step) const { return row_ < V_ && 8 * Left::piece_of(step) < K_; }
  __device__ __forceinline__ uint4 piece(const Tile& tile, int step, int half) const {
    return *reinterpret_cast<const uint4*>(tile + (row_in_tile() + half) * K_ + 8 * Left::piece_of(step));
  }

  const int parts_, row_, K_, V_;
};

}  // namespace flash_qla::device
