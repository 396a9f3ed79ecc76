// The tokens of a call: the sizes and the dtype of q, k and v. Every op takes them.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace flash_qla {

struct Tokens {
  const char* op = nullptr;  // qualified name, for messages
  int64_t B = 0, T = 0, H_k = 0, H_v = 0, K = 0, V = 0;
  int64_t N = 0;                          // sequences
  torch::headeronly::ScalarType dtype{};  // dtype of q, k, v and o

  int64_t tokens() const { return B * T; }
  int64_t group() const { return H_v / H_k; }  // value heads a query/key head
};

// Reads sizes and dtype; N is B. Fails unless q, k and v agree.
void read_tokens(Tokens& tokens, const torch::stable::Tensor& q, const torch::stable::Tensor& k,
                 const torch::stable::Tensor& v);

// check_shape of a tensor [B, T, ..]. Its text has q's shape as well, and that tokens come before heads: other
// packages have heads first, and of such tensors T and H_k are mistaken for each other.
void check_shape_of_tokens(const char* op, const char* name, const torch::stable::Tensor& tensor,
                           torch::headeronly::IntHeaderOnlyArrayRef expected, const char* symbols,
                           const torch::stable::Tensor& q);

// Reads N from cu_seqlens, if they were given.
void read_sequences(Tokens& tokens, const std::optional<torch::stable::Tensor>& cu_seqlens);

// Whether the dimensions batch and token, [B, T, ..], can be read as one with one stride.
bool tokens_are_even(const torch::stable::Tensor& tensor);

// How far the GPU's kernels step in a tensor [B, T, heads, channels], in elements. They take batch and token as one
// dimension.
struct RowStrides {
  int64_t row, head;
};
RowStrides row_strides(const torch::stable::Tensor& tensor);

// Copies those of up to three tensors [B, T, heads, channels] on a GPU that its kernels cannot read where they are: in
// `dtype`, by TMA and in pieces of 16 bytes.
void make_readable_rows(const char* op, std::initializer_list<torch::stable::Tensor*> tensors,
                        torch::headeronly::ScalarType dtype);

// The parts of a tensor [B, T, 2 H_k K + H_v V], as views [B, T, heads, channels].
struct TokenParts {
  torch::stable::Tensor q, k, v;
};
TokenParts split_tokens(const torch::stable::Tensor& mixed_qkv, int64_t H_k, int64_t K, int64_t H_v, int64_t V);

}  // namespace flash_qla
