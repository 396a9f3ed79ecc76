#include "decode.h"

#include <array>
#include <cmath>
#include <utility>

#include "activations.h"
#include "checks.h"
#include "contents.h"
#include "layout.h"
#include "output.h"
#include "pool.h"
#include "tensors.h"

namespace flash_qla {

namespace {

// Returns the dimensions of state_indices; 0 if sequence n has state n.
int64_t check_state_indices(const DecodeCall& call) {
  if (!call.state_indices) {
    check(call.slots() == call.N, call.op, "state_pool has ", call.slots(), " states, expected ", call.N,
          ", the number of sequences, without state_indices");
    check(!call.write_indices, call.op, "write_indices is a tensor, expected None without state_indices");
    return 0;
  }
  const Tensor& indices = *call.state_indices;
  const int64_t rank = indices.dim();
  check_indices(call.op, "state_indices", indices);
  check(rank == 1 || rank == 2, call.op, "state_indices has ", rank, " dimensions, expected 1 or 2 ([N] or [N, S])");
  check_table(call.op, "state_indices", indices, call.N, rank, rank == 1 ? "[N]" : "[N, S]");
  check(rank == 1 || indices.size(1) >= 1, call.op, "state_indices has no columns, expected at least one");
  return rank;
}

void check_tables(const DecodeCall& call) {
  const int64_t rank = check_state_indices(call);
  if (call.num_accepted_tokens) {
    check(rank == 2, call.op, "num_accepted_tokens is a tensor, expected None unless state_indices is [N, S]");
    check_table(call.op, "num_accepted_tokens", *call.num_accepted_tokens, call.N, 1, "[N]");
  }
  if (call.write_indices) {
    check_table(call.op, "write_indices", *call.write_indices, call.N, 2, "[N, S]");
  }
  if (call.intermediate_indices) {
    check(call.intermediate_states.has_value(), call.op,
          "intermediate_indices is a tensor, expected None without intermediate_states");
    check_table(call.op, "intermediate_indices", *call.intermediate_indices, call.N, 1, "[N]");
  }
  if (call.parents) {
    check_table(call.op, "parents", *call.parents, call.N, 2, "[N, S]");
    check(!call.writes_back(), call.op,
          "update_state is True, expected False with parents: a tree of tokens has no last state");
  }
}

// Checks a tensor of replay buffers, [slots, heads, L, ..], which is written in place. Its dtype must be the compute
// dtype or, with in_dtype_of_q, the dtype of q.
void check_backlog(const DecodeCall& call, const char* name, const Tensor& backlog, bool in_dtype_of_q,
                   std::initializer_list<int64_t> slot, const char* symbols) {
  const ScalarType compute_dtype = call.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const ScalarType dtype = backlog.scalar_type();
  if (dtype != compute_dtype && !(in_dtype_of_q && dtype == call.dtype)) [[unlikely]] {
    const bool either = in_dtype_of_q && call.dtype != compute_dtype;
    fail(call.op, name, " has dtype ", dtype_string(dtype), ", expected ", dtype_string(compute_dtype),
         either ? " or " : "", either ? dtype_string(call.dtype) : "");
  }
  check_slots(call.op, name, backlog, call.slots(), slot, symbols);
}

}  // namespace

DecodeCall make_decode_call(const char* op, DecodeArguments arguments) {
  DecodeCall call{std::move(arguments), {.op = op}};
  check_devices(op, call.q,
                {{"k", &call.k},
                 {"v", &call.v},
                 {"state_pool", &call.state_pool},
                 {"state_indices", or_null(call.state_indices)},
                 {"cu_seqlens", or_null(call.cu_seqlens)},
                 {"num_accepted_tokens", or_null(call.num_accepted_tokens)},
                 {"write_indices", or_null(call.write_indices)},
                 {"intermediate_states", or_null(call.intermediate_states)},
                 {"intermediate_indices", or_null(call.intermediate_indices)},
                 {"parents", or_null(call.parents)}});
  read_tokens(call, call.q, call.k, call.v);
  if (!call.use_beta_sigmoid) {
    call.use_beta_sigmoid = call.A_log.has_value();
  }
  check_activations(call, call.q,
                    {.g = {"a", &call.a},
                     .beta = {"b", &call.b},
                     .A_log = or_null(call.A_log),
                     .dt_bias = or_null(call.dt_bias),
                     .use_gate = call.A_log.has_value(),
                     .use_beta_sigmoid = *call.use_beta_sigmoid,
                     .allow_neg_eigval = call.allow_neg_eigval,
                     .gate_flag = "A_log"});
  read_sequences(call, call.cu_seqlens);
  const bool v_first = call.state_v_first;
  check_states(op, "state_pool", call.state_pool, call.H_v, call.V, call.K, 4,
               v_first ? "[slots, H_v, V, K]" : "[slots, H_v, K, V]", v_first);
  if (call.intermediate_states) {
    check_states(op, "intermediate_states", *call.intermediate_states, call.H_v, call.V, call.K, 5,
                 v_first ? "[rows, steps, H_v, V, K]" : "[rows, steps, H_v, K, V]", v_first);
  }
  if (call.out) {
    check_out(call, *call.out, call.q);
  }
  check_tables(call);
  if (!call.scale) {
    call.scale = 1.0 / std::sqrt(static_cast<double>(call.K));
  }
  check_contents(call);
  return call;
}

DecodeCall make_packed_decode_call(const char* op, const Tensor& mixed_qkv, DecodeArguments arguments) {
  const bool v_first = arguments.state_v_first;
  check_floating(op, "mixed_qkv", mixed_qkv);
  check_rank(op, "state_pool", arguments.state_pool, 4, v_first ? "[slots, H_v, V, K]" : "[slots, H_v, K, V]");
  const bool one_token = mixed_qkv.dim() == 2;
  if (!one_token) {
    check_rank(op, "mixed_qkv", mixed_qkv, 3, "[B, T, 2 H_k K + H_v V]");
  }
  const int64_t last = mixed_qkv.dim() - 1, H_v = arguments.state_pool.size(1),
                V = arguments.state_pool.size(v_first ? 2 : 3), K = arguments.state_pool.size(v_first ? 3 : 2),
                width = mixed_qkv.size(last), keys = width - H_v * V;
  check(K > 0 && keys > 0 && keys % (2 * K) == 0, op, "mixed_qkv has ", width,
        " channels, expected 2 H_k K + H_v V, of "
        "state_pool K = ",
        K, " and H_v V = ", H_v * V);
  // Adds a dimension of one token.
  const auto with_token = [](const Tensor& x) {
    const std::array shape = {x.size(0), int64_t{1}, x.size(1)};
    const std::array strides = {x.stride(0), int64_t{0}, x.stride(1)};
    return view(x, shape, strides);
  };
  const TokenParts parts = split_tokens(one_token ? with_token(mixed_qkv) : mixed_qkv, keys / (2 * K), K, H_v, V);
  arguments.q = parts.q;
  arguments.k = parts.k;
  arguments.v = parts.v;
  for (auto& [name, tensor] : {std::pair{"a", &arguments.a}, std::pair{"b", &arguments.b}}) {
    if (one_token) {
      check_rank(op, name, *tensor, 2, "[B, H_v], as mixed_qkv has two dimensions");
      *tensor = with_token(*tensor);
    }
  }
  return make_decode_call(op, std::move(arguments));
}

BufferedDecodeCall make_buffered_decode_call(const char* op, DecodeArguments arguments, Backlog backlog) {
  if (arguments.state_indices) {
    check_rank(op, "state_indices", *arguments.state_indices, 1, "[N]");
  }
  BufferedDecodeCall call{make_decode_call(op, std::move(arguments)), std::move(backlog)};
  check_floating(op, "state_pool", call.state_pool);
  check(call.T == 1, op, "q has ", call.T, " tokens of each sequence, expected 1 ([B, 1, H_k, K])");
  check_devices(op, call.q,
                {{"d_cache", &call.d_cache},
                 {"k_cache", &call.k_cache},
                 {"g_cache", &call.g_cache},
                 {"write_pos", &call.write_pos},
                 {"force_flush", or_null(call.force_flush)}});
  check_rank(op, "d_cache", call.d_cache, 4, "[slots, H_v, L, V]");
  const int64_t L = call.length();
  check(L >= 1 && L <= kDecodeBacklog, op, "d_cache has backlogs of ", L, " steps, expected 1 to ", kDecodeBacklog,
        " ([slots, H_v, L, V])");
  check_backlog(call, "d_cache", call.d_cache, true, {call.H_v, L, call.V}, "[slots, H_v, L, V]");
  check_backlog(call, "k_cache", call.k_cache, true, {call.H_k, L, call.K}, "[slots, H_k, L, K]");
  check_backlog(call, "g_cache", call.g_cache, false, {call.H_v, L}, "[slots, H_v, L]");
  check_table(op, "write_pos", call.write_pos, call.N, 1, "[N]");
  if (call.force_flush) {
    check_table(op, "force_flush", *call.force_flush, call.N, 1, "[N]");
  }
  check_contents(call);
  return call;
}

}  // namespace flash_qla
