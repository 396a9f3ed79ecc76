// decode_gated_delta_net on the CPU: its parts, one after the other. Drafts have a convolution of their own here, token
// by token, because windows may be in columns of a wider one and tokens in a tree.
#include "decode_region.h"

#include <string>
#include <utility>
#include <vector>

#include "cpu/activations.h"
#include "cpu/decode_plan.h"
#include "cpu/pool.h"
#include "cpu/sequences.h"
#include "tensors.h"

namespace flash_qla {

namespace {

using cpu::entry;

constexpr int64_t kMostTaps = 4;

// The windows of each sequence.
struct WindowPlan {
  int64_t slot = kNoState, row = kNoState;  // of the pool, of intermediate_windows
  int64_t first = 0;                        // column of the first of the W - 1 rows before the tokens
};

// The tables of `rule` are on the CPU. Throws if two sequences write one window.
std::vector<WindowPlan> plan_windows(const DecodeRegion& region, const DecodeCall& rule,
                                     const std::vector<cpu::DecodePlan>& plans) {
  const Tensor& pool = *region.windows().window_pool;
  const auto& kept = region.windows().intermediate_windows;
  const cpu::Indices indices(rule.state_indices), accepted(rule.num_accepted_tokens), rows(rule.intermediate_indices);
  cpu::Slots slots(rule.op, pool.size(0), rule.null_index), rows_of_kept(rule.op, kept ? kept->size(0) : 0, kNoState);
  std::vector<WindowPlan> window_plans(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    WindowPlan& plan = window_plans[i];
    if (plans[i].slot == kNoState || plans[i].begin == plans[i].end) {
      continue;
    }
    const std::string name =
        rule.state_indices->dim() == 2 ? entry("state_indices", n, int64_t{0}) : entry("state_indices", n);
    plan.slot = slots.checked(name, indices(n));
    plan.first = region.has_draft_windows() ? accepted(n) - 1 : pool.size(2) - (region.convolution().W - 1);
    if (plan.slot != kNoState) {
      rule.update_state ? slots.write(name, plan.slot, n) : slots.read(name, plan.slot, n);
    }
    if (kept) {
      const std::string row = rule.intermediate_indices ? entry("intermediate_indices", n) : "the sequence's number";
      plan.row = rows_of_kept.checked(row, rule.intermediate_indices ? rows(n) : n);
      if (plan.row != kNoState) {
        rows_of_kept.write(row, plan.row, n);
      }
    }
  }
  return window_plans;
}

// Windows [slots, D, columns] or [rows, steps, D, columns] of any strides.
class Windows {
 public:
  explicit Windows(const Tensor& tensor) : elements_(writable_floats_of(tensor)), tensor_(tensor) {}

  int64_t columns() const { return tensor_.size(tensor_.dim() - 1); }
  // The offset of column 0 of a channel's window. `slot`: a slot, or a row and a step.
  template <typename... Slot>
  int64_t offset(int64_t channel, Slot... slot) const {
    int64_t dim = 0, at = 0;
    ((at += slot * tensor_.stride(dim++)), ...);
    return at + channel * tensor_.stride(dim);
  }
  template <typename CT>
  CT get(int64_t offset, int64_t column) const {
    return elements_.get<CT>(offset + column * tensor_.stride(tensor_.dim() - 1));
  }
  template <typename CT>
  void set(int64_t offset, int64_t column, CT x) const {
    elements_.set(offset + column * tensor_.stride(tensor_.dim() - 1), x);
  }

 private:
  cpu::WritableFloats elements_;
  Tensor tensor_;
};

Convolution canonical(Convolution call) {
  make_canonical(call);
  return call;
}

template <typename T, typename CT>
class DraftConvolution {
 public:
  DraftConvolution(const DecodeRegion& region, const Tensor& mixed, std::vector<cpu::DecodePlan> plans)
      : region_(region),
        call_(canonical(region.convolution())),
        pool_(*region.windows().window_pool),
        mixed_(mixed.const_data_ptr<T>()),
        weight_(floats_of(call_.weight)),
        bias_(floats_of(call_.bias)),
        plans_(std::move(plans)),
        window_plans_(plan_windows(region, region.rule(), plans_)) {
    if (const auto& kept = region.windows().intermediate_windows) {
      kept_.emplace(*kept);
      steps_ = kept->size(1);
    }
  }

  void convolve(T* x) const {
    for_channels([&](size_t n, int64_t d, const Rows& row) {
      for (size_t t = 0; t < plans_[n].parents.size(); ++t) {
        CT sum = bias_ ? bias_.template get<CT>(d) : CT(0);
        for (int64_t w = 0; w < call_.W; ++w) {
          sum += weight_.template get<CT>(d * call_.W + w) * row(before(n, t, call_.W - 1 - w));
        }
        x[(plans_[n].begin + t) * call_.D + d] = static_cast<T>(sum * cpu::sigmoid(sum));
      }
    });
  }

