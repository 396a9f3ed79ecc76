// Value rows of a state [K, V] in memory, key by key; see decode/decode.py.
#pragma once

#include "decode/decode_rows.cuh"

namespace flash_qla::device {

// StateRows of a state [K, V]. The registers have the same layout as for a state [V, K] in fp32. Rows of a CTA's warps
// are neighbours in memory, so the CTA moves them together, through a tile in shared memory: kDecodeGroupRows values of
// a key, 128 bytes in fp32, are neighbouring pieces of 16 bytes. All threads of the CTA call fetch, await and write.
template <typename State, int K>
class KeyFirstRows : public StateRows<float, K> {
 public:
  using L = RowLanes<float, K>;
  static constexpr int kValues = 16 / sizeof(State);                    // values of a piece
  static constexpr int kPieces = kDecodeGroupRows / kValues;            // pieces of a key
  static constexpr int kPiecesOfWarp = kDecodeWarpRows / kValues;       // pieces of a key with a warp's rows
  static constexpr int kPiecesOfThread = K * kPieces / kDecodeThreads;  // pieces that a thread moves
  using Tile = uint4[K][kPieces];
  static_assert(kDecodeWarpRows % kValues == 0 && K * kPieces % kDecodeThreads == 0);

  using StateRows<float, K>::StateRows;

  // The fetched tile. A second tile follows for states that are written, because a tree of tokens reads the first tile
  // again.
  __device__ __forceinline__ static Tile& tile(void* tiles) { return static_cast<Tile*>(tiles)[0]; }

  // Starts asynchronous copies; zeros for keys and values that the state lacks.
  __device__ __forceinline__ void fetch(Tile& to, const State* from) const {
    for_all_pieces([&](int k, int piece, int offset, bool there) {
      copy_async(&to[k][swizzled_piece(k, piece)], from + (there ? offset : 0), there);
    });
  }
  __device__ __forceinline__ static void await() {
    wait_for_copies<0>();
    __syncthreads();
  }
  __device__ __forceinline__ void set(const Tile& from) {
    with_format<State>(this->dtype_, [&](auto format) {
      for_lane_pieces([&](int channel, int k, int piece, int first_row) {
        const uint4 x = from[k][swizzled_piece(k, piece)];
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (sizeof(State) == 4) {
            this->S_[first_row + i][channel] = __uint_as_float(words[i]);
          } else {
            const float2 pair = unpack(format, words[i]);
            this->S_[first_row + 2 * i][channel] = pair.x;
            this->S_[first_row + 2 * i + 1][channel] = pair.y;
          }
        }
      });
    });
  }
  __device__ __forceinline__ void write(State* to, void* tiles) const {
    Tile& written = static_cast<Tile*>(tiles)[1];
    __syncthreads();  // all threads have stored the old contents
    with_format<State>(this->dtype_, [&](auto format) {
      for_lane_pieces([&](int channel, int k, int piece, int first_row) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (sizeof(State) == 4) {
            words[i] = __float_as_uint(this->S_[first_row + i][channel]);
          } else {
            words[i] = pack(format, this->S_[first_row + 2 * i][channel], this->S_[first_row + 2 * i + 1][channel]);
          }
        }
        written[k][swizzled_piece(k, piece)] = uint4{words[0], words[1], words[2], words[3]};
      });
    });
    __syncthreads();
    for_all_pieces([&](int k, int piece, int offset, bool there) {
      if (there) {
        __stcg(reinterpret_cast<uint4*>(to + offset), written[k][swizzled_piece(k, piece)]);
      }
    });
  }

 private:
  // The place of a piece among the pieces of its key. Lanes that read the same piece of different keys then read
  // different banks.
  __device__ __forceinline__ static int swizzled_piece(int k, int piece) {
    return piece ^ k / L::kPieceChannels % kPieces;
  }

  // use(key, piece, offset in a head's state, whether the state has it) for the thread's pieces.
  template <typename Use>
  __device__ __forceinline__ void for_all_pieces(Use use) const {
    const int first_row = this->row_ - threadIdx.x / kWarp * kDecodeWarpRows;  // of the CTA
#pragma unroll 4
    for (int i = 0; i < kPiecesOfThread; ++i) {
      const int number = i * kDecodeThreads + threadIdx.x, k = number / kPieces, piece = number % kPieces;
      const int row = first_row + piece * kValues;
      use(k, piece, k * this->V_ + row, k < this->K_ && row < this->V_);
    }
  }
  // use(channel of the lane, its key, piece, the piece's first row in the warp) for the pieces with the lane's numbers.
  template <typename Use>
  __device__ __forceinline__ static void for_lane_pieces(Use use) {
#pragma unroll
    for (int channel = 0; channel < L::kChannels; ++channel) {
#pragma unroll
      for (int i = 0; i < kPiecesOfWarp; ++i) {
        use(channel, L::channel_of(channel), threadIdx.x / kWarp * kPiecesOfWarp + i, i * kValues);
      }
    }
  }
};

// prefetch_state for a state [K, V]: each thread prefetches the share's values of its keys.
template <typename State>
__device__ __forceinline__ void prefetch_key_first_state(const FirstSlots& slots, const void* pool, int64_t slot_stride,
                                                         const DecodeShare& share, int key_dim, int value_dim) {
  const int rows = min(share.rows, value_dim - share.first_row);
  if (rows > 0) {
    if (const int64_t slot = slots(share.n); slot != kNoState) {
      const State* const from = static_cast<const State*>(pool) + slot * slot_stride + share.first_row;
      for (int k = threadIdx.x; k < key_dim; k += kDecodeThreads) {
        prefetch_bytes(from + k * value_dim, rows * static_cast<int>(sizeof(State)));
      }
    }
  }
}

}  // namespace flash_qla::device
