// Numbers of any dtype as vectors of fp32, products of small matrices of fp32, and the softmax of a row's next scores.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

namespace core_cpu {

using Vec = at::vec::Vectorized<float>;
using Ints = at::vec::Vectorized<int32_t>;
constexpr int64_t WIDTH = Vec::size();
constexpr int64_t LINE = 64;  // bytes that are fetched at once: asking for them twice costs more than it gains
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

inline int64_t padded(int64_t size) {
  return (size + WIDTH - 1) / WIDTH * WIDTH;
}

template <typename T>
inline Vec wide(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return Vec::loadu(from);
  } else {
    Vec out;
    at::vec::load_to_float<T>(from, out);
    return out;
  }
}

// Call `body` with 0 to N - 1 as constants. Compilers keep arrays in registers where each index is constant early, which
// a pragma to unroll comes too late for.
template <int N, typename Body>
__attribute__((always_inline)) inline void unrolled(const Body& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

// Write `size` numbers times `factor` to `to` as fp32, then zeros up to the end of the last vector.
template <typename T>
inline void widen(const T* from, int64_t size, float* to, float factor) {
  const Vec times(factor);
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) {
    (wide(from + i) * times).store(to + i);
  }
  if (i < size) {
    T rest[WIDTH] = {};
    std::memcpy(rest, from + i, (size - i) * sizeof(T));
    (wide(rest) * times).store(to + i);
  }
}

// Registers bound a block of a product: its sums, a row of b and a number of a.
#if defined(CPU_CAPABILITY_AVX2)
constexpr int BLOCK_COLUMNS = 2;
#else
constexpr int BLOCK_COLUMNS = 4;
#endif
constexpr int BLOCK_ROWS = 6;

// c (R, C vectors) = or += a (R, depth) @ b (depth, C vectors). Loops of known length, unrolled by pragma: compilers keep
// arrays in registers only where they see each index as a constant early.
template <int R, int C>
void multiply_block(
    const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth, bool add) {
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      sums[r][j] = add ? Vec::loadu(c + r * ldc + j * WIDTH) : Vec(0.f);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      row[j] = Vec::loadu(b + k * ldb + j * WIDTH);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec number(a[r * lda + k]);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) {
        sums[r][j] = at::vec::fmadd(number, row[j], sums[r][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      sums[r][j].store(c + r * ldc + j * WIDTH);
    }
  }
}

template <int C>
void multiply_columns(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                      int64_t depth, bool add) {
  int64_t r = 0;
  const auto take = [&](auto count) {
    for (; rows - r >= count; r += count) {
      multiply_block<count, C>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth, add);
    }
  };
  take(std::integral_constant<int, BLOCK_ROWS>{});
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

// c (rows, columns) = or += a (rows, depth) @ b (depth, columns); columns: a multiple of WIDTH.
inline void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                     int64_t columns, int64_t depth, bool add) {
  int64_t j = 0;
  const auto take = [&](auto count) {
    for (; columns - j >= count * WIDTH; j += count * WIDTH) {
      multiply_columns<count>(a, lda, b + j, ldb, c + j, ldc, rows, depth, add);
    }
  };
  take(std::integral_constant<int, BLOCK_COLUMNS>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
}

// Return the sums of neighbours, those of a first.
inline Vec add_pairs(const Vec& a, const Vec& b) {
  const auto pair = at::vec::deinterleave2<float>(a, b);
  return pair.first + pair.second;
}

inline Ints add_pairs(const Ints& a, const Ints& b) {
  const auto pair = at::vec::deinterleave2<float>(at::vec::cast<float>(a), at::vec::cast<float>(b));
  return at::vec::cast<int32_t>(pair.first) + at::vec::cast<int32_t>(pair.second);
}

// Add neighbours of 2 * N vectors, so that N vectors hold the sums in order.
template <int N, typename V>
inline void add_neighbours(V* sums) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    sums[i] = add_pairs(sums[2 * i], sums[2 * i + 1]);
  }
}

// Return the totals of COUNT vectors, a power of 2, in the first lanes.
template <int COUNT, typename V>
V totals(V* sums) {
  if constexpr (COUNT >= 16) {
    add_neighbours<8>(sums);
  }
  if constexpr (COUNT >= 8) {
    add_neighbours<4>(sums);
  }
  if constexpr (COUNT >= 4) {
    add_neighbours<2>(sums);
  }
  if constexpr (COUNT >= 2) {
    add_neighbours<1>(sums);
  }
  for (int lanes = COUNT; lanes < WIDTH; lanes *= 2) {
    sums[0] = add_pairs(sums[0], sums[0]);
  }
  return sums[0];
}

