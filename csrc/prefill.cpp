#include "prefill.h"

#include <utility>

#include "checks.h"
#include "chunks.h"
#include "contents.h"
#include "output.h"
#include "passes.h"
#include "tensors.h"

namespace flash_qla {

namespace {

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

// Checks what a call on a pool has besides the forward's arguments.
void check_pool(const PrefillCall& call) {
  check_device(call.op, "state_pool", call.state_pool, call.q);
  check_states(call.op, "state_pool", call.state_pool, call.H_v, call.V, call.K, 4, "[slots, H_v, V, K]");
  check_tables(call.op, call, call.N, call.q);
  if (call.checkpoints) {
    check_device(call.op, "checkpoints", *call.checkpoints, call.q);
    check_states(call.op, "checkpoints", *call.checkpoints, call.H_v, call.V, call.K, 4, "[total, H_v, V, K]");
  }
  if (call.out) {
    check_out(call, *call.out, call.q);
  }
  if (call.h) {
    check_h(call, *call.h);
  }
}

}  // namespace

PrefillCall make_prefill_call(const char* op, Arguments arguments, PoolArguments pool) {
  arguments.state_v_first = true;
  PrefillCall call{make_record(op, std::move(arguments)), std::move(pool)};
  check_pool(call);
  call.output_h = call.h.has_value();
  check_contents(call);
  return call;
}

void check_prefill_call(const char* op, Arguments arguments, PoolArguments pool) {
  arguments.state_v_first = true;
  check_pool({check_call(op, std::move(arguments)), std::move(pool)});
}

}  // namespace flash_qla
