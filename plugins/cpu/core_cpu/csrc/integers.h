// Products of int8 codes with int8 codes, summed as int32: exact, whatever the order.
#pragma once

#include <memory>
#include <vector>

#include "vectors.h"

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#include <immintrin.h>
#endif

namespace core_cpu {

constexpr int MAX_INTEGER_ROWS = 8;
constexpr int64_t INTEGER_COLUMNS = 8;  // shares of threads are multiples of so many rows of the weight

// UNIT codes at a time: `weight` reads codes of the weight, `multiply_add` adds their products with numbers of x to the
// lanes of a sum. OFFSET is what a code of the weight is too large by.
#if defined(CORE_CPU_VNNI)
struct Integers {
  using Number = int8_t;
  using Numbers = __m512i;
  // As the instruction has it: of another type, compilers copy each sum before and after.
  using Sum = int32_t __attribute__((vector_size(64)));
  static constexpr int64_t UNIT = 64;
  static constexpr int32_t OFFSET = 128;  // the instruction takes one side as unsigned

  static Numbers load(const Number* from) {
    return _mm512_loadu_si512(from);
  }

  static Numbers weight(const int8_t* from) {
    return _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128));
  }

  static void multiply_add(Sum& sum, const Numbers& x, const Numbers& weight) {
    sum = (Sum)_mm512_dpbusd_epi32((__m512i)sum, weight, x);
  }

  static Ints total(const Sum& sum) {
    return (__m512i)sum;
  }
};
#elif defined(CPU_CAPABILITY_AVX512)
struct Integers {
  using Number = int16_t;
  using Numbers = __m512i;
  using Sum = Ints;
  static constexpr int64_t UNIT = 32;
  static constexpr int32_t OFFSET = 0;

  static Numbers load(const Number* from) {
    return _mm512_loadu_si512(from);
  }

  static Numbers weight(const int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  static Ints total(const Sum& sum) {
    return sum;
  }

  static void multiply_add(Sum& sum, const Numbers& x, const Numbers& weight) {
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(x, weight));
  }
};
#elif defined(CPU_CAPABILITY_AVX2)
// Not by the instruction for pairs of bytes, whose sums of 16 bits are cut off.
struct Integers {
  using Number = int16_t;
  using Numbers = __m256i;
  using Sum = Ints;
  static constexpr int64_t UNIT = 16;
  static constexpr int32_t OFFSET = 0;

  static Numbers load(const Number* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }

  static Numbers weight(const int8_t* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }

  static Ints total(const Sum& sum) {
    return sum;
  }

  static void multiply_add(Sum& sum, const Numbers& x, const Numbers& weight) {
    __m256i added = _mm256_add_epi32(sum, _mm256_madd_epi16(x, weight));
    // Compilers would add up products of several units first, and keep sums in memory for want of registers.
    asm("" : "+x"(added));
    sum = added;
  }
};
#else
struct Integers {
  using Number = int32_t;
  using Numbers = Ints;
  using Sum = Ints;
  static constexpr int64_t UNIT = WIDTH;
  static constexpr int32_t OFFSET = 0;

  static Numbers load(const Number* from) {
    return Ints::loadu(from);
  }

  static Numbers weight(const int8_t* from) {
    Number wide[WIDTH];
    std::copy(from, from + WIDTH, wide);
    return Ints::loadu(wide);
  }

  static Ints total(const Sum& sum) {
    return sum;
  }

  static void multiply_add(Sum& sum, const Numbers& x, const Numbers& weight) {
    sum = sum + x * weight;
  }
};
#endif

// The rows of x as blocks of them read these, (unit, row of the block, UNIT), and each row's sum of codes.
struct IntegerRows {
  using Number = Integers::Number;

  IntegerRows(const int8_t* x, int64_t ldx, int64_t rows, int64_t depth)
      : units((depth + Integers::UNIT - 1) / Integers::UNIT),
        numbers(new Number[rows * units * Integers::UNIT]()),
        sums(rows) {
    for (int64_t r = 0; r < rows; ++r, x += ldx) {
      const int64_t block = r / MAX_INTEGER_ROWS * MAX_INTEGER_ROWS;
      const int64_t together = std::min<int64_t>(rows - block, MAX_INTEGER_ROWS) * Integers::UNIT;
      Number* to = numbers.get() + block * units * Integers::UNIT + (r - block) * Integers::UNIT;
      for (int64_t k = 0; k < depth; k += Integers::UNIT, to += together) {
        std::copy(x + k, x + std::min(k + Integers::UNIT, depth), to);
      }
      int32_t sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        sum += x[k];
      }
      sums[r] = sum;
    }
  }

  int64_t units;
  std::unique_ptr<Number[]> numbers;
  std::vector<int32_t> sums;
};

// One share of a product: weight (columns, depth), out (rows, columns), ldo apart; column_sums (columns,) or null.
struct IntegerProduct {
  const IntegerRows* x;
  const int8_t* weight;
  int64_t ldw, columns, depth;
  int32_t* out;
  int64_t ldo, rows;
  // Sums of the codes of each row of the weight.
  int32_t* column_sums;
};

