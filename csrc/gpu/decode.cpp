// Decoding on a GPU: one kernel.
#include "decode.h"

#include <cstdint>
#include <utility>

#include "checks.h"
#include "chunks.h"
#include "contents.h"
#include "gpu/arguments.h"
#include "gpu/decode_launch.h"
#include "gpu/head_dims.h"
#include "gpu/runtime/device.h"
#include "gpu/runtime/stream.h"
#include "gpu/states.h"
#include "kernels.h"
#include "output.h"
#include "tensors.h"

namespace flash_qla {

namespace {

// Elements from one token's gates to the next's. The kernel takes the dimensions of batch and token as one.
int64_t token_stride(const Tensor& gates) { return gates.size(1) == 1 ? gates.stride(0) : gates.stride(1); }

// Copies a tensor [B, T, H_v] if the kernel cannot read its strides.
void make_readable_gates(const char* op, Tensor& tensor) {
  if (!(tensor.stride(2) == 1 && tokens_are_even(tensor))) {
    make_contiguous(op, tensor, tensor.scalar_type());
  }
}

}  // namespace

// Checks all but the contents.
void check_decode_on_gpu(const DecodeCall& call) {
  check_supported_on_gpu(call, call.q);
  check(call.N <= kMostSequences, call.op, "q has ", call.N, " sequences, expected at most ", kMostSequences,
        " on a GPU");
  // The kernel computes offsets within a state with 32 bits, all others with 64.
  const int64_t state_size = call.H_v * call.V * call.K;
  check(state_size <= INT32_MAX, call.op, "state_pool has states of ", state_size, " elements, expected at most ",
        INT32_MAX, " on a GPU");
  check(call.state_v_first || !is_float8(call.state_pool), call.op,
        "state_v_first is False on a state_pool of 8 bits, expected states with V first, [slots, H_v, V, K], on a GPU");
  check_states_on_gpu(call.op, "state_pool", call.state_pool);
  if (call.intermediate_states) {
    check_same_dtype(call.op, "intermediate_states", *call.intermediate_states, call.state_pool);
    check_states_on_gpu(call.op, "intermediate_states", *call.intermediate_states);
  }
}

kernels::IndexTable readable_table(const char* op, std::optional<Tensor>& table) {
  if (table) {
    make_contiguous(op, *table, table->scalar_type());
  }
  return index_table(table);
}

kernels::DecodeTables tables_of(DecodeCall& call) {
  return {.offsets = readable_table(call.op, call.cu_seqlens),
          .state_indices = readable_table(call.op, call.state_indices),
          .accepted = readable_table(call.op, call.num_accepted_tokens),
          .write_indices = readable_table(call.op, call.write_indices),
          .state_rows = readable_table(call.op, call.intermediate_indices),
          .parents = readable_table(call.op, call.parents),
          .null_index = call.null_index};
}

namespace {

void check_supported(const DecodeCall& call) {
  check_decode_on_gpu(call);
  if (contents_are_checked()) {
    check_decode_tables(call);
  }
}

void check_supported(const BufferedDecodeCall& call) {
  check_decode_on_gpu(call);
  check_gpu(call.op, call.q, kernels::kDecodeBufferedArchitectures);
  check(!has_wide_keys(call.K), call.op, "q has head dimension K = ", call.K, ", expected at most 128 on a GPU");
  check_slots_on_gpu(call.op, "d_cache", call.d_cache);
  check_slots_on_gpu(call.op, "k_cache", call.k_cache);
  if (contents_are_checked()) {
    check_decode_tables(call);
  }
}

using kernels::Path;  // DecodePath in kernels_tl/decode/decode.cuh

// The dtype of an instance of decode. Instances of K > 128 take both dtypes of 16 bits.
kernels::Dtype decode_dtype(ScalarType dtype, bool is_wide) {
  const bool has_16_bits = dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
  return is_wide && has_16_bits ? kernels::Dtype::kBits16 : instance_dtype(dtype);
}

// The instance that takes a call. This function decides its path, from the call and from the compiled instances,
// because each pair of dtypes has only some of the paths (kernels_tl/instances.py).
kernels::DecodeParams instance_of(const DecodeCall& call) {
  const int64_t K = instance_K(call.K);
  kernels::DecodeParams instance = {.dtype = decode_dtype(call.dtype, has_wide_keys(K)),
                                    .K = K,
                                    .state_dtype = decode_dtype(call.state_pool.scalar_type(), has_wide_keys(K)),
                                    .path = Path::kOneToken};
  if (!call.state_v_first) {
    instance.path = Path::kKeyFirst;
    return instance;
  }
  const auto takes = [&](Path path) {
    instance.path = path;
    return kernels::is_compiled(instance);
  };
  if (call.T == 1 && !call.cu_seqlens && takes(Path::kOneToken)) {
    return instance;
  }
  const bool last_state_only = !call.write_indices && !call.intermediate_states && !call.parents;
  if (!takes(Path::kTensorCores) && !(last_state_only && takes(Path::kBlocks))) {
    instance.path = Path::kRows;
  }
  return instance;
}

// The division of value rows into CTAs. A CTA of the first `whole` sequences has `groups` groups of value rows; for
// the other sequences two CTAs share them. `parts` counts the sequences in the grid: one part for each of the first,
// two for each of the others.
struct Shares {
  int64_t groups, whole, parts;
};

// The grid of a call on its instance.
class Grid {
 public:
  Grid(const DecodeCall& call, const kernels::DecodeParams& instance)
      : call_(call),
        facts_(kernels::facts_of(instance)),
        sm_count_(gpu_of(call.q).card.sm_count),
        at_a_time_(sm_count_ * facts_.ctas),
        has_fp32_states_(instance.state_dtype == kernels::Dtype::kFloat32) {}

