#include "offsets.h"

#include "checks.h"

namespace flash_qla {

namespace {

template <typename Offset>
std::vector<int64_t> checked(const Call& call, const Offset* data) {
  std::vector<int64_t> offsets(data, data + call.N + 1);
  check(offsets[0] == 0, call.op, "cu_seqlens[0] is ", offsets[0], ", expected 0");
  for (int64_t n = 0; n < call.N; ++n) {
    check(offsets[n] <= offsets[n + 1], call.op, "cu_seqlens[", n + 1, "] is ", offsets[n + 1],
          ", expected at least cu_seqlens[", n, "] = ", offsets[n]);
  }
  check(offsets[call.N] <= call.T, call.op, "cu_seqlens[", call.N, "] is ", offsets[call.N],
        ", expected at most T = ", call.T);
  return offsets;
}

}  // namespace

std::vector<int64_t> checked_offsets(const Call& call) {
  const Tensor& given = *call.cu_seqlens;
  const Tensor offsets = given.is_cpu() ? given : to_cpu(given);
  return has_dtype(offsets, ScalarType::Long) ? checked(call, offsets.const_data_ptr<int64_t>())
                                              : checked(call, offsets.const_data_ptr<int32_t>());
}

}  // namespace flash_qla
