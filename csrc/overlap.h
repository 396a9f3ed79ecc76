// Memory that an op writes.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <span>
#include <string_view>

namespace flash_qla {

// A tensor among the arguments of an op. `tensor` is null if it was not given.
struct TensorArgument {
  std::string_view name;
  const torch::stable::Tensor* tensor;
  bool is_written;
};

// Whether `windows`, [rows, steps, D, columns], have the columns of all steps in one row of memory: a step's window
// begins a column after that of the step before it.
bool are_sliding(const torch::stable::Tensor& windows);

// Fails unless the elements of each written tensor lie apart from each other and from all other arguments. This is
// exact, also for strided tensors whose ranges of addresses intersect, as states and windows in one page do. Sliding
// windows (see are_sliding) may share memory with each other.
void check_overlap(const char* op, std::span<const TensorArgument> arguments);

}  // namespace flash_qla
