// An allocator for torch.cuda.memory.CUDAPluggableAllocator that refuses an allocation of one's choice and knows what
// is allocated.
#include <dlfcn.h>
#include <sys/types.h>

#include <atomic>
#include <stdexcept>

namespace {

std::atomic<int> until_refused = -1;  // allocations; negative: none is refused
std::atomic<int> allocated = 0;

// PyTorch has loaded the CUDA runtime.
template <typename... Arguments>
int cuda(const char* name, Arguments... arguments) {
  void* const function = dlsym(RTLD_DEFAULT, name);
  return function == nullptr ? -1 : reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
}

}  // namespace

extern "C" {

void refuse(int allocation) { until_refused = allocation; }
int allocated_blocks() { return allocated; }

void* allocate(ssize_t size, int /*device*/, void* /*stream*/) {
  if (size == 0) {
    return nullptr;
  }
  if (until_refused >= 0 && until_refused-- == 0) {
    throw std::runtime_error("CUDA out of memory. Refused by the test.");
  }
  void* block = nullptr;
  if (cuda("cudaMalloc", &block, static_cast<size_t>(size)) != 0) {
    throw std::runtime_error("cudaMalloc failed");
  }
  ++allocated;
  return block;
}

void release(void* block, ssize_t size, int /*device*/, void* /*stream*/) {
  if (size > 0) {
    cuda("cudaFree", block);
    --allocated;
  }
}

}  // extern "C"
