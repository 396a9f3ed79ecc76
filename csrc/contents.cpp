#include "contents.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "checks.h"
#include "cpu/activations.h"
#include "cpu/pool.h"
#include "environment.h"
#include "tensors.h"

namespace flash_qla {

namespace {

// The values that a number may have. Infinite pre-activation numbers are valid: a log decay of -inf, or a step size of
// 0.
enum class Allowed { kFinite, kLogDecay, kNotNan, kFiniteResult };

// The largest beta |k|^2. A token's step multiplies the state along k by 1 - beta |k|^2, so beyond 2 the state grows
// from token to token. Keys of norm 1 and betas of 2 may be rounded to bf16: |k|^2 and beta are then up to 1 % larger
// each.
constexpr double kMostStep = 2 * 1.03;

class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  // Checks the elements of the live rows; of every row without `live`.
  void check(const char* name, const Tensor& tensor, Allowed allowed, const std::vector<bool>& live = {}) const {
    const Tensor readable = on_cpu(tensor);
    const cpu::Floats elements = floats_of(readable);
    const int64_t count = tensor.numel();
    const int64_t rows = live.empty() ? 1 : static_cast<int64_t>(live.size());
    for (int64_t i = 0; i < count; ++i) {
      const auto x = elements.get<double>(i);
      if (!is_allowed(x, allowed) && (live.empty() || live[i / (count / rows)])) [[unlikely]] {
        refuse(name, tensor, i, x, allowed);
      }
    }
  }
  void check(const char* name, const std::optional<Tensor>& tensor, Allowed allowed) const {
    if (tensor) {
      check(name, *tensor, allowed);
    }
  }

  // Checks a slot of a tensor [slots, ..] in place; of its second dimension `most` entries.
  void check_slot(const char* name, const Tensor& tensor, int64_t slot, Allowed allowed, int64_t most) const {
    const auto shape = tensor.sizes(), strides = tensor.strides();
    std::vector<int64_t> sizes(shape.begin() + 1, shape.end());
    const std::vector<int64_t> steps(strides.begin() + 1, strides.end());
    sizes[1] = std::min(sizes[1], most);
    check(cpu::entry(name, slot).c_str(), view(tensor, sizes, steps, slot * strides[0]), allowed);
  }
  void check_state(const Tensor& pool, int64_t slot, Allowed allowed = Allowed::kFinite) const {
    check_slot("state_pool", pool, slot, allowed, pool.size(2));
  }

  // Checks beta |k|^2 of the live tokens. The betas are pre-activation with a beta_factor.
  void check_steps(const auto& call, const Tensor& beta, std::optional<double> beta_factor,
                   const std::vector<bool>& live) const {
    const Tensor keys = on_cpu(call.k), betas = on_cpu(beta);
    const cpu::Floats k = floats_of(keys);
    const cpu::Activations<double> activations{.use_gate = false,
                                               .use_beta_sigmoid = beta_factor.has_value(),
                                               .beta_factor = beta_factor.value_or(1),
                                               .g = {},
                                               .beta = floats_of(betas),
                                               .A_log = {},
                                               .dt_bias = {}};
    const cpu::HeadActivations<double> of_token(activations, 0);
    for (int64_t row = 0; row < call.tokens(); ++row) {
      for (int64_t head = 0; live[row] && head < call.H_v; ++head) {
        const int64_t k_head = head / call.group();
        const double step =
            of_token.beta(row * call.H_v + head) * squared_norm(k, row * call.H_k + k_head, call.K, call.use_qk_l2norm);
        if (step > kMostStep) [[unlikely]] {
          fail(op_, "k", shape_string({row / call.T, row % call.T, k_head}), " has beta |k|^2 = ", step,
               " in value head ", head, ", expected at most 2, because the state grows from token to token otherwise: ",
               call.use_qk_l2norm ? "keys have norm 1 here, so beta has to be at most 2"
                                  : "normalize the keys, or pass use_qk_l2norm_in_kernel=True");
        }
      }
    }
  }

 private:
  // The tensor, or a copy: contiguous and on the CPU.
  Tensor on_cpu(const Tensor& tensor) const {
    Tensor readable = tensor.is_cpu() ? tensor : to_cpu(tensor);
    make_contiguous(op_, readable, readable.scalar_type());
    return readable;
  }
  static cpu::Floats floats_of(const Tensor& tensor) { return {tensor.const_data_ptr(), tensor.scalar_type(), true}; }

