// Autograd of the ops without Python, for plain calls: those on ordinary tensors of the CPU or a GPU, outside of
// transforms and modes. The forwards of whole sequences have the formulas of flash_qla/ops/autograd.py. The other ops
// have no derivatives; here are their calls that want none. Every other call goes on to Python.
//
// PyTorch's stable ABI has no autograd. So this is a library of its own, for one minor version of PyTorch. Without it
// Python does everything.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace flash_qla {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// A backward: its op, an op of the forward, the forward's first result and its gradient, and the tensors that have
// gradients, in the order of the results.
struct Separate {
  static constexpr const char *kOp = "flash_qla::chunk_gated_delta_rule_bwd",
                              *kForward = "flash_qla::chunk_gated_delta_rule";
  static constexpr const char *kOutput = "o", *kGradient = "do";
  static constexpr std::array kDifferentiated = {"q", "k", "v", "beta", "g", "initial_state", "A_log", "dt_bias"};
};
struct Packed {
  static constexpr const char *kOp = "flash_qla::chunk_gated_delta_rule_packed_bwd",
                              *kForward = "flash_qla::chunk_gated_delta_rule_packed";
  static constexpr const char *kOutput = "o", *kGradient = "do";
  static constexpr std::array kDifferentiated = {"mixed_qkv", "beta", "g", "initial_state", "A_log", "dt_bias"};
};
struct Convolution {
  static constexpr const char *kOp = "flash_qla::causal_conv1d_bwd", *kForward = "flash_qla::causal_conv1d";
  static constexpr const char *kOutput = "y", *kGradient = "dy";
  static constexpr std::array kDifferentiated = {"x", "weight", "bias", "initial_state"};
};

using Arguments = std::vector<c10::Argument>;

OperatorHandle op_of(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

std::optional<size_t> find(const Arguments& arguments, std::string_view name) {
  const auto found = std::find_if(arguments.begin(), arguments.end(), [&](const auto& x) { return x.name() == name; });
  return found == arguments.end() ? std::nullopt : std::optional(found - arguments.begin());
}

size_t place(const Arguments& arguments, std::string_view name) {
  const std::optional<size_t> found = find(arguments, name);
  TORCH_INTERNAL_ASSERT(found, "no argument ", name);
  return *found;
}

bool is_tensor(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : argument.type())->kind() == c10::TypeKind::TensorType;
}

// The backward's op, and places in its arguments.
template <typename Formula>
struct Backward {
  // An argument that the forwards have too: its name there and its place here.
  struct Shared {
    std::string name;
    size_t place;
  };

  OperatorHandle op = op_of(Formula::kOp);
  size_t count = op.schema().arguments().size();
  size_t grad_o = place(op.schema().arguments(), Formula::kGradient);
  size_t grad_final_state = place(op.schema().arguments(), "dht");
  std::vector<Shared> tensors, options;
  // Indices in `tensors`
  std::array<size_t, Formula::kDifferentiated.size()> differentiated;

  Backward() {
    const OperatorHandle forward = op_of(Formula::kForward);
    // The g of the forward is g_raw in a backward that has both. Its g is another op's result.
    const bool has_g_raw = find(op.schema().arguments(), "g_raw").has_value();
    for (size_t i = 0; i < count; ++i) {
      const c10::Argument& argument = op.schema().arguments()[i];
      const std::string name = argument.name() == "g_raw" ? "g" : argument.name();
      const bool is_other = has_g_raw && argument.name() == "g";
      if (!is_other && find(forward.schema().arguments(), name)) {
        (is_tensor(argument) ? tensors : options).push_back({name, i});
      }
    }
    for (size_t i = 0; i < differentiated.size(); ++i) {
      differentiated[i] = index_of(Formula::kDifferentiated[i]);
    }
  }

  size_t index_of(std::string_view name) const {
    const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto& x) { return x.name == name; });
    TORCH_INTERNAL_ASSERT(found != tensors.end(), "no tensor ", name);
    return found - tensors.begin();
  }

  static const Backward& get() {
    static const Backward& found = *new Backward;  // autograd's threads may outlive static objects
    return found;
  }
};

// Places in the arguments and results of a forward.
template <typename Formula>
struct Forward {
  size_t count, output_final_state, o, final_state;
  std::vector<size_t> tensors, options;  // ordered as those of Backward
  std::array<size_t, Formula::kDifferentiated.size()> differentiated;

