#include "offsets.h"

#include <cstdlib>
#include <string_view>

#include "checks.h"

namespace flash_qla {

namespace {

template <typename Offset>
std::vector<int64_t> checked(const Problem& p, const Offset* data) {
  std::vector<int64_t> offsets(data, data + p.N + 1);
  check(offsets[0] == 0, p.op, "cu_seqlens[0] is ", offsets[0], ", expected 0");
  for (int64_t n = 0; n < p.N; ++n) {
    check(offsets[n] <= offsets[n + 1], p.op, "cu_seqlens[", n + 1, "] is ", offsets[n + 1],
          ", expected at least cu_seqlens[", n, "] = ", offsets[n]);
  }
  check(offsets[p.N] <= p.T, p.op, "cu_seqlens[", p.N, "] is ", offsets[p.N], ", expected at most T = ", p.T);
  return offsets;
}

}  // namespace

std::vector<int64_t> checked_offsets(const Problem& problem, const Tensor& cu_seqlens) {
  return cu_seqlens.scalar_type() == ScalarType::Int ? checked(problem, cu_seqlens.const_data_ptr<int32_t>())
                                                     : checked(problem, cu_seqlens.const_data_ptr<int64_t>());
}

bool offsets_are_checked() {
  static const bool checked = [] {
    const char* value = std::getenv("FLASH_QLA_CHECK");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return checked;
}

}  // namespace flash_qla
