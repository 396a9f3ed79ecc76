#include "dispatch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "plan.h"

namespace flash_qla {

namespace {

// Microseconds on one H200, bf16, measured as benchmarks/NOTES.md says.
constexpr double kPlan = 2.8;                                    // chunk_plan
constexpr double kMatricesCta = 0.0095, kMatricesHead = 0.0058;  // chunk_matrices on a full card: a CTA, a head of it
constexpr double kMatricesLatency = 5.5;                         // and the least that it takes
constexpr double kStart64 = 3.6;   // chunk_forward, value tile 64: a CTA's loads before its first chunk, and its end
constexpr double kChunk64 = 1.4;   // and a chunk
constexpr double kStart128 = 4.5;  // value tile 128
constexpr double kChunk128 = 2.0;
constexpr double kStartFused = 6;  // fused_forward: before a CTA's first chunk, and its end
constexpr double kChunkFused = 3.05, kChunkFusedL2norm = 3.35;
constexpr double kCold = 8;    // what the first chunks take beyond that, in all kernels on a full card, in it always
constexpr double kFull = 0.9;  // heads for this part of the SMs are a full card
constexpr double kMapStart = 8, kMapChunk = 1.3;  // segment_maps
constexpr double kScanStart = 2.5, kScan = 3;     // segment_scan: a segment
// Of the heads this part is taken to need exact maps: what the gates really do is known on the device alone.
constexpr double kExact = 0.5;
constexpr double kUneven = 0.25;  // the weight of a batch whose longest sequence has twice the average

std::atomic<int64_t> forced_value_tile = 0, forced_segment_chunks = -1, forced_fused = -1;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The most, up to one a warp, that still leave a CTA for every SM.
int64_t heads_per_cta(const ForwardShape& shape, int64_t slots) {
  const int64_t group = shape.H_v / shape.H_k;
  for (int64_t heads = std::min<int64_t>(group, 4); heads > 1; --heads) {
    if (group % heads == 0 && slots * shape.H_v / heads >= shape.sm_count) {
      return heads;
    }
  }
  return 1;
}

struct Mode {
  int64_t value_tile, segment_chunks;
  bool fused;
};

// The time where the sequences have `chunks` on average and the longest has `longest`.
double predict(const ForwardShape& shape, const Mode& mode, int64_t chunks, int64_t longest) {
  const auto [value_tile, segment_chunks, fused] = mode;
  const auto parts = [&](int64_t of) { return segment_chunks > 0 ? ceil_div(of, segment_chunks) : 1; };
  const auto length = [&](int64_t of) { return parts(of) > 1 ? segment_chunks : of; };
  const auto waves = [&](double ctas) { return std::ceil(ctas / shape.sm_count); };
  const auto tile = [&](int64_t of) {
    const auto n = static_cast<double>(length(of));
    return fused              ? kStartFused + n * (shape.use_qk_l2norm ? kChunkFusedL2norm : kChunkFused)
           : value_tile == 64 ? kStart64 + n * kChunk64
                              : kStart128 + n * kChunk128;
  };
  const auto heads = static_cast<double>(shape.N * shape.H_v);
  // As on a full card; or more tokens could seem to take less time where they let more heads share a CTA.
  constexpr int64_t kManySlots = 1 << 20;
  const double per_head = kMatricesHead + kMatricesCta / static_cast<double>(heads_per_cta(shape, kManySlots));
  const double matrices = fused ? 0 : std::max(kMatricesLatency, per_head * heads * static_cast<double>(chunks));
  const auto tiles = static_cast<double>(kHeadDim / value_tile * parts(chunks));
  const bool cold = fused || heads >= kFull * shape.sm_count;
  double us = kPlan + (cold ? kCold : 0) + matrices + std::max(waves(heads * tiles) * tile(chunks), tile(longest));
  if (segment_chunks > 0) {
    us += waves(2 * kExact * heads * static_cast<double>(parts(chunks) - 1)) *
              (kMapStart + static_cast<double>(length(chunks)) * kMapChunk) +
          kScanStart + static_cast<double>(parts(longest) - 1) * kScan;
  }
  return us;
}

// The sequences' real lengths are on the device; see kUneven.
double predict(const ForwardShape& shape, const Mode& mode) {
  const int64_t chunks = ceil_div(shape.B * shape.T, kChunk * shape.N);
  const double equal = predict(shape, mode, chunks, chunks);
  if (!shape.varlen || shape.N == 1) {
    return equal;
  }
  return (1 - kUneven) * equal + kUneven * predict(shape, mode, chunks, 2 * chunks);
}

int64_t segment_slots(const ForwardShape& shape, int64_t slots, int64_t segment_chunks) {
  if (segment_chunks == 0) {
    return shape.N;
  }
  return shape.varlen ? shape.N + slots / segment_chunks
                      : shape.B * std::max<int64_t>(ceil_div(ceil_div(shape.T, kChunk), segment_chunks), 1);
}

ForwardDispatch decide(const ForwardShape& shape, int64_t value_tile, int64_t segment_chunks, int64_t fused) {
  ForwardDispatch found{};
  const int64_t chunks = ceil_div(shape.B * shape.T, kChunk * shape.N);
  const auto consider = [&](int64_t tile, int64_t length, bool one_kernel = false) {
    const double us = predict(shape, {tile, length, one_kernel});
    if (found.value_tile == 0 || us < found.predicted_us) {
      found.value_tile = tile;
      found.segment_chunks = length;
      found.fused = one_kernel;
      found.predicted_us = us;
    }
  };
  const bool can_fuse = !shape.low_level && value_tile != 64 && segment_chunks <= 0;
  if (can_fuse && fused != 0) {
    consider(kHeadDim, 0, true);
  }
  for (const int64_t tile : {64, 128}) {
    if (can_fuse && fused == 1) {
      break;
    }
    if (value_tile != 0 && tile != value_tile) {
      continue;
    }
    if (segment_chunks >= 0) {
      consider(tile, segment_chunks);
      continue;
    }
    consider(tile, 0);
    for (int64_t parts = 2; parts <= std::min<int64_t>(chunks / 2, 64); ++parts) {
      consider(tile, ceil_div(chunks, parts));
    }
  }
  found.slots = chunk_slots(shape.B, shape.T, shape.N, shape.varlen);
  found.heads_per_cta = heads_per_cta(shape, found.slots);
  found.segments = segment_slots(shape, found.slots, found.segment_chunks);
  found.ctas = std::min<int64_t>(found.segments * shape.H_v * (kHeadDim / found.value_tile), shape.sm_count);
  found.workspace_bytes = ForwardWorkspace(shape, found).bytes();
  return found;
}

}  // namespace

ForwardDispatch dispatch_forward(const ForwardShape& shape) {
  // A model's layers call with the same shape one after the other, and a long sequence has a hundred candidates.
  struct Decision {
    ForwardShape shape;
    int64_t value_tile, segment_chunks, fused;
    ForwardDispatch found;
  };
  thread_local std::optional<Decision> last;
  const int64_t value_tile = forced_value_tile, segment_chunks = shape.auto_cp ? forced_segment_chunks.load() : 0;
  const int64_t fused = forced_fused;
  if (!last || last->shape != shape || last->value_tile != value_tile || last->segment_chunks != segment_chunks ||
      last->fused != fused) {
    last = {shape, value_tile, segment_chunks, fused, decide(shape, value_tile, segment_chunks, fused)};
  }
  return last->found;
}

void override_forward_dispatch(int64_t value_tile, int64_t segment_chunks, int64_t fused) {
  if (value_tile != 0 && value_tile != 64 && value_tile != kHeadDim) {
    throw std::invalid_argument("flash_qla._C.override_forward_dispatch: value_tile is " + std::to_string(value_tile) +
                                ", expected 64, 128 or 0 for the cost model's choice");
  }
  if (segment_chunks < -1 || segment_chunks >= INT32_MAX / kChunk) {  // the device counts tokens in 32 bits
    throw std::invalid_argument("flash_qla._C.override_forward_dispatch: segment_chunks is " +
                                std::to_string(segment_chunks) +
                                ", expected a number of chunks, 0 for none or -1 for the cost model's choice");
  }
  if (fused < -1 || fused > 1) {
    throw std::invalid_argument("flash_qla._C.override_forward_dispatch: fused is " + std::to_string(fused) +
                                ", expected 0, 1 or -1 for the cost model's choice");
  }
  if (fused == 1 && (value_tile == 64 || segment_chunks > 0)) {
    throw std::invalid_argument(
        "flash_qla._C.override_forward_dispatch: fused is 1, expected with neither value_tile 64 nor segments");
  }
  forced_value_tile = value_tile;
  forced_segment_chunks = segment_chunks;
  forced_fused = fused;
}

}  // namespace flash_qla
