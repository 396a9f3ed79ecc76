// Sizes of a call on the GPU, from shapes alone: nothing here depends on the contents of cu_seqlens.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>

#include "forward.h"
#include "gpu/dispatch.h"

namespace flash_qla {

// The tables' and workspaces' layout; kernels_tl/common.py has the same constants.
inline constexpr int64_t kHeadDim = 128;
inline constexpr int64_t kSequenceColumns = 4;
inline constexpr int64_t kChunkColumns = 3;
inline constexpr int64_t kGateRows = 5;
inline constexpr int64_t kForwardGateRows = 5;
inline constexpr int64_t kSegmentColumns = 5;
inline constexpr int64_t kFirst = 1, kLast = 2;  // flags of a segment
inline constexpr int64_t kPassedParts = 8;       // of <S, dS'>, which chunk_states_bwd adds up by warps

inline constexpr int64_t kSquare = kHeadDim * kHeadDim;  // elements of a state
inline constexpr int64_t kTile = kHeadDim * kChunk;      // of a chunk of one head
inline constexpr int64_t kMatrix = kChunk * kChunk;      // of a chunk's A * D in the backward
inline constexpr int64_t kBlock = 16;                    // rows and columns of the forward's blocks of such a matrix,
inline constexpr int64_t kTriangle = 10 * kBlock * kBlock;  // of which it keeps the ten that are not zero

inline int64_t chunk_slots(int64_t B, int64_t T, int64_t N, bool varlen) {
  return varlen ? (T + (kChunk - 1) * (N + 1)) / kChunk : B * ((T + kChunk - 1) / kChunk);
}

struct Plan {
  int64_t rows;   // B * T
  int64_t slots;  // chunks; when varlen an upper bound: each sequence, and the padding, may end in a partial chunk

  explicit Plan(const Problem& p) : rows(p.B * p.T), slots(chunk_slots(p.B, p.T, p.N, p.varlen)) {}
};

// One allocation for everything that lives only during a call. Offsets are multiples of 256 bytes (TMA needs 16).
class Workspace {
 public:
  template <typename T>
  struct Region {
    int64_t offset;
  };

  template <typename T>
  Region<T> reserve(int64_t elements) {
    const Region<T> region{bytes_};
    bytes_ += (elements * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return region;
  }

  void allocate(const Tensor& like) {
    storage_ = new_empty(like, {bytes_}, ScalarType::Byte);
    base_ = static_cast<char*>(storage_->mutable_data_ptr());
  }

  int64_t bytes() const { return bytes_; }

  template <typename T>
  void* operator[](Region<T> region) const {
    return base_ + region.offset;
  }

 private:
  int64_t bytes_ = 0;
  std::optional<Tensor> storage_;
  char* base_ = nullptr;
};

// The forward's.
struct ForwardWorkspace : Workspace {
  ForwardWorkspace(const ForwardShape& shape, const ForwardDispatch& dispatch)
      : sequences(reserve<int32_t>(shape.N * kSequenceColumns)),
        chunks(reserve<int32_t>(dispatch.slots * kChunkColumns)),
        segments(reserve<int32_t>(dispatch.segments * kSegmentColumns)),
        gates(reserve<float>(dispatch.fused ? 0 : dispatch.slots * shape.H_v * kForwardGateRows * kChunk)),
        matrices(reserve<uint16_t>(dispatch.fused ? 0 : 2 * dispatch.slots * shape.H_v * kTriangle)),
        states(reserve<float>(dispatch.uses_cp() ? dispatch.segments * shape.H_v * kSquare : 0)),
        maps(reserve<uint16_t>(dispatch.uses_cp() ? 2 * dispatch.segments * shape.H_v * kSquare : 0)),
        skips(reserve<int32_t>(dispatch.uses_cp() ? dispatch.segments * shape.H_v : 0)) {}

  const Region<int32_t> sequences, chunks, segments;  // chunk_plan's tables
  const Region<float> gates;                          // [slots, H_v, kForwardGateRows, kChunk], unless fused
  const Region<uint16_t> matrices;                    // [slots, H_v, 2, kTriangle], unless fused
  const Region<float> states;                         // [segments, H_v, kHeadDim, kHeadDim]
  const Region<uint16_t> maps;                        // [segments, H_v, 2, kHeadDim, kHeadDim]
  const Region<int32_t> skips;                        // [segments, H_v]
};

}  // namespace flash_qla
