// The maps on the GPU: both passes as they are, over values that have K columns of zeros behind them. What else the
// passes make is thrown away.
#include "maps.h"

#include <utility>

#include "checks.h"
#include "layout.h"
#include "passes.h"
#include "tensors.h"

namespace flash_qla {

namespace {

void check_rows(const Call& call) {
  check(call.V + call.K <= kMostValueDim, call.op, "q and v have head dimensions K = ", call.K, " and V = ", call.V,
        ", expected at most ", kMostValueDim, " together: longer maps are not supported on the GPU yet");
}

// [B, T, H_v, V + K]: the columns of x, or zeros, and then zeros.
Tensor widened(const Call& call, const Tensor* x) {
  const int64_t B = call.B, T = call.T, H_v = call.H_v, width = call.V + call.K;
  Tensor wide = new_empty(call.op, call.q, {B, T, H_v, width}, call.dtype);
  zero(wide);
  if (x != nullptr) {
    Tensor columns = view(wide, {B, T, H_v, call.V}, {T * H_v * width, H_v * width, width, 1});
    copy(columns, *x);
  }
  return wide;
}

}  // namespace

Tensor forward_map_cuda(const Call& call) {
  check_rows(call);
  Arguments wide = call;
  wide.v = widened(call, &call.v);
  wide.initial_state = map_of_nothing(call, call.initial_state);
  wide.output_final_state = true;
  return forward_cuda(make_call(call.op, std::move(wide))).final_state;
}

Tensor backward_map_cuda(const BackwardCall& call) {
  check_rows(call);
  Arguments wide = call;
  wide.v = widened(call, nullptr);
  // For the sake of its gradient: what the state itself is makes no difference.
  wide.initial_state = new_empty(call.op, call.q, {call.B, call.H_v, call.V + call.K, call.K}, call.compute_dtype);
  zero(*wide.initial_state);
  Gradients gradients{.has_A = false,
                      .grad_o = widened(call, &call.grad_o),
                      .grad_final_state = map_of_nothing(call, call.grad_final_state),
                      .g_raw = std::nullopt};
  return backward_cuda(make_backward_call(call.op, std::move(wide), std::move(gradients))).dh0;
}

}  // namespace flash_qla
