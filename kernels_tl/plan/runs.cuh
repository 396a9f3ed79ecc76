// A new chunk begins after each run of `run` tokens of a sequence, so that a checkpoint is at the end of a chunk. The
// last chunk of a run may have fewer than kChunk tokens. run = 0: a sequence is one run. csrc/chunks.h counts the same
// chunks.
#pragma once

#include "plan/plan.cuh"

namespace flash_qla::device {

__device__ __forceinline__ int chunks_in_runs(int length, int run) {
  return run == 0 ? chunks_of(length) : length / run * chunks_of(run) + chunks_of(length % run);
}

// Tokens of the sequence before a chunk, and tokens of the chunk.
__device__ __forceinline__ int tokens_before(int chunk, int run) {
  const int chunks = chunks_of(run);
  return run == 0 ? chunk * kChunk : chunk / chunks * run + chunk % chunks * kChunk;
}
__device__ __forceinline__ int tokens_of(int chunk, int length, int run) {
  const int begin = tokens_before(chunk, run), left = run == 0 ? kChunk : run - begin % run;
  return min(min(left, kChunk), length - begin);
}

__device__ __forceinline__ void put_chunk_of_runs(int* row, int begin, int length, int chunk, int sequence, int run) {
  row[ChunkColumn::kRow] = begin + tokens_before(chunk, run);
  row[ChunkColumn::kLength] = tokens_of(chunk, length, run);
  row[ChunkColumn::kSequence] = sequence;
}

// checkpoint_slot of a sequence whose runs are filled up to whole chunks, because checkpoint_slot takes only chunks of
// kChunk tokens.
__device__ __forceinline__ int checkpoint_slot_of_runs(const Table& indices, int64_t null_index, int64_t slots, int run,
                                                       int length, int chunk, int n, int first) {
  const int filled = chunks_of(run) * kChunk;
  return checkpoint_slot(indices, null_index, slots, filled, length / run * filled, chunk, n, first);
}

}  // namespace flash_qla::device
