// Where decoding finds a sequence's tokens and states, and where states go; see decode/decode.py.
#pragma once

#include "core/activations.cuh"
#include "core/table.cuh"
#include "core/warp.cuh"

namespace flash_qla::device {

constexpr int kWarp = 32;
constexpr int kDecodeThreads = kDecodeWarps * kWarp;
constexpr int kDecodeGroupRows = kDecodeWarps * kDecodeWarpRows;  // value rows that a CTA's warps have at a time

__device__ __forceinline__ int64_t clamp(int64_t x, int64_t least, int64_t most) {
  return x < least ? least : x > most ? most : x;
}

// The slot of each sequence's initial state: the first entry of its table row or, if the numbers of accepted tokens are
// given, the entry of the last accepted token.
struct FirstSlots {
  Table indices, accepted;
  int64_t null_index, slots;

  __device__ __forceinline__ int64_t checked(int64_t index) const { return checked_slot(index, null_index, slots); }
  __device__ __forceinline__ int64_t operator()(int n) const {
    const int column = accepted ? static_cast<int>(clamp(accepted.fresh(n), 1, indices.columns)) - 1 : 0;
    return checked(indices.fresh(n, column));
  }
};

// A CTA's work: value rows of sequence n from first_row on, `groups` times as many as its lanes have.
struct DecodeShare {
  int n, first_row, groups;
};

// A CTA's tile of the first `whole` sequences is `groups` groups of value rows; of the other sequences it is halved
// `halvings` times. Shifts by launch arguments make it cheap to compute again: one more register would be spilled.
__device__ __forceinline__ DecodeShare decode_share(int tile, int place, int groups, int whole, int halvings) {
  const int later = place - whole, shift = later < 0 ? 0 : halvings, own = groups >> shift;
  const int part = later & ((1 << shift) - 1);
  return {(later >> shift) + whole, (tile * groups + part * own) * kDecodeGroupRows, own};
}

// Where the tokens of a sequence are, and where its states come from and go to. Table entries may have any value:
// nothing is read or written out of bounds.
struct DecodePlan {
  FirstSlots first_slots;
  Table offsets, write_indices, state_rows, parents;
  int tokens;  // all of them
  int length;  // tokens of each sequence, without offsets
  bool update_state;

  __device__ __forceinline__ int64_t begin(int n) const {
    return offsets ? clamp(offsets(n), 0, tokens) : static_cast<int64_t>(n) * length;
  }
  __device__ __forceinline__ int count(int n) const {
    const int64_t first = begin(n);
    return offsets ? static_cast<int>(clamp(offsets(n + 1), first, tokens) - first) : length;
  }
  __device__ __forceinline__ int64_t slot_behind(int n, int t, int count, int64_t first_slot) const {
    if (write_indices) {
      return t < write_indices.columns ? first_slots.checked(write_indices(n, t)) : kNoState;
    }
    return update_state && t == count - 1 ? first_slot : kNoState;
  }
  // The token before t, or -1 for the state at the start.
  __device__ __forceinline__ int parent(int n, int t) const {
    return parents && t < parents.columns ? static_cast<int>(clamp(parents(n, t), -1, t - 1)) : t - 1;
  }
  __device__ __forceinline__ int ancestor(int n, int t, int generations) const {
    for (; generations > 0; --generations) {
      t = parent(n, t);
    }
    return t;
  }
  // Tokens between the state at the start and t.
  __device__ __forceinline__ int depth(int n, int t) const {
    int found = 0;
    for (t = parent(n, t); t >= 0; t = parent(n, t)) {
      ++found;
    }
    return found;
  }
};

// A head's inputs of the recurrence: pointers to the head's row of the first token, and strides from token to token.
struct DecodeTokens {
  const void *q, *k, *v;
  const void *a, *b;
  int64_t q_stride, k_stride, v_stride, a_stride, b_stride;
  int head;  // a, b and these are of all value heads
  const void *A_log, *dt_bias;
  int activations;
  float scale;
  bool normalize;
};

// Where states are: a pool, and rows of states after tokens. Each pointer is to the head's state in the first of them.
struct DecodeStates {
  void *pool, *kept;
  int64_t slot_stride, row_stride, step_stride;
  int rows, steps;  // none, if states are not kept

  template <typename State>
  struct Places {
    State *slot, *kept;  // or null

    template <typename Use>
    __device__ __forceinline__ void for_each(Use use) const {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        if (State* const place = i == 0 ? slot : kept; place != nullptr) {
          use(place);
        }
      }
    }
  };
  // Where the head's state after token t of sequence n goes.
  template <typename State>
  __device__ __forceinline__ Places<State> places(const DecodePlan& plan, int n, int t, int count,
                                                  int64_t first_slot) const {
    Places<State> found = {};
    if (const int64_t slot = plan.slot_behind(n, t, count, first_slot); slot != kNoState) {
      found.slot = static_cast<State*>(pool) + slot * slot_stride;
    }
    if (t < steps) {
      const int64_t row = plan.state_rows ? plan.state_rows(n) : n;
      if (row >= 0 && row < rows) {
        found.kept = static_cast<State*>(kept) + row * row_stride + t * step_stride;
      }
    }
    return found;
  }
};

// Prefetches value rows of a state into L2 before the wait for the preceding grid; `pool` is the head's first slot. The
// preceding grid may still write the table or the state, so no result depends on this read. A wrong slot only wastes
// the prefetch, and later writes reach L2, too.
template <typename State>
__device__ __forceinline__ void prefetch_state(const FirstSlots& slots, const void* pool, int64_t slot_stride,
                                               const DecodeShare& share, int key_dim, int value_dim) {
  const int rows = min(share.groups * kDecodeGroupRows, value_dim - share.first_row);
  if (threadIdx.x == 0 && rows > 0) {
    if (const int64_t slot = slots(share.n); slot != kNoState) {
      const State* const from = static_cast<const State*>(pool) + slot * slot_stride + share.first_row * key_dim;
      const int bytes = rows * key_dim * static_cast<int>(sizeof(State));
      prefetch_bytes(from, bytes);
    }
  }
}

}  // namespace flash_qla::device
