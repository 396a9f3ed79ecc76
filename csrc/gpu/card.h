// The figures of a GPU that the cost model calculates with, and those of cards by name.
#pragma once

namespace flash_qla {

struct Card {
  int sm_count;
  double cycles_per_us;  // of an SM at its highest clock, which is MHz
  double bytes_per_us;   // the memory's peak rate, which is MB/s

  bool operator==(const Card&) const = default;
};

struct NamedCard {
  const char* name;
  Card card;
};

// Hopper cards by the figures that NVIDIA publishes; of an H100 SXM and an H200 by those that their drivers report.
inline constexpr NamedCard kCards[] = {
    {"H100 SXM", {132, 1980, 3.352e6}}, {"H100 PCIe", {114, 1755, 2.039e6}}, {"H100 NVL", {132, 1785, 3.938e6}},
    {"H200", {132, 1980, 4.917e6}},     {"H20", {78, 1980, 4.0e6}},          {"GH200", {132, 1980, 4.0e6}},
};
inline constexpr Card kH100 = kCards[0].card;

}  // namespace flash_qla
