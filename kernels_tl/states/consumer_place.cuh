// Numbers of several fields, as layout.py lays them out; states/consumer_place.py reads the same.
#pragma once

#include "core/ptx.cuh"
#include "layout.h"

namespace flash_qla::device {

// One register of a consumer of fused_forward: Place of layout.py. The number is opaque here, so that its fields are
// not computed earlier.
struct ConsumerPlace {
  int number;

  __device__ __forceinline__ explicit ConsumerPlace(int place) : number(place) { make_opaque(number); }

  __device__ __forceinline__ int warpgroup() const { return number >> Place::kWarpgroup & 1; }
  __device__ __forceinline__ int value_stage() const { return number >> (Place::kRing + Ring::kValueStage) & 1; }
  __device__ __forceinline__ int value_phase() const { return number >> (Place::kRing + Ring::kValuePhase) & 1; }
};

}  // namespace flash_qla::device
