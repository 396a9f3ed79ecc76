// The causal depthwise convolution on the CPU, and its backward: by blocks of channels, token after token.
#include "convolution.h"

#include <algorithm>
#include <vector>

#include "checks.h"
#include "cpu/pool.h"
#include "cpu/sequences.h"
#include "offsets.h"

namespace flash_qla {

namespace {

constexpr int64_t kBlock = 64;  // channels
constexpr int64_t kTile = 256;  // tokens of the forward that a thread takes at a time
constexpr int64_t kMostColumns = 4;

// Tokens [begin, end) of sequence n, rows of x over the flattened batch.
struct Span {
  int64_t n, begin, end;

  int64_t length() const { return end - begin; }
};

std::vector<Span> list_spans(const Convolution& call) {
  std::vector<Span> spans(call.N);
  std::vector<int64_t> offsets;
  if (call.cu_seqlens) {
    offsets = checked_offsets(call.op, *call.cu_seqlens, call.N, call.T);
  }
  for (int64_t n = 0; n < call.N; ++n) {
    spans[n] = call.cu_seqlens ? Span{n, offsets[n], offsets[n + 1]} : Span{n, n * call.T, (n + 1) * call.T};
  }
  return spans;
}

// The slots of final and initial windows, without a pool the sequences' numbers.
cpu::SequenceSlots list_slots(const Convolution& call, const std::vector<Span>& spans) {
  if (call.pool) {
    std::vector<int64_t> lengths;
    for (const Span& span : spans) {
      lengths.push_back(span.length());
    }
    return cpu::list_slots(call.op, *call.pool, lengths, call.names.checkpoints);
  }
  cpu::SequenceSlots slots;
  for (const Span& span : spans) {
    slots.last.push_back(span.n);
    slots.first.push_back(call.initial_state ? span.n : kNoState);
  }
  return slots;
}

// Windows [slots, D, columns] of any strides.
struct Windows {
  cpu::WritableFloats elements;
  int64_t slot = 0, channel = 0, column = 0;

  Windows() = default;
  // data: the tensor's memory, for writing or for reading alone.
  Windows(const Tensor& x, const void* data)
      : elements{const_cast<void*>(data), x.scalar_type()},
        slot(x.stride(0)),
        channel(x.stride(1)),
        column(x.stride(2)) {}

  template <typename CT>
  CT get(int64_t n, int64_t d, int64_t i) const {
    return elements.get<CT>(n * slot + d * channel + i * column);
  }
  template <typename CT>
  void set(int64_t n, int64_t d, int64_t i, CT x) const {
    elements.set(n * slot + d * channel + i * column, x);
  }
};

Windows windows_to_read(const std::optional<Tensor>& x) { return x ? Windows(*x, x->const_data_ptr()) : Windows(); }

// A block of up to kBlock channels from `first` on.
struct Block {
  int64_t first, count;
};

Block block_at(int64_t i, int64_t D) { return {i * kBlock, std::min(kBlock, D - i * kBlock)}; }
int64_t block_count(int64_t D) { return (D + kBlock - 1) / kBlock; }

template <typename CT>
struct Filter {
  CT weight[kMostColumns][kBlock], bias[kBlock];

  Filter(const Convolution& call, const Block& block) {
    const cpu::Floats weights = floats_of(call.weight), biases = floats_of(call.bias);
    for (int64_t c = 0; c < block.count; ++c) {
      for (int64_t w = 0; w < call.W; ++w) {
        weight[w][c] = weights.get<CT>((block.first + c) * call.W + w);
      }
      bias[c] = biases ? biases.get<CT>(block.first + c) : CT(0);
    }
  }
};

// Rows [B, T, D] of x or of a gradient.
template <typename T>
struct Rows {
  const T* data;
  int64_t T_, batch, row;

  Rows(const Tensor& x)
      : data(x.const_data_ptr<T>()), T_(std::max<int64_t>(x.size(1), 1)), batch(x.stride(0)), row(x.stride(1)) {}
  const T* operator[](int64_t token) const { return data + token / T_ * batch + token % T_ * row; }
};

// W rows of a block of channels: the last ones of a sequence, the earliest first.
template <typename CT>
struct RecentRows {
  CT rows[kMostColumns][kBlock] = {};
  int64_t W;

  explicit RecentRows(int64_t W) : W(W) {}
  // Makes room for a row, and returns it.
  CT* next() {
    std::copy(rows[1], rows[W], rows[0]);
    return rows[W - 1];
  }
};

template <typename T, typename CT>
struct Inputs {
  const Convolution& call;
  std::vector<Span> spans;
  cpu::SequenceSlots slots;
  Rows<T> x;
  Windows initial;

  explicit Inputs(const Convolution& call)
      : call(call),
        spans(list_spans(call)),
        slots(list_slots(call, spans)),
        x(call.x),
        initial(windows_to_read(call.initial_state)) {}

