#include "offsets.h"

#include "checks.h"
#include "tensors.h"

namespace flash_qla {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

template <typename Offset>
std::vector<int64_t> checked(const char* op, const Offset* data, int64_t N, int64_t T) {
  std::vector<int64_t> offsets(data, data + N + 1);
  check(offsets[0] == 0, op, "cu_seqlens[0] is ", offsets[0], ", expected 0");
  for (int64_t n = 0; n < N; ++n) {
    check(offsets[n] <= offsets[n + 1], op, "cu_seqlens[", n + 1, "] is ", offsets[n + 1],
          ", expected at least cu_seqlens[", n, "] = ", offsets[n]);
  }
  check(offsets[N] <= T, op, "cu_seqlens[", N, "] is ", offsets[N], ", expected at most T = ", T);
  return offsets;
}

}  // namespace

std::vector<int64_t> checked_offsets(const char* op, const Tensor& cu_seqlens, int64_t N, int64_t T) {
  const Tensor offsets = cu_seqlens.is_cpu() ? cu_seqlens : to_cpu(cu_seqlens);
  return has_dtype(offsets, ScalarType::Long) ? checked(op, offsets.const_data_ptr<int64_t>(), N, T)
                                              : checked(op, offsets.const_data_ptr<int32_t>(), N, T);
}

}  // namespace flash_qla
