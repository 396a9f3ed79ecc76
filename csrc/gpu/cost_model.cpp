#include "gpu/cost_model.h"

#include <algorithm>
#include <cmath>

#include "gpu/head_dims.h"

namespace flash_qla {

namespace {

// Microseconds on one H200, bf16, K = V = 128 or a tile of it, most of them least squares over batches of equal
// sequences in all modes: see benchmarks/notes/cost_model.md.
constexpr double kStart = 4.9;                                   // the first launch, and chunk_matrices' latency
constexpr double kMatricesCta = 0.0122, kMatricesHead = 0.0075;  // chunk_matrices: a CTA, and each of its heads
constexpr double kMatricesL2norm = 0.003, kMatricesA = 0.0023;   // more a CTA; more a head
constexpr double kStartNarrow = 6.7, kChunkNarrow = 1.04;        // chunk_forward: around a CTA's chunks, and a chunk
constexpr double kStartWide = 7.7, kChunkWide = 1.51;            // with the wide value tile
// fused_forward: around a CTA's chunks; a chunk on an empty card; how much more it takes on a full one.
constexpr double kStartFused = 6.5, kChunkFused = 2.62, kChunkFusedFull = 0.56;
constexpr double kChunkFusedL2norm = 0.4, kChunkFusedA = 0.25;
constexpr double kTurn = 4.7;  // of chunk_forward or fused_forward: a CTA's next piece of work, besides its chunks
// segment_maps and segment_scan: around them; a chunk of maps that have an SM each; an SM's time for a chunk of each of
// more of them; each map, made or not; a segment behind another; a CTA, of which each slot has some, with nothing to
// do.
constexpr double kMapStart = 6.4, kMapChunk = 1.04, kMapChunkFull = 1.73;
constexpr double kMap = 0.14, kScan = 1.15, kSlotCta = 0.008;
// The backward. replay_states: around a CTA's chunks, a chunk, and on a full card a chunk of a head, which is its
// bytes; backward_maps: a chunk of M or Z and of dZ; segment_scan in both directions. From a few batches of one
// sequence (benchmarks/notes/backward_segments.md).
constexpr double kStartReplay = 7, kChunkReplay = 1.66, kChunkReplayFull = 0.0237;
constexpr double kBackwardMapChunk = 1.4, kReverseMapChunk = 1.95;
constexpr double kBackwardScan = 1.5;
// chunk_backward: around a piece, and a chunk, much the same alone and on a full card. Not fitted: the l2norm's
// launches.
constexpr double kPieceReverse = 12, kChunkReverse = 7.4;
constexpr double kL2norm = 5;
constexpr double kBytesPerUs = 3.5e6;
constexpr double kOtherTile = 1.5;  // a launch of chunk_forward that finds nothing to do
// What SMs wait for the last one where a batch's segments are not alike, in segments.
constexpr double kUnbalanced = 0.15;
// Of the heads this part is taken to need exact maps, as in the benchmarks: what the gates really do is known on the
// device alone.
constexpr double kExact = 0.25;
// The weights of batches whose longest sequence has twice the average (of two sequences one is seldom much shorter than
// that), and half of all tokens; chosen, see there.
constexpr double kTwice = 0.2, kTwiceOfTwo = 0.46, kHalf = 0.05;

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

// How a batch with sequences of these lengths goes through the SMs, those that are longer than a segment cut or not.
struct Schedule {
  double segment, sms, N, H_v;
  double tiles;                  // of a head's value rows: of the mode,
  double map_tiles, scan_parts;  // of maps, and those that segment_scan takes
  double total;                  // chunks of a head
  double length;                 // chunks of the longest piece
  double parts, parts_of_rest;   // of the longest sequence, of each of the others
  double pieces;                 // of a head
  double ctas, turns;            // and how often an SM takes a CTA's work
  double in_turns;               // chunks that the busiest SM goes through
};

// Equal sequences go through the SMs in whole turns; with others the longest pieces come first and the short ones fill
// the SMs.
Schedule schedule(const ForwardShape& shape, const Mode& mode, const Lengths& chunks, bool cut) {
  Schedule s{};
  s.segment = static_cast<double>(mode.segment_chunks);
  s.sms = static_cast<double>(shape.sm_count);
  s.N = static_cast<double>(shape.N);
  s.H_v = static_cast<double>(shape.H_v);
  s.total = chunks.longest + (s.N - 1) * chunks.rest;
  s.length = cut ? s.segment : chunks.longest;
  s.parts = cut ? std::ceil(chunks.longest / s.segment) : 1;
  s.parts_of_rest = cut ? std::max(1.0, std::ceil(chunks.rest / s.segment)) : 1;
  s.pieces = s.parts + (s.N - 1) * s.parts_of_rest;
  s.tiles = static_cast<double>(value_tiles(shape.V, cut ? mode.value_tile : mode.whole_tile));
  s.map_tiles = static_cast<double>(value_tiles(shape.V));
  s.scan_parts = static_cast<double>(value_tiles(shape.V, kScanColumns));
  s.ctas = s.pieces * s.H_v * s.tiles;
  s.turns = s.ctas / s.sms;
  if (shape.N == 1 || chunks.longest == chunks.rest) {
    s.turns = std::ceil(s.turns);
    s.in_turns = s.turns * s.length;
    return s;
  }
  s.turns = std::max(1.0, s.turns);
  const double work = s.total * s.H_v * s.tiles / s.sms;
  s.in_turns = cut ? std::max(work + (s.turns > 1) * kUnbalanced * s.segment,
                              last_piece(chunks, s.N, s.segment, s.H_v * s.tiles, s.sms))
                   : std::max(work, chunks.longest + (std::floor(s.turns) - 1) * chunks.rest);
  return s;
}

double fused_chunk_us(const ForwardShape& shape, const Schedule& s) {
  return kChunkFused + std::min(1.0, s.ctas / s.sms) * kChunkFusedFull + (shape.use_qk_l2norm ? kChunkFusedL2norm : 0) +
         (shape.low_level ? kChunkFusedA : 0);
}

double chunk_matrices_us(const ForwardShape& shape, const Schedule& s) {
  // As on a full card; or more tokens could seem to take less time where they let more heads share a CTA.
  constexpr int64_t kManySlots = 1 << 20;
  const double cta = kMatricesCta + (shape.use_qk_l2norm ? kMatricesL2norm : 0);
  const double head = kMatricesHead + (shape.low_level ? kMatricesA : 0);
  return kStart + (head + cta / static_cast<double>(heads_per_cta(shape, kManySlots))) * s.H_v * s.total;
}

double chunk_forward_us(int64_t value_tile, const Schedule& s) {
  return value_tile == kNarrowTile ? kStartNarrow + s.in_turns * kChunkNarrow : kStartWide + s.in_turns * kChunkWide;
}

// Segments of a head that are not the first ones of their sequences.
double later_segments(const Schedule& s) { return (s.pieces - s.N) * s.H_v; }

// Along the sequences, one state or gradient behind the other: how often the busiest SM goes from a segment to the
// next.
double scan_steps(const Schedule& s, double directions) {
  const double sequences = directions * s.scan_parts * (1 + (s.N - 1) * (s.parts_of_rest > 1)) * s.H_v / s.sms;
  return std::max(1.0, sequences) * (s.parts - 1);
}

// compose_maps: as many steps, of V + K rows of the map of one sequence.
double composition_us(const ForwardShape& shape, const Schedule& s) {
  const double ctas = static_cast<double>(value_tiles(shape.V + shape.K, kScanColumns)) * s.H_v;
  return shape.in_halves ? kScan * std::max(1.0, ctas / s.sms) * s.parts : 0;
}

// segment_maps and segment_scan.
double maps_us(const Schedule& s) {
  const double later = later_segments(s);
  const double maps = (1 + s.map_tiles) * later;  // M and Z
  return kMapStart + s.length * std::max(kMapChunk, kMapChunkFull * kExact * maps / s.sms) + kMap / 2 * maps +
         kScan * scan_steps(s, 1);
}

// backward_maps and segment_scan in both directions, one beside the other.
double backward_maps_us(const Schedule& s) {
  const double later = later_segments(s);
  const double exact = kExact * later * ((1 + s.map_tiles) * kBackwardMapChunk + s.map_tiles * kReverseMapChunk);
  return kMapStart + s.length * std::max(kReverseMapChunk, exact / s.sms) + kMap / 2 * (1 + 2 * s.map_tiles) * later +
         kBackwardScan * scan_steps(s, 2);
}

// What does not depend on the mode: the l2norm, which reads and writes q and k, and of them and their gradients makes
// those of the rows.
double around_us(const BackwardShape& shape) {
  const auto tokens = static_cast<double>(shape.B * shape.T);
  const double row = static_cast<double>(shape.K) * tokens;
  double us = 0;
  if (shape.use_qk_l2norm) {
    us += kL2norm + 2 * row * static_cast<double>(shape.H_k) * (4 + 6) / kBytesPerUs;
  }
  return us;
}

double predict_forward(const ForwardShape& shape, const Mode& mode, const Lengths& chunks, bool cut) {
  const Schedule s = schedule(shape, mode, chunks, cut);
  double us = (s.turns - 1) * kTurn;
  if (mode.fused) {
    return us + kStartFused + s.in_turns * fused_chunk_us(shape, s);
  }
  us += chunk_matrices_us(shape, s);
  us += chunk_forward_us(cut ? mode.value_tile : mode.whole_tile, s);
  if (mode.whole_tile != mode.value_tile) {
    us += kOtherTile;
  }
  if (mode.segment_chunks > 0 && !cut) {
    us += kSlotCta * s.H_v * ((1 + s.map_tiles) * (s.N + s.total / s.segment) + s.scan_parts * s.N);
  }
  us += composition_us(shape, s);
  return cut ? us + maps_us(s) : us;
}

double predict_backward(const ForwardShape& shape, const Mode& mode, const Lengths& chunks, bool cut) {
  const Schedule s = schedule(shape, mode, chunks, cut);
  double us = chunk_matrices_us(shape, s);
  us += kStartReplay +
        std::max(s.in_turns * kChunkReplay + (s.turns - 1) * kTurn, s.total * s.H_v * s.tiles * kChunkReplayFull);
  us += s.in_turns * kChunkReverse + s.turns * kPieceReverse;
  if (mode.segment_chunks > 0 && !cut) {
    us += kSlotCta * s.H_v * ((1 + 2 * s.map_tiles) * (s.N + s.total / s.segment) + 2 * s.scan_parts * s.N);
  }
  us += composition_us(shape, s);
  return cut ? us + backward_maps_us(s) : us;
}

// Of a direction: predict_forward or predict_backward.
using Predict = double (*)(const ForwardShape&, const Mode&, const Lengths&, bool cut);

// The device cuts, if it may choose, where that is faster.
double with_choice(Predict predict, const ForwardShape& shape, const Mode& mode, double longest) {
  const Lengths chunks = lengths(shape, longest);
  if (mode.segment_chunks == 0 || chunks.longest <= static_cast<double>(mode.segment_chunks)) {
    return predict(shape, mode, chunks, false);
  }
  const double cut = predict(shape, mode, chunks, true);
  return mode.always_cut || !device_knows_more(shape) ? cut : std::min(cut, predict(shape, mode, chunks, false));
}

double expected(Predict predict, const ForwardShape& shape, const Mode& mode) {
  const auto chunks = static_cast<double>(average_chunks(shape));
  if (!device_knows_more(shape)) {
    return with_choice(predict, shape, mode, chunks);
  }
  const double half = std::max(2 * chunks, chunks * static_cast<double>(shape.N) / 2);
  const double twice = shape.N == 2 ? kTwiceOfTwo : kTwice;
  return (1 - twice - kHalf) * with_choice(predict, shape, mode, chunks) +
         twice * with_choice(predict, shape, mode, 2 * chunks) + kHalf * with_choice(predict, shape, mode, half);
}

int64_t find_cut_above(Predict predict, const ForwardShape& shape, const Mode& mode) {
  if (mode.segment_chunks == 0 || mode.always_cut || !device_knows_more(shape)) {
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

}  // namespace

double predict(const ForwardShape& shape, const Mode& mode) { return expected(predict_forward, shape, mode); }
double predict(const BackwardShape& shape, const Mode& mode) {
  return around_us(shape) + expected(predict_backward, shape.forward(), mode);
}

int64_t cut_above(const ForwardShape& shape, const Mode& mode) { return find_cut_above(predict_forward, shape, mode); }
int64_t cut_above(const BackwardShape& shape, const Mode& mode) {
  return find_cut_above(predict_backward, shape.forward(), mode);
}

}  // namespace flash_qla
