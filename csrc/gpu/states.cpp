#include "gpu/states.h"

#include <cstdint>

#include "checks.h"
#include "gpu/arguments.h"
#include "tensors.h"

namespace flash_qla {

namespace {

constexpr int64_t kPieceBytes = 16;  // bytes that a lane or TMA takes at a time

// Throws unless the parts, one for each index of the first dimensions, start at whole pieces.
void check_pieces(const char* op, const char* name, const Tensor& tensor, int64_t dimensions, const char* parts) {
  bool pieces = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kPieceBytes == 0;
  for (int64_t i = 0; i < dimensions; ++i) {
    const int64_t bytes = tensor.stride(i) * static_cast<int64_t>(tensor.element_size());
    pieces = pieces && (tensor.size(i) == 1 || bytes % kPieceBytes == 0);
  }
  check(tensor.numel() == 0 || pieces, op, name, " has ", parts,
        " that do not start at multiples of 16 bytes, which they have to on a GPU");
}

}  // namespace

kernels::IndexTable index_table(const std::optional<Tensor>& table) {
  if (!table) {
    return {.entries = nullptr, .kind = TableKind::kNone, .stride = 1, .columns = 1};
  }
  return {.entries = table->const_data_ptr(),
          .kind = has_dtype(*table, ScalarType::Long) ? TableKind::kInt64 : TableKind::kInt32,
          .stride = table->stride(0),
          .columns = table->dim() > 1 ? table->size(1) : 1};
}

kernels::States contiguous_states(const Call& call, const void* initial, void* final) {
  return {.initial_state = initial,
          .final_state = final,
          .state_stride_v = call.state_stride_v(),
          .state_stride_k = call.state_stride_k(),
          .slot_stride = call.H_v * call.V * call.K,
          .state_dtype = Dtype::kFloat32};
}

States states_in_order(const Call& call, const kernels::States& tensors, bool has_initial, bool has_final) {
  return {.tensors = tensors,
          .slots = {.state_indices = index_table({}), .null_index = -1, .slots = call.N},
          .presence = {.on_pool = false,
                       .first_states = has_initial ? FirstStates::kAll : FirstStates::kNone,
                       .has_state = nullptr,
                       .has_state_stride = 1,
                       .first_indices = index_table({}),
                       .has_final = has_final},
          .kept = {.kept_states = nullptr, .kept_slot_stride = 0, .kept_dtype = Dtype::kFloat32, .checkpoint_every = 0},
          .kept_in = {.checkpoint_indices = index_table({}), .checkpoint_states = 0}};
}

States states_of(const Call& call, const ForwardOutputs& out) {
  const kernels::States tensors =
      contiguous_states(call, data(call.initial_state), data_if(call.output_final_state, out.final_state));
  return states_in_order(call, tensors, call.over_ranks || call.initial_state,
                         call.over_ranks || call.output_final_state);
}

std::optional<Tensor> states_or_zeros(const Call& call, const std::optional<Tensor>& states) {
  if (states || !call.over_ranks) {
    return states;
  }
  Tensor zeros = new_empty(call.op, call.q, call.state_shape(), call.compute_dtype);
  zero(zeros);
  return zeros;
}

void check_states_on_gpu(const char* op, const char* name, const Tensor& tensor) {
  if (has_dtype(tensor, ScalarType::Double)) [[unlikely]] {
    fail(op, name, " has dtype float64, expected float32, bfloat16, float16, float8_e4m3fn or float8_e5m2 on a GPU");
  }
  const int64_t channels = tensor.size(tensor.dim() - 1);
  check(!is_float8(tensor) || channels % kPieceBytes == 0, op, name, " has 8 bits and states of K = ", channels,
        " channels, expected a multiple of 16 on a GPU");
  check_pieces(op, name, tensor, tensor.dim() - 3, "states");
}

void check_slots_on_gpu(const char* op, const char* name, const Tensor& tensor) {
  check_pieces(op, name, tensor, 1, "slots");
}

}  // namespace flash_qla
