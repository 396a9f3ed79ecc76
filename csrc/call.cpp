#include "call.h"

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <initializer_list>
#include <limits>
#include <utility>

#include "activations.h"
#include "checks.h"
#include "chunks.h"
#include "contents.h"
#include "gpu/runtime/device.h"
#include "offsets.h"
#include "tensors.h"

namespace flash_qla {

namespace {

void read_dtypes(Call& call) {
  call.compute_dtype = call.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
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

void check_state_shape(const Call& call, const char* name, const Tensor& tensor) {
  check_shape(call.op, name, tensor, call.state_shape(),
              call.state_v_first ? "[N, H_v, V, K], state_v_first" : "[N, H_v, K, V]");
}

void check_map_sequences(const Call& call) {
  constexpr size_t kMost = 2;
  const std::vector<int64_t>& rows = call.map_sequences;
  check(rows.size() <= kMost, call.op, "map_sequences has ", rows.size(), " entries, expected at most ", kMost);
  for (const int64_t n : rows) {
    check(n >= 0 && n < call.N, call.op, "map_sequences has ", n, ", expected one of the ", call.N, " sequences");
  }
}

// Sets h_chunks, within bounds: kernels index tokens and chunks with 32 bits, and elements with 64. The first two
// checks keep the arithmetic after them from overflowing.
void count_chunks(Call& call) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check(call.B <= kMax && call.T <= kMax && call.tokens() <= kMax, call.op, "q has ", call.B, " x ", call.T,
        " tokens, expected at most ", kMax, " (B * T)");
  check(call.N < kMax, call.op, "cu_seqlens has ", call.N + 1, " offsets, expected at most ", kMax);
  call.h_chunks = most_chunks(call.B, call.T, call.N, call.varlen);
  check(call.h_chunks <= kMax, call.op, call.h_chunks, " chunks of ", kChunk, " tokens (", call.N, " sequences, ",
        call.T, " tokens), expected at most ", kMax);
}

// g_name: the argument that Arguments::g comes from.
void check_arguments(Call& call, const char* g_name = "g") {
  check_devices(call.op, call.q,
                {{"k", &call.k},
                 {"v", &call.v},
                 {"initial_state", or_null(call.initial_state)},
                 {"cu_seqlens", or_null(call.cu_seqlens)}});
  read_tokens(call, call.q, call.k, call.v);
  check_activations(call, call.q,
                    {.g = {g_name, &call.g},
                     .beta = {"beta", &call.beta},
                     .A_log = or_null(call.A_log),
                     .dt_bias = or_null(call.dt_bias),
                     .use_gate = call.use_gate,
                     .use_beta_sigmoid = call.use_beta_sigmoid,
                     .allow_neg_eigval = call.allow_neg_eigval});
  read_dtypes(call);
  read_sequences(call, call.cu_seqlens);
  call.varlen = call.cu_seqlens.has_value();
  if (call.max_seqlen) {
    check(*call.max_seqlen >= 0, call.op, "max_seqlen is ", *call.max_seqlen, ", expected at least 0");
  }
  if (call.initial_state) {
    check_state_shape(call, "initial_state", *call.initial_state);
  }
  check_map_sequences(call);
  count_chunks(call);
  if (!call.scale) {
    call.scale = 1.0 / std::sqrt(static_cast<double>(call.K));
  }
}

void check_gradients(const BackwardCall& call) {
  if (call.A) {
    check_device(call.op, "A", *call.A, call.q);
    check_same_dtype(call.op, "A", *call.A, call.q);
    check_shape(call.op, "A", *call.A, {call.B, call.T, call.H_v, kChunk}, "[B, T, H_v, C]");
  }
  check_device(call.op, "do", call.grad_o, call.q);
  check_floating(call.op, "do", call.grad_o);
  check_shape(call.op, "do", call.grad_o, {call.B, call.T, call.H_v, call.V}, "[B, T, H_v, V], like v");

  if (call.grad_final_state) {
    check_device(call.op, "dht", *call.grad_final_state, call.q);
    check_floating(call.op, "dht", *call.grad_final_state);
    check_state_shape(call, "dht", *call.grad_final_state);
  }
  if (call.is_cumulative()) {
    check_g_raw(call, call.q, call.use_gate, or_null(call.g_raw));
  }
}

// Makes q, k, v or do readable by the device: the CPU reads contiguous rows.
void make_readable(const Call& call, std::initializer_list<Tensor*> tensors) {
  if (call.q.is_cuda()) {
    make_readable_rows(call.op, tensors, call.dtype);
    return;
  }
  for (Tensor* const tensor : tensors) {
    make_contiguous(call.op, *tensor, call.dtype);
  }
}

// Copies only tensors that have to change. g_dtype: the dtype of g as it is read.
void make_canonical(Call& call, ScalarType g_dtype) {
  make_readable(call, {&call.q, &call.k, &call.v});
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
    make_contiguous(call.op, *call.cu_seqlens, call.cu_seqlens->scalar_type());
  }
}

// Makes the checked arguments ready for the pass. `raw_gates`: g is the input of the gate, in any dtype.
void prepare(Call& call, bool raw_gates) {
  const bool on_gpu = call.q.is_cuda();
  if (on_gpu) {
    check_supported_on_gpu(call, call.q);
  }
  make_canonical(call, raw_gates ? call.g.scalar_type() : call.compute_dtype);
  if (on_gpu && call.varlen && contents_are_checked()) {
    checked_offsets(call.op, *call.cu_seqlens, call.N, call.T);
  }
}

void make_gradients_canonical(BackwardCall& call) {
  make_readable(call, {&call.grad_o});
  if (call.grad_final_state) {
    make_aligned(call.op, *call.grad_final_state, call.compute_dtype);
  }
  if (!call.is_cumulative()) {
    call.g_raw = call.use_gate ? std::optional(call.g) : std::nullopt;
  } else if (call.g_raw) {
    make_contiguous(call.op, *call.g_raw, call.g_raw->scalar_type());
  }
}

}  // namespace