  kernels::DecodeShares shares() const {
    const Shares shares = choose();
    return {.groups = shares.groups, .whole = shares.whole, .parts = shares.parts, .early = early(shares)};
  }

 private:
  // CTAs of a sequence, with `groups` groups in each CTA.
  int64_t ctas_of(int64_t groups) const { return call_.H_v * ceil_div(call_.V, groups * facts_.group_rows); }

  // Takes the shares with the least cost. Larger CTAs begin less often; smaller CTAs spread more evenly. A wave of the
  // SMs costs 1 + groups: the beginning of a CTA takes as long as one group. The wave costs half if no SM has a second
  // CTA. The CTAs of the last wave are halved if the cost is then less (benchmarks/notes/decoding.md). Where a
  // CTA has only one group, CTAs are as small as they can be.
  Shares choose() const {
    if (!facts_.has_groups) {
      return {1, call_.N, call_.N};
    }
    Shares best = {};
    int64_t least = INT64_MAX;
    const auto consider = [&](int64_t groups, int64_t whole) {
      const int64_t ctas = ctas_of(groups), rest = 2 * (call_.N - whole);
      const int64_t cost = half_waves(whole * ctas) * (1 + groups) + half_waves(rest * ctas) * (1 + groups / 2);
      if (cost < least && whole + rest <= kMostSequences) {
        least = cost;
        best = {groups, whole, whole + rest};
      }
    };
    for (const bool all : {true, false}) {
      for (int64_t groups = all ? 1 : 2; groups * facts_.group_rows <= kDecodeTile; groups *= 2) {
        const int64_t ctas = ctas_of(groups), in_full_waves = call_.N * ctas / at_a_time_ * at_a_time_ / ctas;
        consider(groups, all ? call_.N : in_full_waves);
      }
    }
    return best;
  }

  int64_t half_waves(int64_t ctas) const { return 0 < ctas && ctas <= sm_count_ ? 1 : 2 * ceil_div(ctas, at_a_time_); }

