// A call of the causal depthwise convolution: the forward, on windows of its own or in a pool, and the backward.
#pragma once

#include <cstdint>
#include <optional>

#include "call.h"
#include "pool.h"
#include "tensors.h"

namespace flash_qla {

struct ConvolutionArguments {
  Tensor x = undefined_tensor();        // [B, T, D]
  Tensor weight = undefined_tensor();   // [D, W] or [D, 1, W], dtype of x or float
  std::optional<Tensor> bias;           // [D], dtype of x or float
  bool use_silu = true;                 // y = silu(..)
  std::optional<Tensor> initial_state;  // [N, D, W - 1] or [N, D, W]: windows, dtype of x or float; zeros by default
  bool output_final_state = false;
  std::optional<Tensor> cu_seqlens;  // [N + 1] int32 or int64
  // Of the backward:
  Tensor dy = undefined_tensor();  // [B, T, D]
  std::optional<Tensor> dht;       // shape of the final state; zero by default
};

// What errors call the arguments.
struct ConvolutionNames {
  const char *x = "x", *weight = "weight", *bias = "bias", *state = "initial_state", *final_gradient = "dht";
  const char *pool = "state_pool", *checkpoints = "checkpoints";
};

// The canonical form, by make_canonical: channels of x and dy are neighbours, and dy has the dtype of x. weight [D, W],
// bias and cu_seqlens are contiguous. On a pool, initial_state is the pool of windows.
struct Convolution : ConvolutionArguments {
  const char* op = nullptr;
  int64_t B = 0, T = 0, D = 0, W = 0, N = 0;
  int64_t columns = 0;         // of windows: W - 1 or W
  ScalarType dtype{};          // of x and y
  ScalarType compute_dtype{};  // of the arithmetic, dweight, dbias and dh0
  ScalarType state_dtype{};    // of windows
  std::optional<PoolArguments> pool;
  ConvolutionNames names;
};

struct ConvolutionOutputs {
  Tensor y = undefined_tensor();            // [B, T, D], contiguous
  Tensor final_state = undefined_tensor();  // [N, D, columns], contiguous; [0] if it was not requested; or the pool
};

// The sums have the compute dtype. Without their argument they are empty tensors of shape [0].
struct ConvolutionGradients {
  Tensor dx = undefined_tensor();       // [B, T, D], contiguous
  Tensor dweight = undefined_tensor();  // shape of weight
  Tensor dbias = undefined_tensor();    // [D]
  Tensor dh0 = undefined_tensor();      // [N, D, columns]
};

// Each throws like make_call. They copy nothing.
Convolution make_convolution(const char* op, ConvolutionArguments arguments, const ConvolutionNames& names = {});
Convolution make_convolution_backward(const char* op, ConvolutionArguments arguments,
                                      const ConvolutionNames& names = {});
// Windows and checkpoints of windows have the columns and any strides that initial_state may have.
Convolution make_convolution_on_pool(const char* op, ConvolutionArguments arguments, PoolArguments pool,
                                     const ConvolutionNames& names = {});

void make_canonical(Convolution& call);

// Uninitialized outputs.
ConvolutionOutputs allocate(const Convolution& call);
ConvolutionGradients allocate_gradients(const Convolution& call);

// Throws if a table has an index out of range, or names a slot that is written twice. On a GPU this synchronizes.
void check_window_slots(const Convolution& call);

// Each computes y and, if it was requested, writes the final windows; on a pool also the checkpoints.

ConvolutionOutputs convolve_cpu(Convolution call);
ConvolutionOutputs convolve_cuda(Convolution call);
// The windows of a call on a pool alone. This allocates nothing if the call is canonical.
void store_windows_cpu(Convolution call);
void store_windows_cuda(Convolution call);
ConvolutionGradients convolve_backward_cpu(Convolution call);
ConvolutionGradients convolve_backward_cuda(Convolution call);

}  // namespace flash_qla
