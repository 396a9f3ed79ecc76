// Switches in the environment.
#pragma once

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <string>
#include <string_view>

namespace flash_qla {

// Whether the variable is 1, true, yes or on, in any case, with spaces around it or without, as is_on of
// flash_qla_environment.py reads it.
inline bool is_switched_on(const char* variable) {
  static constexpr std::array<std::string_view, 4> kOn = {"1", "true", "yes", "on"};
  static constexpr std::string_view kSpaces = " \t\n\v\f\r";
  const char* const value = std::getenv(variable);
  std::string word = value != nullptr ? value : "";
  word.erase(0, word.find_first_not_of(kSpaces));
  word.erase(word.find_last_not_of(kSpaces) + 1);
  std::ranges::transform(word, word.begin(), [](unsigned char c) { return std::tolower(c); });
  return std::ranges::find(kOn, word) != kOn.end();
}

}  // namespace flash_qla