std::array<int64_t, 4> Call::state_shape() const {
  return state_v_first ? std::array{N, H_v, V, K} : std::array{N, H_v, K, V};
}

void split(const char* op, Arguments& arguments, const PackedTokens& packed) {
  const auto& [mixed_qkv, H_k, K] = packed;
  check_floating(op, "mixed_qkv", mixed_qkv);
  check_rank(op, "mixed_qkv", mixed_qkv, 3, "[B, T, 2 H_k K + H_v V]");
  check_rank(op, "g", arguments.g, 3, "[B, T, H_v]");
  check(H_k >= 1, op, "num_k_heads is ", H_k, ", expected at least 1");
  check(K >= 1, op, "head_k_dim is ", K, ", expected at least 1");
  const int64_t width = mixed_qkv.size(2), H_v = arguments.g.size(2);
  const bool fits = H_v >= 1 && K <= width && H_k <= width && 2 * H_k * K < width && (width - 2 * H_k * K) % H_v == 0;
  check(fits, op, "mixed_qkv has ", width, " channels, expected 2 H_k K + H_v V, with num_k_heads H_k = ", H_k,
        ", head_k_dim K = ", K, " and the H_v = ", H_v, " heads of g");
  TokenParts parts = split_tokens(mixed_qkv, H_k, K, H_v, (width - 2 * H_k * K) / H_v);
  arguments.q = std::move(parts.q);
  arguments.k = std::move(parts.k);
  arguments.v = std::move(parts.v);
}

Call check_call(const char* op, Arguments arguments) {
  Call call{std::move(arguments), {.op = op}};
  check_arguments(call);
  if (call.q.is_cuda()) {
    check_supported_on_gpu(call, call.q);
  }
  return call;
}

Call make_record(const char* op, Arguments arguments) {
  Call call{std::move(arguments), {.op = op}};
  check_arguments(call);
  prepare(call, call.use_gate);
  return call;
}

Call make_call(const char* op, Arguments arguments) {
  Call call = make_record(op, std::move(arguments));
  check_contents(call);
  return call;
}

BackwardCall make_backward_call(const char* op, BackwardArguments arguments) {
  BackwardCall call{{std::move<Arguments&>(arguments), {.op = op}}, std::move<GradientArguments&>(arguments)};
  check(call.g_cumsum || call.g_raw, op,
        "g and g_raw are None, expected the sums of the gates as g, or the g of the forward as g_raw");
  call.g = call.is_cumulative() ? *call.g_cumsum : *call.g_raw;
  check_arguments(call, call.gates_name());
  check_gradients(call);
  prepare(call, call.use_gate && !call.is_cumulative());
  make_gradients_canonical(call);
  check_contents(call);
  return call;
}

}  // namespace flash_qla
