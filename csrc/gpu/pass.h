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

class Pass {
 public:
  template <typename Dispatch>
  Pass(const Call& call, const PassWorkspace& workspace, const Dispatch& d, cudaStream_t stream)
      : call_(call),
        workspace_(workspace),
        stream_(stream),
        chunk_slots_(d.chunk_slots),
        segments_(d.segments),
        segment_chunks_(d.segment_chunks),
        cut_above_(d.cut_above),
        in_halves_(d.in_halves) {}

  kernels::Sizes sizes() const;
  kernels::Tokens tokens() const;
  kernels::Plan plan() const;
  kernels::Plan map_plan() const;  // with the table of segments that have maps
  kernels::Matrices matrices() const;
  kernels::Maps maps() const;  // of states

  // chunk_plan. In halves the second table lacks the ends whose maps are wanted, which have the SegmentFlag `dropped`.
  void make_plan(const States& states, int64_t dropped) const;

  // segment_scan, of states or in reverse of their gradients. `beside` the scan that is the launch before this one.
  void scan(bool reverse, const kernels::Maps& maps, const kernels::States& states, bool beside) const;

  // compose_maps, for the sequences call.map_sequences: [sequences, H_v, V + K, K], without a launch if there are none.
  // `offsets` has Z of each segment in its own slot, `initial` the states before the first segments.
  Tensor compose(bool reverse, const kernels::Maps& maps, const float* offsets,
                 const std::optional<Tensor>& initial) const;

  // Instances of most kernels.
  kernels::Dtype dtype() const;
  int64_t K() const { return instance_K(call_.K); }

 private:
  const Call& call_;
  const PassWorkspace& workspace_;
  const cudaStream_t stream_;
  const int64_t chunk_slots_, segments_, segment_chunks_, cut_above_;
  const bool in_halves_;
};

}  // namespace flash_qla
