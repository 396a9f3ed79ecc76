#include "tokens.h"

#include <array>
#include <limits>

#include "checks.h"
#include "chunks.h"
#include "gpu/copy_tokens.h"
#include "tensors.h"

namespace flash_qla {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_shape_of_tokens(const char* op, const char* name, const Tensor& tensor,
                           torch::headeronly::IntHeaderOnlyArrayRef expected, const char* symbols, const Tensor& q) {
  if (tensor.sizes() != expected) [[unlikely]] {
    fail(op, name, " has shape ", shape_string(tensor.sizes()), ", expected ", shape_string(expected), " (", symbols,
         "), because q has shape ", shape_string(q.sizes()), ": tensors are [B, T, H, D], tokens before heads");
  }
}

void read_tokens(Tokens& tokens, const Tensor& q, const Tensor& k, const Tensor& v) {
  const char* const op = tokens.op;
  check_floating(op, "q", q);
  tokens.dtype = q.scalar_type();
  check_same_dtype(op, "k", k, q);
  check_same_dtype(op, "v", v, q);
  check_rank(op, "q", q, 4, "[B, T, H_k, K]");
  check_rank(op, "v", v, 4, "[B, T, H_v, V]");
  tokens.B = tokens.N = q.size(0);
  tokens.T = q.size(1);
  tokens.H_k = q.size(2);
  tokens.K = q.size(3);
  tokens.H_v = v.size(2);
  tokens.V = v.size(3);
  if (tokens.H_k < 1 || tokens.K < 1) [[unlikely]] {
    fail(op, "q has shape ", shape_string(q.sizes()),
         ", expected at least one head and one head dimension ([B, T, H_k, K])");
  }
  check(tokens.H_v >= 1 && tokens.H_v % tokens.H_k == 0, op, "v has ", tokens.H_v,
        " heads, expected a positive multiple of the ", tokens.H_k, " heads of q and k");
  check_shape_of_tokens(op, "k", k, {tokens.B, tokens.T, tokens.H_k, tokens.K}, "[B, T, H_k, K]", q);
  check_shape_of_tokens(op, "v", v, {tokens.B, tokens.T, tokens.H_v, tokens.V}, "[B, T, H_v, V]", q);
}

void read_sequences(Tokens& tokens, const std::optional<Tensor>& cu_seqlens) {
  if (!cu_seqlens) {
    return;
  }
  check_indices(tokens.op, "cu_seqlens", *cu_seqlens);
  check_rank(tokens.op, "cu_seqlens", *cu_seqlens, 1, "[N + 1]");
  check(cu_seqlens->size(0) >= 1, tokens.op, "cu_seqlens has shape [0], expected at least one offset ([N + 1])");
  check(tokens.B == 1, tokens.op, "q has batch size ", tokens.B,
        ", expected 1 with cu_seqlens (sequences are packed along T)");
  tokens.N = cu_seqlens->size(0) - 1;
}

namespace {

constexpr int64_t kPieceBytes = 16;
// Elements: 32 bits count those from head to head, and those of a chunk.
constexpr int64_t kMostHeadStride = std::numeric_limits<int32_t>::max(), kMostRowStride = kMostHeadStride / kChunk;

bool are_readable_rows(const Tensor& tensor, ScalarType dtype) {
  if (!has_dtype(tensor, dtype) || !is_aligned(tensor) || !tokens_are_even(tensor)) {
    return false;
  }
  const auto can_follow = [&](int64_t stride, int64_t most) {
    return stride > 0 && stride <= most && stride * tensor.element_size() % kPieceBytes == 0;
  };
  const auto [row, head] = row_strides(tensor);
  return tensor.stride(3) == 1 && can_follow(row, kMostRowStride) && can_follow(head, kMostHeadStride);
}

}  // namespace

bool tokens_are_even(const Tensor& tensor) {
  return tensor.size(0) == 1 || tensor.size(1) == 1 || tensor.stride(0) == tensor.size(1) * tensor.stride(1);
}

RowStrides row_strides(const Tensor& tensor) {
  const int64_t heads = tensor.size(2), channels = tensor.size(3);
  const int64_t head = heads == 1 ? channels : tensor.stride(2);
  if (tensor.size(1) > 1) {
    return {tensor.stride(1), head};
  }
  return {tensor.size(0) > 1 ? tensor.stride(0) : heads * channels, head};
}

void make_readable_rows(const char* op, std::initializer_list<Tensor*> tensors, ScalarType dtype) {
  CopiedTokens copied{};
  size_t count = 0;
  for (Tensor* const tensor : tensors) {
    if (are_readable_rows(*tensor, dtype)) {
      continue;
    }
    if (has_dtype(*tensor, dtype) && tensor->numel() > 0) {
      copied.at(count++) = tensor;
    } else {
      make_aligned(op, *tensor, dtype);
    }
  }
  if (count > 0) {
    copy_tokens(op, copied);
  }
}

TokenParts split_tokens(const Tensor& mixed_qkv, int64_t H_k, int64_t K, int64_t H_v, int64_t V) {
  const int64_t step = mixed_qkv.stride(2);
  const auto part = [&](int64_t heads, int64_t channels, int64_t first) {
    const std::array shape = {mixed_qkv.size(0), mixed_qkv.size(1), heads, channels};
    const std::array strides = {mixed_qkv.stride(0), mixed_qkv.stride(1), channels * step, step};
    return view(mixed_qkv, shape, strides, first * step);
  };
  return {part(H_k, K, 0), part(H_k, K, H_k * K), part(H_v, V, 2 * H_k * K)};
}

}  // namespace flash_qla
