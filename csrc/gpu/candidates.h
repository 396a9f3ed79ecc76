// The paths of a call that the host considers, in their order.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/dispatch.h"
#include "gpu/override.h"
#include "layout.h"

namespace flash_qla {

// All paths that can serve the call, of those that `forced` leaves if it leaves any: one or more.
std::vector<ForwardPath> paths_of(const ForwardShape& shape, const Override& forced);
std::vector<BackwardPath> paths_of(const BackwardShape& shape, const Override& forced);

// Whether fused_forward has an instance for the call: one that follows chunk_plan, or one that does without.
bool has_fused_kernel(const ForwardShape& shape, bool planned = true);

// Whether the CTAs of fused_forward find their first segments by themselves while chunk_plan runs (plan/plan.cuh).
bool begins_early(const ForwardShape& shape);

// Chunks of a sequence on average, rounded up.
int64_t average_chunks(const ForwardShape& shape);

// Chunks of the longest sequence; of an average one, rounded up, if only the device knows the lengths.
int64_t longest_chunks(const ForwardShape& shape);

// Whether only cu_seqlens have the lengths. The device then cuts none if all are short.
inline bool device_knows_more(const Shape& shape) { return shape.varlen && shape.N > 1 && shape.max_seqlen == 0; }

// Whether the kernels of the backward do the call's l2norm themselves, see BackwardDispatch.
bool normalizes_inside(const BackwardShape& shape);

// Dispatch::heads_per_cta: the most heads that still leave a CTA for each SM.
int64_t heads_per_cta(const Shape& shape, int64_t chunk_slots);

// Dispatch::early_ctas: the CTAs that the SMs take first.
int64_t early_ctas(const Shape& shape);

}  // namespace flash_qla
