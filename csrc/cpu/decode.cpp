// Decoding on the CPU: the plain recurrence on states of the pool, in parallel over sequences and value heads.
#include "decode.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cpu/decode_plan.h"
#include "cpu/forward.h"
#include "cpu/pool.h"
#include "cpu/sequences.h"
#include "output.h"
#include "tensors.h"

namespace flash_qla {

namespace {

using cpu::entry;

using Plan = cpu::DecodePlan;

class Planner {
 public:
  explicit Planner(const DecodeCall& call)
      : call_(call),
        offsets_(call.cu_seqlens),
        state_indices_(call.state_indices),
        accepted_(call.num_accepted_tokens),
        write_indices_(call.write_indices),
        rows_(call.intermediate_indices),
        parents_(call.parents),
        slots_(call.op, call.slots(), call.null_index),
        kept_(call.op, call.intermediate_states ? call.intermediate_states->size(0) : 0, kNoState) {}

  std::vector<Plan> plans() {
    std::vector<Plan> plans;
    for (int64_t n = 0; n < call_.N; ++n) {
      plans.push_back(plan(n));
    }
    return plans;
  }

 private:
  int64_t checked(const std::string& name, int64_t value, int64_t least, int64_t most) const {
    return cpu::checked_index(call_.op, name, value, least, most);
  }

  Plan plan(int64_t n) {
    Plan p{
        .begin = n * call_.T, .end = (n + 1) * call_.T, .slot = kNoState, .parents = {}, .slots = {}, .row = kNoState};
    if (call_.varlen()) {
      p.begin = checked(entry("cu_seqlens", n), offsets_(n), n == 0 ? 0 : before_, n == 0 ? 0 : call_.T);
      p.end = before_ = checked(entry("cu_seqlens", n + 1), offsets_(n + 1), p.begin, call_.T);
    }
    int64_t column = 0;
    if (call_.num_accepted_tokens) {
      column = checked(entry("num_accepted_tokens", n), accepted_(n), 1, state_indices_.columns) - 1;
    }
    std::string name = "the sequence's number";
    p.slot = n;
    if (const std::optional<Tensor>& indices = call_.state_indices) {
      name = indices->dim() == 2 ? entry("state_indices", n, column) : entry("state_indices", n);
      p.slot = slots_.checked(name, state_indices_(n, column));
    }
    if (p.slot == kNoState || p.begin == p.end) {  // without tokens the state does not change
      return p;
    }
    if (call_.writes_back()) {
      slots_.write(name, p.slot, n);
    }
    slots_.read(name, p.slot, n);
    if (call_.intermediate_states) {
      const std::string row = call_.intermediate_indices ? entry("intermediate_indices", n) : "the sequence's number";
      p.row = kept_.checked(row, call_.intermediate_indices ? rows_(n) : n);
      if (p.row != kNoState) {
        kept_.write(row, p.row, n);
      }
    }
    for (int64_t t = 0; t < p.end - p.begin; ++t) {
      p.parents.push_back(t - 1);
      if (call_.parents && t < parents_.columns) {
        p.parents[t] = checked(entry("parents", n, t), parents_(n, t), -1, t - 1);
      }
      p.slots.push_back(call_.write_indices && t < write_indices_.columns
                            ? slots_.checked(entry("write_indices", n, t), write_indices_(n, t))
                            : kNoState);
      if (p.slots.back() != kNoState) {
        slots_.write(entry("write_indices", n, t), p.slots.back(), n);
      }
    }
    return p;
  }

  const DecodeCall& call_;
  const cpu::Indices offsets_, state_indices_, accepted_, write_indices_, rows_, parents_;
  cpu::Slots slots_, kept_;  // slots of the pool; rows of intermediate_states
  int64_t before_ = 0;
};

template <typename T, typename CT>
cpu::Inputs<T, CT> inputs_of_decoding(const DecodeCall& call) {
  return inputs_of<T, CT>(call, cpu::Activations<CT>{.use_gate = call.A_log.has_value(),
                                                     .use_beta_sigmoid = *call.use_beta_sigmoid,
                                                     .beta_factor = CT(call.allow_neg_eigval ? 2 : 1),
                                                     .g = floats_of(call.a),
                                                     .beta = floats_of(call.b),
                                                     .A_log = floats_of(call.A_log),
                                                     .dt_bias = floats_of(call.dt_bias)});
}

// Decodes one sequence of one value head. It keeps the first S and S after every token, because parents need them.
template <typename T, typename CT>
class Decoder {
 public:
  Decoder(const DecodeCall& call, const Tensor& o)
      : call_(call),
        pool_(writable_floats_of(call.state_pool)),
        intermediate_(call.intermediate_states ? writable_floats_of(*call.intermediate_states) : cpu::WritableFloats{}),
        in_(inputs_of_decoding<T, CT>(call)),
        o_(o.mutable_data_ptr<T>()) {}

