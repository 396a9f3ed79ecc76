#include "gpu/override.h"

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "gpu/dispatch.h"
#include "gpu/modes.h"
#include "layout.h"

namespace flash_qla {

namespace {

std::atomic<int64_t> forced_value_tile = 0, forced_segment_chunks = -1, forced_fused = -1, forced_cut_above = 0,
                     forced_whole_tile = 0;

void require(bool holds, const char* name, int64_t value, const std::string& expected) {
  if (!holds) {
    throw std::invalid_argument(std::string("flash_qla._C.override_forward_dispatch: ") + name + " is " +
                                std::to_string(value) + ", expected " + expected);
  }
}

bool is_tile(int64_t value_tile) { return value_tile == kNarrowTile || value_tile == kWideTile; }

}  // namespace

Override current_override() {
  return {.value_tile = forced_value_tile,
          .segment_chunks = forced_segment_chunks,
          .fused = forced_fused,
          .cut_above = forced_cut_above,
          .whole_tile = forced_whole_tile};
}

void override_forward_dispatch(int64_t value_tile, int64_t segment_chunks, int64_t fused, int64_t cut_above,
                               int64_t whole_tile) {
  constexpr int64_t kMost = INT32_MAX / kChunk;  // the device counts tokens in 32 bits
  const std::string tiles = std::to_string(kNarrowTile) + " or " + std::to_string(kWideTile);
  require(value_tile == 0 || is_tile(value_tile), "value_tile", value_tile,
          tiles + ", or 0 for the cost model's choice");
  require(segment_chunks >= -1 && segment_chunks < kMost, "segment_chunks", segment_chunks,
          "a number of chunks, 0 for none or -1 for the cost model's choice");
  require(fused >= -1 && fused <= 1, "fused", fused, "0, 1 or -1 for the cost model's choice");
  require(fused != 1 || (value_tile != kNarrowTile && segment_chunks <= 0), "fused", fused,
          "with neither value_tile " + std::to_string(kNarrowTile) + " nor segments");
  require(cut_above == 0 || (cut_above > 0 && cut_above < kMost && segment_chunks > 0), "cut_above", cut_above,
          "0 or, with segments, a number of chunks");
  require(whole_tile == 0 || (cut_above > 0 && is_tile(whole_tile)), "whole_tile", whole_tile,
          "0 or, with cut_above, " + tiles);
  forced_value_tile = value_tile;
  forced_segment_chunks = segment_chunks;
  forced_fused = fused;
  forced_cut_above = cut_above;
  forced_whole_tile = whole_tile;
}

}  // namespace flash_qla