  int64_t early(const Shares& shares) const {
    const int64_t waves = has_fp32_states_ && !facts_.has_groups ? 1 : 2;
    return early_sequence_parts(shares.parts, ctas_of(shares.groups), waves, at_a_time_);
  }

  const DecodeCall& call_;
  const kernels::DecodeFacts facts_;
  const int64_t sm_count_, at_a_time_;
  const bool has_fp32_states_;
};

// The Activation (layout.py) of the gates and betas, pre-activation or activated.
int64_t activations_of(const DecodeCall& call) {
  const int64_t gates =
      call.A_log ? gate_activation(call.a, *call.A_log, call.dt_bias) : dtype_code(call.a) << Activation::kG;
  const int64_t betas =
      *call.use_beta_sigmoid ? beta_activation(call.b, call.allow_neg_eigval) : dtype_code(call.b) << Activation::kBeta;
  return gates | betas;
}

// Copies the tokens and gates that the kernels cannot read as they are.
void make_readable(DecodeCall& call) {
  make_readable_rows(call.op, {&call.q, &call.k, &call.v}, call.dtype);
  for (Tensor* tensor : {&call.a, &call.b}) {
    make_readable_gates(call.op, *tensor);
  }
  for (std::optional<Tensor>* tensor : {&call.A_log, &call.dt_bias}) {
    if (*tensor) {
      make_contiguous(call.op, **tensor, (*tensor)->scalar_type());
    }
  }
}

kernels::DecodeInputs inputs_of(const DecodeCall& call) {
  const RowStrides q = row_strides(call.q), k = row_strides(call.k), v = row_strides(call.v);
  return {.q = call.q.const_data_ptr(),
          .k = call.k.const_data_ptr(),
          .v = call.v.const_data_ptr(),
          .a = call.a.const_data_ptr(),
          .b = call.b.const_data_ptr(),
          .A_log = data(call.A_log),
          .dt_bias = data(call.dt_bias),
          .activations = activations_of(call),
          .group = call.group(),
          .scale = static_cast<float>(*call.scale),
          .normalize = call.use_qk_l2norm,
          .H_k = call.H_k,
          .key_dim = call.K,
          .H_v = call.H_v,
          .value_dim = call.V,
          .q_token = q.row,
          .q_head = q.head,
          .k_token = k.row,
          .k_head = k.head,
          .v_token = v.row,
          .v_head = v.head,
          .a_token = token_stride(call.a),
          .b_token = token_stride(call.b)};
}

void launch(DecodeCall& call, const Tensor& o) {
  make_readable(call);
  const Tensor* const kept = call.intermediate_states ? &*call.intermediate_states : nullptr;
  const kernels::DecodeParams instance = instance_of(call);
  kernels::decode({.inputs = inputs_of(call),
                   .state_pool = call.state_pool.mutable_data_ptr(),
                   .kept_states = kept ? kept->mutable_data_ptr() : nullptr,
                   .o = o.mutable_data_ptr(),
                   .indices = tables_of(call),
                   .length = call.T,
                   .update_state = call.writes_back(),
                   .N = call.N,
                   .shares = Grid(call, instance).shares(),
                   .format_of_tokens = dtype_code(call.q),
                   .format_of_pool = dtype_code(call.state_pool),
                   .tokens = call.tokens(),
                   .slots = call.slots(),
                   .slot_stride = call.state_pool.stride(0),
                   .rows = kept ? kept->size(0) : 0,
                   .steps = kept ? kept->size(1) : 0,
                   .row_stride = kept ? kept->stride(0) : 0,
                   .step_stride = kept ? kept->stride(1) : 0},
                  instance, current_stream(call.q));
}

// The grid of a call with deferred state writes. A CTA has `parts` parts of the value rows.
struct BufferedGrid {
  int64_t parts, early;
};

// The parts of a CTA by tensor cores: four or two. `ctas` counts the CTAs of a call with four. The SMs hold the CTAs of
// two calls at a time, because the next call's CTAs prefetch while this call runs. Two parts are faster if the SMs then
// hold all CTAs of two calls, and where four parts would spread unevenly: the SMs hold all CTAs of a call, and only
// some of the next call's (benchmarks/notes/decoding.md).
int64_t parts_of_cta(int64_t ctas, int64_t at_a_time) {
  const bool halves_of_two_calls_fit = 2 * (2 * ctas) <= at_a_time;
  const bool next_call_fits_in_part = 2 * ctas > at_a_time && 4 * ctas <= 3 * at_a_time;
  return halves_of_two_calls_fit || next_call_fits_in_part ? kDecodeWarps / 2 : kDecodeWarps;
}

BufferedGrid grid_of(const BufferedDecodeCall& call, const kernels::DecodeBufferedParams& instance) {
  const bool by_tensor_cores = has_dtype(call.state_pool, call.dtype);
  const int64_t part_rows = by_tensor_cores ? kDecodePartRowsMma : kDecodeWarpRows;
  const int64_t at_a_time = gpu_of(call.q).card.sm_count * kernels::facts_of(instance).ctas;
  const auto ctas_of_sequence = [&](int64_t parts) { return call.H_v * ceil_div(call.V, parts * part_rows); };
  const int64_t parts =
      by_tensor_cores ? parts_of_cta(call.N * ctas_of_sequence(kDecodeWarps), at_a_time) : kDecodeWarps;
  const int64_t waves = has_dtype(call.state_pool, ScalarType::Float) ? 1 : 2;
  return {parts, early_sequence_parts(call.N, ctas_of_sequence(parts), waves, at_a_time)};
}

void launch(BufferedDecodeCall& call, const Tensor& o) {
  make_readable(call);
  std::optional<Tensor> write_pos = call.write_pos;
  const kernels::DecodeBufferedParams instance = {.dtype = instance_dtype(call.dtype),
                                                  .K = instance_K(call.K),
                                                  .state_dtype = instance_dtype(call.state_pool.scalar_type())};
  const BufferedGrid grid = grid_of(call, instance);
  kernels::decode_buffered({.inputs = inputs_of(call),
                            .state_pool = call.state_pool.mutable_data_ptr(),
                            .backlog = {.d_cache = call.d_cache.mutable_data_ptr(),
                                        .k_cache = call.k_cache.mutable_data_ptr(),
                                        .g_cache = call.g_cache.mutable_data_ptr(),
                                        .state_indices = readable_table(call.op, call.state_indices),
                                        .write_pos = readable_table(call.op, write_pos),
                                        .force_flush = readable_table(call.op, call.force_flush),
                                        .null_index = call.null_index,
                                        .fp32_changes = has_dtype(call.d_cache, ScalarType::Float),
                                        .fp32_keys = has_dtype(call.k_cache, ScalarType::Float)},
                            .o = o.mutable_data_ptr(),
                            .parts = grid.parts,
                            .early = grid.early,
                            .N = call.N,
                            .slots = call.slots(),
                            .slot_stride = call.state_pool.stride(0),
                            .length = call.length(),
                            .d_slot = call.d_cache.stride(0),
                            .k_slot = call.k_cache.stride(0),
                            .g_slot = call.g_cache.stride(0)},
                           instance, current_stream(call.q));
}

template <typename Call>
Tensor decode_on_gpu(Call& call) {
  check_supported(call);
  const DeviceGuard guard = make_current(call.q);
  Tensor o = allocate_output(call, call.out, call.q);
  if (call.N == 0 || call.tokens() == 0) {
    zero(o);
  } else {
    launch(call, o);
  }
  return output_as_returned(call, call.out, std::move(o));
}

}  // namespace

Tensor decode_cuda(DecodeCall call) { return decode_on_gpu(call); }
Tensor decode_buffered_cuda(BufferedDecodeCall call) { return decode_on_gpu(call); }

}  // namespace flash_qla