  void store_windows() const {
    const bool of_drafts = region_.has_draft_windows();
    const int64_t columns = pool_.columns(), history = call_.W - 2;
    for_channels([&](size_t n, int64_t d, const Rows& row) {
      const WindowPlan& to = window_plans_[n];
      const auto tokens = static_cast<int64_t>(plans_[n].parents.size());
      for (int64_t t = 0; to.row != kNoState && t < std::min(tokens, steps_); ++t) {
        for (int64_t i = 0; i < call_.W - 1; ++i) {
          kept_->set(kept_->offset(d, to.row, t), i, row(before(n, t, call_.W - 2 - i)));
        }
      }
      if (to.slot == kNoState || !region_.rule().update_state) {
        return;
      }
      for (int64_t i = 0; i < (of_drafts ? std::min(columns, history + tokens) : columns); ++i) {
        pool_.set(pool_.offset(d, to.slot), i, row(of_drafts ? i - history : before(n, tokens - 1, columns - 1 - i)));
      }
    });
  }

 private:
  // The numbers of a channel's rows: of tokens or, where negative, of the window before them, -1 the last.
  struct Rows {
    const T* of_tokens;
    int64_t D;
    CT window[kMostTaps - 1] = {};
    int64_t columns;

    CT operator()(int64_t row) const { return row >= 0 ? static_cast<CT>(of_tokens[row * D]) : window[columns + row]; }
  };

  // The row so many generations before token t.
  int64_t before(size_t n, int64_t t, int64_t generations) const {
    for (; generations > 0; --generations) {
      t = t >= 0 ? plans_[n].parents[t] : t - 1;
    }
    return t;
  }

  // Calls use(n, channel, its rows) for each sequence with a slot and tokens.
  template <typename Use>
  void for_channels(const Use& use) const {
    in_parallel(call_.op, static_cast<int64_t>(plans_.size()), [&](int64_t first, int64_t last) {
      for (int64_t n = first; n < last; ++n) {
        if (plans_[n].parents.empty()) {
          continue;
        }
        for (int64_t d = 0; d < call_.D; ++d) {
          Rows rows = {.of_tokens = mixed_ + plans_[n].begin * call_.D + d, .D = call_.D, .columns = call_.W - 1};
          for (int64_t i = 0; window_plans_[n].slot != kNoState && i < rows.columns; ++i) {
            rows.window[i] = pool_.template get<CT>(pool_.offset(d, window_plans_[n].slot), window_plans_[n].first + i);
          }
          use(n, d, rows);
        }
      }
    });
  }

  const DecodeRegion& region_;
  const Convolution call_;
  const Windows pool_;
  std::optional<Windows> kept_;
  int64_t steps_ = 0;  // of kept_
  const T* const mixed_;
  const cpu::Floats weight_, bias_;
  const std::vector<cpu::DecodePlan> plans_;
  const std::vector<WindowPlan> window_plans_;
};

}  // namespace

void check_windows_of_drafts(const DecodeRegion& region) {
  const DecodeCall rule = cpu::with_tables_on_cpu(region.rule());
  const std::vector<cpu::DecodePlan> plans = cpu::plan_decoding(rule);
  for (size_t n = 0; n < plans.size(); ++n) {
    const int64_t tokens = plans[n].end - plans[n].begin;
    check(tokens <= kDecodeTokens, rule.op, "sequence ", n, " has ", tokens, " tokens, expected at most ",
          kDecodeTokens, " on a GPU");
  }
  if (region.has_convolution()) {
    plan_windows(region, rule, plans);
  }
}

Tensor decode_region_cpu(const DecodeRegion& region) {
  if (region.is_plain()) {
    return region.run_parts<convolve_cpu, store_windows_cpu, decode_cpu, gated_rms_norm_cpu>();
  }
  Tensor mixed = region.packed_mixed();
  if (!region.has_convolution()) {
    return region.run_rule_and_norm<decode_cpu, gated_rms_norm_cpu>(mixed);
  }
  const DecodeCall& rule = region.rule();
  make_contiguous(rule.op, mixed, rule.dtype);
  Tensor x = new_empty(rule.op, mixed, mixed.sizes(), rule.dtype), y = undefined_tensor();
  zero(x);
  with_types(rule.dtype, [&]<typename T, typename CT>() {
    const DraftConvolution<T, CT> convolution(region, mixed, cpu::plan_decoding(rule));
    convolution.convolve(x.mutable_data_ptr<T>());
    y = region.run_rule_and_norm<decode_cpu, gated_rms_norm_cpu>(x);
    convolution.store_windows();
  });
  return y;
}

}  // namespace flash_qla
