// Tiles of 64 x 64 elements between a warpgroup's WGMMA fragment and shared memory, transposed on the way.
//
// A fragment is fp32, 32 registers a thread: with w the warp, g = lane / 4 and t = lane % 4, register 4n + e is row
// 16w + g + 8 (e / 2), column 8n + 2t + e % 2. The shared tiles are 16-bit, 64 rows of 128 bytes under TMA's swizzle.
#pragma once

#include <type_traits>

#include "core/warp.cuh"

namespace flash_qla::device {

// Byte offset of the thread's row of ldmatrix or stmatrix, transposed, in a tile of 64 x 64: matrices 0, 1 are rows 16w
// and 16w + 8 of the fragment at column 0; 2, 3 at column 8. 1024 bytes further they are eight columns on.
__device__ __forceinline__ int transposed_offset() {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
  return kept(swizzled(8 * (lane >> 4) + (lane & 7), 2 * warp + (lane >> 3 & 1)));
}

// The first column of the thread's pairs of columns in a fragment.
__device__ __forceinline__ int first_column() { return kept(2 * (threadIdx.x & 3)); }

// tile[i][j] = 0 for i >= valid, in `count` tiles of 64 x 64 16-bit elements. `threads` consecutive threads share the
// work. Calls are rare, so the thread's number is opaque: no address stays in a register between calls.
__device__ __forceinline__ void clear_rows_after(void* tiles, int count, int valid, int threads) {
  int thread = threadIdx.x % threads;
  make_opaque(thread);
#pragma unroll 1
  for (int piece = thread; piece < count * kChunk * 8; piece += threads) {
    if (piece / 8 % kChunk >= valid) {
      static_cast<uint4*>(tiles)[piece] = {};
    }
  }
}

// rounded = x[0] to x[7] in 16 bits: eight registers of a fragment, in the order of a left factor and of
// store_matrices.
template <typename T>
__device__ __forceinline__ void round_eight(uint32_t (&rounded)[4], const float* x) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    rounded[p] = pack(T(), x[2 * p], x[2 * p + 1]);
  }
}

// fragment[i][j] = factors[j].x * tile[j][i] - factors[j].y * fragment[i][j], in two steps. load_minuend loads the tile
// and kEarly of eight quadruples of factors while the WGMMA that computes the fragment is in flight.
// subtract_from_minuend loads the other factors after it.
__device__ __forceinline__ float4 factor_pairs(const float* factors, int column, int n) {
  return *reinterpret_cast<const float4*>(factors + 2 * (8 * n + column));
}

template <int kEarly>
__device__ __forceinline__ void load_minuend(uint32_t* x, float* early, const void* tile, const float* factors,
                                             int offset, int column) {
  const uint32_t from = shared_address(tile) + offset;
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    load_matrices_transposed(*reinterpret_cast<uint32_t (*)[4]>(x + 2 * n), from + 1024 * n);
  }
#pragma unroll
  for (int n = 0; n < kEarly; ++n) {
    const float4 f = factor_pairs(factors, column, n);
    early[4 * n] = f.x;
    early[4 * n + 1] = f.y;
    early[4 * n + 2] = f.z;
    early[4 * n + 3] = f.w;
  }
}

// The second step. Unless has_tile, 0 takes the tile's place.
template <typename T, int kEarly>
__device__ __forceinline__ void subtract_from_minuend(float* fragment, const uint32_t* x, const float* early,
                                                      const float* factors, int column, bool has_tile = true) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float4 f = n < kEarly ? float4{early[4 * n], early[4 * n + 1], early[4 * n + 2], early[4 * n + 3]}
                                : factor_pairs(factors, column, n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 pair = unpack(T(), has_tile ? x[2 * n + h] : 0u);
      float* const to = fragment + 4 * n + 2 * h;
      to[0] = f.x * pair.x - f.y * to[0];
      to[1] = f.z * pair.y - f.w * to[1];
    }
  }
}

// Loads one factor for all columns. The load is opaque: a uniform register would delay WGMMAs that are issued
// meanwhile.
__device__ __forceinline__ float load_factor(const float* factor) { return load_shared(factor); }

