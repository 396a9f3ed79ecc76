#include "gpu/states.h"

#include <cstdint>

#include "checks.h"
#include "gpu/launch.h"
#include "tensors.h"

namespace flash_qla {

namespace {

constexpr int64_t kPieceBytes = 16;  // what a lane takes, or TMA

}  // namespace

int64_t table_kind(const Tensor& tensor) {
  return has_dtype(tensor, ScalarType::Long) ? TableKind::kInt64 : TableKind::kInt32;
}

States states_of(const Call& call, const ForwardOutputs& out) {
  States states;
  states.initial = data(call.initial_state);
  states.final = data_if(call.output_final_state, out.final_state);
  states.first_states = call.in_halves || call.initial_state ? FirstStates::kAll : FirstStates::kNone;
  states.has_final = call.in_halves || call.output_final_state;
  states.slots = call.N;
  states.slot_stride = call.H_v * call.V * call.K;
  states.stride_v = call.state_stride_v();
  states.stride_k = call.state_stride_k();
  return states;
}

std::optional<Tensor> states_or_zeros(const Call& call, const std::optional<Tensor>& states) {
  if (states || !call.in_halves) {
    return states;
  }
  Tensor zeros = new_empty(call.op, call.q, call.state_shape(), call.compute_dtype);
  zero(zeros);
  return zeros;
}

void check_states_on_gpu(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  if (dtype != ScalarType::Float && dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) [[unlikely]] {
    fail(op, name, " has dtype ", dtype_string(dtype), ", expected float32, bfloat16 or float16 on a GPU");
  }
  bool pieces = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kPieceBytes == 0;
  for (int64_t i = 0; i < tensor.dim() - 3; ++i) {
    const int64_t bytes = tensor.stride(i) * static_cast<int64_t>(tensor.element_size());
    pieces = pieces && (tensor.size(i) == 1 || bytes % kPieceBytes == 0);
  }
  check(tensor.numel() == 0 || pieces, op, name,
        " has states that do not start at multiples of 16 bytes, which they have to on a GPU");
}

}  // namespace flash_qla