// Kernels of products go through several rows of a weight at a time, far apart from one another: each is then a stream of
// its own, which goes on with the next row, and which processors foresee. Several rows of one page they do not foresee:
// with neighbouring rows of 1.5 KiB, Zen 4 read at half of this speed.
//
// How far ahead of its use a weight is fetched as well, in bytes of all streams together. Measured from 1,024 to 8,192:
// 4,096 and more lost on Zen 1 and gained nothing on Zen 4.
constexpr int64_t DISTANCE = 2048;
// Bytes of a weight that stay in the second cache, while several blocks of rows of x pass by.
constexpr int64_t KEPT = 1 << 17;

// Return what to fetch while a row of so many bytes is read at `at`; behind its end, of the row that is `stride` behind.
inline int64_t fetched(int64_t at, int64_t early, int64_t row, int64_t stride) {
  return at + early + (at + early < row ? 0 : stride - row);
}

constexpr int power_of_2(int count) {
  return count <= 1 ? 1 : 2 * power_of_2((count + 1) / 2);
}

// Return the products (WIDTH) of a row (size) with WIDTH keys, each `ldk` numbers after the one before; size: padded.
inline Vec dots(const float* row, const float* keys, int64_t ldk, int64_t size) {
  Vec sums[WIDTH];
#pragma GCC unroll 16
  for (int i = 0; i < WIDTH; ++i) {
    sums[i] = Vec(0.f);
  }
  for (int64_t d = 0; d < size; d += WIDTH) {
    const Vec part = Vec::loadu(row + d);
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) {
      sums[i] = at::vec::fmadd(part, Vec::loadu(keys + i * ldk + d), sums[i]);
    }
  }
  if constexpr (WIDTH >= 16) {
    add_neighbours<8>(sums);
  }
  if constexpr (WIDTH >= 8) {
    add_neighbours<4>(sums);
  }
  add_neighbours<2>(sums);
  add_neighbours<1>(sums);
  return sums[0];
}

inline float largest(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, x);
}

inline float total(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

// The larger of two, NaN where either is.
inline float wider(float a, float b) {
  return a > b || std::isnan(a) ? a : b;
}

// What a softmax has met so far of a row: the largest score, and the sum of exponentials of the differences to it.
struct Softmax {
  float top = HIDDEN;
  float sum = 0.f;
};

// How much a sum of exponentials over `top` shrinks where the largest score becomes `next`. NaN where that is infinite
// or NaN, as in any softmax; 1 where all was hidden so far.
inline float shrunk(float top, float next) {
  if (next == HIDDEN) {
    return 1.f;
  }
  return std::isfinite(next) ? std::exp(top - next) : std::numeric_limits<float>::quiet_NaN();
}

// Turn the scores (count, a multiple of WIDTH) of a row into exponentials and take them into its softmax; return the
// factor by which what was summed before shrinks. exact: of full fp32, else within 20 units in the last place.
template <bool exact>
float take_scores(float* scores, int64_t count, Softmax& softmax) {
  Vec tops(HIDDEN), sums(0.f);
  for (int64_t i = 0; i < count; i += WIDTH) {
    tops = at::vec::maximum(tops, Vec::loadu(scores + i));
  }
  const float next = wider(softmax.top, largest(tops));
  const float factor = shrunk(softmax.top, next);
  const Vec base(next == HIDDEN ? 0.f : next);
  for (int64_t i = 0; i < count; i += WIDTH) {
    const Vec below = Vec::loadu(scores + i) - base;
    const Vec x = exact ? below.exp() : below.exp_u20();
    x.store(scores + i);
    sums = sums + x;
  }
  softmax.top = next;
  softmax.sum = softmax.sum * factor + total(sums);
  return factor;
}

// scores = softcap * tanh(scores), of scores that are divided by softcap already.
inline void cap(float* scores, int64_t count, float softcap) {
  for (int64_t i = 0; i < count; i += WIDTH) {
    (Vec::loadu(scores + i).tanh() * Vec(softcap)).store(scores + i);
  }
}

inline void scale_row(float* row, int64_t size, float factor) {
  for (int64_t i = 0; i < size; i += WIDTH) {
    (Vec::loadu(row + i) * Vec(factor)).store(row + i);
  }
}

// out (columns, 64 or fewer rows, `ldo` numbers apart) = the transpose of rows; both padded to WIDTH.
inline void transpose(const float* rows, int64_t ldr, int64_t count, int64_t size, float* out, int64_t ldo) {
  for (int64_t i = 0; i < count; i += WIDTH) {
    for (int64_t j = 0; j < size; j += WIDTH) {
      at::vec::transpose_mxn<float, WIDTH, WIDTH>(rows + i * ldr + j, ldr, out + j * ldo + i, ldo);
    }
  }
}

}  // namespace core_cpu
