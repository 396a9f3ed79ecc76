// What every op takes: tokens of sequences, as q, k and v have them.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace flash_qla {

struct Tokens {
  const char* op = nullptr;  // qualified name, for messages
  int64_t B = 0, T = 0, H_k = 0, H_v = 0, K = 0, V = 0;
  int64_t N = 0;                          // sequences
  torch::headeronly::ScalarType dtype{};  // of q, k, v and o

  int64_t tokens() const { return B * T; }
  int64_t group() const { return H_v / H_k; }  // value heads a query/key head
};

// Sizes and dtype, N as without cu_seqlens; fails unless q, k and v agree.
void read_tokens(Tokens& tokens, const torch::stable::Tensor& q, const torch::stable::Tensor& k,
                 const torch::stable::Tensor& v);

// N by cu_seqlens, if there are any.
void read_sequences(Tokens& tokens, const std::optional<torch::stable::Tensor>& cu_seqlens);

}  // namespace flash_qla
