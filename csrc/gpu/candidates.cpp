#include "gpu/candidates.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "chunks.h"
#include "gpu/head_dims.h"
#include "kernels.h"

namespace flash_qla {

namespace {

constexpr int64_t kMostHeadsPerCta = 4;  // one for each warp of chunk_matrices

// While chunk_plan runs, the first CTAs of chunk_matrices find their chunks by themselves (plan/plan.cuh). With more
// sequences than this the search takes longer than the wait.
constexpr int64_t kMostSearched = 64;

// A warp of fused_forward sorts the sequences, one a lane, to find its CTA's first segments.
constexpr int64_t kMostSorted = 32;

kernels::Dtype dtype_of(const Shape& shape) {
  return shape.fp16 ? kernels::Dtype::kFloat16 : kernels::Dtype::kBfloat16;
}

// Wide keys have fewer instances (kernels_tl/instances.py), for example no narrow tile. The tiles and the maps do not
// depend on the dtype.
bool has_tile(const ForwardShape& shape, int64_t tile) {
  return kernels::is_compiled(
      kernels::ChunkForwardParams{.dtype = kernels::Dtype::kBfloat16, .K = instance_K(shape.K), .value_tile = tile});
}
bool has_maps(const ForwardShape& shape) {
  return kernels::is_compiled(
      kernels::SegmentMapsParams{.dtype = kernels::Dtype::kBfloat16, .K = instance_K(shape.K), .partial = true});
}

// Throws if the forced tile does not exist for the call's keys.
void require_tile(const ForwardShape& shape, int64_t forced) {
  if (forced != 0 && !has_tile(shape, forced)) {
    throw std::invalid_argument("flash_qla.testing.forced_dispatch: forward has a tile of " + std::to_string(forced) +
                                " value rows, expected " + std::to_string(kWideTile) + " with keys of " +
                                std::to_string(shape.K) + " channels");
  }
}

bool can_fuse(const ForwardShape& shape, const Override& forced) {
  const bool supported = !shape.output_h && !shape.in_halves && !shape.batch_invariant && !shape.resumable;
  return supported && !shape.float8 && forced.fused != 0 && has_fused_kernel(shape);
}

// Adds the modes of a value tile with segments of this many chunks; 0: no segments. fuses: the fused kernel may take
// sequences that are not cut.
void add_tile(std::vector<Mode>& modes, const ForwardShape& shape, const Override& forced, int64_t tile,
              int64_t segment_chunks, bool fuses) {
  const bool has_choice = segment_chunks > 0 && device_knows_more(shape);
  const bool always_cut = forced.always_cuts() || shape.in_halves;
  if (fuses && segment_chunks > 0 && tile == kWideTile && forced.fused_segments != 0) {
    modes.push_back({.value_tile = tile,
                     .segment_chunks = segment_chunks,
                     .fused = true,
                     .always_cut = always_cut,
                     .fused_segments = true});
    if (forced.fused_segments == 1) {
      return;
    }
  }
  if (has_choice && fuses && (!always_cut || forced.fused == 1)) {
    modes.push_back({.value_tile = tile, .whole_tile = kWideTile, .segment_chunks = segment_chunks, .fused = true});
    if (forced.fused == 1) {
      return;
    }
  }
  const int64_t forced_whole = has_choice && forced.whole_tile != 0 ? forced.whole_tile : tile;
  modes.push_back({.value_tile = tile,
                   .whole_tile = always_cut ? forced_whole : tile,
                   .segment_chunks = segment_chunks,
                   .always_cut = always_cut});
  // Whole sequences are fewer pieces than segments, so a narrow tile for them fills more SMs.
  if (has_choice && !always_cut && forced.value_tile == 0 && tile == kWideTile && has_tile(shape, kNarrowTile)) {
    modes.push_back({.value_tile = tile, .whole_tile = kNarrowTile, .segment_chunks = segment_chunks});
  }
}

// Adds the modes that cut no sequence, but take narrow tiles if one is long: few long heads then fill more SMs.
// fuses: the fused kernel may take the calls without a long sequence.
void add_whole(std::vector<Mode>& modes, const ForwardShape& shape, const Override& forced, bool fuses) {
  const bool may_choose = forced.chooses_whole() || (forced.segment_chunks < 0 && forced.value_tile == 0);
  if (!may_choose || !device_knows_more(shape) || shape.in_halves || !has_tile(shape, kNarrowTile)) {
    return;
  }
  if (fuses && forced.whole_tile == 0) {
    modes.push_back({.value_tile = kNarrowTile, .whole_tile = kWideTile, .fused = true});
  }
  if (!(fuses && forced.fused == 1)) {
    modes.push_back({.value_tile = kNarrowTile, .whole_tile = kWideTile});
  }
}

// The lengths of segments that the host considers, in chunks. The first one is 0: no segments. In halves 0 is left out
// if there are other lengths, because the maps come from segments.
std::vector<int64_t> segmentations(const ForwardShape& shape, const Override& forced) {
  if (!has_maps(shape)) {
    return {0};
  }
  if (forced.segment_chunks >= 0) {
    return {forced.segment_chunks};
  }
  std::vector<int64_t> found = {0};
  // Parts of the longest sequence; if it is unknown, of the average one, and of a sequence that has all tokens.
  const int64_t chunks = longest_chunks(shape), all_chunks = chunks * shape.N;
  for (int64_t parts = 2; parts <= 64; parts += std::max<int64_t>(parts / 8, 1)) {
    if (2 * parts <= chunks + 1) {
      found.push_back(ceil_div(chunks, parts));
    }
    if (device_knows_more(shape) && 2 * parts <= all_chunks + 1) {
      found.push_back(ceil_div(all_chunks, parts));
    }
  }
  if (shape.in_halves && found.size() > 1) {
    found.erase(found.begin());
  }
  return found;
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

std::vector<Mode> modes_of(const ForwardShape& shape, const Override& forced) {
  require_tile(shape, forced.value_tile);
  require_tile(shape, forced.whole_tile);
  std::vector<Mode> modes;
  const bool fuses = can_fuse(shape, forced);
  if (fuses && !forced.always_cuts() && forced.value_tile != kNarrowTile) {
    modes.push_back({.value_tile = kWideTile, .fused = true});
    if (forced.fused == 1) {
      return modes;
    }
  }
  if (forced.chooses_whole()) {
    add_whole(modes, shape, forced, fuses);
    if (!modes.empty()) {
      return modes;
    }
  }
  const int64_t forced_tile = fuses && forced.fused_segments == 1 ? kWideTile : forced.value_tile;
  for (const int64_t tile : {int64_t{kNarrowTile}, int64_t{kWideTile}}) {
    if (has_tile(shape, tile) && (forced_tile == 0 || tile == forced_tile)) {
      for (const int64_t segment_chunks : segmentations(shape, forced)) {
        add_tile(modes, shape, forced, tile, segment_chunks, fuses);
      }
    }
  }
  add_whole(modes, shape, forced, fuses);
  return modes;
}

std::vector<Mode> modes_of(const BackwardShape& shape, const Override& forced) {
  std::vector<Mode> modes;
  for (const int64_t segment_chunks : segmentations(shape.forward(), forced)) {
    modes.push_back({.value_tile = kWideTile,
                     .segment_chunks = segment_chunks,
                     .always_cut = forced.always_cuts() || shape.in_halves});
  }
  return modes;
}

}  // namespace flash_qla
