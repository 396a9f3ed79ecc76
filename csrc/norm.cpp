#include "norm.h"

#include <limits>
#include <utility>

#include "checks.h"

namespace flash_qla {

namespace {

constexpr int64_t kPieceBytes = 16;

void check_like_o(const NormCall& call, const char* name, const Tensor& tensor) {
  check_device(call.op, name, tensor, call.o, "o");
  check_floating(call.op, name, tensor);
  check_shape(call.op, name, tensor, call.o.sizes(), "[.., V], like o");
}

// in_pieces: in pieces of 16 bytes.
bool is_readable_on_gpu(const Tensor& tensor, bool in_pieces) {
  const int64_t channels = tensor.dim() - 1;
  if (tensor.size(channels) > 1 && tensor.stride(channels) != 1) {
    return false;
  }
  if (!in_pieces) {
    return true;
  }
  for (int64_t dim = 0; dim < channels; ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) * tensor.element_size() % kPieceBytes != 0) {
      return false;
    }
  }
  return is_aligned(tensor);
}

}  // namespace

NormCall check_norm(const char* op, NormArguments arguments, bool is_backward, const NormNames& names) {
  NormCall call{std::move(arguments)};
  call.op = op;
  check_floating(op, "o", call.o);
  call.dtype = call.o.scalar_type();
  check(call.o.dim() >= 1 && call.o.size(-1) >= 1, op, "o has shape ", shape_string(call.o.sizes()),
        ", expected at least one channel ([.., V])");
  call.V = call.o.size(-1);
  call.rows = call.o.numel() / call.V;
  check_like_o(call, "z", call.z);
  check_same_dtype(op, "z", call.z, call.o, "o");
  check_device(op, names.weight, call.weight, call.o, "o");
  check_floating(op, names.weight, call.weight);
  check_shape(op, names.weight, call.weight, {call.V}, "[V], the channels of o");
  if (is_backward) {
    check_like_o(call, "dy", call.grad_y);
  }
  check(call.eps >= 0, op, names.eps, " is ", call.eps, ", expected at least 0");
  check(call.activation == "silu" || call.activation == "sigmoid", op, names.activation, " is \"", call.activation,
        "\", expected \"silu\" or \"sigmoid\"");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  check(call.rows <= kMost, op, "o has ", call.rows, " rows, expected at most ", kMost);
  return call;
}

NormCall make_norm_call(const char* op, NormArguments arguments, bool is_backward, const NormNames& names) {
  NormCall call = check_norm(op, std::move(arguments), is_backward, names);
  make_contiguous(op, call.weight, call.weight.scalar_type());
  make_readable(call, call.o);
  make_readable(call, call.z);
  if (is_backward && !has_dtype(call.grad_y, call.dtype)) {
    make_contiguous(op, call.grad_y, call.dtype);
  }
  return call;
}

bool NormCall::reads_pieces() const { return V * static_cast<int64_t>(o.element_size()) % kPieceBytes == 0; }

void make_readable(const NormCall& call, Tensor& tensor) {
  if (!tensor.is_cuda()) {
    make_contiguous(call.op, tensor, call.dtype);
  } else if (!is_readable_on_gpu(tensor, call.reads_pieces())) {
    make_aligned(call.op, tensor, call.dtype);
  }
}

Tensor allocate_y(const NormCall& call) {
  return call.y.defined() ? call.y : new_empty(call.op, call.o, call.o.sizes(), call.dtype);
}

NormGradients allocate_gradients(const NormCall& call) {
  return {.grad_o = new_empty(call.op, call.o, call.o.sizes(), call.dtype),
          .dz = new_empty(call.op, call.o, call.o.sizes(), call.dtype),
          .dweight = new_empty(call.op, call.o, {call.V}, call.compute_dtype())};
}

}  // namespace flash_qla
