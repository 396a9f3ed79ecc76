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

struct Plan {
  void* sequences;  // [N, SequenceColumn::kCount] int32
  void* chunks;     // [chunk_slots, ChunkColumn::kCount] int32
  int64_t chunk_slots;

  void* segments = nullptr;  // [segment_slots, SegmentColumn::kCount] int32
  int64_t segment_slots = 0;
  int64_t segment_chunks = 0;  // chunks a segment, 0: a segment is a sequence
  int64_t cut_above = 0;       // nothing is cut where no sequence has more chunks than that

  void* map_segments = nullptr;  // likewise, without `dropped`, a SegmentFlag, of call.map_sequences
  int64_t dropped = 0;

  void* checkpoints = nullptr;  // [chunk_slots] int32, where there are any: where the state behind a chunk goes
};

// call.map_sequences, -1 where there are fewer.
std::array<int64_t, 2> mapped_sequences(const Call& call);

void make_plan(const Call& call, const States& states, const Plan& plan, cudaStream_t stream);

}  // namespace flash_qla
