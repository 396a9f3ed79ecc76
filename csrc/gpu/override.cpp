#include "gpu/override.h"

#include <mutex>
#include <stdexcept>
#include <string>

#include "layout.h"

namespace flash_qla {

namespace {

std::mutex mutex;
Overrides overrides;

constexpr int64_t kMost = INT32_MAX / kChunk;  // the device counts tokens in 32 bits

const std::string kTiles = std::to_string(kNarrowTile) + " or " + std::to_string(kWideTile);

// Checks of one direction's override, with errors for users of flash_qla.testing.forced_dispatch.
class Requirements {
 public:
  explicit Requirements(const char* direction) : direction_(direction) {}

  void require(bool holds, const char* name, int64_t value, const std::string& expected) const {
    if (!holds) {
      throw std::invalid_argument(std::string("flash_qla.testing.forced_dispatch: ") + direction_ + " has " + name +
                                  " = " + std::to_string(value) + ", expected " + expected);
    }
  }

  void require_segments(const Override& o) const {
    require(o.segment_chunks >= -1 && o.segment_chunks < kMost, "segment_chunks", o.segment_chunks,
            "a number of chunks, 0 for none or -1 for the cost model's choice");
    const bool has_other_way = o.segment_chunks == 0 && o.value_tile == kNarrowTile &&
                               (o.whole_tile == kWideTile || (o.fused == 1 && o.whole_tile == 0));
    require(o.cut_above == 0 || (o.cut_above > 0 && o.cut_above < kMost && (o.always_cuts() || has_other_way)),
            "cut_above", o.cut_above,
            "0; or with segments, or with a narrow value_tile, segment_chunks = 0 and either fused = 1 or a wide "
            "whole_tile, a number of chunks");
  }

 private:
  const char* direction_;
};

bool is_tile(int64_t value_tile) { return value_tile == kNarrowTile || value_tile == kWideTile; }

void check_forward(const Override& o) {
  const Requirements forward("forward");
  forward.require(o.value_tile == 0 || is_tile(o.value_tile), "value_tile", o.value_tile,
                  kTiles + ", or 0 for the cost model's choice");
  forward.require(o.fused >= -1 && o.fused <= 1, "fused", o.fused, "0, 1 or -1 for the cost model's choice");
  const bool takes_segments = o.fused_segments == 1;
  forward.require(o.fused_segments >= -1 && o.fused_segments <= 1, "fused_segments", o.fused_segments,
                  "0, 1 or -1 for the cost model's choice");
  forward.require(!takes_segments || (o.always_cuts() && o.fused != 0 && o.value_tile != kNarrowTile), "fused_segments",
                  o.fused_segments, "1 only with segments, and neither fused = 0 nor a narrow value_tile");
  forward.require(
      o.fused != 1 || takes_segments || o.cut_above > 0 || (o.value_tile != kNarrowTile && !o.always_cuts()), "fused",
      o.fused, "0 with value_tile = " + std::to_string(kNarrowTile) + " or segments, without cut_above");
  forward.require((o.fused != 1 && !takes_segments) || o.whole_tile == 0 || o.whole_tile == kWideTile, "whole_tile",
                  o.whole_tile, std::to_string(kWideTile) + ", the fused kernel's, or 0");
  forward.require_segments(o);
  forward.require(o.whole_tile == 0 || (o.cut_above > 0 && is_tile(o.whole_tile)), "whole_tile", o.whole_tile,
                  "0 or, with cut_above, " + kTiles);
}

void check_backward(const Override& o) {
  const Requirements backward("backward");
  backward.require(o.value_tile == 0, "value_tile", o.value_tile, "none, as it has one tile");
  backward.require(o.fused == -1, "fused", o.fused, "none, as it has no fused kernel");
  backward.require(o.fused_segments == -1, "fused_segments", o.fused_segments, "none, as it has no fused kernel");
  backward.require(o.whole_tile == 0, "whole_tile", o.whole_tile, "none, as it has one tile");
  backward.require_segments(o);
}

}  // namespace

Overrides current_overrides() {
  const std::lock_guard lock(mutex);
  return overrides;
}

Overrides exchange_overrides(const Override* forward, const Override* backward) {
  if (forward != nullptr) {
    check_forward(*forward);
  }
  if (backward != nullptr) {
    check_backward(*backward);
  }
  const std::lock_guard lock(mutex);
  const Overrides previous = overrides;
  overrides = {.forward = forward != nullptr ? *forward : previous.forward,
               .backward = backward != nullptr ? *backward : previous.backward};
  return previous;
}

}  // namespace flash_qla
