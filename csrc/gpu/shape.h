// The shape of a call: all that the dispatch knows of it. Each field is declared once, here: its name for questions
// (inspect.h, flash_qla._C), its type and its default there. A call sets every field.
#pragma once

#include <cstdint>
#include <tuple>

#include "gpu/card.h"

namespace flash_qla {

// A field by its name, in any shape that has it.
template <typename Struct, typename T>
struct Field {
  using Type = T;
  const char* name;
  T Struct::* member;

  T& in(Struct& shape) const { return shape.*member; }
};
template <typename T>
struct CardField {
  using Type = T;
  const char* name;
  T Card::* member;

  T& in(auto& shape) const { return shape.card.*member; }
};

// The fields of both directions.
struct Shape {
  int64_t B = 0, T = 0, N = 0, H_k = 0, H_v = 0;
  Card card = kH100;
  bool auto_cp = true;
  bool varlen = true;
  int64_t max_seqlen = 0;  // tokens of the longest sequence, if the host knows it; 0: only cu_seqlens have the lengths
  bool use_qk_l2norm = false;
  int64_t K = 128, V = 128;
  bool fp16 = false;        // q is fp16
  bool over_ranks = false;  // a call of ranks (ranks.h): each sequence is cut, because the cuts give its maps
  bool portable = false;    // the kernels that run on every GPU from Ampere on, in the place of Hopper's

  int64_t group() const { return H_v / H_k; }  // value heads of a query/key head
  bool operator==(const Shape&) const = default;

  // The fields without a default, and the fields with one.
  static constexpr auto sizes() {
    return std::tuple(Field{"B", &Shape::B}, Field{"T", &Shape::T}, Field{"N", &Shape::N}, Field{"H_k", &Shape::H_k},
                      Field{"H_v", &Shape::H_v});
  }
  static constexpr auto options() {
    return std::tuple(CardField{"sm_count", &Card::sm_count}, CardField{"sm_mhz", &Card::sm_mhz},
                      CardField{"memory_gb_s", &Card::memory_gb_s}, Field{"auto_cp", &Shape::auto_cp},
                      Field{"varlen", &Shape::varlen}, Field{"max_seqlen", &Shape::max_seqlen},
                      Field{"use_qk_l2norm", &Shape::use_qk_l2norm}, Field{"K", &Shape::K}, Field{"V", &Shape::V},
                      Field{"fp16", &Shape::fp16}, Field{"over_ranks", &Shape::over_ranks},
                      Field{"portable", &Shape::portable});
  }
};

struct ForwardShape : Shape {
  bool low_level = false;        // chunk_gated_delta_rule_fwd: A is returned
  bool output_h = false;         // h is returned
  bool batch_invariant = false;  // no segments, and two kernels: their tiles do not change the bits
  int64_t checkpoint_every = 0;  // tokens after which states are kept; 0: none
  bool resumable = false;        // the state is rounded at checkpoints, or they are at no multiples of kChunk
  bool float8 = false;           // states of 8 bits, which the fused kernel does not take

  bool operator==(const ForwardShape&) const = default;

  static constexpr auto options() {
    return std::tuple_cat(
        Shape::options(),
        std::tuple(Field{"low_level", &ForwardShape::low_level}, Field{"output_h", &ForwardShape::output_h},
                   Field{"batch_invariant", &ForwardShape::batch_invariant},
                   Field{"checkpoint_every", &ForwardShape::checkpoint_every},
                   Field{"resumable", &ForwardShape::resumable}, Field{"float8", &ForwardShape::float8}));
  }
};

struct BackwardShape : Shape {
  bool activations = false;  // the activation of gate or beta is inside

  bool operator==(const BackwardShape&) const = default;

  static constexpr auto options() {
    return std::tuple_cat(Shape::options(), std::tuple(Field{"activations", &BackwardShape::activations}));
  }

  // The shape of the forward over the same chunks. It has no l2norm: the cost model adds the time of the backward's own
  // kernels of the l2norm.
  ForwardShape forward() const {
    ForwardShape shape{*this};
    shape.use_qk_l2norm = false;
    shape.output_h = true;
    return shape;
  }
};

}  // namespace flash_qla