  int64_t covered() const { return spans.empty() ? 0 : spans.back().end; }

  // Element d of a row of a sequence, counted from its first token: of x, or of the window before it.
  CT element(const Span& span, int64_t row, int64_t d) const {
    if (row >= 0) {
      return static_cast<CT>(x[span.begin + row][d]);
    }
    const int64_t slot = slots.first[span.n];
    return slot == kNoState ? CT(0) : initial.get<CT>(slot, d, call.columns + row);
  }
  void load(const Span& span, int64_t row, const Block& block, CT* to) const {
    if (row >= 0) {
      std::copy_n(x[span.begin + row] + block.first, block.count, to);
      return;
    }
    for (int64_t c = 0; c < block.count; ++c) {
      to[c] = element(span, row, block.first + c);
    }
  }
  // The W - 1 rows before a row.
  RecentRows<CT> before(const Span& span, int64_t row, const Block& block) const {
    RecentRows<CT> recent(call.W);
    for (int64_t i = row - (call.W - 1); i < row; ++i) {
      load(span, i, block, recent.next());
    }
    return recent;
  }
  // bias + sum over w of weight[w] x[w]
  void apply(const Filter<CT>& filter, const RecentRows<CT>& rows, const Block& block, CT* sums) const {
    for (int64_t c = 0; c < block.count; ++c) {
      sums[c] = filter.bias[c];
    }
    for (int64_t w = 0; w < call.W; ++w) {
      for (int64_t c = 0; c < block.count; ++c) {
        sums[c] += filter.weight[w][c] * rows.rows[w][c];
      }
    }
  }
};

template <typename T, typename CT>
void convolve_tile(const Inputs<T, CT>& in, int64_t first, int64_t last, const Block& block, T* y) {
  const Convolution& call = in.call;
  const Filter<CT> filter(call, block);
  auto span = std::ranges::upper_bound(in.spans, first, {}, &Span::end);  // the first that ends after it
  for (; span != in.spans.end() && span->begin < last; ++span) {
    const int64_t begin = std::max(first, span->begin), end = std::min(last, span->end);
    RecentRows<CT> rows = in.before(*span, begin - span->begin, block);
    for (int64_t token = begin; token < end; ++token) {
      CT sums[kBlock];
      in.load(*span, token - span->begin, block, rows.next());
      in.apply(filter, rows, block, sums);
      for (int64_t c = 0; c < block.count; ++c) {
        const CT out = call.use_silu ? sums[c] * cpu::sigmoid(sums[c]) : sums[c];
        y[token * call.D + block.first + c] = static_cast<T>(out);
      }
    }
  }
}

// The final windows and the checkpoints: the last rows of the initial ones and the tokens.
template <typename T, typename CT>
void store_windows(const Inputs<T, CT>& in, const Tensor& final_state) {
  const Convolution& call = in.call;
  const Windows last(final_state, final_state.mutable_data_ptr());
  const bool has_rows = call.pool && call.pool->checkpoints;
  const Windows kept = has_rows ? Windows(*call.pool->checkpoints, call.pool->checkpoints->mutable_data_ptr()) : last;
  in_parallel(call.op, call.N, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const Span& span = in.spans[n];
      for (int64_t d = 0; in.slots.last[n] != kNoState && d < call.D; ++d) {
        CT initial[kMostColumns];  // read before a checkpoint, or the final window, may replace it
        for (int64_t i = 0; i < call.columns; ++i) {
          initial[i] = in.element(span, i - call.columns, d);
        }
        // Stores the window after so many tokens.
        const auto store = [&](const Windows& to, int64_t slot, int64_t tokens) {
          for (int64_t i = 0; slot != kNoState && i < call.columns; ++i) {
            const int64_t row = tokens - call.columns + i;
            to.set(slot, d, i, row >= 0 ? in.element(span, row, d) : initial[call.columns + row]);
          }
        };
        store(last, in.slots.last[n], span.length());
        int64_t tokens = 0;
        for (const int64_t slot : in.slots.checkpoints.empty() ? std::vector<int64_t>() : in.slots.checkpoints[n]) {
          store(kept, slot, tokens += call.pool->checkpoint_every);
        }
      }
    }
  });
}

template <typename T, typename CT>
ConvolutionOutputs run(const Convolution& call) {
  const Inputs<T, CT> in(call);
  ConvolutionOutputs out = allocate(call);
  T* const y = out.y.mutable_data_ptr<T>();
  const int64_t tokens = call.B * call.T, blocks = block_count(call.D);
  zero_from(y, in.covered(), tokens, call.D);
  in_parallel(call.op, (in.covered() + kTile - 1) / kTile * blocks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i / blocks * kTile;
      convolve_tile(in, first, std::min(first + kTile, in.covered()), block_at(i % blocks, call.D), y);
    }
  });
  if (call.output_final_state) {
    store_windows(in, out.final_state);
  }
  return out;
}

