// What the ops of inference engines take: the states of many requests in one tensor, and tables of indices into it.
#pragma once

#include <cstdint>

#include "call.h"

namespace flash_qla {

// Indices of so many rows, one a sequence.
void check_table(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t rank,
                 const char* symbols);

// States [.., H_v, V, K] of `rank` dimensions, in any floating dtype. They are written where they lie, so what is not
// laid out like this cannot be copied first: each state is contiguous, and no two share memory.
void check_states(const char* op, const char* name, const Tensor& tensor, int64_t H_v, int64_t V, int64_t K,
                  int64_t rank, const char* symbols);

}  // namespace flash_qla
