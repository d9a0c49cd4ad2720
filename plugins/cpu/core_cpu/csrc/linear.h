// Products of few rows with a weight as `torch.nn.Linear` holds it: each number of the weight is read from memory once.
//
// A block is some rows of x times some rows of the weight. Its sums stay in registers; one vector holds parts of one sum.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "product.h"
#include "vectors.h"

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include <immintrin.h>
#endif

namespace core_cpu {

constexpr int MAX_BLOCK_ROWS = 8;
constexpr int64_t COLUMNS = 8;  // shares of threads are multiples of so many rows of the weight
constexpr int64_t BYTES = 1 << 15;  // of a block of rows: these stay in the first cache while the weight passes by

// One share of a product with a weight (columns, depth).
template <typename T>
struct Product : Operands<T> {
  // Sums (rows, columns) so far, where the depth is gone through in parts; null where it is not. Which part this is.
  float* sums = nullptr;
  bool first = true, last = true;
  // Whether a row's sums are added up in one order, however many rows there are.
  bool alike = false;
};

// How numbers of T are multiplied, STEP at a time.
template <typename T>
struct Arithmetic {
  using Numbers = Vec;
  static constexpr int64_t STEP = WIDTH;

  static Numbers load(const T* from) {
    return wide(from);
  }

  static void multiply_add(Vec& sum, const Numbers& a, const Numbers& b) {
    sum = at::vec::fmadd(a, b, sum);
  }
};

#if defined(CORE_CPU_BF16_PAIRS)
// By the instruction for pairs of bf16, which takes denormal numbers for zero.
template <>
struct Arithmetic<c10::BFloat16> {
  using Numbers = __m512bh;
  static constexpr int64_t STEP = 32;

  static Numbers load(const c10::BFloat16* from) {
    return (__m512bh)_mm512_loadu_si512(from);
  }

  static void multiply_add(Vec& sum, const Numbers& a, const Numbers& b) {
    sum = _mm512_dpbf16_ps(sum, a, b);
  }
};
#elif defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
// A bf16 is the upper half of a fp32, so that a load of pairs becomes two vectors of fp32 by a shift and a mask: one
// load for what would be two, each with a conversion. The sum goes over even numbers and odd ones.
template <>
struct Arithmetic<c10::BFloat16> {
  struct Numbers {
    Vec even, odd;
  };
  static constexpr int64_t STEP = 2 * WIDTH;

  static Numbers load(const c10::BFloat16* from) {
#if defined(CPU_CAPABILITY_AVX512)
    const __m512i pairs = _mm512_loadu_si512(from);
    const __m512i odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000));
    return {Vec(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))), Vec(_mm512_castsi512_ps(odd))};
#else
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i odd = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000));
    return {Vec(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))), Vec(_mm256_castsi256_ps(odd))};
#endif
  }

  static void multiply_add(Vec& sum, const Numbers& a, const Numbers& b) {
    sum = at::vec::fmadd(a.even, b.even, sum);
    sum = at::vec::fmadd(a.odd, b.odd, sum);
  }
};
#endif

// Return the first `count` numbers, fewer than STEP, and zeros.
template <typename T>
typename Arithmetic<T>::Numbers load_rest(const T* from, int64_t count) {
  T rest[Arithmetic<T>::STEP] = {};
  std::memcpy(rest, from, count * sizeof(T));
  return Arithmetic<T>::load(rest);
}

