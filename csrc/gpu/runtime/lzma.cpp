#include "gpu/runtime/lzma.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace flash_qla {
namespace {

constexpr size_t kHeaderBytes = 13;  // properties, 4 bytes of the dictionary's size, 8 bytes of the contents' size
constexpr uint32_t kEndMarker = ~uint32_t{0};  // a distance

[[noreturn]] void fail() {
  throw std::runtime_error("the compressed code is damaged: libflash_qla.so may be, so install the package again");
}

// An adaptive probability that a bit is 0, in units of 1 / 2048.
struct Probability {
  uint16_t value = 1024;
};

class Bits {
 public:
  explicit Bits(std::span<const uint8_t> file) : next_(file.begin()), end_(file.end()) {
    for (int i = 0; i < 5; ++i) code_ = code_ << 8 | byte();
  }

  uint32_t bit(Probability& zero) {
    const uint32_t bound = (range_ >> 11) * zero.value;
    const bool is_one = code_ >= bound;
    if (is_one) {
      code_ -= bound;
      range_ -= bound;
      zero.value -= zero.value >> 5;
    } else {
      range_ = bound;
      zero.value += (2048 - zero.value) >> 5;
    }
    normalize();
    return is_one;
  }

  // `count` bits of equal probability, the first is the highest.
  uint32_t plain(int count) {
    uint32_t value = 0;
    for (; count > 0; --count) {
      range_ >>= 1;
      const bool is_one = code_ >= range_;
      code_ -= is_one ? range_ : 0;
      value = value << 1 | is_one;
      normalize();
    }
    return value;
  }

  // `count` bits by a tree of 2^count probabilities, the first is the highest.
  uint32_t tree(Probability* tree, int count) {
    uint32_t node = 1;
    for (int i = 0; i < count; ++i) node = node << 1 | bit(tree[node]);
    return node - (1u << count);
  }

  // The same, the first is the lowest.
  uint32_t reverse_tree(Probability* tree, int count) {
    uint32_t node = 1, value = 0;
    for (int i = 0; i < count; ++i) {
      const uint32_t one = bit(tree[node]);
      node = node << 1 | one;
      value |= one << i;
    }
    return value;
  }

  // Whether the file was as it was written, up to here.
  bool has_ended() const { return code_ == 0; }

 private:
  uint8_t byte() { return next_ == end_ ? fail(), 0 : *next_++; }

  void normalize() {
    if (range_ < 1u << 24) {
      range_ <<= 8;
      code_ = code_ << 8 | byte();
    }
  }

  std::span<const uint8_t>::iterator next_, end_;
  uint32_t range_ = ~uint32_t{0}, code_ = 0;
};

constexpr int kMostPositionStates = 16;  // the position modulo 2^pb

struct Lengths {
  Probability is_long, is_longer;
  std::array<Probability, 8> short_ones[kMostPositionStates], long_ones[kMostPositionStates];
  std::array<Probability, 256> longer;

  uint32_t next(Bits& bits, size_t position_state) {
    if (!bits.bit(is_long)) return 2 + bits.tree(short_ones[position_state].data(), 3);
    if (!bits.bit(is_longer)) return 10 + bits.tree(long_ones[position_state].data(), 3);
    return 18 + bits.tree(longer.data(), 8);
  }
};

struct Distances {
  std::array<Probability, 64> slots[4];  // by the length
  std::array<Probability, 128> middle;
  std::array<Probability, 16> lowest;

  // The distance less 1, or kEndMarker.
  uint32_t next(Bits& bits, uint32_t length) {
    const uint32_t slot = bits.tree(slots[std::min(length - 2, 3u)].data(), 6);
    if (slot < 4) return slot;
    const int count = static_cast<int>(slot / 2 - 1);
    const uint32_t highest = (2 | slot % 2) << count;
    if (slot < 14) return highest + bits.reverse_tree(middle.data() + highest - slot, count);
    const uint32_t high = highest + (bits.plain(count - 4) << 4);
    return high + bits.reverse_tree(lowest.data(), 4);
  }
};

constexpr uint32_t kStates = 12;  // of the last symbols; from kMatch on the last was a match
constexpr uint32_t kMatch = 7;

}  // namespace

std::vector<char> unpack_lzma(std::span<const uint8_t> file, size_t bytes) {
  if (file.size() < kHeaderBytes || file[0] >= 9 * 5 * 5) fail();
  const uint32_t lc = file[0] % 9, lp = file[0] / 9 % 5, pb = file[0] / 45;
  Bits bits(file.subspan(kHeaderBytes));
  std::vector<std::array<Probability, 0x300>> literals(size_t{1} << (lc + lp));
  std::array<Probability, kMostPositionStates> is_match[kStates], is_long_0[kStates];
  std::array<Probability, kStates> is_repeated, is_not_0, is_not_1, is_not_2;
  Lengths lengths, lengths_of_repeated;
  Distances distances;

  std::vector<char> out(bytes);
  size_t at = 0;
  uint32_t state = 0;
  std::array<uint32_t, 4> last{};  // the last distances, less 1
  const auto back = [&](uint32_t distance) {
    if (distance >= at) fail();
    return static_cast<uint8_t>(out[at - distance - 1]);
  };
  while (true) {
    const size_t position_state = at & ((1u << pb) - 1);
    if (!bits.bit(is_match[state][position_state])) {
      if (at == bytes) fail();
      const uint32_t before = at > 0 ? back(0) : 0;
      auto& tree = literals[(at & ((1u << lp) - 1)) << lc | before >> (8 - lc)];
      uint32_t symbol = 1;
      if (state >= kMatch) {  // the byte is unlike that at the last distance: probabilities depend on both until then
        for (uint32_t other = back(last[0]) | 0x100; symbol < 0x100;) {
          other <<= 1;
          const uint32_t expected = other >> 8 & 1;
          const uint32_t one = bits.bit(tree[((1 + expected) << 8) + symbol]);
          symbol = symbol << 1 | one;
          if (one != expected) break;
        }
      }
      while (symbol < 0x100) symbol = symbol << 1 | bits.bit(tree[symbol]);
      out[at++] = static_cast<char>(symbol);
      state = state < 4 ? 0 : state < 10 ? state - 3 : state - 6;
      continue;
    }
    uint32_t length = 1;
    if (!bits.bit(is_repeated[state])) {
      length = lengths.next(bits, position_state);
      const uint32_t distance = distances.next(bits, length);
      if (distance == kEndMarker) break;
      last = {distance, last[0], last[1], last[2]};
      state = state < kMatch ? 7 : 10;
    } else {
      int which = 0;  // of the last distances
      if (bits.bit(is_not_0[state])) {
        which = !bits.bit(is_not_1[state]) ? 1 : !bits.bit(is_not_2[state]) ? 2 : 3;
        std::rotate(last.begin(), last.begin() + which, last.begin() + which + 1);
      }
      if (which == 0 && !bits.bit(is_long_0[state][position_state])) {
        state = state < kMatch ? 9 : 11;  // one byte
      } else {
        length = lengths_of_repeated.next(bits, position_state);
        state = state < kMatch ? 8 : 11;
      }
    }
    if (at + length > bytes) fail();
    for (; length > 0; --length, ++at) out[at] = static_cast<char>(back(last[0]));
  }
  if (at != bytes || !bits.has_ended()) fail();
  return out;
}

}  // namespace flash_qla
