// The work of a CTA of decode: its value rows, its sequence's tokens, and where states go; see decode/decode.py.
#pragma once

#include "core/activations.cuh"
#include "core/slots.cuh"
#include "core/warp.cuh"

namespace flash_qla::device {

constexpr int kWarp = 32;
constexpr int kDecodeThreads = kDecodeWarps * kWarp;
// A group: the value rows that a CTA has at a time. With K > 128 and one token groups are smaller (DECODE of
// kernels_tl/config.py).
constexpr int kDecodeGroupRows = kDecodeWarps * kDecodeWarpRows;

__device__ __forceinline__ int64_t clamp(int64_t x, int64_t least, int64_t most) {
  return x < least ? least : x > most ? most : x;
}

// The slot of sequence n's initial state: indices[n][0], or indices[n][accepted[n] - 1] if `accepted` is given; n
// without `indices`. The column is clamped to the table. An index that is no slot gives kNoState.
struct FirstSlots {
  Table indices, accepted;
  int64_t null_index, slots;

  __device__ __forceinline__ int64_t checked(int64_t index) const { return checked_slot(index, null_index, slots); }
  __device__ __forceinline__ int64_t operator()(int n) const {
    if (!indices) {
      return n;
    }
    const int column = accepted ? static_cast<int>(clamp(accepted.fresh(n), 1, indices.columns)) - 1 : 0;
    return checked(indices.fresh(n, column));
  }
};

// A CTA's work: `rows` value rows of sequence n, from first_row on.
struct DecodeShare {
  int n, first_row, rows;
};

// The share of CTA (tile, sequence_part). The first `whole` sequences have one part each, with `groups` groups per
// tile. Each of the others has two parts, which share a tile's groups. The share is computed again where it is used,
// because one more register would spill.
template <int kGroupRows>
__device__ __forceinline__ DecodeShare decode_share(int tile, int sequence_part, int groups, int whole) {
  const int later = sequence_part - whole, shift = later < 0 ? 0 : 1, part_groups = groups >> shift;
  const int part = later & ((1 << shift) - 1);
  return {(later >> shift) + whole, (tile * groups + part * part_groups) * kGroupRows, part_groups * kGroupRows};
}

// The tokens of each sequence, and the slots that its states come from and go to. Table entries may have any value:
// nothing is read or written out of bounds.
struct DecodePlan {
  FirstSlots first_slots;
  Table offsets, write_indices, state_rows, parents;
  int tokens;  // tokens of all sequences
  int length;  // tokens of each sequence, without offsets
  bool update_state;

  __device__ __forceinline__ int64_t begin(int n) const {
    return offsets ? clamp(offsets(n), 0, tokens) : static_cast<int64_t>(n) * length;
  }
  __device__ __forceinline__ int count(int n) const {
    const int64_t first = begin(n);
    return offsets ? static_cast<int>(clamp(offsets(n + 1), first, tokens) - first) : length;
  }
  // The slot that the state after token t goes to, or kNoState: the token's entry of write_indices or, without that
  // table, the initial state's slot after the last token.
  __device__ __forceinline__ int64_t slot_after(int n, int t, int count, int64_t first_slot) const {
    if (write_indices) {
      return t < write_indices.columns ? first_slots.checked(write_indices(n, t)) : kNoState;
    }
    return update_state && t == count - 1 ? first_slot : kNoState;
  }
  // The token before t, or -1 if t follows the initial state. `parents` may make a tree of the tokens.
  __device__ __forceinline__ int parent(int n, int t) const {
    return parents && t < parents.columns ? static_cast<int>(clamp(parents(n, t), -1, t - 1)) : t - 1;
  }
  __device__ __forceinline__ int ancestor(int n, int t, int generations) const {
    for (; generations > 0; --generations) {
      t = parent(n, t);
    }
    return t;
  }
  // Number of t's ancestors: the tokens between the initial state and t.
  __device__ __forceinline__ int depth(int n, int t) const {
    int ancestors = 0;
    for (t = parent(n, t); t >= 0; t = parent(n, t)) {
      ++ancestors;
    }
    return ancestors;
  }
};

// A head's inputs of the recurrence. q, k and v point to the head's row of token 0, a and b to token 0 of all value
// heads. Strides go from token to token, in elements.
struct DecodeTokens {
  const void *q, *k, *v;
  const void *a, *b;
  int64_t q_stride, k_stride, v_stride, a_stride, b_stride;
  int head;  // the value head: the index into a, b, A_log and dt_bias
  const void *A_log, *dt_bias;
  int activations;
  float scale;
  bool normalize;
  int dtype;  // the Dtype of q, k, v and o, if they are Bits16
};

// The memory of states: a pool of slots, and kept states [rows, steps], one step for each token. Both pointers are to
// the head's state in the first entry. Strides are in elements.
struct DecodeStates {
  void *pool, *kept;
  int64_t slot_stride, row_stride, step_stride;
  int rows, steps;  // 0 if no states are kept
  int dtype;        // of states that are Float8 or Bits16

  template <typename State>
  struct Destinations {
    State *slot, *kept;  // null: the state does not go there

    template <typename Use>
    __device__ __forceinline__ void for_each(Use use) const {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        if (State* const state = i == 0 ? slot : kept; state != nullptr) {
          use(state);
        }
      }
    }
  };
  // The destinations of the head's state after token t of sequence n.
  template <typename State>
  __device__ __forceinline__ Destinations<State> destinations(const DecodePlan& plan, int n, int t, int count,
                                                              int64_t first_slot) const {
    Destinations<State> destinations = {};
    if (const int64_t slot = plan.slot_after(n, t, count, first_slot); slot != kNoState) {
      destinations.slot = static_cast<State*>(pool) + slot * slot_stride;
    }
    if (t < steps) {
      const int64_t row = plan.state_rows ? plan.state_rows(n) : n;
      if (row >= 0 && row < rows) {
        destinations.kept = static_cast<State*>(kept) + row * row_stride + t * step_stride;
      }
    }
    return destinations;
  }
};

// Prefetches a share's value rows of the initial state into L2, before the wait for the preceding grid. `pool` points
// to the head's state in slot 0. The preceding grid may still write the table or the state, so no result depends on
// this read: a wrong slot wastes the prefetch, and a later write of the state updates L2.
template <typename State>
__device__ __forceinline__ void prefetch_state(const FirstSlots& slots, const void* pool, int64_t slot_stride,
                                               const DecodeShare& share, int key_dim, int value_dim) {
  const int rows = min(share.rows, value_dim - share.first_row);
  if (threadIdx.x == 0 && rows > 0) {
    if (const int64_t slot = slots(share.n); slot != kNoState) {
      const State* const from = static_cast<const State*>(pool) + slot * slot_stride + share.first_row * key_dim;
      const int bytes = rows * key_dim * static_cast<int>(sizeof(State));
      prefetch_bytes(from, bytes);
    }
  }
}

}  // namespace flash_qla::device
