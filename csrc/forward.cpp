#include "forward.h"

#include <torch/csrc/stable/ops.h>

#include <array>

#include "checks.h"

namespace flash_qla {

namespace {

constexpr std::array<int64_t, 1> kNoElements = {0};  // shape

// Asking first is cheaper: torch::stable::contiguous goes through the dispatcher.
void make_contiguous(Tensor& tensor) {
  if (!tensor.is_contiguous()) {
    tensor = torch::stable::contiguous(tensor);
  }
}

void convert(Tensor& tensor, ScalarType dtype) {
  if (!has_dtype(tensor, dtype)) {
    tensor = torch::stable::to(tensor, dtype);
  }
  make_contiguous(tensor);
}

}  // namespace

// The C function behind torch::stable::new_empty of older headers. Today's boxes its arguments and looks the operator
// up by name, which takes three times as long.
Tensor new_empty(const Tensor& like, IntHeaderOnlyArrayRef shape, ScalarType dtype) {
  int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_aten_new_empty(like.get(), shape.data(), static_cast<int64_t>(shape.size()),
                                                          &code, /*layout=*/nullptr, /*device=*/nullptr,
                                                          /*device_index=*/0, /*pin_memory=*/nullptr, &made));
  return Tensor(made);
}

Tensor contiguous_as(const Tensor& tensor, ScalarType dtype) {
  Tensor converted = tensor;
  convert(converted, dtype);
  return converted;
}

std::vector<int64_t> state_shape(const Problem& p, bool state_v_first) {
  return state_v_first ? std::vector{p.N, p.H_v, p.V, p.K} : std::vector{p.N, p.H_v, p.K, p.V};
}

ForwardArgs canonicalize(const Problem& problem, ForwardArgs args) {
  for (Tensor* tensor : {&args.q, &args.k, &args.v}) {
    make_contiguous(*tensor);  // check_forward has seen that k and v have the dtype of q
  }
  for (Tensor* tensor : {&args.g, &args.beta}) {
    convert(*tensor, problem.compute_dtype);
  }
  if (args.initial_state) {
    convert(*args.initial_state, problem.compute_dtype);
  }
  if (args.cu_seqlens) {
    make_contiguous(*args.cu_seqlens);
  }
  return args;
}

ForwardOutputs allocate_forward(const Problem& p, const ForwardArgs& args) {
  const auto empty = [&](ScalarType dtype, IntHeaderOnlyArrayRef shape) { return new_empty(args.q, shape, dtype); };
  const auto empty_if = [&](bool wanted, ScalarType dtype, IntHeaderOnlyArrayRef shape) {
    return empty(dtype, wanted ? shape : IntHeaderOnlyArrayRef(kNoElements));
  };
  const bool low_level = args.output_low_level;
  const int64_t rows = p.varlen ? 1 : p.B;
  const int64_t chunks_per_row = p.varlen ? p.NT : (p.T + kChunk - 1) / kChunk;
  return {
      .g_cumsum = low_level ? empty(p.compute_dtype, {p.B, p.T, p.H_v}) : Tensor(),
      .A = low_level ? empty(p.dtype, {p.B, p.T, p.H_v, kChunk}) : Tensor(),
      .o = empty(p.dtype, {p.B, p.T, p.H_v, p.V}),
      .h = low_level ? empty_if(args.output_h, p.dtype, {rows, chunks_per_row, p.H_v, p.V, p.K}) : Tensor(),
      .final_state = empty_if(args.output_final_state, p.compute_dtype, state_shape(p, args.state_v_first)),
  };
}

// Not torch::stable::transpose, which goes through the dispatcher: autograd would keep h as a view of a tensor that
// nobody has.
Tensor h_as_returned(const ForwardArgs& args, const Tensor& h) {
  if (!args.output_h || args.state_v_first) {
    return h;
  }
  const auto shape = h.sizes(), strides = h.strides();
  const std::array sizes = {shape[0], shape[1], shape[2], shape[4], shape[3]};
  const std::array steps = {strides[0], strides[1], strides[2], strides[4], strides[3]};
  AtenTensorHandle transposed;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(h.get(), sizes.size(), sizes.data(), steps.data(),
                                                               /*offset_increment=*/0, &transposed));
  return Tensor(transposed);
}

Tensor final_state_as_returned(const ForwardArgs& args, Tensor final_state) {
  if (args.state_dtype) {
    convert(final_state, *args.state_dtype);
  }
  return final_state;
}

}  // namespace flash_qla