// All gradients of a block of channels.
template <typename T, typename CT>
void convolve_block_backward(const Inputs<T, CT>& in, const Rows<T>& dy, const Block& block,
                             const ConvolutionGradients& out) {
  const Convolution& call = in.call;
  const int64_t before = call.W - 1, columns = call.columns;
  const Filter<CT> filter(call, block);
  const Windows dht = windows_to_read(call.dht);
  T* const dx = out.dx.mutable_data_ptr<T>();
  CT* const dh0 = call.initial_state ? out.dh0.mutable_data_ptr<CT>() : nullptr;
  CT dweight[kMostColumns][kBlock] = {}, dbias[kBlock] = {};
  for (const Span& span : in.spans) {
    const int64_t length = span.length();
    // The gradient of a row by the final window, which may still have it
    const auto of_final = [&](int64_t row, int64_t d) {
      const int64_t column = row + columns - length;
      return call.dht && column >= 0 ? dht.get<CT>(span.n, d, column) : CT(0);
    };
    const auto dh0_at = [&](int64_t row, int64_t d) -> CT& {
      return dh0[(span.n * call.D + d) * columns + columns + row];
    };
    RecentRows<CT> rows = in.before(span, 0, block), dpre(call.W);
    for (int64_t t = 0; t < length + before; ++t) {
      CT* const now = dpre.next();
      if (t < length) {
        CT sums[kBlock];
        in.load(span, t, block, rows.next());
        in.apply(filter, rows, block, sums);
        const T* const from = dy[span.begin + t] + block.first;
        for (int64_t c = 0; c < block.count; ++c) {
          const CT s = cpu::sigmoid(sums[c]);
          now[c] = static_cast<CT>(from[c]) * (call.use_silu ? s + sums[c] * cpu::sigmoid_derivative(sums[c]) : CT(1));
          dbias[c] += now[c];
          for (int64_t w = 0; w < call.W; ++w) {
            dweight[w][c] += now[c] * rows.rows[w][c];
          }
        }
      } else {
        std::fill_n(now, kBlock, CT(0));
      }
      const int64_t finished = t - before;
      for (int64_t c = 0; c < block.count; ++c) {
        const int64_t d = block.first + c;
        CT sum = of_final(finished, d);
        for (int64_t w = 0; w < call.W; ++w) {
          sum += filter.weight[w][c] * dpre.rows[before - w][c];
        }
        if (finished >= 0) {
          dx[(span.begin + finished) * call.D + d] = static_cast<T>(sum);
        } else if (dh0) {
          dh0_at(finished, d) = sum;
        }
      }
    }
    for (int64_t c = 0; dh0 && columns == call.W && c < block.count; ++c) {
      dh0_at(-call.W, block.first + c) = of_final(-call.W, block.first + c);  // a row before those that count
    }
  }
  for (int64_t c = 0; c < block.count; ++c) {
    const int64_t d = block.first + c;
    for (int64_t w = 0; w < call.W; ++w) {
      out.dweight.mutable_data_ptr<CT>()[d * call.W + w] = dweight[w][c];
    }
    if (call.bias) {
      out.dbias.mutable_data_ptr<CT>()[d] = dbias[c];
    }
  }
}

template <typename T, typename CT>
ConvolutionGradients run_backward(const Convolution& call) {
  const Inputs<T, CT> in(call);
  const ConvolutionGradients out = allocate_gradients(call);
  zero_from(out.dx.mutable_data_ptr<T>(), in.covered(), call.B * call.T, call.D);
  const Rows<T> dy(call.dy);
  in_parallel(call.op, block_count(call.D), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      convolve_block_backward(in, dy, block_at(i, call.D), out);
    }
  });
  return out;
}

}  // namespace

void check_window_slots(const Convolution& call) {
  if (call.pool) {
    Convolution on_cpu = call;
    on_cpu.pool = cpu::with_tables_on_cpu(*call.pool);
    list_slots(on_cpu, list_spans(on_cpu));
  }
}

ConvolutionOutputs convolve_cpu(Convolution call) {
  say_once_that_this_is_slow(call.op);
  make_canonical(call);
  ConvolutionOutputs out;
  with_types(call.dtype, [&]<typename T, typename CT>() { out = run<T, CT>(call); });
  return out;
}

void store_windows_cpu(Convolution call) {
  make_canonical(call);
  with_types(call.dtype, [&]<typename T, typename CT>() { store_windows(Inputs<T, CT>(call), *call.initial_state); });
}

ConvolutionGradients convolve_backward_cpu(Convolution call) {
  say_once_that_this_is_slow(call.op);
  make_canonical(call);
  ConvolutionGradients out;
  with_types(call.dtype, [&]<typename T, typename CT>() { out = run_backward<T, CT>(call); });
  return out;
}

}  // namespace flash_qla