  explicit Forward(const OperatorHandle& op) {
    const Arguments& arguments = op.schema().arguments();
    count = arguments.size();
    output_final_state = place(arguments, "output_final_state");
    o = place(op.schema().returns(), Formula::kOutput);
    final_state = place(op.schema().returns(), "final_state");
    for (const auto& x : Backward<Formula>::get().tensors) {
      tensors.push_back(place(arguments, x.name));
    }
    for (const auto& x : Backward<Formula>::get().options) {
      options.push_back(place(arguments, x.name));
    }
    for (size_t i = 0; i < differentiated.size(); ++i) {
      differentiated[i] = place(arguments, Formula::kDifferentiated[i]);
    }
  }
};

at::Tensor tensor_or_undefined(const IValue& value) { return value.isTensor() ? value.toTensor() : at::Tensor(); }
IValue value_or_none(const at::Tensor& tensor) { return tensor.defined() ? IValue(tensor) : IValue(); }

bool has_tangent(const IValue& x) { return x.isTensor() && x.toTensor()._fw_grad(/*level=*/0).defined(); }
bool requires_grad(const IValue& x) { return x.isTensor() && x.toTensor().requires_grad(); }

// No transform of torch.func and no mode looks at the calls of this thread.
bool nothing_observes() {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// The contents of a call's node, besides the tensors that may have gradients.
struct Made {
  variable_list results;  // o or y and, if it was asked for, the final state
  variable_list tensors;
  c10::impl::GenericList options{c10::AnyType::get()};
};

// Hands on the results, as functions of the tensors that have gradients.
template <typename Formula>
struct ByFormula : torch::autograd::Function<ByFormula<Formula>> {
  template <typename... Tensors>
  static variable_list forward(AutogradContext* context, Made made, const Tensors&...) {
    context->save_for_backward(std::move(made.tensors));
    context->saved_data["options"] = std::move(made.options);
    context->saved_data["shape"] = made.results[0].sizes();
    context->set_materialize_grads(false);
    return std::move(made.results);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    grads.resize(2);  // o's, and the final state's
    // None for Made, which has no gradient
    variable_list found(1 + Formula::kDifferentiated.size());
    if (!grads[0].defined() && !grads[1].defined()) {
      return found;
    }
    const auto& b = Backward<Formula>::get();
    const variable_list tensors = context->get_saved_variables();
    const c10::impl::GenericList options = context->saved_data.at("options").toList();
    Stack stack(b.count);
    for (size_t i = 0; i < tensors.size(); ++i) {
      stack[b.tensors[i].place] = value_or_none(tensors[i]);
    }
    for (size_t i = 0; i < options.size(); ++i) {
      stack[b.options[i].place] = options.get(i);
    }
    stack[b.grad_o] =
        grads[0].defined() ? grads[0] : tensors[0].new_zeros(context->saved_data.at("shape").toDimVector());
    stack[b.grad_final_state] = value_or_none(grads[1]);
    if (at::GradMode::is_enabled() || !nothing_observes() || std::ranges::any_of(stack, has_tangent)) {
      b.op.callBoxed(stack);  // notes that its results cannot be differentiated again
    } else {
      const at::AutoDispatchBelowAutograd below;
      b.op.callBoxed(stack);
    }
    for (size_t i = 0; i < Formula::kDifferentiated.size(); ++i) {
      if (tensors[b.differentiated[i]].defined()) {
        found[1 + i] = stack[i].toTensor();
      }
    }
    return found;
  }
};

template <typename Formula>
variable_list differentiable(Made made, const std::array<at::Tensor, Formula::kDifferentiated.size()>& tensors) {
  const auto apply = [&](const auto&... x) {
    return ByFormula<Formula>::apply(std::move(made), std::optional<at::Tensor>(x)...);
  };
  return std::apply(apply, tensors);
}

using Values = c10::ArrayRef<IValue>;

bool is_plain(DispatchKeySet keys, Values arguments) {
  return !keys.has(DispatchKey::Python) && nothing_observes() && std::ranges::none_of(arguments, has_tangent);
}
bool wants_gradients(Values arguments) {
  return at::GradMode::is_enabled() && std::ranges::any_of(arguments, requires_grad);
}
void call_python(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed((keys & c10::after_autograd_keyset).add(DispatchKey::AutogradOther), stack);
}

template <typename Formula>
void run(const Forward<Formula>& f, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Values arguments = torch::jit::last(*stack, f.count);
  const DispatchKeySet below = keys & c10::after_autograd_keyset;
  if (!is_plain(keys, arguments)) {
    call_python(op, keys, stack);
    return;
  }
  if (!wants_gradients(arguments)) {
    op.redispatchBoxed(below, stack);
    return;
  }
  Made made;
  for (const size_t i : f.tensors) {
    made.tensors.push_back(tensor_or_undefined(arguments[i]));
  }
  for (const size_t i : f.options) {
    made.options.push_back(arguments[i]);
  }
  std::array<at::Tensor, Formula::kDifferentiated.size()> differentiated;
  std::ranges::transform(f.differentiated, differentiated.begin(),
                         [&](size_t i) { return tensor_or_undefined(arguments[i]); });
  const bool output_final_state = arguments[f.output_final_state].toBool();
  {
    const at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(below, stack);
  }
  const size_t first = stack->size() - op.schema().returns().size();
  made.results.push_back((*stack)[first + f.o].toTensor());
  if (output_final_state) {
    made.results.push_back((*stack)[first + f.final_state].toTensor());
  }
  const variable_list results = differentiable<Formula>(std::move(made), differentiated);
  (*stack)[first + f.o] = results[0];
  if (output_final_state) {
    (*stack)[first + f.final_state] = results[1];
  }
}

// One for each op, whose places it keeps.
template <typename Formula, bool kLowLevel = false>
void kernel(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  static const auto& forward = *new Forward<Formula>(op);
  run(forward, op, keys, stack);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Runs an op without noting a derivative. The versions of the tensors that the op writes tell autograd that they have
// changed.
void run_in_place(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Arguments& schema = op.schema().arguments();
  const Values arguments = torch::jit::last(*stack, schema.size());
  c10::SmallVector<at::Tensor, 4> written;
  for (size_t i = 0; i < schema.size(); ++i) {
    if (is_written(schema[i]) && arguments[i].isTensor()) {
      written.push_back(arguments[i].toTensor());
    }
  }
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  for (const at::Tensor& x : written) {
    if (!x.is_inference()) {  // inference tensors have no version
      x.unsafeGetTensorImpl()->bump_version();
    }
  }
}

void run_without_derivative(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Values arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (is_plain(keys, arguments) && !wants_gradients(arguments)) {
    run_in_place(op, keys, stack);
  } else {
    call_python(op, keys, stack);
  }
}

using BoxedFunction = torch::CppFunction (*)();
constexpr std::array<std::pair<std::string_view, BoxedFunction>, 4> kDerivable = {{
    {"flash_qla::chunk_gated_delta_rule", torch::CppFunction::makeFromBoxedFunction<&kernel<Separate>>},
    {"flash_qla::chunk_gated_delta_rule_fwd", torch::CppFunction::makeFromBoxedFunction<&kernel<Separate, true>>},
    {"flash_qla::chunk_gated_delta_rule_packed", torch::CppFunction::makeFromBoxedFunction<&kernel<Packed>>},
    {"flash_qla::causal_conv1d", torch::CppFunction::makeFromBoxedFunction<&kernel<Convolution>>},
}};

// Calls use(name, schema) for each op of the package. A name with an underscore is of an op that is written in Python.
template <typename Use>
void for_each_op(Use use) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.starts_with("flash_qla::") && !name.name.starts_with("flash_qla::_")) {
      use(name.name, op_of(name.name.c_str()).schema());
    }
  }
}

void register_for_device(torch::Library& library) {
  for_each_op([&](const std::string& name, const c10::FunctionSchema&) {
    const auto derivable = std::ranges::find(kDerivable, name, [](const auto& x) { return x.first; });
    library.impl(name.c_str(), derivable != kDerivable.end()
                                   ? derivable->second()
                                   : torch::CppFunction::makeFromBoxedFunction<&run_without_derivative>());
  });
}

TORCH_LIBRARY_IMPL(flash_qla, AutogradCPU, library) { register_for_device(library); }
TORCH_LIBRARY_IMPL(flash_qla, AutogradCUDA, library) { register_for_device(library); }
// Inference mode skips autograd, but tensors from outside of it have versions.
TORCH_LIBRARY_IMPL(flash_qla, ADInplaceOrView, library) {
  for_each_op([&](const std::string& name, const c10::FunctionSchema& schema) {
    if (std::ranges::any_of(schema.arguments(), is_written)) {
      library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_in_place>());
    }
  });
}

}  // namespace
}  // namespace flash_qla
