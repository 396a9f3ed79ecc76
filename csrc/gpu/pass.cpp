#include "gpu/pass.h"

#include <algorithm>

#include "chunks.h"
#include "gpu/arguments.h"
#include "gpu/override.h"
#include "gpu/plan.h"
#include "gpu/runtime/device.h"
#include "ranks.h"
#include "tensors.h"

namespace flash_qla {

namespace {

// Shape::max_seqlen in whole chunks, because the next step of a training may differ by a few tokens.
int64_t known_length(const Call& call) {
  if (!call.varlen || !call.max_seqlen) {
    return 0;
  }
  return kChunk * std::max<int64_t>(chunk_count(std::min(*call.max_seqlen, call.T)), 1);
}

}  // namespace

Shape shape_of(const Call& call) {
  return {.B = call.B,
          .T = call.T,
          .N = call.N,
          .H_k = call.H_k,
          .H_v = call.H_v,
          .card = gpu_of(call.q).card,
          .auto_cp = call.auto_cp,
          .varlen = call.varlen,
          .max_seqlen = known_length(call),
          .use_qk_l2norm = call.use_qk_l2norm,
          .K = call.K,
          .V = call.V,
          .fp16 = call.dtype == ScalarType::Half,
          .over_ranks = call.over_ranks,
          .portable = runs_portable_kernels(gpu_of(call.q))};
}

void copy_or_zero(Tensor& to, const std::optional<Tensor>& from) {
  if (from) {
    copy(to, *from);
  } else {
    zero(to);
  }
}

kernels::Sizes Pass::sizes() const {
  return {.tokens = call_.tokens(),
          .H_k = call_.H_k,
          .H_v = call_.H_v,
          .group = call_.group(),
          .key_dim = call_.K,
          .value_dim = call_.V,
          .value_rows = value_rows(call_.V),
          .N = call_.N,
          .state_size = call_.state_size(),
          .chunk_slots = d_.chunk_slots,
          .segment_slots = d_.segments};
}

kernels::Tokens Pass::tokens() const {
  const RowStrides q = row_strides(call_.q), k = row_strides(call_.k), v = row_strides(call_.v);
  return {.q = call_.q.const_data_ptr(),
          .q_row = q.row,
          .q_head = q.head,
          .k = call_.k.const_data_ptr(),
          .k_row = k.row,
          .k_head = k.head,
          .v = call_.v.const_data_ptr(),
          .v_row = v.row,
          .v_head = v.head};
}

kernels::Plan Pass::plan() const {
  return {.sequences = workspace_[workspace_.sequences],
          .chunks = workspace_[workspace_.chunks],
          .segments = workspace_[workspace_.segments],
          .checkpoints = workspace_[workspace_.checkpoints],
          .is_long = workspace_[workspace_.is_long],
          .drawn = workspace_[workspace_.drawn]};
}

kernels::Chunks Pass::chunks() const {
  uint16_t* const first = workspace_[workspace_.matrices];
  return {.sizes = sizes(),
          .tokens = tokens(),
          .plan = plan(),
          .matrices = {.gates = workspace_[workspace_.gates],
                       .matrices_0 = block_rows(first, 0),
                       .matrices_1 = block_rows(first, 1),
                       .matrices_2 = block_rows(first, 2),
                       .matrices_3 = block_rows(first, 3)}};
}

kernels::Chunks Pass::map_chunks() const {
  kernels::Chunks map_chunks = chunks();
  if (d_.over_ranks) {
    map_chunks.plan.segments = workspace_[workspace_.map_segments];
  }
  return map_chunks;
}

kernels::Maps Pass::maps() const {
  return {.states = workspace_[workspace_.states],
          .maps = workspace_[workspace_.maps],
          .skips = workspace_[workspace_.skips]};
}

kernels::Dtype Pass::dtype() const { return instance_dtype(call_.dtype); }

void Pass::make_plan(const States& states, int64_t dropped, const kernels::Memory& memory) const {
  const auto [mapped_0, mapped_1] = mapped_sequences(call_);
  const bool drops = d_.over_ranks && d_.has_maps();
  const kernels::Cuts cuts = {.map_segments = drops ? workspace_[workspace_.map_segments] : nullptr,
                              .map_slots = drops ? d_.segments : 0,
                              .segment_chunks = d_.segment_chunks,
                              .cut_above = d_.cut_above,
                              .mapped_0 = mapped_0,
                              .mapped_1 = mapped_1,
                              .dropped = dropped};
  flash_qla::make_plan(call_, sizes(), states, cuts, plan(), memory, stream_);
}

void Pass::portable_maps(const kernels::Chunks& chunks, bool has_reverse) const {
  kernels::portable_replay({.chunks = chunks,
                            .states = contiguous_states(call_, nullptr),
                            .maps = maps(),
                            .replay = {.h = nullptr, .v_new = nullptr, .v_new_row = 0, .v_new_head = 0},
                            .writes_maps = true,
                            .has_reverse = has_reverse,
                            .value_tiles = value_tiles(call_.V, kNarrowTile) + value_tiles(K(), kNarrowTile)},
                           {.dtype = dtype(), .K = K()}, stream_);
}

void Pass::portable_scan(bool reverse, const kernels::Maps& maps, const kernels::States& states, bool has_initial_state,
                         const Tensor* composed) const {
  const auto [mapped_0, mapped_1] = mapped_sequences(call_);
  const int64_t of_values = value_tiles(call_.V, kPortableScanRows);
  const int64_t row_tiles = composed ? of_values + value_tiles(call_.K, kPortableScanRows) : of_values;
  const int64_t sequences = composed ? composed->size(0) : call_.N;
  kernels::portable_scan({.sizes = sizes(),
                          .plan = plan(),
                          .maps = maps,
                          .states = states,
                          .has_initial_state = has_initial_state,
                          .composed = composed ? composed->mutable_data_ptr() : nullptr,
                          .mapped_0 = mapped_0,
                          .mapped_1 = mapped_1,
                          .row_tiles = row_tiles,
                          .ctas = sequences * call_.H_v * row_tiles,
                          .mapped = composed ? sequences : 0,
                          .map_rows = call_.V + call_.K,
                          .key_channels = call_.K},
                         {.K = K(), .reverse = reverse}, stream_);
}

void Pass::scan(bool reverse, const kernels::Maps& maps, const kernels::States& states, bool concurrent,
                const kernels::Memory& memory) const {
  if (d_.portable) {
    return portable_scan(reverse, maps, states, false, nullptr);
  }
  const int64_t sms = gpu_of(call_.q).card.sm_count;
  const auto pieces = [&](int64_t columns) { return call_.N * call_.H_v * ceil_div(call_.V, columns); };
  kernels::SegmentScanParams instance = {.dtype = dtype(), .K = K(), .reverse = reverse, .columns = kNarrowScanColumns};
  if (!kernels::is_compiled(instance) || scans_ * pieces(kNarrowScanColumns) > sms) {
    instance.columns = kScanColumns;
  }
  kernels::segment_scan({.sizes = sizes(),
                         .plan = plan(),
                         .maps = maps,
                         .states = states,
                         .memory = memory,
                         .ctas = std::min<int64_t>(pieces(instance.columns), sms),
                         .concurrent = concurrent},
                        instance, stream_);
}

Tensor Pass::compose(bool reverse, const kernels::Maps& maps, const float* offsets,
                     const std::optional<Tensor>& initial) const {
  Tensor composed = allocate_maps(call_);
  if (composed.size(0) == 0) {
    return composed;
  }
  if (d_.portable) {
    portable_scan(reverse, maps, contiguous_states(call_, data(initial)), initial.has_value(), &composed);
    return composed;
  }
  const auto [mapped_0, mapped_1] = mapped_sequences(call_);
  kernels::compose_maps({.sizes = sizes(),
                         .plan = plan(),
                         .maps = maps,
                         .offsets = offsets,
                         .states = contiguous_states(call_, data(initial)),
                         .has_initial_state = initial.has_value(),
                         .composed = composed.mutable_data_ptr(),
                         .mapped_0 = mapped_0,
                         .mapped_1 = mapped_1,
                         .mapped = composed.size(0),
                         .map_rows = call_.V + call_.K,
                         .key_channels = call_.K},
                        {.dtype = dtype(), .K = K(), .reverse = reverse}, stream_);
  return composed;
}

}  // namespace flash_qla
