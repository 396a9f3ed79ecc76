// Switches in the environment.
#pragma once

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <string>
#include <string_view>

namespace flash_qla {

// Whether the variable is 1, true, yes or on, in any case.
inline bool is_switched_on(const char* variable) {
  static constexpr std::array<std::string_view, 4> kOn = {"1", "true", "yes", "on"};
  const char* const value = std::getenv(variable);
  std::string word = value != nullptr ? value : "";
  std::ranges::transform(word, word.begin(), [](unsigned char c) { return std::tolower(c); });
  return std::ranges::find(kOn, word) != kOn.end();
}

}  // namespace flash_qla
