// Card: the figures of a GPU that the cost model needs, and those of cards by name.
#pragma once

namespace flash_qla {

struct Card {
  int sm_count;
  int sm_mhz;       // an SM's highest clock
  int memory_gb_s;  // the memory's peak rate

  double cycles_per_us() const { return sm_mhz; }
  double bytes_per_us() const { return 1e3 * memory_gb_s; }
  bool operator==(const Card&) const = default;
};

struct NamedCard {
  const char* name;
  Card card;
};

// The figures of the H100 SXM and the H200 are those that their drivers report; the others are published by NVIDIA.
inline constexpr NamedCard kCards[] = {
    {"H100 SXM", {132, 1980, 3352}}, {"H100 PCIe", {114, 1755, 2039}}, {"H100 NVL", {132, 1785, 3938}},
    {"H200", {132, 1980, 4917}},     {"H20", {78, 1980, 4000}},        {"GH200", {132, 1980, 4000}},
};
inline constexpr Card kH100 = kCards[0].card;

}  // namespace flash_qla
