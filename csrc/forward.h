// The forward pass of the Gated Delta Rule: what both devices share.
//
// An op's call runs check_forward, then forward_cpu or forward_cuda, which begin with canonicalize. The checks are
// those that hold on every device; what only a GPU cannot do (head dims, dtypes, architecture) forward_cuda refuses
// first.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace flash_qla {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Tokens per chunk, the C of the chunk form. The last chunk of a sequence may be shorter.
inline constexpr int64_t kChunk = 64;

struct ForwardArgs {
  Tensor q;     // [B, T, H_k, K]
  Tensor k;     // [B, T, H_k, K]
  Tensor v;     // [B, T, H_v, V]
  Tensor g;     // [B, T, H_v] log decay
  Tensor beta;  // [B, T, H_v]
  std::optional<double> scale;
  std::optional<Tensor> initial_state;  // [N, H_v, K, V], or [N, H_v, V, K] if state_v_first
  std::optional<Tensor> cu_seqlens;     // [N + 1] int32 or int64
  bool output_final_state = false;
  bool output_low_level = false;  // the results of chunk_gated_delta_rule_fwd: g_cumsum, A and, perhaps, h
  bool output_h = false;
  bool use_qk_l2norm = false;
  bool state_v_first = false;
  bool auto_cp = true;
  std::optional<ScalarType> state_dtype = std::nullopt;  // of the final state as returned; the compute dtype by default
};

// h and final_state, where they were not asked for, are empty tensors of shape [0] with the dtype and device that they
// would have had. g_cumsum, A and h are undefined unless output_low_level.
struct ForwardOutputs {
  Tensor g_cumsum;     // [B, T, H_v], compute dtype: inclusive sum of g within each chunk
  Tensor A;            // [B, T, H_v, kChunk], dtype of q: row of (I + stril(diag(beta) K K^T))^-1, K after any l2norm
  Tensor o;            // [B, T, H_v, V], dtype of q
  Tensor h;            // state at each chunk's start, dtype of q; see allocate_forward for its layout
  Tensor final_state;  // [N, H_v, K, V] or [N, H_v, V, K], compute dtype, contiguous
};

struct Problem {
  const char* op;  // qualified name, for messages
  int64_t B, T, H_k, H_v, K, V;
  int64_t N;   // sequences
  int64_t NT;  // chunks over the whole batch: B * ceil(T / kChunk), or if varlen the upper bound that needs only T, N
  bool varlen;
  double scale;
  ScalarType dtype;          // of q, k, v, o, A, h
  ScalarType compute_dtype;  // of g, beta, states and all arithmetic: double for double inputs, else float
};

// Checks everything that can be checked without reading data, and throws std::runtime_error naming the argument, what
// was expected and what came. The args are as the caller gave them.
Problem check_forward(const char* op, const ForwardArgs& args);

// Fails unless tensor has the shape of a state. name is the argument's.
void check_state_shape(const Problem& problem, const char* name, const Tensor& tensor, bool state_v_first);

// The args as kernels want them: all contiguous, g, beta and initial_state in the compute dtype, initial_state in the
// caller's layout. Copies only what has to change.
ForwardArgs canonicalize(const Problem& problem, ForwardArgs args);

// Uninitialized outputs. h is always stored V-first, contiguous [B, NT / B, H_v, V, K] (varlen: [1, NT, H_v, V, K]),
// and is in that order here; h_as_returned gives the caller's view of it.
ForwardOutputs allocate_forward(const Problem& problem, const ForwardArgs& args);

// [N, H_v, V, K] with state_v_first, else [N, H_v, K, V].
std::vector<int64_t> state_shape(const Problem& problem, bool state_v_first);

// Uninitialized, on the device of `like`.
Tensor new_empty(const Tensor& like, IntHeaderOnlyArrayRef shape, ScalarType dtype);

// Contiguous and of this dtype; the tensor itself where it is both.
Tensor contiguous_as(const Tensor& tensor, ScalarType dtype);

// Swaps h's last two dimensions (a view) unless state_v_first.
Tensor h_as_returned(const ForwardArgs& args, const Tensor& h);

// Rounded to state_dtype if the caller gave one.
Tensor final_state_as_returned(const ForwardArgs& args, Tensor final_state);

// Both return h in storage order (V-first).
ForwardOutputs forward_cpu(const Problem& problem, const ForwardArgs& args);
ForwardOutputs forward_cuda(const Problem& problem, const ForwardArgs& args);

// The ops' bodies, for TORCH_BOX. Parameters are those of the schemas in ops.cpp, in their order.
template <auto Forward>
std::tuple<Tensor, Tensor> chunk_gated_delta_rule_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                                     const Tensor& beta, std::optional<double> scale,
                                                     const std::optional<Tensor>& initial_state,
                                                     bool output_final_state, bool use_qk_l2norm_in_kernel,
                                                     const std::optional<Tensor>& cu_seqlens, bool state_v_first,
                                                     bool auto_cp, std::optional<ScalarType> state_dtype) {
  const ForwardArgs args{
      .q = q,
      .k = k,
      .v = v,
      .g = g,
      .beta = beta,
      .scale = scale,
      .initial_state = initial_state,
      .cu_seqlens = cu_seqlens,
      .output_final_state = output_final_state,
      .use_qk_l2norm = use_qk_l2norm_in_kernel,
      .state_v_first = state_v_first,
      .auto_cp = auto_cp,
      .state_dtype = state_dtype,
  };
  const Problem problem = check_forward("flash_qla::chunk_gated_delta_rule", args);
  ForwardOutputs out = Forward(problem, args);
  return {std::move(out.o), final_state_as_returned(args, std::move(out.final_state))};
}

template <auto Forward>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> chunk_gated_delta_rule_fwd_op(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, std::optional<double> scale,
    const std::optional<Tensor>& initial_state, const std::optional<Tensor>& cu_seqlens, bool output_final_state,
    bool output_h, bool auto_cp, bool state_v_first, bool use_qk_l2norm_in_kernel,
    std::optional<ScalarType> state_dtype) {
  const ForwardArgs args{
      .q = q,
      .k = k,
      .v = v,
      .g = g,
      .beta = beta,
      .scale = scale,
      .initial_state = initial_state,
      .cu_seqlens = cu_seqlens,
      .output_final_state = output_final_state,
      .output_low_level = true,
      .output_h = output_h,
      .use_qk_l2norm = use_qk_l2norm_in_kernel,
      .state_v_first = state_v_first,
      .auto_cp = auto_cp,
      .state_dtype = state_dtype,
  };
  const Problem problem = check_forward("flash_qla::chunk_gated_delta_rule_fwd", args);
  ForwardOutputs out = Forward(problem, args);
  return {std::move(out.g_cumsum), std::move(out.A), std::move(out.o), h_as_returned(args, out.h),
          final_state_as_returned(args, std::move(out.final_state))};
}

}  // namespace flash_qla
