// Several tokens of a sequence processed together, in blocks; see decode/decode.py.
#pragma once

#include "decode/decode_rows.cuh"

namespace flash_qla::device {

constexpr int kDecodeGroups = kWarp / kDecodeLanes;  // neighbouring rows of a warp, each in kDecodeLanes lanes

// Products of the tokens of a block of kDecodeBlock. With d_ij = decay_i ... decay_j and `first` the block's first
// token,
//
//   since[t] = d_first,t    kk[t][j] = beta_t d_j+1,t (k_j k_t)    kq[t][j] = d_j+1,t (k_j q_t)
//
// for j < t in the block; j counts from `first` in the second index.
struct Relations {
  float since[kDecodeTokens], kk[kDecodeTokens][kDecodeBlock], kq[kDecodeTokens][kDecodeBlock];

  // The whole CTA calls it, after `prepare` of the tokens.
  template <typename Tokens>
  __device__ __forceinline__ void set(const Tokens& tokens, int count) {
    const int lane = threadIdx.x % kWarp;
    const auto dot = [](float4 x, float4 y) {
      return sum_of_lanes<kWarp>(x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w);
    };
#pragma unroll 1
    for (int t = threadIdx.x / kWarp; t < count; t += kDecodeWarps) {
      const float4 q = tokens.q[t][lane], k = tokens.k[t][lane];
      float since_before = tokens.decay[t];
#pragma unroll
      for (int j = kDecodeBlock - 2; j >= 0; --j) {
        if (j < t % kDecodeBlock) {
          const int before = t - t % kDecodeBlock + j;
          const float4 k_before = tokens.k[before][lane];
          const float of_k = dot(k_before, k) * since_before * tokens.beta[t], of_q = dot(k_before, q) * since_before;
          if (lane == 0) {
            kk[t][j] = of_k;
            kq[t][j] = of_q;
          }
          since_before *= tokens.decay[before];
        }
      }
      if (lane == 0) {
        since[t] = since_before;
      }
    }
    __syncthreads();
  }
};

// kDecodeWarpRows value rows of an fp32 state in a warp's registers, from `row` of the CTA's rows on. kDecodeLanes
// lanes share a row: each has every kDecodeLanes-th quad of its channels. A lane has kDecodeLaneRows rows,
// kDecodeGroups apart. Rows go to and from memory through a tile in shared memory, where they lie as in the state:
// memory is faster with 512 neighbouring bytes per warp.
template <int K>
class StateBlock {
 public:
  static constexpr int kQuads = K / (4 * kDecodeLanes);  // quads of channels of a lane and row
  using Tile = float4[kDecodeWarpRows][K / 4];
  static_assert(K == 4 * kWarp && kDecodeWarpRows == kDecodeGroups * kDecodeLaneRows);

  __device__ __forceinline__ StateBlock(int row, int first_row, int key_dim, int value_dim)
      : row_(row), first_row_(first_row), K_(key_dim), V_(value_dim) {}