  void run(const Plan& p, int64_t head, const cpu::Scratch<CT>& scratch) const {
    const int64_t size = scratch.dims.state_size(), tokens = p.end - p.begin;
    const cpu::Buffer<CT> states((tokens + 1) * size);
    const cpu::HeadActivations<CT> gates(in_.gates, head);
    const int64_t first = p.slot * call_.state_pool.stride(0);
    cpu::load_pool_state(scratch.dims, pool_, first + of_head(head), in_.K, in_.V, call_.state_v_first, states.data());
    for (int64_t t = 0; t < tokens; ++t) {
      CT* const S = states.data() + (t + 1) * size;
      std::copy_n(states.data() + (p.parents[t] + 1) * size, size, S);
      advance(gates, p.begin + t, head, scratch, S);
      if (p.slots[t] != kNoState) {
        store(S, scratch, pool_, p.slots[t] * call_.state_pool.stride(0), head);
      }
      if (p.row != kNoState && t < call_.intermediate_states->size(1)) {
        const Tensor& kept = *call_.intermediate_states;
        store(S, scratch, intermediate_, p.row * kept.stride(0) + t * kept.stride(1), head);
      }
    }
    if (call_.writes_back() && tokens > 0) {
      store(states.data() + tokens * size, scratch, pool_, first, head);
    }
  }

 private:
  // Replaces S by S' and stores the token's row of o.
  void advance(const cpu::HeadActivations<CT>& gates, int64_t row, int64_t head, const cpu::Scratch<CT>& scratch,
               CT* S) const {
    const cpu::PackedChunk<CT> token =
        cpu::load_chunk(in_, gates, head, row, 1, scratch, [&](int64_t at) { return std::exp(gates.g(at)); });
    cpu::advance_chunk(in_, token, row * in_.H_v + head, scratch, S, o_);
  }

  void store(CT* S, const cpu::Scratch<CT>& scratch, const cpu::WritableFloats& to, int64_t at, int64_t head) const {
    cpu::store_pool_state(scratch.dims, S, in_.K, in_.V, call_.state_v_first, to, at + of_head(head));
  }
  int64_t of_head(int64_t head) const { return head * in_.V * in_.K; }

  const DecodeCall& call_;
  const cpu::WritableFloats pool_, intermediate_;  // initialized before in_: see writable_floats_of
  const cpu::Inputs<T, CT> in_;
  T* const o_;
};

// The steps in the replay buffer of each sequence that has a slot.
std::vector<int64_t> backlog_steps(const BufferedDecodeCall& call, const std::vector<Plan>& plans) {
  const cpu::Indices positions(call.write_pos);
  std::vector<int64_t> steps(call.N);
  for (int64_t n = 0; n < call.N; ++n) {
    if (plans[n].slot != kNoState) {
      steps[n] = cpu::checked_index(call.op, entry("write_pos", n), positions(n), 0, call.length() - 1);
    }
  }
  return steps;
}

// Decodes a token of one value head on a state that lags.
template <typename T, typename CT>
class BufferedDecoder {
 public:
  BufferedDecoder(const BufferedDecodeCall& call, const Tensor& o)
      : call_(call),
        pool_(writable_floats_of(call.state_pool)),
        d_(writable_floats_of(call.d_cache)),
        k_(writable_floats_of(call.k_cache)),
        g_(writable_floats_of(call.g_cache)),
        in_(inputs_of_decoding<T, CT>(call)),
        o_(o.mutable_data_ptr<T>()) {}

  void run(int64_t n, int64_t slot, int64_t steps, bool flush, int64_t head, const cpu::Scratch<CT>& scratch) const {
    CT* const S = scratch.state();
    const int64_t in_pool = slot * call_.state_pool.stride(0) + head * in_.V * in_.K;
    cpu::load_pool_state(scratch.dims, pool_, in_pool, in_.K, in_.V, /*v_first=*/true, S);
    for (int64_t i = 0; i < steps; ++i) {
      const Step step = step_of(slot, head, i);
      const CT decay = std::exp(g_.get<CT>(step.g));
      cpu::for_state(scratch.dims, S, in_.K, in_.V, [&](int64_t k, int64_t v, CT& s) {
        s = decay * s + d_.get<CT>(step.d + v) * k_.get<CT>(step.k + k);
      });
    }
    const cpu::HeadActivations<CT> gates(in_.gates, head);
    CT g = 0;
    const cpu::PackedChunk<CT> token =
        cpu::load_chunk(in_, gates, head, n, 1, scratch, [&](int64_t at) { return std::exp(g = gates.g(at)); });
    if (!flush) {
      append(step_of(slot, head, steps), n, head, token, g, scratch);
    }
    cpu::advance_chunk(in_, token, n * in_.H_v + head, scratch, S, o_);
    if (flush) {
      cpu::store_pool_state(scratch.dims, S, in_.K, in_.V, /*v_first=*/true, pool_, in_pool);
    }
  }

 private:
  // The places of a step of a replay buffer.
  struct Step {
    int64_t d, k, g;
  };
  Step step_of(int64_t slot, int64_t head, int64_t i) const {
    const int64_t L = call_.length();
    return {.d = slot * call_.d_cache.stride(0) + (head * L + i) * in_.V,
            .k = slot * call_.k_cache.stride(0) + (in_.k_head(head) * L + i) * in_.K,
            .g = slot * call_.g_cache.stride(0) + head * L + i};
  }

