// Tables of indices into a pool of states, as callers pass them. An index may have any value. An index that is no slot
// becomes kNoState.
#pragma once

#include <cstdint>

#include "layout.h"

namespace flash_qla::device {

// [rows, columns] of int32 or int64, with a row's numbers contiguous. TableKind::kNone: there is no table.
struct Table {
  const void* entries;
  int kind;
  int64_t row_stride;
  int columns;

  __device__ __forceinline__ Table(const void* entries, int kind, int64_t row_stride, int columns)
      : entries(entries), kind(kind), row_stride(row_stride), columns(columns) {}

  __device__ __forceinline__ explicit operator bool() const { return kind != TableKind::kNone; }
  __device__ __forceinline__ bool is_wide() const { return kind == TableKind::kInt64; }
  __device__ __forceinline__ int64_t operator()(int64_t row, int column = 0) const {
    const int64_t at = row * row_stride + column;
    return is_wide() ? static_cast<const int64_t*>(entries)[at] : static_cast<const int*>(entries)[at];
  }
  // Reads from L2: before the wait for the preceding grid, and after it if L1 may hold an old value.
  __device__ __forceinline__ int64_t fresh(int64_t row, int column = 0) const {
    const int64_t at = row * row_stride + column;
    return is_wide() ? __ldcg(static_cast<const long long*>(entries) + at)
                     : __ldcg(static_cast<const int*>(entries) + at);
  }
};

__device__ __forceinline__ Table no_table() { return {nullptr, TableKind::kNone, 0, 0}; }

// index if null_index < index and 0 <= index < slots, else kNoState.
__device__ __forceinline__ int64_t checked_slot(int64_t index, int64_t null_index, int64_t slots) {
  return index > null_index && index >= 0 && index < slots ? index : kNoState;
}

// The slot of sequence n: the table's entry, checked, or n without a table.
struct Slots {
  Table indices;
  int64_t null_index, slots;

  __device__ __forceinline__ Slots(const Table& indices, int64_t null_index, int64_t slots)
      : indices(indices), null_index(null_index), slots(slots) {}

  __device__ __forceinline__ int operator()(int n) const {
    return indices ? static_cast<int>(checked_slot(indices(n), null_index, slots)) : n;
  }
};

}  // namespace flash_qla::device
