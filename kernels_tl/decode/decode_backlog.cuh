// A replay buffer of deferred state writes: where it is in memory, and its keys and changes in shared memory; see
// decode/decode_buffered.py. The token that it is multiplied with is here, too.
#pragma once

#include "decode/decode_rows.cuh"

namespace flash_qla::device {

static_assert(kDecodeBacklog == kWarp);  // each lane has one step of the replay buffer

// Entry `row` of a table of one column, read from L2. The loads of several entries can be in flight together, whereas
// Table::fresh waits for each load.
class Entry {
 public:
  __device__ __forceinline__ Entry(const Table& table, int row) : is_wide_(table.is_wide()) {
    const int* const from = static_cast<const int*>(table.entries) + (is_wide_ ? 2 * row : row);
    if (table) {
      low_ = __ldcg(from);
    }
    if (is_wide_) {
      high_ = __ldcg(from + 1);
    }
  }
  __device__ __forceinline__ int64_t operator()() const {
    return is_wide_ ? static_cast<int64_t>(high_) << 32 | static_cast<uint32_t>(low_) : low_;
  }

 private:
  const bool is_wide_;
  int low_ = 0, high_ = 0;
};

// The replay buffers of all slots, and a head's place in them. `changes` and `keys` point to slot 0, `gates` to the
// value head's part of slot 0. Strides go from slot to slot, in elements.
struct DecodeBacklog {
  void *changes, *keys;  // in the element type of k, or in fp32
  float* gates;
  int64_t change_stride, key_stride, gate_stride;
  Table positions, flushes;
  int length;     // most steps of a replay buffer
  int key_head;   // the head of k
  bool is_first;  // whether the value head is the first one of its group, which writes the key
  bool fp32_changes, fp32_keys;

  // Offsets of the first key and of the first change of a head's replay buffer.
  __device__ __forceinline__ int64_t first_key(int64_t slot, int key_dim) const {
    return slot * key_stride + int64_t{key_head} * length * key_dim;
  }
  __device__ __forceinline__ int64_t first_change(int64_t slot, int head, int value_dim) const {
    return slot * change_stride + int64_t{head} * length * value_dim;
  }
};

// A sequence's entries in the tables. The caller may have put any number there, so slot() and steps() check the
// entries. All loads are in flight before the first use.
class SequenceEntries {
 public:
  __device__ __forceinline__ SequenceEntries(const FirstSlots& slots, const DecodeBacklog& backlog, int n)
      : index_(slots.indices, as_of_lane(n)),
        position_(backlog.positions, as_of_lane(n)),
        flush_(backlog.flushes, as_of_lane(n)) {}

  __device__ __forceinline__ int64_t slot(const FirstSlots& slots, int n) const {
    return slots.indices ? slots.checked(index_()) : n;
  }
  // The number of steps in the replay buffer.
  __device__ __forceinline__ int steps(const DecodeBacklog& backlog) const {
    return static_cast<int>(clamp(position_(), 0, backlog.length - 1));
  }
  __device__ __forceinline__ bool must_flush() const { return flush_() != 0; }

 private:
  const Entry index_, position_, flush_;
};

// Prefetches a head's replay buffer into L2, as prefetch_state does with the state. One CTA of each head calls it. Warp
// 1 does it, because warp 0 runs prefetch_state: neither waits for the other's loads.
template <typename Element>
__device__ __forceinline__ void prefetch_backlog(const FirstSlots& slots, const DecodeBacklog& backlog, int head, int n,
                                                 int key_dim, int value_dim) {
  if (threadIdx.x != kWarp) {
    return;
  }
  const SequenceEntries entries(slots, backlog, n);
  const int64_t slot = entries.slot(slots, n);
  const int steps = entries.steps(backlog);
  if (slot == kNoState || steps == 0) {
    return;
  }
  const auto prefetch = [steps](const void* data, bool fp32, int64_t first, int dim) {
    const int size = fp32 ? sizeof(float) : sizeof(Element);
    prefetch_bytes(static_cast<const char*>(data) + first * size, steps * dim * size);
  };
  prefetch(backlog.changes, backlog.fp32_changes, backlog.first_change(slot, head, value_dim), value_dim);
  if (backlog.is_first) {
    prefetch(backlog.keys, backlog.fp32_keys, backlog.first_key(slot, key_dim), key_dim);
  }
  const float* const gates = backlog.gates + slot * backlog.gate_stride;
  prefetch_line(gates);
  prefetch_line(gates + steps - 1);
}

// A left factor of 16 rows, read in pieces of eight neighbouring channels. In each step a lane reads a piece of row
// lane / 4 and a piece of row lane / 4 + 8, which are its fragments of two mmas. An mma expects other channels in these
// registers. The products stay the same, because the right factor has its channels in the same order.
template <int K>
struct LeftFactor {
  static constexpr int kPiecesOfStep = 4;  // one for each of the lanes that share a row
  static constexpr int kSteps = K / 8 / kPiecesOfStep;
  static_assert(K % (8 * kPiecesOfStep) == 0);

