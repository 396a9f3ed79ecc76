#include "checks.h"

#include <torch/csrc/stable/stableivalue_conversions.h>

namespace flash_qla {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

int32_t dtype_code(const Tensor& tensor) {
  int32_t code;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

bool on_one_device(const Tensor& a, const Tensor& b) {
  int32_t type_a, type_b;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(a.get(), &type_a));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(b.get(), &type_b));
  return type_a == type_b && a.get_device_index() == b.get_device_index();
}

// cuda:0
std::string device_string(const Tensor& tensor) {
  if (tensor.is_cpu()) {
    return "cpu";
  }
  const std::string index = std::to_string(tensor.get_device_index());
  if (tensor.is_cuda()) {
    return "cuda:" + index;
  }
  return "device type " + std::to_string(static_cast<int>(tensor.device().type())) + ", index " + index;
}

}  // namespace

const char* dtype_string(ScalarType dtype) {
  static constexpr std::pair<ScalarType, const char*> kNames[] = {
      {ScalarType::BFloat16, "bfloat16"},
      {ScalarType::Half, "float16"},
      {ScalarType::Float, "float32"},
      {ScalarType::Double, "float64"},
      {ScalarType::Int, "int32"},
      {ScalarType::Long, "int64"},
      {ScalarType::Byte, "uint8"},
      {ScalarType::Float8_e4m3fn, "float8_e4m3fn"},
      {ScalarType::Float8_e5m2, "float8_e5m2"},
  };
  for (const auto& [named, name] : kNames) {
    if (named == dtype) {
      return name;
    }
  }
  return torch::headeronly::toString(dtype);
}

const char* dtype_string(const Tensor& tensor) {
  return dtype_string(static_cast<ScalarType>(dtype_code(tensor)));  // ScalarType's numbers are PyTorch's codes
}

std::string shape_string(IntHeaderOnlyArrayRef shape) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < shape.size(); ++i) {
    text << (i ? ", " : "") << shape[i];
  }
  text << ']';
  return text.str();
}

bool has_dtype(const Tensor& tensor, ScalarType dtype) {
  return dtype_code(tensor) == torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& q, const char* first) {
  if (!on_one_device(tensor, q)) [[unlikely]] {
    fail(op, name, " is on ", device_string(tensor), ", expected ", device_string(q), ", the device of ", first);
  }
}

void check_devices(const char* op, const Tensor& q, std::initializer_list<NamedTensor> others, const char* first) {
  for (const auto& [name, tensor] : others) {
    if (tensor) {
      check_device(op, name, *tensor, q, first);
    }
  }
}

bool is_float8(const Tensor& tensor) {
  return has_dtype(tensor, ScalarType::Float8_e4m3fn) || has_dtype(tensor, ScalarType::Float8_e5m2);
}

namespace {

bool has_at_least_16_bits(const Tensor& tensor) {
  return has_dtype(tensor, ScalarType::BFloat16) || has_dtype(tensor, ScalarType::Float) ||
         has_dtype(tensor, ScalarType::Half) || has_dtype(tensor, ScalarType::Double);
}

}  // namespace

void check_floating(const char* op, const char* name, const Tensor& tensor) {
  if (!has_at_least_16_bits(tensor)) [[unlikely]] {
    fail(op, name, " has dtype ", dtype_string(tensor), ", expected bfloat16, float16, float32 or float64");
  }
}

void check_floating_of_any_size(const char* op, const char* name, const Tensor& tensor) {
  if (!has_at_least_16_bits(tensor) && !is_float8(tensor)) [[unlikely]] {
    fail(op, name, " has dtype ", dtype_string(tensor),
         ", expected bfloat16, float16, float32, float64, float8_e4m3fn or float8_e5m2");
  }
}

void check_same_dtype(const char* op, const char* name, const Tensor& tensor, const Tensor& q, const char* first) {
  if (dtype_code(tensor) != dtype_code(q)) [[unlikely]] {
    fail(op, name, " has dtype ", dtype_string(tensor), ", expected ", dtype_string(q), ", the dtype of ", first);
  }
}

void check_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank, const char* symbols) {
  if (tensor.dim() != rank) [[unlikely]] {
    fail(op, name, " has ", tensor.dim(), " dimensions (shape ", shape_string(tensor.sizes()), "), expected ", rank,
         " (", symbols, ")");
  }
}

void check_shape(const char* op, const char* name, const Tensor& tensor, IntHeaderOnlyArrayRef expected,
                 const char* symbols) {
  const IntHeaderOnlyArrayRef shape = tensor.sizes();
  if (shape != expected) [[unlikely]] {
    fail(op, name, " has shape ", shape_string(shape), ", expected ", shape_string(expected), " (", symbols, ")");
  }
}

void check_indices(const char* op, const char* name, const Tensor& tensor) {
  if (!has_dtype(tensor, ScalarType::Int) && !has_dtype(tensor, ScalarType::Long)) [[unlikely]] {
    fail(op, name, " has dtype ", dtype_string(tensor), ", expected int32 or int64");
  }
}

}  // namespace flash_qla
