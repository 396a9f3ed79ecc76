#include "passes.h"

#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <array>
#include <utility>

#include "chunks.h"

namespace flash_qla {

namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;

constexpr std::array<int64_t, 1> kNoElements = {0};  // the shape of an output that was not asked for

// Allocates outputs of a call.
struct Allocator {
  const Call& call;

  Tensor operator()(ScalarType dtype, IntHeaderOnlyArrayRef shape) const {
    return new_empty(call.op, call.q, shape, dtype);
  }
  Tensor if_requested(bool requested, ScalarType dtype, IntHeaderOnlyArrayRef shape) const {
    return (*this)(dtype, requested ? shape : IntHeaderOnlyArrayRef(kNoElements));
  }
};

// dq, dk and dv.
void allocate_token_gradients(const BackwardCall& c, BackwardOutputs& out) {
  const Allocator empty{c};
  if (c.packed) {
    out.dmixed_qkv = empty(c.dtype, {c.B, c.T, 2 * c.H_k * c.K + c.H_v * c.V});
    TokenParts parts = split_tokens(out.dmixed_qkv, c.H_k, c.K, c.H_v, c.V);
    out.dq = std::move(parts.q);
    out.dk = std::move(parts.k);
    out.dv = std::move(parts.v);
  } else {
    out.dq = empty(c.dtype, {c.B, c.T, c.H_k, c.K});
    out.dk = empty(c.dtype, {c.B, c.T, c.H_k, c.K});
    out.dv = empty(c.dtype, {c.B, c.T, c.H_v, c.V});
  }
}

}  // namespace

std::array<int64_t, 5> h_shape(const Call& c) { return {c.B, most_chunks(1, c.T, c.N, c.varlen), c.H_v, c.V, c.K}; }

ForwardOutputs allocate_forward(const Call& c) {
  const Allocator empty{c};
  return {
      .g_cumsum = c.output_A ? empty(c.compute_dtype, {c.B, c.T, c.H_v}) : undefined_tensor(),
      .A = c.output_A ? empty(c.dtype, {c.B, c.T, c.H_v, kChunk}) : undefined_tensor(),
      .o = empty(c.dtype, {c.B, c.T, c.H_v, c.V}),
      .h = c.output_A ? empty.if_requested(c.output_h, c.dtype, h_shape(c)) : undefined_tensor(),
      .final_state = allocate_final_state(c),
  };
}

Tensor allocate_final_state(const Call& c) {
  return Allocator{c}.if_requested(c.output_final_state, c.compute_dtype, c.state_shape());
}

BackwardOutputs allocate_backward(const BackwardCall& c) {
  const Allocator empty{c};
  BackwardOutputs out = {
      .db = empty(c.beta_dtype, {c.B, c.T, c.H_v}),
      .dg = empty(c.use_gate ? c.g_raw->scalar_type() : c.compute_dtype, {c.B, c.T, c.H_v}),
  };
  allocate_token_gradients(c, out);
  allocate_sums(c, out);
  return out;
}

void allocate_sums(const BackwardCall& c, BackwardOutputs& out) {
  const Allocator empty{c};
  out.dh0 = empty.if_requested(c.initial_state.has_value(), c.compute_dtype, c.state_shape());
  out.dA_log = empty.if_requested(c.A_log.has_value(), c.compute_dtype, {c.H_v});
  out.ddt_bias = empty.if_requested(c.dt_bias.has_value(), c.compute_dtype, {c.H_v});
}

Tensor h_as_returned(const Call& call, Tensor h) {
  if (!call.output_h || call.state_v_first) {
    return h;
  }
  const auto shape = h.sizes(), strides = h.strides();
  const std::array sizes = {shape[0], shape[1], shape[2], shape[4], shape[3]};
  const std::array steps = {strides[0], strides[1], strides[2], strides[4], strides[3]};
  return view(h, sizes, steps);
}

Tensor final_state_as_returned(const Call& call, Tensor final_state) {
  if (call.state_dtype) {
    make_contiguous(call.op, final_state, *call.state_dtype);
  }
  return final_state;
}

}  // namespace flash_qla
