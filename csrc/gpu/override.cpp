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
std::atomic<int64_t> forced_backward_segment_chunks = -1, forced_backward_cut_above = 0;

constexpr int64_t kMost = INT32_MAX / kChunk;  // the device counts tokens in 32 bits

// Of an argument of flash_qla._C.override_<direction>_dispatch.
class Requirements {
 public:
  explicit Requirements(const char* direction) : direction_(direction) {}

  void require(bool holds, const char* name, int64_t value, const std::string& expected) const {
    if (!holds) {
      throw std::invalid_argument(std::string("flash_qla._C.override_") + direction_ + "_dispatch: " + name + " is " +
                                  std::to_string(value) + ", expected " + expected);
    }
  }

  void require_segments(int64_t segment_chunks, int64_t cut_above) const {
    require(segment_chunks >= -1 && segment_chunks < kMost, "segment_chunks", segment_chunks,
            "a number of chunks, 0 for none or -1 for the cost model's choice");
    require(cut_above == 0 || (cut_above > 0 && cut_above < kMost && segment_chunks > 0), "cut_above", cut_above,
            "0 or, with segments, a number of chunks");
  }

 private:
  const char* direction_;
};

bool is_tile(int64_t value_tile) { return value_tile == kNarrowTile || value_tile == kWideTile; }

}  // namespace

Override current_override() {
  return {.value_tile = forced_value_tile,
          .segment_chunks = forced_segment_chunks,
          .fused = forced_fused,
          .cut_above = forced_cut_above,
          .whole_tile = forced_whole_tile};
}

Override current_backward_override() {
  return {.value_tile = kWideTile,
          .segment_chunks = forced_backward_segment_chunks,
          .fused = 0,
          .cut_above = forced_backward_cut_above,
          .whole_tile = 0};
}

void override_forward_dispatch(int64_t value_tile, int64_t segment_chunks, int64_t fused, int64_t cut_above,
                               int64_t whole_tile) {
  const Requirements forward("forward");
  const std::string tiles = std::to_string(kNarrowTile) + " or " + std::to_string(kWideTile);
  forward.require(value_tile == 0 || is_tile(value_tile), "value_tile", value_tile,
                  tiles + ", or 0 for the cost model's choice");
  forward.require(fused >= -1 && fused <= 1, "fused", fused, "0, 1 or -1 for the cost model's choice");
  forward.require(fused != 1 || (value_tile != kNarrowTile && segment_chunks <= 0), "fused", fused,
                  "with neither value_tile " + std::to_string(kNarrowTile) + " nor segments");
  forward.require_segments(segment_chunks, cut_above);
  forward.require(whole_tile == 0 || (cut_above > 0 && is_tile(whole_tile)), "whole_tile", whole_tile,
                  "0 or, with cut_above, " + tiles);
  forced_value_tile = value_tile;
  forced_segment_chunks = segment_chunks;
  forced_fused = fused;
  forced_cut_above = cut_above;
  forced_whole_tile = whole_tile;
}

void override_backward_dispatch(int64_t segment_chunks, int64_t cut_above) {
  Requirements("backward").require_segments(segment_chunks, cut_above);
  forced_backward_segment_chunks = segment_chunks;
  forced_backward_cut_above = cut_above;
}

}  // namespace flash_qla
