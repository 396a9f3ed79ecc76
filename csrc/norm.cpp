#include "norm.h"

#include <limits>
#include <utility>

#include "checks.h"

namespace flash_qla {

namespace {

void check_like_o(const NormCall& call, const char* name, const Tensor& tensor) {
  check_device(call.op, name, tensor, call.o, "o");
  check_floating(call.op, name, tensor);
  check_shape(call.op, name, tensor, call.o.sizes(), "[.., V], like o");
}

}  // namespace

NormCall make_norm_call(const char* op, NormArguments arguments, bool is_backward, const char* weight) {
  NormCall call{std::move(arguments)};
  call.op = op;
  check_defined(op, "o", call.o);
  check_floating(op, "o", call.o);
  call.dtype = call.o.scalar_type();
  check(call.o.dim() >= 1 && call.o.size(-1) >= 1, op, "o has shape ", shape_string(call.o.sizes()),
        ", expected at least one channel ([.., V])");
  call.V = call.o.size(-1);
  call.rows = call.o.numel() / call.V;
  check_like_o(call, "z", call.z);
  check_same_dtype(op, "z", call.z, call.o, "o");
  check_device(op, weight, call.weight, call.o, "o");
  check_floating(op, weight, call.weight);
  check_shape(op, weight, call.weight, {call.V}, "[V], the channels of o");
  if (is_backward) {
    check_like_o(call, "dy", call.grad_y);
  }
  check(call.eps >= 0, op, "eps is ", call.eps, ", expected at least 0");
  check(call.activation == "silu" || call.activation == "sigmoid", op, "activation is \"", call.activation,
        "\", expected \"silu\" or \"sigmoid\"");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  check(call.rows <= kMost, op, "o has ", call.rows, " rows, expected at most ", kMost);
  make_contiguous(op, call.weight, call.weight.scalar_type());
  if (is_backward && !has_dtype(call.grad_y, call.dtype)) {
    make_contiguous(op, call.grad_y, call.dtype);
  }
  return call;
}

NormGradients allocate_gradients(const NormCall& call) {
  return {.grad_o = new_empty(call.op, call.o, call.o.sizes(), call.dtype),
          .dz = new_empty(call.op, call.o, call.o.sizes(), call.dtype),
          .dweight = new_empty(call.op, call.o, {call.V}, call.compute_dtype())};
}

}  // namespace flash_qla
