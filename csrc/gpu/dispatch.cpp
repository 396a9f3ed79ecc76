#include "gpu/dispatch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "gpu/plan.h"

namespace flash_qla {

namespace {

// Microseconds on one H200, bf16, most of them least squares over batches of equal sequences in all modes: see
// benchmarks/NOTES.md.
constexpr double kStart = 4.9;                                   // the first launch, and chunk_matrices' latency
constexpr double kMatricesCta = 0.0122, kMatricesHead = 0.0075;  // chunk_matrices: a CTA, and each of its heads
constexpr double kMatricesL2norm = 0.003, kMatricesA = 0.0023;   // more a CTA; more a head
constexpr double kStart64 = 6.7, kChunk64 = 1.04;    // chunk_forward, value tile 64: around a CTA's chunks, and a chunk
constexpr double kStart128 = 7.7, kChunk128 = 1.51;  // value tile 128
// fused_forward: around a CTA's chunks; a chunk on an empty card; how much more it takes on a full one.
constexpr double kStartFused = 6.5, kChunkFused = 2.62, kChunkFusedFull = 0.56;
constexpr double kChunkFusedL2norm = 0.4, kChunkFusedA = 0.25;
constexpr double kTurn = 4.7;  // of either: a CTA's next piece of work, besides its chunks
// segment_maps and segment_scan: around them; a chunk of maps that have an SM each; an SM's time for a chunk of each of
// more of them; each map, made or not; a segment behind another; a CTA, of which each slot has some, with nothing to
// do.
constexpr double kMapStart = 6.4, kMapChunk = 1.04, kMapChunkFull = 1.73;
constexpr double kMap = 0.14, kScan = 1.15, kSlotCta = 0.008;
constexpr double kOtherTile = 1.5;  // a launch of chunk_forward that finds nothing to do
// What SMs wait for the last one where a batch's segments are not alike, in segments.
constexpr double kUnbalanced = 0.15;
// Of the heads this part is taken to need exact maps, as in the benchmarks: what the gates really do is known on the
// device alone.
constexpr double kExact = 0.25;
// The weights of batches whose longest sequence has twice the average (of two sequences one is seldom much shorter than
// that), and half of all tokens; chosen, see there.
constexpr double kTwice = 0.2, kTwiceOfTwo = 0.46, kHalf = 0.05;

// What an offer to the device has to promise, of the time without: for as good as nothing it is not made.
constexpr double kWorthOffering = 0.998;
// Up to so many sequences, a step of chunk_plan, the first segment tells whether any is cut: it is the longest one's.
constexpr int64_t kMostWithTwoTiles = 256;

std::atomic<int64_t> forced_value_tile = 0, forced_segment_chunks = -1, forced_fused = -1, forced_cut_above = 0,
                     forced_whole_tile = 0;

struct Override {
  int64_t value_tile, segment_chunks, fused, cut_above, whole_tile;

