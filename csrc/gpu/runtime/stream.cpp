#include "gpu/runtime/stream.h"

#include <stdexcept>

// A function of libtorch_cuda. It is weak, and the library not linked, because a CPU build of PyTorch has neither.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace flash_qla {

cudaStream_t current_stream(const Tensor& tensor) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error(
        "flash_qla: a CUDA tensor came, but libtorch_cuda was not loaded when libflash_qla.so was");
  }
  void* stream = nullptr;
  with_reason(tensor, [&] {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  });
  return static_cast<cudaStream_t>(stream);
}

DeviceGuard make_current(const Tensor& tensor) {
  return with_reason(tensor, [&] { return DeviceGuard(tensor.get_device_index()); });
}

}  // namespace flash_qla
