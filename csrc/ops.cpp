// The ops of torch.ops.flash_qla: their schemas, implementations and devices. An output that was not asked for (h,
// final_state, dh0, dA_log, ddt_bias), or that the caller has already (o in `out`), is an empty tensor of shape [0],
// because not all of TorchScript, export and functionalization can represent an optional return, or one that aliases an
// argument.
#include <torch/csrc/stable/library.h>

#include <array>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "checks.h"
#include "contents.h"
#include "convolution.h"
#include "decode.h"
#include "decode_region.h"
#include "norm.h"
#include "overlap.h"
#include "passes.h"
#include "prefill.h"
#include "ranks.h"
#include "region.h"
#include "schema.h"
#include "tensors.h"

namespace flash_qla {

// An argument's name in the schemas, and the member that takes it. The order of the records in a call of Stack::take
// decides about a name that two of them have.
template <>
constexpr auto kFields<Arguments> = std::tuple{
    Field{"q", &Arguments::q},
    Field{"k", &Arguments::k},
    Field{"v", &Arguments::v},
    Field{"g", &Arguments::g},
    Field{"beta", &Arguments::beta},
    Field{"scale", &Arguments::scale},
    Field{"initial_state", &Arguments::initial_state},
    Field{"cu_seqlens", &Arguments::cu_seqlens},
    Field{"max_seqlen", &Arguments::max_seqlen},
    Field{"output_final_state", &Arguments::output_final_state},
    Field{"output_h", &Arguments::output_h},
    Field{"use_qk_l2norm_in_kernel", &Arguments::use_qk_l2norm},
    Field{"state_v_first", &Arguments::state_v_first},
    Field{"auto_cp", &Arguments::auto_cp},
    Field{"batch_invariant", &Arguments::batch_invariant},
    Field{"state_dtype", &Arguments::state_dtype},
    Field{"use_gate_in_kernel", &Arguments::use_gate},
    Field{"A_log", &Arguments::A_log},
    Field{"dt_bias", &Arguments::dt_bias},
    Field{"use_beta_sigmoid_in_kernel", &Arguments::use_beta_sigmoid},
    Field{"allow_neg_eigval", &Arguments::allow_neg_eigval},
    Field{"map_sequences", &Arguments::map_sequences},
    Field{"workspace", &Arguments::workspace},
};
template <>
constexpr auto kFields<PackedTokens> = std::tuple{
    Field{"mixed_qkv", &PackedTokens::mixed_qkv},
    Field{"num_k_heads", &PackedTokens::num_k_heads},
    Field{"head_k_dim", &PackedTokens::head_k_dim},
};
template <>
constexpr auto kFields<GradientArguments> = std::tuple{
    Field{"g", &GradientArguments::g_cumsum},
    Field{"g_raw", &GradientArguments::g_raw},
    Field{"A", &GradientArguments::A},
    Field{"do", &GradientArguments::grad_o},
    Field{"dht", &GradientArguments::grad_final_state},
};
template <>
constexpr auto kFields<ForwardOutputs> = std::tuple{Field{"o", &ForwardOutputs::o}};
template <>
constexpr auto kFields<BackwardOutputs> = std::tuple{
    Field{"dq", &BackwardOutputs::dq}, Field{"dk", &BackwardOutputs::dk}, Field{"dv", &BackwardOutputs::dv},
    Field{"db", &BackwardOutputs::db}, Field{"dg", &BackwardOutputs::dg},
};
template <>
constexpr auto kFields<PoolArguments> = std::tuple{
    Field{"state_pool", &PoolArguments::state_pool},
    Field{"state_indices", &PoolArguments::state_indices},
    Field{"initial_state_indices", &PoolArguments::initial_state_indices},
    Field{"has_initial_state", &PoolArguments::has_initial_state},
    Field{"null_index", &PoolArguments::null_index},
    Field{"checkpoint_every", &PoolArguments::checkpoint_every},
    Field{"checkpoint_indices", &PoolArguments::checkpoint_indices},
    Field{"checkpoints", &PoolArguments::checkpoints},
    Field{"out", &PoolArguments::out},
    Field{"h", &PoolArguments::h},
};
template <>
constexpr auto kFields<DecodeArguments> = std::tuple{
    Field{"q", &DecodeArguments::q},
    Field{"k", &DecodeArguments::k},
    Field{"v", &DecodeArguments::v},
    Field{"a", &DecodeArguments::a},
    Field{"b", &DecodeArguments::b},
    Field{"A_log", &DecodeArguments::A_log},
    Field{"dt_bias", &DecodeArguments::dt_bias},
    Field{"state_pool", &DecodeArguments::state_pool},
    Field{"state_indices", &DecodeArguments::state_indices},
    Field{"scale", &DecodeArguments::scale},
    Field{"null_index", &DecodeArguments::null_index},
    Field{"use_qk_l2norm_in_kernel", &DecodeArguments::use_qk_l2norm},
    Field{"cu_seqlens", &DecodeArguments::cu_seqlens},
    Field{"num_accepted_tokens", &DecodeArguments::num_accepted_tokens},
    Field{"write_indices", &DecodeArguments::write_indices},
    Field{"intermediate_states", &DecodeArguments::intermediate_states},
    Field{"intermediate_indices", &DecodeArguments::intermediate_indices},
    Field{"parents", &DecodeArguments::parents},
    Field{"update_state", &DecodeArguments::update_state},
    Field{"state_v_first", &DecodeArguments::state_v_first},
    Field{"use_beta_sigmoid_in_kernel", &DecodeArguments::use_beta_sigmoid},
    Field{"allow_neg_eigval", &DecodeArguments::allow_neg_eigval},
    Field{"out", &DecodeArguments::out},
};
template <>
constexpr auto kFields<Backlog> = std::tuple{
    Field{"d_cache", &Backlog::d_cache},         Field{"k_cache", &Backlog::k_cache},
    Field{"g_cache", &Backlog::g_cache},         Field{"write_pos", &Backlog::write_pos},
    Field{"force_flush", &Backlog::force_flush},
};
template <>
constexpr auto kFields<NormArguments> = std::tuple{
    Field{"o", &NormArguments::o},
    Field{"z", &NormArguments::z},
    Field{"weight", &NormArguments::weight},
    Field{"eps", &NormArguments::eps},
    Field{"activation", &NormArguments::activation},
    Field{"norm_before_gate", &NormArguments::norm_before_gate},
    Field{"dy", &NormArguments::grad_y},
};

template <>
constexpr auto kFields<ConvolutionArguments> = std::tuple{
    Field{"x", &ConvolutionArguments::x},
    Field{"weight", &ConvolutionArguments::weight},
    Field{"bias", &ConvolutionArguments::bias},
    Field{"use_silu", &ConvolutionArguments::use_silu},
    Field{"initial_state", &ConvolutionArguments::initial_state},
    Field{"output_final_state", &ConvolutionArguments::output_final_state},
    Field{"cu_seqlens", &ConvolutionArguments::cu_seqlens},
    Field{"dy", &ConvolutionArguments::dy},
    Field{"dht", &ConvolutionArguments::dht},
};

template <>
constexpr auto kFields<RegionArguments> = std::tuple{
    Field{"mixed", &RegionArguments::mixed},
    Field{"z", &RegionArguments::z},
    Field{"a", &RegionArguments::a},
    Field{"b", &RegionArguments::b},
    Field{"conv_weight", &RegionArguments::conv_weight},
    Field{"conv_bias", &RegionArguments::conv_bias},
    Field{"norm_weight", &RegionArguments::norm_weight},
    Field{"initial_window", &RegionArguments::initial_window},
    Field{"norm_eps", &RegionArguments::norm_eps},
    Field{"norm_activation", &RegionArguments::norm_activation},
    Field{"o", &RegionArguments::o},
    Field{"dy", &RegionArguments::grad_y},
    Field{"dwindow", &RegionArguments::dwindow},
    Field{"window_pool", &RegionArguments::window_pool},
    Field{"window_checkpoints", &RegionArguments::window_checkpoints},
};
template <>
constexpr auto kFields<WindowArguments> = std::tuple{
    Field{"conv_weight", &WindowArguments::conv_weight},
    Field{"window_pool", &WindowArguments::window_pool},
    Field{"intermediate_windows", &WindowArguments::intermediate_windows},
};

namespace {

// The stack on which PyTorch calls an op: arguments in the schema's order, replaced by the results.
template <const char* kSchema>
class Stack {
 public:
  using S = Schema<kSchema>;
  Stack(StableIValue* values, uint64_t arguments, uint64_t results)
      : values_(values), arguments_(arguments), results_(results) {}

