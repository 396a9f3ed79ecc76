// flash_qla._C: the questions of inspect.h as Python functions and classes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "inspect.h"

namespace py = pybind11;

namespace flash_qla {
namespace {

// The values of a record, in the order of __match_args__.
py::tuple values(const py::object& record) {
  py::list fields;
  for (const py::handle name : record.attr("__match_args__")) {
    fields.append(record.attr(name));
  }
  return py::tuple(fields);
}

py::str represent(const py::object& record) {
  py::list fields;
  for (const py::handle name : record.attr("__match_args__")) {
    fields.append(py::str("{}={!r}").format(name, record.attr(name)));
  }
  return py::str("{}({})").format(py::type::of(record).attr("__name__"), py::str(", ").attr("join")(fields));
}

// A class of read-only fields, which it prints and compares.
template <typename Struct, typename... Base>
class Record : py::class_<Struct, Base...> {
 public:
  Record(py::module_& module, const char* name, const char* doc) : py::class_<Struct, Base...>(module, name, doc) {
    ((names_ = py::list(py::type::of<Base>().attr("__match_args__"))), ...);
    this->def("__repr__", &represent);
    this->def("__eq__", [](const py::object& self, const py::object& other) {
      return py::type::of(self).is(py::type::of(other)) && values(self).equal(values(other));
    });
  }

