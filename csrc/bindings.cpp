// flash_qla._C: what was compiled into libflash_qla.so and whether it runs here, for Python. The ops do not need it.
#include <pybind11/pybind11.h>

#include "device.h"
#include "dispatch.h"
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

py::dict forward_dispatch(int64_t B, int64_t T, int64_t N, int64_t H_k, int64_t H_v, int sm_count, bool auto_cp,
                          bool varlen) {
  const auto require = [](bool holds, const char* name, int64_t value, const char* expected) {
    if (!holds) {
      throw std::invalid_argument(std::string("flash_qla._C.forward_dispatch: ") + name + " is " +
                                  std::to_string(value) + ", expected " + expected);
    }
  };
  require(B >= 0, "B", B, "at least 0");
  require(T >= 0, "T", T, "at least 0");
  require(N > 0, "N", N, "at least 1");
  require(H_k > 0, "H_k", H_k, "at least 1");
  require(H_v > 0 && H_v % H_k == 0, "H_v", H_v, "a multiple of H_k");
  require(sm_count > 0, "sm_count", sm_count, "at least 1");
  const ForwardDispatch dispatch = dispatch_forward({B, T, N, H_k, H_v, varlen, sm_count, auto_cp});
  py::dict row;
  row["value_tile"] = dispatch.value_tile;
  row["segment_chunks"] = dispatch.segment_chunks;
  row["segments"] = dispatch.segments;
  row["ctas"] = dispatch.ctas;
  row["workspace_bytes"] = dispatch.workspace_bytes;
  row["predicted_us"] = dispatch.predicted_us;
  return row;
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
  module.def(
      "forward_dispatch", &flash_qla::forward_dispatch, py::arg("B"), py::arg("T"), py::arg("N"), py::arg("H_k"),
      py::arg("H_v"), py::arg("sm_count") = 132, py::arg("auto_cp") = true, py::arg("varlen") = true,
      "What a forward call of these shapes launches on a GPU with that many SMs: value_tile, segment_chunks (0: no "
      "context parallelism), segments and ctas (upper bounds when varlen), workspace_bytes, predicted_us.");
  module.def(
      "override_forward_dispatch", &flash_qla::override_forward_dispatch, py::arg("value_tile") = 0,
      py::arg("segment_chunks") = -1,
      "For tests and experts: what forward_dispatch decides from now on in this process. 0 and -1, the defaults, "
      "leave it to the cost model; segment_chunks = 0 switches context parallelism off.");
}
