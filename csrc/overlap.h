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

// Fails unless the elements of each written tensor lie apart from each other and from all other arguments. This is
// exact, also for strided tensors whose ranges of addresses intersect, as states and windows in one page do.
void check_overlap(const char* op, std::span<const TensorArgument> arguments);

}  // namespace flash_qla
