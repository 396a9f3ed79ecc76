// flash_qla._C: what flash_qla asks of the op library beside its ops (inspect.h), as Python functions and classes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "inspect.h"

namespace py = pybind11;

namespace flash_qla {
namespace {

// An object of named fields, in the order of __match_args__.
py::tuple values(const py::object& record) {
  py::list found;
  for (const py::handle name : record.attr("__match_args__")) {
    found.append(record.attr(name));
  }
  return py::tuple(found);
}

py::str represent(const py::object& record) {
  py::list fields;
  for (const py::handle name : record.attr("__match_args__")) {
    fields.append(py::str("{}={!r}").format(name, record.attr(name)));
  }
  return py::str("{}({})").format(py::type::of(record).attr("__name__"), py::str(", ").attr("join")(fields));
}

// A class of read-only fields that prints and compares them.
template <typename Struct>
class Record : py::class_<Struct> {
 public:
  Record(py::module_& module, const char* name, const char* doc) : py::class_<Struct>(module, name, doc) {
    this->def("__repr__", &represent);
    this->def("__eq__", [](const py::object& self, const py::object& other) {
      return py::type::of(self).is(py::type::of(other)) && values(self).equal(values(other));
    });
  }

  template <typename Field>
  Record& field(const char* name, Field Struct::* member, const char* doc) {
    this->def_readonly(name, member, doc);
    return add(name);
  }
  template <typename Field>
  Record& field(const char* name, Field (*get)(const Struct&), const char* doc) {
    this->def_property_readonly(name, get, doc);
    return add(name);
  }
  template <typename Make, typename... Arguments>
  Record& made_by(Make make, const Arguments&... arguments) {
    this->def(py::init(make), py::kw_only(), arguments...);
    return *this;
  }

 private:
  Record& add(const char* name) {
    names_.append(name);
    this->attr("__match_args__") = py::tuple(names_);
    return *this;
  }