  // Starts asynchronous copies; zeros for channels and rows that the state lacks.
  __device__ __forceinline__ void fetch(Tile& to, const float* from) const {
    for_all_rows([&](int row, int offset, bool there) {
      copy_async(&to[row][threadIdx.x % kWarp], from + (there ? offset : 0), there);
    });
  }
  __device__ __forceinline__ void set(const Tile& from) {
#pragma unroll
    for (int r = 0; r < kDecodeLaneRows; ++r) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float4 x = from[r * kDecodeGroups + group()][column(quad)];
        float* const S = S_[r] + 4 * quad;
        S[0] = x.x, S[1] = x.y, S[2] = x.z, S[3] = x.w;
      }
    }
  }
  __device__ __forceinline__ void write(float* to, Tile& tile) const {
    __syncwarp();  // all lanes have read the old contents
#pragma unroll
    for (int r = 0; r < kDecodeLaneRows; ++r) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float* const S = S_[r] + 4 * quad;
        tile[r * kDecodeGroups + group()][column(quad)] = {S[0], S[1], S[2], S[3]};
      }
    }
    __syncwarp();
    for_all_rows([&](int row, int offset, bool there) {
      if (there) {
        __stcg(reinterpret_cast<float4*>(to + offset), tile[row][threadIdx.x % kWarp]);
      }
    });
  }

  // Applies kTokens tokens from `first` on to the state S, each the successor of the one before. With several tokens
  // `first` is the first token of a block.
  //
  //   S_t = decay_t S_t-1 + change_t k_t^T
  //   change_t = beta_t (v_t - since_t S k_t) - sum over j < t of kk_tj change_j
  //   o_t = since_t S q_t + sum over j <= t of kq_tj change_j
  //
  // so that all products with a state are with S. With one token, since_t = decay_t. The last state is
  //
  //   decay_0 ... decay_T-1 S + sum over t of decay_t+1 ... decay_T-1 change_t k_t^T
  //
  // Returns the element of o that the lane writes.
  template <int kTokens, typename Tokens>
  __device__ __forceinline__ float step(const Tokens& tokens, const Relations& relations, int first) {
    using Sum = LaneSum<kTokens>;
    float Sk[kDecodeLaneRows * kTokens] = {}, Sq[kDecodeLaneRows * kTokens] = {};
#pragma unroll
    for (int quad = 0; quad < kChannels / 4; ++quad) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const Quad k = quad_of(tokens.k[first + t], quad), q = quad_of(tokens.q[first + t], quad);
#pragma unroll
        for (int r = 0; r < kDecodeLaneRows; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            Sk[r * kTokens + t] += S_[r][4 * quad + i] * k.x[i];
            Sq[r * kTokens + t] += S_[r][4 * quad + i] * q.x[i];
          }
        }
      }
    }
    const int lane_token = first + Sum::token(lane());
    const float since = kTokens == 1 ? tokens.decay[lane_token] : relations.since[lane_token];
    const float v = tokens.v[lane_token][row_ + Sum::row(lane()) * kDecodeGroups + group()];
    const float alone = tokens.beta[lane_token] * (v - since * sum_and_scatter<kDecodeLanes>(Sk, lane()));
    float out = since * sum_and_scatter<kDecodeLanes>(Sq, lane());
    float change[kDecodeLaneRows][kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int r = 0; r < kDecodeLaneRows; ++r) {
        change[r][t] = __shfl_sync(~0u, alone, Sum::lane_of(r, t), kDecodeLanes);
#pragma unroll
        for (int j = 0; j < t; ++j) {
          change[r][t] -= relations.kk[first + t][j] * change[r][j];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float change_of_row = change[0][t];
#pragma unroll
      for (int r = 1; r < kDecodeLaneRows; ++r) {
        change_of_row = Sum::row(lane()) == r ? change[r][t] : change_of_row;
      }
      if (first + t <= lane_token) {
        out += change_of_row * (first + t == lane_token ? tokens.qk[lane_token] : relations.kq[lane_token][t]);
      }
    }
    float until = 1.f;  // product of the decays after token t; at the end of all decays
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
#pragma unroll
      for (int r = 0; r < kDecodeLaneRows; ++r) {
        change[r][t] *= until;
      }
      until *= tokens.decay[first + t];
    }
    if (kTokens > 1) {
      forget_memory();  // k is read again: registers do not hold it
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int quad = 0; quad < kChannels / 4; ++quad) {
        const Quad k = quad_of(tokens.k[first + t], quad);
#pragma unroll
        for (int r = 0; r < kDecodeLaneRows; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& S = S_[r][4 * quad + i];
            S = (t == 0 ? until * S : S) + change[r][t] * k.x[i];
          }
        }
      }
    }
    return out;
  }

  // Stores the outputs of a step. `o` points to the head's row of the step's first token.
  template <int kTokens, typename Element>
  __device__ __forceinline__ void write_output(Element* o, int64_t o_stride, float out) const {
    using Sum = LaneSum<kTokens>;
    const int row = first_row_ + row_ + Sum::row(lane()) * kDecodeGroups + group();
    if (lane() % Sum::kLanes == 0 && row < V_) {
      o[Sum::token(lane()) * o_stride + row] = from_float(Element(), out);
    }
  }

 private:
  static constexpr int kChannels = K / kDecodeLanes;

  struct Quad {
    float x[4];
  };
  // The lane's channels 4 * quad to 4 * quad + 3 of a token.
  __device__ __forceinline__ static Quad quad_of(const float4 (&token)[K / 4], int quad) {
    const float4 x = token[column(quad)];
    return {{x.x, x.y, x.z, x.w}};
  }

  // sum_and_scatter over the lanes of a row, of kTokens sums for each of the lane's rows: which sum a lane gets.
  template <int kTokens>
  struct LaneSum {
    static constexpr int kLanes = kDecodeLanes / (kDecodeLaneRows * kTokens);  // lanes that get the same sum
    __device__ __forceinline__ static int row(int lane) { return lane / (kLanes * kTokens); }
    __device__ __forceinline__ static int token(int lane) { return lane / kLanes % kTokens; }
    __device__ __forceinline__ static int lane_of(int row, int token) { return (row * kTokens + token) * kLanes; }
  };

  __device__ __forceinline__ static int lane() { return threadIdx.x % kDecodeLanes; }
  __device__ __forceinline__ static int group() { return threadIdx.x % kWarp / kDecodeLanes; }
  __device__ __forceinline__ static int column(int quad) { return quad * kDecodeLanes + lane(); }
  // use(row, offset in a head's state, whether the state has them) for four channels of the lane in each row.
  template <typename Use>
  __device__ __forceinline__ void for_all_rows(Use use) const {
    const int channel = 4 * (threadIdx.x % kWarp);
#pragma unroll
    for (int i = 0; i < kDecodeWarpRows; ++i) {
      const int row = first_row_ + row_ + i;
      use(i, row * K_ + channel, row < V_ && channel < K_);
    }
  }

  const int row_, first_row_, K_, V_;
  float S_[kDecodeLaneRows][kChannels];
};

}  // namespace flash_qla::device
