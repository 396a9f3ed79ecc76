// The gated RMS norm on the CPU: parallel over rows, with the formulas of kernels_tl/norm.
#include "norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "chunks.h"
#include "cpu/activations.h"
#include "cpu/sequences.h"

namespace flash_qla {

namespace {

// A contiguous row's numbers, converted.
template <typename CT>
struct NormRow {
  std::vector<CT> o, gate, slope, x, weight;
  CT rstd;

  NormRow(const NormCall& call) : o(call.V), gate(call.V), slope(call.V), x(call.V), weight(call.V) {
    const cpu::Floats from = floats_of(call.weight);
    for (int64_t i = 0; i < call.V; ++i) {
      weight[i] = from.get<CT>(i);
    }
  }

  template <typename T>
  void read(const NormCall& call, const T* o_row, const T* z_row) {
    CT squares = 0;
    for (int64_t i = 0; i < call.V; ++i) {
      const CT z = z_row[i], s = cpu::sigmoid(z), s_slope = cpu::sigmoid_derivative(z);
      o[i] = o_row[i];
      gate[i] = call.is_sigmoid() ? s : z * s;
      slope[i] = call.is_sigmoid() ? s_slope : s + z * s_slope;
      x[i] = call.norm_before_gate ? o[i] : o[i] * gate[i];
      squares += x[i] * x[i];
    }
    rstd = CT(1) / std::sqrt(squares / CT(call.V) + CT(call.eps));
  }
};

template <typename T, typename CT>
void normalize(const NormCall& call, T* y) {
  const T *o = call.o.const_data_ptr<T>(), *z = call.z.const_data_ptr<T>();
  in_parallel(call.op, call.rows, [&](int64_t begin, int64_t end) {
    NormRow<CT> row(call);
    for (int64_t at = begin * call.V; at < end * call.V; at += call.V) {
      row.read(call, o + at, z + at);
      for (int64_t i = 0; i < call.V; ++i) {
        const CT n = row.x[i] * row.rstd * row.weight[i];
        y[at + i] = static_cast<T>(call.norm_before_gate ? n * row.gate[i] : n);
      }
    }
  });
}

// The terms of dweight are added by blocks of rows, whose number depends on the shape alone.
constexpr int64_t kBlocks = 64;

template <typename T, typename CT>
void differentiate(const NormCall& call, const NormGradients& out) {
  T *const grad_o = out.grad_o.mutable_data_ptr<T>(), *const dz = out.dz.mutable_data_ptr<T>();
  CT* const dweight = out.dweight.mutable_data_ptr<CT>();
  const T *o = call.o.const_data_ptr<T>(), *z = call.z.const_data_ptr<T>(), *dy = call.grad_y.const_data_ptr<T>();
  const int64_t V = call.V, length = ceil_div(call.rows, kBlocks), blocks = length ? ceil_div(call.rows, length) : 0;
  std::vector<CT> terms(blocks * V, CT(0));
  in_parallel(call.op, blocks, [&](int64_t first, int64_t last) {
    NormRow<CT> row(call);
    std::vector<CT> dn(V);
    for (int64_t block = first; block < last; ++block) {
      CT* const sums = terms.data() + block * V;
      const int64_t end = std::min((block + 1) * length, call.rows) * V;
      for (int64_t at = block * length * V; at < end; at += V) {
        row.read(call, o + at, z + at);
        CT products = 0;
        for (int64_t i = 0; i < V; ++i) {
          const CT y_slope = static_cast<CT>(dy[at + i]) * row.weight[i];
          dn[i] = call.norm_before_gate ? y_slope * row.gate[i] : y_slope;
          products += dn[i] * row.x[i];
        }
        const CT mean = products / CT(V) * row.rstd * row.rstd;
        for (int64_t i = 0; i < V; ++i) {
          const CT dy_i = dy[at + i], n = row.x[i] * row.rstd, dx = row.rstd * (dn[i] - row.x[i] * mean);
          if (call.norm_before_gate) {
            grad_o[at + i] = static_cast<T>(dx);
            dz[at + i] = static_cast<T>(dy_i * row.weight[i] * n * row.slope[i]);
            sums[i] += dy_i * n * row.gate[i];
          } else {
            grad_o[at + i] = static_cast<T>(dx * row.gate[i]);
            dz[at + i] = static_cast<T>(dx * row.o[i] * row.slope[i]);
            sums[i] += dy_i * n;
          }
        }
      }
    }
  });
  std::fill_n(dweight, V, CT(0));
  for (int64_t i = 0; i < blocks * V; ++i) {
    dweight[i % V] += terms[i];
  }
}

}  // namespace

Tensor gated_rms_norm_cpu(NormCall call) {
  Tensor y = allocate_y(call);
  with_types(call.dtype, [&]<typename T, typename CT>() { normalize<T, CT>(call, y.mutable_data_ptr<T>()); });
  return y;
}

NormGradients gated_rms_norm_backward_cpu(NormCall call) {
  make_readable(call, call.grad_y);
  NormGradients out = allocate_gradients(call);
  with_types(call.dtype, [&]<typename T, typename CT>() { differentiate<T, CT>(call, out); });
  return out;
}

}  // namespace flash_qla
