#include "ranks.h"

#include "checks.h"
#include "tensors.h"

namespace flash_qla {

namespace {

void check_from_begin(const Call& call, const char* name, const Tensor& tensor, ScalarType dtype,
                      torch::headeronly::IntHeaderOnlyArrayRef shape) {
  check_device(call.op, name, tensor, call.q);
  check(has_dtype(tensor, dtype) && tensor.is_contiguous(), call.op, name, " has dtype ", dtype_string(tensor),
        tensor.is_contiguous() ? "" : " and is not contiguous", ", expected a contiguous ", dtype_string(dtype),
        " tensor");
  check_shape(call.op, name, tensor, shape, "as begin returned it");
  check(!tensor.is_cuda() || is_aligned(tensor), call.op, name,
        " does not start at a multiple of 16 bytes, which the tensor that begin returned does");
}

}  // namespace

void check_workspace(const Call& call) {
  check_from_begin(call, "workspace", *call.workspace, ScalarType::Byte, {call.workspace->numel()});
}

void check_begun(const Call& c, const ForwardOutputs& out) {
  check_workspace(c);
  check_from_begin(c, "o", out.o, c.dtype, {c.B, c.T, c.H_v, c.V});
}

void check_begun(const BackwardCall& c, const BackwardOutputs& out) {
  check_workspace(c);
  check_from_begin(c, "dq", out.dq, c.dtype, {c.B, c.T, c.H_k, c.K});
  check_from_begin(c, "dk", out.dk, c.dtype, {c.B, c.T, c.H_k, c.K});
  check_from_begin(c, "dv", out.dv, c.dtype, {c.B, c.T, c.H_v, c.V});
  check_from_begin(c, "db", out.db, c.beta_dtype, {c.B, c.T, c.H_v});
  check_from_begin(c, "dg", out.dg, c.use_gate ? c.g_raw->scalar_type() : c.compute_dtype, {c.B, c.T, c.H_v});
}

Tensor allocate_maps(const Call& call) {
  const auto rows = static_cast<int64_t>(call.map_sequences.size());
  return new_empty(call.op, call.q, {rows, call.H_v, call.V + call.K, call.K}, call.compute_dtype);
}

Begun begun_of_nothing(const Call& call, const std::optional<Tensor>& states) {
  const int64_t H_v = call.H_v, V = call.V, K = call.K, size = (V + K) * K;
  const auto rows = static_cast<int64_t>(call.map_sequences.size());
  Tensor maps = allocate_maps(call);
  zero(maps);
  if (rows > 0) {
    fill(view(maps, {rows, H_v, K}, {H_v * size, size, K + 1}, V * K), 1);
  }
  for (int64_t i = 0; states && i < rows; ++i) {
    Tensor of_state = view(maps, {H_v, V, K}, {size, K, 1}, i * H_v * size);
    copy(of_state, view(*states, {H_v, V, K}, {V * K, call.state_stride_v(), call.state_stride_k()},
                        call.map_sequences[i] * H_v * V * K));
  }
  return {maps, new_empty(call.op, call.q, {0}, ScalarType::Byte)};
}

}  // namespace flash_qla
