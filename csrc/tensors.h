// What an op asks of PyTorch: memory, every tensor that it makes, outputs, workspaces and copies, and its operators. So
// what is said where PyTorch fails comes from here, too.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <exception>

namespace flash_qla {

[[noreturn]] void fail_in_pytorch(const torch::stable::Tensor& on, const char* call);

// What `function` returns, which calls PyTorch for the sake of this tensor. The C functions behind that return a code,
// and the stable ABI's headers throw the name of the function that did; this throws why.
template <typename Function>
auto with_reason(const torch::stable::Tensor& on, Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    fail_in_pytorch(on, error.what());
  }
}

// Where the host has no memory: std::runtime_error, with a text like new_empty's.
[[noreturn]] void fail_for_memory(const char* op);

// No tensor. Tensor() is one as well, but allocates.
torch::stable::Tensor undefined_tensor();

// Uninitialized, on the device of `like`. Where there is no memory it throws std::runtime_error with a text that
// callers look for, "CUDA out of memory" at its start on a GPU: the type torch.OutOfMemoryError does not pass the
// stable ABI. op is for the text.
torch::stable::Tensor new_empty(const char* op, const torch::stable::Tensor& like,
                                torch::headeronly::IntHeaderOnlyArrayRef shape, torch::headeronly::ScalarType dtype);

// PyTorch's operators zero_, fill_, copy_ and to.
void zero(torch::stable::Tensor& tensor);
void fill(torch::stable::Tensor tensor, double value);
void copy(torch::stable::Tensor& to, const torch::stable::Tensor& from);
torch::stable::Tensor to_cpu(const torch::stable::Tensor& tensor);

// The same memory in other dimensions; strides in elements, and so `offset`, from its first one on. Not an operator of
// torch::stable, which goes through the dispatcher: autograd would keep the result as a view of a tensor that nobody
// has.
torch::stable::Tensor view(const torch::stable::Tensor& tensor, torch::headeronly::IntHeaderOnlyArrayRef shape,
                           torch::headeronly::IntHeaderOnlyArrayRef strides, int64_t offset = 0);

// Whether a tensor starts at a multiple of 16 bytes, as TMA and vector loads need.
bool is_aligned(const torch::stable::Tensor& tensor);

// Replaces a tensor by a contiguous copy of this dtype, unless it is one already; make_aligned also if it is not
// aligned.
void make_contiguous(const char* op, torch::stable::Tensor& tensor, torch::headeronly::ScalarType dtype);
void make_aligned(const char* op, torch::stable::Tensor& tensor, torch::headeronly::ScalarType dtype);

}  // namespace flash_qla
