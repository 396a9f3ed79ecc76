// Gates and betas on the CPU: tensors of any floating dtype, pre-activation or activated, and the activations by value
// head.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Float8_e5m2.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace flash_qla::cpu {

template <typename T, typename Data>
using Like = std::conditional_t<std::is_const_v<Data>, const T, T>;

// Calls f(elements) with `data` as elements of a floating dtype. Data is void or const void.
template <typename Data>
auto with_elements(Data* data, torch::headeronly::ScalarType dtype, const auto& f) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::BFloat16:
      return f(static_cast<Like<c10::BFloat16, Data>*>(data));
    case ScalarType::Half:
      return f(static_cast<Like<c10::Half, Data>*>(data));
    case ScalarType::Float:
      return f(static_cast<Like<float, Data>*>(data));
    case ScalarType::Float8_e4m3fn:
      return f(static_cast<Like<c10::Float8_e4m3fn, Data>*>(data));
    case ScalarType::Float8_e5m2:
      return f(static_cast<Like<c10::Float8_e5m2, Data>*>(data));
    default:
      return f(static_cast<Like<double, Data>*>(data));
  }
}

// x, rounded to nearest. In 8 bits a number beyond the largest, also an infinity, becomes the largest; NaN stays NaN.
template <typename T, typename CT>
T rounded_to(CT x) {
  if constexpr (sizeof(T) == 1) {
    constexpr float kMost = std::is_same_v<T, c10::Float8_e5m2> ? 57344.f : 448.f;
    const float y = static_cast<float>(x);
    return T(y > kMost ? kMost : y < -kMost ? -kMost : y);
  } else {
    return static_cast<T>(x);
  }
}

// A contiguous tensor of any floating dtype, element by element; CT is the compute type.
struct Floats {
  const void* data = nullptr;
  torch::headeronly::ScalarType dtype{};
  bool exists = false;

  explicit operator bool() const { return exists; }

  template <typename CT>
  CT get(int64_t i) const {
    return with_elements(data, dtype, [i](const auto* elements) { return static_cast<CT>(elements[i]); });
  }
};

// A Floats that can be written.
struct WritableFloats {
  void* data = nullptr;
  torch::headeronly::ScalarType dtype{};

  template <typename CT>
  CT get(int64_t i) const {
    return Floats{data, dtype, true}.get<CT>(i);
  }

  template <typename CT>
  void set(int64_t i, CT x) const {
    with_elements(data, dtype, [i, x]<typename T>(T* elements) { elements[i] = rounded_to<T>(x); });
  }

  // get() after set(), without the memory.
  template <typename CT>
  CT rounded(CT x) const {
    with_elements(data, dtype, [&x]<typename T>(T*) { x = static_cast<CT>(rounded_to<T>(x)); });
    return x;
  }
};

// Flags and tensors as in a Call. A_log and dt_bias are read only with use_gate.
template <typename CT>
struct Activations {
  bool use_gate, use_beta_sigmoid;
  CT beta_factor;
  Floats g, beta;         // [B, T, H_v]
  Floats A_log, dt_bias;  // [H_v]; dt_bias may be missing
};

template <typename CT>
CT sigmoid(CT x) {
  return CT(1) / (CT(1) + std::exp(-x));
}

// sigmoid(x) (1 - sigmoid(x)), computed without its loss of digits where sigmoid(x) is close to 1.
template <typename CT>
CT sigmoid_derivative(CT x) {
  const CT e = std::exp(-std::abs(x));
  return e / ((CT(1) + e) * (CT(1) + e));
}

constexpr double kSoftplusThreshold = 20;  // PyTorch's: above it softplus is the identity

// The activations of a value head and their derivatives; i is an index into g and beta. With x = g + dt_bias,
//
//   -exp(A_log) softplus(x) = -exp(A_log + min(x, 0)) softplus(x) exp(-min(x, 0))
//
// The right side is computed, because exp(A_log) may overflow although the product is small.
template <typename CT>
class HeadActivations {
 public:
  HeadActivations(const Activations<CT>& all, int64_t head) : all_(all) {
    if (all.use_gate) {
      A_log_ = all.A_log.template get<CT>(head);
      bias_ = all.dt_bias ? all.dt_bias.template get<CT>(head) : CT(0);
    }
  }

  CT g(int64_t i) const {
    if (!all_.use_gate) {
      return all_.g.template get<CT>(i);
    }
    const CT x = gate_input(i);
    if (x > CT(0)) {
      return -rate(x) * (x > CT(kSoftplusThreshold) ? x : std::log1p(std::exp(x)));
    }
    const CT e = std::exp(x);
    return -rate(x) * (e > CT(0) ? std::log1p(e) / e : CT(1));
  }

  CT g_derivative(int64_t i) const {
    if (!all_.use_gate) {
      return 1;
    }
    const CT x = gate_input(i);
    return -rate(x) / (x > CT(kSoftplusThreshold) ? CT(1) : CT(1) + std::exp(-std::abs(x)));
  }

  CT beta(int64_t i) const {
    const CT x = all_.beta.template get<CT>(i);
    return all_.use_beta_sigmoid ? all_.beta_factor * sigmoid(x) : x;
  }

  CT beta_derivative(int64_t i) const {
    return all_.use_beta_sigmoid ? all_.beta_factor * sigmoid_derivative(all_.beta.template get<CT>(i)) : CT(1);
  }

 private:
  CT gate_input(int64_t i) const { return all_.g.template get<CT>(i) + bias_; }
  CT rate(CT x) const { return std::exp(A_log_ + std::min(x, CT(0))); }

  const Activations<CT>& all_;
  CT A_log_ = 0, bias_ = 0;
};

}  // namespace flash_qla::cpu
