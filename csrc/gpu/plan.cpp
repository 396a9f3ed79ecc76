#include "gpu/plan.h"

#include <algorithm>

#include "chunks.h"
#include "gpu/launch.h"
#include "kernels.h"

namespace flash_qla {

int64_t chunk_slots(int64_t B, int64_t T, int64_t N, bool varlen) {
  return varlen ? (T + (kChunk - 1) * (N + 1)) / kChunk : B * chunk_count(T);
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

void make_plan(const Call& call, const States& states, const Plan& plan, cudaStream_t stream) {
  const auto [mapped_0, mapped_1] = mapped_sequences(call);
  kernels::chunk_plan({.offsets = data(call.cu_seqlens),
                       .sequences = plan.sequences,
                       .chunks = plan.chunks,
                       .segments = plan.segments,
                       .map_segments = plan.map_segments,
                       .tokens = call.tokens(),
                       .has_offsets = call.varlen,
                       .uniform_length = call.T,
                       .segment_chunks = plan.segment_chunks,
                       .cut_above = plan.cut_above,
                       .mapped_0 = mapped_0,
                       .mapped_1 = mapped_1,
                       .dropped = plan.dropped,
                       .state_indices = states.slot_indices.numbers,
                       .has_state = states.has_state,
                       .checkpoint_indices = states.kept_indices.numbers,
                       .checkpoints = plan.checkpoints,
                       .on_pool = states.on_pool,
                       .first_states = states.first_states,
                       .has_final = states.has_final,
                       .index_kind = states.slot_indices.kind,
                       .index_stride = states.slot_indices.row_stride,
                       .null_index = states.null_index,
                       .slots = states.slots,
                       .has_state_stride = states.has_state_stride,
                       .checkpoint_every = states.checkpoint_every,
                       .checkpoint_index_kind = states.kept_indices.kind,
                       .checkpoint_stride = states.kept_indices.row_stride,
                       .checkpoint_columns = states.kept_indices.columns,
                       .checkpoint_states = states.kept_slots,
                       .offsets_size = call.N + 1,
                       .N = call.N,
                       .chunk_slots = plan.chunk_slots,
                       .segment_slots = plan.segment_slots,
                       .map_slots = plan.map_segments == nullptr ? 0 : plan.segment_slots},
                      {.offset_dtype = call.wide_offsets ? "int64" : "int32"}, stream);
}

}  // namespace flash_qla