  // |k|^2 of a row of keys as the recurrence takes them.
  static double squared_norm(const cpu::Floats& keys, int64_t row, int64_t K, bool l2norm) {
    double squares = 0;
    for (int64_t i = row * K; i < (row + 1) * K; ++i) {
      const auto x = keys.get<double>(i);
      squares += x * x;
    }
    return l2norm ? squares / (squares + kNormEps) : squares;
  }

  static bool is_allowed(double x, Allowed allowed) {
    switch (allowed) {
      case Allowed::kFinite:
      case Allowed::kFiniteResult:
        return std::isfinite(x);
      case Allowed::kLogDecay:
        return x <= 0;
      default:
        return !std::isnan(x);
    }
  }

  // The text: q[0, 100, 1, 7] is nan, expected ...
  [[noreturn]] void refuse(const char* name, const Tensor& tensor, int64_t i, double x, Allowed allowed) const {
    std::vector<int64_t> index(tensor.dim());
    for (int64_t d = tensor.dim() - 1; d >= 0; i /= tensor.size(d--)) {
      index[d] = i % tensor.size(d);
    }
    const char* const expected =
        allowed == Allowed::kFinite   ? "a finite number"
        : allowed == Allowed::kNotNan ? "a number"
        : allowed == Allowed::kFiniteResult
            ? "a finite result, because the arguments are finite: a number has left the range of its dtype"
            : "at most 0: it is the logarithm of the decay, and not the decay";
    fail(op_, name, shape_string(index), " is ", x, ", expected ", expected);
  }

  const char* op_;
};

// The slots of the sequences' first states, from tables on any device; the sequences' numbers without `indices`.
class FirstSlots {
 public:
  FirstSlots(const std::optional<Tensor>& indices, const std::optional<Tensor>& accepted, int64_t null_index,
             int64_t slots)
      : tables_{on_cpu(indices), on_cpu(accepted)},
        indices_(tables_.indices),
        accepted_(tables_.accepted),
        null_index_(null_index),
        slots_(slots) {}

  int64_t operator()(int64_t n) const {
    if (!tables_.indices) {
      return n;
    }
    return at(n, tables_.accepted ? std::clamp<int64_t>(accepted_(n), 1, columns()) - 1 : 0);
  }
  // The slot of an entry of `indices`.
  int64_t at(int64_t n, int64_t column) const {
    const int64_t slot = indices_(n, column);
    return slot > null_index_ && slot >= 0 && slot < slots_ ? slot : kNoState;
  }
  int64_t columns() const { return indices_.columns; }

