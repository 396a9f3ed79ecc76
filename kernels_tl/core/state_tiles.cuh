// States between a warpgroup's fragment, shared memory and global memory. The functions take a Dtype that is known at
// run time, of 8 bits only if kFloat8.
#pragma once

#include "core/tiles.cuh"

namespace flash_qla::device {

// number_at: the address of element i of `data`. chosen: a if `first`, else b.
template <bool kFloat8, typename Number>
__device__ __forceinline__ Number* number_at(Number* data, int dtype, int64_t i) {
  const int bytes = dtype == Dtype::kFloat32 ? 4 : kFloat8 && is_float8(dtype) ? 1 : 2;
  const char* const at = reinterpret_cast<const char*>(data) + i * bytes;
  return const_cast<Number*>(reinterpret_cast<const Number*>(at));
}
template <typename A, typename B>
__device__ __forceinline__ auto* chosen(bool first, A* a, B* b) {
  return first ? a : b;
}

// One warp copies a state to shared memory: `rows` rows of `bytes` bytes, `stride` bytes apart in global memory and
// `pitch` bytes apart in shared memory. Each lane announces its own rows to the barrier.
template <typename Barrier>
__device__ __forceinline__ void fetch_state(Barrier& barrier, void* to, const void* state, int rows, int bytes,
                                            int stride, int pitch) {
  const int lane = threadIdx.x & 31;
  expect_bytes(barrier, (rows + 31 - lane) / 32 * bytes);
#pragma unroll 1
  for (int row = lane; row < rows; row += 32) {
    copy_bytes(to, row * pitch, static_cast<const char*>(state) + row * stride, bytes, barrier);
  }
}

// use(i, at) for each element of a thread: register i of its fragment, byte `at` in shared memory. K rows of kColumns
// columns lie in K / 64 warpgroups as fragments of 64 rows. In shared memory they are K / 32 tiles of kColumns columns
// by 32 rows, with 32 floats per column under the 128-byte swizzle. No two lanes of a warp meet in a bank.
template <int kColumns, typename Use>
__device__ __forceinline__ void for_columns(Use use) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = 2 * (lane % 4);
  const int tile = 128 * kColumns * (warp / 2);
  const int at = tile + 128 * column + 16 * ((4 * (warp % 2) + lane / 16) ^ column) + 4 * (lane / 4 % 4);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const int next_column = i % 2, rows_below = i / 2 % 2;  // 1: one column on; 1: eight rows below
    use(i, (at ^ (16 * next_column + 32 * rows_below)) + 128 * next_column + 1024 * (i / 4));
  }
}

template <int kColumns>
__device__ __forceinline__ void read_columns(float* fragment, const void* tiles) {
  const char* const from = static_cast<const char*>(tiles);
  for_columns<kColumns>([=](int i, int at) { fragment[i] = *reinterpret_cast<const float*>(from + at); });
}

template <int kColumns>
__device__ __forceinline__ void write_columns(const float* fragment, void* tiles) {
  char* const to = static_cast<char*>(tiles);
  for_columns<kColumns>([=](int i, int at) { *reinterpret_cast<float*>(to + at) = fragment[i]; });
}

// fragment += the left and the right half of a fragment of twice the columns.
template <int kColumns>
__device__ __forceinline__ void add_halves(float* fragment, const float* halves) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    fragment[i] += halves[i] + halves[kColumns / 2 + i];
  }
}

// use(i, k, v) for each element of a thread: register i of its fragment, channel k and column v of S, in the layout of
// for_columns.
template <int kColumns, typename Use>
__device__ __forceinline__ void for_elements(Use use) {
  const int lane = threadIdx.x % 32, row = 16 * (threadIdx.x / 32) + lane / 4, column = 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    use(i, row + 8 * (i / 2 % 2), column + 8 * (i / 4) + i % 2);
  }
}

// fragment = elements of S from a caller's state. for_each(use) calls use(i, k, v) for each element of a thread.
// Channels and value rows that the state lacks are zeros.
template <bool kFloat8, typename ForEach>
__device__ __forceinline__ void read_state_elements(float* fragment, const void* state, int dtype, int stride_v,
                                                    int stride_k, int channels, int rows, ForEach for_each) {
  const auto read = [=]<typename T>(T, auto number) {
    for_each([=](int i, int k, int v) {
      fragment[i] = k < channels && v < rows ? number(static_cast<const T*>(state)[v * stride_v + k * stride_k]) : 0.f;
    });
  };
  const auto number = [](auto x) { return to_float(x); };
  if (dtype == Dtype::kBfloat16) {
    read(__nv_bfloat16(), number);
  } else if (dtype == Dtype::kFloat16) {
    read(__half(), number);
  } else if (kFloat8 && is_float8(dtype)) {
    read(Float8(), [=](Float8 x) { return unpack_float8(dtype, x.bits).x; });
  } else {
    read(float(), number);
  }
}

// fragment = columns of S. `state` points to the first column.
template <int kColumns, bool kFloat8>
__device__ __forceinline__ void read_state_columns(float* fragment, const void* state, int dtype, int stride_v,
                                                   int stride_k, int channels, int columns) {
  read_state_elements<kFloat8>(fragment, state, dtype, stride_v, stride_k, channels, columns,
                               [](auto use) { for_elements<kColumns>(use); });
}

