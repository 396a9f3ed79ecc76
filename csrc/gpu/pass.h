// Pass: the launches that forward and backward share, and the bundles of the call and its workspace.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "call.h"
#include "gpu/dispatch.h"
#include "gpu/states.h"
#include "gpu/workspace.h"
#include "kernels.h"

namespace flash_qla {

// The fields of both directions.
Shape shape_of(const Call& call);

// Copies `from`; without it, zeros.
void copy_or_zero(Tensor& to, const std::optional<Tensor>& from);

// The argument of kernels whose pass has no segment_memory.
constexpr kernels::Memory kNoMemory = {.memory = nullptr, .needs_maps = nullptr, .has_memory = false};

class Pass {
 public:
  // `scans`: how many launches of segment_scan run side by side.
  Pass(const Call& call, const PassWorkspace& workspace, const Dispatch& d, cudaStream_t stream, int64_t scans)
      : call_(call), workspace_(workspace), stream_(stream), d_(d), scans_(scans) {}

  kernels::Sizes sizes() const;
  kernels::Tokens tokens() const;
  kernels::Plan plan() const;
  kernels::Chunks chunks() const;
  kernels::Chunks map_chunks() const;  // have the table of segments that have maps
  kernels::Maps maps() const;          // the states' maps

  // Launches chunk_plan. Over ranks the second table lacks the ends whose maps are requested: `dropped` is their
  // SegmentFlag. `memory`: the tables of segment_memory, if there are any.
  void make_plan(const States& states, int64_t dropped, const kernels::Memory& memory = kNoMemory) const;

  // Launches the scan, of states or in reverse of their gradients. `concurrent`: segment_scan overlaps the preceding
  // scan in the other direction.
  void scan(bool reverse, const kernels::Maps& maps, const kernels::States& states, bool concurrent,
            const kernels::Memory& memory = kNoMemory) const;

  // [sequences, H_v, V + K, K]: the maps of call.map_sequences; without sequences, no launch. `initial`: the states
  // before the first segments. compose_maps reads Z of each segment in the segment's slot of `offsets`.
  Tensor compose(bool reverse, const kernels::Maps& maps, const float* offsets,
                 const std::optional<Tensor>& initial) const;

  // Launches portable_replay for the segments' maps of states. `has_reverse`: M serves gradients too.
  void portable_maps(const kernels::Chunks& chunks, bool has_reverse) const;

  kernels::Dtype dtype() const;
  int64_t K() const { return instance_K(call_.K); }

 private:
  // Launches portable_scan, which applies the segments' maps to states or, if `composed` is given, composes there the
  // maps of call.map_sequences.
  void portable_scan(bool reverse, const kernels::Maps& maps, const kernels::States& states, bool has_initial_state,
                     const Tensor* composed) const;

  const Call& call_;
  const PassWorkspace& workspace_;
  const cudaStream_t stream_;
  const Dispatch& d_;
  const int64_t scans_;
};

}  // namespace flash_qla
