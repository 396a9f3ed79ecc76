// The forward on a Hopper GPU: plan, gates, chunk inverse, states, output. Everything that depends on the contents of
// cu_seqlens is decided on the device, so a call never synchronizes and can be captured in a CUDA graph.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "checks.h"
#include "device.h"
#include "forward.h"
#include "kernels.h"
#include "offsets.h"
#include "plan.h"

// In libtorch_cuda, which this library does not link, so that it also loads under a CPU build of PyTorch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace flash_qla {

namespace {

void check_supported(const Problem& p) {
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

cudaStream_t current_stream(const Tensor& tensor) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error(
        "flash_qla: a CUDA tensor came, but libtorch_cuda was not loaded when libflash_qla.so was");
  }
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// TMA reads from addresses that are multiples of 16 bytes; a view may start anywhere.
Tensor aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0 ? tensor : torch::stable::clone(tensor);
}

const void* data(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

// No sequence has a token: every state passes through, and all rows are padding.
void pass_states_through(const ForwardArgs& args, ForwardOutputs& out) {
  for (Tensor* zeros : {&out.g_cumsum, &out.A, &out.o, &out.h}) {
    torch::stable::zero_(*zeros);
  }
  if (args.output_final_state && args.initial_state) {
    torch::stable::copy_(out.final_state, *args.initial_state);
  } else {
    torch::stable::zero_(out.final_state);
  }
}

Tensor l2_normalized(const Tensor& x, const char* dtype, cudaStream_t stream) {
  Tensor y = torch::stable::empty_like(x);
  kernels::l2norm({.x = x.const_data_ptr(), .y = y.mutable_data_ptr(), .rows = x.numel() / kHeadDim}, {.dtype = dtype},
                  stream);
  return y;
}

}  // namespace

ForwardOutputs forward_cuda(const Problem& p, const ForwardArgs& given) {
  const torch::stable::accelerator::DeviceGuard guard(given.q.get_device_index());
  check_supported(p);
  const ForwardArgs args = canonicalize(p, given);
  if (p.varlen && offsets_are_checked()) {
    checked_offsets(p, torch::stable::to(*args.cu_seqlens, torch::stable::Device("cpu")));
  }

  ForwardOutputs out = allocate_forward(p, args);
  const ForwardPlan plan(p);
  if (plan.rows == 0 || p.N == 0) {
    pass_states_through(args, out);
    return out;
  }

  const cudaStream_t stream = current_stream(args.q);
  const char* dtype = p.dtype == ScalarType::BFloat16 ? "bfloat16" : "float16";
  const int64_t group = p.H_v / p.H_k;
  const Tensor q = args.use_qk_l2norm ? l2_normalized(aligned(args.q), dtype, stream) : aligned(args.q);
  const Tensor k = args.use_qk_l2norm ? l2_normalized(aligned(args.k), dtype, stream) : aligned(args.k);
  const Tensor v = aligned(args.v);

  // b goes to the op's output where it is one. h does too: it is the largest intermediate.
  const int64_t tile = kHeadDim * kChunk, square = kHeadDim * kHeadDim;
  Workspace workspace;
  const auto sequences = workspace.reserve<int32_t>(p.N * kTableColumns);
  const auto chunks = workspace.reserve<int32_t>(plan.slots * kTableColumns);
  const auto gates = workspace.reserve<float>(plan.slots * p.H_v * kGateRows * kChunk);
  const auto gated_inverse = workspace.reserve<uint16_t>(plan.slots * p.H_v * kChunk * kChunk);
  const auto v_new = workspace.reserve<uint16_t>(plan.slots * p.H_v * tile);
  const auto own_h = workspace.reserve<uint16_t>(args.output_h ? 0 : plan.slots * p.H_v * square);
  workspace.allocate(args.q);
  void* const h = args.output_h ? out.h.mutable_data_ptr() : workspace[own_h];
  const int64_t h_slots = args.output_h ? p.NT : plan.slots;
  if (args.output_h && p.varlen) {
    torch::stable::zero_(out.h);  // slots that no chunk uses
  }

  kernels::chunk_plan(
      {.offsets = data(args.cu_seqlens),
       .sequences = workspace[sequences],
       .chunks = workspace[chunks],
       .rows = plan.rows,
       .has_offsets = p.varlen,
       .uniform_length = p.T,
       .offsets_size = p.N + 1,
       .N = p.N,
       .NT = plan.slots},
      {.offset_dtype = p.varlen && args.cu_seqlens->scalar_type() == ScalarType::Long ? "int64" : "int32"}, stream);
  kernels::gate_cumsum({.g = args.g.const_data_ptr(),
                        .chunks = workspace[chunks],
                        .b = args.output_low_level ? out.g_cumsum.mutable_data_ptr() : nullptr,
                        .gates = workspace[gates],
                        .has_b = args.output_low_level,
                        .R = plan.rows,
                        .HV = p.H_v,
                        .NT = plan.slots},
                       {}, stream);
  kernels::chunk_inverse({.k = k.const_data_ptr(),
                          .beta = args.beta.const_data_ptr(),
                          .gates = workspace[gates],
                          .chunks = workspace[chunks],
                          .A = args.output_low_level ? out.A.mutable_data_ptr() : nullptr,
                          .gated_inverse = workspace[gated_inverse],
                          .group = group,
                          .has_A = args.output_low_level,
                          .R = plan.rows,
                          .HK = p.H_k,
                          .HV = p.H_v,
                          .NT = plan.slots},
                         {.dtype = dtype}, stream);
  kernels::chunk_states({.k = k.const_data_ptr(),
                         .v = v.const_data_ptr(),
                         .gates = workspace[gates],
                         .gated_inverse = workspace[gated_inverse],
                         .sequences = workspace[sequences],
                         .initial_state = data(args.initial_state),
                         .final_state = args.output_final_state ? out.final_state.mutable_data_ptr() : nullptr,
                         .h = h,
                         .v_new = workspace[v_new],
                         .group = group,
                         .state_stride_v = args.state_v_first ? kHeadDim : 1,
                         .state_stride_k = args.state_v_first ? 1 : kHeadDim,
                         .has_initial_state = args.initial_state.has_value(),
                         .has_final_state = args.output_final_state,
                         .R = plan.rows,
                         .HK = p.H_k,
                         .HV = p.H_v,
                         .NT = plan.slots,
                         .N = p.N,
                         .state_size = p.N * p.H_v * square,
                         .h_slots = h_slots},
                        {.dtype = dtype}, stream);
  kernels::chunk_output({.q = q.const_data_ptr(),
                         .k = k.const_data_ptr(),
                         .gates = workspace[gates],
                         .chunks = workspace[chunks],
                         .h = h,
                         .v_new = workspace[v_new],
                         .o = out.o.mutable_data_ptr(),
                         .group = group,
                         .scale = static_cast<float>(p.scale),
                         .R = plan.rows,
                         .HK = p.H_k,
                         .NT = plan.slots,
                         .HV = p.H_v,
                         .h_slots = h_slots},
                        {.dtype = dtype}, stream);
  return out;
}

}  // namespace flash_qla

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CUDA, m) {
  m.impl("chunk_gated_delta_rule", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_op<flash_qla::forward_cuda>));
  m.impl("chunk_gated_delta_rule_fwd", TORCH_BOX(&flash_qla::chunk_gated_delta_rule_fwd_op<flash_qla::forward_cuda>));
}