// rows[v][k] = S[k][v] for columns of S, where rows are `stride` floats apart.
template <int kColumns>
__device__ __forceinline__ void write_as_rows(const float* fragment, void* rows, int stride, int channels,
                                              int columns) {
  for_elements<kColumns>([=](int i, int k, int v) {
    if (k < channels && v < columns) {
      static_cast<float*>(rows)[v * stride + k] = fragment[i];
    }
  });
}

// use(i, at, next) for each pair of columns of a thread: pair i of its fragment, whose elements are at `at` and `next`
// in a state. skip(i) for a pair that the state lacks.
//
// S^T lies in the CTA's first warpgroups, 64 rows each, as fragments of 64 x kK. The state has V or K first, with rows
// `stride` elements apart. It has `rows` value rows and `columns` channels, both multiples of 8. The inputs are opaque
// like lane_here(), so no address is kept in a register from before the chunks. If the state has all rows and columns
// (kAll), no pair is checked, because a branch for each pair took 5 % of batches of 1024 tokens. Without kTwice there
// is one code, which checks all pairs.
template <int kK, bool kAll, typename Number, typename Use, typename Skip>
__device__ __forceinline__ void for_pairs_from(Number* at, int row_step, int column_step, int next, int rows,
                                               int columns, Use use, Skip skip) {
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kAll || (8 * half < rows && 8 * n < columns)) {
        use(2 * n + half, at + half * row_step, at + half * row_step + next);
      } else {
        skip(2 * n + half);
      }
    }
    at += column_step;
  }
}
template <int kK, bool kTwice = true, typename Number, typename Use, typename Skip>
__device__ __forceinline__ void for_pairs(Number* state, bool v_first, int stride, int rows, int columns, Use use,
                                          Skip skip) {
  int thread = threadIdx.x;
  make_opaque(thread, stride, rows, columns);
  const int row = 16 * (thread / 32) + thread % 32 / 4, column = 2 * (thread % 4);
  Number* const at = state + (v_first ? row * stride + column : column * stride + row);
  const int row_step = v_first ? 8 * stride : 8, column_step = v_first ? 8 : 8 * stride, next = v_first ? 1 : stride;
  if (kTwice && __all_sync(~0u, row + 8 < rows) && columns == kK) {
    for_pairs_from<kK, true>(at, row_step, column_step, next, rows, columns, use, skip);
  } else {
    for_pairs_from<kK, false>(at, row_step, column_step, next, rows - row, columns, use, skip);
  }
}

// fragment = rows of S^T from a state, with zeros for rows and columns that it lacks. A state of 8 or 16 bits has V
// first.
template <int kK, bool kFloat8 = false>
__device__ __forceinline__ void read_state(float* fragment, const void* state, int dtype, bool v_first, int stride,
                                           int rows, int columns) {
  float2* const pairs = reinterpret_cast<float2*>(fragment);
  const auto clear = [=](int i) { pairs[i] = {}; };
  const auto read_16 = [=]<typename T>(T type) {
    for_pairs<kK>(
        static_cast<const T*>(state), true, stride, rows, columns,
        [=](int i, const T* at, const T*) { pairs[i] = unpack(type, *reinterpret_cast<const uint32_t*>(at)); }, clear);
  };
  const float* const floats = static_cast<const float*>(state);
  if (dtype == Dtype::kBfloat16) {
    read_16(__nv_bfloat16());
  } else if (dtype == Dtype::kFloat16) {
    read_16(__half());
  } else if (kFloat8 && is_float8(dtype)) {
    const auto read = [=](int i, const Float8* at, const Float8*) {
      pairs[i] = unpack_float8(dtype, *reinterpret_cast<const uint16_t*>(at));
    };
    for_pairs<kK, false>(static_cast<const Float8*>(state), true, stride, rows, columns, read, clear);
  } else if (v_first) {
    for_pairs<kK>(
        floats, true, stride, rows, columns,
        [=](int i, const float* at, const float*) { pairs[i] = *reinterpret_cast<const float2*>(at); }, clear);
  } else {
    for_pairs<kK>(
        floats, false, stride, rows, columns,
        [=](int i, const float* at, const float* next) { pairs[i] = {*at, *next}; }, clear);
  }
  // The branches meet here. Without the pins ptxas merges them later and serializes all WGMMAs (its warning C7514).
#pragma unroll
  for (int i = 0; i < kK / 2; ++i) {
    pin_here(fragment[i]);
  }
}

// Transposes 4 x 4 words between four neighbouring lanes: word i of lane t becomes word t of lane i. `lane` may also
// be the number of the thread.
__device__ __forceinline__ uint4 transpose_words(uint4 x, int lane) {
  const bool high = lane & 2, odd = lane & 1;
  const uint32_t low_pair = __shfl_xor_sync(~0u, high ? x.x : x.z, 2);
  const uint32_t high_pair = __shfl_xor_sync(~0u, high ? x.y : x.w, 2);
  x = high ? uint4{low_pair, high_pair, x.z, x.w} : uint4{x.x, x.y, low_pair, high_pair};
  const uint32_t first = __shfl_xor_sync(~0u, odd ? x.x : x.y, 1);
  const uint32_t second = __shfl_xor_sync(~0u, odd ? x.z : x.w, 1);
  return odd ? uint4{first, x.y, second, x.w} : uint4{x.x, first, x.z, second};
}

