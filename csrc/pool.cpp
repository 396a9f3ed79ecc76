#include "pool.h"

#include <vector>

#include "checks.h"

namespace flash_qla {

void check_tables(const char* op, const PoolArguments& pool, int64_t N, const Tensor& q, const char* first,
                  const char* checkpoints) {
  check_device(op, "state_indices", pool.state_indices, q, first);
  check_table(op, "state_indices", pool.state_indices, N, 1, "[N]");
  if (pool.initial_state_indices) {
    check_device(op, "initial_state_indices", *pool.initial_state_indices, q, first);
    check_table(op, "initial_state_indices", *pool.initial_state_indices, N, 1, "[N]");
  }
  if (pool.has_initial_state) {
    check_device(op, "has_initial_state", *pool.has_initial_state, q, first);
    check_flags(op, "has_initial_state", *pool.has_initial_state, N);
  }
  check(pool.checkpoint_every >= 0, op, "checkpoint_every is ", pool.checkpoint_every, ", expected at least 0");
  const bool some = pool.checkpoint_every > 0;
  const int destinations = pool.checkpoint_indices.has_value() + pool.checkpoints.has_value();
  check(some || destinations == 0, op, "checkpoint_indices or ", checkpoints,
        " is a tensor, expected None without checkpoint_every");
  check(!some || destinations == 1, op, "checkpoint_every is ", pool.checkpoint_every, " with ", destinations,
        " of checkpoint_indices and ", checkpoints, ", expected one of them");
  if (pool.checkpoint_indices) {
    check_device(op, "checkpoint_indices", *pool.checkpoint_indices, q, first);
    check_table(op, "checkpoint_indices", *pool.checkpoint_indices, N, 2, "[N, blocks]");
  }
}

void check_table(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t rank,
                 const char* symbols) {
  check_indices(op, name, tensor);
  check_rank(op, name, tensor, rank, symbols);
  check(tensor.size(0) == rows, op, name, " has ", tensor.size(0), " rows, expected ", rows,
        ", the number of sequences (", symbols, ")");
}

void check_flags(const char* op, const char* name, const Tensor& tensor, int64_t N) {
  check_shape(op, name, tensor, {N}, "[N]");
  if (!has_dtype(tensor, ScalarType::Bool)) [[unlikely]] {
    fail(op, name, " has dtype ", dtype_string(tensor), ", expected bool");
  }
}

void check_states(const char* op, const char* name, const Tensor& tensor, int64_t H_v, int64_t V, int64_t K,
                  int64_t rank, const char* symbols, bool v_first) {
  check_floating_of_any_size(op, name, tensor);
  check_rank(op, name, tensor, rank, symbols);
  const auto shape = tensor.sizes(), strides = tensor.strides();
  const int64_t heads = rank - 3;
  const int64_t rows = v_first ? V : K, columns = v_first ? K : V;
  if (shape[heads] != H_v || shape[heads + 1] != rows || shape[heads + 2] != columns) [[unlikely]] {
    fail(op, name, " has shape ", shape_string(shape), ", expected H_v = ", H_v, v_first ? ", V = " : ", K = ", rows,
         v_first ? ", K = " : ", V = ", columns, " at its end (", symbols, ")");
  }
  if (tensor.numel() == 0) {
    return;
  }
  const auto is_step = [&](int64_t i, int64_t step) { return shape[i] == 1 || strides[i] == step; };
  if (!(is_step(heads, V * K) && is_step(heads + 1, columns) && is_step(heads + 2, 1))) [[unlikely]] {
    fail(op, name, " has strides ", shape_string(strides), ", expected [.., ", V * K, ", ", columns,
         ", 1]: each state has to be contiguous");
  }
}

void check_slots(const char* op, const char* name, const Tensor& tensor, int64_t slots,
                 torch::headeronly::IntHeaderOnlyArrayRef slot, const char* symbols) {
  std::vector<int64_t> expected = {slots};
  expected.insert(expected.end(), slot.begin(), slot.end());
  check_shape(op, name, tensor, expected, symbols);
  if (tensor.numel() == 0) {
    return;
  }
  const auto strides = tensor.strides();
  int64_t size = 1;
  for (int64_t i = tensor.dim() - 1; i > 0; size *= expected[i--]) {
    if (expected[i] > 1 && strides[i] != size) [[unlikely]] {
      fail(op, name, " has strides ", shape_string(strides), ", expected contiguous slots (", symbols, ")");
    }
  }
}

}  // namespace flash_qla
