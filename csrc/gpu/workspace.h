// The memory that lives only during a call: one allocation. The sizes of its parts follow from shapes alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "call.h"
#include "checks.h"
#include "gpu/dispatch.h"
#include "gpu/head_dims.h"
#include "layout.h"
#include "tensors.h"

namespace flash_qla {

// Reserve regions, then provide the memory. Offsets are multiples of 256 bytes (TMA needs 16).
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

  // Takes the storage that begin allocated, or allocates.
  void provide(const Call& call) {
    const std::optional<Tensor>& begun = call.workspace;
    check(!begun || begun->numel() == bytes_, call.op, "workspace has ", begun ? begun->numel() : 0,
          " bytes, expected the ", bytes_, " that begin returns for a call of these shapes");
    if (begun) {
      storage_ = *begun;
    } else if (bytes_ > 0) {
      storage_ = new_empty(call.op, call.q, {bytes_}, ScalarType::Byte);
    }
    base_ = storage_ ? static_cast<char*>(storage_->mutable_data_ptr()) : nullptr;
  }

  const Tensor& storage() const { return *storage_; }
  int64_t bytes() const { return bytes_; }

  template <typename T>
  T* operator[](Region<T> region) const {
    return reinterpret_cast<T*>(base_ + region.offset);
  }

 private:
  int64_t bytes_ = 0;
  std::optional<Tensor> storage_;
  char* base_ = nullptr;
};

// Block row j of the first chunk and head, of matrices [chunk_slots, H_v, 2, kTriangle].
inline uint16_t* block_rows(uint16_t* matrices, int64_t j) {
  return matrices + kBlock * (kChunk * j - kBlock * j * (j - 1) / 2);
}

inline int64_t map_size(int64_t K) { return instance_K(K) * instance_K(K); }
// Elements of the states of all heads, in tensors that only kernels read: keys have the channels of the instance, and
// value rows are padded to whole tiles.
inline int64_t state_rows(int64_t H_v, int64_t K, int64_t V) { return H_v * value_rows(V) * instance_K(K); }

// K below is the instance's, and `rows` are value_rows.

// The parts of both directions. If only the fused kernel runs, there are neither gates nor matrices.
struct PassWorkspace : Workspace {
  // `after_maps` elements take the place of the maps, once they have been used.
  PassWorkspace(const Shape& shape, const Dispatch& d, bool has_checkpoints, bool fused, int64_t after_maps = 0)
      : sequences(reserve<int32_t>(d.planned ? shape.N * SequenceColumn::kCount : 0)),
        chunks(reserve<int32_t>(d.planned ? d.chunk_slots * ChunkColumn::kCount : 0)),
        segments(reserve<int32_t>(d.planned ? d.segments * SegmentColumn::kCount : 0)),
        checkpoints(reserve<int32_t>(has_checkpoints ? d.chunk_slots : 0)),
        is_long(reserve<int32_t>(d.planned ? 1 : 0)),
        drawn(reserve<int32_t>(d.planned ? 1 : 0)),
        gates(reserve<float>(fused ? 0 : d.chunk_slots * shape.H_v * ForwardGate::kCount * kChunk)),
        matrices(reserve<uint16_t>(fused ? 0 : 2 * d.chunk_slots * shape.H_v * kTriangle)),
        states(reserve<float>(d.map_slots() * state_rows(shape.H_v, shape.K, shape.V))),
        maps(
            reserve<uint16_t>(std::max(d.has_maps() ? 2 * d.segments * shape.H_v * map_size(shape.K) : 0, after_maps))),
        skips(reserve<int32_t>(d.has_maps() ? d.segments * shape.H_v : 0)),
        map_segments(reserve<int32_t>(d.over_ranks && d.has_maps() ? d.segments * SegmentColumn::kCount : 0)) {}

  const Region<int32_t> sequences, chunks, segments, checkpoints, is_long, drawn;  // the plan's tables
  const Region<float> gates;        // [chunk_slots, H_v, ForwardGate::kCount, kChunk]
  const Region<uint16_t> matrices;  // [chunk_slots, H_v, 2, kTriangle]
  // Only with maps:
  const Region<float> states;   // [map_slots, H_v, rows, K]: Z, then the state at the segment's start
  const Region<uint16_t> maps;  // [segments, H_v, 2, K, K]: M in two parts
  const Region<int32_t> skips;  // [segments, H_v]: whether M is left out
  // Only with maps, over ranks:
  const Region<int32_t> map_segments;  // segments, without the ends whose maps are requested
};

