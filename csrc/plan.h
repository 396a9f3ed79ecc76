// Sizes of a call on the GPU, from shapes alone: nothing here depends on the contents of cu_seqlens.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <optional>

#include "forward.h"

namespace flash_qla {

// The tables' and workspaces' layout; kernels_tl/common.py has the same constants.
inline constexpr int64_t kHeadDim = 128;
inline constexpr int64_t kTableColumns = 3;
inline constexpr int64_t kGateRows = 5;
inline constexpr int64_t kPassedParts = 8;  // of <S, dS'>, which chunk_states_bwd adds up by warps

inline constexpr int64_t kSquare = kHeadDim * kHeadDim;  // elements of a state
inline constexpr int64_t kTile = kHeadDim * kChunk;      // of a chunk of one head
inline constexpr int64_t kMatrix = kChunk * kChunk;      // of a chunk's matrices: A * D, the attention

struct Plan {
  int64_t rows;   // B * T
  int64_t slots;  // chunks; when varlen an upper bound: each sequence, and the padding, may end in a partial chunk

  explicit Plan(const Problem& p)
      : rows(p.B * p.T), slots(p.varlen ? (p.T + (kChunk - 1) * (p.N + 1)) / kChunk : p.NT) {}
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
    storage_ = torch::stable::new_empty(like, {bytes_}, ScalarType::Byte);
    base_ = static_cast<char*>(storage_->mutable_data_ptr());
  }

  template <typename T>
  void* operator[](Region<T> region) const {
    return base_ + region.offset;
  }

 private:
  int64_t bytes_ = 0;
  std::optional<Tensor> storage_;
  char* base_ = nullptr;
};

}  // namespace flash_qla
