// The gated RMS norm, which stands after the delta rule in every layer, and its backward.
#pragma once

#include <cstdint>
#include <string>

#include "tensors.h"

namespace flash_qla {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct NormArguments {
  Tensor o = undefined_tensor();       // [.., V]
  Tensor z = undefined_tensor();       // like o
  Tensor weight = undefined_tensor();  // [V]
  double eps = 0;
  std::string activation;  // silu or sigmoid
  bool norm_before_gate = true;
  Tensor grad_y = undefined_tensor();  // like o; only in the backward
  Tensor y = undefined_tensor();       // like o, contiguous: memory for y; allocated by default
};

// The checked arguments. grad_y has the dtype of o, and weight is contiguous. The device can read o and z where they
// are: on the CPU they are contiguous.
struct NormCall : NormArguments {
  const char* op = nullptr;  // qualified name, for messages
  ScalarType dtype{};        // of o, z and y
  int64_t rows = 0, V = 0;

  ScalarType compute_dtype() const { return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }
  bool is_sigmoid() const { return activation == "sigmoid"; }
  bool reads_pieces() const;  // whether a GPU reads rows in whole pieces of 16 bytes
};

struct NormGradients {
  Tensor grad_o = undefined_tensor(), dz = undefined_tensor();  // like o, contiguous
  Tensor dweight = undefined_tensor();                          // [V], compute dtype
};

// Names of the arguments in errors.
struct NormNames {
  const char* weight = "weight";
  const char* eps = "eps";
  const char* activation = "activation";
};
constexpr NormNames kNormOfRegion = {.weight = "norm_weight", .eps = "norm_eps", .activation = "norm_activation"};

// Throws std::runtime_error unless the call can run.
NormCall make_norm_call(const char* op, NormArguments arguments, bool is_backward, const NormNames& names = {});
// The checks of make_norm_call alone, which copy nothing. Tensors stay as they came.
NormCall check_norm(const char* op, NormArguments arguments, bool is_backward, const NormNames& names = {});

// Copies o, z or grad_y unless the device can read it where it is.
void make_readable(const NormCall& call, Tensor& tensor);

Tensor allocate_y(const NormCall& call);
NormGradients allocate_gradients(const NormCall& call);

Tensor gated_rms_norm_cpu(NormCall call);
Tensor gated_rms_norm_cuda(NormCall call);
NormGradients gated_rms_norm_backward_cpu(NormCall call);
NormGradients gated_rms_norm_backward_cuda(NormCall call);

}  // namespace flash_qla
