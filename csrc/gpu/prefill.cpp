// The prefill on a GPU: the forward. Its kernels read and write the states in the pool.
#include "prefill.h"

#include <algorithm>
#include <limits>

#include "checks.h"
#include "chunks.h"
#include "contents.h"
#include "gpu/arguments.h"
#include "gpu/head_dims.h"
#include "gpu/runtime/stream.h"
#include "gpu/states.h"
#include "output.h"
#include "passes.h"
#include "tensors.h"

namespace flash_qla {

namespace {

void check_supported(const PrefillCall& call) {
  check_states_on_gpu(call.op, "state_pool", call.state_pool);
  check(call.state_pool.size(0) <= std::numeric_limits<int32_t>::max(), call.op, "state_pool has ",
        call.state_pool.size(0), " slots, expected at most 2^31 - 1 on a GPU");
  if (call.checkpoints) {
    check_states_on_gpu(call.op, "checkpoints", *call.checkpoints);
  }
  check(call.checkpoint_every <= std::numeric_limits<int32_t>::max(), call.op, "checkpoint_every is ",
        call.checkpoint_every, ", expected at most 2^31 - 1 on a GPU");
  if (contents_are_checked()) {
    check_prefill_tables(call);
  }
}

kernels::Slots slots_of(const PrefillCall& call) {
  return {.state_indices = index_table(call.state_indices),
          .null_index = call.null_index,
          .slots = call.state_pool.size(0)};
}

// The states of the pool. `initial_state` and `final_state` are slots of the same memory.
States states_of(const PrefillCall& call) {
  const auto& flags = call.has_initial_state;
  States states = states_in_order(call,
                                  {.initial_state = call.state_pool.const_data_ptr(),
                                   .final_state = call.state_pool.mutable_data_ptr(),
                                   .state_stride_v = call.K,
                                   .state_stride_k = 1,
                                   .slot_stride = call.state_pool.stride(0),
                                   .state_dtype = dtype_code(call.state_pool)},
                                  /*has_initial=*/true, /*has_final=*/true);
  states.slots = slots_of(call);
  states.presence = {.on_pool = true,
                     .first_states = flags ? FirstStates::kFlagged : FirstStates::kAll,
                     .has_state = data(flags),
                     .has_state_stride = flags ? flags->stride(0) : 1,
                     .first_indices = index_table(call.initial_state_indices),
                     .has_final = true};
  if (call.checkpoint_every > 0) {
    const Tensor& kept = call.checkpoints ? *call.checkpoints : call.state_pool;
    // If checkpoint_every exceeds all sequences, there are no checkpoints. A whole number of chunks then cuts no chunk.
    const int64_t checkpoint_every = std::min(call.checkpoint_every, kChunk * (chunk_count(call.T) + 1));
    states.kept = {.kept_states = kept.mutable_data_ptr(),
                   .kept_slot_stride = kept.stride(0),
                   .kept_dtype = dtype_code(kept),
                   .checkpoint_every = checkpoint_every};
    states.kept_in = {.checkpoint_indices = index_table(call.checkpoint_indices), .checkpoint_states = kept.size(0)};
    states.rounds = call.batch_invariant && !has_dtype(kept, ScalarType::Float);
  }
  return states;
}

// Gives a call without tokens one token of no sequence: its states are still read and written.
void add_padding(PrefillCall& call) {
  const auto one = [&](Tensor& tensor, int64_t heads, int64_t channels) {
    tensor = new_empty(call.op, call.q, {1, 1, heads, channels}, tensor.scalar_type());
  };
  one(call.k, call.H_k, call.K);
  one(call.v, call.H_v, call.V);
  one(call.g, call.H_v, 1);
  one(call.beta, call.H_v, 1);
  one(call.q, call.H_k, call.K);
  call.cu_seqlens = new_empty(call.op, call.q, {call.N + 1}, ScalarType::Int);
  zero(*call.cu_seqlens);
  call.B = call.T = 1;
  call.varlen = true;
  call.output_h = false;
}

}  // namespace

Tensor prefill_cuda(PrefillCall call) {
  check_supported(call);
  const DeviceGuard guard = make_current(call.q);
  if (call.checkpoint_indices && call.checkpoint_indices->stride(1) != 1) {
    make_contiguous(call.op, *call.checkpoint_indices, call.checkpoint_indices->scalar_type());
  }
  ForwardOutputs out;
  out.o = allocate_output(call, call.out, call.q);
  if (call.h) {
    out.h = memory_of(*call.h);
  }
  if (call.is_empty() && call.h) {
    zero(out.h);
  }
  if (call.N == 0) {
    zero(out.o);
  } else if (call.tokens() == 0) {
    add_padding(call);
    run_forward(call, states_of(call), allocate_forward(call));
  } else {
    run_forward(call, states_of(call), out);
  }
  return output_as_returned(call, call.out, std::move(out.o));
}

}  // namespace flash_qla
