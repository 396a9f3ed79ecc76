#include "gpu/launch.h"

#include <stdexcept>

#include "gpu/device.h"

// In libtorch_cuda, which this library does not link, so that it also loads under a CPU build of PyTorch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace flash_qla {

cudaStream_t current_stream(const Call& call) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error(
        "flash_qla: a CUDA tensor came, but libtorch_cuda was not loaded when libflash_qla.so was");
  }
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(call.q.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

ForwardShape shape_of(const Call& call) {
  return {.B = call.B,
          .T = call.T,
          .N = call.N,
          .H_k = call.H_k,
          .H_v = call.H_v,
          .varlen = call.varlen,
          .sm_count = gpu_of(call).sm_count,
          .auto_cp = call.auto_cp,
          .low_level = call.output_low_level,
          .use_qk_l2norm = call.use_qk_l2norm,
          .output_h = call.output_h,
          .fp16 = call.dtype == ScalarType::Half,
          .K = call.K,
          .V = call.V};
}

}  // namespace flash_qla
