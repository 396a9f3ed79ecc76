#include "prefill.h"

#include <utility>

#include "checks.h"
#include "chunks.h"
#include "contents.h"
#include "output.h"
#include "passes.h"
#include "pool.h"
#include "tensors.h"

namespace flash_qla {

namespace {

void check_checkpoints(const PrefillCall& call) {
  check(call.checkpoint_every >= 0, call.op, "checkpoint_every is ", call.checkpoint_every, ", expected at least 0");
  const bool some = call.checkpoint_every > 0;
  const int given = call.checkpoint_indices.has_value() + call.checkpoints.has_value();
  check(some || given == 0, call.op,
        "checkpoint_indices or checkpoints is a tensor, expected None without checkpoint_every");
  check(!some || given == 1, call.op, "checkpoint_every is ", call.checkpoint_every, " with ", given,
        " of checkpoint_indices and checkpoints, expected one of them");
  if (call.checkpoint_indices) {
    check_device(call.op, "checkpoint_indices", *call.checkpoint_indices, call.q);
    check_table(call.op, "checkpoint_indices", *call.checkpoint_indices, call.N, 2, "[N, blocks]");
  }
  if (call.checkpoints) {
    check_device(call.op, "checkpoints", *call.checkpoints, call.q);
    check_states(call.op, "checkpoints", *call.checkpoints, call.H_v, call.V, call.K, 4, "[total, H_v, V, K]");
  }
}

void check_h(const PrefillCall& call, const Tensor& h) {
  check_device(call.op, "h", h, call.q);
  check_same_dtype(call.op, "h", h, call.q);
  check_shape(call.op, "h", h, h_shape(call), "[B, chunks, H_v, V, K]");
  if (!h.is_contiguous()) [[unlikely]] {
    fail(call.op, "h has strides ", shape_string(h.strides()), ", expected contiguous memory");
  }
  check(!h.is_cuda() || is_aligned(h), call.op, "h begins at no multiple of 16 bytes");
  check(call.checkpoint_every % kChunk == 0, call.op, "h is a tensor, expected None with checkpoint_every ",
        call.checkpoint_every, ", no multiple of ", kChunk);
}

}  // namespace

PrefillCall make_prefill_call(const char* op, Arguments arguments, PoolArguments pool) {
  arguments.state_v_first = true;
  PrefillCall call{make_record(op, std::move(arguments)), std::move(pool)};
  check_device(op, "state_pool", call.state_pool, call.q);
  check_states(op, "state_pool", call.state_pool, call.H_v, call.V, call.K, 4, "[slots, H_v, V, K]");
  check_device(op, "state_indices", call.state_indices, call.q);
  check_table(op, "state_indices", call.state_indices, call.N, 1, "[N]");
  if (call.initial_state_indices) {
    check_device(op, "initial_state_indices", *call.initial_state_indices, call.q);
    check_table(op, "initial_state_indices", *call.initial_state_indices, call.N, 1, "[N]");
  }
  if (call.has_initial_state) {
    check_device(op, "has_initial_state", *call.has_initial_state, call.q);
    check_flags(op, "has_initial_state", *call.has_initial_state, call.N);
  }
  check_checkpoints(call);
  if (call.out) {
    check_out(call, *call.out, call.q);
  }
  if (call.h) {
    check_h(call, *call.h);
    call.output_h = true;
  }
  check_contents(call);
  return call;
}

}  // namespace flash_qla
