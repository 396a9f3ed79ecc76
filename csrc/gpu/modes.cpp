#include "gpu/modes.h"

#include <algorithm>

#include "chunks.h"
#include "gpu/head_dims.h"

namespace flash_qla {

namespace {

// Up to so many sequences, a step of chunk_plan, the first segment tells whether any is cut: it is the longest one's.
constexpr int64_t kMostWithTwoTiles = kPlanStep;

constexpr int64_t kMostHeadsPerCta = 4;  // one a warp of chunk_matrices

// While chunk_plan runs, chunk_matrices finds out by itself where its first CTAs begin (plan/plan.cuh): with up to so
// many sequences that takes less time.
constexpr int64_t kMostSearched = 64;

bool can_fuse(const ForwardShape& shape, const Override& forced) {
  return !shape.in_halves && shape.V <= kWideTile && !shape.output_h && !(shape.low_level && shape.fp16) &&
         !shape.batch_invariant && forced.value_tile != kNarrowTile && !forced.always_cuts() && forced.fused != 0;
}

// With segments of this length; 0: none.
void add_tile(std::vector<Mode>& modes, const ForwardShape& shape, const Override& forced, int64_t tile,
              int64_t segment_chunks) {
  const bool has_choice = segment_chunks > 0 && device_knows_more(shape) && shape.N <= kMostWithTwoTiles;
  const bool always_cut = forced.always_cuts() || shape.in_halves;
  const int64_t forced_whole = has_choice && forced.whole_tile != 0 ? forced.whole_tile : tile;
  modes.push_back({tile, always_cut ? forced_whole : tile, segment_chunks, false, always_cut});
  if (has_choice && !always_cut && forced.value_tile == 0 && tile == kWideTile) {  // whole sequences are fewer pieces
    modes.push_back({tile, kNarrowTile, segment_chunks, false, false});
  }
}

// Chunks a segment, none first. In halves none only where there is nothing else: the maps are then of whole sequences.
std::vector<int64_t> segmentations(const ForwardShape& shape, const Override& forced) {
  if (forced.segment_chunks >= 0) {
    return {forced.segment_chunks};
  }
  std::vector<int64_t> found = {0};
  // Parts of the average sequence, and of one that has all tokens.
  const int64_t chunks = average_chunks(shape), all_chunks = chunks * shape.N;
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

int64_t average_chunks(const ForwardShape& shape) { return ceil_div(shape.B * shape.T, kChunk * shape.N); }

int64_t heads_per_cta(const ForwardShape& shape, int64_t chunk_slots) {
  const int64_t group = shape.group();
  for (int64_t heads = std::min(group, kMostHeadsPerCta); heads > 1; --heads) {
    if (group % heads == 0 && chunk_slots * shape.H_v / heads >= shape.card.sm_count) {
      return heads;
    }
  }
  return 1;
}

int64_t early_ctas(const ForwardShape& shape) {
  return shape.varlen && shape.N > kMostSearched ? 0 : int64_t{kMatricesCtas} * shape.card.sm_count;
}

std::vector<Mode> modes_of(const ForwardShape& shape, const Override& forced) {
  std::vector<Mode> modes;
  if (can_fuse(shape, forced)) {
    modes.push_back({kWideTile, kWideTile, 0, true, false});
    if (forced.fused == 1) {
      return modes;
    }
  }
  for (const int64_t tile : {int64_t{kNarrowTile}, int64_t{kWideTile}}) {
    if (forced.value_tile == 0 || tile == forced.value_tile) {
      for (const int64_t segment_chunks : segmentations(shape, forced)) {
        add_tile(modes, shape, forced, tile, segment_chunks);
      }
    }
  }
  return modes;
}

std::vector<Mode> modes_of(const BackwardShape& shape, const Override& forced) {
  std::vector<Mode> modes;
  for (const int64_t segment_chunks : segmentations(shape.forward(), forced)) {
    modes.push_back({kWideTile, kWideTile, segment_chunks, false, forced.always_cuts() || shape.in_halves});
  }
  return modes;
}

}  // namespace flash_qla