  static constexpr const char* kOp = S::kOp;

  // Sets the records' fields. Fails if a tensor is None that may not be, or if one that the op writes shares memory.
  template <typename... Records>
  void take(Records&... records) const {
    STD_TORCH_CHECK(S::kArguments.size() == arguments_, "flash_qla: an op takes other arguments than its schema has");
    take_all(std::make_index_sequence<S::kArguments.size()>(), records...);
  }

  template <typename... T>
  void give(T... results) const {
    STD_TORCH_CHECK(sizeof...(T) == results_, "flash_qla: an op returns other results than its schema has");
    StableIValue* next = values_;
    ((*next++ = torch::stable::detail::from(std::move(results))), ...);
  }

 private:
  template <size_t... i, typename... Records>
  void take_all(std::index_sequence<i...>, Records&... records) const {
    const std::array tensors = {take_argument<S, i>(values_[i], records...)...};
    (require<i>(tensors[i]), ...);
    if constexpr (S::kWrites) {
      check_overlap(kOp, std::array{TensorArgument{S::kArguments[i].name, tensors[i], S::kArguments[i].is_written}...});
    }
  }

  // The dispatcher passes None for a Tensor as an undefined tensor.
  template <size_t i>
  static void require(const torch::stable::Tensor* tensor) {
    if constexpr (S::kArguments[i].type == "Tensor") {
      check(tensor != nullptr && tensor->defined(), kOp, S::kArguments[i].name, " is None, expected a tensor");
    }
  }

