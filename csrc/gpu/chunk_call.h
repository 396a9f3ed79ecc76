// The first half of the backward on the GPU: the tensors as kernels take them, the tables and gates of the chunks, and
// the pass over the states; and what the forward needs of it, the checks and the stream.
//
// Everything that depends on the contents of cu_seqlens is decided on the device, so a call never synchronizes and can
// be captured in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include "forward.h"
#include "gpu/plan.h"

namespace flash_qla {

// What only a GPU cannot do: head dims, dtypes, sizes, architecture. Throws, naming the argument.
void check_supported_on_gpu(const Problem& problem);

// The tensor or, where it does not start at a multiple of 16 bytes, which TMA reads from, a copy.
Tensor aligned(const Tensor& tensor);

// The current stream of the tensor's device.
cudaStream_t current_stream(const Tensor& tensor);

inline const void* data(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
inline void* data(Tensor& tensor, bool wanted) { return wanted ? tensor.mutable_data_ptr() : nullptr; }

class ChunkCall {
 public:
  // args are canonical. The current device is theirs. keep_rstd: the l2norm's factors are wanted.
  ChunkCall(const Problem& problem, const ForwardArgs& args, bool keep_rstd);

  // No sequence has a token.
  bool is_empty() const { return plan.rows == 0 || p.N == 0; }

  // The launches, in their order.
  void run_plan() const;
  void run_gates() const;
  void run_states(void* h) const;

  const Problem& p;
  const ForwardArgs& args;
  const Plan plan;
  const cudaStream_t stream;
  const char* const dtype;  // of the kernel instances
  const int64_t group;      // value heads a query/key head

  Tensor q, k, v;                        // aligned; q and k normalized where that was asked for
  std::optional<Tensor> q_rstd, k_rstd;  // [B, T, H_k] fp32

  // Callers reserve what else they need, then allocate.
  Workspace workspace;
  const Workspace::Region<int32_t> sequences, chunks;  // chunk_plan's tables
  const Workspace::Region<float> gates;                // [slots, H_v, kGateRows, kChunk]
  const Workspace::Region<uint16_t> gated_inverse;     // [slots, H_v, kChunk, kChunk]: A * D - I
  const Workspace::Region<uint16_t> v_new;             // [slots, H_v, kHeadDim, kChunk]: V_new^T
};

}  // namespace flash_qla
