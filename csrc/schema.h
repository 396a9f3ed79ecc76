// Schemas at compile time: an op's arguments go from PyTorch's stack to the fields of records that have their names. A
// name without a field, or a field of another type, does not compile.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "overlap.h"
#include "tensors.h"

namespace flash_qla {

// A member of a record, and the name that schemas give it.
template <typename Record, typename T>
struct Field {
  std::string_view name;
  T Record::* member;
};

// kFields<Record> is a tuple of a record's fields.
template <typename Record>
inline constexpr auto kFields = std::tuple<>();

struct SchemaArgument {
  std::string_view type, name;  // the type without an alias
  bool is_written = false;      // as Tensor(a!)
};

// Parses name(type name=default, ...) -> results.
template <const char* kSchema>
class Schema {
  static constexpr std::string_view kText = kSchema;
  static constexpr size_t kOpen = kText.find('(');
  static constexpr std::string_view kList = kText.substr(kOpen + 1, kText.rfind(") -> ") - kOpen - 1);
  static constexpr std::string_view kLibrary = "flash_qla::";

  static consteval auto make_op() {
    std::array<char, kLibrary.size() + kOpen + 1> op{};
    std::ranges::copy(kText.substr(0, kOpen), std::ranges::copy(kLibrary, op.begin()).out);
    return op;
  }

  static consteval auto make_arguments() {
    std::array<SchemaArgument, std::ranges::count(kList, ',') + 1> arguments;
    size_t begin = 0;
    for (SchemaArgument& argument : arguments) {
      begin = kList.find_first_not_of(' ', begin);
      const std::string_view text = kList.substr(begin, kList.find(',', begin) - begin);
      const size_t space = text.find(' '), alias = text.find('('), of_alias = text.find(')');
      argument.is_written = alias < space;
      argument.type = text.substr(0, std::min(alias, space));
      if (argument.is_written && of_alias + 1 < space) {  // Tensor(a!)?
        argument.type = "Tensor?";
      }
      argument.name = text.substr(space + 1, text.find('=') - space - 1);
      begin += text.size() + 1;
    }
    return arguments;
  }

  static constexpr auto kOpName = make_op();

 public:
  static constexpr const char* kOp = kOpName.data();  // qualified
  static constexpr auto kArguments = make_arguments();
  static constexpr bool kWrites = std::ranges::any_of(kArguments, &SchemaArgument::is_written);
};

// The type in schemas of a member.
template <typename T>
constexpr std::string_view kSchemaType = "";
template <>
constexpr std::string_view kSchemaType<torch::stable::Tensor> = "Tensor";
template <>
constexpr std::string_view kSchemaType<bool> = "bool";
template <>
constexpr std::string_view kSchemaType<int64_t> = "int";
template <>
constexpr std::string_view kSchemaType<double> = "float";
template <>
constexpr std::string_view kSchemaType<std::string> = "str";
template <>
constexpr std::string_view kSchemaType<torch::headeronly::ScalarType> = "ScalarType";
template <>
constexpr std::string_view kSchemaType<std::vector<int64_t>> = "int[]";

constexpr bool is_optional(std::string_view type) { return type.ends_with('?'); }

// Whether a member can take an argument of this type: an optional one takes both.
template <typename T>
struct Takes {
  static constexpr bool from(std::string_view type) { return type == kSchemaType<T>; }
};
template <typename T>
struct Takes<std::optional<T>> {
  static constexpr bool from(std::string_view type) {
    const std::string_view base = is_optional(type) ? type.substr(0, type.size() - 1) : type;
    return Takes<T>::from(base == "SymInt" ? "int" : base);
  }
};

template <typename T>
struct Taken {
  static T from(StableIValue value, bool) { return torch::stable::detail::to<T>(value); }
};
template <typename T>
struct Taken<std::optional<T>> {
  static std::optional<T> from(StableIValue value, bool optional) {
    using torch::stable::detail::to;
    return optional ? to<std::optional<T>>(value) : std::optional<T>(to<T>(value));
  }
};

inline const torch::stable::Tensor* tensor_or_null(const torch::stable::Tensor& x) {
  return x.defined() ? &x : nullptr;
}
inline const torch::stable::Tensor* tensor_or_null(const std::optional<torch::stable::Tensor>& x) {
  return x ? &*x : nullptr;
}
inline const torch::stable::Tensor* tensor_or_null(const auto&) { return nullptr; }  // no tensor

// The index of a name among a record's fields; their number if it is not there.
template <typename Record>
consteval size_t field_index(std::string_view name) {
  return std::apply(
      [&](const auto&... fields) {
        size_t index = 0;
        (void)((fields.name == name || (++index, false)) || ...);
        return index;
      },
      kFields<Record>);
}

// Sets the argument's field, in the first record that has one, and returns its tensor, if it is one.
template <typename S, size_t kArgument, typename Record, typename... Records>
const torch::stable::Tensor* take_argument(StableIValue value, Record& record, Records&... records) {
  constexpr SchemaArgument argument = S::kArguments[kArgument];
  constexpr size_t index = field_index<Record>(argument.name);
  if constexpr (index == std::tuple_size_v<std::remove_cvref_t<decltype(kFields<Record>)>>) {
    static_assert(sizeof...(Records) > 0, "no record has a field with the name of this argument");
    return take_argument<S, kArgument>(value, records...);
  } else {
    auto& member = record.*std::get<index>(kFields<Record>).member;
    using Member = std::remove_reference_t<decltype(member)>;
    static_assert(Takes<Member>::from(argument.type), "the field has another type than the argument");
    member = Taken<Member>::from(value, is_optional(argument.type));
    return tensor_or_null(member);
  }
}

}  // namespace flash_qla
