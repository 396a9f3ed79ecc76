#include "overlap.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "checks.h"
#include "tensors.h"

namespace flash_qla {

namespace {

using torch::stable::Tensor;

int64_t element_size(const Tensor& tensor) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
}

// The bytes [begin, end) from the first to the last element.
struct Range {
  uintptr_t begin = 0, end = 0;

  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

// Empty without elements. A lazy clone that is written gets its own memory here, so take the ranges of written tensors
// first.
Range range_of(const TensorArgument& argument) {
  const Tensor& tensor = *argument.tensor;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) {
      return {};
    }
    last += (sizes[i] - 1) * strides[i];
  }
  const auto begin =
      reinterpret_cast<uintptr_t>(argument.is_written ? tensor.mutable_data_ptr() : tensor.const_data_ptr());
  return {begin, begin + (last + 1) * element_size(tensor)};
}

// Steps of `stride` bytes, of which `low` to `high` are taken.
struct Steps {
  int64_t stride, low, high;
};

// Whether steps of these strides, the longest first, can add up to a number in [first, last]. `tries` bounds the
// search. Strides of usual layouts are nested and need a few tries. If they do not suffice, the answer is yes.
bool reach(std::span<const Steps> steps, int64_t first, int64_t last, int& tries) {
  if (steps.empty()) {
    return first <= 0 && last >= 0;
  }
  if (--tries < 0) {
    return true;
  }
  int64_t low = 0, high = 0;  // what the shorter steps can add
  for (const Steps& shorter : steps.subspan(1)) {
    low += shorter.stride * shorter.low;
    high += shorter.stride * shorter.high;
  }
  const Steps& longest = steps[0];
  const auto floor_div = [](int64_t a, int64_t b) { return a / b - (a % b < 0); };
  const int64_t from = std::max(longest.low, -floor_div(high - first, longest.stride));
  const int64_t to = std::min(longest.high, floor_div(last - low, longest.stride));
  for (int64_t n = from; n <= to; ++n) {
    if (reach(steps.subspan(1), first - n * longest.stride, last - n * longest.stride, tries)) {
      return true;
    }
  }
  return false;
}

constexpr int kTries = 10000;
constexpr size_t kMostArguments = 32;  // of an op: no allocation in every call

void sort_longest_first(std::vector<Steps>& steps) {
  std::ranges::sort(steps, [](const Steps& a, const Steps& b) { return a.stride > b.stride; });
}

// The elements of a tensor as blocks of bytes at sums of steps.
struct Blocks {
  int64_t size;
  std::vector<Steps> steps;  // of blocks; the shortest first

  explicit Blocks(const Tensor& tensor) : size(element_size(tensor)) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] > 1) {
        steps.push_back({strides[i] * size, 0, sizes[i] - 1});
      }
    }
    std::ranges::sort(steps, {}, &Steps::stride);
  }

  // Whether each step is longer than all that the shorter ones reach. No two elements overlap then.
  bool are_nested() const {
    int64_t length = size;
    for (const Steps& s : steps) {
      if (s.stride < length) {
        return false;
      }
      length += s.stride * s.high;
    }
    return true;
  }

  // Joins blocks that leave no gap.
  void join() {
    auto rest = steps.begin();
    for (; rest != steps.end() && rest->stride <= size; ++rest) {
      size += rest->stride * rest->high;
    }
    steps.erase(steps.begin(), rest);
  }
};

bool overlaps_itself(const Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return false;
  }
  const Blocks elements(tensor);
  if (elements.are_nested()) {
    return false;
  }
  // Two elements differ by steps, the longest of them forward.
  for (size_t i = 0; i < elements.steps.size(); ++i) {
    std::vector<Steps> steps(elements.steps.begin(), elements.steps.begin() + static_cast<int64_t>(i) + 1);
    for (Steps& s : steps) {
      s.low = -s.high;
    }
    steps.back().low = 1;
    sort_longest_first(steps);
    int tries = kTries;
    if (steps.back().stride == 0 || reach(steps, 1 - elements.size, elements.size - 1, tries)) {
      return true;
    }
  }
  return false;
}

// distance: from the first byte of `to` to that of `from`.
bool share_bytes(const Tensor& from, const Tensor& to, int64_t distance) {
  Blocks a(from), b(to);
  a.join();
  b.join();
  std::vector<Steps> steps = std::move(a.steps);
  for (const Steps& s : b.steps) {
    const auto same = std::ranges::find(steps, s.stride, &Steps::stride);
    if (same == steps.end()) {
      steps.push_back({s.stride, -s.high, 0});
    } else {
      same->low -= s.high;
    }
  }
  sort_longest_first(steps);
  int tries = kTries;
  return reach(steps, 1 - a.size - distance, b.size - 1 - distance, tries);
}

// Sliding windows as [rows, D, columns of all steps], whose elements are those of all windows.
Tensor joined_steps(const Tensor& windows) {
  const std::array shape = {windows.size(0), windows.size(2), windows.size(1) + windows.size(3) - 1};
  const std::array strides = {windows.stride(0), windows.stride(2), windows.stride(3)};
  return view(windows, shape, strides);
}

}  // namespace

bool are_sliding(const Tensor& windows) {
  return windows.dim() == 4 && windows.size(1) > 1 && windows.size(3) > 1 && windows.stride(1) == windows.stride(3);
}

void check_overlap(const char* op, std::span<const TensorArgument> tensors) {
  std::array<Range, kMostArguments> ranges;
  check(tensors.size() <= kMostArguments, op, tensors.size(), " arguments, expected at most ", kMostArguments);
  std::array<TensorArgument, kMostArguments> copies;
  std::ranges::copy(tensors, copies.begin());
  const std::span<TensorArgument> arguments(copies.data(), tensors.size());
  std::optional<Tensor> joined;
  for (TensorArgument& argument : arguments) {
    if (argument.name == "intermediate_windows" && argument.tensor && are_sliding(*argument.tensor)) {
      argument.tensor = &joined.emplace(joined_steps(*argument.tensor));
    }
  }
  for (const bool written : {true, false}) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].tensor && arguments[i].is_written == written) {
        ranges[i] = range_of(arguments[i]);
      }
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& [name, tensor, is_written] = arguments[i];
    if (!tensor || !is_written) {
      continue;
    }
    if (overlaps_itself(*tensor)) [[unlikely]] {
      fail(op, name, " has shape ", shape_string(tensor->sizes()), " and strides ", shape_string(tensor->strides()),
           ", expected elements that do not overlap, because the op writes them");
    }
    for (size_t j = 0; j < arguments.size(); ++j) {
      const bool seen = arguments[j].is_written && j <= i;
      if (!seen && ranges[i].meets(ranges[j]) &&
          share_bytes(*tensor, *arguments[j].tensor, static_cast<int64_t>(ranges[i].begin - ranges[j].begin)))
          [[unlikely]] {
        fail(op, name, " shares memory with ", arguments[j].name,
             ", expected memory of its own, because the op writes it");
      }
    }
  }
}

}  // namespace flash_qla
