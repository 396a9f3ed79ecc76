// The plan of a call: tables of its sequences, chunks and segments, which chunk_plan makes on the device. Nothing on
// the host depends on the contents of cu_seqlens, so a call never synchronizes and can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "call.h"
#include "gpu/states.h"

namespace flash_qla {

// Rows of the tables of chunks and of segments. Without cu_seqlens they are numbers of chunks and of segments. With
// them they are upper bounds, from T and N alone: each sequence, and behind them the padding, may end in a partial
// chunk, and each sequence in a partial segment. What is left over is marked as unused.
int64_t chunk_slots(int64_t B, int64_t T, int64_t N, bool varlen);
int64_t segment_slots(int64_t B, int64_t T, int64_t N, bool varlen, int64_t segment_chunks);  // 0 chunks: no cuts

// call.map_sequences, -1 where there are fewer.
std::array<int64_t, 2> mapped_sequences(const Call& call);

// Launches chunk_plan, which writes `plan` and, if there is one, the second table of segments.
void make_plan(const Call& call, const kernels::Sizes& sizes, const States& states, const kernels::Cuts& cuts,
               const kernels::Plan& plan, cudaStream_t stream);

}  // namespace flash_qla