// x = factors[j] of a lane's columns, two for each eight columns. scale_columns computes fragment[i][j] *= factors[j].
// round_scaled_columns writes the same product as a left factor of WGMMA, rounded to 16 bits.
__device__ __forceinline__ void load_column_factors(float* x, const float* factors, int column) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(factors + 8 * n + column);
    x[2 * n] = pair.x;
    x[2 * n + 1] = pair.y;
  }
}

__device__ __forceinline__ void scale_columns(float* fragment, const float* x) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    fragment[i] *= x[i / 4 * 2 + i % 2];
  }
}

template <typename T>
__device__ __forceinline__ void round_scaled_columns(void* scaled, const float* fragment, const float* x) {
  uint32_t* const to = static_cast<uint32_t*>(scaled);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    to[i] = pack(T(), fragment[2 * i] * x[i / 2 * 2], fragment[2 * i + 1] * x[i / 2 * 2 + 1]);
  }
}

// rest = fragment[i][j] factors[j] - scaled[i][j], rounded to 16 bits: the error of the rounding above.
template <typename T>
__device__ __forceinline__ void round_scaled_columns(void* rest, const float* fragment, const float* x,
                                                     const void* scaled) {
  uint32_t* const to = static_cast<uint32_t*>(rest);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 rounded = unpack(T(), static_cast<const uint32_t*>(scaled)[i]);
    to[i] = pack(T(), fragment[2 * i] * x[i / 2 * 2] - rounded.x, fragment[2 * i + 1] * x[i / 2 * 2 + 1] - rounded.y);
  }
}

// fragment[i][j] += factors[j] * other[i][j]
__device__ __forceinline__ void add_scaled_columns(float* fragment, const float* other, const float* x) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    fragment[i] += x[i / 4 * 2 + i % 2] * other[i];
  }
}

// x = -a[j] b[j] of a lane's columns.
__device__ __forceinline__ void load_column_products(float* x, const float* a, const float* b, int column) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 left = *reinterpret_cast<const float2*>(a + 8 * n + column);
    const float2 right = *reinterpret_cast<const float2*>(b + 8 * n + column);
    x[2 * n] = -left.x * right.x;
    x[2 * n + 1] = -left.y * right.y;
  }
}

// tile[j][i] * factors[j] * scale as a left factor of WGMMA in two 16-bit parts, rounded and rest.
template <typename T>
__device__ __forceinline__ void round_scaled_tile(void* rounded, void* rest, const void* tile, const float* factors,
                                                  float scale, int offset, int column) {
  const uint32_t from = shared_address(tile) + offset;
  uint32_t* const to = static_cast<uint32_t*>(rounded);
  uint32_t* const rest_to = static_cast<uint32_t*>(rest);
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    uint32_t x[4];
    load_matrices_transposed(x, from + 1024 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * (n + i / 2) + column);
      const float2 pair = unpack(T(), x[i]);
      const float low = pair.x * (f.x * scale), high = pair.y * (f.y * scale);
      to[2 * n + i] = pack(T(), low, high);
      const float2 taken = unpack(T(), to[2 * n + i]);
      rest_to[2 * n + i] = pack(T(), low - taken.x, high - taken.y);
    }
  }
}

// tile[j][i] = fragment[i][j], rounded to 16 bits.
template <typename T>
__device__ __forceinline__ void stage_transposed(const float* fragment, void* tile, int offset) {
  const uint32_t to = shared_address(tile) + offset;
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    const float* const x = fragment + 4 * n;
    store_matrices_transposed(to + 1024 * n, pack(T(), x[0], x[1]), pack(T(), x[2], x[3]), pack(T(), x[4], x[5]),
                              pack(T(), x[6], x[7]));
  }
}

// Byte offset of the thread's row of stmatrix, not transposed, in a tile of 64 x 64.
__device__ __forceinline__ int rows_offset() {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3;
  return kept(swizzled(16 * warp + (lane & 15), lane >> 4));
}

