#include "gpu/cost_model.h"

#include <algorithm>
#include <cmath>

#include "gpu/head_dims.h"

namespace flash_qla {

namespace {

// Fitted to `python benchmarks/dispatch.py` on an H100 and an H200, in bf16 with K = V = 128. A constant is here only
// if choices need it; benchmarks/notes/plan_and_dispatch.md has the residual.
//
// Microseconds, which a faster clock does not shorten.
constexpr double kStart = 6.5;         // a launch and the first loads of a CTA
constexpr double kSeveral = 4.5;       // chunk_forward, fused_forward: further, if a CTA draws several work tiles
constexpr double kMap = 0.075;         // M or Z of a segment, even if it is negligible; dZ by the ratio of their chunks
constexpr double kScan = 0.73;         // segment_scan of 32 columns: from a segment to the next
constexpr double kIdle = 3;            // a launch without work: segment_scan where no sequence is cut, the other tile
constexpr double kSlotCta = 0.008;     // a CTA of segment_maps where no sequence is cut
constexpr double kSegmentMemory = 25;  // the launches around fused_forward over segments

// SM cycles.
constexpr double kMatrices = 1600;                        // chunk_matrices: a chunk and head
constexpr double kChunkNarrow = 2200, kChunkWide = 3270;  // chunk_forward, replay_states: a chunk, by value tile
constexpr double kChunkFused = 5130;                      // fused_forward: a chunk
constexpr double kChunkMore = 630;  // the same, further, for each of: all SMs busy, l2norm, A, a cut; twice for fp16
constexpr double kChunkReverse = 14000;    // chunk_backward: a chunk
constexpr double kMapChunk = 1900;         // segment_maps, backward_maps: a chunk of M or Z
constexpr double kReverseMapChunk = 4400;  // backward_maps: a chunk of dZ
constexpr double kNext = 7400;             // a CTA's next work tile, without its chunks
// The portable kernels' recurrences, which differ little: a chunk on an SM of its own, and on a busy one. Measured by
// benchmarks/backward.py --kernels portable on an H200.
constexpr double kPortableChunk = 8400, kPortableBusy = 5700;

// A kernel reaches the part kMemoryEfficiency of the memory's peak rate. Its time is the kOverlap-norm of two times:
// that of its arithmetic alone, and that of its bytes alone.
constexpr double kMemoryEfficiency = 0.8;
constexpr double kOverlap = 4;
// fused_forward's SMs wait for the states that they write: kStateWait times the time of the bytes.
constexpr double kStateWait = 2.5;

// With K > 128 products with a state take kWider times the cycles, and a step of segment_scan kWiderScan times the
// time. So does a step of portable_scan.
constexpr double kWider = 1.7, kWiderScan = 4;

// Only the device knows the gates. The model assumes that this part of the maps is exact. In the benchmarks all maps of
// a quarter of the heads are, and short ones of the others.
constexpr double kExact = 0.41;
// If only cu_seqlens have the lengths: the weight of batches in which one sequence has half of all tokens, or 7/4 of
// the average if that is more; the others have equal sequences.
constexpr double kSkewed = 0.1;

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

// The time until the last work tile of a batch has ended, in chunks. The SMs take the longest first: whole segments,
// then the sequences' last segments, which may be shorter. These backfill SMs that are idle in the last full wave.
// Those that do not fit there run after it, in waves if they are more than the SMs.
double last_tile(const Lengths& chunks, double N, double segment, double tiles, double sms) {
  const double whole_of_longest = std::floor(chunks.longest / segment);
  const double whole_of_rest = std::floor(chunks.rest / segment);
  const double whole = (whole_of_longest + (N - 1) * whole_of_rest) * tiles;
  const double part = chunks.longest - whole_of_longest * segment, part_of_rest = chunks.rest - whole_of_rest * segment;
  const double waves = std::ceil(whole / sms), free = waves * sms - whole;
  const double longer = std::max(part, part_of_rest), shorter = std::min(part, part_of_rest);
  const double longer_ones = ((longer == part) + (N - 1) * (longer == part_of_rest)) * tiles;
  const double left = longer_ones - free * std::floor(segment / std::max(longer, 1.0));
  if (left > 0) {
    return waves * segment + std::ceil(left / sms) * longer;
  }
  const double room = free * segment - (part + (N - 1) * part_of_rest) * tiles;
  return waves * segment + (room < 0 ? shorter : 0);
}

// The time until the last work tile of a batch of whole sequences has ended, in chunks. An SM that is free takes the
// longest work tile that is left. A sequence has `tiles` work tiles.
double last_whole_tile(const Lengths& chunks, double N, double tiles, double sms) {
  const double waves = std::floor(tiles / sms), late = tiles - waves * sms;  // `late` SMs take one long tile more
  const double early_end = waves * chunks.longest, late_end = early_end + (late > 0 ? chunks.longest : 0);
  const double shorter = (N - 1) * tiles;
  if (chunks.rest < 1 || shorter == 0) {
    return late_end;
  }
  // Waves of short tiles on the other SMs that end by late_end.
  const double meanwhile = late > 0 ? std::floor((late_end - early_end) / chunks.rest) : 0;
  const double left = shorter - meanwhile * (sms - late);
  if (left <= 0) {
    return late_end;
  }
  const double more = std::ceil(left / sms);
  const bool suffices = late > 0 && (sms - late) * more + late * (more - 1) >= left;
  return suffices ? std::max(late_end, early_end + (meanwhile + more) * chunks.rest) : late_end + more * chunks.rest;
}

// How a batch goes through the SMs, whole or cut into segments.
struct Schedule {
  double sms, N, H_v;
  double tiles;                 // tiles of a head's value rows
  double key_tiles, map_tiles;  // tiles of a head's M, and of its value rows in maps
  double scan_parts;            // its parts in segment_scan
  double total;                 // chunks of a head
  double length;                // chunks of the longest work tile
  double parts, parts_of_rest;  // segments of the longest sequence, and of each other sequence
  double segments;              // segments of a head
  double work_tiles, waves;     // of all heads and segments; the same per SM
  double busiest;               // chunks of the busiest SM
};

// Equal work tiles go through the SMs in whole waves. Unequal ones start with the longest, and short ones fill the SMs.
Schedule schedule(const ForwardShape& shape, const Lengths& chunks, int64_t segment_chunks,
                  int64_t value_tile = kWideTile) {
  const bool cut = segment_chunks > 0;
  const auto segment = static_cast<double>(segment_chunks);
  Schedule s{};
  s.sms = static_cast<double>(shape.card.sm_count);
  s.N = static_cast<double>(shape.N);
  s.H_v = static_cast<double>(shape.H_v);
  s.total = chunks.longest + (s.N - 1) * chunks.rest;
  s.length = cut ? segment : chunks.longest;
  s.parts = cut ? std::ceil(chunks.longest / segment) : 1;
  s.parts_of_rest = cut ? std::max(1.0, std::ceil(chunks.rest / segment)) : 1;
  s.segments = s.parts + (s.N - 1) * s.parts_of_rest;
  s.tiles = static_cast<double>(value_tiles(shape.V, value_tile));
  s.key_tiles = static_cast<double>(key_parts(shape.K));
  s.map_tiles = static_cast<double>(value_tiles(shape.V));
  s.scan_parts = static_cast<double>(value_tiles(shape.V, kScanColumns));
  s.work_tiles = s.segments * s.H_v * s.tiles;
  s.waves = s.work_tiles / s.sms;
  if (shape.N == 1 || chunks.longest == chunks.rest) {
    const bool has_rest = cut && std::fmod(chunks.longest, segment) != 0;
    s.waves = has_rest ? std::max(1.0, s.waves) : std::ceil(s.waves);
    s.busiest = has_rest ? last_tile(chunks, s.N, segment, s.H_v * s.tiles, s.sms) : s.waves * s.length;
    return s;
  }
  s.waves = std::max(1.0, s.waves);
  if (!cut) {
    s.busiest = last_whole_tile(chunks, s.N, s.H_v * s.tiles, s.sms);
    return s;
  }
  const double work = s.total * s.H_v * s.tiles / s.sms;
  s.busiest = std::max(work, last_tile(chunks, s.N, segment, s.H_v * s.tiles, s.sms));
  return s;
}

// Cycles and bytes as microseconds on the shape's card.
double cycles_us(const ForwardShape& shape, double cycles) { return cycles / shape.card.cycles_per_us(); }
double bytes_us(const ForwardShape& shape, double bytes) {
  return bytes / (kMemoryEfficiency * shape.card.bytes_per_us());
}
// Cycles of a kernel with keys of the shape, from those with K = 128.
double wider(const ForwardShape& shape, double cycles) { return has_wide_keys(shape.K) ? kWider * cycles : cycles; }
double scan_us(const ForwardShape& shape, double us) {
  return has_wide_keys(shape.K) || shape.portable ? kWiderScan * us : us;
}
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

// The time that is added if a CTA draws several work tiles.
double several_us(const Schedule& s) { return s.work_tiles > s.sms ? kSeveral : 0; }

double fused_forward_us(const ForwardShape& shape, const Schedule& s, bool cut = false) {
  const double more =
      std::min(1.0, s.work_tiles / s.sms) + shape.use_qk_l2norm + shape.low_level + 2 * shape.fp16 + cut;
  const double chunk = kChunkFused + more * kChunkMore;
  const double states = s.N * s.H_v * state_bytes(shape);
  const double waits = kStateWait * std::max(0.0, s.N * s.H_v * s.tiles - s.sms) * state_bytes(shape) / s.tiles;
  const double chunks = s.H_v * s.total;
  const double bytes =
      chunks * (s.tiles * 2 * key_bytes(shape) + 2 * value_bytes(shape) + (shape.low_level ? kABytes : 0));
  const double start = (begins_early(shape) ? 1 : 2) * kStart + several_us(s);
  return start + std::max(cycles_us(shape, s.busiest * chunk + (s.waves - 1) * kNext) + bytes_us(shape, waits),
                          bytes_us(shape, bytes + states));
}

double chunk_matrices_us(const ForwardShape& shape, const Schedule& s, double part_of_heads = 1) {
  const double chunks = part_of_heads * s.H_v * s.total;
  const double bytes = 2 * key_bytes(shape) + kMatrixBytes + (shape.low_level ? kABytes : 0);
  return kStart +
         overlapped(cycles_us(shape, wider(shape, chunks / s.sms * kMatrices)), bytes_us(shape, chunks * bytes));
}

double chunk_forward_us(const ForwardShape& shape, int64_t value_tile, const Schedule& s) {
  const double chunk = value_tile == kNarrowTile ? kChunkNarrow : kChunkWide;
  const double bytes = s.H_v * s.total * (2 * key_bytes(shape) + 2 * value_bytes(shape) + kMatrixBytes) +
                       s.N * s.H_v * state_bytes(shape);
  const double work = kStart + several_us(s) + cycles_us(shape, wider(shape, s.busiest * chunk));
  return cycles_us(shape, (s.waves - 1) * kNext) + overlapped(work, bytes_us(shape, bytes));
}

// Segments of all heads, without the first segment of each sequence.
double later_segments(const Schedule& s) { return (s.segments - s.N) * s.H_v; }

// Steps of segment_scan on the busiest SM, because a sequence's segments come one after the other.
double scan_steps(const Schedule& s, double directions) {
  const double sequences = directions * s.scan_parts * (1 + (s.N - 1) * (s.parts_of_rest > 1)) * s.H_v / s.sms;
  return std::max(1.0, sequences) * (s.parts - 1);
}

// compose_maps takes the same steps, with V + K rows of the map of one sequence.
double composition_us(const ForwardShape& shape, const Schedule& s) {
  const double ctas = static_cast<double>(value_tiles(shape.V + shape.K, kScanColumns)) * s.H_v;
  return shape.over_ranks ? scan_us(shape, kScan) * std::max(1.0, ctas / s.sms) * s.parts : 0;
}

// segment_maps and segment_scan.
double maps_us(const ForwardShape& shape, const Schedule& s) {
  const double later = later_segments(s);
  const double maps = (s.key_tiles + s.map_tiles) * later;  // M and Z by tiles
  const double chunk = kMapChunk * std::max(1.0, kExact * maps / s.sms);
  return kStart + cycles_us(shape, wider(shape, s.length * chunk)) + kMap * maps +
         scan_us(shape, kScan) * scan_steps(s, 1);
}

// segment_maps and segment_scan, or with directions = 2 the backward's, where no sequence is cut.
double idle_us(const Schedule& s, int64_t segment_chunks, double directions = 1) {
  const double slots = s.N + s.total / static_cast<double>(segment_chunks);
  return directions * kIdle + kSlotCta * s.H_v * (s.key_tiles + directions * s.map_tiles) * slots;
}

// backward_maps, and segment_scan in both directions at the same time.
double backward_maps_us(const ForwardShape& shape, const Schedule& s) {
  const double later = later_segments(s);
  const double exact = kExact * later * ((s.key_tiles + s.map_tiles) * kMapChunk + s.map_tiles * kReverseMapChunk);
  const double chunk = std::max(kReverseMapChunk, exact / s.sms);
  const double maps = (s.key_tiles + (1 + kReverseMapChunk / kMapChunk) * s.map_tiles) * later;
  return kStart + cycles_us(shape, wider(shape, s.length * chunk)) + kMap * maps +
         2 * scan_us(shape, kScan) * scan_steps(s, 2);
}

// Writes h and V_new, and reads k, v, L and the gates.
double replay_states_us(const ForwardShape& shape, const Schedule& s) {
  const double h = 2.0 * static_cast<double>(shape.K * shape.V);
  const double bytes = h + 2 * value_bytes(shape) + key_bytes(shape) + kMatrixBytes;
  const double work = cycles_us(shape, wider(shape, s.busiest * kChunkWide) + (s.waves - 1) * kNext);
  return kStart + overlapped(work, bytes_us(shape, s.H_v * s.total * bytes));
}

// Reads what the replay wrote, q, k, dO and the matrices; writes dQ, dK and dV.
double chunk_backward_us(const ForwardShape& shape, const Schedule& s) {
  const double h = 2.0 * static_cast<double>(shape.K * shape.V);
  const double bytes = h + 3 * value_bytes(shape) + 4 * key_bytes(shape) + kMatrixBytes;
  const double work = cycles_us(shape, s.busiest * kChunkReverse);
  return overlapped(work, bytes_us(shape, s.H_v * s.total * bytes));
}

// With K > 128 the same in two kernels. The first writes dS' and U, and the second reads them.
double replay_gradients_us(const ForwardShape& shape, const Schedule& s) {
  const double dh = 2.0 * static_cast<double>(shape.K * shape.V);
  const double bytes = dh + 2 * value_bytes(shape) + 2 * key_bytes(shape) + kMatrixBytes;
  const double work = cycles_us(shape, s.busiest * kWider * kChunkReverse / 2 + s.waves * kNext);
  return overlapped(work, bytes_us(shape, s.H_v * s.total * bytes));
}

double token_gradients_us(const ForwardShape& shape, const Schedule& s) {
  const double h = 2.0 * static_cast<double>(shape.K * shape.V);
  const double bytes = 2 * h + 5 * value_bytes(shape) + 4 * key_bytes(shape);
  const double parts = s.H_v * s.total * static_cast<double>(key_parts(shape.K));
  const double work = cycles_us(shape, parts / s.sms * kWider * kChunkReverse / 2);
  return overlapped(work, bytes_us(shape, s.H_v * s.total * bytes));
}

// The time of the l2norm's kernels, the same in all modes. They read and write q and k, and later dq and dk.
double around_us(const BackwardShape& shape) {
  const auto tokens = static_cast<double>(shape.B * shape.T);
  const double row = static_cast<double>(shape.K) * tokens;
  double us = 0;
  if (shape.use_qk_l2norm && !normalizes_inside(shape)) {
    us += kStart + bytes_us(shape.forward(), 2 * row * static_cast<double>(shape.H_k) * (4 + 6));
  }
  return us;
}

// The portable kernels: the matrices; the maps, if the batch is cut; the recurrence in each of `directions`.
double portable_us(const ForwardShape& shape, const Lengths& chunks, int64_t segment_chunks, bool cut,
                   double directions) {
  const Schedule s = schedule(shape, chunks, cut ? segment_chunks : 0, kNarrowTile);
  const auto recurrence_us = [&](double busiest) {
    return kStart + cycles_us(shape, wider(shape, std::max(kPortableChunk * s.length, kPortableBusy * busiest)));
  };
  const auto key_tiles = static_cast<double>(value_tiles(instance_K(shape.K), kNarrowTile));
  double maps = 0;
  if (cut) {
    const auto maps_us = [&](double tiles) {
      return recurrence_us(s.length * kExact * later_segments(s) * tiles / s.sms);
    };
    maps = maps_us(key_tiles + s.tiles) + (directions - 1) * maps_us(s.tiles) +
           directions * scan_us(shape, kScan) * scan_steps(s, 1);
  } else if (segment_chunks > 0) {
    maps = idle_us(s, segment_chunks, directions);
  }
  return chunk_matrices_us(shape, s) + maps + composition_us(shape, s) + directions * recurrence_us(s.busiest);
}

// A path's time on a batch that it treats as long, or as another.
double predict_batch(const ForwardShape& shape, const OneKernel&, const Lengths& chunks, bool) {
  return fused_forward_us(shape, schedule(shape, chunks, 0));
}

double predict_batch(const ForwardShape& shape, const OneKernelOverSegments& path, const Lengths& chunks, bool cut) {
  const Schedule s = schedule(shape, chunks, cut ? path.segment_chunks : 0);
  return kSegmentMemory +
         (cut ? chunk_matrices_us(shape, s, kExact) + maps_us(shape, s) + fused_forward_us(shape, s, true)
              : fused_forward_us(shape, s) + idle_us(s, path.segment_chunks));
}

// The maps of a batch; `directions`: 1 in the forward, 2 in the backward.
double with_maps_us(const ForwardShape& shape, const Schedule& s, int64_t segment_chunks, bool cut, double directions) {
  const double maps = segment_chunks == 0 ? 0
                      : !cut              ? idle_us(s, segment_chunks, directions)
                      : directions == 1   ? maps_us(shape, s)
                                          : backward_maps_us(shape, s);
  return maps + composition_us(shape, s);
}

double predict_batch(const ForwardShape& shape, const TwoKernels& path, const Lengths& chunks, bool is_long) {
  if (shape.portable) {
    return portable_us(shape, chunks, path.segment_chunks, is_long, 1);
  }
  const int64_t tile = is_long ? path.long_tile : path.value_tile;
  const Schedule s = schedule(shape, chunks, is_long ? path.segment_chunks : 0, tile);
  return chunk_matrices_us(shape, s) + chunk_forward_us(shape, tile, s) +
         with_maps_us(shape, s, path.segment_chunks, is_long, 1) + (has_two_tiles(path) ? kIdle : 0);
}

double predict_batch(const ForwardShape& shape, const BackwardPath& path, const Lengths& chunks, bool cut) {
  if (shape.portable) {
    const Schedule whole = schedule(shape, chunks, 0);
    const double token_gradients = 8 * kPortableBusy * whole.H_v * whole.total / whole.sms;  // as measured
    return kStart + cycles_us(shape, wider(shape, token_gradients)) +
           portable_us(shape, chunks, path.segment_chunks, cut, 2);
  }
  const Schedule s = schedule(shape, chunks, cut ? path.segment_chunks : 0);
  const double gradients = has_wide_keys(shape.K)
                               ? 2 * kStart + replay_gradients_us(shape, s) + token_gradients_us(shape, s)
                               : chunk_backward_us(shape, s);
  return chunk_matrices_us(shape, s) + replay_states_us(shape, s) + gradients +
         with_maps_us(shape, s, path.segment_chunks, cut, 2);
}

// The time of a batch with this longest sequence. It is a long one if that is faster, or if the device has to cut it.
template <typename Path>
double predict_longest(const ForwardShape& shape, const Path& path, bool always_cut, double longest) {
  const Lengths chunks = lengths(shape, longest);
  const int64_t segment_chunks = segment_chunks_of(path);
  if (segment_chunks == 0 || chunks.longest <= static_cast<double>(segment_chunks)) {
    return predict_batch(shape, path, chunks, false);
  }
  const double as_long = predict_batch(shape, path, chunks, true);
  return always_cut || !device_knows_more(shape) ? as_long
                                                 : std::min(as_long, predict_batch(shape, path, chunks, false));
}

template <typename Path>
double expected(const ForwardShape& shape, const Path& path, bool always_cut) {
  const auto chunks = static_cast<double>(longest_chunks(shape));
  if (!device_knows_more(shape)) {
    return predict_longest(shape, path, always_cut, chunks);
  }
  // No sequence has more chunks than all tokens fill, which are fewer than N where sequences are shorter than a chunk.
  const auto all_tokens = static_cast<double>(ceil_div(shape.B * shape.T, kChunk));
  const double half = std::min(std::max(7.0 / 4, static_cast<double>(shape.N) / 2) * chunks, all_tokens);
  // Of two tiles one is for equal sequences.
  const auto time = [&](double longest, bool is_long) {
    return has_two_tiles(path) ? predict_batch(shape, path, lengths(shape, longest), is_long)
                               : predict_longest(shape, path, always_cut, longest);
  };
  return (1 - kSkewed) * time(chunks, false) + kSkewed * time(half, true);
}

template <typename Path>
int64_t most_chunks_of_others(const ForwardShape& shape, const Path& path, bool always_cut) {
  const int64_t average = average_chunks(shape), segment_chunks = segment_chunks_of(path);
  if ((segment_chunks == 0 && !has_two_tiles(path)) || always_cut || !device_knows_more(shape)) {
    return 0;
  }
  int64_t others = segment_chunks > 0 ? segment_chunks : average, is_long = std::max(average * shape.N, others);
  while (is_long - others > 1) {
    const int64_t longest = others + (is_long - others) / 2;
    const Lengths chunks = lengths(shape, static_cast<double>(longest));
    const bool pays = predict_batch(shape, path, chunks, true) < predict_batch(shape, path, chunks, false);
    (pays ? is_long : others) = longest;
  }
  return others;
}

}  // namespace

double predict(const ForwardShape& shape, const ForwardPath& path, bool always_cut) {
  return std::visit([&](const auto& branch) { return expected(shape, branch, always_cut); }, path);
}
double predict(const BackwardShape& shape, const BackwardPath& path, bool always_cut) {
  return around_us(shape) + expected(shape.forward(), path, always_cut);
}

int64_t cut_above(const ForwardShape& shape, const ForwardPath& path, bool always_cut) {
  return std::visit([&](const auto& branch) { return most_chunks_of_others(shape, branch, always_cut); }, path);
}
int64_t cut_above(const BackwardShape& shape, const BackwardPath& path, bool always_cut) {
  return most_chunks_of_others(shape.forward(), path, always_cut);
}

}  // namespace flash_qla