  bool operator==(const Override&) const = default;
};

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
  int64_t value_tile, whole_tile, segment_chunks;
  bool fused, always_cut;
};

int64_t average_chunks(const ForwardShape& shape) { return ceil_div(shape.B * shape.T, kChunk * shape.N); }

// Only cu_seqlens say how long the sequences are, and where all are short the device can leave out segments.
bool device_knows_more(const ForwardShape& shape) { return shape.varlen && shape.N > 1; }

// As the model sees them: one sequence of `longest` chunks and others of the same `rest` each.
struct Lengths {
  double longest, rest;
};

Lengths lengths(const ForwardShape& shape, double longest) {
  const double others = static_cast<double>(std::max<int64_t>(shape.N - 1, 1));
  const double total = static_cast<double>(average_chunks(shape) * shape.N);
  longest = std::min(longest, total);
  return {longest, std::min(longest, (total - longest) / others)};
}

// When the last of a batch's pieces of whole and of parts of segments is done, in chunks, if the SMs take the longest
// first. Parts go where there is one whole segment less, and where they do not fit there behind one more.
double last_piece(const Lengths& chunks, double N, double segment, double pieces, double sms) {
  const double whole_of_longest = std::floor(chunks.longest / segment);
  const double whole_of_rest = std::floor(chunks.rest / segment);
  const double whole = (whole_of_longest + (N - 1) * whole_of_rest) * pieces;
  const double part = chunks.longest - whole_of_longest * segment, part_of_rest = chunks.rest - whole_of_rest * segment;
  const double turns = std::ceil(whole / sms), free = turns * sms - whole;
  const double longer = std::max(part, part_of_rest), shorter = std::min(part, part_of_rest);
  const double longer_ones = longer == part_of_rest ? (N - 1) * pieces : pieces;
  if (longer_ones > free * std::floor(segment / std::max(longer, 1.0))) {
    return turns * segment + longer;
  }
  const double room = free * segment - (part + (N - 1) * part_of_rest) * pieces;
  return turns * segment + (room < 0 ? shorter : 0);
}

// The time with sequences of these lengths, those that are longer than a segment cut or not. Equal ones go through the
// SMs in whole turns; with others the longest pieces come first and the short ones fill the SMs.
double predict(const ForwardShape& shape, const Mode& mode, const Lengths& chunks, bool cut) {
  const auto segment = static_cast<double>(mode.segment_chunks), sms = static_cast<double>(shape.sm_count);
  const auto N = static_cast<double>(shape.N), H_v = static_cast<double>(shape.H_v);
  const int64_t tile = cut ? mode.value_tile : mode.whole_tile;
  const auto tiles = static_cast<double>(kHeadDim / tile);
  const double total = chunks.longest + (N - 1) * chunks.rest;
  const double parts = cut ? std::ceil(chunks.longest / segment) : 1;
  const double parts_of_rest = cut ? std::max(1.0, std::ceil(chunks.rest / segment)) : 1;
  const double pieces = parts + (N - 1) * parts_of_rest;
  const double length = cut ? segment : chunks.longest;
  const double ctas = pieces * H_v * tiles;
  double turns = ctas / sms, in_turns = 0;
  if (N == 1 || chunks.longest == chunks.rest) {
    turns = std::ceil(turns);
    in_turns = turns * length;
  } else {
    turns = std::max(1.0, turns);
    const double work = total * H_v * tiles / sms;
    if (cut) {
      in_turns = std::max(work + (turns > 1) * kUnbalanced * segment, last_piece(chunks, N, segment, H_v * tiles, sms));
    } else {
      in_turns = std::max(work, chunks.longest + (std::floor(turns) - 1) * chunks.rest);
    }
  }

  double us = (turns - 1) * kTurn;
  if (mode.fused) {
    return us + kStartFused +
           in_turns * (kChunkFused + std::min(1.0, ctas / sms) * kChunkFusedFull +
                       (shape.use_qk_l2norm ? kChunkFusedL2norm : 0) + (shape.low_level ? kChunkFusedA : 0));
  }
  // As on a full card; or more tokens could seem to take less time where they let more heads share a CTA.
  constexpr int64_t kManySlots = 1 << 20;
  const double cta = kMatricesCta + (shape.use_qk_l2norm ? kMatricesL2norm : 0);
  const double head = kMatricesHead + (shape.low_level ? kMatricesA : 0);
  us += kStart + (head + cta / static_cast<double>(heads_per_cta(shape, kManySlots))) * H_v * total;
  us += tile == 64 ? kStart64 + in_turns * kChunk64 : kStart128 + in_turns * kChunk128;
  if (mode.whole_tile != mode.value_tile) {
    us += kOtherTile;
  }
  if (mode.segment_chunks > 0 && !cut) {
    us += kSlotCta * H_v * (2 * (N + total / segment) + 4 * N);
  }
  if (cut) {
    const double later = (pieces - N) * H_v;  // segments of a head that are not the first ones of their sequences
    const double exact = 2 * kExact * later;  // M and N
    const double sequences = std::max(1.0, 4 * (1 + (N - 1) * (parts_of_rest > 1)) * H_v / sms);
    us += kMapStart + length * std::max(kMapChunk, kMapChunkFull * exact / sms) + kMap * later +
          kScan * sequences * (parts - 1);
  }
  return us;
}

// The device cuts, if it may choose, where that is faster.
double predict(const ForwardShape& shape, const Mode& mode, double longest) {
  const Lengths chunks = lengths(shape, longest);
  if (mode.segment_chunks == 0 || chunks.longest <= static_cast<double>(mode.segment_chunks)) {
    return predict(shape, mode, chunks, false);
  }
  const double cut = predict(shape, mode, chunks, true);
  return mode.always_cut || !device_knows_more(shape) ? cut : std::min(cut, predict(shape, mode, chunks, false));
}

// What is to be expected of a batch of which the host does not know the lengths.
double predict(const ForwardShape& shape, const Mode& mode) {
  const auto chunks = static_cast<double>(average_chunks(shape));
  if (!device_knows_more(shape)) {
    return predict(shape, mode, chunks);
  }
  const double half = std::max(2 * chunks, chunks * static_cast<double>(shape.N) / 2);
  const double twice = shape.N == 2 ? kTwiceOfTwo : kTwice;
  return (1 - twice - kHalf) * predict(shape, mode, chunks) + twice * predict(shape, mode, 2 * chunks) +
         kHalf * predict(shape, mode, half);
}

// The longest sequence that is better left whole.
int64_t cut_above(const ForwardShape& shape, const Mode& mode) {
  if (mode.segment_chunks == 0 || !device_knows_more(shape)) {
    return 0;
  }
  int64_t whole = mode.segment_chunks, cut = std::max(average_chunks(shape) * shape.N, whole);
  while (cut - whole > 1) {
    const int64_t longest = whole + (cut - whole) / 2;
    const Lengths chunks = lengths(shape, static_cast<double>(longest));
    (predict(shape, mode, chunks, true) < predict(shape, mode, chunks, false) ? cut : whole) = longest;
  }
  return whole;
}

int64_t segment_slots(const ForwardShape& shape, int64_t slots, int64_t segment_chunks) {
  if (segment_chunks == 0) {
    return shape.N;
  }
  return shape.varlen ? shape.N + slots / segment_chunks
                      : shape.B * std::max<int64_t>(ceil_div(ceil_div(shape.T, kChunk), segment_chunks), 1);
}

ForwardDispatch decide(const ForwardShape& shape, const Override& forced) {
  ForwardDispatch found{};
  const int64_t chunks = average_chunks(shape);
  const bool always_cut = forced.segment_chunks > 0;
  const auto consider_mode = [&](const Mode& mode) {
    const double us = predict(shape, mode);
    const bool is_first_offer = device_knows_more(shape) && mode.segment_chunks > 0 && found.segment_chunks == 0;
    if (found.value_tile == 0 || us < found.predicted_us * (is_first_offer ? kWorthOffering : 1)) {
      found.value_tile = mode.value_tile;
      found.whole_tile = mode.whole_tile;
      found.segment_chunks = mode.segment_chunks;
      found.fused = mode.fused;
      found.predicted_us = us;
    }
  };
  const auto consider = [&](int64_t tile, int64_t length) {
    const bool has_choice = length > 0 && device_knows_more(shape) && shape.N <= kMostWithTwoTiles;
    const int64_t forced_whole = has_choice && forced.whole_tile != 0 ? forced.whole_tile : tile;
    consider_mode({tile, always_cut ? forced_whole : tile, length, false, always_cut});
    if (has_choice && !always_cut && forced.value_tile == 0 && tile == kHeadDim) {  // whole sequences are fewer pieces
      consider_mode({tile, 64, length, false, false});
    }
  };
  const bool can_fuse =
      !shape.output_h && !(shape.low_level && shape.fp16) && forced.value_tile != 64 && forced.segment_chunks <= 0;
  if (can_fuse && forced.fused != 0) {
    consider_mode({kHeadDim, kHeadDim, 0, true, false});
  }
  for (const int64_t tile : {64, 128}) {
    if (can_fuse && forced.fused == 1) {
      break;
    }
    if (forced.value_tile != 0 && tile != forced.value_tile) {
      continue;
    }
    if (forced.segment_chunks >= 0) {
      consider(tile, forced.segment_chunks);
      continue;
    }
    consider(tile, 0);
    // Parts of the average sequence, and of one that has all tokens.
    for (int64_t parts = 2; parts <= 64; parts += std::max<int64_t>(parts / 8, 1)) {
      if (2 * parts <= chunks + 1) {
        consider(tile, ceil_div(chunks, parts));
      }
      if (device_knows_more(shape) && 2 * parts <= chunks * shape.N + 1) {
        consider(tile, ceil_div(chunks * shape.N, parts));
      }
    }
  }
  const Mode mode{found.value_tile, found.whole_tile, found.segment_chunks, found.fused, always_cut};
  found.cut_above = always_cut ? forced.cut_above : cut_above(shape, mode);
  found.slots = chunk_slots(shape.B, shape.T, shape.N, shape.varlen);
  found.heads_per_cta = heads_per_cta(shape, found.slots);
  found.segments = segment_slots(shape, found.slots, found.segment_chunks);
  found.ctas = std::min<int64_t>(found.segments * shape.H_v * (kHeadDim / found.value_tile), shape.sm_count);
  found.whole_ctas = std::min<int64_t>(found.segments * shape.H_v * (kHeadDim / found.whole_tile), shape.sm_count);
  found.workspace_bytes = ForwardWorkspace(shape, found).bytes();
  return found;
}

}  // namespace

