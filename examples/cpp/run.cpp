// Runs a saved model that calls flash_qla's ops, without Python:
//
//   flash_qla_run libflash_qla.so model.pt|model.pt2 inputs.pt outputs.pt [cpu|cuda]
//
// model.pt is a TorchScript module, model.pt2 an AOTInductor package; export_block.py makes one of each. inputs.pt is a
// tuple of tensors and None that Python's torch.save wrote, outputs.pt one of tensors for its torch.load.
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

using c10::IValue;

std::vector<IValue> elements(const IValue& tuple) { return tuple.toTupleRef().elements().vec(); }

std::vector<IValue> read_inputs(const std::string& path, c10::Device device) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<IValue> inputs = elements(torch::jit::pickle_load(bytes));
  for (IValue& input : inputs) {
    if (input.isTensor()) {
      input = input.toTensor().to(device);
    }
  }
  return inputs;
}

std::vector<at::Tensor> run_torchscript(const std::string& path, const std::vector<IValue>& inputs,
                                        c10::Device device) {
  torch::jit::Module module = torch::jit::load(path, device);
  module.eval();
  std::vector<at::Tensor> outputs;
  for (const IValue& output : elements(module.forward(inputs))) {
    outputs.push_back(output.toTensor());
  }
  return outputs;
}

// A package takes the tensors that the model was exported with, on the device that it was compiled for. An argument
// that was None then is no input.
std::vector<at::Tensor> run_aoti_package(const std::string& path, const std::vector<IValue>& inputs) {
  torch::inductor::AOTIModelPackageLoader model(path);
  std::vector<at::Tensor> tensors;
  for (const IValue& input : inputs) {
    if (input.isTensor()) {
      tensors.push_back(input.toTensor());
    }
  }
  return model.run(tensors);
}

void run(const std::string& library, const std::string& model, const std::string& inputs_path,
         const std::string& outputs_path, c10::Device device) {
  // The ops register themselves as the library is loaded: before any model that names them.
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    throw std::runtime_error(dlerror());
  }
  const c10::InferenceMode inference;
  const std::vector<IValue> inputs = read_inputs(inputs_path, device);
  const std::string suffix = ".pt2";
  const bool is_package =
      model.size() >= suffix.size() && model.compare(model.size() - suffix.size(), suffix.size(), suffix) == 0;
  std::vector<at::Tensor> outputs =
      is_package ? run_aoti_package(model, inputs) : run_torchscript(model, inputs, device);

  std::vector<IValue> saved;
  for (const at::Tensor& output : outputs) {
    std::cout << output.toString() << ' ' << output.sizes() << '\n';
    saved.emplace_back(output.cpu());
  }
  const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(saved)));
  std::ofstream file(outputs_path, std::ios::binary);
  if (!file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
    throw std::runtime_error("cannot write " + outputs_path);
  }
}

int main(int argc, char** argv) {
  if (argc < 5 || argc > 6) {
    std::cerr << "usage: " << argv[0] << " libflash_qla.so model.pt|model.pt2 inputs.pt outputs.pt [cpu|cuda]\n";
    return 2;
  }
  try {
    run(argv[1], argv[2], argv[3], argv[4], c10::Device(argc == 6 ? argv[5] : "cpu"));
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
