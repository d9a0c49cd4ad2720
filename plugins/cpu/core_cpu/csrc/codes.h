// Int8 and packed 4-bit codes of a weight as numbers in registers, and rows of x in the order in which they come.
//
// A unit is UNIT neighbours of a row. Each becomes a number in one of PARTS vectors, and lane l of all of these holds the
// l-th share of the unit, so that a group of neighbours has lanes of its own.
#pragma once

#include <c10/util/BFloat16.h>

#include <memory>

#include "vectors.h"

#if defined(CPU_CAPABILITY_AVX512)
#include <immintrin.h>
#endif

namespace core_cpu {

// Codes (columns, depth) with scales and zero points (columns, groups); zero null: none. Rows of codes: stride bytes.
struct CodedWeight {
  const uint8_t* codes;
  int64_t stride;
  const float* scale;
  const int8_t* zero;
  int64_t groups, columns, depth;
};

// Which scale each lane of a unit of UNIT codes has.
template <int64_t UNIT>
class Lanes {
 public:
  explicit Lanes(const CodedWeight& weight) : groups_(weight.groups), size_(weight.depth / weight.groups) {
    whole_ = groups_ == 1 || size_ % UNIT == 0;
    apart_ = groups_ == 1 ? std::numeric_limits<int64_t>::max() : size_ / UNIT;
    split_ = UNIT % size_ == 0;
    for (int64_t l = 0; l < WIDTH; ++l) {
      index_[l] = static_cast<int32_t>(l * (UNIT / WIDTH) / size_);
    }
  }

  // Go to the next unit.
  void next() {
    ++unit_;
    if (++count_ == apart_) {
      count_ = 0, ++group_;
    }
  }

  // Return the lanes' numbers of a row (groups).
  Vec of(const float* row) const {
    if (whole_) {
      return Vec(row[group_]);
    }
    const int64_t first = unit_ * UNIT / size_;
#if defined(CPU_CAPABILITY_AVX512)
    if (split_) {
      const int64_t left = std::min<int64_t>(groups_ - first, WIDTH);
      const __m512 found = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), row + first);
      return _mm512_permutexvar_ps(_mm512_loadu_si512(index_), found);
    }
#endif
    float found[WIDTH];
    for (int64_t l = 0; l < WIDTH; ++l) {
      const int64_t at = split_ ? first + index_[l] : (unit_ * UNIT + l * (UNIT / WIDTH)) / size_;
      found[l] = row[std::min(at, groups_ - 1)];
    }
    return Vec::loadu(found);
  }

 private:
  int64_t groups_, size_, apart_, unit_ = 0, count_ = 0, group_ = 0;
  bool whole_, split_;
  int32_t index_[WIDTH];
};

// Codes as vectors of fp32, which take their scales before they are multiplied.
template <int BITS>
struct Wide {
  using Number = float;
  using Numbers = Vec;
  static constexpr bool SCALED_FIRST = true;
  static constexpr int PARTS = BITS == 8 ? 1 : 8;
  static constexpr int64_t UNIT = PARTS * WIDTH, BYTES = UNIT * BITS / 8;

  // Columns of a block of R rows: its sums and numbers have to stay in registers.
  template <int R, bool GROUPS>
  static constexpr int columns() {
    return std::max<int>(std::min<int>(WIDTH / R, GROUPS ? 4 : 8), 1);
  }

  // Where in x the number stands that lane l of part p multiplies.
  static int64_t place(int p, int64_t l) {
    return l * PARTS + p;
  }

  static Numbers load(const Number* from) {
    return Vec::loadu(from);
  }

  static void multiply_add(Vec& sum, const Numbers& a, const Numbers& b) {
    sum = at::vec::fmadd(a, b, sum);
  }

  static Numbers part(const uint8_t* from, int p) {
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (BITS == 8) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    } else {  // the lowest four bits of a lane choose from the table
      const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
      return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(from), 4 * p), table);
    }
#elif defined(CPU_CAPABILITY_AVX2)
    if constexpr (BITS == 8) {
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    } else {  // the code to the top of its lane, then down with its sign; stored off by 8, as the sign bit turned
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      const __m256i top = _mm256_slli_epi32(words, 28 - 4 * p);
      const __m256i turned = _mm256_xor_si256(top, _mm256_set1_epi32(static_cast<int>(1u << 31)));
      return _mm256_cvtepi32_ps(_mm256_srai_epi32(turned, 28));
    }
#else
    float found[WIDTH];
    for (int64_t l = 0; l < WIDTH; ++l) {
      if constexpr (BITS == 8) {
        found[l] = static_cast<int8_t>(from[l]);
      } else {
        found[l] = ((from[4 * l + p / 2] >> (4 * (p % 2))) & 15) - 8;
      }
    }
    return Vec::loadu(found);
