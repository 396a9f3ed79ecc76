// Numbers of several fields, as layout.py lays them out; states/consumer_position.py reads the same.
#pragma once

#include "core/ptx.cuh"
#include "layout.h"

namespace flash_qla::device {

// One register of a consumer of fused_forward: ConsumerBits of layout.py. The number is opaque here, so that its fields
// are not computed earlier.
struct ConsumerPosition {
  int number;

  __device__ __forceinline__ explicit ConsumerPosition(int position) : number(position) { make_opaque(number); }

  __device__ __forceinline__ int warpgroup() const { return number >> ConsumerBits::kWarpgroup & 1; }
  __device__ __forceinline__ int value_stage() const { return number >> (ConsumerBits::kRing + Ring::kValueStage) & 1; }
  __device__ __forceinline__ int value_phase() const { return number >> (ConsumerBits::kRing + Ring::kValuePhase) & 1; }
};

}  // namespace flash_qla::device
