// Ordered accumulation: dQ and dK of a query/key head are sums over the value heads of its group and their tiles of
// value rows. The CTAs of these heads and tiles add one after the other, in a fixed order, so the sums have the same
// bits every time. semaphores[chunk, H_k] counts the CTAs that have added.
//
// A CTA only waits for CTAs with lower numbers. The GPU begins CTAs in the order of their numbers, so the CTAs that it
// waits for run already, or have ended.
#pragma once

#include "core/tiles.cuh"

namespace flash_qla::device {

// Waits until `order` CTAs have added to the chunk. One warp calls it, and may then read and add to their sums.
__device__ __forceinline__ void wait_for_semaphore(const int* semaphore, int order) {
  if (order > 0) {
    if (lane_here() == 0) {
      while (load_acquire(semaphore) < order) {
        __nanosleep(100);
      }
    }
    __syncwarp();
    fence_proxies();  // TMA boxes see the earlier sums, too
  }
}

// Lets the next CTA add, unless this is the last of `takers`. The same warp calls it, after its sums are in memory.
__device__ __forceinline__ void release_semaphore(int* semaphore, int order, int takers) {
  if (order + 1 < takers) {
    fence_proxies();
    __syncwarp();
    if (lane_here() == 0) {
      store_release(semaphore, order + 1);
    }
  }
}

// rows += tiles, or rows = tiles by the first CTA: 64 rows, `stride` apart, and of their key_dim columns up to 128
// from `column` on. `tiles` are two tiles of 64 x 64 side by side. One warp calls it. A whole chunk goes as two TMA
// boxes, which are in flight until wait_until_stored. With fewer `valid` rows each half-warp adds a row at a time,
// because a box would reach into the next sequence.
template <typename T>
__device__ __forceinline__ void add_rows(const CUtensorMap& map, const void* tiles, void* rows, int row, int hk,
                                         int stride, int key_dim, int column, int valid, bool is_first) {
  constexpr int kTileBytes = kChunk * kChunk * 2;
  const int lane = lane_here();
  if (valid >= kChunk) {
    if (lane < 2) {
      const char* const tile = static_cast<const char*>(tiles) + lane * kTileBytes;
      if (is_first) {
        store_box(map, tile, column + kChunk * lane, hk, row);
      } else {
        add_box(map, tile, column + kChunk * lane, hk, row);
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = lane / 16; i < valid; i += 2) {
    const int piece = lane & 15;
    const char* const from = static_cast<const char*>(tiles) + piece / 8 * kTileBytes;
    if (column + 8 * piece >= key_dim) {
      continue;
    }
    uint4 x = *reinterpret_cast<const uint4*>(from + swizzled(i, piece & 7));
    uint4* const to = reinterpret_cast<uint4*>(static_cast<T*>(rows) + i * stride + column) + piece;
    if (!is_first) {
      const uint4 before = __ldcg(to);
      const auto add = [](uint32_t a, uint32_t b) {
        const float2 p = unpack(T(), a), q = unpack(T(), b);
        return pack(T(), p.x + q.x, p.y + q.y);
      };
      x = {add(before.x, x.x), add(before.y, x.y), add(before.z, x.z), add(before.w, x.w)};
    }
    *to = x;
  }
}

}  // namespace flash_qla::device
