// What decoding has made ready of a sequence's tokens, for all value rows of a head; see serving/decode.py.
#pragma once

#include "device/decode_plan.cuh"

namespace flash_qla::device {

constexpr int kDecodeGroups = kWarp / kDecodeLanes;  // rows of a warp that are next to each other

// Pieces of 16 bytes of a state's row: a lane has some of them, the lanes of a row 128 bytes next to each other. Lanes
// behind the last channel, and so the channels that they have, are as good as zeros.
template <typename State, int K>
struct Pieces {
  static constexpr int kSize = 16 / sizeof(State);           // channels
  static constexpr int kCount = K / (kDecodeLanes * kSize);  // of a lane

  // Where four channels lie in shared memory, in fours: so that lanes next to each other read fours next to each other.
  static constexpr int kFours = kSize / 4;  // of a piece
  static __device__ __forceinline__ int place(int piece, int four, int lane) {
    return (piece * kFours + four) * kDecodeLanes + lane;
  }
  static __device__ __forceinline__ int place(int channel) {
    const int four = channel / 4;
    return place(four / (kFours * kDecodeLanes), four % kFours, four / kFours % kDecodeLanes);
  }

  static __device__ __forceinline__ void unpack_state(float* x, uint4 data) {
    const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(State) == 4) {
        x[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack(State(), words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }

  static __device__ __forceinline__ uint4 pack_state(const float* x) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(State) == 4) {
        words[i] = __float_as_uint(x[i]);
      } else {
        words[i] = pack(State(), x[2 * i], x[2 * i + 1]);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int bit = 1; bit < kWarp; bit *= 2) {
    x += __shfl_xor_sync(~0u, x, bit);
  }
  return x;
}

// A token on its way: a lane's four channels of q and k, and the raw gate and beta.
struct RawToken {
  uint2 q = {}, k = {};
  uint32_t a = 0, b = 0;
};

template <typename Element>
__device__ __forceinline__ uint2 load_four(const void* elements, int64_t offset) {
  return *reinterpret_cast<const uint2*>(static_cast<const Element*>(elements) + offset);
}
template <typename Element>
__device__ __forceinline__ float4 unpack_four(uint2 data) {
  const float2 low = unpack(Element(), data.x), high = unpack(Element(), data.y);
  return {low.x, low.y, high.x, high.y};
}
__device__ __forceinline__ float dot_of_lane(float4 x, float4 y) {
  return x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
}
__device__ __forceinline__ float dot(float4 x, float4 y) { return sum_over_warp(dot_of_lane(x, y)); }
__device__ __forceinline__ float4 times(float4 x, float factor) {
  return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}

template <typename Element>
__device__ __forceinline__ void load_queries_and_keys(RawToken& raw, const DecodeTokens& tokens, int64_t at,
                                                      int key_dim) {
  if (const int channel = 4 * (threadIdx.x % kWarp); channel < key_dim) {
    raw.q = load_four<Element>(tokens.q, at * tokens.q_stride + channel);
    raw.k = load_four<Element>(tokens.k, at * tokens.k_stride + channel);
  }
}
__device__ __forceinline__ void load_gates(RawToken& raw, const DecodeTokens& tokens, int64_t at) {
  raw.a = load_bits(tokens.a, tokens.activations, Activation::kG, at * tokens.a_stride + tokens.head);
  raw.b = load_bits(tokens.b, tokens.activations, Activation::kBeta, at * tokens.b_stride + tokens.head);
}

// By a warp: what normalises q, and scales it, and k; and the product of what comes out.
struct Factors {
  float q, k, qk;

  __device__ __forceinline__ Factors(const DecodeTokens& tokens, float4 q_raw, float4 k_raw) : q(tokens.scale), k(1.f) {
    if (tokens.normalize) {
      constexpr float kEps = static_cast<float>(kNormEps);
      q *= rsqrtf(dot(q_raw, q_raw) + kEps);
      k = rsqrtf(dot(k_raw, k_raw) + kEps);
    }
    qk = dot(q_raw, k_raw) * q * k;
  }
};

__device__ __forceinline__ float decay_of(const DecodeTokens& tokens, const HeadGate& gate, const RawToken& raw) {
  return expf(gate(from_bits(raw.a, tokens.activations, Activation::kG)));
}
__device__ __forceinline__ float beta_of(const DecodeTokens& tokens, const RawToken& raw) {
  return activated_beta(from_bits(raw.b, tokens.activations, Activation::kBeta), tokens.activations);
}

// What is the same for all value rows of a head, of kDecodeTokens tokens from `begin` on, and the CTA's part of v.
// Each token is made by a warp.
template <typename Element, typename State, int K>
class PreparedTokens {
 public:
  using P = Pieces<State, K>;

