// Memory: every tensor that an op makes, outputs, workspaces and copies, comes from here, and so does the error where
// there is none left.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

namespace flash_qla {

// No tensor. Tensor() is one as well, but allocates.
torch::stable::Tensor undefined_tensor();

// Uninitialized, on the device of `like`. Where there is no memory it throws std::runtime_error with a text that
// callers look for, "CUDA out of memory" at its start on a GPU: the type torch.OutOfMemoryError does not pass the
// stable ABI. op is for the text.
torch::stable::Tensor new_empty(const char* op, const torch::stable::Tensor& like,
                                torch::headeronly::IntHeaderOnlyArrayRef shape, torch::headeronly::ScalarType dtype);

// The same memory in other dimensions; strides in elements, and so `offset`, from its first one on. Not an operator of
// torch::stable, which goes through the dispatcher: autograd would keep the result as a view of a tensor that nobody
// has.
torch::stable::Tensor view(const torch::stable::Tensor& tensor, torch::headeronly::IntHeaderOnlyArrayRef shape,
                           torch::headeronly::IntHeaderOnlyArrayRef strides, int64_t offset = 0);

// Replaces a tensor by a contiguous copy of this dtype, unless it is one already; make_aligned also if it does not
// start at a multiple of 16 bytes, which is where TMA reads.
void make_contiguous(const char* op, torch::stable::Tensor& tensor, torch::headeronly::ScalarType dtype);
void make_aligned(const char* op, torch::stable::Tensor& tensor, torch::headeronly::ScalarType dtype);

}  // namespace flash_qla
