// flash_qla._C: what was compiled into libflash_qla.so and whether it runs here, for Python. The ops do not need it.
#include <pybind11/pybind11.h>

#include "device.h"
#include "registry.h"

namespace py = pybind11;

namespace flash_qla {
namespace {

py::list kernel_rows() {
  py::list rows;
  for (const KernelInfo& kernel : kernel_registry()) {
    py::dict row;
    row["name"] = kernel.name;
    row["kernel"] = kernel.kernel;
    row["params"] = kernel.params;
    row["threads"] = kernel.threads;
    row["registers"] = kernel.registers;
    row["static_shared_bytes"] = kernel.static_shared_bytes;
    row["dynamic_shared_bytes"] = kernel.dynamic_shared_bytes;
    row["spill_bytes"] = kernel.spill_bytes;
    row["stack_bytes"] = kernel.stack_bytes;
    rows.append(row);
  }
  return rows;
}

py::dict build_info() {
  py::dict info;
  info["version"] = FLASH_QLA_VERSION;
  info["tilelang"] = toolchain().tilelang;
  info["nvcc"] = toolchain().nvcc;
  info["arch"] = toolchain().arch;
  info["torch_target"] = FLASH_QLA_TORCH_TARGET;
  return info;
}

py::list gpu_rows() {
  py::list rows;
  for (const Gpu& gpu : gpus()) {
    py::dict row;
    row["name"] = gpu.name;
    row["major"] = gpu.major;
    row["minor"] = gpu.minor;
    row["sm_count"] = gpu.sm_count;
    rows.append(row);
  }
  return rows;
}

}  // namespace
}  // namespace flash_qla

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled kernels of flash_qla, how they were built, and whether they run here.";
  module.def("kernels", &flash_qla::kernel_rows, "One dict per kernel instance, as in csrc/registry.h.");
  module.def("build_info", &flash_qla::build_info,
             "Versions: the package, TileLang, nvcc, the GPU architecture, the oldest PyTorch (stable ABI target).");
  module.def("driver_cuda_version", &flash_qla::driver_cuda_version,
             "CUDA version that the driver supports, 1000 * major + 10 * minor; 0 without a driver.");
  module.def("gpus", &flash_qla::gpu_rows, "One dict per GPU: name, compute capability (major, minor), sm_count.");
  module.def("obstacle", &flash_qla::obstacle, py::arg("driver_cuda_version"), py::arg("major"), py::arg("minor"),
             "Why the kernels do not run under such a driver on such a GPU, as a sentence; empty if they do.");
}
