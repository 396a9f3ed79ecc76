// Decoding on a Hopper GPU: one kernel.
#include "decode.h"

#include <cstdint>

#include "checks.h"
#include "chunks.h"
#include "contents.h"
#include "gpu/device.h"
#include "gpu/head_dims.h"
#include "gpu/launch.h"
#include "gpu/states.h"
#include "kernels.h"
#include "tensors.h"

namespace flash_qla {

namespace {

constexpr int64_t kPieceBytes = 16;  // of a state's row, or a query's or key's, that a lane takes at a time
constexpr int64_t kMostSequences = 65535;

int64_t bytes_of(const Tensor& tensor) { return tensor.element_size(); }

// Elements from one token to the next; the dimensions of batch and token are as good as one.
int64_t token_stride(const Tensor& tensor) { return tensor.size(1) == 1 ? tensor.stride(0) : tensor.stride(1); }

bool tokens_are_even(const Tensor& tensor) {
  return tensor.size(0) == 1 || tensor.size(1) == 1 || tensor.stride(0) == tensor.size(1) * tensor.stride(1);
}

// [B, T, heads, channels], copied unless the kernel reads it where it is.
void make_readable_rows(const char* op, Tensor& tensor) {
  const auto is_piece = [&](int64_t stride) { return stride * bytes_of(tensor) % kPieceBytes == 0; };
  const bool readable = tensor.stride(3) == 1 && tokens_are_even(tensor) && is_piece(token_stride(tensor)) &&
                        is_piece(tensor.stride(2)) && is_aligned(tensor);
  if (!readable) {
    make_aligned(op, tensor, tensor.scalar_type());
  }
}

// [B, T, H_v]
void make_readable_gates(const char* op, Tensor& tensor) {
  if (!(tensor.stride(2) == 1 && tokens_are_even(tensor))) {
    make_contiguous(op, tensor, tensor.scalar_type());
  }
}

void check_supported(const DecodeCall& call) {
  check_supported_on_gpu(call, call.q);
  check(call.N <= kMostSequences, call.op, "q has ", call.N, " sequences, expected at most ", kMostSequences,
        " on a GPU");
  // The kernel finds a head's part of a state with 32 bits, everything else with 64.
  const int64_t state_size = call.H_v * call.V * call.K;
  check(state_size <= INT32_MAX, call.op, "state_pool has states of ", state_size, " elements, expected at most ",
        INT32_MAX, " on a GPU");
  check_states_on_gpu(call.op, "state_pool", call.state_pool);
  if (call.intermediate_states) {
    check_same_dtype(call.op, "intermediate_states", *call.intermediate_states, call.state_pool);
    check_states_on_gpu(call.op, "intermediate_states", *call.intermediate_states);
  }
  if (contents_are_checked()) {
    check_decode_tables(call);
  }
}

// A table of indices as the kernel reads it. `kinds` gets its TableKind from `bit` on.
const void* table(const char* op, std::optional<Tensor>& tensor, int bit, int64_t& kinds) {
  if (!tensor) {
    return nullptr;
  }
  make_contiguous(op, *tensor, tensor->scalar_type());
  kinds |= table_kind(*tensor) << bit;
  return tensor->const_data_ptr();
}

int64_t columns(const std::optional<Tensor>& tensor) { return tensor && tensor->dim() > 1 ? tensor->size(1) : 1; }

constexpr int64_t kGroupRows = kDecodeWarps * kDecodeWarpRows;  // that a CTA's warps have at a time

bool has_fp32_states(const DecodeCall& call) { return has_dtype(call.state_pool, ScalarType::Float); }

using kernels::Path;  // the kernel that takes a call: DecodePath in kernels_tl/decode/decode.cuh

Path path_of(const DecodeCall& call) {
  if (call.T == 1 && !call.cu_seqlens) {
    return Path::kOneToken;
  }
  if (has_dtype(call.q, ScalarType::BFloat16) && has_dtype(call.state_pool, ScalarType::BFloat16)) {
    return Path::kTensorCores;
  }
  const bool last_state_only = !call.write_indices && !call.intermediate_states && !call.parents;
  return last_state_only && has_fp32_states(call) ? Path::kBlocks : Path::kRows;
}

// Of its kernel: CTAs that an SM holds, whether a CTA may have several groups of value rows.
struct PathTraits {
  int64_t ctas;
  bool has_groups;
};

PathTraits traits_of(const DecodeCall& call) {
  switch (path_of(call)) {
    case Path::kOneToken:
      return {has_fp32_states(call) ? kDecodeCtasRows : kDecodeCtasOne16, false};
    case Path::kRows:
      return {kDecodeCtasRows, false};
    case Path::kBlocks:
      return {kDecodeCtasBlocks, true};
    default:
      return {kDecodeCtasMma, true};
  }
}

int64_t ctas_at_a_time(const DecodeCall& call) { return gpu_of(call.q).card.sm_count * traits_of(call).ctas; }

// How value rows are given to CTAs: of the first `whole` sequences a CTA has `groups` groups of value rows, of the
// others two CTAs share these. `places` are what the grid has for sequences, two for each of the others.
struct Shares {
  int64_t groups, whole, places;
};

// Of a sequence, of so many groups each.
int64_t ctas_of(const DecodeCall& call, int64_t groups) { return call.H_v * ceil_div(call.V, groups * kGroupRows); }

// CTAs of more groups begin less often, smaller ones are spread more evenly: the choice is that with the least turns of
// the SMs, each as long as a group to begin and then a CTA's groups, half of that where no SM has a second CTA. What is
// left for the last turn is halved if that pays (benchmarks/notes/decode.md). Where tokens go through a state one by
// one CTAs are as small as they can be.
Shares shares_of(const DecodeCall& call) {
  if (!traits_of(call).has_groups) {
    return {1, call.N, call.N};
  }
  const int64_t sm_count = gpu_of(call.q).card.sm_count, at_a_time = ctas_at_a_time(call);
  const auto half_turns = [&](int64_t ctas) {
    return 0 < ctas && ctas <= sm_count ? 1 : 2 * ceil_div(ctas, at_a_time);
  };
  Shares best = {};
  int64_t least = INT64_MAX;
  const auto consider = [&](int64_t groups, int64_t whole) {
    const int64_t ctas = ctas_of(call, groups), rest = 2 * (call.N - whole);
    const int64_t cost = half_turns(whole * ctas) * (1 + groups) + half_turns(rest * ctas) * (1 + groups / 2);
    if (cost < least && whole + rest <= kMostSequences) {
      least = cost;
      best = {groups, whole, whole + rest};
    }
  };
  for (const bool all : {true, false}) {
    for (int64_t groups = all ? 1 : 2; groups * kGroupRows <= kDecodeTile; groups *= 2) {
      const int64_t ctas = ctas_of(call, groups), in_full_turns = call.N * ctas / at_a_time * at_a_time / ctas;
      consider(groups, all ? call.N : in_full_turns);
    }
  }
  return best;
}

// The first places, whose CTAs may be there before the grid ahead has ended, and then have their states brought to L2.
// Longer calls would take 2 % more with it (benchmarks/notes/decode.md).
int64_t early_places(const DecodeCall& call, const Shares& shares) {
  const int64_t turns = has_fp32_states(call) && !traits_of(call).has_groups ? 1 : 2;
  const int64_t ctas = ctas_of(call, shares.groups), at_a_time = ctas_at_a_time(call);
  return shares.places * ctas <= turns * at_a_time ? ceil_div(at_a_time, ctas) : 0;
}

int64_t activations_of(const DecodeCall& call) {
  int64_t code = Activation::kGate | dtype_code(call.a) << Activation::kG |
                 dtype_code(call.A_log) << Activation::kALog | Activation::kSigmoid |
                 dtype_code(call.b) << Activation::kBeta;
  if (call.dt_bias) {
    code |= Activation::kBias | dtype_code(*call.dt_bias) << Activation::kDtBias;
  }
  return code;
}

void launch(DecodeCall& call, const Tensor& o) {
  for (Tensor* tensor : {&call.q, &call.k, &call.v}) {
    make_readable_rows(call.op, *tensor);
  }
  for (Tensor* tensor : {&call.a, &call.b}) {
    make_readable_gates(call.op, *tensor);
  }
  make_contiguous(call.op, call.A_log, call.A_log.scalar_type());
  if (call.dt_bias) {
    make_contiguous(call.op, *call.dt_bias, call.dt_bias->scalar_type());
  }
  std::optional<Tensor> state_indices = call.state_indices;
  int64_t kinds = 0;
  const void* const offsets = table(call.op, call.cu_seqlens, DecodeTable::kOffsets, kinds);
  const void* const states = table(call.op, state_indices, DecodeTable::kStates, kinds);
  const void* const accepted = table(call.op, call.num_accepted_tokens, DecodeTable::kAccepted, kinds);
  const void* const writes = table(call.op, call.write_indices, DecodeTable::kWrites, kinds);
  const void* const state_rows = table(call.op, call.intermediate_indices, DecodeTable::kRows, kinds);
  const void* const parents = table(call.op, call.parents, DecodeTable::kParents, kinds);
  const Tensor* const kept = call.intermediate_states ? &*call.intermediate_states : nullptr;
  const Shares shares = shares_of(call);
  kernels::decode({.q = call.q.const_data_ptr(),
                   .k = call.k.const_data_ptr(),
                   .v = call.v.const_data_ptr(),
                   .gates = {.a = call.a.const_data_ptr(),
                             .b = call.b.const_data_ptr(),
                             .A_log = call.A_log.const_data_ptr(),
                             .dt_bias = data(call.dt_bias),
                             .activations = activations_of(call)},
                   .state_pool = call.state_pool.mutable_data_ptr(),
                   .kept_states = kept ? kept->mutable_data_ptr() : nullptr,
                   .o = o.mutable_data_ptr(),
                   .indices = {.offsets = offsets,
                               .state_indices = states,
                               .accepted = accepted,
                               .write_indices = writes,
                               .state_rows = state_rows,
                               .parents = parents,
                               .tables = kinds,
                               .state_columns = columns(state_indices),
                               .write_columns = columns(call.write_indices),
                               .parent_columns = columns(call.parents),
                               .null_index = call.null_index},
                   .length = call.T,
                   .update_state = call.writes_back(),
                   .group = call.group(),
                   .scale = static_cast<float>(*call.scale),
                   .normalize = call.use_qk_l2norm,
                   .shares = {.groups = shares.groups,
                              .whole = shares.whole,
                              .halvings = 1,
                              .places = shares.places,
                              .early = early_places(call, shares)},
                   .tokens = call.tokens(),
                   .H_k = call.H_k,
                   .key_dim = call.K,
                   .q_token = token_stride(call.q),
                   .q_head = call.q.stride(2),
                   .k_token = token_stride(call.k),
                   .k_head = call.k.stride(2),
                   .H_v = call.H_v,
                   .value_dim = call.V,
                   .v_token = token_stride(call.v),
                   .v_head = call.v.stride(2),
                   .a_token = token_stride(call.a),
                   .b_token = token_stride(call.b),
                   .slots = call.slots(),
                   .slot_stride = call.state_pool.stride(0),
                   .rows = kept ? kept->size(0) : 0,
                   .steps = kept ? kept->size(1) : 0,
                   .row_stride = kept ? kept->stride(0) : 0,
                   .step_stride = kept ? kept->stride(1) : 0,
                   .N = call.N},
                  {.dtype = instance_dtype(call.dtype),
                   .K = instance_K(call.K),
                   .state_dtype = instance_dtype(call.state_pool.scalar_type()),
                   .path = path_of(call)},
                  current_stream(call.q));
}

}  // namespace

Tensor decode_cuda(DecodeCall call) {
  check_supported(call);
  const DeviceGuard guard = make_current(call.q);
  Tensor o = new_empty(call.op, call.q, {call.B, call.T, call.H_v, call.V}, call.dtype);
  if (call.N == 0 || call.tokens() == 0) {
    zero(o);
  } else {
    launch(call, o);
  }
  return o;
}

}  // namespace flash_qla