  struct Shared {
    float4 q[kDecodeTokens][K / 4], k[kDecodeTokens][K / 4];  // normalised, q scaled; in the order of Pieces::place
    float4 v[kDecodeTokens][kDecodeTile / 4];
    float decay[kDecodeTokens], beta[kDecodeTokens], qk[kDecodeTokens];
    // Of the tokens of a block of kDecodeBlock, made by relate(): the decays from the block's first token to this one,
    // and of token j before it, at j % kDecodeBlock, beta decay_j+1 ... decay_t (k_j k_t) and decay_j+1 ... decay_t
    // (k_j q_t).
    float since[kDecodeTokens], kk[kDecodeTokens][kDecodeBlock], kq[kDecodeTokens][kDecodeBlock];
  };
  struct Raw : RawToken {
    uint2 v = {};  // four rows of a lane
  };

  __device__ __forceinline__ PreparedTokens(Shared& shared, const DecodeTokens& tokens, int64_t begin, int count,
                                            int first_row, int key_dim, int value_dim)
      : shared_(shared),
        tokens_(tokens),
        gate_(load_gate_bits(tokens.A_log, tokens.dt_bias, tokens.activations, tokens.head), tokens.activations),
        begin_(begin),
        count_(count),
        first_row_(first_row),
        K_(key_dim),
        V_(value_dim) {}

  // The warp's first token of a block. Of what is behind the sequence's last token nothing is read.
  __device__ __forceinline__ Raw load(int token) const {
    Raw raw;
    if (token < count_) {
      const int four = 4 * (threadIdx.x % kWarp);
      const int64_t at = begin_ + token;
      load_queries_and_keys<Element>(raw, tokens_, at, K_);
      if (four < kDecodeTile && first_row_ + four < V_) {
        raw.v = load_four<Element>(tokens_.v, at * tokens_.v_stride + first_row_ + four);
      }
      load_gates(raw, tokens_, at);
    }
    return raw;
  }

  // Of all warps: the block of tokens that this one is of, whose first the warp has loaded.
  __device__ __forceinline__ void prepare(int block, Raw raw) {
#pragma unroll 1
    for (int t = threadIdx.x / kWarp; t < kDecodeTokens && block * kDecodeTokens + t < count_; t += kDecodeWarps) {
      store(t, raw);
      raw = load(block * kDecodeTokens + t + kDecodeWarps);
    }
    __syncthreads();
    block_ = block;
  }
  // Of the first block of prepare(), which is ready: what tokens are to those before them.
  __device__ __forceinline__ void relate() {
    const int lane = threadIdx.x % kWarp;
    const auto four = [&](const float4(&x)[K / 4]) { return lane < K / 4 ? x[lane] : float4{}; };
#pragma unroll 1
    for (int t = threadIdx.x / kWarp; t < count_; t += kDecodeWarps) {
      const float4 q = four(shared_.q[t]), k = four(shared_.k[t]);
      float since = shared_.decay[t];
#pragma unroll
      for (int j = kDecodeBlock - 2; j >= 0; --j) {
        if (j < t % kDecodeBlock) {
          const int before = t - t % kDecodeBlock + j;
          const float4 k_before = four(shared_.k[before]);
          const float kk = dot(k_before, k) * since * shared_.beta[t], kq = dot(k_before, q) * since;
          if (lane == 0) {
            shared_.kk[t][j] = kk;
            shared_.kq[t][j] = kq;
          }
          since *= shared_.decay[before];
        }
      }
      if (lane == 0) {
        shared_.since[t] = since;
      }
    }
    __syncthreads();
  }
  // The same in all threads of the CTA.
  __device__ __forceinline__ void want(int token) {
    if (const int block = token / kDecodeTokens; block != block_) {
      __syncthreads();
      prepare(block, load(block * kDecodeTokens + threadIdx.x / kWarp));
    }
  }
  __device__ __forceinline__ static int first_of_warp() { return threadIdx.x / kWarp; }

 private:
  static_assert(K <= 4 * kWarp && kDecodeTile <= 4 * kWarp);

  __device__ __forceinline__ void store(int t, const Raw& raw) {
    const int lane = threadIdx.x % kWarp;
    const float4 q = unpack_four<Element>(raw.q), k = unpack_four<Element>(raw.k);
    const Factors factors(tokens_, q, k);
    if (lane < K / 4) {
      shared_.q[t][P::place(4 * lane)] = times(q, factors.q);
      shared_.k[t][P::place(4 * lane)] = times(k, factors.k);
    }
    if (lane < kDecodeTile / 4) {
      shared_.v[t][lane] = unpack_four<Element>(raw.v);
    }
    if (lane == 0) {
      shared_.decay[t] = decay_of(tokens_, gate_, raw);
      shared_.beta[t] = beta_of(tokens_, raw);
      shared_.qk[t] = factors.qk;
    }
  }

  Shared& shared_;
  const DecodeTokens& tokens_;
  const HeadGate gate_;
  const int64_t begin_;
  const int count_, first_row_, K_, V_;
  int block_ = -1;
};

}  // namespace flash_qla::device
