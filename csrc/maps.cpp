#include "maps.h"

#include "tensors.h"

namespace flash_qla {

Tensor map_of_nothing(const Call& call, const std::optional<Tensor>& state) {
  const int64_t B = call.B, H_v = call.H_v, V = call.V, K = call.K, size = (V + K) * K;
  Tensor map = new_empty(call.op, call.q, {B, H_v, V + K, K}, call.compute_dtype);
  zero(map);
  fill(view(map, {B, H_v, K}, {H_v * size, size, K + 1}, V * K), 1);
  if (state) {
    Tensor rows = view(map, {B, H_v, V, K}, {H_v * size, size, K, 1});
    copy(rows, *state);
  }
  return map;
}

}  // namespace flash_qla
