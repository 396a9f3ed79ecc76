#include "output.h"

#include "checks.h"
#include "tensors.h"

namespace flash_qla {

void check_out(const Tokens& tokens, const Tensor& out, const Tensor& q) {
  check_device(tokens.op, "out", out, q);
  check_same_dtype(tokens.op, "out", out, q);
  check_shape(tokens.op, "out", out, {tokens.B, tokens.T, tokens.H_v, tokens.V}, "[B, T, H_v, V], like v");
}

Tensor memory_of(const Tensor& out) { return view(out, out.sizes(), out.strides()); }

namespace {

bool is_written_directly(const std::optional<Tensor>& out) { return out && out->is_contiguous() && is_aligned(*out); }

}  // namespace

Tensor allocate_output(const Tokens& tokens, const std::optional<Tensor>& out, const Tensor& q) {
  return is_written_directly(out) ? memory_of(*out)
                                  : new_empty(tokens.op, q, {tokens.B, tokens.T, tokens.H_v, tokens.V}, tokens.dtype);
}

Tensor output_as_returned(const Tokens& tokens, const std::optional<Tensor>& out, Tensor o) {
  if (!out) {
    return o;
  }
  if (!is_written_directly(out)) {
    Tensor memory = memory_of(*out);
    copy(memory, o);
  }
  return new_empty(tokens.op, o, {0}, tokens.dtype);
}

}  // namespace flash_qla