 private:
  struct Tables {
    std::optional<Tensor> indices, accepted;
  };
  static std::optional<Tensor> on_cpu(const std::optional<Tensor>& table) {
    return table ? std::optional(to_cpu(*table)) : std::nullopt;
  }
  const Tables tables_;
  const cpu::Indices indices_, accepted_;
  const int64_t null_index_, slots_;
};

// Calls f(n, first row of its tokens, the row after them) for each sequence.
void for_sequences(const Tokens& call, const std::optional<Tensor>& cu_seqlens, const auto& f) {
  const std::optional<Tensor> table = cu_seqlens ? std::optional(to_cpu(*cu_seqlens)) : std::nullopt;
  const cpu::Indices offsets(table);
  int64_t end = 0;
  for (int64_t n = 0; n < call.N; ++n) {
    const int64_t begin = cu_seqlens ? end : n * call.T;
    end = cu_seqlens ? std::clamp(offsets(n + 1), begin, call.T) : begin + call.T;
    f(n, begin, end);
  }
}

// Whether each row of tokens belongs to a live sequence; is_live(n, tokens): whether sequence n is.
template <typename IsLive>
std::vector<bool> live_tokens(const Tokens& call, const std::optional<Tensor>& cu_seqlens, const IsLive& is_live) {
  std::vector<bool> live(call.tokens(), false);
  for_sequences(call, cu_seqlens, [&](int64_t n, int64_t begin, int64_t end) {
    if (is_live(n, end - begin)) {
      std::fill(live.begin() + begin, live.begin() + end, true);
    }
  });
  return live;
}

// live_tokens of the sequences with a slot. Checks the first state of each that has tokens: of slot first(n), if any.
std::vector<bool> live_tokens_of_slots(const Checker& checker, const auto& call, const FirstSlots& slots,
                                       const auto& first) {
  return live_tokens(call, call.cu_seqlens, [&](int64_t n, int64_t tokens) {
    const bool is_live = slots(n) != kNoState;
    if (is_live && tokens > 0 && first(n) != kNoState) {
      checker.check_state(call.state_pool, first(n));
    }
    return is_live;
  });
}

// Checks the tensors that all calls have.
void check_common(const Checker& checker, const auto& call, const std::vector<bool>& live) {
  for (const auto& [name, tensor] : {std::pair{"q", &call.q}, {"k", &call.k}, {"v", &call.v}}) {
    checker.check(name, *tensor, Allowed::kFinite, live);
  }
  checker.check("A_log", call.A_log, Allowed::kNotNan);
  checker.check("dt_bias", call.dt_bias, Allowed::kFinite);
}

// The factor of the sigmoid of pre-activation betas.
std::optional<double> factor_of_raw_beta(bool use_beta_sigmoid, bool allow_neg_eigval) {
  return use_beta_sigmoid ? std::optional(allow_neg_eigval ? 2.0 : 1.0) : std::nullopt;
}

void check_tokens(const Checker& checker, const Call& call, const char* g_name, Allowed allowed_g,
                  const std::vector<bool>& live) {
  check_common(checker, call, live);
  checker.check(g_name, call.g, allowed_g, live);
  checker.check("beta", call.beta, call.use_beta_sigmoid ? Allowed::kNotNan : Allowed::kFinite, live);
  checker.check("initial_state", call.initial_state, Allowed::kFinite);
  checker.check_steps(call, call.beta, factor_of_raw_beta(call.use_beta_sigmoid, call.allow_neg_eigval), live);
}

Allowed allowed_gates(const Call& call) { return call.use_gate ? Allowed::kNotNan : Allowed::kLogDecay; }

bool any_sequence(int64_t, int64_t) { return true; }

bool are_checked(const Call& call) { return contents_are_checked() && !call.is_empty(); }
bool are_checked(const DecodeCall& call) { return contents_are_checked() && call.N > 0 && call.tokens() > 0; }

FirstSlots first_slots(const DecodeCall& call) {
  return {call.state_indices, call.num_accepted_tokens, call.null_index, call.slots()};
}
FirstSlots slots_of(const PrefillCall& call, const Tensor& indices) {
  return {indices, {}, call.null_index, call.state_pool.size(0)};
}

// Checks results, as far as the op has them.
void check_finite(const Checker& checker, std::initializer_list<NamedTensor> results) {
  for (const auto& [name, tensor] : results) {
    if (tensor != nullptr && tensor->defined()) {
      checker.check(name, *tensor, Allowed::kFiniteResult);
    }
  }
}

}  // namespace

bool contents_are_checked() {
  static const bool checked = is_switched_on("FLASH_QLA_CHECK");
  return checked;
}

void check_contents(const Call& call) {
  if (are_checked(call)) {
    const Checker checker(call.op);
    check_tokens(checker, call, "g", allowed_gates(call), live_tokens(call, call.cu_seqlens, any_sequence));
  }
}

void check_contents(const BackwardCall& call) {
  if (are_checked(call)) {
    const Checker checker(call.op);
    const std::vector<bool> live = live_tokens(call, call.cu_seqlens, any_sequence);
    check_tokens(checker, call, call.gates_name(), call.is_cumulative() ? Allowed::kNotNan : allowed_gates(call), live);
    if (call.is_cumulative() && call.g_raw) {
      checker.check("g_raw", *call.g_raw, Allowed::kNotNan, live);
    }
    checker.check("do", call.grad_o, Allowed::kFinite, live);
    checker.check("dht", call.grad_final_state, Allowed::kFinite);
  }
}