// Compute R rows of x times C rows of the weight, from row `r` and column `c` on, each column `apart` behind the one
// before. Fetches as much of the weight into the cache meanwhile, from DISTANCE on, where `ahead`.
template <int R, int C, typename T>
void linear_block(const Product<T>& product, int64_t r, int64_t c, int64_t apart, bool ahead) {
  using Numbers = typename Arithmetic<T>::Numbers;
  constexpr int64_t STEP = Arithmetic<T>::STEP;
  constexpr int COUNT = power_of_2(R * C);
  static_assert(COUNT <= WIDTH);
  const T* x = product.x + r * product.ldx;
  const T* weight = product.weight + c * product.ldw;
  const int64_t ldw = apart * product.ldw;
  constexpr int64_t SIZE = static_cast<int64_t>(sizeof(T));
  const int64_t row = product.depth * SIZE, early = std::min<int64_t>(DISTANCE / C, row);
  Vec sums[COUNT];
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; ++i) {
    sums[i] = Vec(0.f);
  }
  // Of rows and columns, the fewer are held in registers, and each of the others is used up as it is loaded.
  const auto step = [&](const auto& load, int64_t k) __attribute__((always_inline)) {
    const auto of_x = [&](int i) __attribute__((always_inline)) { return load(x + i * product.ldx + k); };
    const auto column = [&](int j) __attribute__((always_inline)) { return load(weight + j * ldw + k); };
    constexpr bool holds_rows = R <= C;
    Numbers held[std::min(R, C)];
#pragma GCC unroll 8
    for (int i = 0; i < std::min(R, C); ++i) {
      held[i] = holds_rows ? of_x(i) : column(i);
    }
#pragma GCC unroll 8
    for (int j = 0; j < std::max(R, C); ++j) {
      const Numbers other = holds_rows ? column(j) : of_x(j);
#pragma GCC unroll 8
      for (int i = 0; i < std::min(R, C); ++i) {
        Arithmetic<T>::multiply_add(sums[holds_rows ? i * C + j : j * C + i], held[i], other);
      }
    }
  };
  const auto full = [](const T* from) __attribute__((always_inline)) { return Arithmetic<T>::load(from); };
  constexpr int64_t STEPS = std::max<int64_t>(LINE / (STEP * SIZE), 1);
  int64_t k = 0;
  for (; k + STEPS * STEP <= product.depth; k += STEPS * STEP) {
    if (ahead) {
      const T* next = weight + fetched(k * SIZE, early, row, product.ldw * SIZE) / SIZE;
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) {
        __builtin_prefetch(next + j * ldw);
      }
    }
    unrolled<STEPS>([&](auto i) __attribute__((always_inline)) { step(full, k + i * STEP); });
  }
  for (; k + STEP <= product.depth; k += STEP) {
    step(full, k);
  }
  if (const int64_t count = product.depth - k; count > 0) {
    step([count](const T* from) { return load_rest(from, count); }, k);
  }
  float found[WIDTH];
  totals<COUNT>(sums).store(found);
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < C; ++j) {
      const int64_t at = r + i, column = c + j * apart;
      const float sum = found[i * C + j] + (product.first ? 0.f : product.sums[at * product.columns + column]);
      if (product.last) {
        const float bias = product.bias == nullptr ? 0.f : static_cast<float>(product.bias[column]);
        product.out[at * product.ldo + column] = static_cast<T>(sum + bias);
      } else {
        product.sums[at * product.columns + column] = sum;
      }
    }
  }
}

// Compute `count` columns from column `c` on for R rows from row `r` on.
template <int R, typename T>
void linear_rows(const Product<T>& product, int64_t r, int64_t c, int64_t count, bool ahead) {
  constexpr int C = std::max<int>(std::min<int>(WIDTH / R, 8), 1);
  const int64_t apart = count / C, end = c + count;
  for (int64_t i = 0; i < apart; ++i) {
    linear_block<R, C>(product, r, c + i, apart, ahead);
  }
  for (c += apart * C; c < end; ++c) {
    linear_block<R, 1>(product, r, c, 1, false);
  }
}

template <typename T, int... R>
void linear_some(const Product<T>& product, int64_t r, int64_t rows, int64_t c, int64_t count,
                 std::integer_sequence<int, R...>) {
  ((rows == R + 1 ? linear_rows<R + 1>(product, r, c, count, r == 0) : void()), ...);
}

// Compute a part of the depth. The first block of rows reads columns from memory, the others find them in the cache.
template <typename T>
void linear_part(const Product<T>& product) {
  const int64_t row = product.depth * static_cast<int64_t>(sizeof(T));
  const int64_t together = product.rows <= MAX_BLOCK_ROWS ? product.columns : std::max(KEPT / row, COLUMNS);
  for (int64_t c = 0; c < product.columns; c += together) {
    const int64_t count = std::min(together, product.columns - c);
    for (int64_t r = 0; r < product.rows; r += MAX_BLOCK_ROWS) {
      const int64_t rows = std::min<int64_t>(MAX_BLOCK_ROWS, product.rows - r);
      linear_some(product, r, rows, c, count, std::make_integer_sequence<int, MAX_BLOCK_ROWS>{});
    }
  }
}

// Compute a share, in parts of the depth where the rows of x would not stay in the first cache.
template <typename T>
void linear_share(const Product<T>& product) {
  constexpr int64_t STEP = Arithmetic<T>::STEP;
  const int64_t together = product.alike ? MAX_BLOCK_ROWS : std::min<int64_t>(product.rows, MAX_BLOCK_ROWS);
  const int64_t width = together * static_cast<int64_t>(sizeof(T));
  const int64_t parts = (product.depth * width + BYTES - 1) / BYTES;
  if (parts <= 1) {
    linear_part(product);
    return;
  }
  const int64_t each = ((product.depth + parts - 1) / parts + STEP - 1) / STEP * STEP;
  const std::unique_ptr<float[]> sums(new float[product.rows * product.columns]);
  for (int64_t k = 0; k < product.depth; k += each) {
    Product<T> part = product;
    part.x += k, part.weight += k, part.sums = sums.get();
    part.depth = std::min(each, product.depth - k);
    part.first = k == 0, part.last = k + each >= product.depth;
    linear_part(part);
  }
}

}  // namespace core_cpu
