// Numbers of chunks, computed here alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout.h"

namespace flash_qla {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The last chunk of a sequence may be shorter than the others. With run > 0 a new chunk begins after every `run`
// tokens, so the last chunk of a run may be shorter, too. run = 0: the sequence is one run.
inline int64_t chunk_count(int64_t tokens, int64_t run = 0) {
  return run == 0 ? ceil_div(tokens, kChunk) : tokens / run * chunk_count(run) + chunk_count(tokens % run);
}
inline int64_t chunk_tokens(int64_t begin, int64_t end) { return std::min<int64_t>(kChunk, end - begin); }

// The most tokens after padding: each of N sequences pads its last chunk by at most kChunk - 1 tokens.
inline int64_t most_padded_tokens(int64_t T, int64_t N) { return T + (kChunk - 1) * N; }

// Chunks of B rows of T tokens. A row is a sequence. If varlen, the one row holds N sequences of any lengths, and the
// number is an upper bound.
inline int64_t most_chunks(int64_t B, int64_t T, int64_t N, bool varlen, int64_t run = 0) {
  const int64_t padding = run == 0 ? 0 : T / run * (kChunk * chunk_count(run) - run);  // of whole runs
  return varlen ? (most_padded_tokens(T, N) + padding) / kChunk : B * chunk_count(T, run);
}

}  // namespace flash_qla
