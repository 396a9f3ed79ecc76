// Errors as users see them: "<op>: <argument> has <value>, expected <expectation>". Unlike STD_TORCH_CHECK they have no
// C++ file and line, which tell a caller nothing.
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

// Throws a RuntimeError of Python.
template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Fails unless ok. The parts are evaluated even if ok; if the message needs a costly text, as of a shape, call fail.
template <typename... Parts>
void check(bool ok, const char* op, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    fail(op, parts...);
  }
}

const char* dtype_string(torch::headeronly::ScalarType dtype);  // bfloat16
// The name of a tensor's dtype. Tensor::scalar_type would throw for dtypes that the stable ABI's headers do not know.
const char* dtype_string(const torch::stable::Tensor& tensor);

std::string shape_string(torch::headeronly::IntHeaderOnlyArrayRef shape);  // [1, 64, 4, 128]

// Whether the tensor has the dtype. Tensor::scalar_type is slower: it asks libtorch for one dtype after the other.
bool has_dtype(const torch::stable::Tensor& tensor, torch::headeronly::ScalarType dtype);
bool is_float8(const torch::stable::Tensor& tensor);  // float8_e4m3fn or float8_e5m2

// An argument with its name; null: not given.
using NamedTensor = std::pair<const char*, const torch::stable::Tensor*>;
inline const torch::stable::Tensor* or_null(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor ? &*tensor : nullptr;
}

// Each fails unless the argument is as the function is named. symbols: the dimensions for the text, as "[B, T,
// H_v]". `first`: the name of the op's first tensor, q, which decides about devices and dtypes.
void check_device(const char* op, const char* name, const torch::stable::Tensor& tensor, const torch::stable::Tensor& q,
                  const char* first = "q");
void check_devices(const char* op, const torch::stable::Tensor& q, std::initializer_list<NamedTensor> others,
                   const char* first = "q");
void check_floating(const char* op, const char* name, const torch::stable::Tensor& tensor);  // 16 to 64 bits
void check_floating_of_any_size(const char* op, const char* name, const torch::stable::Tensor& tensor);  // 8 bits, too
void check_same_dtype(const char* op, const char* name, const torch::stable::Tensor& tensor,
                      const torch::stable::Tensor& q, const char* first = "q");
void check_rank(const char* op, const char* name, const torch::stable::Tensor& tensor, int64_t rank,
                const char* symbols);
void check_shape(const char* op, const char* name, const torch::stable::Tensor& tensor,
                 torch::headeronly::IntHeaderOnlyArrayRef expected, const char* symbols);
void check_indices(const char* op, const char* name, const torch::stable::Tensor& tensor);  // int32 or int64

}  // namespace flash_qla