  StableIValue* values_;
  uint64_t arguments_, results_;
};

// An op as PyTorch calls it. Its errors leave as PyTorch's: each library counts its exceptions in flight with its own
// libstdc++, so an exception of this one that PyTorch caught would leave both counts wrong.
template <const char* kSchema, void (*Op)(const Stack<kSchema>&)>
void boxed(StableIValue* values, uint64_t arguments, uint64_t results) {
  std::string error;
  try {
    Op(Stack<kSchema>(values, arguments, results));
    return;
  } catch (const std::bad_alloc&) {
    error = out_of_host_memory(Schema<kSchema>::kOp);
  } catch (const std::exception& e) {
    error = e.what();
  }
  throw_by_pytorch(error);
}

// Gives o and the final state.
template <auto Forward>
void give_forward(const auto& stack, Arguments a) {
  const Call call = make_call(stack.kOp, std::move(a));
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
void chunk_gated_delta_rule(const Stack<kChunkGatedDeltaRule>& stack) {
  Arguments a;
  stack.take(a);
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
void chunk_gated_delta_rule_fwd(const Stack<kChunkGatedDeltaRuleFwd>& stack) {
  Arguments a;
  a.output_A = true;
  stack.take(a);
  const Call call = make_call(stack.kOp, std::move(a));
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

// Takes the arguments of an op of the backward, whose g is the sum of the gates, and what else it has.
BackwardCall take_backward(const auto& stack, BackwardArguments& a, auto&... others) {
  stack.take(static_cast<GradientArguments&>(a), static_cast<Arguments&>(a), others...);
  return make_backward_call(stack.kOp, std::move(a));
}

template <auto Backward>
void chunk_gated_delta_rule_bwd(const Stack<kChunkGatedDeltaRuleBwd>& stack) {
  BackwardArguments a;
  const BackwardCall call = take_backward(stack, a);
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
void chunk_gated_delta_rule_packed(const Stack<kChunkGatedDeltaRulePacked>& stack) {
  Arguments a;
  PackedTokens packed;
  stack.take(packed, a);
  split(stack.kOp, a, packed);
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
void chunk_gated_delta_rule_packed_bwd(const Stack<kChunkGatedDeltaRulePackedBwd>& stack) {
  BackwardArguments a;
  PackedTokens packed;
  stack.take(packed, static_cast<Arguments&>(a), static_cast<GradientArguments&>(a));  // g is the forward's
  split(stack.kOp, a, packed);
  a.g_raw = a.g;
  a.packed = true;
  const BackwardCall call = make_backward_call(stack.kOp, std::move(a));
  BackwardOutputs out = Backward(call);
  check_results(call, out);
  stack.give(std::move(out.dmixed_qkv), std::move(out.db), std::move(out.dg), std::move(out.dh0), std::move(out.dA_log),
             std::move(out.ddt_bias));
}

// begin, replay and finish (ranks.h), for context parallelism over ranks (flash_qla/cp/). Arguments are those of the
// whole passes. The tensors that finish writes are the workspace and outputs, which begin allocates.
constexpr char kGatedDeltaRuleForwardBegin[] =
    "gated_delta_rule_forward_begin(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int[] map_sequences, "
    "float? scale=None, Tensor? initial_state=None, bool use_qk_l2norm_in_kernel=False, Tensor? cu_seqlens=None, bool "
    "state_v_first=False, bool auto_cp=True, bool use_gate_in_kernel=False, "
    "Tensor? A_log=None, Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False) "
    "-> (Tensor maps, Tensor workspace, Tensor o)";

template <auto Begin>
void gated_delta_rule_forward_begin(const Stack<kGatedDeltaRuleForwardBegin>& stack) {
  Arguments a;
  a.over_ranks = true;
  stack.take(a);
  const Call call = make_call(stack.kOp, std::move(a));
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
void gated_delta_rule_forward_finish(const Stack<kGatedDeltaRuleForwardFinish>& stack) {
  Arguments a;
  ForwardOutputs out;
  a.over_ranks = true;
  stack.take(a, out);
  const Call call = make_call(stack.kOp, std::move(a));
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

template <auto Begin>
void gated_delta_rule_backward_begin(const Stack<kGatedDeltaRuleBackwardBegin>& stack) {
  BackwardArguments a;
  a.over_ranks = true;
  const BackwardCall call = take_backward(stack, a);
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
void gated_delta_rule_backward_replay(const Stack<kGatedDeltaRuleBackwardReplay>& stack) {
  BackwardArguments a;
  a.over_ranks = true;
  const BackwardCall call = take_backward(stack, a);
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
void gated_delta_rule_backward_finish(const Stack<kGatedDeltaRuleBackwardFinish>& stack) {
  BackwardArguments a;
  BackwardOutputs out;
  a.over_ranks = true;
  const BackwardCall call = take_backward(stack, a, out);
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
void prefill_gated_delta_rule(const Stack<kPrefillGatedDeltaRule>& stack) {
  Arguments a;
  PoolArguments p;
  stack.take(a, p);
  stack.give(run_on_pool<Prefill>(make_prefill_call(stack.kOp, std::move(a), std::move(p))));
}

constexpr char kDecodeGatedDeltaRule[] =
    "decode_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? A_log, Tensor? dt_bias, "
    "Tensor(a!) state_pool, Tensor? state_indices=None, float? scale=None, int null_index=-1, "
    "bool use_qk_l2norm_in_kernel=True, Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, "
    "Tensor? write_indices=None, Tensor(b!)? intermediate_states=None, Tensor? intermediate_indices=None, "
    "Tensor? parents=None, bool update_state=True, bool state_v_first=True, bool? use_beta_sigmoid_in_kernel=None, "
    "bool allow_neg_eigval=False, Tensor(c!)? out=None) "
    "-> Tensor o";

template <auto Decode>
void decode_gated_delta_rule(const Stack<kDecodeGatedDeltaRule>& stack) {
  DecodeArguments a;
  stack.take(a);
  stack.give(run_on_pool<Decode>(make_decode_call(stack.kOp, std::move(a))));
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
void decode_gated_delta_rule_packed(const Stack<kDecodeGatedDeltaRulePacked>& stack) {
  PackedTokens packed;
  DecodeArguments a;
  stack.take(packed, a);
  stack.give(run_on_pool<Decode>(make_packed_decode_call(stack.kOp, packed.mixed_qkv, std::move(a))));
}

constexpr char kDecodeGatedDeltaRuleBuffered[] =
    "decode_gated_delta_rule_buffered(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor? A_log, "
    "Tensor? dt_bias, Tensor(a!) state_pool, Tensor? state_indices, Tensor(b!) d_cache, Tensor(c!) k_cache, "
    "Tensor(d!) g_cache, Tensor write_pos, Tensor? force_flush=None, float? scale=None, int null_index=-1, "
    "bool use_qk_l2norm_in_kernel=True, bool? use_beta_sigmoid_in_kernel=None, bool allow_neg_eigval=False, "
    "Tensor(e!)? out=None) "
    "-> Tensor o";

template <auto DecodeBuffered>
void decode_gated_delta_rule_buffered(const Stack<kDecodeGatedDeltaRuleBuffered>& stack) {
  DecodeArguments a;
  Backlog backlog;
  stack.take(a, backlog);
  stack.give(run_on_pool<DecodeBuffered>(make_buffered_decode_call(stack.kOp, std::move(a), std::move(backlog))));
}

constexpr char kGatedRmsNorm[] =
    "gated_rms_norm(Tensor o, Tensor z, Tensor weight, float eps=1e-06, str activation=\"silu\", "
    "bool norm_before_gate=True) -> Tensor y";

template <auto Norm>
void gated_rms_norm(const Stack<kGatedRmsNorm>& stack) {
  NormArguments a;
  stack.take(a);
  stack.give(Norm(make_norm_call(stack.kOp, std::move(a), /*is_backward=*/false)));
}

constexpr char kGatedRmsNormBwd[] =
    "gated_rms_norm_bwd(Tensor o, Tensor z, Tensor weight, Tensor dy, float eps=1e-06, str activation=\"silu\", "
    "bool norm_before_gate=True) -> (Tensor do, Tensor dz, Tensor dweight)";

template <auto Backward>
void gated_rms_norm_bwd(const Stack<kGatedRmsNormBwd>& stack) {
  NormArguments a;
  stack.take(a);
  NormGradients out = Backward(make_norm_call(stack.kOp, std::move(a), /*is_backward=*/true));
  stack.give(std::move(out.grad_o), std::move(out.dz), std::move(out.dweight));
}

constexpr char kCausalConv1d[] =
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, bool use_silu=True, Tensor? initial_state=None, "
    "bool output_final_state=False, Tensor? cu_seqlens=None) "
    "-> (Tensor y, Tensor final_state)";

template <auto Convolve>
void causal_conv1d(const Stack<kCausalConv1d>& stack) {
  ConvolutionArguments a;
  stack.take(a);
  ConvolutionOutputs out = Convolve(make_convolution(stack.kOp, std::move(a)));
  stack.give(std::move(out.y), std::move(out.final_state));
}

constexpr char kCausalConv1dBwd[] =
    "causal_conv1d_bwd(Tensor x, Tensor weight, Tensor? bias, Tensor dy, Tensor? dht=None, bool use_silu=True, "
    "Tensor? initial_state=None, Tensor? cu_seqlens=None) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dh0)";

template <auto ConvolveBackward>
void causal_conv1d_bwd(const Stack<kCausalConv1dBwd>& stack) {
  ConvolutionArguments a;
  stack.take(a);
  ConvolutionGradients out = ConvolveBackward(make_convolution_backward(stack.kOp, std::move(a)));
  stack.give(std::move(out.dx), std::move(out.dweight), std::move(out.dbias), std::move(out.dh0));
}

constexpr char kPrefillCausalConv1d[] =
    "prefill_causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state_pool, Tensor state_indices, "
    "bool use_silu=True, Tensor? cu_seqlens=None, Tensor? has_initial_state=None, int null_index=-1, "
    "Tensor? initial_state_indices=None, int checkpoint_every=0, Tensor? checkpoint_indices=None, "
    "Tensor(b!)? checkpoints=None) "
    "-> Tensor y";

template <auto Convolve>
void prefill_causal_conv1d(const Stack<kPrefillCausalConv1d>& stack) {
  ConvolutionArguments a;
  PoolArguments p;
  stack.take(a, p);
  stack.give(Convolve(make_convolution_on_pool(stack.kOp, std::move(a), std::move(p))).y);
}

// The region of a layer: the last three ops one after the other. o is what the backward needs of the forward.
constexpr char kGatedDeltaNet[] =
    "gated_delta_net(Tensor mixed, Tensor z, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor norm_weight, Tensor A_log, Tensor? dt_bias, int num_k_heads, int head_k_dim, float? scale=None, "
    "Tensor? initial_state=None, Tensor? initial_window=None, bool output_final_state=False, Tensor? cu_seqlens=None, "
    "SymInt? max_seqlen=None, bool state_v_first=False, bool auto_cp=True, ScalarType? state_dtype=None, "
    "bool allow_neg_eigval=False, float norm_eps=1e-06, str norm_activation=\"silu\") "
    "-> (Tensor y, Tensor final_state, Tensor final_window, Tensor o)";

template <auto Convolve, auto Forward, auto Norm>
void gated_delta_net(const Stack<kGatedDeltaNet>& stack) {
  RegionArguments r;
  Arguments a;
  PackedTokens heads;
  stack.take(r, a, heads);
  const Region region(stack.kOp, std::move(r), std::move(a), heads);
  ConvolutionOutputs x = Convolve(region.convolution());
  const Call call = region.rule(x.y);
  ForwardOutputs out = Forward(call);
  out.final_state = final_state_as_returned(call, std::move(out.final_state));
  check_results(call, out);
  Tensor y = Norm(region.norm(out.o));
  stack.give(std::move(y), std::move(out.final_state), std::move(x.final_state), std::move(out.o));
}

// It computes the convolution again.
constexpr char kGatedDeltaNetBwd[] =
    "gated_delta_net_bwd(Tensor mixed, Tensor z, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor norm_weight, Tensor A_log, Tensor? dt_bias, Tensor o, Tensor dy, int num_k_heads, int head_k_dim, "
    "Tensor? dht=None, Tensor? dwindow=None, float? scale=None, Tensor? initial_state=None, "
    "Tensor? initial_window=None, Tensor? cu_seqlens=None, SymInt? max_seqlen=None, bool state_v_first=False, "
    "bool auto_cp=True, bool allow_neg_eigval=False, float norm_eps=1e-06, str norm_activation=\"silu\") "
    "-> (Tensor dmixed, Tensor dz, Tensor da, Tensor db, Tensor dconv_weight, Tensor dconv_bias, "
    "Tensor dnorm_weight, Tensor dA_log, Tensor ddt_bias, Tensor dh0, Tensor dwindow0)";

template <auto Convolve, auto Backward, auto ConvolveBackward, auto NormBackward>
void gated_delta_net_bwd(const Stack<kGatedDeltaNetBwd>& stack) {
  RegionArguments r;
  Arguments a;
  PackedTokens heads;
  GradientArguments g;
  stack.take(r, a, heads, g);
  const Region region(stack.kOp, std::move(r), std::move(a), heads);
  NormGradients of_norm = NormBackward(region.norm_backward());
  const Tensor x = Convolve(region.convolution()).y;
  const BackwardCall call = region.rule_backward(x, std::move(of_norm.grad_o), g.grad_final_state);
  BackwardOutputs out = Backward(call);
  check_results(call, out);
  ConvolutionGradients of_convolution = ConvolveBackward(region.convolution_backward(std::move(out.dmixed_qkv)));
  stack.give(std::move(of_convolution.dx), std::move(of_norm.dz), std::move(out.dg), std::move(out.db),
             std::move(of_convolution.dweight), std::move(of_convolution.dbias), std::move(of_norm.dweight),
             std::move(out.dA_log), std::move(out.ddt_bias), std::move(out.dh0), std::move(of_convolution.dh0));
}

// The region for a few tokens of each sequence, on pools; see DecodeRegion.
constexpr char kDecodeGatedDeltaNet[] =
    "decode_gated_delta_net(Tensor mixed, Tensor z, Tensor a, Tensor b, Tensor? conv_weight, Tensor? conv_bias, "
    "Tensor norm_weight, Tensor A_log, Tensor? dt_bias, Tensor(a!)? window_pool, Tensor(b!) state_pool, "
    "Tensor state_indices, float? scale=None, int null_index=-1, bool allow_neg_eigval=False, float norm_eps=1e-06, "
    "str norm_activation=\"silu\", Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, "
    "Tensor? write_indices=None, Tensor(c!)? intermediate_states=None, Tensor(d!)? intermediate_windows=None, "
    "Tensor? intermediate_indices=None, Tensor? parents=None, bool update_state=True, Tensor(e!)? out=None) "
    "-> Tensor y";

template <auto Decode>
void decode_gated_delta_net(const Stack<kDecodeGatedDeltaNet>& stack) {
  WindowArguments w;
  RegionArguments r;
  DecodeArguments d;
  stack.take(w, r, d);
  const DecodeRegion region(stack.kOp, std::move(r), std::move(w), std::move(d));
  Tensor y = Decode(region);
  if (contents_are_checked()) {
    check_results(region.rule(), y);
  }
  stack.give(std::move(y));
}

// The region on states and windows in pools.
constexpr char kPrefillGatedDeltaNet[] =
    "prefill_gated_delta_net(Tensor mixed, Tensor z, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor norm_weight, Tensor A_log, Tensor? dt_bias, Tensor(a!) window_pool, Tensor(b!) state_pool, "
    "Tensor state_indices, int num_k_heads, int head_k_dim, float? scale=None, Tensor? cu_seqlens=None, "
    "SymInt? max_seqlen=None, Tensor? has_initial_state=None, Tensor? initial_state_indices=None, int null_index=-1, "
    "bool allow_neg_eigval=False, float norm_eps=1e-06, str norm_activation=\"silu\", int checkpoint_every=0, "
    "Tensor? checkpoint_indices=None, Tensor(c!)? checkpoints=None, Tensor(d!)? window_checkpoints=None, "
    "bool batch_invariant=False, Tensor(e!)? out=None) "
    "-> Tensor y";

template <auto Convolve, auto StoreWindows, auto Prefill, auto Norm>
void prefill_gated_delta_net(const Stack<kPrefillGatedDeltaNet>& stack) {
  RegionArguments r;
  Arguments a;
  PackedTokens heads;
  PoolArguments p;
  stack.take(r, a, heads, p);
  const Region region(stack.kOp, std::move(r), std::move(a), heads, std::move(p));
  Tensor y = region.allocate_y();
  const PrefillCall call = region.prefill(Convolve(region.convolution()).y);
  const Tensor o = Prefill(call);
  Norm(region.norm(o, y));
  StoreWindows(region.convolution());
  check_results(call, o);
  stack.give(region.y_as_returned(std::move(y)));
}

template <const char* kSchema, void (*Op)(const Stack<kSchema>&)>
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl(Schema<kSchema>::kOp, boxed<kSchema, Op>);
}

template <auto Forward, auto Backward, auto BeginForward, auto FinishForward, auto BeginBackward, auto ReplayBackward,
          auto FinishBackward, auto Prefill, auto Decode, auto DecodeBuffered, auto Convolve, auto StoreWindows,
          auto ConvolveBackward, auto Norm, auto NormBackward, auto DecodeRegion>
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
  implement<kCausalConv1d, causal_conv1d<Convolve>>(m);
  implement<kCausalConv1dBwd, causal_conv1d_bwd<ConvolveBackward>>(m);
  implement<kPrefillCausalConv1d, prefill_causal_conv1d<Convolve>>(m);
  implement<kGatedRmsNorm, gated_rms_norm<Norm>>(m);
  implement<kGatedRmsNormBwd, gated_rms_norm_bwd<NormBackward>>(m);
  implement<kDecodeGatedDeltaNet, decode_gated_delta_net<DecodeRegion>>(m);
  implement<kGatedDeltaNet, gated_delta_net<Convolve, Forward, Norm>>(m);
  implement<kGatedDeltaNetBwd, gated_delta_net_bwd<Convolve, Backward, ConvolveBackward, NormBackward>>(m);
  implement<kPrefillGatedDeltaNet, prefill_gated_delta_net<Convolve, StoreWindows, Prefill, Norm>>(m);
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
  m.def(flash_qla::kCausalConv1d);
  m.def(flash_qla::kCausalConv1dBwd);
  m.def(flash_qla::kPrefillCausalConv1d);
  m.def(flash_qla::kGatedRmsNorm);
  m.def(flash_qla::kGatedRmsNormBwd);
  m.def(flash_qla::kGatedDeltaNet);
  m.def(flash_qla::kDecodeGatedDeltaNet);
  m.def(flash_qla::kGatedDeltaNetBwd);
  m.def(flash_qla::kPrefillGatedDeltaNet);
}

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CPU, m) {
  flash_qla::register_for_device<
      flash_qla::forward_cpu, flash_qla::backward_cpu, flash_qla::begin_forward_cpu, flash_qla::finish_forward_cpu,
      flash_qla::begin_backward_cpu, flash_qla::replay_backward_cpu, flash_qla::finish_backward_cpu,
      flash_qla::prefill_cpu, flash_qla::decode_cpu, flash_qla::decode_buffered_cpu, flash_qla::convolve_cpu,
      flash_qla::store_windows_cpu, flash_qla::convolve_backward_cpu, flash_qla::gated_rms_norm_cpu,
      flash_qla::gated_rms_norm_backward_cpu, flash_qla::decode_region_cpu>(m);
}

STABLE_TORCH_LIBRARY_IMPL(flash_qla, CUDA, m) {
  flash_qla::register_for_device<
      flash_qla::forward_cuda, flash_qla::backward_cuda, flash_qla::begin_forward_cuda, flash_qla::finish_forward_cuda,
      flash_qla::begin_backward_cuda, flash_qla::replay_backward_cuda, flash_qla::finish_backward_cuda,
      flash_qla::prefill_cuda, flash_qla::decode_cuda, flash_qla::decode_buffered_cuda, flash_qla::convolve_cuda,
      flash_qla::store_windows_cuda, flash_qla::convolve_backward_cuda, flash_qla::gated_rms_norm_cuda,
      flash_qla::gated_rms_norm_backward_cuda, flash_qla::decode_region_cuda>(m);
}
