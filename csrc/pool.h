// Arguments of inference engines: the states of many requests in one tensor, and tables of indices into it.
#pragma once

#include <cstdint>

#include "call.h"

namespace flash_qla {

// Checks a table of indices with this many rows, one a sequence.
void check_table(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t rank,
                 const char* symbols);

// Checks a flag of each sequence.
void check_flags(const char* op, const char* name, const Tensor& tensor, int64_t N);

// Checks states [.., H_v, V, K], or [.., H_v, K, V] unless v_first, of `rank` dimensions, in any floating dtype of 8
// bits or more. They are written in place and cannot be copied first. So each state must be contiguous.
void check_states(const char* op, const char* name, const Tensor& tensor, int64_t H_v, int64_t V, int64_t K,
                  int64_t rank, const char* symbols, bool v_first = true);

// Checks a tensor [slots, *slot] that is written in place: each slot must be contiguous.
void check_slots(const char* op, const char* name, const Tensor& tensor, int64_t slots,
                 torch::headeronly::IntHeaderOnlyArrayRef slot, const char* symbols);

}  // namespace flash_qla
