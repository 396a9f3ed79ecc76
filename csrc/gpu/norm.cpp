// The gated RMS norm on a GPU: which rows there are, how kernels reach them, and the launches.
#include "norm.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "checks.h"
#include "chunks.h"
#include "gpu/arguments.h"
#include "gpu/runtime/device.h"
#include "gpu/runtime/stream.h"
#include "kernels.h"

namespace flash_qla {

namespace {

constexpr int64_t kMostLanes = 32;
constexpr size_t kRowDims = 3;  // of the kernels: batch, tokens, heads

void check_supported(const NormCall& call) {
  check(call.dtype != ScalarType::Double, call.op,
        "o has dtype float64, expected bfloat16, float16 or float32 on a GPU (float64 runs on the CPU)");
  check(call.V <= kMostValueDim, call.op, "o has ", call.V, " channels, expected at most ", kMostValueDim, " on a GPU");
  check_gpu(call.op, call.o);
}

// The dimensions of tensors before their channels. Those that all of the tensors can step through as one are one.
struct RowDims {
  std::vector<int64_t> sizes;
  std::vector<std::vector<int64_t>> strides;  // of each tensor

  explicit RowDims(const std::vector<Tensor*>& tensors) : strides(tensors.size()) {
    const auto is_one = [&](int64_t dim) {  // with the dimension before
      for (size_t i = 0; i < tensors.size(); ++i) {
        if (strides[i].back() != tensors[i]->size(dim) * tensors[i]->stride(dim)) {
          return false;
        }
      }
      return true;
    };
    for (int64_t dim = 0; dim + 1 < tensors[0]->dim(); ++dim) {
      const int64_t size = tensors[0]->size(dim);
      if (size == 1) {
        continue;
      }
      if (sizes.empty() || !is_one(dim)) {
        sizes.push_back(1);
        std::ranges::for_each(strides, [](auto& x) { x.push_back(0); });
      }
      sizes.back() *= size;
      for (size_t i = 0; i < tensors.size(); ++i) {
        strides[i].back() = tensors[i]->stride(dim);
      }
    }
    const auto pad = [](std::vector<int64_t>& x, int64_t value) {
      x.insert(x.begin(), kRowDims - std::min(kRowDims, x.size()), value);
    };
    pad(sizes, 1);
    std::ranges::for_each(strides, [&](auto& x) { pad(x, 0); });
  }
};

// A pass: the instance, and the tensors that it reads.
class Norm {
 public:
  Norm(const NormCall& call, const std::vector<Tensor*>& tensors)
      : call_(call),
        vectors_(call.reads_pieces()),
        channels_(vectors_ && call.V <= kFewChannels * kMostLanes ? kFewChannels : kManyChannels),
        dims_(rows_of(tensors)) {}

  // The fields of an instance's parameters.
  template <typename Params>
  Params params() const {
    return {.dtype = call_.dtype == ScalarType::Float ? kernels::Dtype::kFloat32 : kernels::Dtype::kBits16,
            .channels = channels_,
            .vectors = vectors_};
  }

  int64_t lanes() const { return std::bit_ceil(static_cast<uint64_t>(ceil_div(call_.V, channels_))); }

  // As many CTAs as the GPU runs at a time, or fewer if they have all rows at once.
  int64_t ctas(const auto& facts) const {
    return std::min<int64_t>(ceil_div(call_.rows, facts.threads / lanes()), facts.ctas * gpu_of(call_.o).card.sm_count);
  }

  kernels::NormInputs inputs(int64_t ctas) const {
    const auto &o = dims_.strides[0], &z = dims_.strides[1];
    return {.o = call_.o.const_data_ptr(),
            .o_batch = o[0],
            .o_token = o[1],
            .o_head = o[2],
            .z = call_.z.const_data_ptr(),
            .z_batch = z[0],
            .z_token = z[1],
            .z_head = z[2],
            .weight = call_.weight.const_data_ptr(),
            .dtype = dtype_code(call_.o),
            .weight_dtype = dtype_code(call_.weight),
            .batch = dims_.sizes[0],
            .tokens = dims_.sizes[1],
            .heads = dims_.sizes[2],
            .V = call_.V,
            .ctas = ctas,
            .lanes = lanes(),
            .eps = static_cast<float>(call_.eps),
            .is_sigmoid = call_.is_sigmoid(),
            .norm_before_gate = call_.norm_before_gate};
  }

  const std::vector<int64_t>& strides(size_t tensor) const { return dims_.strides[tensor]; }

 private:
  static constexpr int64_t kFewChannels = 8, kManyChannels = 16;  // per thread; see kernels_tl/instances.py

  RowDims rows_of(const std::vector<Tensor*>& tensors) const {
    RowDims dims(tensors);
    if (dims.sizes.size() <= kRowDims) {
      return dims;
    }
    for (Tensor* x : tensors) {
      make_aligned(call_.op, *x, call_.dtype);
    }
    return RowDims(tensors);
  }

  const NormCall& call_;
  bool vectors_;
  int64_t channels_;
  RowDims dims_;
};

}  // namespace

Tensor gated_rms_norm_cuda(NormCall call) {
  check_supported(call);
  const DeviceGuard guard = make_current(call.o);
  Tensor y = allocate_y(call);
  if (call.rows == 0) {
    return y;
  }
  const Norm norm(call, {&call.o, &call.z});
  const auto params = norm.params<kernels::GatedRmsNormParams>();
  kernels::gated_rms_norm({.inputs = norm.inputs(norm.ctas(kernels::facts_of(params))), .y = y.mutable_data_ptr()},
                          params, current_stream(call.o));
  return y;
}

NormGradients gated_rms_norm_backward_cuda(NormCall call) {
  check_supported(call);
  const DeviceGuard guard = make_current(call.o);
  make_readable(call, call.grad_y);
  NormGradients out = allocate_gradients(call);
  if (call.rows == 0) {
    zero(out.dweight);
    return out;
  }
  const Norm norm(call, {&call.o, &call.z, &call.grad_y});
  const auto params = norm.params<kernels::GatedRmsNormBackwardParams>();
  const int64_t ctas = norm.ctas(kernels::facts_of(params));
  const Tensor terms = new_empty(call.op, call.o, {ctas, call.V}, ScalarType::Float);
  const auto& dy = norm.strides(2);
  const cudaStream_t stream = current_stream(call.o);
  kernels::gated_rms_norm_backward({.inputs = norm.inputs(ctas),
                                    .dy = call.grad_y.const_data_ptr(),
                                    .grad_o = out.grad_o.mutable_data_ptr(),
                                    .dz = out.dz.mutable_data_ptr(),
                                    .dweight = terms.mutable_data_ptr(),
                                    .dy_batch = dy[0],
                                    .dy_token = dy[1],
                                    .dy_head = dy[2]},
                                   params, stream);
  kernels::sum_rows(
      {.terms = terms.const_data_ptr(), .sums = out.dweight.mutable_data_ptr(), .rows = ctas, .columns = call.V}, {},
      stream);
  return out;
}

}  // namespace flash_qla
