// A call of prefill_gated_delta_rule: the forward on states in a pool.
#pragma once

#include "call.h"
#include "pool.h"

namespace flash_qla {

// The call's initial_state and final state are unused. States are V-first.
struct PrefillCall : Call, PoolArguments {};

// Throws like make_call.
PrefillCall make_prefill_call(const char* op, Arguments arguments, PoolArguments pool);
// Only the checks of make_prefill_call that read sizes, dtypes and devices.
void check_prefill_call(const char* op, Arguments arguments, PoolArguments pool);

// Throws if a table has an index out of range, or names a slot that is written twice. On a GPU this synchronizes.
void check_prefill_tables(const PrefillCall& call);

// Each returns the op's result.
Tensor prefill_cpu(PrefillCall call);
Tensor prefill_cuda(PrefillCall call);

}  // namespace flash_qla