// state = rows of S^T, for a state of 16 bits with V first. word(i) is the lane's i-th pair of columns. Four lanes
// share a row: each writes 8 of 32 columns. `thread` counts from the thread that has the state's first row.
template <int kK, typename Word>
__device__ __forceinline__ void write_words(void* state, int thread, int stride, int rows, int columns, Word word) {
  make_opaque(thread, stride, rows, columns);
  const int row = 16 * (thread / 32) + thread % 32 / 4, column = 8 * (thread % 4);
  uint16_t* const at = static_cast<uint16_t*>(state) + row * stride + column;
#pragma unroll
  for (int n = 0; n < kK / 8; n += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * n + half;
      const uint4 piece = transpose_words({word(i), word(i + 2), word(i + 4), word(i + 6)}, thread);
      if (row + 8 * half < rows && column + 8 * n < columns) {
        *reinterpret_cast<uint4*>(at + 8 * half * stride + 8 * n) = piece;
      }
    }
  }
}

// The same for 8 bits, in columns that are a multiple of 16. pair(i) is the lane's i-th pair in the low bytes of a
// word. Each of the four lanes writes 16 of 64 columns.
template <int kK, typename Pair>
__device__ __forceinline__ void write_bytes(void* state, int thread, int stride, int rows, int columns, Pair pair) {
  make_opaque(thread, stride, rows, columns);
  const int row = 16 * (thread / 32) + thread % 32 / 4, column = 16 * (thread % 4);
  char* const at = static_cast<char*>(state) + row * stride + column;
  const auto word = [=](int i) { return pair(i) | pair(i + 2) << 16; };
#pragma unroll
  for (int n = 0; n < kK / 8; n += 8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * n + half;
      // The words of lane t of the four: columns 2t, 2t + 1, 2t + 8, 2t + 9 of the lane's 16.
      const uint4 x = transpose_words({word(i), word(i + 4), word(i + 8), word(i + 12)}, thread);
      if (row + 8 * half < rows && column + 8 * n < columns) {
        *reinterpret_cast<uint4*>(at + 8 * half * stride + 8 * n) = {
            __byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.x, x.y, 0x7632),
            __byte_perm(x.z, x.w, 0x7632)};
      }
    }
  }
}

// state = rows of S^T from an fp32 fragment; the inverse of read_state.
template <int kK, bool kFloat8 = false>
__device__ __forceinline__ void write_state(const float* fragment, void* state, int dtype, bool v_first, int stride,
                                            int rows, int columns) {
  const float2* const pairs = reinterpret_cast<const float2*>(fragment);
  const auto nothing = [](int) {};
  const auto write_16 = [=]<typename T>(T type) {
    write_words<kK>(state, threadIdx.x, stride, rows, columns,
                    [=](int i) { return pack(type, pairs[i].x, pairs[i].y); });
  };
  float* const floats = static_cast<float*>(state);
  if (dtype == Dtype::kBfloat16) {
    write_16(__nv_bfloat16());
  } else if (dtype == Dtype::kFloat16) {
    write_16(__half());
  } else if (kFloat8 && is_float8(dtype)) {
    write_bytes<kK>(state, threadIdx.x, stride, rows, columns,
                    [=](int i) { return pack_float8(dtype, pairs[i].x, pairs[i].y); });
  } else if (v_first) {
    for_pairs<kK>(
        floats, true, stride, rows, columns,
        [=](int i, float* at, float*) { *reinterpret_cast<float2*>(at) = pairs[i]; }, nothing);
  } else {
    for_pairs<kK>(
        floats, false, stride, rows, columns,
        [=](int i, float* at, float* next) {
          *at = pairs[i].x;
          *next = pairs[i].y;
        },
        nothing);
  }
}

// state = 64 rows of S^T from the left factor of a register-sourced WGMMA, by one warpgroup. Register i of the factor
// is the i-th pair of an fp32 fragment.
template <int kK>
__device__ __forceinline__ void store_state(const void* fragment, void* state, int stride, int rows, int columns) {
  const uint32_t* const pairs = static_cast<const uint32_t*>(fragment);
  write_words<kK>(state, threadIdx.x % 128, stride, rows, columns, [=](int i) { return pairs[i]; });
}

// The same from an fp32 fragment, whose numbers are rounded to T.
template <typename T, int kK>
__device__ __forceinline__ void round_and_store_state(const float* fragment, void* state, int stride, int rows,
                                                      int columns) {
  const float2* const pairs = reinterpret_cast<const float2*>(fragment);
  write_words<kK>(state, threadIdx.x % 128, stride, rows, columns,
                  [=](int i) { return pack(T(), pairs[i].x, pairs[i].y); });
}

}  // namespace flash_qla::device
