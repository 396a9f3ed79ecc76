// What the CPU implementations of both passes do around the arithmetic in cpu/.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "call.h"
#include "cpu/common.h"

namespace flash_qla {

void say_once_that_this_is_slow(const char* op);

// In the order of their tokens; reads cu_seqlens, and throws unless its contents are right.
std::vector<cpu::Sequence> list_sequences(const Call& call);

// Tokens of the batch that belong to a sequence; those after them are padding.
int64_t covered_tokens(const std::vector<cpu::Sequence>& sequences);

// Zeroes rows [first, end of tensor) of a contiguous tensor that has `rows` rows.
template <typename T>
void zero_from(T* data, int64_t first, int64_t rows, int64_t row_size) {
  std::fill(data + first * row_size, data + rows * row_size, T(0));
}

// Calls f.operator()<T, CT>() with the storage and compute type of a call.
template <typename F>
void with_types(const Call& call, const F& f) {
  switch (call.dtype) {
    case ScalarType::BFloat16:
      return f.template operator()<c10::BFloat16, float>();
    case ScalarType::Half:
      return f.template operator()<c10::Half, float>();
    case ScalarType::Float:
      return f.template operator()<float, float>();
    default:
      return f.template operator()<double, double>();
  }
}

}  // namespace flash_qla
