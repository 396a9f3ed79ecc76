#pragma once

namespace flash_qla {

// Tells whoever asked for it by flash_qla_on_warning (inspect.h), or else PyTorch, which prints it. `op` is for that.
// Throws where a warning is to be an error.
void warn(const char* op, const char* text);

}  // namespace flash_qla
