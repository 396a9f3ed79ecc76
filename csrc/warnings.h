#pragma once

namespace flash_qla {

// Passes a warning to the handler of flash_qla_on_warning (inspect.h), or else with the op to PyTorch, which prints it.
// Throws if the handler makes the warning an error.
void warn(const char* op, const char* text);

}  // namespace flash_qla
