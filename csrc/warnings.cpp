#include "warnings.h"

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <stdexcept>

#include "inspect.h"

namespace flash_qla {
namespace {

std::atomic<const char* (*)(const char*) noexcept> handler = nullptr;

}  // namespace

void warn(const char* op, const char* text) {
  const auto handle = handler.load();
  if (handle == nullptr) {
    aoti_torch_warn(op, __FILE__, __LINE__, text);
  } else if (const char* error = handle(text)) {
    throw std::runtime_error(error);
  }
}

extern "C" void flash_qla_on_warning(const char* (*handle)(const char* text) noexcept) noexcept { handler = handle; }

}  // namespace flash_qla