ForwardDispatch dispatch_forward(const ForwardShape& shape) {
  // A model's layers call with the same shape one after the other, and a batch has a hundred candidates.
  struct Decision {
    ForwardShape shape;
    Override forced;
    ForwardDispatch found;
  };
  thread_local std::optional<Decision> last;
  const Override forced{.value_tile = forced_value_tile,
                        .segment_chunks = shape.auto_cp ? forced_segment_chunks.load() : 0,
                        .fused = forced_fused,
                        .cut_above = forced_cut_above,
                        .whole_tile = forced_whole_tile};
  if (!last || last->shape != shape || last->forced != forced) {
    last = {shape, forced, decide(shape, forced)};
  }
  return last->found;
}

void override_forward_dispatch(int64_t value_tile, int64_t segment_chunks, int64_t fused, int64_t cut_above,
                               int64_t whole_tile) {
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
  if (cut_above < 0 || cut_above >= INT32_MAX / kChunk || (cut_above > 0 && segment_chunks <= 0)) {
    throw std::invalid_argument("flash_qla._C.override_forward_dispatch: cut_above is " + std::to_string(cut_above) +
                                ", expected 0 or, with segments, a number of chunks");
  }
  if (whole_tile != 0 && (cut_above == 0 || (whole_tile != 64 && whole_tile != kHeadDim))) {
    throw std::invalid_argument("flash_qla._C.override_forward_dispatch: whole_tile is " + std::to_string(whole_tile) +
                                ", expected 0 or, with cut_above, 64 or " + std::to_string(kHeadDim));
  }
  forced_value_tile = value_tile;
  forced_segment_chunks = segment_chunks;
  forced_fused = fused;
  forced_cut_above = cut_above;
  forced_whole_tile = whole_tile;
}

}  // namespace flash_qla
