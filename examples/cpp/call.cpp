// Calls an op of flash_qla through PyTorch's dispatcher: flash_qla_call "$(python -m flash_qla --library)"
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <iostream>
#include <vector>

std::vector<c10::IValue> call(const char* op_name, std::vector<c10::IValue> stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(op_name, "");
  const auto& arguments = op.schema().arguments();
  while (stack.size() < arguments.size()) {
    stack.push_back(arguments[stack.size()].default_value().value());  // of those that are not given
  }
  op.callBoxed(stack);
  return stack;  // now the results
}

int main(int argc, char** argv) {
  if (argc != 2 || dlopen(argv[1], RTLD_NOW) == nullptr) {  // which registers the ops
    std::cerr << (argc == 2 ? dlerror() : "usage: flash_qla_call libflash_qla.so") << '\n';
    return 1;
  }
  at::manual_seed(0);
  const at::Tensor q = at::randn({1, 200, 2, 128}), k = at::randn({1, 200, 2, 128}), v = at::randn({1, 200, 4, 128});
  const at::Tensor g = -at::rand({1, 200, 4}), beta = at::rand({1, 200, 4});
  // In the order of the schema: scale and initial_state by default, output_final_state, use_qk_l2norm_in_kernel
  const auto results =
      call("flash_qla::chunk_gated_delta_rule", {q, k, v, g, beta, c10::IValue(), c10::IValue(), true, true});
  std::cout << results[0].toTensor().sizes() << ' ' << results[0].toTensor().sum().item<double>() << '\n';
}
