#include "gpu/candidates.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "chunks.h"
#include "gpu/head_dims.h"
#include "kernels.h"

namespace flash_qla {

namespace {

static_assert(kFusedTile == kWideTile);

constexpr int64_t kMostHeadsPerCta = 4;  // one for each warp of chunk_matrices

// While chunk_plan runs, the first CTAs of chunk_matrices find their chunks by themselves (plan/plan.cuh). With more
// sequences than this the search takes longer than the wait.
constexpr int64_t kMostSearched = 64;

// A warp of fused_forward sorts the sequences, one a lane, to find its CTA's first segments.
constexpr int64_t kMostSorted = 32;

kernels::Dtype dtype_of(const Shape& shape) {
  return shape.fp16 ? kernels::Dtype::kFloat16 : kernels::Dtype::kBfloat16;
}

// K > 128 has fewer instances (kernels_tl/instances.py), for example no narrow tile. The tiles and the maps do not
// depend on the dtype.
bool has_tile(const ForwardShape& shape, int64_t tile) {
  return kernels::is_compiled(
      kernels::ChunkForwardParams{.dtype = kernels::Dtype::kBfloat16, .K = instance_K(shape.K), .value_tile = tile});
}
bool has_maps(const ForwardShape& shape) {
  return kernels::is_compiled(
      kernels::SegmentMapsParams{.dtype = kernels::Dtype::kBfloat16, .K = instance_K(shape.K), .partial = true});
}

// Whether the portable kernels may split a batch: not where whole sequences give the SMs this many work tiles. The gain
// is small there, and with thousands of sequences the memory for their maps is not.
constexpr int64_t kMostTilesOfSm = 8;
bool may_split(const ForwardShape& shape) {
  return !shape.portable ||
         shape.N * shape.H_v * value_tiles(shape.V, kNarrowTile) <= kMostTilesOfSm * shape.card.sm_count;
}

// Throws if the forced tile does not exist for the call's keys.
void require_tile(const ForwardShape& shape, int64_t forced) {
  if (forced != 0 && !has_tile(shape, forced)) {
    throw std::invalid_argument("flash_qla.testing.forced_dispatch: forward has a tile of " + std::to_string(forced) +
                                " value rows, expected " + std::to_string(kWideTile) + " with keys of " +
                                std::to_string(shape.K) + " channels");
  }
}

// Whether the device may choose between both tiles. Not where every batch counts as long: over ranks, or by `forced`.
bool may_have_two_tiles(const ForwardShape& shape, const Override& forced) {
  return device_knows_more(shape) && !shape.over_ranks && (!forced.always_cuts() || forced.long_tile > 0) &&
         has_tile(shape, kNarrowTile);
}

bool can_fuse(const ForwardShape& shape) {
  return !shape.output_h && !shape.over_ranks && !shape.batch_invariant && !shape.resumable && !shape.float8 &&
         has_fused_kernel(shape);
}

// The lengths of segments that the host considers, in chunks. The first one is 0: no segments. Over ranks 0 is left out
// if there are other lengths, because the maps come from segments.
std::vector<int64_t> segmentations(const ForwardShape& shape, const Override& forced) {
  if (!has_maps(shape)) {
    return {0};
  }
  if (forced.segment_chunks >= 0) {
    return {forced.segment_chunks};
  }
  if (!may_split(shape)) {
    return {0};
  }
  std::vector<int64_t> candidates = {0};
  const auto add = [&](int64_t segment_chunks) {
    if (std::ranges::find(candidates, segment_chunks) == candidates.end()) {
      candidates.push_back(segment_chunks);
    }
  };
  // Parts of the longest sequence; if it is unknown, of the average one, and of a sequence that has all tokens.
  const int64_t chunks = longest_chunks(shape), all_chunks = chunks * shape.N;
  for (int64_t parts = 2; parts <= 64; parts += std::max<int64_t>(parts / 8, 1)) {
    if (2 * parts <= chunks + 1) {
      add(ceil_div(chunks, parts));
    }
    if (device_knows_more(shape) && 2 * parts <= all_chunks + 1) {
      add(ceil_div(all_chunks, parts));
    }
  }
  if (shape.over_ranks && candidates.size() > 1) {
    candidates.erase(candidates.begin());
  }
  return candidates;
}

// Removes the paths without the property, unless none has it.
void keep_if_any(std::vector<ForwardPath>& paths, const auto& property) {
  if (std::ranges::any_of(paths, property)) {
    std::erase_if(paths, [&](const ForwardPath& path) { return !property(path); });
  }
}

}  // namespace

bool has_fused_kernel(const ForwardShape& shape, bool planned) {
  return kernels::is_compiled(kernels::FusedForwardParams{.dtype = dtype_of(shape),
                                                          .K = instance_K(shape.K),
                                                          .normalize = shape.use_qk_l2norm,
                                                          .low_level = shape.low_level,
                                                          .cut = false,
                                                          .planned = planned});
}

bool begins_early(const ForwardShape& shape) { return !shape.varlen || shape.N <= kMostSorted; }

int64_t average_chunks(const ForwardShape& shape) { return ceil_div(shape.B * shape.T, kChunk * shape.N); }

int64_t longest_chunks(const ForwardShape& shape) {
  const bool is_known = shape.varlen && shape.max_seqlen > 0;
  return is_known ? ceil_div(std::min(shape.max_seqlen, shape.T), kChunk) : average_chunks(shape);
}

bool normalizes_inside(const BackwardShape& shape) {
  return shape.use_qk_l2norm && kernels::is_compiled(kernels::ChunkBackwardParams{
                                    .dtype = dtype_of(shape), .K = instance_K(shape.K), .normalize = true});
}

int64_t heads_per_cta(const Shape& shape, int64_t chunk_slots) {
  const int64_t group = shape.group();
  for (int64_t heads = std::min(group, kMostHeadsPerCta); heads > 1; --heads) {
    if (group % heads == 0 && chunk_slots * shape.H_v / heads >= shape.card.sm_count) {
      return heads;
    }
  }
  return 1;
}

int64_t early_ctas(const Shape& shape) {
  const int64_t of_sm = has_wide_keys(shape.K) ? kWideMatricesCtas : kMatricesCtas;
  return shape.varlen && shape.N > kMostSearched ? 0 : of_sm * shape.card.sm_count;
}

std::vector<ForwardPath> paths_of(const ForwardShape& shape, const Override& forced) {
  std::vector<ForwardPath> paths;
  if (shape.portable) {
    for (const int64_t segment_chunks : segmentations(shape, forced)) {
      paths.push_back(TwoKernels{kNarrowTile, segment_chunks});
    }
    return paths;
  }
  require_tile(shape, forced.value_tile);
  require_tile(shape, forced.long_tile);
  const bool two_tiles = may_have_two_tiles(shape, forced);
  for (const int64_t segment_chunks : segmentations(shape, forced)) {
    if (can_fuse(shape)) {
      paths.push_back(segment_chunks == 0 ? ForwardPath{OneKernel{}} : OneKernelOverSegments{segment_chunks});
    }
    for (const int64_t tile : {int64_t{kNarrowTile}, int64_t{kWideTile}}) {
      for (const int64_t long_tile : {int64_t{kNarrowTile}, int64_t{kWideTile}}) {
        if (has_tile(shape, tile) && (tile == long_tile || two_tiles)) {
          paths.push_back(TwoKernels{tile, segment_chunks, long_tile});
        }
      }
    }
  }
  if (forced.fused >= 0) {
    keep_if_any(paths, [&](const ForwardPath& path) { return is_fused(path) == (forced.fused == 1); });
  }
  if (forced.value_tile > 0) {
    const int64_t long_tile = forced.long_tile > 0 ? forced.long_tile : forced.value_tile;
    keep_if_any(paths, [&](const ForwardPath& path) { return value_tile_of(path) == forced.value_tile; });
    keep_if_any(paths, [&](const ForwardPath& path) { return long_tile_of(path) == long_tile; });
  }
  return paths;
}

std::vector<BackwardPath> paths_of(const BackwardShape& shape, const Override& forced) {
  std::vector<BackwardPath> paths;
  for (const int64_t segment_chunks : segmentations(shape.forward(), forced)) {
    paths.push_back({segment_chunks});
  }
  return paths;
}

}  // namespace flash_qla
