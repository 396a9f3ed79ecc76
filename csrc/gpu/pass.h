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

// The arguments of a portable replay of states that writes no maps, and of one that writes only maps.
constexpr kernels::RankMaps kNoRankMaps = {
    .rank_maps = nullptr, .mapped = 0, .mapped_0 = -1, .mapped_1 = -1, .has_ends = false};
constexpr kernels::Replay kNoReplay = {.h = nullptr, .v_new = nullptr, .v_new_row = 0, .v_new_head = 0};

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

  // Launches segment_scan, of states or in reverse of their gradients. `concurrent`: overlaps the
  // preceding scan in the other direction.
  void scan(bool reverse, const kernels::Maps& maps, const kernels::States& states, bool concurrent,
            const kernels::Memory& memory = kNoMemory) const;

  // [sequences, H_v, V + K, K]: the maps of call.map_sequences, by compose_maps; without sequences, no launch.
  // `offsets` has Z of each segment in the segment's slot, `initial` the states before the first segments.
  Tensor compose(bool reverse, const kernels::Maps& maps, const float* offsets,
                 const std::optional<Tensor>& initial) const;

  // The maps of call.map_sequences in a tensor of allocate_maps, for the kernels of other GPUs than Hopper's.
  // `has_ends`: whether their states, or gradients of states, are given.
  kernels::RankMaps rank_maps(const Tensor& maps, bool has_ends) const;

  // Launches portable_replay, which writes `replay` or, if there are any, the maps.
  void portable_replay(const kernels::Chunks& chunks, const kernels::States& states, const kernels::Replay& replay,
                       const kernels::RankMaps& maps) const;

  // The CTAs of portable_replay and of portable_replay_gradients, and the tiles of each sequence and head.
  struct PortableGrid {
    int64_t ctas, value_tiles;
  };
  PortableGrid portable_grid(const kernels::RankMaps& maps) const;

  kernels::Dtype dtype() const;
  int64_t K() const { return instance_K(call_.K); }

 private:
  const Call& call_;
  const PassWorkspace& workspace_;
  const cudaStream_t stream_;
  const Dispatch& d_;
  const int64_t scans_;
};

}  // namespace flash_qla