  // The number of the lane's piece in each of the two rows.
  __device__ __forceinline__ static int piece_of(int step) {
    return step * kPiecesOfStep + static_cast<int>(threadIdx.x) % 4;
  }
};

// The token's k and q in shared memory, and v of the CTA's rows. Channels from key_dim on count as zeros.
template <typename Element, int K, int kTileRows>
class TokenRows {
 public:
  using Left = LeftFactor<K>;
  enum Row { kKey, kQuery };

  // Starts the copies, those of `row_count` rows of v. One thread calls it.
  template <typename Barrier>
  __device__ __forceinline__ void fetch(Barrier& loaded, const DecodeTokens& tokens, int64_t at, int first_row,
                                        int row_count, int key_dim) {
    constexpr int kSize = sizeof(Element);
    const int bytes = key_dim * kSize, bytes_of_v = row_count * kSize;
    loaded.arrive_and_expect_tx(2 * bytes + bytes_of_v);
    copy_bytes(rows_[kKey], 0, static_cast<const Element*>(tokens.k) + at * tokens.k_stride, bytes, loaded);
    copy_bytes(rows_[kQuery], 0, static_cast<const Element*>(tokens.q) + at * tokens.q_stride, bytes, loaded);
    copy_bytes(v_, 0, static_cast<const Element*>(tokens.v) + at * tokens.v_stride + first_row, bytes_of_v, loaded);
  }

  // sums += left [k q]. sums[0] and sums[1] are the products of row lane / 4 with k and q; sums[2] and sums[3] those of
  // row lane / 4 + 8. left(step, half) is the lane's piece of row lane / 4 + 8 half. The even columns of the right
  // factor are k and the odd columns q, so all four lanes that share a row get its products.
  template <typename GetLeft>
  __device__ __forceinline__ void multiply(float (&sums)[4], int key_dim, GetLeft left) const {
    float others[4] = {};  // a second accumulator, so that fewer mmas wait for each other
#pragma unroll
    for (int step = 0; step < Left::kSteps; ++step) {
      uint4 x = {}, low = {}, high = {};
      if (8 * Left::piece_of(step) < key_dim) {
        x = right(step), low = left(step, 0), high = left(step, 1);
      }
      multiply_add(Element(), sums, {low.x, high.x, low.y, high.y}, x.x, x.y);
      multiply_add(Element(), others, {low.z, high.z, low.w, high.w}, x.z, x.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] += others[i];
    }
  }
  // One lane calls use(kKey, k^T k, k^T q), another use(kQuery, q^T k, q^T q).
  template <typename Use>
  __device__ __forceinline__ void multiply_self(int key_dim, Use use) const {
    float sums[4] = {};
    multiply(sums, key_dim, [&](int step, int) { return right(step); });
    if (lane() % 4 == 0 && lane() < 8) {
      use(lane() / 4, sums[0], sums[1]);
    }
  }

