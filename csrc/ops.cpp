// The ops of torch.ops.flash_qla: their schemas, implementations and devices. An output that was not asked for (h,
// final_state, dh0, dA_log, ddt_bias), or that the caller has already (o in `out`), is an empty tensor of shape [0],
// because not all of TorchScript, export and functionalization can represent an optional return, or one that aliases an
// argument.
#include <torch/csrc/stable/library.h>

#include <array>
#include <exception>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checks.h"
#include "contents.h"
#include "decode.h"
#include "halves.h"
#include "overlap.h"
#include "passes.h"
#include "prefill.h"
#include "tensors.h"

namespace flash_qla {

namespace {

// The names that an op's schema gives.
struct Schema {
  struct Argument {
    std::string name;
    bool is_written;  // as Tensor(a!)
  };
  std::string op;  // qualified
  std::vector<Argument> arguments;
  bool writes = false;

  // text: name(type name=default, ...) -> results
  explicit Schema(std::string_view text) {
    const size_t open = text.find('(');
    op = "flash_qla::" + std::string(text.substr(0, open));
    std::istringstream rest{std::string(text.substr(open + 1, text.rfind(") -> ") - open - 1))};
    for (std::string argument; std::getline(rest >> std::ws, argument, ',');) {
      const size_t name = argument.find(' ') + 1;
      const bool is_written = argument.find("!)") < name;
      arguments.push_back({argument.substr(name, argument.find('=') - name), is_written});
      writes |= is_written;
    }
  }
};

const Tensor* given(const Tensor& tensor) { return tensor.defined() ? &tensor : nullptr; }
const Tensor* given(const std::optional<Tensor>& tensor) { return or_null(tensor); }
const Tensor* given(const auto&) { return nullptr; }  // no tensor

// The stack on which PyTorch calls an op: arguments in the schema's order, replaced by the results. Two lists of
// arguments have to agree, the schema's and take's. TORCH_BOX would need four.
class Stack {
 public:
  Stack(const Schema& schema, StableIValue* values, uint64_t arguments, uint64_t results)
      : schema_(schema), values_(values), arguments_(arguments), results_(results) {}

  const char* op() const { return schema_.op.c_str(); }

  // Fails if an argument that the op writes shares memory.
  template <typename... T>
  void take(T&... arguments) const {
    STD_TORCH_CHECK(sizeof...(T) == arguments_, "flash_qla: an op takes other arguments than its schema says");
    const StableIValue* next = values_;
    ((arguments = torch::stable::detail::to<T>(*next++)), ...);
    if (schema_.writes) {
      const Schema::Argument* argument = schema_.arguments.data();
      const auto named = [&](const Tensor* tensor) {
        const auto& [name, is_written] = *argument++;
        return TensorArgument{name.c_str(), tensor, is_written};
      };
      check_overlap(op(), std::array{named(given(arguments))...});
    }
  }

  template <typename... T>
  void give(T... results) const {
    STD_TORCH_CHECK(sizeof...(T) == results_, "flash_qla: an op returns other results than its schema says");
    StableIValue* next = values_;
    ((*next++ = torch::stable::detail::from(std::move(results))), ...);
  }

