// The calls of PyTorch: allocations (outputs, workspaces, copies) and operators. If PyTorch fails, the error's text
// comes from here.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <exception>
#include <string>

namespace flash_qla {

[[noreturn]] void fail_in_pytorch(const torch::stable::Tensor& on, const char* call);

// Returns function(), which calls PyTorch for this tensor. PyTorch's C functions return a code, and the headers of the
// stable ABI throw the name of the function that failed. This throws the reason.
template <typename Function>
auto with_reason(const torch::stable::Tensor& on, Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    fail_in_pytorch(on, error.what());
  }
}

// Has PyTorch throw its exception, c10::Error, with this text.
[[noreturn]] void throw_by_pytorch(const std::string& text);

// The text for a host without memory, like new_empty's. fail_for_memory throws it as std::runtime_error.
std::string out_of_host_memory(const char* op);
[[noreturn]] void fail_for_memory(const char* op);

// An undefined tensor. Tensor() is undefined, too, but allocates.
torch::stable::Tensor undefined_tensor();

// An uninitialized tensor on the device of `like`. Without memory it throws std::runtime_error; on a GPU the text
// begins with "CUDA out of memory", which callers look for, because torch.OutOfMemoryError does not pass the stable
// ABI. The text has the op.
torch::stable::Tensor new_empty(const char* op, const torch::stable::Tensor& like,
                                torch::headeronly::IntHeaderOnlyArrayRef shape, torch::headeronly::ScalarType dtype);

// PyTorch's operators zero_, fill_, copy_ and to.
void zero(torch::stable::Tensor& tensor);
void fill(torch::stable::Tensor tensor, double value);
void copy(torch::stable::Tensor& to, const torch::stable::Tensor& from);
torch::stable::Tensor to_cpu(const torch::stable::Tensor& tensor);

// A view of the tensor's memory. Strides and `offset` (from the tensor's start) are in elements. This is no operator of
// torch::stable, because those go through the dispatcher: autograd would keep the result as a view.
torch::stable::Tensor view(const torch::stable::Tensor& tensor, torch::headeronly::IntHeaderOnlyArrayRef shape,
                           torch::headeronly::IntHeaderOnlyArrayRef strides, int64_t offset = 0);

// Whether a tensor starts at a multiple of 16 bytes. TMA and vector loads need that.
bool is_aligned(const torch::stable::Tensor& tensor);

// Replaces a tensor by a copy unless it is contiguous and of this dtype; make_aligned: and aligned.
void make_contiguous(const char* op, torch::stable::Tensor& tensor, torch::headeronly::ScalarType dtype);
void make_aligned(const char* op, torch::stable::Tensor& tensor, torch::headeronly::ScalarType dtype);

}  // namespace flash_qla
