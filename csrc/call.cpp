#include "call.h"

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <limits>
#include <utility>

#include "checks.h"
#include "chunks.h"
#include "gpu/device.h"
#include "offsets.h"
#include "tensors.h"

namespace flash_qla {

namespace {

void check_devices(const Call& call) {
  check_defined(call.op, "q", call.q);
  check_device(call.op, "k", call.k, call.q);
  check_device(call.op, "v", call.v, call.q);
  check_device(call.op, "g", call.g, call.q);
  check_device(call.op, "beta", call.beta, call.q);
  if (call.initial_state) {
    check_device(call.op, "initial_state", *call.initial_state, call.q);
  }
  if (call.cu_seqlens) {
    check_device(call.op, "cu_seqlens", *call.cu_seqlens, call.q);
  }
  if (call.A_log) {
    check_device(call.op, "A_log", *call.A_log, call.q);
  }
  if (call.dt_bias) {
    check_device(call.op, "dt_bias", *call.dt_bias, call.q);
  }
}

void read_dtypes(Call& call) {
  check_floating(call.op, "q", call.q);
  call.dtype = call.q.scalar_type();
  call.compute_dtype = call.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  check_same_dtype(call.op, "k", call.k, call.q);
  check_same_dtype(call.op, "v", call.v, call.q);
  check_floating(call.op, "g", call.g);
  check_floating(call.op, "beta", call.beta);
  call.beta_dtype = call.use_beta_sigmoid ? call.beta.scalar_type() : call.compute_dtype;
  if (call.initial_state) {
    check_floating(call.op, "initial_state", *call.initial_state);
  }
  if (call.state_dtype) {
    const ScalarType dtype = *call.state_dtype;
    check(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float ||
              dtype == ScalarType::Double,
          call.op, "state_dtype is ", dtype_string(dtype), ", expected bfloat16, float16, float32 or float64");
  }
}

// Of q and v, which the other tensors have to agree with.
void read_sizes(Call& call) {
  check_rank(call.op, "q", call.q, 4, "[B, T, H_k, K]");
  check_rank(call.op, "v", call.v, 4, "[B, T, H_v, V]");
  call.B = call.q.size(0);
  call.T = call.q.size(1);
  call.H_k = call.q.size(2);
  call.K = call.q.size(3);
  call.H_v = call.v.size(2);
  call.V = call.v.size(3);
  call.N = call.B;
  if (call.H_k < 1 || call.K < 1) [[unlikely]] {
    fail(call.op, "q has shape ", shape_string(call.q.sizes()),
         ", expected at least one head and one head dimension ([B, T, H_k, K])");
  }
  check(call.H_v >= 1 && call.H_v % call.H_k == 0, call.op, "v has ", call.H_v,
        " heads, expected a positive multiple of the ", call.H_k, " heads of q and k");
}

void check_shapes(const Call& call) {
  check_shape(call.op, "k", call.k, {call.B, call.T, call.H_k, call.K}, "[B, T, H_k, K], like q");
  check_shape(call.op, "v", call.v, {call.B, call.T, call.H_v, call.V}, "[B, T, H_v, V]");
  check_shape(call.op, "g", call.g, {call.B, call.T, call.H_v}, "[B, T, H_v]");
  check_shape(call.op, "beta", call.beta, {call.B, call.T, call.H_v}, "[B, T, H_v]");
}

void check_activations(const Call& call) {
  check(call.use_gate || !call.A_log, call.op, "A_log is a tensor, expected None without use_gate_in_kernel");
  check(call.use_gate || !call.dt_bias, call.op, "dt_bias is a tensor, expected None without use_gate_in_kernel");
  check(!call.use_gate || call.A_log, call.op, "A_log is None, expected a tensor [H_v] with use_gate_in_kernel");
  check(call.use_beta_sigmoid || !call.allow_neg_eigval, call.op,
        "allow_neg_eigval is True, expected False without use_beta_sigmoid_in_kernel (a beta that is ready may be "
        "up to 2 by itself)");
  if (call.A_log) {
    check_floating(call.op, "A_log", *call.A_log);
    check_shape(call.op, "A_log", *call.A_log, {call.H_v}, "[H_v]");
  }
  if (call.dt_bias) {
    check_floating(call.op, "dt_bias", *call.dt_bias);
    check_shape(call.op, "dt_bias", *call.dt_bias, {call.H_v}, "[H_v]");
  }
}

void check_state_shape(const Call& call, const char* name, const Tensor& tensor) {
  check_shape(call.op, name, tensor, call.state_shape(),
              call.state_v_first ? "[N, H_v, V, K], state_v_first" : "[N, H_v, K, V]");
}

void read_sequences(Call& call) {
  call.varlen = call.cu_seqlens.has_value();
  if (!call.varlen) {
    return;
  }
  const Tensor& cu_seqlens = *call.cu_seqlens;
  call.wide_offsets = has_dtype(cu_seqlens, ScalarType::Long);
  if (!call.wide_offsets && !has_dtype(cu_seqlens, ScalarType::Int)) [[unlikely]] {
    fail(call.op, "cu_seqlens has dtype ", dtype_string(cu_seqlens.scalar_type()), ", expected int32 or int64");
  }
  check_rank(call.op, "cu_seqlens", cu_seqlens, 1, "[N + 1]");
  check(cu_seqlens.size(0) >= 1, call.op, "cu_seqlens has shape [0], expected at least one offset ([N + 1])");
  check(call.B == 1, call.op, "q has batch size ", call.B,
        ", expected 1 with cu_seqlens (sequences are packed along T)");
  call.N = cu_seqlens.size(0) - 1;
}

// Kernels index tokens and chunks with 32 bits; offsets in elements are 64-bit. The first two bounds keep the
// arithmetic after them from overflowing.
void count_chunks(Call& call) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check(call.B <= kMax && call.T <= kMax && call.tokens() <= kMax, call.op, "q has ", call.B, " x ", call.T,
        " tokens, expected at most ", kMax, " (B * T)");
  check(call.N < kMax, call.op, "cu_seqlens has ", call.N + 1, " offsets, expected at most ", kMax);
  call.h_chunks = call.varlen ? (call.T + (kChunk - 1) * call.N) / kChunk : call.B * chunk_count(call.T);
  check(call.h_chunks <= kMax, call.op, call.h_chunks, " chunks of ", kChunk, " tokens (", call.N, " sequences, ",
        call.T, " tokens), expected at most ", kMax);
}

void check_arguments(Call& call) {
  check_devices(call);
  read_dtypes(call);
  read_sizes(call);
  check_shapes(call);
  check_activations(call);
  read_sequences(call);
  if (call.initial_state) {
    check_state_shape(call, "initial_state", *call.initial_state);
  }
  count_chunks(call);
  if (!call.scale) {
    call.scale = 1.0 / std::sqrt(static_cast<double>(call.K));
  }
}

void check_gradients(const BackwardCall& call) {
  check_device(call.op, "A", call.A, call.q);
  check_same_dtype(call.op, "A", call.A, call.q);
  check_shape(call.op, "A", call.A, {call.B, call.T, call.H_v, kChunk}, "[B, T, H_v, C]");

  check_device(call.op, "do", call.grad_o, call.q);
  check_floating(call.op, "do", call.grad_o);
  check_shape(call.op, "do", call.grad_o, {call.B, call.T, call.H_v, call.V}, "[B, T, H_v, V], like v");

  if (call.grad_final_state) {
    check_device(call.op, "dht", *call.grad_final_state, call.q);
    check_floating(call.op, "dht", *call.grad_final_state);
    check_state_shape(call, "dht", *call.grad_final_state);
  }

  check(call.use_gate || !call.g_raw, call.op, "g_raw is a tensor, expected None without use_gate_in_kernel");
  check(!call.use_gate || call.g_raw, call.op,
        "g_raw is None, expected the g of the forward, a tensor [B, T, H_v], with use_gate_in_kernel");
  if (call.g_raw) {
    check_device(call.op, "g_raw", *call.g_raw, call.q);
    check_floating(call.op, "g_raw", *call.g_raw);
    check_shape(call.op, "g_raw", *call.g_raw, {call.B, call.T, call.H_v}, "[B, T, H_v]");
  }
}

// Copies only what has to change. What TMA reads is aligned. g_dtype is that of g as it is read.
void make_canonical(Call& call, ScalarType g_dtype) {
  for (Tensor* tensor : {&call.q, &call.k, &call.v}) {
    make_aligned(call.op, *tensor, call.dtype);
  }
  make_contiguous(call.op, call.g, g_dtype);
  make_contiguous(call.op, call.beta, call.beta_dtype);
  for (std::optional<Tensor>* tensor : {&call.A_log, &call.dt_bias}) {
    if (*tensor) {
      make_contiguous(call.op, **tensor, (*tensor)->scalar_type());
    }
  }
  if (call.initial_state) {
    make_aligned(call.op, *call.initial_state, call.compute_dtype);
  }
  if (call.cu_seqlens) {
    make_contiguous(call.op, *call.cu_seqlens, call.wide_offsets ? ScalarType::Long : ScalarType::Int);
  }
}

// Between the checks of the arguments and the pass.
void prepare(Call& call, ScalarType g_dtype) {
  const bool on_gpu = call.q.is_cuda();
  if (on_gpu) {
    check_supported_on_gpu(call);
  }
  make_canonical(call, g_dtype);
  if (on_gpu && call.varlen && offsets_are_checked()) {
    checked_offsets(call);
  }
}

void make_gradients_canonical(BackwardCall& call) {
  make_aligned(call.op, call.grad_o, call.dtype);
  if (call.grad_final_state) {
    make_contiguous(call.op, *call.grad_final_state, call.compute_dtype);
  }
  if (call.g_raw) {
    make_contiguous(call.op, *call.g_raw, call.g_raw->scalar_type());
  }
}

}  // namespace

std::array<int64_t, 4> Call::state_shape() const {
  return state_v_first ? std::array{N, H_v, V, K} : std::array{N, H_v, K, V};
}

Call make_call(const char* op, Arguments arguments) {
  Call call{std::move(arguments)};
  call.op = op;
  check_arguments(call);
  prepare(call, call.use_gate ? call.g.scalar_type() : call.compute_dtype);
  return call;
}

BackwardCall make_backward_call(const char* op, Arguments arguments, Gradients gradients) {
  BackwardCall call{{std::move(arguments)}, std::move(gradients)};
  call.op = op;
  check_arguments(call);
  check_gradients(call);
  prepare(call, call.compute_dtype);
  make_gradients_canonical(call);
  return call;
}

}  // namespace flash_qla