#endif
  }
};

#if defined(CORE_CPU_BF16_PAIRS)
// Codes as pairs of bf16, which hold them exactly; their sums take the scales, unit by unit.
template <int BITS>
struct Pairs {
  using Number = c10::BFloat16;
  using Numbers = __m512bh;
  static constexpr bool SCALED_FIRST = false;
  static constexpr int PARTS = 4;
  static constexpr int64_t UNIT = 128, BYTES = UNIT * BITS / 8;

  template <int R, bool GROUPS>
  static constexpr int columns() {
    return GROUPS ? (R <= 2 ? 4 : R <= 4 ? 3 : 2) : std::min<int>(WIDTH / R, 8);
  }

  // Lane l of a vector of 32 numbers.
  static int64_t place(int p, int64_t l) {
    return BITS == 8 ? 32 * p + l : l * PARTS + p;
  }

  static Numbers load(const Number* from) {
    return (__m512bh)_mm512_loadu_si512(from);
  }

  static void multiply_add(Vec& sum, const Numbers& a, const Numbers& b) {
    sum = _mm512_dpbf16_ps(sum, a, b);
  }

  static Numbers part(const uint8_t* from, int p) {
    if constexpr (BITS == 8) {
      const auto half = [&](int64_t at) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 32 * p + at));
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
      };
      return _mm512_cvtne2ps_pbh(half(16), half(0));
    } else {  // -8 to 7 as bf16, twice: the lowest five bits of a lane choose, of which four are the code's
      alignas(64) static constexpr uint16_t table[32] = {
          0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
          0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
          0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
      const __m512i lanes = _mm512_srli_epi16(_mm512_loadu_si512(from), 4 * p);
      return (__m512bh)_mm512_permutexvar_epi16(lanes, _mm512_load_si512(table));
    }
  }
};
#endif

// Rows that a block of a product has at most.
constexpr int MAX_CODED_ROWS = 8;

// The rows of x as blocks of them read these: (unit, part, row of the block, lane), so that one address leads through a
// block. And the sums over each lane (unit, row, lane), where zero points need these.
template <typename Way>
struct Arranged {
  using Number = typename Way::Number;
  static constexpr int64_t LANES = Way::UNIT / Way::PARTS;

  template <typename T>
  Arranged(const T* x, int64_t ldx, int64_t rows, int64_t depth, bool sum)
      : units((depth + Way::UNIT - 1) / Way::UNIT), numbers(new Number[rows * units * Way::UNIT]) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t block = r / MAX_CODED_ROWS * MAX_CODED_ROWS;
      const int64_t together = std::min<int64_t>(rows - block, MAX_CODED_ROWS);
      arrange(x + r * ldx, numbers.get() + block * units * Way::UNIT + (r - block) * LANES, together, depth);
    }
    if (!Way::SCALED_FIRST && sum) {
      sums.reset(new float[rows * units * WIDTH]);
      add_up(rows);
    }
  }

  template <typename T>
  static void arrange(const T* x, Number* to, int64_t together, int64_t depth) {
    T rest[Way::UNIT] = {};
    for (int64_t k = 0; k < depth; k += Way::UNIT) {
      const T* from = x + k;
      if (depth - k < Way::UNIT) {
        std::memcpy(rest, from, (depth - k) * sizeof(T));
        from = rest;
      }
      for (int p = 0; p < Way::PARTS; ++p, to += together * LANES) {
        for (int64_t l = 0; l < LANES; ++l) {
          to[l] = static_cast<Number>(from[Way::place(p, l)]);
        }
      }
    }
  }

  void add_up(int64_t rows) {
    Number ones[LANES];
    std::fill(ones, ones + LANES, Number(1.f));
    for (int64_t block = 0; block < rows; block += MAX_CODED_ROWS) {
      const int64_t together = std::min<int64_t>(rows - block, MAX_CODED_ROWS);
      const Number* from = numbers.get() + block * units * Way::UNIT;
      float* to = sums.get() + block * units * WIDTH;
      for (int64_t u = 0; u < units; ++u, from += together * Way::UNIT) {
        for (int64_t r = 0; r < together; ++r, to += WIDTH) {
          Vec sum(0.f);
          for (int p = 0; p < Way::PARTS; ++p) {
            Way::multiply_add(sum, Way::load(ones), Way::load(from + (p * together + r) * LANES));
          }
          sum.store(to);
        }
      }
    }
  }

  int64_t units;
  std::unique_ptr<Number[]> numbers;
  std::unique_ptr<float[]> sums;
};

}  // namespace core_cpu
