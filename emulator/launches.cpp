#include "launches.h"

#include <algorithm>
#include <map>
#include <vector>

#include "emulator.h"

namespace emulator::launches {

namespace {

struct Launch {
  int64_t start = -1;
  bool overlaps = false, has_waited = false, has_triggered = false, has_triggered_behind_wait = false;
};

int64_t last = 0;  // launch
Launch now;
int64_t last_call = 0;
std::map<std::string, int64_t> last_of_kernel;
const Kernel* kernel = nullptr;
void** kernel_arguments = nullptr;
bool thread_has_waited[kMostThreads], cta_has_triggered;

void append(bool overlaps) {
  const Launch ahead = now;
  ++last;
  now = Launch();
  now.overlaps = overlaps;
  now.start = !overlaps ? last - 1 : ahead.has_triggered_behind_wait || !ahead.has_triggered ? last - 2 : ahead.start;
}

bool has_ended(const std::string& name) {
  if (name == "hint") {
    return true;
  }
  if (name == "caller") {
    return last_call <= now.start;
  }
  const auto entry = last_of_kernel.find(name);
  return entry == last_of_kernel.end() || entry->second <= now.start;
}

bool holds(const Early& early) {
  return early.condition < 0 || *static_cast<const int32_t*>(kernel_arguments[early.condition]) != 0;
}

}  // namespace

void begin_call() {
  append(false);
  last_call = last;
}

void begin(const Kernel& which, bool overlaps, void** arguments) {
  append(overlaps);
  kernel = &which;
  kernel_arguments = arguments;
  for (const Early& early : which.early) {
    for (const std::string& name : early.after) {
      if (holds(early) && !has_ended(name)) {
        fail((which.name + " may touch " + early.parameter + " before " + name + " has ended").c_str());
      }
    }
  }
  last_of_kernel[which.name] = last;
}

void begin_cta() {
  std::fill_n(thread_has_waited, kMostThreads, false);
  cta_has_triggered = false;
}

void wait() { now.has_waited = thread_has_waited[thread_of_cluster] = true; }

void trigger() {
  now.has_triggered = true;
  now.has_triggered_behind_wait |= !cta_has_triggered && thread_has_waited[thread_of_cluster];
  cta_has_triggered = true;
}

void end() {
  if (now.overlaps && !now.has_waited) {
    fail((kernel->name + " overlaps the launch ahead, and no thread has waited for that").c_str());
  }
}

bool may_touch(const void* global, std::string& parameter) {
  if (!now.overlaps) {
    return true;
  }
  const char *at = static_cast<const char*>(global), *nearest = nullptr;
  std::vector<std::string> owners;  // an empty table has the address of the table after it
  for (const Tensor& tensor : kernel->tensors) {
    const void* const argument = kernel_arguments[tensor.argument];
    const char* const begin = tensor.is_described ? described_address(*static_cast<const CUtensorMap*>(argument))
                                                  : *static_cast<char* const*>(argument);
    if (begin != nullptr && begin <= at && begin >= nearest) {
      if (begin > nearest) {
        owners.clear();
      }
      nearest = begin;
      parameter = tensor.parameter;
      owners.push_back(parameter);
    }
  }
  return std::ranges::any_of(kernel->early, [&](const Early& early) {
    return std::ranges::find(owners, early.parameter) != owners.end() && holds(early);
  });
}

}  // namespace emulator::launches
