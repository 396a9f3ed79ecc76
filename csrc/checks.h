// Errors as users see them: "<op>: <argument> has <what came>, expected <what was expected>". Unlike STD_TORCH_CHECK
// they carry no C++ file and line, which tell a caller nothing.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace flash_qla {

// RuntimeError in Python.
template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// The parts are evaluated even if ok: what is made for the message only, such as the text of a shape, goes to fail.
template <typename... Parts>
void check(bool ok, const char* op, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    fail(op, parts...);
  }
}

const char* dtype_string(torch::headeronly::ScalarType dtype);  // bfloat16
// The same of any tensor, whatever dtypes the headers of the stable ABI know: Tensor::scalar_type throws for the
// others.
const char* dtype_string(const torch::stable::Tensor& tensor);

std::string shape_string(torch::headeronly::IntHeaderOnlyArrayRef shape);  // [1, 64, 4, 128]

// Cheaper than Tensor::scalar_type, which compares the dtype with one after the other, each a call into libtorch.
bool has_dtype(const torch::stable::Tensor& tensor, torch::headeronly::ScalarType dtype);

// An argument; null: none.
using NamedTensor = std::pair<const char*, const torch::stable::Tensor*>;
inline const torch::stable::Tensor* or_null(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor ? &*tensor : nullptr;
}

// Each fails unless the argument is as the function's name says. symbols says what the dimensions are, e.g.
// "[B, T, H_v]".
void check_defined(const char* op, const char* name, const torch::stable::Tensor& tensor);
void check_device(const char* op, const char* name, const torch::stable::Tensor& tensor,
                  const torch::stable::Tensor& q);
void check_devices(const char* op, const torch::stable::Tensor& q, std::initializer_list<NamedTensor> others);
void check_floating(const char* op, const char* name, const torch::stable::Tensor& tensor);
void check_same_dtype(const char* op, const char* name, const torch::stable::Tensor& tensor,
                      const torch::stable::Tensor& q);
void check_rank(const char* op, const char* name, const torch::stable::Tensor& tensor, int64_t rank,
                const char* symbols);
void check_shape(const char* op, const char* name, const torch::stable::Tensor& tensor,
                 torch::headeronly::IntHeaderOnlyArrayRef expected, const char* symbols);
void check_indices(const char* op, const char* name, const torch::stable::Tensor& tensor);  // int32 or int64

}  // namespace flash_qla