 private:
  const Schema& schema_;
  StableIValue* values_;
  uint64_t arguments_, results_;
};

template <const char* kSchema>
const Schema& schema() {
  static const Schema& parsed = *new Schema(kSchema);
  return parsed;
}

// An op as PyTorch calls it. Its errors leave as PyTorch's: each library counts its exceptions in flight with its own
// libstdc++, so an exception of this one that PyTorch caught would leave both counts wrong.
template <const char* kSchema, void (*Op)(const Stack&)>
void boxed(StableIValue* values, uint64_t arguments, uint64_t results) {
  const Schema& names = schema<kSchema>();
  std::string error;
  try {
    Op(Stack(names, values, arguments, results));
    return;
  } catch (const std::bad_alloc&) {
    error = out_of_host_memory(names.op.c_str());
  } catch (const std::exception& e) {
    error = e.what();
  }
  throw_by_pytorch(error);
}

// A whole pass, or a half of one.
enum class Part { kWhole, kHalf };

// Takes `arguments`. The last argument of a whole pass is max_seqlen. A half has none, because it cuts every sequence.
template <Part part>
void take_pass(const Stack& stack, Arguments& a, auto&... arguments) {
  if constexpr (part == Part::kWhole) {
    stack.take(arguments..., a.max_seqlen);
  } else {
    stack.take(arguments...);
  }
}

// Takes the arguments of an op of the forward. `own`: its arguments between beta and the activations.
template <Part part = Part::kWhole>
void take_forward(const Stack& stack, Arguments& a, auto&... own) {
  take_pass<part>(stack, a, a.q, a.k, a.v, a.g, a.beta, own..., a.use_gate, a.A_log, a.dt_bias, a.use_beta_sigmoid,
                  a.allow_neg_eigval);
}

// Gives o and the final state.
template <auto Forward>
void give_forward(const Stack& stack, Arguments a) {
  const Call call = make_call(stack.op(), std::move(a));
  ForwardOutputs out = Forward(call);
  out.final_state = final_state_as_returned(call, std::move(out.final_state));
  check_results(call, out);
  stack.give(std::move(out.o), std::move(out.final_state));
}

constexpr char kChunkGatedDeltaRule[] =
    "chunk_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, "
    "Tensor? initial_state=None, bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
    "Tensor? cu_seqlens=None, bool state_v_first=False, bool auto_cp=True, ScalarType? state_dtype=None, "
    "bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, "
    "bool allow_neg_eigval=False, SymInt? max_seqlen=None) "
    "-> (Tensor o, Tensor final_state)";

template <auto Forward>
void chunk_gated_delta_rule(const Stack& stack) {
  Arguments a;
  take_forward(stack, a, a.scale, a.initial_state, a.output_final_state, a.use_qk_l2norm, a.cu_seqlens, a.state_v_first,
               a.auto_cp, a.state_dtype);
  give_forward<Forward>(stack, std::move(a));
}

constexpr char kChunkGatedDeltaRuleFwd[] =
    "chunk_gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, "
    "Tensor? initial_state=None, Tensor? cu_seqlens=None, bool output_final_state=True, bool output_h=False, "
    "bool auto_cp=True, bool state_v_first=False, bool use_qk_l2norm_in_kernel=False, "
    "ScalarType? state_dtype=None, bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, "
    "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, SymInt? max_seqlen=None) "
    "-> (Tensor g_cumsum, Tensor A, Tensor o, Tensor h, Tensor final_state)";

template <auto Forward>
void chunk_gated_delta_rule_fwd(const Stack& stack) {
  Arguments a;
  a.output_A = true;
  take_forward(stack, a, a.scale, a.initial_state, a.cu_seqlens, a.output_final_state, a.output_h, a.auto_cp,
               a.state_v_first, a.use_qk_l2norm, a.state_dtype);
  const Call call = make_call(stack.op(), std::move(a));
  ForwardOutputs out = Forward(call);
  out.h = h_as_returned(call, std::move(out.h));
  out.final_state = final_state_as_returned(call, std::move(out.final_state));
  check_results(call, out);
  stack.give(std::move(out.g_cumsum), std::move(out.A), std::move(out.o), std::move(out.h), std::move(out.final_state));
}

constexpr char kChunkGatedDeltaRuleBwd[] =
    "chunk_gated_delta_rule_bwd(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? A, Tensor do, "
    "Tensor? dht=None, float? scale=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
    "bool state_v_first=False, bool auto_cp=True, bool use_qk_l2norm_in_kernel=False, "
    "bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, "
    "bool allow_neg_eigval=False, Tensor? g_raw=None, SymInt? max_seqlen=None) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor db, Tensor dg, Tensor dh0, Tensor dA_log, Tensor ddt_bias)";

// Takes the arguments of an op of the backward. `own`: its arguments between beta and cu_seqlens.
template <Part part = Part::kWhole>
BackwardCall take_backward(const Stack& stack, BackwardArguments& a, auto&... own) {
  take_pass<part>(stack, a, a.q, a.k, a.v, a.g_cumsum, a.beta, own..., a.cu_seqlens, a.state_v_first, a.auto_cp,
                  a.use_qk_l2norm, a.use_gate, a.A_log, a.dt_bias, a.use_beta_sigmoid, a.allow_neg_eigval, a.g_raw);
  return make_backward_call(stack.op(), std::move(a));
}

template <auto Backward>
void chunk_gated_delta_rule_bwd(const Stack& stack) {
  BackwardArguments a;
  const BackwardCall call = take_backward(stack, a, a.A, a.grad_o, a.grad_final_state, a.scale, a.initial_state);
  BackwardOutputs out = Backward(call);
  check_results(call, out);
  stack.give(std::move(out.dq), std::move(out.dk), std::move(out.dv), std::move(out.db), std::move(out.dg),
             std::move(out.dh0), std::move(out.dA_log), std::move(out.ddt_bias));
}

// The same with q, k and v in one tensor, whose gradient is one tensor too.
constexpr char kChunkGatedDeltaRulePacked[] =
    "chunk_gated_delta_rule_packed(Tensor mixed_qkv, Tensor g, Tensor beta, int num_k_heads, int head_k_dim, "
    "float? scale=None, Tensor? initial_state=None, bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
    "Tensor? cu_seqlens=None, bool state_v_first=False, bool auto_cp=True, ScalarType? state_dtype=None, "
    "bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, "
    "bool allow_neg_eigval=False, SymInt? max_seqlen=None) "
    "-> (Tensor o, Tensor final_state)";

template <auto Forward>
void chunk_gated_delta_rule_packed(const Stack& stack) {
  Arguments a;
  PackedTokens packed;
  stack.take(packed.mixed_qkv, a.g, a.beta, packed.num_k_heads, packed.head_k_dim, a.scale, a.initial_state,
             a.output_final_state, a.use_qk_l2norm, a.cu_seqlens, a.state_v_first, a.auto_cp, a.state_dtype, a.use_gate,
             a.A_log, a.dt_bias, a.use_beta_sigmoid, a.allow_neg_eigval, a.max_seqlen);
  split(stack.op(), a, packed);
  give_forward<Forward>(stack, std::move(a));
}

constexpr char kChunkGatedDeltaRulePackedBwd[] =
    "chunk_gated_delta_rule_packed_bwd(Tensor mixed_qkv, Tensor g, Tensor beta, int num_k_heads, int head_k_dim, "
    "Tensor do, Tensor? dht=None, float? scale=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
    "bool state_v_first=False, bool auto_cp=True, bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, "
    "Tensor? A_log=None, Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
    "SymInt? max_seqlen=None) "
    "-> (Tensor dmixed_qkv, Tensor db, Tensor dg, Tensor dh0, Tensor dA_log, Tensor ddt_bias)";

template <auto Backward>
void chunk_gated_delta_rule_packed_bwd(const Stack& stack) {
  BackwardArguments a;
  PackedTokens packed;
  stack.take(packed.mixed_qkv, a.g, a.beta, packed.num_k_heads, packed.head_k_dim, a.grad_o, a.grad_final_state,
             a.scale, a.initial_state, a.cu_seqlens, a.state_v_first, a.auto_cp, a.use_qk_l2norm, a.use_gate, a.A_log,
             a.dt_bias, a.use_beta_sigmoid, a.allow_neg_eigval, a.max_seqlen);
  split(stack.op(), a, packed);
  a.g_raw = a.g;
  a.packed = true;
  const BackwardCall call = make_backward_call(stack.op(), std::move(a));
  BackwardOutputs out = Backward(call);
  check_results(call, out);
  stack.give(std::move(out.dmixed_qkv), std::move(out.db), std::move(out.dg), std::move(out.dh0), std::move(out.dA_log),
             std::move(out.ddt_bias));
}

// The halves of halves.h, for context parallelism over ranks (flash_qla/cp/). Arguments are those of the whole
// passes. The tensors that finish writes are the workspace and outputs, which begin allocates.
constexpr char kGatedDeltaRuleForwardBegin[] =
    "gated_delta_rule_forward_begin(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int[] map_sequences, "
    "float? scale=None, Tensor? initial_state=None, bool use_qk_l2norm_in_kernel=False, Tensor? cu_seqlens=None, bool "
    "state_v_first=False, bool auto_cp=True, bool use_gate_in_kernel=False, "
    "Tensor? A_log=None, Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False) "
    "-> (Tensor maps, Tensor workspace, Tensor o)";

// The place for the workspace that the op takes.
Tensor& given_workspace(Arguments& a) { return a.workspace.emplace(undefined_tensor()); }

void take_half_forward(const Stack& stack, Arguments& a, auto&... own) {
  a.in_halves = true;
  take_forward<Part::kHalf>(stack, a, own...);
}

template <auto Begin>
void gated_delta_rule_forward_begin(const Stack& stack) {
  Arguments a;
  take_half_forward(stack, a, a.map_sequences, a.scale, a.initial_state, a.use_qk_l2norm, a.cu_seqlens, a.state_v_first,
                    a.auto_cp);
  const Call call = make_call(stack.op(), std::move(a));
  ForwardOutputs out = allocate_forward(call);
  Begun begun = Begin(call, out);
  stack.give(std::move(begun.maps), std::move(begun.workspace), std::move(out.o));
}

constexpr char kGatedDeltaRuleForwardFinish[] =
    "gated_delta_rule_forward_finish(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) workspace, "
    "Tensor(b!) o, float? scale=None, Tensor? initial_state=None, bool output_final_state=False, "
    "bool use_qk_l2norm_in_kernel=False, Tensor? cu_seqlens=None, bool state_v_first=False, bool auto_cp=True, "
    "ScalarType? state_dtype=None, bool use_gate_in_kernel=False, Tensor? A_log=None, Tensor? dt_bias=None, "
    "bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False) "
    "-> Tensor final_state";

template <auto Finish>
void gated_delta_rule_forward_finish(const Stack& stack) {
  Arguments a;
  ForwardOutputs out;
  take_half_forward(stack, a, given_workspace(a), out.o, a.scale, a.initial_state, a.output_final_state,
                    a.use_qk_l2norm, a.cu_seqlens, a.state_v_first, a.auto_cp, a.state_dtype);
  const Call call = make_call(stack.op(), std::move(a));
  check_begun(call, out);
  out.final_state = allocate_final_state(call);
  Finish(call, out);
  out.final_state = final_state_as_returned(call, std::move(out.final_state));
  check_results(call, out);
  stack.give(std::move(out.final_state));
}

constexpr char kGatedDeltaRuleBackwardBegin[] =
    "gated_delta_rule_backward_begin(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor do, "
    "int[] map_sequences, Tensor? dht=None, float? scale=None, Tensor? cu_seqlens=None, bool state_v_first=False, "
    "bool auto_cp=True, bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, Tensor? A_log=None, "
    "Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, Tensor? g_raw=None) "
    "-> (Tensor maps, Tensor workspace, Tensor dq, Tensor dk, Tensor dv, Tensor db, Tensor dg)";

BackwardCall take_half_backward(const Stack& stack, BackwardArguments& a, auto&... own) {
  a.in_halves = true;
  return take_backward<Part::kHalf>(stack, a, a.grad_o, own...);
}

template <auto Begin>
void gated_delta_rule_backward_begin(const Stack& stack) {
  BackwardArguments a;
  const BackwardCall call = take_half_backward(stack, a, a.map_sequences, a.grad_final_state, a.scale);
  BackwardOutputs out = allocate_backward(call);
  Begun begun = Begin(call, out);
  stack.give(std::move(begun.maps), std::move(begun.workspace), std::move(out.dq), std::move(out.dk), std::move(out.dv),
             std::move(out.db), std::move(out.dg));
}

constexpr char kGatedDeltaRuleBackwardReplay[] =
    "gated_delta_rule_backward_replay(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor do, "
    "Tensor(a!) workspace, float? scale=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
    "bool state_v_first=False, bool auto_cp=True, bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, "
    "Tensor? A_log=None, Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
    "Tensor? g_raw=None) "
    "-> ()";

template <auto Replay>
void gated_delta_rule_backward_replay(const Stack& stack) {
  BackwardArguments a;
  const BackwardCall call = take_half_backward(stack, a, given_workspace(a), a.scale, a.initial_state);
  check_workspace(call);
  Replay(call);
  stack.give();
}

constexpr char kGatedDeltaRuleBackwardFinish[] =
    "gated_delta_rule_backward_finish(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor do, "
    "Tensor(a!) workspace, Tensor(b!) dq, Tensor(c!) dk, Tensor(d!) dv, Tensor(e!) db, Tensor(f!) dg, "
    "Tensor? dht=None, float? scale=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
    "bool state_v_first=False, bool auto_cp=True, bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, "
    "Tensor? A_log=None, Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
    "Tensor? g_raw=None) "
    "-> (Tensor dh0, Tensor dA_log, Tensor ddt_bias)";

template <auto Finish>
void gated_delta_rule_backward_finish(const Stack& stack) {
  BackwardArguments a;
  BackwardOutputs out;
  const BackwardCall call = take_half_backward(stack, a, given_workspace(a), out.dq, out.dk, out.dv, out.db, out.dg,
                                               a.grad_final_state, a.scale, a.initial_state);
  check_begun(call, out);
  allocate_sums(call, out);
  Finish(call, out);
  check_results(call, out);
  stack.give(std::move(out.dh0), std::move(out.dA_log), std::move(out.ddt_bias));
}

// The result o of an op on a pool.
template <auto Run>
Tensor run_on_pool(auto call) {
  if (!contents_are_checked()) [[likely]] {
    return Run(std::move(call));
  }
  Tensor o = Run(call);
  check_results(call, o);
  return o;
}

constexpr char kPrefillGatedDeltaRule[] =
    "prefill_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state_pool, "
    "Tensor state_indices, float? scale=None, Tensor? cu_seqlens=None, Tensor? has_initial_state=None, "
    "int null_index=-1, bool use_qk_l2norm_in_kernel=False, int checkpoint_every=0, "
    "Tensor? checkpoint_indices=None, Tensor(b!)? checkpoints=None, bool use_gate_in_kernel=False, "
    "Tensor? A_log=None, Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
    "bool batch_invariant=False, Tensor? initial_state_indices=None, Tensor(c!)? out=None, Tensor(d!)? h=None, "
    "SymInt? max_seqlen=None) "
    "-> Tensor o";

template <auto Prefill>
void prefill_gated_delta_rule(const Stack& stack) {
  Arguments a;
  PoolArguments p;
  stack.take(a.q, a.k, a.v, a.g, a.beta, p.state_pool, p.state_indices, a.scale, a.cu_seqlens, p.has_initial_state,
             p.null_index, a.use_qk_l2norm, p.checkpoint_every, p.checkpoint_indices, p.checkpoints, a.use_gate,
             a.A_log, a.dt_bias, a.use_beta_sigmoid, a.allow_neg_eigval, a.batch_invariant, p.initial_state_indices,
             p.out, p.h, a.max_seqlen);
  stack.give(run_on_pool<Prefill>(make_prefill_call(stack.op(), std::move(a), std::move(p))));
}

constexpr char kDecodeGatedDeltaRule[] =
    "decode_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(a!) state_pool, Tensor? state_indices=None, float? scale=None, int null_index=-1, "
    "bool use_qk_l2norm_in_kernel=True, Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, "
    "Tensor? write_indices=None, Tensor(b!)? intermediate_states=None, Tensor? intermediate_indices=None, "
    "Tensor? parents=None, bool update_state=True, bool state_v_first=True, bool? use_beta_sigmoid_in_kernel=None, "
    "bool allow_neg_eigval=False, Tensor(c!)? out=None) "
    "-> Tensor o";

// Takes the arguments of an op of decoding. `first`: its arguments before a.
void take_decode(const Stack& stack, DecodeArguments& a, auto&... first) {
  stack.take(first..., a.a, a.b, a.A_log, a.dt_bias, a.state_pool, a.state_indices, a.scale, a.null_index,
             a.use_qk_l2norm, a.cu_seqlens, a.num_accepted_tokens, a.write_indices, a.intermediate_states,
             a.intermediate_indices, a.parents, a.update_state, a.state_v_first, a.use_beta_sigmoid, a.allow_neg_eigval,
             a.out);
}

template <auto Decode>
void decode_gated_delta_rule(const Stack& stack) {
  DecodeArguments a;
  take_decode(stack, a, a.q, a.k, a.v);
  stack.give(run_on_pool<Decode>(make_decode_call(stack.op(), std::move(a))));
}

constexpr char kDecodeGatedDeltaRulePacked[] =
    "decode_gated_delta_rule_packed(Tensor mixed_qkv, Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(a!) state_pool, Tensor? state_indices=None, float? scale=None, int null_index=-1, "
    "bool use_qk_l2norm_in_kernel=True, Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, "
    "Tensor? write_indices=None, Tensor(b!)? intermediate_states=None, Tensor? intermediate_indices=None, "
    "Tensor? parents=None, bool update_state=True, bool state_v_first=True, bool? use_beta_sigmoid_in_kernel=None, "
    "bool allow_neg_eigval=False, Tensor(c!)? out=None) "
    "-> Tensor o";

template <auto Decode>
void decode_gated_delta_rule_packed(const Stack& stack) {
  Tensor mixed_qkv = undefined_tensor();
  DecodeArguments a;
  take_decode(stack, a, mixed_qkv);
  stack.give(run_on_pool<Decode>(make_packed_decode_call(stack.op(), mixed_qkv, std::move(a))));
}

constexpr char kDecodeGatedDeltaRuleBuffered[] =
    "decode_gated_delta_rule_buffered(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? A_log, "
    "Tensor? dt_bias, Tensor(a!) state_pool, Tensor? state_indices, Tensor(b!) d_cache, Tensor(c!) k_cache, "
    "Tensor(d!) g_cache, Tensor write_pos, Tensor? force_flush=None, float? scale=None, int null_index=-1, "
    "bool use_qk_l2norm_in_kernel=True, bool? use_beta_sigmoid_in_kernel=None, bool allow_neg_eigval=False, "
    "Tensor(e!)? out=None) "
    "-> Tensor o";

template <auto DecodeBuffered>
void decode_gated_delta_rule_buffered(const Stack& stack) {
  DecodeArguments a;
  Backlog backlog;
  stack.take(a.q, a.k, a.v, a.a, a.b, a.A_log, a.dt_bias, a.state_pool, a.state_indices, backlog.d_cache,
             backlog.k_cache, backlog.g_cache, backlog.write_pos, backlog.force_flush, a.scale, a.null_index,
             a.use_qk_l2norm, a.use_beta_sigmoid, a.allow_neg_eigval, a.out);
  stack.give(run_on_pool<DecodeBuffered>(make_buffered_decode_call(stack.op(), std::move(a), std::move(backlog))));
}

template <const char* kSchema, void (*Op)(const Stack&)>
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl(schema<kSchema>().op.c_str(), boxed<kSchema, Op>);
}

template <auto Forward, auto Backward, auto BeginForward, auto FinishForward, auto BeginBackward, auto ReplayBackward,
          auto FinishBackward, auto Prefill, auto Decode, auto DecodeBuffered>
void register_for_device(torch::stable::detail::StableLibrary& m) {
  implement<kChunkGatedDeltaRule, chunk_gated_delta_rule<Forward>>(m);
  implement<kChunkGatedDeltaRuleFwd, chunk_gated_delta_rule_fwd<Forward>>(m);
  implement<kChunkGatedDeltaRuleBwd, chunk_gated_delta_rule_bwd<Backward>>(m);
  implement<kChunkGatedDeltaRulePacked, chunk_gated_delta_rule_packed<Forward>>(m);
  implement<kChunkGatedDeltaRulePackedBwd, chunk_gated_delta_rule_packed_bwd<Backward>>(m);
  implement<kGatedDeltaRuleForwardBegin, gated_delta_rule_forward_begin<BeginForward>>(m);
  implement<kGatedDeltaRuleForwardFinish, gated_delta_rule_forward_finish<FinishForward>>(m);
  implement<kGatedDeltaRuleBackwardBegin, gated_delta_rule_backward_begin<BeginBackward>>(m);
  implement<kGatedDeltaRuleBackwardReplay, gated_delta_rule_backward_replay<ReplayBackward>>(m);
  implement<kGatedDeltaRuleBackwardFinish, gated_delta_rule_backward_finish<FinishBackward>>(m);
  implement<kPrefillGatedDeltaRule, prefill_gated_delta_rule<Prefill>>(m);
  implement<kDecodeGatedDeltaRule, decode_gated_delta_rule<Decode>>(m);
  implement<kDecodeGatedDeltaRulePacked, decode_gated_delta_rule_packed<Decode>>(m);
  implement<kDecodeGatedDeltaRuleBuffered, decode_gated_delta_rule_buffered<DecodeBuffered>>(m);
}

}  // namespace

}  // namespace flash_qla