  template <typename Type>
  Record& field(const char* name, Type Struct::* member, const char* doc) {
    this->def_readonly(name, member, doc);
    return add(name);
  }
  template <typename Type>
  Record& field(const char* name, Type (*get)(const Struct&), const char* doc) {
    this->def_property_readonly(name, get, doc);
    return add(name);
  }
  template <typename Make, typename... Arguments>
  Record& constructor(Make make, const Arguments&... arguments) {
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

// An argument without conversions: an integer can be an index, a flag is a bool.
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
  py::list list;
  std::for_each_n(items, count, [&](const Item& item) { list.append(item); });
  return list;
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
  py::dict params;
  for (std::string_view rest = kernel.params; !rest.empty();) {
    const std::string_view pair = rest.substr(0, rest.find(' '));
    const size_t sign = pair.find('=');
    params[py::str(pair.substr(0, sign))] = value_of(pair.substr(sign + 1));
    rest.remove_prefix(std::min(pair.size() + 1, rest.size()));
  }
  return params;
}

// Sets the fields to the values.
template <typename Direction, typename... Fields>
void assign(Direction& shape, const std::tuple<Fields...>& fields, typename Fields::Type... values) {
  std::apply([&](const Fields&... field) { ((field.in(shape) = values), ...); }, fields);
}

// A function of a shape's fields (gpu/shape.h): the sizes, then the options by keyword.
template <typename Direction, typename Result, typename... Sizes, typename... Options>
void add_question(py::module_& module, const char* name, const char* (*ask)(const Direction*, Result*) noexcept,
                  const std::tuple<Sizes...>& sizes, const std::tuple<Options...>& options, const char* doc) {
  const auto answer = [ask](typename Sizes::Type... size_values, typename Options::Type... option_values) {
    Direction shape;
    assign(shape, Direction::sizes(), size_values...);
    assign(shape, Direction::options(), option_values...);
    Result result;
    raise(ask(&shape, &result));
    return result;
  };
  Direction defaults;
  const auto define = [&](const Sizes&... size, const Options&... option) {
    module.def(name, answer, strict(size.name)..., py::kw_only(), (strict(option.name) = option.in(defaults))..., doc);
  };
  std::apply(define, std::tuple_cat(sizes, options));
}

template <int Card::* kField>
int card_field(const GpuInfo& gpu) {
  return gpu.card.*kField;
}

// Options of the dispatch questions for each named card.
std::map<std::string, std::map<std::string, int>> cards() {
  std::map<std::string, std::map<std::string, int>> figures;
  for (const auto& [name, card] : kCards) {
    figures[name] = {{"sm_count", card.sm_count}, {"sm_mhz", card.sm_mhz}, {"memory_gb_s", card.memory_gb_s}};
  }
  return figures;
}

void add_classes(py::module_& module) {
  Record<KernelInfo>(module, "Kernel", "A kernel instance, compiled for an architecture.")
      .field("name", &KernelInfo::name, "The instance's name.")
      .field("kernel", &KernelInfo::kernel, "The kernel's name.")
      .field("params", params_of, "The parameters that it was compiled for.")
      .field("architecture", &KernelInfo::architecture, "The GPU architecture of the code.")
      .field("threads", &KernelInfo::threads, "Threads per block.")
      .field("registers", &KernelInfo::registers, "Registers per thread, as ptxas assigned them.")
      .field("static_shared_bytes", &KernelInfo::static_shared_bytes, "Static shared memory per block.")
      .field("dynamic_shared_bytes", &KernelInfo::dynamic_shared_bytes,
             "Dynamic shared memory a block, requested at launch.")
      .field("spill_bytes", &KernelInfo::spill_bytes, "Bytes of spilled registers, stores and loads.")
      .field("stack_bytes", &KernelInfo::stack_bytes, "Bytes of stack per thread.");

  Record<BuildInfo>(module, "BuildInfo", "The versions of the package and of its tools.")
      .field("version", &BuildInfo::version, "The package's version.")
      .field("tilelang", &BuildInfo::tilelang, "The version of TileLang, which lowered the kernels.")
      .field("cuda", &BuildInfo::cuda, "The version of CUDA, whose NVRTC compiled the kernels.")
      .field("torch_target", &BuildInfo::torch_target,
             "The oldest PyTorch whose stable ABI has what the library uses.");

  Record<GpuInfo>(module, "Gpu", "A GPU of this machine.")
      .field("name", &GpuInfo::name, "The driver's name of the GPU.")
      .field("major", &GpuInfo::major, "Major number of the compute capability.")
      .field("minor", &GpuInfo::minor, "Minor number of the compute capability.")
      .field("sm_count", card_field<&Card::sm_count>, "Streaming multiprocessors.")
      .field("sm_mhz", card_field<&Card::sm_mhz>, "Highest clock of an SM, MHz.")
      .field("memory_gb_s", card_field<&Card::memory_gb_s>, "Peak rate of the memory, GB/s.");

  Record<Dispatch>(module, "Dispatch", "What a call launches, in both directions.")
      .field("segment_chunks", &Dispatch::segment_chunks, "Chunks per segment; 0: whole sequences.")
      .field("cut_above", &Dispatch::cut_above,
             "A batch is long if a sequence has more chunks; 0: each. The device cuts no other batch.")
      .field("segments", &Dispatch::segments, "Segments; an upper bound when varlen.")
      .field("heads_per_cta", &Dispatch::heads_per_cta, "Value heads per CTA of chunk_matrices.")
      .field("planned", &Dispatch::planned,
             "Whether chunk_plan runs. Without it the forward is one kernel, whose CTAs find their sequences.")
      .field("workspace_bytes", &Dispatch::workspace_bytes, "Device memory that the call takes while it runs.")
      .field("predicted_us", &Dispatch::predicted_us, "Microseconds by the cost model.");
  Record<ForwardDispatch, Dispatch>(module, "ForwardDispatch", "What a forward call launches.")
      .field(
          "fused", +[](const ForwardDispatch& d) { return is_fused(d.path); },
          "Whether one kernel does everything after the plan; over segments others compute the maps first.")
      .field(
          "value_tile", +[](const ForwardDispatch& d) { return value_tile_of(d.path); },
          "Rows of S^T per CTA (64 or 128).")
      .field(
          "long_tile", +[](const ForwardDispatch& d) { return long_tile_of(d.path); },
          "Rows of S^T per CTA in a long batch. If they are others, the last kernel is launched with both.")
      .field("ctas", &ForwardDispatch::ctas, "CTAs of the last kernel; an upper bound when varlen.");
  Record<BackwardDispatch, Dispatch>(module, "BackwardDispatch", "What a backward call launches.");

  Record<Override>(module, "Override", "The decisions that are forced on the dispatch of one direction.")
      .field("value_tile", &Override::value_tile, "Value rows per CTA (64 or 128); 0: the cost model's choice.")
      .field("segment_chunks", &Override::segment_chunks,
             "Chunks per segment; 0: whole sequences; -1: the cost model's choice.")
      .field("fused", &Override::fused,
             "1: the fused kernel for every call that it can serve; 0: never; -1: the cost model's choice.")
      .field("cut_above", &Override::cut_above,
             "With segments or long_tile: a batch is long if a sequence has more chunks; 0: each. The device cuts no "
             "other batch.")
      .field("long_tile", &Override::long_tile,
             "With value_tile and cut_above: the value rows per CTA in a long batch; 0: the same.")
      .constructor([](int64_t value_tile, int64_t segment_chunks, int64_t fused, int64_t cut_above,
                      int64_t long_tile) { return Override{value_tile, segment_chunks, fused, cut_above, long_tile}; },
                   strict("value_tile") = 0, strict("segment_chunks") = -1, strict("fused") = -1,
                   strict("cut_above") = 0, strict("long_tile") = 0);
}

void add_functions(py::module_& module) {
  module.def(
      "kernels", [] { return list_of(flash_qla_kernels); },
      "The kernel instances, each as often as it was compiled for an architecture.");
  module.def("build_info", &flash_qla_build_info, "The versions of the package and of its tools.");
  module.def("runs_on", &flash_qla_runs_on, strict("architecture"), strict("major"), strict("minor"),
             "Whether code for an architecture, such as sm_80, sm_90a or compute_80 (PTX), runs on a GPU of this "
             "compute capability.");
  module.def("driver_cuda_version", &flash_qla_driver_cuda_version,
             "CUDA version that the driver supports, 1000 * major + 10 * minor; 0 without a driver.");
  module.def("gpus", [] { return list_of(flash_qla_gpus); }, "The GPUs of this machine.");
  module.def("cards", &cards,
             "Figures of Hopper cards by name, as options of the dispatch questions: forward_dispatch(..., "
             "**cards()[\"H200\"]).");
  module.def(
      "obstacle", &flash_qla_obstacle, strict("driver_cuda_version"), strict("major"), strict("minor"),
      "The reason why the kernels do not run under this driver on a GPU of this compute capability; empty if they "
      "run.");
  module.def("refusal", &flash_qla_refusal, strict("driver_cuda_version"),
             "What an error adds if the driver refuses to load a kernel's code: what was found, and what to do.");
  add_question(module, "forward_dispatch", flash_qla_forward_dispatch, ForwardShape::sizes(), ForwardShape::options(),
               R"(What a forward call of this shape launches on such a card, an H100 SXM by default.

N is the number of sequences. low_level: chunk_gated_delta_rule_fwd, which returns A. use_qk_l2norm: the l2norm is
inside. output_h: the call returns h, which the fused kernel does not write. fp16: the dtype of q. over_ranks: the call
of a rank in context parallelism. portable: the kernels that run on every GPU from Ampere on; the cost model does not
know them.

Of a prefill: batch_invariant and checkpoint_every as in the call. resumable: checkpoints are not at multiples of 64
tokens, or batch_invariant rounds the state there, because the checkpoints are not in fp32. float8: the pool or the
checkpoints have 8 bits. Raises ValueError for a shape that no call has.)");
  add_question(module, "backward_dispatch", flash_qla_backward_dispatch, BackwardShape::sizes(),
               BackwardShape::options(),
               R"(What a backward call of this shape launches on such a card, an H100 SXM by default.

N is the number of sequences. use_qk_l2norm: the l2norm is inside. activations: the activation of gate or beta is
inside. fp16: the dtype of q. over_ranks: the call of a rank in context parallelism. Raises ValueError for a shape that no
call has.)");
  module.def(
      "exchange_overrides",
      [](const std::optional<Override>& forward, const std::optional<Override>& backward,
         const std::optional<bool>& portable) {
        Overrides previous;
        raise(flash_qla_exchange_overrides(forward ? &*forward : nullptr, backward ? &*backward : nullptr,
                                           portable ? &*portable : nullptr, &previous));
        return std::tuple(previous.forward, previous.backward, previous.portable);
      },
      py::arg("forward"), py::arg("backward"), py::arg("portable"),
      R"(Sets the overrides of both dispatches at once, for the process, and returns the previous overrides.

portable: whether a Hopper GPU runs the kernels that all GPUs have. None keeps an override. Raises ValueError for an override that no call can follow. forced_dispatch of
flash_qla.testing calls this function, and later restores the overrides that it returned.)");
}

// Whether a frame's code belongs to this package or to PyTorch. Code that PyTorch generates has no module, or
// PyTorch's.
bool is_inside(const py::handle frame) {
  const py::object module = frame.attr("f_globals").attr("get")("__name__");
  if (!py::isinstance<py::str>(module)) {
    return true;
  }
  const std::string name = py::str(module);
  const std::string package = name.substr(0, name.find('.'));
  return package == "flash_qla" || package == "torch";
}

// The stack level of the line that called this package.
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

// Warns by Python's filters. If they make the warning an error, the call fails with its text. The library calls this
// without the GIL, and perhaps from a thread without Python frames.
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
      "ops do not need this module. Once it is imported, their warnings are Python's.";
  flash_qla::add_classes(module);
  flash_qla::add_functions(module);
  flash_qla::flash_qla_on_warning(&flash_qla::warn_in_python);
}
