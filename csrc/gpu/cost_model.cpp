#include "gpu/cost_model.h"

#include <algorithm>
#include <cmath>

#include "gpu/head_dims.h"

namespace flash_qla {

namespace {

// Fitted to all modes of 96 batches of equal sequences on an H100 and 88 on an H200, in bf16 with K = V = 128.
// benchmarks/notes/plan_and_dispatch.md has the fit and each card's residual.
//
// Microseconds: launches and first loads, which a faster clock does not shorten.
constexpr double kStart = 5.4;                           // the first launch, and chunk_matrices' first CTA
constexpr double kStartNarrow = 7.0, kStartWide = 8.05;  // chunk_forward around a CTA's chunks, by value tile
constexpr double kStartFused = 7.0;                      // fused_forward around a CTA's chunks
constexpr double kStartFusedA = 1;                       // the same, further, if it writes A
constexpr double kSeveral = 4.5;                         // both: further, if a CTA draws several pieces
constexpr double kPlanFirst = 5;                         // fused_forward: further, if it waits for the plan
constexpr double kMapStart = 4.4;                        // segment_maps and segment_scan, around their chunks
constexpr double kMap = 0.092;                           // a map of a segment, even if it is negligible
constexpr double kScan = 0.64;                           // segment_scan of 32 columns: from a segment to the next
constexpr double kSlotCta = 0.008;                       // a CTA of segment_maps that finds nothing to do
constexpr double kIdleScan = 3;                          // segment_scan, if it finds nothing to do
constexpr double kOtherTile = 3;                         // a launch of chunk_forward that finds nothing to do
// fused_forward where the device has a choice: it begins after the plan, and the other kernels find nothing to do, with
// and without segments.
constexpr double kOffered = 20, kOfferedWhole = 12;
constexpr double kSegmentMemory = 25;  // the launches around fused_forward over segments

// SM cycles.
constexpr double kMatricesCta = 630, kMatricesHead = 1540;   // chunk_matrices: a CTA, and each of its heads
constexpr double kMatricesL2norm = 780;                      // more for each CTA
constexpr double kChunkNarrow = 2240, kChunkWide = 3270;     // chunk_forward: a chunk of a CTA, by value tile
constexpr double kTurnNarrow = 6200, kTurnWide = 6500;       // a CTA's next piece of work, without its chunks
constexpr double kChunkFused = 5130, kChunkFusedFull = 900;  // fused_forward: a chunk; more of it if all SMs are busy
constexpr double kChunkFusedL2norm = 850, kChunkFusedA = 650;
constexpr double kChunkFusedHalf = 1500;  // fp16: the inverse's factors have two TF32 parts
constexpr double kTurnFused = 2160;
// More for a chunk of a segment, with its part of the chunks before the segment.
constexpr double kChunkFusedCut = 500;
// segment_maps: a chunk, if each map has an SM; and the time of an SM for a chunk of one map, if there are more maps.
constexpr double kMapChunk = 2230, kMapChunkFull = 2630;

// A kernel reaches the part kMemoryEfficiency of the memory's peak rate. Its time is the kOverlap-norm of two times:
// that of its arithmetic alone, and that of its bytes alone.
constexpr double kMemoryEfficiency = 0.8;
constexpr double kOverlap = 4;
// fused_forward's SMs wait for the states that they write: kStateWait times the time of the bytes.
constexpr double kStateWait = 2.05;

// The backward, from a few batches.
constexpr double kStartReplay = 7, kBackwardScan = 1.5;              // us
constexpr double kChunkReplay = 3290, kTurnReplay = 9300;            // cycles: replay_states
constexpr double kBackwardMapChunk = 2770, kReverseMapChunk = 3860;  // backward_maps: a chunk of M or Z, and of dZ
constexpr double kPieceReverse = 23800, kChunkReverse = 14650;       // chunk_backward: around a piece, and a chunk
constexpr double kL2norm = 5;                                        // us: the launches of the l2norm

// Wide keys, on an H100. Products with a state take twice the cycles of K = 128; other products take as many as before.
// A step of segment_scan reads four times the bytes.
constexpr double kWider = 1.7, kWiderScan = 4;
constexpr double kStartGradients = 15;                       // us: replay_gradients and token_gradients around chunks
constexpr double kChunkReplayGradients = 12500;              // replay_gradients: a chunk
constexpr double kTokenPart = 9000, kTokenValueRows = 1000;  // token_gradients: a part of a chunk; 64 value rows of it

// Segments of different lengths leave SMs idle at the end of a batch, for this part of a segment's time.
constexpr double kUnbalanced = 0.15;
// Only the device knows the gates. The model assumes that this part of the heads needs exact maps, as in the
// benchmarks.
constexpr double kExact = 0.25;
// If only cu_seqlens say the lengths: the weight of batches whose longest sequence has twice the average, and of
// batches whose longest has half of all tokens (benchmarks/notes/plan_and_dispatch.md).
constexpr double kTwice = 0.05, kHalf = 0.08;

// The model's batch: one sequence of `longest` chunks, and the others of `rest` chunks each.
struct Lengths {
  double longest, rest;
};

Lengths lengths(const ForwardShape& shape, double longest) {
  const double others = static_cast<double>(std::max<int64_t>(shape.N - 1, 1));
  const double total = static_cast<double>(average_chunks(shape) * shape.N);
  longest = std::min(longest, total);
  return {longest, std::min(longest, (total - longest) / others)};
}

// The time until the last piece of a batch has ended, in chunks. The SMs take the longest pieces first: whole segments,
// then the sequences' last segments, which may be shorter. SMs that have one whole segment less than others take the
// last segments that fit there. The other last segments run after all whole segments, in turns if they are more than
// the SMs.
double last_piece(const Lengths& chunks, double N, double segment, double pieces, double sms) {
  const double whole_of_longest = std::floor(chunks.longest / segment);
  const double whole_of_rest = std::floor(chunks.rest / segment);
  const double whole = (whole_of_longest + (N - 1) * whole_of_rest) * pieces;
  const double part = chunks.longest - whole_of_longest * segment, part_of_rest = chunks.rest - whole_of_rest * segment;
  const double turns = std::ceil(whole / sms), free = turns * sms - whole;
  const double longer = std::max(part, part_of_rest), shorter = std::min(part, part_of_rest);
  const double longer_ones = ((longer == part) + (N - 1) * (longer == part_of_rest)) * pieces;
  const double left = longer_ones - free * std::floor(segment / std::max(longer, 1.0));
  if (left > 0) {
    return turns * segment + std::ceil(left / sms) * longer;
  }
  const double room = free * segment - (part + (N - 1) * part_of_rest) * pieces;
  return turns * segment + (room < 0 ? shorter : 0);
}

// The time until the last piece of a batch of whole sequences has ended, in chunks. An SM that is free takes the
// longest piece that is left. A head of a sequence is `pieces` pieces.
double last_whole_piece(const Lengths& chunks, double N, double pieces, double sms) {
  const double turns = std::floor(pieces / sms), late = pieces - turns * sms;  // `late` SMs take one long piece more
  const double early_end = turns * chunks.longest, late_end = early_end + (late > 0 ? chunks.longest : 0);
  const double shorter = (N - 1) * pieces;
  if (chunks.rest < 1 || shorter == 0) {
    return late_end;
  }
  // Turns of short pieces on the other SMs that end by late_end.
  const double meanwhile = late > 0 ? std::floor((late_end - early_end) / chunks.rest) : 0;
  const double left = shorter - meanwhile * (sms - late);
  if (left <= 0) {
    return late_end;
  }
  const double more = std::ceil(left / sms);
  const bool suffices = late > 0 && (sms - late) * more + late * (more - 1) >= left;
  return suffices ? std::max(late_end, early_end + (meanwhile + more) * chunks.rest) : late_end + more * chunks.rest;
}

// The way of a batch through the SMs: with all long sequences cut into segments, or with all sequences whole.
struct Schedule {
  double segment, sms, N, H_v;
  double tiles;                 // tiles of a head's value rows in this mode
  double key_tiles, map_tiles;  // tiles of a head's M, and of its value rows in maps
  double scan_parts;            // its parts in segment_scan
  double total;                 // chunks of a head
  double length;                // chunks of the longest piece
  double parts, parts_of_rest;  // segments of the longest sequence, and of each other sequence
  double pieces;                // segments of a head
  double ctas, turns;           // pieces of all heads and tiles; the same for each SM
  double in_turns;              // chunks that the busiest SM goes through
};

// Equal pieces go through the SMs in whole turns. Unequal pieces start with the longest, and short ones fill the SMs.
Schedule schedule(const ForwardShape& shape, const Mode& mode, const Lengths& chunks, bool is_long) {
  const bool cut = is_long && mode.segment_chunks > 0;
  Schedule s{};
  s.segment = static_cast<double>(mode.segment_chunks);
  s.sms = static_cast<double>(shape.card.sm_count);
  s.N = static_cast<double>(shape.N);
  s.H_v = static_cast<double>(shape.H_v);
  s.total = chunks.longest + (s.N - 1) * chunks.rest;
  s.length = cut ? s.segment : chunks.longest;
  s.parts = cut ? std::ceil(chunks.longest / s.segment) : 1;
  s.parts_of_rest = cut ? std::max(1.0, std::ceil(chunks.rest / s.segment)) : 1;
  s.pieces = s.parts + (s.N - 1) * s.parts_of_rest;
  s.tiles = static_cast<double>(value_tiles(shape.V, is_long ? mode.value_tile : mode.whole_tile));
  s.key_tiles = static_cast<double>(key_parts(shape.K));
  s.map_tiles = static_cast<double>(value_tiles(shape.V));
  s.scan_parts = static_cast<double>(value_tiles(shape.V, kScanColumns));
  s.ctas = s.pieces * s.H_v * s.tiles;
  s.turns = s.ctas / s.sms;
  if (shape.N == 1 || chunks.longest == chunks.rest) {
    const bool has_rest = cut && std::fmod(chunks.longest, s.segment) != 0;
    s.turns = has_rest ? std::max(1.0, s.turns) : std::ceil(s.turns);
    s.in_turns = has_rest ? last_piece(chunks, s.N, s.segment, s.H_v * s.tiles, s.sms) : s.turns * s.length;
    return s;
  }
  s.turns = std::max(1.0, s.turns);
  if (!cut) {
    s.in_turns = last_whole_piece(chunks, s.N, s.H_v * s.tiles, s.sms);
    return s;
  }
  const double work = s.total * s.H_v * s.tiles / s.sms;
  s.in_turns = std::max(work + (s.turns > 1) * kUnbalanced * s.segment,
                        last_piece(chunks, s.N, s.segment, s.H_v * s.tiles, s.sms));
  return s;
}

// Cycles and bytes as microseconds on the shape's card.
double cycles_us(const ForwardShape& shape, double cycles) { return cycles / shape.card.cycles_per_us(); }
double bytes_us(const ForwardShape& shape, double bytes) {
  return bytes / (kMemoryEfficiency * shape.card.bytes_per_us());
}
// Cycles of a kernel with keys of the shape, from those with K = 128.
double wider(const ForwardShape& shape, double cycles) { return has_wide_keys(shape.K) ? kWider * cycles : cycles; }
double scan_us(const ForwardShape& shape, double us) { return has_wide_keys(shape.K) ? kWiderScan * us : us; }
double overlapped(double a, double b) {
  const double longer = std::max(a, b);
  return longer == 0 ? 0 : longer * std::pow(1 + std::pow(std::min(a, b) / longer, kOverlap), 1 / kOverlap);
}

// Bytes for each chunk and value head: q or k, which the heads of a group share; v or o; L, P and the gates; A. The
// last function: bytes of a state.
double key_bytes(const ForwardShape& shape) {
  return 2.0 * kChunk * static_cast<double>(shape.K) / static_cast<double>(shape.group());
}
double value_bytes(const ForwardShape& shape) { return 2.0 * kChunk * static_cast<double>(shape.V); }
constexpr double kMatrixBytes = 2 * 2 * kTriangle + 4 * ForwardGate::kCount * kChunk;
constexpr double kABytes = 2 * kChunk * kChunk;
double state_bytes(const ForwardShape& shape) { return 4.0 * static_cast<double>(shape.K * shape.V); }

// The time that is added if a CTA draws several pieces.
double several_us(const Schedule& s) { return s.ctas > s.sms ? kSeveral : 0; }

double fused_forward_us(const ForwardShape& shape, const Schedule& s, double more_cycles = 0) {
  const double chunk = kChunkFused + more_cycles + std::min(1.0, s.ctas / s.sms) * kChunkFusedFull +
                       (shape.use_qk_l2norm ? kChunkFusedL2norm : 0) + (shape.low_level ? kChunkFusedA : 0) +
                       (shape.fp16 ? kChunkFusedHalf : 0);
  const double states = s.N * s.H_v * state_bytes(shape);
  const double waits = kStateWait * std::max(0.0, s.N * s.H_v * s.tiles - s.sms) * state_bytes(shape) / s.tiles;
  const double chunks = s.H_v * s.total;
  const double bytes =
      chunks * (s.tiles * 2 * key_bytes(shape) + 2 * value_bytes(shape) + (shape.low_level ? kABytes : 0));
  const double start =
      kStartFused + (shape.low_level ? kStartFusedA : 0) + several_us(s) + (begins_early(shape) ? 0 : kPlanFirst);
  return start + std::max(cycles_us(shape, s.in_turns * chunk + (s.turns - 1) * kTurnFused) + bytes_us(shape, waits),
                          bytes_us(shape, bytes + states));
}

double chunk_matrices_us(const ForwardShape& shape, const Schedule& s, double part_of_heads = 1) {
  // heads_per_cta of a full card. With this batch's heads_per_cta, more tokens could seem to take less time.
  constexpr int64_t kManySlots = 1 << 20;
  const double cta = kMatricesCta + (shape.use_qk_l2norm ? kMatricesL2norm : 0);
  const double head = kMatricesHead + cta / static_cast<double>(heads_per_cta(shape, kManySlots));
  const double chunks = part_of_heads * s.H_v * s.total;
  const double bytes = 2 * key_bytes(shape) + kMatrixBytes + (shape.low_level ? kABytes : 0);
  return kStart + overlapped(cycles_us(shape, wider(shape, chunks / s.sms * head)), bytes_us(shape, chunks * bytes));
}

double chunk_forward_us(const ForwardShape& shape, int64_t value_tile, const Schedule& s) {
  const bool narrow = value_tile == kNarrowTile;
  const double chunk = narrow ? kChunkNarrow : kChunkWide, turn = narrow ? kTurnNarrow : kTurnWide;
  const double bytes = s.H_v * s.total * (2 * key_bytes(shape) + 2 * value_bytes(shape) + kMatrixBytes) +
                       s.N * s.H_v * state_bytes(shape);
  const double start = (narrow ? kStartNarrow : kStartWide) + several_us(s);
  const double work = start + cycles_us(shape, wider(shape, s.in_turns * chunk));
  return cycles_us(shape, (s.turns - 1) * turn) + overlapped(work, bytes_us(shape, bytes));
}

// Segments of all heads, without the first segment of each sequence.
double later_segments(const Schedule& s) { return (s.pieces - s.N) * s.H_v; }

// Steps of segment_scan on the busiest SM, because a sequence's segments come one after the other.
double scan_steps(const Schedule& s, double directions) {
  const double sequences = directions * s.scan_parts * (1 + (s.N - 1) * (s.parts_of_rest > 1)) * s.H_v / s.sms;
  return std::max(1.0, sequences) * (s.parts - 1);
}

// compose_maps takes the same steps, with V + K rows of the map of one sequence.
double composition_us(const ForwardShape& shape, const Schedule& s) {
  const double ctas = static_cast<double>(value_tiles(shape.V + shape.K, kScanColumns)) * s.H_v;
  return shape.in_halves ? scan_us(shape, kScan) * std::max(1.0, ctas / s.sms) * s.parts : 0;
}

// segment_maps and segment_scan.
double maps_us(const ForwardShape& shape, const Schedule& s) {
  const double later = later_segments(s);
  const double maps = (s.key_tiles + s.map_tiles) * later;  // M and Z by tiles
  const double chunk = std::max(kMapChunk, kMapChunkFull * kExact * maps / s.sms);
  return kMapStart + cycles_us(shape, wider(shape, s.length * chunk)) + kMap * maps +
         scan_us(shape, kScan) * scan_steps(s, 1);
}

// The CTAs of segment_maps and segment_scan where no sequence is cut. They find nothing to do.
double idle_slots_us(const Schedule& s) {
  return kIdleScan + kSlotCta * s.H_v * (s.key_tiles + s.map_tiles) * (s.N + s.total / s.segment);
}

// backward_maps, and segment_scan in both directions at the same time.
double backward_maps_us(const ForwardShape& shape, const Schedule& s) {
  const double later = later_segments(s);
  const double exact =
      kExact * later * ((s.key_tiles + s.map_tiles) * kBackwardMapChunk + s.map_tiles * kReverseMapChunk);
  const double chunk = std::max(kReverseMapChunk, exact / s.sms);
  return kMapStart + cycles_us(shape, wider(shape, s.length * chunk)) + kMap * (s.key_tiles + 2 * s.map_tiles) * later +
         scan_us(shape, kBackwardScan) * scan_steps(s, 2);
}

// Writes h and V_new, and reads k, v, L and the gates.
double replay_states_us(const ForwardShape& shape, const Schedule& s) {
  const double h = 2.0 * static_cast<double>(shape.K * shape.V);
  const double bytes = h + 2 * value_bytes(shape) + key_bytes(shape) + kMatrixBytes;
  const double work = cycles_us(shape, wider(shape, s.in_turns * kChunkReplay) + (s.turns - 1) * kTurnReplay);
  return kStartReplay + overlapped(work, bytes_us(shape, s.H_v * s.total * bytes));
}

// Reads what the replay wrote, q, k, dO and the matrices; writes dQ, dK and dV.
double chunk_backward_us(const ForwardShape& shape, const Schedule& s) {
  const double h = 2.0 * static_cast<double>(shape.K * shape.V);
  const double bytes = h + 3 * value_bytes(shape) + 4 * key_bytes(shape) + kMatrixBytes;
  const double work = cycles_us(shape, s.in_turns * kChunkReverse + s.turns * kPieceReverse);
  return overlapped(work, bytes_us(shape, s.H_v * s.total * bytes));
}

// With wide keys the same in two kernels. The first writes dS' and U, and the second reads them.
double replay_gradients_us(const ForwardShape& shape, const Schedule& s) {
  const double dh = 2.0 * static_cast<double>(shape.K * shape.V);
  const double bytes = dh + 2 * value_bytes(shape) + 2 * key_bytes(shape) + kMatrixBytes;
  const double work = cycles_us(shape, s.in_turns * kChunkReplayGradients + s.turns * kTurnReplay);
  return overlapped(work, bytes_us(shape, s.H_v * s.total * bytes));
}

double token_gradients_us(const ForwardShape& shape, const Schedule& s) {
  const double h = 2.0 * static_cast<double>(shape.K * shape.V);
  const double bytes = 2 * h + 5 * value_bytes(shape) + 4 * key_bytes(shape);
  const double part = kTokenPart + kTokenValueRows * static_cast<double>(value_tiles(shape.V, kNarrowTile));
  const double parts = s.H_v * s.total * static_cast<double>(key_parts(shape.K));
  return overlapped(cycles_us(shape, parts / s.sms * part), bytes_us(shape, s.H_v * s.total * bytes));
}

// The time of the l2norm's kernels, the same in all modes. They read and write q and k, and later dq and dk.
double around_us(const BackwardShape& shape) {
  const auto tokens = static_cast<double>(shape.B * shape.T);
  const double row = static_cast<double>(shape.K) * tokens;
  double us = 0;
  if (shape.use_qk_l2norm && !normalizes_inside(shape)) {
    us += kL2norm + bytes_us(shape.forward(), 2 * row * static_cast<double>(shape.H_k) * (4 + 6));
  }
  return us;
}

// A mode's time on a batch, in which some sequence is long or none is.
double predict_forward(const ForwardShape& shape, const Mode& mode, const Lengths& chunks, bool is_long) {
  const Schedule s = schedule(shape, mode, chunks, is_long);
  const bool has_segments = mode.segment_chunks > 0;
  if (mode.fused_segments) {
    return kSegmentMemory + (is_long ? chunk_matrices_us(shape, s, kExact) + maps_us(shape, s) +
                                           fused_forward_us(shape, s, kChunkFusedCut)
                                     : fused_forward_us(shape, s) + idle_slots_us(s));
  }
  if (mode.fused && !is_long) {
    return fused_forward_us(shape, s) + (has_segments ? kOffered : mode.has_two_ways() ? kOfferedWhole : 0);
  }
  double us = chunk_matrices_us(shape, s) + chunk_forward_us(shape, is_long ? mode.value_tile : mode.whole_tile, s);
  if (mode.has_two_ways()) {
    us += kOtherTile;
  }
  if (has_segments && !is_long) {
    us += idle_slots_us(s);
  }
  us += composition_us(shape, s);
  return is_long && has_segments ? us + maps_us(shape, s) : us;
}

double predict_backward(const ForwardShape& shape, const Mode& mode, const Lengths& chunks, bool is_long) {
  const Schedule s = schedule(shape, mode, chunks, is_long);
  double us = chunk_matrices_us(shape, s) + replay_states_us(shape, s);
  us += has_wide_keys(shape.K) ? kStartGradients + replay_gradients_us(shape, s) + token_gradients_us(shape, s)
                               : chunk_backward_us(shape, s);
  if (mode.segment_chunks > 0 && !is_long) {
    us += 2 * kIdleScan + kSlotCta * s.H_v * (s.key_tiles + 2 * s.map_tiles) * (s.N + s.total / s.segment);
  }
  us += composition_us(shape, s);
  return is_long ? us + backward_maps_us(shape, s) : us;
}

// predict_forward or predict_backward.
using Predict = double (*)(const ForwardShape&, const Mode&, const Lengths&, bool is_long);

// The time of a batch with this longest sequence: that of the faster way, if the device has the choice.
double with_choice(Predict predict, const ForwardShape& shape, const Mode& mode, double longest) {
  const Lengths chunks = lengths(shape, longest);
  if (!mode.has_choice() || chunks.longest <= static_cast<double>(mode.segment_chunks)) {
    return predict(shape, mode, chunks, false);
  }
  const double as_long = predict(shape, mode, chunks, true);
  return mode.always_cut || !device_knows_more(shape) ? as_long
                                                      : std::min(as_long, predict(shape, mode, chunks, false));
}

double expected(Predict predict, const ForwardShape& shape, const Mode& mode) {
  const auto chunks = static_cast<double>(longest_chunks(shape));
  if (!device_knows_more(shape)) {
    return with_choice(predict, shape, mode, chunks);
  }
  const double half = std::max(2 * chunks, chunks * static_cast<double>(shape.N) / 2);
  return (1 - kTwice - kHalf) * with_choice(predict, shape, mode, chunks) +
         kTwice * with_choice(predict, shape, mode, 2 * chunks) + kHalf * with_choice(predict, shape, mode, half);
}

int64_t find_cut_above(Predict predict, const ForwardShape& shape, const Mode& mode) {
  if (!mode.has_choice() || mode.always_cut || !device_knows_more(shape)) {
    return 0;
  }
  int64_t most_short = std::max<int64_t>(mode.segment_chunks, 1);
  int64_t least_long = std::max(average_chunks(shape) * shape.N, most_short);
  while (least_long - most_short > 1) {
    const int64_t longest = most_short + (least_long - most_short) / 2;
    const Lengths chunks = lengths(shape, static_cast<double>(longest));
    (predict(shape, mode, chunks, true) < predict(shape, mode, chunks, false) ? least_long : most_short) = longest;
  }
  return most_short;
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
