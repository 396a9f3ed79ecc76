#include "cpu/sequences.h"

#include <atomic>

#include "environment.h"
#include "offsets.h"
#include "warnings.h"

namespace flash_qla {

namespace {

std::atomic<bool>& slow_path_was_said() {
  static std::atomic<bool> said = is_switched_on("FLASH_QLA_QUIET");
  return said;
}

}  // namespace

bool exchange_slow_path_was_said(bool said) { return slow_path_was_said().exchange(said); }

void say_once_that_this_is_slow(const char* op) {
  if (!exchange_slow_path_was_said(true)) {
    warn(
        op,
        "flash_qla: the tensors are on the CPU, so the plain recurrence runs, which is the slow path. The fast kernels "
        "need a GPU. This is said once per process; FLASH_QLA_QUIET=1 in the environment silences it.");
  }
}

std::vector<cpu::Sequence> list_sequences(const Call& call) {
  std::vector<cpu::Sequence> sequences(call.N);
  if (call.varlen) {
    const std::vector<int64_t> offsets = checked_offsets(call.op, *call.cu_seqlens, call.N, call.T);
    int64_t chunk = 0;
    for (int64_t n = 0; n < call.N; ++n) {
      sequences[n] = {.index = n, .begin = offsets[n], .end = offsets[n + 1], .first_chunk = chunk};
      chunk += chunk_count(offsets[n + 1] - offsets[n]);
    }
  } else {
    for (int64_t n = 0; n < call.N; ++n) {
      sequences[n] = {.index = n, .begin = n * call.T, .end = (n + 1) * call.T, .first_chunk = n * chunk_count(call.T)};
    }
  }
  return sequences;
}

int64_t covered_tokens(const std::vector<cpu::Sequence>& sequences) {
  return sequences.empty() ? 0 : sequences.back().end;
}

}  // namespace flash_qla
