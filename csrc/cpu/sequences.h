// The common parts of the passes on the CPU: sequences, inputs, threads and types.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <vector>

#include "call.h"
#include "cpu/activations.h"
#include "cpu/forward.h"
#include "passes.h"
#include "tensors.h"

namespace flash_qla {

void say_once_that_this_is_slow(const char* op);
// Sets whether the line about the slow path was said, and returns whether it was.
bool exchange_slow_path_was_said(bool said);

// Run the passes into these outputs. A is computed if it is defined.
void run_forward_cpu(const Call& call, const cpu::Checkpoints& checkpoints, const ForwardOutputs& out);
void run_backward_cpu(const BackwardCall& call, const BackwardOutputs& out);

// The sequences in the order of their tokens. Reads cu_seqlens, and throws unless the contents are valid.
std::vector<cpu::Sequence> list_sequences(const Call& call);

// The number of tokens that sequences cover. Tokens after them are padding.
int64_t covered_tokens(const std::vector<cpu::Sequence>& sequences);

inline cpu::Floats floats_of(const Tensor& tensor) { return {tensor.const_data_ptr(), tensor.scalar_type(), true}; }
inline cpu::Floats floats_of(const std::optional<Tensor>& tensor) {
  return tensor ? floats_of(*tensor) : cpu::Floats{};
}
// A writable tensor. Take it before pointers for reading, because a lazy clone gets its own memory here.
inline cpu::WritableFloats writable_floats_of(const Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.scalar_type()};
}

// Calls f(begin, end) for parts of [0, count), in parallel. If a thread gets no memory, it throws fail_for_memory's
// error.
template <typename F>
void in_parallel(const char* op, int64_t count, const F& f) {
  std::atomic<bool> out_of_memory = false;
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    try {
      f(begin, end);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  });
  if (out_of_memory) {
    fail_for_memory(op);
  }
}

// The inputs that both a Call and a DecodeCall have.
template <typename T, typename CT>
cpu::Inputs<T, CT> inputs_of(const auto& call, const cpu::Activations<CT>& gates) {
  return {.H_k = call.H_k,
          .H_v = call.H_v,
          .K = call.K,
          .V = call.V,
          .values = call.V,
          .scale = static_cast<CT>(*call.scale),
          .use_qk_l2norm = call.use_qk_l2norm,
          .q = call.q.template const_data_ptr<T>(),
          .k = call.k.template const_data_ptr<T>(),
          .v = call.v.template const_data_ptr<T>(),
          .gates = gates};
}

// The inputs of a pass; g is the g of the forward.
template <typename T, typename CT>
cpu::Inputs<T, CT> inputs_of(const Call& call, const Tensor& g) {
  auto in = inputs_of<T, CT>(call, cpu::Activations<CT>{.use_gate = call.use_gate,
                                                        .use_beta_sigmoid = call.use_beta_sigmoid,
                                                        .beta_factor = CT(call.allow_neg_eigval ? 2 : 1),
                                                        .g = floats_of(g),
                                                        .beta = floats_of(call.beta),
                                                        .A_log = floats_of(call.A_log),
                                                        .dt_bias = floats_of(call.dt_bias)});
  in.state_v_first = call.state_v_first;
  in.initial_state = call.initial_state ? call.initial_state->template const_data_ptr<CT>() : nullptr;
  return in;
}

// The inputs of begin. Its states are V-first: V rows of Z, then K rows of M. v has zeros for M.
template <typename T, typename CT>
cpu::Inputs<T, CT> inputs_of_maps(const Call& call) {
  cpu::Inputs<T, CT> in = inputs_of<T, CT>(call, call.g);
  in.V += call.K;
  in.state_v_first = true;
  return in;
}

// Zeroes rows [first, end of tensor) of a contiguous tensor that has `rows` rows.
template <typename T>
void zero_from(T* data, int64_t first, int64_t rows, int64_t row_size) {
  std::fill(data + first * row_size, data + rows * row_size, T(0));
}

// Calls f.operator()<T, CT>() with the storage type of q and the compute type.
template <typename F>
void with_types(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return f.template operator()<c10::BFloat16, float>();
    case ScalarType::Half:
      return f.template operator()<c10::Half, float>();
    case ScalarType::Float:
      return f.template operator()<float, float>();
    default:
      return f.template operator()<double, double>();
  }
}

}  // namespace flash_qla
