#include "contents.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "checks.h"
#include "cpu/activations.h"
#include "cpu/pool.h"
#include "tensors.h"

namespace flash_qla {

namespace {

// The values that a number may have. Infinite raw numbers are valid: a log decay of -inf, or a step size of 0.
enum class Allowed { kFinite, kLogDecay, kNotNan };

class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  // Checks the elements of the live rows; of every row without `live`.
  void check(const char* name, Tensor tensor, Allowed allowed, const std::vector<bool>& live = {}) const {
    if (!tensor.is_cpu()) {
      tensor = to_cpu(tensor);
    }
    make_contiguous(op_, tensor, tensor.scalar_type());
    const cpu::Floats numbers{tensor.const_data_ptr(), tensor.scalar_type(), true};
    const int64_t count = tensor.numel();
    const int64_t rows = live.empty() ? 1 : static_cast<int64_t>(live.size());
    for (int64_t i = 0; i < count; ++i) {
      const auto x = numbers.get<double>(i);
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

  // Checks a state [H_v, V, K] of a pool in place.
  void check_state(const Tensor& pool, int64_t slot) const {
    const auto shape = pool.sizes(), strides = pool.strides();
    const std::array sizes = {shape[1], shape[2], shape[3]};
    const std::array steps = {strides[1], strides[2], strides[3]};
    const std::string name = cpu::entry("state_pool", slot);
    check(name.c_str(), view(pool, sizes, steps, slot * strides[0]), Allowed::kFinite);
  }

 private:
  static bool is_allowed(double x, Allowed allowed) {
    switch (allowed) {
      case Allowed::kFinite:
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
    const char* const expected = allowed == Allowed::kFinite ? "a finite number"
                                 : allowed == Allowed::kNotNan
                                     ? "a number"
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
    const int64_t column = tables_.accepted ? std::clamp<int64_t>(accepted_(n), 1, indices_.columns) - 1 : 0;
    const int64_t slot = indices_(n, column);
    return slot > null_index_ && slot >= 0 && slot < slots_ ? slot : kNoState;
  }

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

// Whether each row of tokens belongs to a live sequence; is_live(n, tokens) says which sequences are live.
template <typename IsLive>
std::vector<bool> live_tokens(const Tokens& call, const std::optional<Tensor>& cu_seqlens, const IsLive& is_live) {
  std::vector<bool> live(call.tokens(), false);
  const std::optional<Tensor> table = cu_seqlens ? std::optional(to_cpu(*cu_seqlens)) : std::nullopt;
  const cpu::Indices offsets(table);
  int64_t end = 0;
  for (int64_t n = 0; n < call.N; ++n) {
    const int64_t begin = cu_seqlens ? end : n * call.T;
    end = cu_seqlens ? std::clamp(offsets(n + 1), begin, call.T) : begin + call.T;
    if (is_live(n, end - begin)) {
      std::fill(live.begin() + begin, live.begin() + end, true);
    }
  }
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

void check_tokens(const Checker& checker, const Call& call, const char* g_name, Allowed allowed_g,
                  const std::vector<bool>& live) {
  check_common(checker, call, live);
  checker.check(g_name, call.g, allowed_g, live);
  checker.check("beta", call.beta, call.use_beta_sigmoid ? Allowed::kNotNan : Allowed::kFinite, live);
  checker.check("initial_state", call.initial_state, Allowed::kFinite);
}

Allowed allowed_gates(const Call& call) { return call.use_gate ? Allowed::kNotNan : Allowed::kLogDecay; }

bool any_sequence(int64_t, int64_t) { return true; }

}  // namespace

bool contents_are_checked() {
  static const bool checked = [] {
    const char* value = std::getenv("FLASH_QLA_CHECK");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return checked;
}

void check_contents(const Call& call) {
  if (contents_are_checked() && !call.is_empty()) {
    const Checker checker(call.op);
    check_tokens(checker, call, "g", allowed_gates(call), live_tokens(call, call.cu_seqlens, any_sequence));
  }
}

void check_contents(const BackwardCall& call) {
  if (contents_are_checked() && !call.is_empty()) {
    const Checker checker(call.op);
    const std::vector<bool> live = live_tokens(call, call.cu_seqlens, any_sequence);
    if (call.is_cumulative()) {
      check_tokens(checker, call, "g", Allowed::kNotNan, live);
    } else {
      check_tokens(checker, call, "g_raw", allowed_gates(call), live);
    }
    if (call.is_cumulative() && call.g_raw) {
      checker.check("g_raw", *call.g_raw, Allowed::kNotNan, live);
    }
    checker.check("do", call.grad_o, Allowed::kFinite, live);
    checker.check("dht", call.grad_final_state, Allowed::kFinite);
  }
}

void check_contents(const PrefillCall& call) {
  if (contents_are_checked() && !call.is_empty()) {
    const Checker checker(call.op);
    const FirstSlots slots(call.state_indices, {}, call.null_index, call.state_pool.size(0));
    const FirstSlots first(call.initial_indices(), {}, call.null_index, call.state_pool.size(0));
    const std::optional<Tensor> mask =
        call.has_initial_state ? std::optional(to_cpu(*call.has_initial_state)) : std::nullopt;
    const std::vector<bool> live = live_tokens_of_slots(checker, call, slots, [&](int64_t n) {
      return !mask || mask->const_data_ptr<bool>()[n * mask->stride(0)] ? first(n) : kNoState;
    });
    check_tokens(checker, call, "g", allowed_gates(call), live);
  }
}

void check_contents(const DecodeCall& call) {
  if (contents_are_checked() && call.N > 0 && call.tokens() > 0) {
    const Checker checker(call.op);
    const FirstSlots slots(call.state_indices, call.num_accepted_tokens, call.null_index, call.slots());
    const std::vector<bool> live = live_tokens_of_slots(checker, call, slots, slots);
    check_common(checker, call, live);
    checker.check("a", call.a, call.A_log ? Allowed::kNotNan : Allowed::kLogDecay, live);
    checker.check("b", call.b, *call.use_beta_sigmoid ? Allowed::kNotNan : Allowed::kFinite, live);
  }
}

}  // namespace flash_qla