  __device__ __forceinline__ float v(int row) const { return to_float(v_[row]); }
  __device__ __forceinline__ uint4 key(int piece) const { return rows_[kKey][piece]; }
  // kCount channels of k or q, from `channel` on.
  template <int kCount>
  __device__ __forceinline__ void load(float (&x)[kCount], Row row, int channel) const {
    struct alignas(2 * kCount) Pairs {
      uint32_t of[kCount / 2];
    };
    const Pairs pairs = *reinterpret_cast<const Pairs*>(reinterpret_cast<const Element*>(rows_[row]) + channel);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 pair = unpack(Element(), pairs.of[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarp; }
  __device__ __forceinline__ uint4 right(int step) const { return rows_[lane() / 4 % 2][Left::piece_of(step)]; }

  uint4 rows_[2][K / 8 + Left::kPiecesOfStep];  // k and q are read together: the padding puts them in different banks
  alignas(16) Element v_[kTileRows];
};

// The keys of a head's replay buffer, copied to shared memory. A row has key_dim elements, as in global memory.
template <typename Element, int K>
class BacklogKeys {
 public:
  static constexpr int kPieces = K / 8;  // pieces of a row
  using Shared = uint4[kDecodeBacklog * kPieces];
  static constexpr int kTile = 16, kTiles = kDecodeBacklog / kTile;

  __device__ __forceinline__ BacklogKeys(Shared& shared, const DecodeBacklog& backlog, int64_t slot, int steps,
                                         int key_dim)
      : shared_(shared),
        keys_(backlog.keys),
        first_(backlog.first_key(slot, key_dim)),
        is_fp32_(backlog.fp32_keys),
        steps_(steps),
        key_dim_(key_dim) {}

  // Starts the copy. One thread calls it.
  template <typename Barrier>
  __device__ __forceinline__ void fetch(Barrier& loaded) const {
    const int bytes = is_fp32_ ? 0 : steps_ * key_dim_ * static_cast<int>(sizeof(Element));
    loaded.arrive_and_expect_tx(bytes);
    if (bytes > 0) {
      copy_bytes(shared_, 0, static_cast<const Element*>(keys_) + first_, bytes, loaded);
    }
  }
  // Copies fp32 keys. All threads of the CTA call it.
  __device__ __forceinline__ void convert() const {
    if (is_fp32_) {
      const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(keys_) + first_);
#pragma unroll 1
      for (int i = threadIdx.x; i < steps_ * key_dim_ / 8; i += kDecodeThreads) {
        const float4 a = from[2 * i], b = from[2 * i + 1];
        shared_[i] = {pack(Element(), a.x, a.y), pack(Element(), a.z, a.w), pack(Element(), b.x, b.y),
                      pack(Element(), b.z, b.w)};
      }
      __syncthreads();
    }
  }

  // Eight channels of a step.
  __device__ __forceinline__ const uint4& piece(int step, int index) const {
    return shared_[step * key_dim_ / 8 + index];
  }
  // Arranges the keys so that `arranged` reads four neighbouring steps from different banks. The token's key follows
  // the last step, zeros follow the token's key. All threads of the CTA call it; afterwards only `arranged` is valid.
  template <typename Token>
  __device__ __forceinline__ void arrange(const Token& token) const {
    constexpr int kPiecesOfThread = kDecodeBacklog * kPieces / kDecodeThreads;
    uint4 pieces[kPiecesOfThread];
#pragma unroll
    for (int i = 0; i < kPiecesOfThread; ++i) {
      const int step = (i * kDecodeThreads + threadIdx.x) / kPieces, index = threadIdx.x % kPieces;
      pieces[i] = uint4{};
      if (step <= steps_ && 8 * index < key_dim_) {
        pieces[i] = step < steps_ ? piece(step, index) : token.key(index);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPiecesOfThread; ++i) {
      const int step = (i * kDecodeThreads + threadIdx.x) / kPieces, index = threadIdx.x % kPieces;
      shared_[arranged_index(step, index)] = pieces[i];
    }
    __syncthreads();
  }
  __device__ __forceinline__ const uint4& arranged(int step, int index) const {
    return shared_[arranged_index(step, index)];
  }
  // kCount channels of a step, from `channel` on.
  template <int kCount>
  __device__ __forceinline__ void load(float (&x)[kCount], int step, int channel) const {
    struct alignas(2 * kCount) Pairs {
      uint32_t of[kCount / 2];
    };
    const Pairs pairs =
        *reinterpret_cast<const Pairs*>(reinterpret_cast<const Element*>(shared_) + step * key_dim_ + channel);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 pair = unpack(Element(), pairs.of[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
  // Writes the token's key as the next step. One warp calls it.
  template <typename Token>
  __device__ __forceinline__ void write(const Token& token) const {
    const int piece = threadIdx.x % kWarp;
    if (8 * piece >= key_dim_) {
      return;
    }
    const int64_t to = first_ + steps_ * key_dim_ + 8 * piece;
    const uint4 key = token.key(piece);
    if (is_fp32_) {
      const uint32_t pairs[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        reinterpret_cast<float2*>(static_cast<float*>(keys_) + to)[i] = unpack(Element(), pairs[i]);
      }
    } else {
      *reinterpret_cast<uint4*>(static_cast<Element*>(keys_) + to) = key;
    }
  }

 private:
  static_assert(kPieces % 16 == 0 && kDecodeThreads % kPieces == 0);
  __device__ __forceinline__ static int arranged_index(int step, int piece) {
    return step * kPieces + (piece ^ step % 4 * 4);
  }

  Shared& shared_;
  void* const keys_;
  const int64_t first_;
  const bool is_fp32_;
  const int steps_, key_dim_;
};

// The changes of a head's replay buffer in a part's kRows value rows. One warp of the part copies them to shared
// memory.
template <typename Element, int kRows>
class BacklogChanges {
 public:
  struct Shared {
    alignas(16) char of_steps[kDecodeBacklog][kRows * sizeof(float) + 16];  // padded: steps begin in different banks
  };

  __device__ __forceinline__ BacklogChanges(Shared& shared, const DecodeBacklog& backlog, int64_t slot, int head,
                                            int steps, int value_dim)
      : shared_(shared),
        changes_(backlog.changes),
        first_(backlog.first_change(slot, head, value_dim)),
        is_fp32_(backlog.fp32_changes),
        steps_(steps),
        V_(value_dim) {}

  // Starts asynchronous copies of the part's rows, from first_row on.
  __device__ __forceinline__ void fetch(int first_row) const {
    is_fp32_ ? copy<float>(first_row) : copy<Element>(first_row);
    commit_copies();
  }
  __device__ __forceinline__ static void await() {
    wait_for_copies<0>();
    __syncwarp();
  }
  // The changes of a step in kCount of the part's rows.
  template <int kCount>
  __device__ __forceinline__ void load(float (&x)[kCount], int step, int row) const {
    const char* const from = shared_.of_steps[step];
    if (is_fp32_) {
      struct alignas(kCount < 4 ? 4 * kCount : 16) Floats {
        float of[kCount];
      };
      const Floats floats = *reinterpret_cast<const Floats*>(from + row * sizeof(float));
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = floats.of[i];
      }
    } else {
      struct alignas(2 * kCount) Pairs {
        uint32_t of[kCount / 2];
      };
      const Pairs pairs = *reinterpret_cast<const Pairs*>(from + row * sizeof(Element));
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const float2 pair = unpack(Element(), pairs.of[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }
  // Writes the token's change in a row as the next step.
  __device__ __forceinline__ void write(int row, float change) const {
    const int64_t to = first_ + steps_ * V_ + row;
    if (is_fp32_) {
      static_cast<float*>(changes_)[to] = change;
    } else {
      static_cast<Element*>(changes_)[to] = from_float(Element(), change);
    }
  }

 private:
  template <typename T>
  __device__ __forceinline__ void copy(int first_row) const {
    constexpr int kCount = 16 / sizeof(T), kPieces = kRows / kCount;
    const int lane = threadIdx.x % kWarp, in_rows = lane % kPieces * kCount, row = first_row + in_rows;
    const T* const from = static_cast<const T*>(changes_) + first_ + row;
#pragma unroll 1
    for (int step = lane / kPieces; step < steps_ && row < V_; step += kWarp / kPieces) {
      copy_async(shared_.of_steps[step] + in_rows * sizeof(T), from + step * V_, true);
    }
  }

  Shared& shared_;
  void* const changes_;
  const int64_t first_;
  const bool is_fp32_;
  const int steps_, V_;
};

}  // namespace flash_qla::device
