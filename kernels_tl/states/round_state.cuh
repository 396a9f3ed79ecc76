// Rounding of a state in registers, as in memory.
#pragma once

#include "core/state_tiles.cuh"

namespace flash_qla::device {

// fragment = read_state(write_state(fragment)), without the memory. 32 bits round nothing.
template <int kK>
__device__ __forceinline__ void round_state(float* fragment, int dtype) {
  float2* const pairs = reinterpret_cast<float2*>(fragment);
  const auto round = [=]<typename T>(T type) {
#pragma unroll
    for (int i = 0; i < kK / 4; ++i) {
      pairs[i] = unpack(type, pack(type, pairs[i].x, pairs[i].y));
    }
  };
  if (dtype == Dtype::kBfloat16) {
    round(__nv_bfloat16());
  } else if (dtype == Dtype::kFloat16) {
    round(__half());
  } else if (is_float8(dtype)) {
#pragma unroll
    for (int i = 0; i < kK / 4; ++i) {
      pairs[i] = unpack_float8(dtype, pack_float8(dtype, pairs[i].x, pairs[i].y));
    }
  }
  // The branches meet here: see read_state.
#pragma unroll
  for (int i = 0; i < kK / 2; ++i) {
    pin_here(fragment[i]);
  }
}

}  // namespace flash_qla::device
