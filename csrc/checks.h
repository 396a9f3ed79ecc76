// Errors as users see them: "<op>: <argument> has <what came>, expected <what was expected>". Unlike STD_TORCH_CHECK
// they carry no C++ file and line, which tell a caller nothing.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace flash_qla {

// RuntimeError in Python.
template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

template <typename... Parts>
void check(bool ok, const char* op, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    fail(op, parts...);
  }
}

std::string shape_string(std::span<const int64_t> shape);        // [1, 64, 4, 128]
std::string device_string(const torch::stable::Tensor& tensor);  // cuda:0
std::string dtype_string(torch::headeronly::ScalarType dtype);   // bfloat16

// Each fails unless the argument is as the function's name says.
void check_device(const char* op, const char* name, const torch::stable::Tensor& tensor,
                  const torch::stable::Tensor& q);
void check_floating(const char* op, const char* name, const torch::stable::Tensor& tensor);
void check_same_dtype(const char* op, const char* name, const torch::stable::Tensor& tensor,
                      const torch::stable::Tensor& q);

// Fails unless tensor has exactly this shape. symbols says what the dimensions are, e.g. "[B, T, H_v]".
void check_shape(const char* op, const char* name, const torch::stable::Tensor& tensor,
                 const std::vector<int64_t>& expected, const char* symbols);

}  // namespace flash_qla