// tile[i][j] = fragment[i][j], in kTiles tiles side by side. `fragment` is the left factor of a register-sourced WGMMA.
// Its registers have the order of an fp32 fragment's pairs.
template <int kTiles>
__device__ __forceinline__ void stage_rows(const void* fragment, void* tiles, int offset) {
  const uint32_t* const x = static_cast<const uint32_t*>(fragment);
  const uint32_t to = shared_address(tiles) + offset;
#pragma unroll
  for (int n = 0; n < 8 * kTiles; n += 2) {
    store_matrices((to ^ (16 * (n % 8))) + 8192 * (n / 8), x[2 * n], x[2 * n + 1], x[2 * n + 2], x[2 * n + 3]);
  }
}

// rows[j * stride + i] = tile[j][i] for j < valid, i < columns, a multiple of 8. One warp calls it in the place of a
// box of TMA, which would write rows of the next sequence.
template <typename T>
__device__ __forceinline__ void store_tile(const void* tile, void* rows, int stride, int valid, int columns) {
  const int lane = threadIdx.x & 31, row = lane / 8, piece = lane % 8;
  const char* const from = static_cast<const char*>(tile);
  T* const to = static_cast<T*>(rows) + piece * 8;
#pragma unroll 1
  for (int i = row; i < 64; i += 8) {
    uint4 data[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      data[n] = *reinterpret_cast<const uint4*>(from + swizzled(i + 4 * n, piece));
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (i + 4 * n < valid && piece * 8 < columns) {
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(i + 4 * n) * stride) = data[n];
      }
    }
  }
}

// The functions of states below take a Dtype that is known at run time, of 8 bits only if kFloat8.

// number_at: the address of element i of `numbers`. chosen: a if `first`, else b.
template <bool kFloat8, typename Number>
__device__ __forceinline__ Number* number_at(Number* numbers, int dtype, int64_t i) {
  const int bytes = dtype == Dtype::kFloat32 ? 4 : kFloat8 && is_float8(dtype) ? 1 : 2;
  const char* const at = reinterpret_cast<const char*>(numbers) + i * bytes;
  return const_cast<Number*>(reinterpret_cast<const Number*>(at));
}
template <typename Number>
__device__ __forceinline__ Number* chosen(bool first, Number* a, Number* b) {
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

// use(i, at) for each element of a thread: register i of its fragment, byte `at` in shared memory. K rows of 32 columns
// lie in K / 64 warpgroups as fragments of 64 x 32. In shared memory they are K / 32 tiles of 32 columns by 32 rows,
// with 32 floats a column under the 128-byte swizzle. No two lanes of a warp meet in a bank.
template <typename Use>
__device__ __forceinline__ void for_columns(Use use) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = 2 * (lane % 4);
  const int at = 4096 * (warp / 2) + 128 * column + 16 * ((4 * (warp % 2) + lane / 16) ^ column) + 4 * (lane / 4 % 4);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int next_column = i % 2, rows_below = i / 2 % 2;  // 1: one column on; 1: eight rows below
    use(i, (at ^ (16 * next_column + 32 * rows_below)) + 128 * next_column + 1024 * (i / 4));
  }
}

__device__ __forceinline__ void read_columns(float* fragment, const void* tiles) {
  const char* const from = static_cast<const char*>(tiles);
  for_columns([=](int i, int at) { fragment[i] = *reinterpret_cast<const float*>(from + at); });
}

__device__ __forceinline__ void write_columns(const float* fragment, void* tiles) {
  char* const to = static_cast<char*>(tiles);
  for_columns([=](int i, int at) { *reinterpret_cast<float*>(to + at) = fragment[i]; });
}

// fragment = columns of S from a caller's state, in the layout of for_columns. `state` points to the first column.
// Channels and columns that the state lacks are zeros.
template <bool kFloat8>
__device__ __forceinline__ void read_state_columns(float* fragment, const void* state, int dtype, int stride_v,
                                                   int stride_k, int channels, int columns) {
  const int lane = threadIdx.x % 32, row = 16 * (threadIdx.x / 32) + lane / 4, column = 2 * (lane % 4);
  const auto read = [=]<typename T>(T, auto number) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int k = row + 8 * (i / 2 % 2), v = column + 8 * (i / 4) + i % 2;
      fragment[i] =
          k < channels && v < columns ? number(static_cast<const T*>(state)[v * stride_v + k * stride_k]) : 0.f;
    }
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
