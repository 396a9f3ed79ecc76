#include "decode.h"

#include <cmath>
#include <utility>

#include "checks.h"
#include "tensors.h"

namespace flash_qla {

namespace {

void check_devices(const DecodeCall& call) {
  check_defined(call.op, "q", call.q);
  const std::pair<const char*, const Tensor*> tensors[] = {{"k", &call.k},
                                                           {"v", &call.v},
                                                           {"a", &call.a},
                                                           {"b", &call.b},
                                                           {"A_log", &call.A_log},
                                                           {"state_pool", &call.state_pool},
                                                           {"state_indices", &call.state_indices}};
  for (const auto& [name, tensor] : tensors) {
    check_device(call.op, name, *tensor, call.q);
  }
  const std::pair<const char*, const std::optional<Tensor>*> options[] = {
      {"dt_bias", &call.dt_bias},
      {"cu_seqlens", &call.cu_seqlens},
      {"num_accepted_tokens", &call.num_accepted_tokens},
      {"write_indices", &call.write_indices},
      {"intermediate_states", &call.intermediate_states},
      {"intermediate_indices", &call.intermediate_indices},
      {"parents", &call.parents}};
  for (const auto& [name, tensor] : options) {
    if (*tensor) {
      check_device(call.op, name, **tensor, call.q);
    }
  }
}

void read_tokens(DecodeCall& call) {
  check_floating(call.op, "q", call.q);
  call.dtype = call.q.scalar_type();
  check_same_dtype(call.op, "k", call.k, call.q);
  check_same_dtype(call.op, "v", call.v, call.q);
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
  check_shape(call.op, "k", call.k, {call.B, call.T, call.H_k, call.K}, "[B, T, H_k, K], like q");
  check_shape(call.op, "v", call.v, {call.B, call.T, call.H_v, call.V}, "[B, T, H_v, V]");
  for (const auto& [name, tensor] : {std::pair{"a", &call.a}, std::pair{"b", &call.b}}) {
    check_floating(call.op, name, *tensor);
    check_shape(call.op, name, *tensor, {call.B, call.T, call.H_v}, "[B, T, H_v]");
  }
  check_floating(call.op, "A_log", call.A_log);
  check_shape(call.op, "A_log", call.A_log, {call.H_v}, "[H_v]");
  if (call.dt_bias) {
    check_floating(call.op, "dt_bias", *call.dt_bias);
    check_shape(call.op, "dt_bias", *call.dt_bias, {call.H_v}, "[H_v]");
  }
}

void check_indices(const DecodeCall& call, const char* name, const Tensor& tensor) {
  if (!has_dtype(tensor, ScalarType::Int) && !has_dtype(tensor, ScalarType::Long)) [[unlikely]] {
    fail(call.op, name, " has dtype ", dtype_string(tensor.scalar_type()), ", expected int32 or int64");
  }
}

void read_sequences(DecodeCall& call) {
  if (!call.varlen()) {
    return;
  }
  check_indices(call, "cu_seqlens", *call.cu_seqlens);
  check_rank(call.op, "cu_seqlens", *call.cu_seqlens, 1, "[N + 1]");
  check(call.cu_seqlens->size(0) >= 1, call.op, "cu_seqlens has shape [0], expected at least one offset ([N + 1])");
  check(call.B == 1, call.op, "q has batch size ", call.B,
        ", expected 1 with cu_seqlens (sequences are packed along T)");
  call.N = call.cu_seqlens->size(0) - 1;
}

// States are written where they lie, so what is not laid out like this cannot be copied first.
void check_states(const DecodeCall& call, const char* name, const Tensor& tensor, int64_t rank, const char* symbols) {
  check_floating(call.op, name, tensor);
  check_rank(call.op, name, tensor, rank, symbols);
  const auto shape = tensor.sizes(), strides = tensor.strides();
  const int64_t heads = rank - 3;
  if (shape[heads] != call.H_v || shape[heads + 1] != call.V || shape[heads + 2] != call.K) [[unlikely]] {
    fail(call.op, name, " has shape ", shape_string(shape), ", expected H_v = ", call.H_v, ", V = ", call.V,
         ", K = ", call.K, " at its end (", symbols, ")");
  }
  const bool is_dense = strides[heads] == call.V * call.K && strides[heads + 1] == call.K && strides[heads + 2] == 1;
  if (tensor.numel() > 0 && !is_dense) [[unlikely]] {
    fail(call.op, name, " has strides ", shape_string(strides), ", expected [.., ", call.V * call.K, ", ", call.K,
         ", 1]: each state has to be contiguous");
  }
}

void check_tables(const DecodeCall& call) {
  const int64_t rank = call.state_indices.dim();
  check_indices(call, "state_indices", call.state_indices);
  check(rank == 1 || rank == 2, call.op, "state_indices has ", rank, " dimensions, expected 1 or 2 ([N] or [N, S])");
  const auto of_sequences = [&](const char* name, const Tensor& tensor, int64_t wanted, const char* symbols) {
    check_indices(call, name, tensor);
    check_rank(call.op, name, tensor, wanted, symbols);
    check(tensor.size(0) == call.N, call.op, name, " has ", tensor.size(0), " rows, expected ", call.N,
          ", the number of sequences (", symbols, ")");
  };
  of_sequences("state_indices", call.state_indices, rank, rank == 1 ? "[N]" : "[N, S]");
  check(rank == 1 || call.state_indices.size(1) >= 1, call.op, "state_indices has no columns, expected at least one");
  if (call.num_accepted_tokens) {
    check(rank == 2, call.op, "num_accepted_tokens is a tensor, expected None unless state_indices is [N, S]");
    of_sequences("num_accepted_tokens", *call.num_accepted_tokens, 1, "[N]");
  }
  if (call.write_indices) {
    of_sequences("write_indices", *call.write_indices, 2, "[N, S]");
  }
  if (call.intermediate_indices) {
    check(call.intermediate_states.has_value(), call.op,
          "intermediate_indices is a tensor, expected None without intermediate_states");
    of_sequences("intermediate_indices", *call.intermediate_indices, 1, "[N]");
  }
  if (call.parents) {
    of_sequences("parents", *call.parents, 2, "[N, S]");
    check(!call.writes_back(), call.op,
          "update_state is True, expected False with parents: a tree of tokens has no last state");
  }
}

}  // namespace

DecodeCall make_decode_call(const char* op, DecodeArguments arguments) {
  DecodeCall call{std::move(arguments)};
  call.op = op;
  check_devices(call);
  read_tokens(call);
  read_sequences(call);
  check_states(call, "state_pool", call.state_pool, 4, "[slots, H_v, V, K]");
  if (call.intermediate_states) {
    check_states(call, "intermediate_states", *call.intermediate_states, 5, "[rows, steps, H_v, V, K]");
  }
  check_tables(call);
  if (!call.scale) {
    call.scale = 1.0 / std::sqrt(static_cast<double>(call.K));
  }
  for (Tensor* tensor : {&call.q, &call.k, &call.v, &call.a, &call.b, &call.A_log}) {
    make_contiguous(op, *tensor, tensor->scalar_type());
  }
  if (call.dt_bias) {
    make_contiguous(op, *call.dt_bias, call.dt_bias->scalar_type());
  }
  return call;
}

}  // namespace flash_qla
