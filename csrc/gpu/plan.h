// The plan of a call: tables of its sequences, chunks and segments. chunk_plan writes them on the device. The host
// never reads cu_seqlens, so a call does not synchronize and can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "call.h"
#include "gpu/states.h"

namespace flash_qla {

// Rows of the tables of chunks and of segments. Without cu_seqlens these are the numbers of chunks and segments. With
// cu_seqlens they are upper bounds from T and N: each sequence, and the padding after the last, may end in a partial
// chunk, and each sequence in a partial segment. Rows that are left over are marked unused.
int64_t chunk_slots(int64_t B, int64_t T, int64_t N, bool varlen, int64_t run = 0);           // run: see chunks.h
int64_t segment_slots(int64_t B, int64_t T, int64_t N, bool varlen, int64_t segment_chunks);  // 0 chunks: no segments

// call.map_sequences, padded with -1.
std::array<int64_t, 2> mapped_sequences(const Call& call);

// Launches chunk_plan. It writes `plan`, over ranks the second table of segments, and zeros in needs_maps.
void make_plan(const Call& call, const kernels::Sizes& sizes, const States& states, const kernels::Cuts& cuts,
               const kernels::Plan& plan, const kernels::Memory& memory, cudaStream_t stream);

}  // namespace flash_qla