struct ForwardWorkspace : PassWorkspace {
  ForwardWorkspace(const ForwardShape& shape, const ForwardDispatch& d)
      : PassWorkspace(shape, d, shape.checkpoint_every > 0, d.is_only_fused()),
        memory(reserve<int32_t>(d.fuses_segments() ? d.segments * shape.H_v : 0)),
        needs_maps(reserve<int32_t>(d.fuses_segments() ? shape.N * shape.H_v : 0)) {}

  // Only if fused_forward takes segments, the tables of segment_memory:
  const Region<int32_t> memory;      // [segments, H_v]
  const Region<int32_t> needs_maps;  // [N, H_v]
};

struct BackwardWorkspace : PassWorkspace {
  BackwardWorkspace(const BackwardShape& shape, const BackwardDispatch& d)
      : PassWorkspace(shape, d, false, false, d.over_ranks ? 0 : h_elements(shape, d)),
        backward_gates(reserve<float>(d.chunk_slots * shape.H_v * gate_rows(d) * kChunk)),
        has_v_new(d.over_ranks || d.by_tokens),
        v_new(reserve<uint16_t>(has_v_new ? value_elements(shape) : 0)),
        h(d.over_ranks ? reserve<uint16_t>(h_elements(shape, d)) : maps),
        dh(reserve<uint16_t>(d.by_tokens ? d.chunk_slots * state_rows(shape.H_v, shape.K, shape.V) : 0)),
        u(reserve<uint16_t>(d.by_tokens ? value_elements(shape) : 0)),
        semaphores(reserve<int32_t>(d.chunk_slots * key_parts(shape.K) * shape.H_k)),
        db_parts(reserve<float>(d.gate_gradients ? d.gradient_parts * shape.B * shape.T * shape.H_v : 0)),
        dg_parts(reserve<float>(d.gate_gradients ? d.gradient_parts * shape.B * shape.T * shape.H_v : 0)),
        gate_sums(reserve<float>(d.gate_gradients ? d.chunk_slots * shape.H_v * 2 : 0)),
        counters(reserve<int32_t>(d.gate_gradients ? ceil_div(shape.H_v, kGateHeads) : 0)),
        normalized(reserve<uint16_t>(d.l2norm ? 2 * shape.B * shape.T * shape.H_k * shape.K : 0)),
        rstd(reserve<float>(d.l2norm ? 2 * shape.B * shape.T * shape.H_k : 0)),
        grad_states(reserve<float>(d.map_slots() * state_rows(shape.H_v, shape.K, shape.V))),
        reverse_skips(reserve<int32_t>(d.has_maps() ? d.segments * shape.H_v : 0)) {}

  const Region<float> backward_gates;  // [chunk_slots, H_v, gate_rows, kChunk]
  // Whether V_new is here. Elsewhere it is in the memory of dv, but the replay over ranks has no outputs, and by tokens
  // one CTA would write dv while another one reads V_new.
  const bool has_v_new;
  const Region<uint16_t> v_new;  // [B * T, H_v, V]
  const Region<uint16_t> h;      // [chunk_slots, H_v, rows, K]: a chunk's first state
  // Only by tokens:
  const Region<uint16_t> dh;  // [chunk_slots, H_v, rows, K]: the gradient of the state after a chunk
  const Region<uint16_t> u;   // [B * T, H_v, V]
  // With all keys:
  const Region<int32_t> semaphores;  // [chunk_slots * key_parts, H_k]: see gradients/semaphores.cuh
  // Only with gate_gradients:
  const Region<float> db_parts, dg_parts;  // [gradient_parts, B * T, H_v]
  const Region<float> gate_sums;           // [chunk_slots, H_v, 2]: a chunk's dA_log and ddt_bias
  const Region<int32_t> counters;          // [H_v / kGateHeads]
  // Only with the kernels of the l2norm:
  const Region<uint16_t> normalized;  // [2, B * T, H_k, K]: queries and keys, divided by their norms
  const Region<float> rstd;           // [2, B * T, H_k]: 1 / the norms
  // Only with maps:
  const Region<float> grad_states;      // [map_slots, H_v, rows, K]: dZ of the next segment, then dS' after this one
  const Region<int32_t> reverse_skips;  // [segments, H_v]: whether M is left out for gradients

 private:
  static int64_t value_elements(const Shape& shape) { return shape.B * shape.T * shape.H_v * shape.V; }
  static int64_t h_elements(const Shape& shape, const Dispatch& d) {
    return d.chunk_slots * state_rows(shape.H_v, shape.K, shape.V);
  }
  static int64_t gate_rows(const BackwardDispatch& d) {
    return d.normalizes_inside ? int64_t{NormalizedGate::kCount} : int64_t{BackwardGate::kCount};
  }
};

}  // namespace flash_qla
