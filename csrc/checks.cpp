#include "checks.h"

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "forward.h"

namespace flash_qla {

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

// [1, 64, 4, 128]
std::string shape_string(IntHeaderOnlyArrayRef shape) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < shape.size(); ++i) {
    text << (i ? ", " : "") << shape[i];
  }
  text << ']';
  return text.str();
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

void check_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank, const char* symbols) {
  if (tensor.dim() != rank) [[unlikely]] {
    fail(op, name, " has ", tensor.dim(), " dimensions (shape ", shape_string(tensor.sizes()), "), expected ", rank,
         " (", symbols, ")");
  }
}

// A dispatcher that is given None for a Tensor passes an undefined one on.
void check_defined(const char* op, const char* name, const Tensor& tensor) {
  check(tensor.defined(), op, name, " is None, expected a tensor");
}

}  // namespace

const char* dtype_string(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return torch::headeronly::toString(dtype);
  }
}

bool has_dtype(const Tensor& tensor, ScalarType dtype) {
  return dtype_code(tensor) == torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& q) {
  check_defined(op, name, tensor);
  if (!on_one_device(tensor, q)) [[unlikely]] {
    fail(op, name, " is on ", device_string(tensor), ", expected ", device_string(q), ", the device of q");
  }
}

void check_floating(const char* op, const char* name, const Tensor& tensor) {
  const bool is_floating = has_dtype(tensor, ScalarType::BFloat16) || has_dtype(tensor, ScalarType::Float) ||
                           has_dtype(tensor, ScalarType::Half) || has_dtype(tensor, ScalarType::Double);
  if (!is_floating) [[unlikely]] {
    fail(op, name, " has dtype ", dtype_string(tensor.scalar_type()),
         ", expected bfloat16, float16, float32 or float64");
  }
}

void check_same_dtype(const char* op, const char* name, const Tensor& tensor, const Tensor& q) {
  if (dtype_code(tensor) != dtype_code(q)) [[unlikely]] {
    fail(op, name, " has dtype ", dtype_string(tensor.scalar_type()), ", expected ", dtype_string(q.scalar_type()),
         ", the dtype of q");
  }
}

void check_shape(const char* op, const char* name, const Tensor& tensor, IntHeaderOnlyArrayRef expected,
                 const char* symbols) {
  const IntHeaderOnlyArrayRef shape = tensor.sizes();
  if (shape != expected) [[unlikely]] {
    fail(op, name, " has shape ", shape_string(shape), ", expected ", shape_string(expected), " (", symbols, ")");
  }
}

void check_state_shape(const Problem& p, const char* name, const Tensor& tensor, bool state_v_first) {
  check_shape(p.op, name, tensor, state_shape(p, state_v_first),
              state_v_first ? "[N, H_v, V, K], state_v_first" : "[N, H_v, K, V]");
}

Problem check_forward(const char* op, const ForwardArgs& args) {
  const auto& [q, k, v, g, beta] = std::tie(args.q, args.k, args.v, args.g, args.beta);
  check_defined(op, "q", q);
  check_device(op, "k", k, q);
  check_device(op, "v", v, q);
  check_device(op, "g", g, q);
  check_device(op, "beta", beta, q);
  if (args.initial_state) {
    check_device(op, "initial_state", *args.initial_state, q);
  }
  if (args.cu_seqlens) {
    check_device(op, "cu_seqlens", *args.cu_seqlens, q);
  }

  check_floating(op, "q", q);
  check_same_dtype(op, "k", k, q);
  check_same_dtype(op, "v", v, q);
  check_floating(op, "g", g);
  check_floating(op, "beta", beta);

  check_rank(op, "q", q, 4, "[B, T, H_k, K]");
  check_rank(op, "v", v, 4, "[B, T, H_v, V]");
  Problem p{};
  p.op = op;
  p.B = q.size(0);
  p.T = q.size(1);
  p.H_k = q.size(2);
  p.K = q.size(3);
  p.H_v = v.size(2);
  p.V = v.size(3);
  p.N = p.B;
  p.varlen = args.cu_seqlens.has_value();
  p.dtype = q.scalar_type();
  p.compute_dtype = p.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;

  if (p.H_k < 1 || p.K < 1) [[unlikely]] {
    fail(op, "q has shape ", shape_string(q.sizes()),
         ", expected at least one head and one head dimension ([B, T, H_k, K])");
  }
  check_shape(op, "k", k, {p.B, p.T, p.H_k, p.K}, "[B, T, H_k, K], like q");
  check_shape(op, "v", v, {p.B, p.T, p.H_v, p.V}, "[B, T, H_v, V]");
  check(p.H_v >= 1 && p.H_v % p.H_k == 0, op, "v has ", p.H_v, " heads, expected a positive multiple of the ", p.H_k,
        " heads of q and k");
  check_shape(op, "g", g, {p.B, p.T, p.H_v}, "[B, T, H_v]");
  check_shape(op, "beta", beta, {p.B, p.T, p.H_v}, "[B, T, H_v]");

  if (p.varlen) {
    const Tensor& cu_seqlens = *args.cu_seqlens;
    if (!has_dtype(cu_seqlens, ScalarType::Int) && !has_dtype(cu_seqlens, ScalarType::Long)) [[unlikely]] {
      fail(op, "cu_seqlens has dtype ", dtype_string(cu_seqlens.scalar_type()), ", expected int32 or int64");
    }
    check_rank(op, "cu_seqlens", cu_seqlens, 1, "[N + 1]");
    check(cu_seqlens.size(0) >= 1, op, "cu_seqlens has shape [0], expected at least one offset ([N + 1])");
    check(p.B == 1, op, "q has batch size ", p.B, ", expected 1 with cu_seqlens (sequences are packed along T)");
    p.N = cu_seqlens.size(0) - 1;
  }

  if (args.initial_state) {
    check_floating(op, "initial_state", *args.initial_state);
    check_state_shape(p, "initial_state", *args.initial_state, args.state_v_first);
  }

  if (args.state_dtype) {
    const ScalarType dtype = *args.state_dtype;
    check(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float ||
              dtype == ScalarType::Double,
          op, "state_dtype is ", dtype_string(dtype), ", expected bfloat16, float16, float32 or float64");
  }

  // Kernels index tokens and chunks with 32 bits; offsets in elements are 64-bit. The first two bounds keep the
  // arithmetic after them from overflowing.
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check(p.B <= kMax && p.T <= kMax && p.B * p.T <= kMax, op, "q has ", p.B, " x ", p.T, " tokens, expected at most ",
        kMax, " (B * T)");
  check(p.N < kMax, op, "cu_seqlens has ", p.N + 1, " offsets, expected at most ", kMax);
  p.NT = p.varlen ? (p.T + (kChunk - 1) * p.N) / kChunk : p.B * ((p.T + kChunk - 1) / kChunk);
  check(p.NT <= kMax, op, p.NT, " chunks of ", kChunk, " tokens (", p.N, " sequences, ", p.T,
        " tokens), expected at most ", kMax);

  p.scale = args.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.K)));
  return p;
}

}  // namespace flash_qla
