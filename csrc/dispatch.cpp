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

// Microseconds on one H200, bf16, most of them least squares over batches of equal sequences in all modes: see
// benchmarks/NOTES.md.
constexpr double kStart = 6;                                     // chunk_plan, and chunk_matrices' latency
constexpr double kMatricesCta = 0.0127, kMatricesHead = 0.0068;  // chunk_matrices: a CTA, and each of its heads
constexpr double kMatricesL2norm = 0.003, kMatricesA = 0.0023;   // more a CTA; more a head
constexpr double kStart64 = 7.6, kChunk64 = 1.03;    // chunk_forward, value tile 64: around a CTA's chunks, and a chunk
constexpr double kStart128 = 9.0, kChunk128 = 1.53;  // value tile 128
// fused_forward: chunk_plan and around a CTA's chunks; a chunk on an empty card; how much more it takes on a full one.
constexpr double kStartFused = 7.7, kChunkFused = 2.6, kChunkFusedFull = 0.54;
constexpr double kChunkFusedL2norm = 0.4;
constexpr double kTurn = 5;  // of either: a CTA's next piece of work, besides its chunks
// segment_maps and segment_scan: around them; a chunk of maps that have an SM each; an SM's time for a chunk of each of
// more of them; each map, made or not; a segment behind another.
constexpr double kMapStart = 5, kMapChunk = 1.1, kMapChunkFull = 1.75;
constexpr double kMap = 0.115, kScan = 1.8;
// Of the heads this part is taken to need exact maps, as in the benchmarks: what the gates really do is known on the
// device alone.
constexpr double kExact = 0.25;
// The weight of a batch whose longest sequence has twice the average; chosen, see there.
constexpr double kUneven = 0.245;

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

int64_t average_chunks(const ForwardShape& shape) { return ceil_div(shape.B * shape.T, kChunk * shape.N); }

// The time where the sequences have `chunks` on average and the longest has `longest`. Equal ones go through the SMs in
// whole turns; the pieces of an uneven batch are taken to fill them.
double predict(const ForwardShape& shape, const Mode& mode, double chunks, double longest) {
  const auto segment = static_cast<double>(mode.segment_chunks), sms = static_cast<double>(shape.sm_count);
  const auto N = static_cast<double>(shape.N), H_v = static_cast<double>(shape.H_v);
  const auto tiles = static_cast<double>(kHeadDim / mode.value_tile);
  const bool uneven = longest > chunks, cut = segment > 0 && longest > segment;
  const double length = cut ? segment : longest;
  // Segments that are not the first ones of their sequences.
  const double later = !cut ? 0 : N * (uneven ? chunks / segment - chunks / longest : std::ceil(chunks / segment) - 1);
  const double ctas = (N + later) * H_v * tiles;
  const double turns = std::max(1.0, uneven ? ctas / sms : std::ceil(ctas / sms));
  const double in_turns = uneven ? std::max(N * H_v * tiles * chunks / sms, length) : turns * length;

  double us = (turns - 1) * kTurn;
  if (mode.fused) {
    return us + kStartFused +
           in_turns * (kChunkFused + std::min(1.0, ctas / sms) * kChunkFusedFull +
                       (shape.use_qk_l2norm ? kChunkFusedL2norm : 0));
  }
  // As on a full card; or more tokens could seem to take less time where they let more heads share a CTA.
  constexpr int64_t kManySlots = 1 << 20;
  const double cta = kMatricesCta + (shape.use_qk_l2norm ? kMatricesL2norm : 0);
  const double head = kMatricesHead + (shape.low_level ? kMatricesA : 0);
  us += kStart + (head + cta / static_cast<double>(heads_per_cta(shape, kManySlots))) * N * H_v * chunks;
  us += mode.value_tile == 64 ? kStart64 + in_turns * kChunk64 : kStart128 + in_turns * kChunk128;
  if (cut) {
    const double exact = 2 * kExact * H_v * later;  // M and N
    const double sequences = std::max(1.0, 4 * N * H_v / sms);
    us += kMapStart + length * std::max(kMapChunk, kMapChunkFull * exact / sms) + kMap * H_v * later +
          kScan * sequences * (std::ceil(longest / segment) - 1);
  }
  return us;
}

// The sequences' real lengths are on the device; see kUneven.
double predict(const ForwardShape& shape, const Mode& mode) {
  const auto chunks = static_cast<double>(average_chunks(shape));
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
  const int64_t chunks = average_chunks(shape);
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
    for (int64_t parts = 2; parts <= std::min<int64_t>((chunks + 1) / 2, 64); ++parts) {
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