// Compute R rows of x times C columns, from row `r` and column `c` on, each column `apart` behind the one before. Fetches
// as much of the weight into the cache meanwhile, from DISTANCE on, where `ahead`.
template <int R, int C, bool SUMS>
void integer_block(const IntegerProduct& product, int64_t r, int64_t c, int64_t apart, bool ahead) {
  constexpr int COUNT = power_of_2(R * C), MORE = power_of_2(C);
  static_assert(COUNT <= WIDTH);
  constexpr int64_t UNIT = Integers::UNIT;
  const int64_t units = product.x->units, full = product.depth / UNIT, ldw = apart * product.ldw;
  const int64_t early = std::min<int64_t>(DISTANCE / C, product.depth);
  const int8_t* weight = product.weight + c * product.ldw;
  const Integers::Number* x = product.x->numbers.get() + r * units * UNIT;
  Integers::Number one[UNIT];
  std::fill(one, one + UNIT, Integers::Number(1));
  const auto ones = Integers::load(one);
  Integers::Sum sums[COUNT] = {}, more[MORE] = {};
  // Of rows and columns, the fewer are held in registers, and each of the others is used up as it is loaded.
  constexpr bool HOLDS_ROWS = R <= C;
  const auto step = [&](const int8_t* from, int64_t stride, int64_t u) __attribute__((always_inline)) {
    const auto row = [&](int i) __attribute__((always_inline)) { return Integers::load(x + (u * R + i) * UNIT); };
    const auto column = [&](auto j) __attribute__((always_inline)) {
      const auto codes = Integers::weight(from + j * stride);
      if constexpr (SUMS) {
        Integers::multiply_add(more[j], ones, codes);
      }
      return codes;
    };
    if constexpr (HOLDS_ROWS) {
      Integers::Numbers rows[R];
      unrolled<R>([&](auto i) __attribute__((always_inline)) { rows[i] = row(i); });
      unrolled<C>([&](auto j) __attribute__((always_inline)) {
        const auto codes = column(j);
        unrolled<R>([&](auto i) __attribute__((always_inline)) {
          Integers::multiply_add(sums[i * C + j], rows[i], codes);
        });
      });
    } else {
      Integers::Numbers columns[C];
      unrolled<C>([&](auto j) __attribute__((always_inline)) { columns[j] = column(j); });
      unrolled<R>([&](auto i) __attribute__((always_inline)) {
        const auto numbers = row(i);
        unrolled<C>([&](auto j) __attribute__((always_inline)) {
          Integers::multiply_add(sums[i * C + j], numbers, columns[j]);
        });
      });
    }
  };
  constexpr int64_t UNITS = std::max<int64_t>(LINE / UNIT, 1);
  int64_t u = 0;
  for (; u + UNITS <= full; u += UNITS) {
    if (ahead) {
      const int8_t* next = weight + fetched(u * UNIT, early, product.depth, product.ldw);
      unrolled<C>([&](auto j) { __builtin_prefetch(next + j * ldw); });
    }
    unrolled<UNITS>([&](auto i) __attribute__((always_inline)) { step(weight + (u + i) * UNIT, ldw, u + i); });
  }
  for (; u < full; ++u) {
    step(weight + u * UNIT, ldw, u);
  }
  if (full < units) {
    int8_t rest[C * UNIT] = {};
    for (int j = 0; j < C; ++j) {
      std::memcpy(rest + j * UNIT, weight + j * ldw + full * UNIT, product.depth - full * UNIT);
    }
    step(rest, UNIT, full);
  }
  int32_t found[WIDTH];
  Ints parts[COUNT];
  unrolled<COUNT>([&](auto i) { parts[i] = Integers::total(sums[i]); });
  totals<COUNT>(parts).store(found);
  for (int i = 0; i < R; ++i) {
    // Sums of shifted codes may pass 32 bits, the differences do not: unsigned numbers wrap.
    const uint32_t shifted = static_cast<uint32_t>(Integers::OFFSET) * static_cast<uint32_t>(product.x->sums[r + i]);
    for (int j = 0; j < C; ++j) {
      const uint32_t sum = static_cast<uint32_t>(found[i * C + j]) - shifted;
      product.out[(r + i) * product.ldo + c + j * apart] = static_cast<int32_t>(sum);
    }
  }
  if (SUMS && r == 0) {
    unrolled<MORE>([&](auto j) { parts[j] = Integers::total(more[j]); });
    totals<MORE>(parts).store(found);
    for (int j = 0; j < C; ++j) {
      product.column_sums[c + j * apart] = found[j] - Integers::OFFSET * static_cast<int32_t>(units * UNIT);
    }
  }
}

// Compute `count` columns from column `c` on for R rows from row `r` on.
template <int R, bool SUMS>
void integer_rows(const IntegerProduct& product, int64_t r, int64_t c, int64_t count, bool ahead) {
  constexpr int C = std::max<int>(std::min<int>(WIDTH / R, 8), 1);
  const int64_t apart = count / C, end = c + count;
  for (int64_t i = 0; i < apart; ++i) {
    integer_block<R, C, SUMS>(product, r, c + i, apart, ahead);
  }
  for (c += apart * C; c < end; ++c) {
    integer_block<R, 1, SUMS>(product, r, c, 1, false);
  }
}

template <bool SUMS, int... R>
void integer_some(const IntegerProduct& product, int64_t r, int64_t rows, int64_t c, int64_t count,
                  std::integer_sequence<int, R...>) {
  ((rows == R + 1 ? integer_rows<R + 1, SUMS>(product, r, c, count, r == 0) : void()), ...);
}

// Compute a share. The first block of rows reads columns from memory, the others find them in the cache.
template <bool SUMS>
void integer_share(const IntegerProduct& product) {
  const int64_t kept = std::max(KEPT / product.depth, INTEGER_COLUMNS);
  const int64_t together = product.rows <= MAX_INTEGER_ROWS ? product.columns : kept;
  for (int64_t c = 0; c < product.columns; c += together) {
    for (int64_t r = 0; r < product.rows; r += MAX_INTEGER_ROWS) {
      const int64_t rows = std::min<int64_t>(MAX_INTEGER_ROWS, product.rows - r);
      integer_some<SUMS>(product, r, rows, c, std::min(together, product.columns - c),
                         std::make_integer_sequence<int, MAX_INTEGER_ROWS>{});
    }
  }
}

}  // namespace core_cpu
