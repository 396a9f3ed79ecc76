// What Python asks of the library beside its ops: what was compiled, whether it runs here, what a call would launch.
// C functions of integers that answer in JSON, {"result": ...} or {"error": "..."}, for flash_qla/_C.py to call through
// ctypes: so one library serves every version of Python. An answer lasts until the thread's next question.
#include <exception>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "gpu/device.h"
#include "gpu/dispatch.h"
#include "gpu/registry.h"

namespace flash_qla {
namespace {

struct Json {
  std::ostringstream text;

  Json() { text.precision(std::numeric_limits<double>::max_digits10); }

  void value(std::string_view string) {
    text << '"';
    for (const char c : string) {
      if (c == '"' || c == '\\') {
        text << '\\';
      }
      text << (static_cast<unsigned char>(c) < ' ' ? ' ' : c);
    }
    text << '"';
  }
  void value(const char* string) { value(std::string_view(string)); }
  void value(auto number) { text << number; }

  // Takes name, value, name, value, ...
  void object(const auto&... fields) {
    text << '{';
    const char* between = "";
    bool is_name = true;
    const auto write = [&](const auto& field) {
      text << between;
      value(field);
      between = is_name ? ": " : ", ";
      is_name = !is_name;
    };
    (write(fields), ...);
    text << '}';
  }

  void list(const auto& items, auto write) {
    text << '[';
    const char* between = "";
    for (const auto& item : items) {
      text << between;
      write(item);
      between = ", ";
    }
    text << ']';
  }
};

const char* answer(auto write) {
  static thread_local std::string text;
  Json json;
  try {
    json.text << "{\"result\": ";
    write(json);
  } catch (const std::exception& error) {
    json.text.str("");
    json.text << "{\"error\": ";
    json.value(error.what());
  }
  json.text << '}';
  text = json.text.str();
  return text.c_str();
}

void require(bool holds, const char* name, int64_t value, const char* expected) {
  if (!holds) {
    throw std::invalid_argument(std::string("flash_qla._C.forward_dispatch: ") + name + " is " + std::to_string(value) +
                                ", expected " + expected);
  }
}

}  // namespace
}  // namespace flash_qla

using namespace flash_qla;

extern "C" {

FLASH_QLA_API const char* flash_qla_kernels() {
  return answer([](Json& json) {
    json.list(kernel_registry(), [&](const KernelInfo& kernel) {
      json.object("name", kernel.name, "kernel", kernel.kernel, "params", kernel.params, "threads", kernel.threads,
                  "registers", kernel.registers, "static_shared_bytes", kernel.static_shared_bytes,
                  "dynamic_shared_bytes", kernel.dynamic_shared_bytes, "spill_bytes", kernel.spill_bytes, "stack_bytes",
                  kernel.stack_bytes);
    });
  });
}

FLASH_QLA_API const char* flash_qla_build_info() {
  return answer([](Json& json) {
    json.object("version", FLASH_QLA_VERSION, "tilelang", toolchain().tilelang, "nvcc", toolchain().nvcc, "arch",
                toolchain().arch, "torch_target", FLASH_QLA_TORCH_TARGET);
  });
}

FLASH_QLA_API const char* flash_qla_driver_cuda_version() {
  return answer([](Json& json) { json.value(driver_cuda_version()); });
}

FLASH_QLA_API const char* flash_qla_gpus() {
  return answer([](Json& json) {
    json.list(gpus(), [&](const Gpu& gpu) {
      json.object("name", std::string_view(gpu.name), "major", gpu.major, "minor", gpu.minor, "sm_count", gpu.sm_count);
    });
  });
}

FLASH_QLA_API const char* flash_qla_obstacle(int64_t driver_cuda_version, int64_t major, int64_t minor) {
  return answer([&](Json& json) {
    json.value(std::string_view(
        obstacle(static_cast<int>(driver_cuda_version), static_cast<int>(major), static_cast<int>(minor))));
  });
}

FLASH_QLA_API const char* flash_qla_forward_dispatch(int64_t B, int64_t T, int64_t N, int64_t H_k, int64_t H_v,
                                                     int64_t sm_count, int64_t auto_cp, int64_t varlen,
                                                     int64_t low_level, int64_t use_qk_l2norm, int64_t output_h,
                                                     int64_t fp16) {
  return answer([&](Json& json) {
    require(B >= 0, "B", B, "at least 0");
    require(T >= 0, "T", T, "at least 0");
    require(N > 0, "N", N, "at least 1");
    require(H_k > 0, "H_k", H_k, "at least 1");
    require(H_v > 0 && H_v % H_k == 0, "H_v", H_v, "a multiple of H_k");
    require(sm_count > 0, "sm_count", sm_count, "at least 1");
    const ForwardDispatch dispatch = dispatch_forward({.B = B,
                                                       .T = T,
                                                       .N = N,
                                                       .H_k = H_k,
                                                       .H_v = H_v,
                                                       .varlen = varlen != 0,
                                                       .sm_count = static_cast<int>(sm_count),
                                                       .auto_cp = auto_cp != 0,
                                                       .low_level = low_level != 0,
                                                       .use_qk_l2norm = use_qk_l2norm != 0,
                                                       .output_h = output_h != 0,
                                                       .fp16 = fp16 != 0});
    json.object("value_tile", dispatch.value_tile, "segment_chunks", dispatch.segment_chunks, "cut_above",
                dispatch.cut_above, "whole_tile", dispatch.whole_tile, "fused", static_cast<int>(dispatch.fused),
                "segments", dispatch.segments, "ctas", dispatch.ctas, "heads_per_cta", dispatch.heads_per_cta,
                "workspace_bytes", dispatch.workspace_bytes, "predicted_us", dispatch.predicted_us);
  });
}

FLASH_QLA_API const char* flash_qla_override_forward_dispatch(int64_t value_tile, int64_t segment_chunks, int64_t fused,
                                                              int64_t cut_above, int64_t whole_tile) {
  return answer([&](Json& json) {
    override_forward_dispatch(value_tile, segment_chunks, fused, cut_above, whole_tile);
    json.text << "null";
  });
}

}  // extern "C"
