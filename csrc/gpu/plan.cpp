#include "gpu/plan.h"

#include <algorithm>

#include "chunks.h"
#include "gpu/arguments.h"
#include "kernels.h"

namespace flash_qla {

int64_t chunk_slots(int64_t B, int64_t T, int64_t N, bool varlen, int64_t run) {
  return most_chunks(B, T, N + 1, varlen, run);  // the padding after the last sequence counts as a sequence
}

std::array<int64_t, 2> mapped_sequences(const Call& call) {
  std::array<int64_t, 2> mapped = {-1, -1};
  std::ranges::copy(call.map_sequences, mapped.begin());
  return mapped;
}

int64_t segment_slots(int64_t B, int64_t T, int64_t N, bool varlen, int64_t segment_chunks) {
  if (segment_chunks == 0) {
    return N;
  }
  return varlen ? N + chunk_slots(B, T, N, varlen) / segment_chunks
                : B * std::max<int64_t>(ceil_div(chunk_count(T), segment_chunks), 1);
}

void make_plan(const Call& call, const kernels::Sizes& sizes, const States& states, const kernels::Cuts& cuts,
               const kernels::Plan& plan, const kernels::Memory& memory, cudaStream_t stream) {
  kernels::chunk_plan({.sizes = sizes,
                       .sequences = sequences_of(call),
                       .slots = states.slots,
                       .presence = states.presence,
                       .to = states.kept_in,
                       .cuts = cuts,
                       .plan = plan,
                       .memory = memory,
                       .checkpoint_every = states.kept.checkpoint_every},
                      {}, stream);
}

}  // namespace flash_qla
