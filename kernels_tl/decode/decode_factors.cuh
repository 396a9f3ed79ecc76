// With deferred state writes, what all value rows of a CTA share: gates, and products of the token and of the replay
// buffer's keys; see decode/decode_buffered.py.
#pragma once

#include "decode/decode_backlog.cuh"

namespace flash_qla::device {

// The gates of a token and of its replay buffer, before they are activated. All loads are in flight before the first
// use.
class LaggingGates {
 public:
  __device__ __forceinline__ void load(const DecodeTokens& tokens, int64_t at) {
    const int head = as_of_lane(tokens.head);
    a_ = load_bits(tokens.a, tokens.activations, Activation::kG, at * tokens.a_stride + head);
    b_ = load_bits(tokens.b, tokens.activations, Activation::kBeta, at * tokens.b_stride + head);
    gate_ = load_gate_bits(tokens.A_log, tokens.dt_bias, tokens.activations, head);
  }
  __device__ __forceinline__ float g(int activations) const {
    return log_decay(from_bits(a_, activations, Activation::kG), gate_, activations);
  }
  __device__ __forceinline__ float beta(int activations) const {
    return step_size(from_bits(b_, activations, Activation::kBeta), activations);
  }

 private:
  uint32_t a_ = 0, b_ = 0;
  GateBits gate_;
};

// A token with deferred state writes. k and q are as they are in memory: `key` is the factor of k (l2norm),
// `query` the factor of q (l2norm and scale). decay is the decay since S_0. qk is q^T k with both factors.
struct LaggingToken {
  float key, query, decay, beta, qk;
};

// The numbers that all value rows of a CTA share, in shared memory. Each warp computes a part of them.
class BacklogFactors {
 public:
  static constexpr int kGatesWarp = 3, kTokenWarp = 2, kFirstTileWarp = 1;  // warp 0 has the second tile

  // The gates warp calls it. of_token is the token's decay. g is the log decay of the lane's step, 0 without a step.
  __device__ __forceinline__ void set_decays(float of_token, float beta, float g) {
    const int lane = threadIdx.x % kWarp;
    float decays = expf(g);  // from the lane's step to the replay buffer's last one
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const float later = __shfl_down_sync(~0u, decays, distance);
      decays *= lane + distance < kWarp ? later : 1.f;
    }
    const float later = __shfl_down_sync(~0u, decays, 1);
    since_[lane] = of_token * (lane + 1 < kWarp ? later : 1.f);
    if (lane == 0) {
      decay_ = of_token * decays;
      beta_ = beta;
    }
  }
  // All warps call it after the token and the keys have arrived. Products of steps that the replay buffer does not have
  // are undefined.
  template <typename Keys, typename Token>
  __device__ __forceinline__ void set_products(const Keys& keys, const Token& token, int steps, int key_dim) {
    static_assert(kFirstTileWarp + 1 == Keys::kTiles && kGatesWarp < kDecodeWarps);
    const int warp = threadIdx.x / kWarp, tile = kFirstTileWarp - warp, lane = threadIdx.x % kWarp;
    if (warp == kTokenWarp) {
      token.multiply_self(key_dim, [&](int row, float with_k, float with_q) { of_token_[row] = {with_k, with_q}; });
    } else if (tile >= 0 && tile * Keys::kTile < steps) {
      const int first = tile * Keys::kTile + lane / 4;
      float sums[4] = {};
      token.multiply(sums, key_dim,
                     [&](int step, int half) { return keys.piece(first + 8 * half, Token::Left::piece_of(step)); });
      if (const int half = lane % 4; half < 2) {
        products_[first + 8 * half] = half == 0 ? float2{sums[0], sums[1]} : float2{sums[2], sums[3]};
      }
    }
  }
  __device__ __forceinline__ LaggingToken token(const DecodeTokens& tokens) const {
    const float2 of_key = of_token_[0], of_query = of_token_[1];
    LaggingToken token = {.key = 1.f, .query = tokens.scale, .decay = decay_, .beta = beta_};
    if (tokens.normalize) {
      constexpr float kEps = static_cast<float>(kNormEps);
      token.key = rsqrtf(of_key.x + kEps);
      token.query *= rsqrtf(of_query.y + kEps);
    }
    token.qk = of_key.y * token.key * token.query;
    return token;
  }

  // The factor of a step's change d_i in S: c_i.
  __device__ __forceinline__ float of_state(int step) const { return since_[step]; }
  // The factors of d_i in S k and S q: c_i k_i^T k and c_i k_i^T q, without the token's factors `key` and `query`.
  __device__ __forceinline__ float2 of_sums(int step) const {
    const float2 products = products_[step];
    return {since_[step] * products.x, since_[step] * products.y};
  }

 private:
  float2 products_[kDecodeBacklog];
  float since_[kDecodeBacklog];  // the decay since the step
  float2 of_token_[2];           // {k^T k, k^T q}, {q^T k, q^T q}
  float decay_, beta_;
};

}  // namespace flash_qla::device
