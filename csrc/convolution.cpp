#include "convolution.h"

#include <initializer_list>
#include <limits>
#include <utility>

#include "checks.h"
#include "pool.h"

namespace flash_qla {

namespace {

constexpr int64_t kLeastWidth = 2, kMostWidth = 4;

void check_dtype(const Convolution& call, const char* name, const Tensor& tensor) {
  if (!has_dtype(tensor, call.dtype) && !has_dtype(tensor, ScalarType::Float)) [[unlikely]] {
    fail(call.op, name, " has dtype ", dtype_string(tensor), ", expected ", dtype_string(call.dtype), ", the dtype of ",
         call.names.x, ", or float32");
  }
}

// Reads the sizes, and checks all arguments of the forward but windows.
Convolution read_inputs(const char* op, ConvolutionArguments arguments, const ConvolutionNames& names = {}) {
  Convolution call;
  call.names = names;
  static_cast<ConvolutionArguments&>(call) = std::move(arguments);
  call.op = op;
  check_devices(
      call.op, call.x,
      {{names.weight, &call.weight}, {names.bias, or_null(call.bias)}, {"cu_seqlens", or_null(call.cu_seqlens)}},
      names.x);
  check_floating(call.op, names.x, call.x);
  check_rank(call.op, names.x, call.x, 3, "[B, T, D]");
  call.dtype = call.x.scalar_type();
  call.compute_dtype = call.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  call.B = call.N = call.x.size(0);
  call.T = call.x.size(1);
  call.D = call.x.size(2);
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check(call.D >= 1 && call.D <= kMax, call.op, names.x, " has ", call.D, " channels, expected 1 to ", kMax);
  constexpr int64_t kMostTokens = kMax - 63;  // kernels count in 32 bits, and beyond the last token
  check(call.B <= kMostTokens && call.T <= kMostTokens && call.B * call.T <= kMostTokens, call.op, names.x, " has ",
        call.B, " x ", call.T, " tokens, expected at most ", kMostTokens, " (B * T)");

  check_dtype(call, names.weight, call.weight);
  const int64_t rank = call.weight.dim();
  call.W = rank > 1 ? call.weight.size(rank - 1) : 0;
  const bool fits = call.W >= kLeastWidth && call.W <= kMostWidth && call.weight.size(0) == call.D &&
                    (rank == 2 || (rank == 3 && call.weight.size(1) == 1));
  if (!fits) [[unlikely]] {
    fail(call.op, names.weight, " has shape ", shape_string(call.weight.sizes()), ", expected [", call.D, ", W] or [",
         call.D, ", 1, W], W from ", kLeastWidth, " to ", kMostWidth);
  }
  if (call.bias) {
    check_dtype(call, names.bias, *call.bias);
    check_shape(call.op, names.bias, *call.bias, {call.D}, "[D]");
  }
  if (call.cu_seqlens) {
    check_indices(call.op, "cu_seqlens", *call.cu_seqlens);
    check_rank(call.op, "cu_seqlens", *call.cu_seqlens, 1, "[N + 1]");
    check(call.cu_seqlens->size(0) >= 1, call.op, "cu_seqlens has shape [0], expected at least one offset ([N + 1])");
    check(call.B == 1, call.op, names.x, " has batch size ", call.B,
          ", expected 1 with cu_seqlens (sequences are packed along T)");
    call.N = call.cu_seqlens->size(0) - 1;
    check(call.N < kMax, call.op, "cu_seqlens has ", call.N + 1, " offsets, expected at most ", kMax);
  }
  call.columns = call.W - 1;
  call.state_dtype = call.dtype;
  return call;
}

// Checks windows, one for each of `rows`, and takes their columns and dtype.
void check_windows(Convolution& call, const char* name, const Tensor& windows, int64_t rows, const char* symbols) {
  check_device(call.op, name, windows, call.x, call.names.x);
  check_dtype(call, name, windows);
  check_rank(call.op, name, windows, 3, symbols);
  call.columns = windows.size(2);
  const bool fits =
      windows.size(0) == rows && windows.size(1) == call.D && (call.columns == call.W - 1 || call.columns == call.W);
  if (!fits) [[unlikely]] {
    fail(call.op, name, " has shape ", shape_string(windows.sizes()), ", expected [", rows, ", ", call.D, ", ",
         call.W - 1, " or ", call.W, "] (", symbols, ")");
  }
  call.state_dtype = windows.scalar_type();
}

int64_t rows_of(const Tensor& tensor) { return tensor.dim() > 0 ? tensor.size(0) : 0; }

}  // namespace

Convolution make_convolution(const char* op, ConvolutionArguments arguments, const ConvolutionNames& names) {
  Convolution call = read_inputs(op, std::move(arguments), names);
  if (call.initial_state) {
    check_windows(call, names.state, *call.initial_state, call.N, "[N, D, W - 1] or [N, D, W]");
  }
  return call;
}

Convolution make_convolution_backward(const char* op, ConvolutionArguments arguments, const ConvolutionNames& names) {
  Convolution call = make_convolution(op, std::move(arguments), names);
  check_device(op, "dy", call.dy, call.x, names.x);
  check_floating(op, "dy", call.dy);
  check_shape(op, "dy", call.dy, {call.B, call.T, call.D}, "[B, T, D], like x");
  if (call.dht) {
    check_device(op, names.final_gradient, *call.dht, call.x, names.x);
    check_floating(op, names.final_gradient, *call.dht);
    check_shape(op, names.final_gradient, *call.dht, {call.N, call.D, call.columns},
                "[N, D, columns], like the final state");
  }
  return call;
}

Convolution make_convolution_on_pool(const char* op, ConvolutionArguments arguments, PoolArguments pool,
                                     const ConvolutionNames& names) {
  Convolution call = read_inputs(op, std::move(arguments), names);
  check_windows(call, names.pool, pool.state_pool, rows_of(pool.state_pool), "[slots, D, W - 1] or [slots, D, W]");
  check_tables(op, pool, call.N, call.x, names.x, names.checkpoints);
  if (pool.checkpoints) {
    const Tensor& kept = *pool.checkpoints;
    check_device(op, names.checkpoints, kept, call.x, names.x);
    check_dtype(call, names.checkpoints, kept);
    check_shape(op, names.checkpoints, kept, {rows_of(kept), call.D, call.columns}, "[total, D, columns], like slots");
  }
  call.initial_state = pool.state_pool;
  call.pool = std::move(pool);
  call.output_final_state = true;
  return call;
}

void make_canonical(Convolution& call) {
  const auto make_rows = [&](Tensor& tensor) {
    if (!has_dtype(tensor, call.dtype) || (call.D > 1 && tensor.stride(2) != 1)) {
      make_contiguous(call.op, tensor, call.dtype);
    }
  };
  make_rows(call.x);
  if (call.dy.defined()) {
    make_rows(call.dy);
  }
  make_contiguous(call.op, call.weight, call.weight.scalar_type());
  for (std::optional<Tensor>* const tensor : {&call.bias, &call.cu_seqlens}) {
    if (*tensor) {
      make_contiguous(call.op, **tensor, (*tensor)->scalar_type());
    }
  }
  if (call.pool && call.pool->checkpoint_indices && call.pool->checkpoint_indices->stride(1) != 1) {
    make_contiguous(call.op, *call.pool->checkpoint_indices, call.pool->checkpoint_indices->scalar_type());
  }
}

ConvolutionOutputs allocate(const Convolution& call) {
  ConvolutionOutputs out = {.y = new_empty(call.op, call.x, {call.B, call.T, call.D}, call.dtype)};
  if (call.pool) {
    out.final_state = *call.initial_state;
  } else if (call.output_final_state) {
    out.final_state = new_empty(call.op, call.x, {call.N, call.D, call.columns}, call.state_dtype);
  } else {
    out.final_state = new_empty(call.op, call.x, {0}, call.state_dtype);
  }
  return out;
}

ConvolutionGradients allocate_gradients(const Convolution& call) {
  const auto empty = [&](bool requested, std::initializer_list<int64_t> shape) {
    return requested ? new_empty(call.op, call.x, shape, call.compute_dtype)
                     : new_empty(call.op, call.x, {0}, call.compute_dtype);
  };
  return {.dx = new_empty(call.op, call.x, {call.B, call.T, call.D}, call.dtype),
          .dweight = new_empty(call.op, call.x, call.weight.sizes(), call.compute_dtype),
          .dbias = empty(call.bias.has_value(), {call.D}),
          .dh0 = empty(call.initial_state.has_value(), {call.N, call.D, call.columns})};
}

}  // namespace flash_qla
