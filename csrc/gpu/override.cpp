#include "gpu/override.h"

#include <mutex>
#include <stdexcept>
#include <string>

#include "gpu/runtime/device.h"
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
    require(o.cut_above == 0 || (o.cut_above > 0 && o.cut_above < kMost && o.sets_cut_above()), "cut_above",
            o.cut_above, "0 or, with segments or a long_tile, a number of chunks");
  }

 private:
  const char* direction_;
};

bool is_tile(int64_t value_tile) { return value_tile == kNarrowTile || value_tile == kWideTile; }

void check_forward(const Override& o) {
  const Requirements forward("forward");
  forward.require(o.value_tile == 0 || is_tile(o.value_tile), "value_tile", o.value_tile,
                  kTiles + ", or 0 for the cost model's choice");
  forward.require(o.long_tile == 0 || (is_tile(o.long_tile) && o.value_tile != 0 && o.fused != 1 && o.cut_above > 0),
                  "long_tile", o.long_tile, kTiles + " with value_tile and cut_above, or 0 for value_tile");
  forward.require(o.fused >= -1 && o.fused <= 1, "fused", o.fused, "0, 1 or -1 for the cost model's choice");
  forward.require(o.fused != 1 || o.value_tile != kNarrowTile, "fused", o.fused,
                  "0 with value_tile = " + std::to_string(kNarrowTile));
  forward.require_segments(o);
}

void check_backward(const Override& o) {
  const Requirements backward("backward");
  backward.require(o.value_tile == 0, "value_tile", o.value_tile, "none, as it has one tile");
  backward.require(o.long_tile == 0, "long_tile", o.long_tile, "none, as it has one tile");
  backward.require(o.fused == -1, "fused", o.fused, "none, as it has no fused kernel");
  backward.require_segments(o);
}

}  // namespace

Overrides current_overrides() {
  const std::lock_guard lock(mutex);
  return overrides;
}

bool runs_portable_kernels(const Gpu& gpu) { return !gpu.is_hopper() || current_overrides().portable; }

Overrides exchange_overrides(const Override* forward, const Override* backward, const bool* portable) {
  if (forward != nullptr) {
    check_forward(*forward);
  }
  if (backward != nullptr) {
    check_backward(*backward);
  }
  const std::lock_guard lock(mutex);
  const Overrides previous = overrides;
  overrides = {.forward = forward != nullptr ? *forward : previous.forward,
               .backward = backward != nullptr ? *backward : previous.backward,
               .portable = portable != nullptr ? *portable : previous.portable};
  return previous;
}

}  // namespace flash_qla