void check_contents(const PrefillCall& call) {
  if (are_checked(call)) {
    const Checker checker(call.op);
    const FirstSlots slots = slots_of(call, call.state_indices), first = slots_of(call, call.initial_indices());
    const std::optional<Tensor> mask =
        call.has_initial_state ? std::optional(to_cpu(*call.has_initial_state)) : std::nullopt;
    const std::vector<bool> live = live_tokens_of_slots(checker, call, slots, [&](int64_t n) {
      return !mask || mask->const_data_ptr<bool>()[n * mask->stride(0)] ? first(n) : kNoState;
    });
    check_tokens(checker, call, "g", allowed_gates(call), live);
  }
}

void check_contents(const DecodeCall& call) {
  if (are_checked(call)) {
    const Checker checker(call.op);
    const FirstSlots slots = first_slots(call);
    const std::vector<bool> live = live_tokens_of_slots(checker, call, slots, slots);
    check_common(checker, call, live);
    checker.check("a", call.a, call.A_log ? Allowed::kNotNan : Allowed::kLogDecay, live);
    checker.check("b", call.b, *call.use_beta_sigmoid ? Allowed::kNotNan : Allowed::kFinite, live);
    checker.check_steps(call, call.b, factor_of_raw_beta(*call.use_beta_sigmoid, call.allow_neg_eigval), live);
  }
}

void check_contents(const BufferedDecodeCall& call) {
  if (are_checked(call)) {
    const Checker checker(call.op);
    const FirstSlots slots = first_slots(call);
    const std::optional<Tensor> table = to_cpu(call.write_pos);
    const cpu::Indices positions(table);
    for (int64_t n = 0; n < call.N; ++n) {
      const int64_t slot = slots(n), steps = std::clamp<int64_t>(positions(n), 0, call.length());
      if (slot != kNoState && steps > 0) {
        checker.check_slot("d_cache", call.d_cache, slot, Allowed::kFinite, steps);
        checker.check_slot("k_cache", call.k_cache, slot, Allowed::kFinite, steps);
        checker.check_slot("g_cache", call.g_cache, slot, Allowed::kLogDecay, steps);
      }
    }
  }
}

void check_results(const Call& call, const ForwardOutputs& out) {
  if (are_checked(call)) {
    check_finite(Checker(call.op), {{"o", &out.o}, {"h", &out.h}, {"final_state", &out.final_state}});
  }
}

void check_results(const BackwardCall& call, const BackwardOutputs& out) {
  if (are_checked(call)) {
    check_finite(Checker(call.op), {{"dq", &out.dq},
                                    {"dk", &out.dk},
                                    {"dv", &out.dv},
                                    {"db", &out.db},
                                    {"dg", &out.dg},
                                    {"dh0", &out.dh0},
                                    {"dA_log", &out.dA_log},
                                    {"ddt_bias", &out.ddt_bias}});
  }
}

void check_results(const PrefillCall& call, const Tensor& o) {
  if (are_checked(call)) {
    const Checker checker(call.op);
    check_finite(checker, {{"o", call.out ? &*call.out : &o}, {"h", or_null(call.h)}});
    const FirstSlots slots = slots_of(call, call.state_indices);
    for_sequences(call, call.cu_seqlens, [&](int64_t n, int64_t begin, int64_t end) {
      if (begin < end && slots(n) != kNoState) {
        checker.check_state(call.state_pool, slots(n), Allowed::kFiniteResult);
      }
    });
  }
}

void check_results(const DecodeCall& call, const Tensor& o) {
  if (are_checked(call)) {
    const Checker checker(call.op);
    check_finite(checker, {{"o", call.out ? &*call.out : &o}});
    const FirstSlots slots = first_slots(call);
    const FirstSlots written(call.write_indices, {}, call.null_index, call.slots());
    const auto check_state = [&](int64_t slot) {
      if (slot != kNoState) {
        checker.check_state(call.state_pool, slot, Allowed::kFiniteResult);
      }
    };
    for_sequences(call, call.cu_seqlens, [&](int64_t n, int64_t begin, int64_t end) {
      if (begin == end || slots(n) == kNoState) {
        return;
      }
      if (call.writes_back()) {
        check_state(slots(n));
      }
      for (int64_t t = 0; t < std::min(written.columns(), end - begin); ++t) {
        check_state(written.at(n, t));
      }
    });
  }
}

}  // namespace flash_qla