STABLE_TORCH_LIBRARY(flash_qla, m) {
  m.def(flash_qla::kChunkGatedDeltaRule);
  m.def(flash_qla::kChunkGatedDeltaRuleFwd);
  m.def(flash_qla::kChunkGatedDeltaRuleBwd);
  m.def(flash_qla::kChunkGatedDeltaRulePacked);
  m.def(flash_qla::kChunkGatedDeltaRulePackedBwd);
  m.def(flash_qla::kGatedDeltaRuleForwardBegin);
  m.def(flash_qla::kGatedDeltaRuleForwardFinish);
  m.def(flash_qla::kGatedDeltaRuleBackwardBegin);
  m.def(flash_qla::kGatedDeltaRuleBackwardReplay);
  m.def(flash_qla::kGatedDeltaRuleBackwardFinish);
  m.def(flash_qla::kPrefillGatedDeltaRule);
  m.def(flash_qla::kDecodeGatedDeltaRule);
  m.def(flash_qla::kDecodeGatedDeltaRulePacked);
  m.def(flash_qla::kDecodeGatedDeltaRuleBuffered);
}

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CPU, m) {
  flash_qla::register_for_device<flash_qla::forward_cpu, flash_qla::backward_cpu, flash_qla::begin_forward_cpu,
                                 flash_qla::finish_forward_cpu, flash_qla::begin_backward_cpu,
                                 flash_qla::replay_backward_cpu, flash_qla::finish_backward_cpu, flash_qla::prefill_cpu,
                                 flash_qla::decode_cpu, flash_qla::decode_buffered_cpu>(m);
}

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CUDA, m) {
  flash_qla::register_for_device<flash_qla::forward_cuda, flash_qla::backward_cuda, flash_qla::begin_forward_cuda,
                                 flash_qla::finish_forward_cuda, flash_qla::begin_backward_cuda,
                                 flash_qla::replay_backward_cuda, flash_qla::finish_backward_cuda,
                                 flash_qla::prefill_cuda, flash_qla::decode_cuda, flash_qla::decode_buffered_cuda>(m);
}
