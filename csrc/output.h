// The result o of the ops that may write it to memory of the caller, their argument `out`.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "tokens.h"

namespace flash_qla {

using torch::stable::Tensor;

// Checks the caller's memory for o: [B, T, H_v, V], dtype and device of q, any strides.
void check_out(const Tokens& tokens, const Tensor& out, const Tensor& q);

// The caller's memory as a tensor that PyTorch's operators may write, even if `out` is an inference tensor.
Tensor memory_of(const Tensor& out);

// Returns the tensor that the device writes o to: on the memory of `out` if that is given, contiguous and aligned, else
// a new one.
Tensor allocate_output(const Tokens& tokens, const std::optional<Tensor>& out, const Tensor& q);

// The op's result: o or, with `out`, which then has o, an empty tensor of shape [0].
Tensor output_as_returned(const Tokens& tokens, const std::optional<Tensor>& out, Tensor o);

}  // namespace flash_qla
