#include "pool.h"

#include "checks.h"

namespace flash_qla {

void check_table(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t rank,
                 const char* symbols) {
  check_indices(op, name, tensor);
  check_rank(op, name, tensor, rank, symbols);
  check(tensor.size(0) == rows, op, name, " has ", tensor.size(0), " rows, expected ", rows,
        ", the number of sequences (", symbols, ")");
}

void check_states(const char* op, const char* name, const Tensor& tensor, int64_t H_v, int64_t V, int64_t K,
                  int64_t rank, const char* symbols) {
  check_floating(op, name, tensor);
  check_rank(op, name, tensor, rank, symbols);
  const auto shape = tensor.sizes(), strides = tensor.strides();
  const int64_t heads = rank - 3;
  if (shape[heads] != H_v || shape[heads + 1] != V || shape[heads + 2] != K) [[unlikely]] {
    fail(op, name, " has shape ", shape_string(shape), ", expected H_v = ", H_v, ", V = ", V, ", K = ", K,
         " at its end (", symbols, ")");
  }
  const bool is_dense = strides[heads] == V * K && strides[heads + 1] == K && strides[heads + 2] == 1;
  if (tensor.numel() > 0 && !is_dense) [[unlikely]] {
    fail(op, name, " has strides ", shape_string(strides), ", expected [.., ", V * K, ", ", K,
         ", 1]: each state has to be contiguous");
  }
}

}  // namespace flash_qla
