#include "gpu/chunk_call.h"

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "checks.h"
#include "gpu/device.h"
#include "kernels.h"
#include "offsets.h"

// In libtorch_cuda, which this library does not link, so that it also loads under a CPU build of PyTorch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace flash_qla {

cudaStream_t current_stream(const Tensor& tensor) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error(
        "flash_qla: a CUDA tensor came, but libtorch_cuda was not loaded when libflash_qla.so was");
  }
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_supported_on_gpu(const Problem& p) {
  check(p.dtype == ScalarType::BFloat16 || p.dtype == ScalarType::Half, p.op, "q has dtype ", dtype_string(p.dtype),
        ", expected bfloat16 or float16 on a GPU (float32 and float64 run on the CPU)");
  check(p.K == kHeadDim, p.op, "q has head dimension K = ", p.K, ", expected ", kHeadDim, " on a GPU");
  check(p.V == kHeadDim, p.op, "v has head dimension V = ", p.V, ", expected ", kHeadDim, " on a GPU");
  check(p.H_v <= 65535, p.op, "v has ", p.H_v, " heads, expected at most 65535 on a GPU");
  constexpr int64_t kMax = INT32_MAX;
  check(p.T + (kChunk - 1) * (p.N + 1) <= kMax, p.op, p.T, " tokens in ", p.N,
        " sequences need more than 2^31 rows when each sequence is padded to whole chunks of ", kChunk);
  require_supported_gpu(p.op);
}

Tensor aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0 ? tensor : torch::stable::clone(tensor);
}

ChunkCall::ChunkCall(const Problem& problem, const ForwardArgs& args, bool keep_rstd)
    : p(problem),
      args(args),
      plan(problem),
      stream(current_stream(args.q)),
      dtype(problem.dtype == ScalarType::BFloat16 ? "bfloat16" : "float16"),
      group(problem.H_v / problem.H_k),
      q(aligned(args.q)),
      k(aligned(args.k)),
      v(aligned(args.v)),
      sequences(workspace.reserve<int32_t>(problem.N * kSequenceColumns)),
      chunks(workspace.reserve<int32_t>(plan.slots * kChunkColumns)),
      gates(workspace.reserve<float>(plan.slots * problem.H_v * kGateRows * kChunk)),
      gated_inverse(workspace.reserve<uint16_t>(plan.slots * problem.H_v * kMatrix)),
      v_new(workspace.reserve<uint16_t>(plan.slots * problem.H_v * kTile)) {
  if (p.varlen && offsets_are_checked()) {
    checked_offsets(p, torch::stable::to(*args.cu_seqlens, torch::stable::Device("cpu")));
  }
  if (!args.use_qk_l2norm || is_empty()) {
    return;
  }
  const auto normalize = [&](Tensor& x, std::optional<Tensor>& rstd) {
    const Tensor y = torch::stable::empty_like(x);
    if (keep_rstd) {
      rstd = torch::stable::new_empty(x, {p.B, p.T, p.H_k}, ScalarType::Float);
    }
    kernels::l2norm({.x = x.const_data_ptr(),
                     .y = y.mutable_data_ptr(),
                     .rstd = keep_rstd ? rstd->mutable_data_ptr() : nullptr,
                     .has_rstd = keep_rstd,
                     .rows = plan.rows * p.H_k},
                    {.dtype = dtype, .K = p.K}, stream);
    x = y;
  };
  normalize(q, q_rstd);
  normalize(k, k_rstd);
}

void ChunkCall::run_plan() const {
  kernels::chunk_plan(
      {.offsets = data(args.cu_seqlens),
       .sequences = workspace[sequences],
       .chunks = workspace[chunks],
       .segments = nullptr,
       .rows = plan.rows,
       .has_offsets = p.varlen,
       .uniform_length = p.T,
       .segment_chunks = 0,
       .cut_above = 0,
       .offsets_size = p.N + 1,
       .N = p.N,
       .chunk_slots = plan.slots,
       .segment_slots = 0},
      {.offset_dtype = p.varlen && args.cu_seqlens->scalar_type() == ScalarType::Long ? "int64" : "int32"}, stream);
}

void ChunkCall::run_gates() const {
  kernels::replay_gates({.b = args.g.const_data_ptr(),
                         .beta = args.beta.const_data_ptr(),
                         .chunks = workspace[chunks],
                         .gates = workspace[gates],
                         .tokens = plan.rows,
                         .H_v = p.H_v,
                         .chunk_slots = plan.slots},
                        {}, stream);
}

void ChunkCall::run_states(void* h) const {
  kernels::replay_states({.k = k.const_data_ptr(),
                          .v = v.const_data_ptr(),
                          .gates = workspace[gates],
                          .gated_inverse = workspace[gated_inverse],
                          .sequences = workspace[sequences],
                          .initial_state = data(args.initial_state),
                          .h = h,
                          .v_new = workspace[v_new],
                          .group = group,
                          .state_stride_v = args.state_v_first ? kHeadDim : 1,
                          .state_stride_k = args.state_v_first ? 1 : kHeadDim,
                          .has_initial_state = args.initial_state.has_value(),
                          .tokens = plan.rows,
                          .H_k = p.H_k,
                          .H_v = p.H_v,
                          .chunk_slots = plan.slots,
                          .N = p.N,
                          .state_size = p.N * p.H_v * kSquare},
                         {.dtype = dtype, .K = p.K, .V = p.V}, stream);
}

}  // namespace flash_qla
