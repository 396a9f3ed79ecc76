// The causal depthwise convolution on a GPU.
#include "convolution.h"

#include <algorithm>
#include <cstdint>

#include "checks.h"
#include "chunks.h"
#include "contents.h"
#include "gpu/arguments.h"
#include "gpu/runtime/device.h"
#include "gpu/runtime/stream.h"
#include "kernels.h"
#include "offsets.h"

namespace flash_qla {

namespace {

constexpr int64_t kWarps = 4, kLanes = 32;  // of a CTA, of a warp
constexpr int64_t kWaves = 4;               // of CTAs on a full card: enough that the last one costs little
constexpr int64_t kLeastTokens = 8;         // of a warp, which reads W - 1 rows more
constexpr int64_t kChannelThreads = 128, kSumLanes = 32;
constexpr int64_t kMostShares = 32;  // CTAs of a sequence and its channels that write checkpoints
constexpr int64_t kMostChannels = 65535 * kChannelThreads;  // as a grid's second dimension

void check_supported(const Convolution& call) {
  check(call.dtype != ScalarType::Double, call.op,
        "x has dtype float64, expected bfloat16, float16 or float32 on a GPU (float64 runs on the CPU)");
  check(call.D <= kMostChannels, call.op, "x has ", call.D, " channels, expected at most ", kMostChannels, " on a GPU");
  check(!call.pool || call.initial_state->size(0) <= INT32_MAX, call.op, call.names.pool,
        " has more slots than 2^31 - 1, the most on a GPU");
  check_gpu(call.op, call.x);
}

void check_contents(const Convolution& call) {
  if (contents_are_checked()) {
    if (call.cu_seqlens) {
      checked_offsets(call.op, *call.cu_seqlens, call.N, call.T);
    }
    check_window_slots(call);
  }
}

kernels::ConvRows rows_of(const Tensor& tensor) {
  return {.data = tensor.const_data_ptr(), .batch = tensor.stride(0), .row = tensor.stride(1)};
}

kernels::Window window_of(const std::optional<Tensor>& tensor) {
  if (!tensor) {
    return {.data = nullptr, .dtype = Dtype::kFloat32, .slot = 0, .channel = 0, .column = 0};
  }
  return {.data = tensor->const_data_ptr(),
          .dtype = dtype_code(*tensor),
          .slot = tensor->stride(0),
          .channel = tensor->stride(1),
          .column = tensor->stride(2)};
}

kernels::ConvInputs inputs_of(const Convolution& call) {
  const PoolArguments pool = call.pool.value_or(PoolArguments{});
  const auto& flags = pool.has_initial_state;
  return {.offsets = index_table(call.cu_seqlens),
          .N = call.N,
          .length = call.T,
          .tokens = call.B * call.T,
          .x = rows_of(call.x),
          .initial = window_of(call.initial_state),
          .columns = call.columns,
          .first_states = !call.initial_state ? FirstStates::kNone
                          : flags             ? FirstStates::kFlagged
                                              : FirstStates::kAll,
          .has_state = data(flags),
          .has_state_stride = flags ? flags->stride(0) : 1,
          .slots = {.state_indices = index_table(call.pool ? std::optional(pool.state_indices) : std::nullopt),
                    .null_index = pool.null_index,
                    .slots = call.initial_state ? call.initial_state->size(0) : call.N},
          .first_indices = index_table(pool.initial_state_indices),
          .weight = call.weight.const_data_ptr(),
          .bias = data(call.bias),
          .weight_dtype = dtype_code(call.weight),
          .bias_dtype = call.bias ? dtype_code(*call.bias) : static_cast<int64_t>(Dtype::kFloat32),
          .W = call.W,
          .D = call.D,
          .use_silu = call.use_silu};
}

kernels::ConvGradients gradients_of(const Convolution& call) {
  return {.dy = rows_of(call.dy), .dht = window_of(call.dht)};
}

// Whether all rows are pieces of so many channels that begin at multiples of their size.
bool is_in_pieces(const Tensor& rows, int64_t channels) {
  const auto bytes = static_cast<int64_t>(channels * rows.element_size());
  const auto fits = [&](int64_t size, int64_t stride) { return size <= 1 || stride % channels == 0; };
  return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % bytes == 0 && rows.size(2) % channels == 0 &&
         fits(rows.size(0), rows.stride(0)) && fits(rows.size(1), rows.stride(1));
}

// As many tokens for each warp as fill the card for kWaves, or fewer if they are few, but kLeastTokens. A forward of
// shorter sequences without offsets has one per warp until the card is full, because a warp waits for their windows one
// after the other.
kernels::ConvGrid grid_of(const Convolution& call, const auto& facts) {
  const bool in_pieces =
      is_in_pieces(call.x, facts.channels) && (!call.dy.defined() || is_in_pieces(call.dy, facts.channels));
  const int64_t tokens = call.B * call.T;
  const int64_t columns = ceil_div(call.D, kLanes * (in_pieces ? facts.channels : 1));
  const int64_t resident = gpu_of(call.x).card.sm_count * static_cast<int64_t>(facts.ctas);
  const int64_t groups = std::max<int64_t>(kWaves * resident / columns, 1);
  const bool by_sequence = !call.cu_seqlens && !call.dy.defined();
  const int64_t least = by_sequence ? std::clamp<int64_t>(call.T, 1, kLeastTokens) : kLeastTokens;
  const int64_t step = std::min<int64_t>(least, 4);
  const int64_t warp_tokens = std::max(ceil_div(ceil_div(tokens, groups * kWarps), step) * step, least);
  return {.ctas = ceil_div(tokens, warp_tokens * kWarps) * columns,
          .column_ctas = columns,
          .warp_tokens = warp_tokens,
          .in_pieces = in_pieces};
}

kernels::WrittenWindow written_windows(const Tensor& tensor) {
  return {.data = tensor.mutable_data_ptr(),
          .dtype = dtype_code(tensor),
          .slot = tensor.stride(0),
          .channel = tensor.stride(1),
          .column = tensor.stride(2)};
}

// The final windows and the checkpoints. More CTAs share a sequence with many checkpoints, but not where a checkpoint
// has rows of the initial window, whose slot another checkpoint may have.
void launch_windows(const Convolution& call, const kernels::ConvInputs& inputs, const Tensor& last) {
  const PoolArguments pool = call.pool.value_or(PoolArguments{});
  const Tensor& kept = pool.checkpoints ? *pool.checkpoints : last;
  const int64_t every = std::min<int64_t>(pool.checkpoint_every, call.T + 1);  // beyond T: no checkpoint
  const bool share = every > 0 && every >= call.columns;
  const int64_t mean_length = call.cu_seqlens ? call.T / std::max<int64_t>(call.N, 1) : call.T;
  kernels::conv_windows(
      {.inputs = inputs,
       .last = written_windows(last),
       .kept = written_windows(kept),
       .kept_slots = {.checkpoint_indices = index_table(pool.checkpoint_indices), .checkpoint_states = kept.size(0)},
       .checkpoint_every = every,
       .x_dtype = dtype_code(call.x),
       .in_place = call.pool.has_value(),
       .shares = share ? std::clamp<int64_t>(mean_length / every, 1, kMostShares) : 1},
      {}, current_stream(call.x));
}

}  // namespace

ConvolutionOutputs convolve_cuda(Convolution call) {
  check_supported(call);
  const DeviceGuard guard = make_current(call.x);
  make_canonical(call);
  check_contents(call);
  ConvolutionOutputs out = allocate(call);
  const kernels::ConvInputs inputs = inputs_of(call);
  const kernels::CausalConv1dParams instance = {.dtype = instance_dtype(call.dtype)};
  kernels::causal_conv1d(
      {.inputs = inputs, .grid = grid_of(call, kernels::facts_of(instance)), .y = out.y.mutable_data_ptr()}, instance,
      current_stream(call.x));
  if (call.output_final_state) {
    launch_windows(call, inputs, out.final_state);
  }
  return out;
}

void store_windows_cuda(Convolution call) {
  const DeviceGuard guard = make_current(call.x);
  make_canonical(call);
  launch_windows(call, inputs_of(call), *call.initial_state);
}

ConvolutionGradients convolve_backward_cuda(Convolution call) {
  check_supported(call);
  const DeviceGuard guard = make_current(call.x);
  make_canonical(call);
  check_contents(call);
  ConvolutionGradients out = allocate_gradients(call);
  const cudaStream_t stream = current_stream(call.x);
  const kernels::ConvInputs inputs = inputs_of(call);
  const kernels::ConvGradients gradients = gradients_of(call);
  const kernels::CausalConv1dBackwardParams instance = {.dtype = instance_dtype(call.dtype)};
  const kernels::ConvGrid grid = grid_of(call, kernels::facts_of(instance));
  const int64_t groups = grid.ctas / grid.column_ctas;
  Tensor partial = new_empty(call.op, call.x, {groups, call.W + 1, call.D}, ScalarType::Float);
  kernels::causal_conv1d_backward({.inputs = inputs,
                                   .gradients = gradients,
                                   .grid = grid,
                                   .dx = out.dx.mutable_data_ptr(),
                                   .partial = partial.mutable_data_ptr()},
                                  instance, stream);
  const int64_t sum_ctas = ceil_div((call.W + 1) * call.D, kSumLanes);
  const int64_t dh0_ctas = call.initial_state ? call.N * ceil_div(call.D, kChannelThreads) : 0;
  kernels::conv_gradients({.inputs = inputs,
                           .gradients = gradients,
                           .x_dtype = dtype_code(call.x),
                           .partial = partial.const_data_ptr(),
                           .groups = groups,
                           .sum_ctas = sum_ctas,
                           .ctas = sum_ctas + dh0_ctas,
                           .dweight = out.dweight.mutable_data_ptr(),
                           .dbias = data_if(call.bias.has_value(), out.dbias),
                           .dh0 = data_if(call.initial_state.has_value(), out.dh0)},
                          {}, stream);
  return out;
}

}  // namespace flash_qla
