#include "gpu/copy_tokens.h"

#include <algorithm>

#include "chunks.h"
#include "gpu/runtime/stream.h"
#include "kernels.h"
#include "layout.h"
#include "tensors.h"

namespace flash_qla {

namespace {

// A tensor and its copy, as the kernel's arguments have them. Without a tensor there are no heads.
struct Copied {
  Tensor copy = undefined_tensor();
  const void* from = nullptr;
  void* to = nullptr;
  int64_t heads = 0, channels = 0, batch = 0, row = 0, head = 0, channel = 0;

  Copied(const char* op, const Tensor* tensor) {
    if (tensor == nullptr) {
      return;
    }
    copy = new_empty(op, *tensor, tensor->sizes(), tensor->scalar_type());
    from = tensor->const_data_ptr();
    to = copy.mutable_data_ptr();
    heads = tensor->size(2);
    channels = tensor->size(3);
    batch = tensor->stride(0);
    row = tensor->stride(1);
    head = tensor->stride(2);
    channel = tensor->stride(3);
  }

  int64_t tiles() const { return ceil_div(heads * channels, kCopyTile); }
};

}  // namespace

void copy_tokens(const char* op, const CopiedTokens& tensors) {
  const Tensor& any = **std::ranges::find_if(tensors, [](const Tensor* x) { return x != nullptr; });
  const DeviceGuard guard = make_current(any);
  const int64_t B = any.size(0), length = any.size(1);
  std::array copied = {Copied(op, tensors[0]), Copied(op, tensors[1]), Copied(op, tensors[2])};
  const auto& [q, k, v] = copied;
  kernels::copy_tokens({.tensors = {.q = q.from,
                                    .q_copy = q.to,
                                    .q_heads = q.heads,
                                    .q_channels = q.channels,
                                    .q_batch = q.batch,
                                    .q_row = q.row,
                                    .q_head = q.head,
                                    .q_channel = q.channel,
                                    .k = k.from,
                                    .k_copy = k.to,
                                    .k_heads = k.heads,
                                    .k_channels = k.channels,
                                    .k_batch = k.batch,
                                    .k_row = k.row,
                                    .k_head = k.head,
                                    .k_channel = k.channel,
                                    .v = v.from,
                                    .v_copy = v.to,
                                    .v_heads = v.heads,
                                    .v_channels = v.channels,
                                    .v_batch = v.batch,
                                    .v_row = v.row,
                                    .v_head = v.head,
                                    .v_channel = v.channel,
                                    .B = B,
                                    .length = length},
                        .ctas = ceil_div(B * length, kCopyTile) * (q.tiles() + k.tiles() + v.tiles())},
                       {}, current_stream(any));
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i] != nullptr) {
      *tensors[i] = std::move(copied[i].copy);
    }
  }
}

}  // namespace flash_qla
