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
constexpr double kMapStart = 8, kMapChunk = 1.3;  // segment_maps
constexpr double kScanStart = 2.5, kScan = 3;     // segment_scan: a segment
// Of the heads this part is taken to need exact maps: what the gates really do is known on the device alone.
constexpr double kExact = 0.5;
constexpr double kUneven = 0.25;  // the weight of a batch whose longest sequence has twice the average

std::atomic<int64_t> forced_value_tile = 0, forced_segment_chunks = -1;

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

// The time where the sequences have `chunks` on average and the longest has `longest`.
double predict(const ForwardShape& shape, int64_t value_tile, int64_t segment_chunks, int64_t chunks, int64_t longest) {
  const auto parts = [&](int64_t of) { return segment_chunks > 0 ? ceil_div(of, segment_chunks) : 1; };
  const auto length = [&](int64_t of) { return parts(of) > 1 ? segment_chunks : of; };
  const auto waves = [&](double ctas) { return std::ceil(ctas / shape.sm_count); };
  const auto tile = [&](int64_t of) {
    const auto n = static_cast<double>(length(of));
    return value_tile == 64 ? kStart64 + n * kChunk64 : kStart128 + n * kChunk128;
  };
  const auto heads = static_cast<double>(shape.N * shape.H_v);
  // As on a full card; or more tokens could seem to take less time where they let more heads share a CTA.
  constexpr int64_t kManySlots = 1 << 20;
  const double per_head = kMatricesHead + kMatricesCta / static_cast<double>(heads_per_cta(shape, kManySlots));
  const double matrices = std::max(kMatricesLatency, per_head * heads * static_cast<double>(chunks));
  const auto tiles = static_cast<double>(kHeadDim / value_tile * parts(chunks));
  double us = kPlan + matrices + std::max(waves(heads * tiles) * tile(chunks), tile(longest));
  if (segment_chunks > 0) {
    us += waves(2 * kExact * heads * static_cast<double>(parts(chunks) - 1)) *
              (kMapStart + static_cast<double>(length(chunks)) * kMapChunk) +
          kScanStart + static_cast<double>(parts(longest) - 1) * kScan;
  }
  return us;
}

// The sequences' real lengths are on the device; see kUneven.
double predict(const ForwardShape& shape, int64_t value_tile, int64_t segment_chunks) {
  const int64_t chunks = ceil_div(shape.B * shape.T, kChunk * shape.N);
  const double equal = predict(shape, value_tile, segment_chunks, chunks, chunks);
  if (!shape.varlen || shape.N == 1) {
    return equal;
  }
  return (1 - kUneven) * equal + kUneven * predict(shape, value_tile, segment_chunks, chunks, 2 * chunks);
}

int64_t segment_slots(const ForwardShape& shape, int64_t slots, int64_t segment_chunks) {
  if (segment_chunks == 0) {
    return shape.N;
  }
  return shape.varlen ? shape.N + slots / segment_chunks
                      : shape.B * std::max<int64_t>(ceil_div(ceil_div(shape.T, kChunk), segment_chunks), 1);
}

ForwardDispatch decide(const ForwardShape& shape, int64_t value_tile, int64_t segment_chunks) {
  ForwardDispatch found{};
  const int64_t chunks = ceil_div(shape.B * shape.T, kChunk * shape.N);
  const auto consider = [&](int64_t tile, int64_t length) {
    const double us = predict(shape, tile, length);
    if (found.value_tile == 0 || us < found.predicted_us) {
      found.value_tile = tile;
      found.segment_chunks = length;
      found.predicted_us = us;
    }
  };
  for (const int64_t tile : {64, 128}) {
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
    int64_t value_tile, segment_chunks;
    ForwardDispatch found;
  };
  thread_local std::optional<Decision> last;
  const int64_t value_tile = forced_value_tile, segment_chunks = shape.auto_cp ? forced_segment_chunks.load() : 0;
  if (!last || last->shape != shape || last->value_tile != value_tile || last->segment_chunks != segment_chunks) {
    last = {shape, value_tile, segment_chunks, decide(shape, value_tile, segment_chunks)};
  }
  return last->found;
}

void override_forward_dispatch(int64_t value_tile, int64_t segment_chunks) {
  if (value_tile != 0 && value_tile != 64 && value_tile != kHeadDim) {
    throw std::invalid_argument("flash_qla._C.override_forward_dispatch: value_tile is " + std::to_string(value_tile) +
                                ", expected 64, 128 or 0 for the cost model's choice");
  }
  if (segment_chunks < -1 || segment_chunks >= INT32_MAX / kChunk) {  // the device counts tokens in 32 bits
    throw std::invalid_argument("flash_qla._C.override_forward_dispatch: segment_chunks is " +
                                std::to_string(segment_chunks) +
                                ", expected a number of chunks, 0 for none or -1 for the cost model's choice");
  }
  forced_value_tile = value_tile;
  forced_segment_chunks = segment_chunks;
}

}  // namespace flash_qla
