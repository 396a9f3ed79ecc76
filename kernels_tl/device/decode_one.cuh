// One token of a sequence on fp32 states: a warp takes eight value rows through it by itself, a lane having four
// channels of each. See serving/decode.py.
#pragma once

#include "device/decode_tokens.cuh"

namespace flash_qla::device {

// Of kCount sums over kLanes lanes next to each other this lane's, number lane / (kLanes / kCount). Every step halves
// what a lane still has to add up.
template <int kLanes, int kCount>
__device__ __forceinline__ float sum_and_scatter(float (&x)[kCount], int lane) {
  int count = kCount;
#pragma unroll
  for (int bit = kLanes / 2; bit > 0; bit /= 2) {
    if (count == 1) {
      x[0] += __shfl_xor_sync(~0u, x[0], bit);
    } else {
      count /= 2;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float low = x[i], high = x[i + count];
        x[i] = (lane & bit ? high : low) + __shfl_xor_sync(~0u, lane & bit ? low : high, bit);
      }
    }
  }
  return x[0];
}

// Of a token what is the same for all value rows of a head: a lane's four channels of q and k.
struct PreparedToken {
  float4 q, k;
  float decay, beta, qk;
};

class OneToken {
 public:
  static constexpr int kRows = 8;

  // Eight rows from `row` on, of a head's state.
  __device__ __forceinline__ OneToken(int row, int key_dim, int value_dim) : row_(row), K_(key_dim), V_(value_dim) {}

  __device__ __forceinline__ void load(const float* state) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      S_[r] = is_there(r) ? __ldcg(reinterpret_cast<const float4*>(state + offset(r))) : float4{};
    }
  }
  __device__ __forceinline__ void set(const uint4* tile) {  // that has the rows as the state has them
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      S_[r] = reinterpret_cast<const float4*>(tile)[r * kWarp + lane()];
    }
  }
  __device__ __forceinline__ void write(float* state) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (is_there(r)) {
        __stcg(reinterpret_cast<float4*>(state + offset(r)), S_[r]);
      }
    }
  }

  // Of the row whose v and o the lane has: the first half of the lanes makes the changes, the other one the outputs.
  __device__ __forceinline__ static int own_row() { return lane() % (kWarp / 2) / 2; }

  // change = beta (v - decay S k), o = decay S q + change (k q), S' = decay S + change k^T
  __device__ __forceinline__ float step(const PreparedToken& token, float v) {
    float sums[2 * kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = dot_of_lane(S_[r], token.k);
      sums[kRows + r] = dot_of_lane(S_[r], token.q);
    }
    const float decayed = token.decay * sum_and_scatter<kWarp>(sums, lane());
    const float change = token.beta * (v - decayed);
    const float out = decayed + __shfl_xor_sync(~0u, change, kWarp / 2) * token.qk;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float change_of_row = __shfl_sync(~0u, change, 2 * r);
      float4& S = S_[r];
      S.x = token.decay * S.x + change_of_row * token.k.x;
      S.y = token.decay * S.y + change_of_row * token.k.y;
      S.z = token.decay * S.z + change_of_row * token.k.z;
      S.w = token.decay * S.w + change_of_row * token.k.w;
    }
    return out;
  }
  // What step has given, of a token; or another number.
  template <typename Element>
  __device__ __forceinline__ void write_output(Element* o, float out) const {
    if (lane() >= kWarp / 2 && lane() % 2 == 0 && row_ + own_row() < V_) {
      o[row_ + own_row()] = from_float(Element(), out);
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarp; }
  __device__ __forceinline__ int offset(int r) const { return (row_ + r) * K_ + 4 * lane(); }
  __device__ __forceinline__ bool is_there(int r) const { return row_ + r < V_ && 4 * lane() < K_; }

  const int row_, K_, V_;
  float4 S_[kRows];
};

// By a CTA of as many value rows as its warps have, where every sequence has one token: nothing is shared.
template <typename Element>
__device__ __forceinline__ void decode_one(const DecodePlan& plan, const DecodeTokens& tokens,
                                           const DecodeStates& states, void* outputs, int64_t o_stride,
                                           const DecodeShare& share, int key_dim, int value_dim) {
  const int n = share.n, row = share.first_row + threadIdx.x / kWarp * OneToken::kRows;
  const int64_t at = plan.begin(n), slot = plan.first_slots(n);
  Element* const o = static_cast<Element*>(outputs) + at * o_stride;
  OneToken rows(row, key_dim, value_dim);
  if (slot == kNobody) {
    rows.write_output(o, 0.f);
    return;
  }
  rows.load(static_cast<const float*>(states.pool) + slot * states.slot_stride);
  RawToken raw;
  load_queries_and_keys<Element>(raw, tokens, at, key_dim);
  load_gates(raw, tokens, at);
  const GateBits gate = load_gate_bits(tokens.A_log, tokens.dt_bias, tokens.activations, tokens.head);
  const int own = row + OneToken::own_row();
  float v = 0.f;
  if (own < value_dim) {
    v = to_float(static_cast<const Element*>(tokens.v)[at * tokens.v_stride + own]);
  }
  const float4 q = unpack_four<Element>(raw.q), k = unpack_four<Element>(raw.k);
  const Factors factors(tokens, q, k);
  const PreparedToken token = {times(q, factors.q), times(k, factors.k),
                               decay_of(tokens, HeadGate(gate, tokens.activations), raw), beta_of(tokens, raw),
                               factors.qk};
  rows.write_output(o, rows.step(token, v));
  states.places<float>(plan, n, 0, 1, slot).for_each([&](float* to) { rows.write(to); });
}

}  // namespace flash_qla::device