  // Writes the token as a step of the replay buffer, with S as the state before it. The buffer has the key before the
  // l2norm, so the change includes the factor of the l2norm.
  void append(const Step& to, int64_t n, int64_t head, const cpu::PackedChunk<CT>& token, CT g,
              const cpu::Scratch<CT>& scratch) const {
    const T* const key = in_.k + (n * in_.H_k + in_.k_head(head)) * in_.K;
    const CT factor = cpu::load_row(key, in_.K, in_.use_qk_l2norm, scratch.k());
    std::vector<CT> recalled(in_.V);
    cpu::for_state(scratch.dims, scratch.state(), in_.K, in_.V,
                   [&](int64_t k, int64_t v, CT s) { recalled[v] += s * token.k[k]; });
    for (int64_t v = 0; v < in_.V; ++v) {
      const CT value = static_cast<CT>(in_.v[(n * in_.H_v + head) * in_.V + v]);
      d_.set(to.d + v, factor * token.beta[0] * (value - token.decay[0] * recalled[v]));
    }
    g_.set(to.g, g);
    if (head % call_.group() == 0) {
      for (int64_t k = 0; k < in_.K; ++k) {
        k_.set(to.k + k, static_cast<CT>(key[k]));
      }
    }
  }

  const BufferedDecodeCall& call_;
  const cpu::WritableFloats pool_, d_, k_, g_;  // initialized before in_: see writable_floats_of
  const cpu::Inputs<T, CT> in_;
  T* const o_;
};

// Makes those tensors of a call contiguous that the recurrence reads as contiguous.
void make_inputs_contiguous(DecodeCall& call) {
  for (Tensor* tensor : {&call.q, &call.k, &call.v, &call.a, &call.b}) {
    make_contiguous(call.op, *tensor, tensor->scalar_type());
  }
  for (std::optional<Tensor>* tensor : {&call.A_log, &call.dt_bias}) {
    if (*tensor) {
      make_contiguous(call.op, **tensor, (*tensor)->scalar_type());
    }
  }
}

}  // namespace

std::vector<Plan> cpu::plan_decoding(const DecodeCall& call) { return Planner(call).plans(); }

DecodeCall cpu::with_tables_on_cpu(DecodeCall call) {
  for (std::optional<Tensor>* table : {&call.state_indices, &call.cu_seqlens, &call.num_accepted_tokens,
                                       &call.write_indices, &call.intermediate_indices, &call.parents}) {
    if (*table) {
      **table = to_cpu(**table);
    }
  }
  return call;
}

void check_decode_tables(const DecodeCall& call) { cpu::plan_decoding(cpu::with_tables_on_cpu(call)); }

Tensor decode_cpu(DecodeCall call) {
  say_once_that_this_is_slow(call.op);
  make_inputs_contiguous(call);
  const std::vector<Plan> plans = cpu::plan_decoding(call);
  Tensor o = allocate_output(call, call.out, call.q);
  zero(o);
  with_types(call.dtype, [&]<typename T, typename CT>() {
    const Decoder<T, CT> decoder(call, o);
    in_parallel(call.op, call.N * call.H_v, [&](int64_t begin, int64_t end) {
      const cpu::Scratch<CT> scratch(call.K, call.V, false);
      for (int64_t i = begin; i < end; ++i) {
        if (const Plan& plan = plans[i / call.H_v]; plan.slot != kNoState) {
          decoder.run(plan, i % call.H_v, scratch);
        }
      }
    });
  });
  return output_as_returned(call, call.out, std::move(o));
}

void check_decode_tables(const BufferedDecodeCall& call) {
  BufferedDecodeCall on_cpu = call;
  if (call.state_indices) {
    on_cpu.state_indices = to_cpu(*call.state_indices);
  }
  on_cpu.write_pos = to_cpu(call.write_pos);
  backlog_steps(on_cpu, cpu::plan_decoding(on_cpu));
}

Tensor decode_buffered_cpu(BufferedDecodeCall call) {
  say_once_that_this_is_slow(call.op);
  make_inputs_contiguous(call);
  const std::vector<Plan> plans = cpu::plan_decoding(call);
  const std::vector<int64_t> steps = backlog_steps(call, plans);
  const cpu::Indices forced(call.force_flush);
  Tensor o = allocate_output(call, call.out, call.q);
  zero(o);
  with_types(call.dtype, [&]<typename T, typename CT>() {
    const BufferedDecoder<T, CT> decoder(call, o);
    in_parallel(call.op, call.N * call.H_v, [&](int64_t begin, int64_t end) {
      const cpu::Scratch<CT> scratch(call.K, call.V, false);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t n = i / call.H_v;
        const bool flush = steps[n] == call.length() - 1 || (call.force_flush && forced(n) != 0);
        if (plans[n].slot != kNoState) {
          decoder.run(n, plans[n].slot, steps[n], flush, i % call.H_v, scratch);
        }
      }
    });
  });
  return output_as_returned(call, call.out, std::move(o));
}

}  // namespace flash_qla