  py::list names_;
};

// Integers are what can be an index, and flags are bools.
py::arg strict(const char* name) { return py::arg(name).noconvert(); }

void raise(const char* error) {
  if (error != nullptr) {
    throw py::value_error(error);
  }
}

template <typename Item>
py::typing::List<Item> list_of(const Item* (*get)(int64_t*) noexcept) {
  int64_t count = 0;
  const Item* items = get(&count);
  py::list found;
  std::for_each_n(items, count, [&](const Item& item) { found.append(item); });
  return found;
}

using Params = py::typing::Dict<py::str, py::typing::Union<py::str, py::int_, py::bool_>>;

py::object value_of(std::string_view text) {
  if (text == "true" || text == "false") {
    return py::bool_(text == "true");
  }
  const bool is_number = std::ranges::all_of(text, [](unsigned char c) { return std::isdigit(c); });
  return is_number ? py::object(py::int_(py::str(text))) : py::str(text);
}

// "key=value key=value"
Params params_of(const KernelInfo& kernel) {
  py::dict found;
  for (std::string_view rest = kernel.params; !rest.empty();) {
    const std::string_view pair = rest.substr(0, rest.find(' '));
    const size_t sign = pair.find('=');
    found[py::str(pair.substr(0, sign))] = value_of(pair.substr(sign + 1));
    rest.remove_prefix(std::min(pair.size() + 1, rest.size()));
  }
  return found;
}

void add_classes(py::module_& module) {
  Record<KernelInfo>(module, "Kernel", "A compiled kernel instance.")
      .field("name", &KernelInfo::name, "Of the instance.")
      .field("kernel", &KernelInfo::kernel, "Of which it is an instance.")
      .field("params", params_of, "What it was compiled for.")
      .field("threads", &KernelInfo::threads, "Per block.")
      .field("registers", &KernelInfo::registers, "Per thread, as ptxas assigned them.")
      .field("static_shared_bytes", &KernelInfo::static_shared_bytes, "Shared memory per block.")
      .field("dynamic_shared_bytes", &KernelInfo::dynamic_shared_bytes, "Shared memory per block, asked for at launch.")
      .field("spill_bytes", &KernelInfo::spill_bytes, "Stores and loads.")
      .field("stack_bytes", &KernelInfo::stack_bytes, "Per thread.");

  Record<BuildInfo>(module, "BuildInfo", "Versions that the package was built of.")
      .field("version", &BuildInfo::version, "Of the package.")
      .field("tilelang", &BuildInfo::tilelang, "Which lowered the kernels.")
      .field("cuda", &BuildInfo::cuda, "Whose NVRTC compiled them.")
      .field("arch", &BuildInfo::arch, "The GPU architecture.")
      .field("torch_target", &BuildInfo::torch_target,
             "The oldest PyTorch whose stable ABI has what the library uses.");

  Record<GpuInfo>(module, "Gpu", "A GPU of this machine.")
      .field("name", &GpuInfo::name, "As its driver calls it.")
      .field("major", &GpuInfo::major, "Of the compute capability.")
      .field("minor", &GpuInfo::minor, "Of the compute capability.")
      .field("sm_count", &GpuInfo::sm_count, "Streaming multiprocessors.");

  Record<ForwardDispatch>(module, "ForwardDispatch", "What a forward call launches.")
      .field("value_tile", &ForwardDispatch::value_tile, "Rows of S^T a CTA (64 or 128).")
      .field("segment_chunks", &ForwardDispatch::segment_chunks, "Chunks a segment; 0 without context parallelism.")
      .field("cut_above", &ForwardDispatch::cut_above,
             "Where no sequence has more chunks than that, the device cuts none.")
      .field("whole_tile", &ForwardDispatch::whole_tile, "The value tile that the device then takes.")
      .field("fused", &ForwardDispatch::fused, "Whether one kernel does it all.")
      .field("segments", &ForwardDispatch::segments, "An upper bound when varlen.")
      .field("ctas", &ForwardDispatch::ctas, "Of the last kernel; an upper bound when varlen.")
      .field("heads_per_cta", &ForwardDispatch::heads_per_cta, "Of chunk_matrices.")
      .field("workspace_bytes", &ForwardDispatch::workspace_bytes, "Device memory that the call takes meanwhile.")
      .field("predicted_us", &ForwardDispatch::predicted_us, "Microseconds by the cost model.");

  Record<BackwardDispatch>(module, "BackwardDispatch", "What a backward call launches.")
      .field("segment_chunks", &BackwardDispatch::segment_chunks, "Chunks a segment; 0 without context parallelism.")
      .field("cut_above", &BackwardDispatch::cut_above,
             "Where no sequence has more chunks than that, the device cuts none.")
      .field("segments", &BackwardDispatch::segments, "An upper bound when varlen.")
      .field("heads_per_cta", &BackwardDispatch::heads_per_cta, "Of chunk_matrices.")
      .field("workspace_bytes", &BackwardDispatch::workspace_bytes, "Device memory that the call takes meanwhile.")
      .field("predicted_us", &BackwardDispatch::predicted_us, "Microseconds by the cost model.");

  Record<Override>(module, "Override", "What one direction's dispatch is forced to decide.")
      .field("value_tile", &Override::value_tile, "Value rows a CTA (64 or 128); 0: the cost model's choice.")
      .field("segment_chunks", &Override::segment_chunks,
             "Chunks a segment; 0: no context parallelism; -1: the cost model's choice.")
      .field("fused", &Override::fused,
             "1: the fused kernel wherever it can serve a call; 0: never; -1: the cost model's choice.")
      .field("cut_above", &Override::cut_above,
             "With segments: chunks up to which no sequence is cut; 0: whatever is longer than a segment is cut.")
      .field("whole_tile", &Override::whole_tile,
             "With cut_above: the value tile where no sequence is cut; 0: value_tile.")
      .made_by([](int64_t value_tile, int64_t segment_chunks, int64_t fused, int64_t cut_above,
                  int64_t whole_tile) { return Override{value_tile, segment_chunks, fused, cut_above, whole_tile}; },
               strict("value_tile") = 0, strict("segment_chunks") = -1, strict("fused") = -1, strict("cut_above") = 0,
               strict("whole_tile") = 0);
}

void add_functions(py::module_& module) {
  module.def("kernels", [] { return list_of(flash_qla_kernels); }, "The compiled kernel instances.");
  module.def("build_info", &flash_qla_build_info, "Versions that the package was built of.");
  module.def("driver_cuda_version", &flash_qla_driver_cuda_version,
             "CUDA version that the driver supports, 1000 * major + 10 * minor; 0 without a driver.");
  module.def("gpus", [] { return list_of(flash_qla_gpus); }, "The GPUs of this machine.");
  module.def(
      "obstacle", &flash_qla_obstacle, strict("driver_cuda_version"), strict("major"), strict("minor"),
      "Why the kernels do not run under such a driver on a GPU of such a compute capability, as a sentence; empty "
      "if they do.");
  module.def(
      "forward_dispatch",
      [](int64_t B, int64_t T, int64_t N, int64_t H_k, int64_t H_v, int sm_count, bool auto_cp, bool varlen,
         bool low_level, bool use_qk_l2norm, bool output_h, bool fp16, int64_t K, int64_t V, bool in_halves) {
        const ForwardShape shape{.B = B,
                                 .T = T,
                                 .N = N,
                                 .H_k = H_k,
                                 .H_v = H_v,
                                 .varlen = varlen,
                                 .card = {sm_count, kH100.cycles_per_us, kH100.bytes_per_us},
                                 .auto_cp = auto_cp,
                                 .low_level = low_level,
                                 .use_qk_l2norm = use_qk_l2norm,
                                 .output_h = output_h,
                                 .fp16 = fp16,
                                 .K = K,
                                 .V = V,
                                 .in_halves = in_halves};
        ForwardDispatch dispatch;
        raise(flash_qla_forward_dispatch(&shape, &dispatch));
        return dispatch;
      },
      strict("B"), strict("T"), strict("N"), strict("H_k"), strict("H_v"), strict("sm_count") = 132,
      strict("auto_cp") = true, strict("varlen") = true, strict("low_level") = false, strict("use_qk_l2norm") = false,
      strict("output_h") = false, strict("fp16") = false, strict("K") = 128, strict("V") = 128,
      strict("in_halves") = false,
      R"(What a forward call of these shapes launches on a GPU with that many SMs.

N is the number of sequences. low_level asks for chunk_gated_delta_rule_fwd, which returns A, too; use_qk_l2norm for the
l2norm inside; output_h and fp16 say that it is to return h and what dtype q has: the one kernel makes no h, and A in
bf16 only; in_halves is for a rank's call of context parallelism. Raises ValueError for a shape that no call has.)");
  module.def(
      "backward_dispatch",
      [](int64_t B, int64_t T, int64_t N, int64_t H_k, int64_t H_v, int sm_count, bool auto_cp, bool varlen,
         bool use_qk_l2norm, bool activations, int64_t K, int64_t V, bool in_halves) {
        const BackwardShape shape{.B = B,
                                  .T = T,
                                  .N = N,
                                  .H_k = H_k,
                                  .H_v = H_v,
                                  .varlen = varlen,
                                  .card = {sm_count, kH100.cycles_per_us, kH100.bytes_per_us},
                                  .auto_cp = auto_cp,
                                  .use_qk_l2norm = use_qk_l2norm,
                                  .activations = activations,
                                  .K = K,
                                  .V = V,
                                  .in_halves = in_halves};
        BackwardDispatch dispatch;
        raise(flash_qla_backward_dispatch(&shape, &dispatch));
        return dispatch;
      },
      strict("B"), strict("T"), strict("N"), strict("H_k"), strict("H_v"), strict("sm_count") = 132,
      strict("auto_cp") = true, strict("varlen") = true, strict("use_qk_l2norm") = false, strict("activations") = false,
      strict("K") = 128, strict("V") = 128, strict("in_halves") = false,
      R"(What a backward call of these shapes launches on a GPU with that many SMs.

N is the number of sequences; use_qk_l2norm asks for the l2norm inside, activations for that of gate or beta;
in_halves is the forward's. Raises ValueError for a shape that no call has.)");
  module.def(
      "exchange_overrides",
      [](const std::optional<Override>& forward, const std::optional<Override>& backward) {
        Overrides previous;
        raise(flash_qla_exchange_overrides(forward ? &*forward : nullptr, backward ? &*backward : nullptr, &previous));
        return std::pair(previous.forward, previous.backward);
      },
      py::arg("forward"), py::arg("backward"),
      R"(Sets the overrides of both dispatches at once, for the process, and returns those that were in force.

None keeps a direction's override. Raises ValueError for an override that no call can follow. flash_qla.testing's
forced_dispatch calls it, and restores what it returns.)");
}

// Whether code is of this package, of PyTorch, or generated by PyTorch, which gives it no module or one of its own.
bool is_inside(const py::handle frame) {
  const py::object module = frame.attr("f_globals").attr("get")("__name__");
  if (!py::isinstance<py::str>(module)) {
    return true;
  }
  const std::string name = py::str(module);
  const std::string package = name.substr(0, name.find('.'));
  return package == "flash_qla" || package == "torch";
}

// The line that called this package, as a number of frames.
Py_ssize_t level_of_caller() {
  Py_ssize_t level = 1;
  for (py::object frame = py::module_::import("sys").attr("_getframe")(0); !frame.is_none();
       frame = frame.attr("f_back"), ++level) {
    if (!is_inside(frame)) {
      return level;
    }
  }
  return 1;
}

// Python's filters decide; where they make it an error, the call fails with its text. The library calls from threads
// that have let go of the interpreter, and perhaps of Python.
const char* warn_in_python(const char* text) noexcept {
  thread_local std::string error;
  const py::gil_scoped_acquire gil;
  Py_ssize_t level = 1;
  try {
    level = level_of_caller();
  } catch (const py::error_already_set&) {  // a thread without frames
  }
  if (PyErr_WarnEx(PyExc_UserWarning, text, level) == 0) {
    return nullptr;
  }
  PyErr_Clear();
  error = std::string("UserWarning: ") + text;
  return error.c_str();
}

}  // namespace
}  // namespace flash_qla

PYBIND11_MODULE(_C, module) {
  module.doc() =
      "The compiled kernels of flash_qla, how they were built, whether they run here, and what a call launches. The "
      "ops do not need it. Once it is imported, their warnings are Python's.";
  flash_qla::add_classes(module);
  flash_qla::add_functions(module);
  flash_qla::flash_qla_on_warning(&flash_qla::warn_in_python);
}
