// Products of few rows with a weight as `torch.addmm` takes it, (depth, columns): each number is read from memory once.
//
// A row of such a weight adds to all columns, so sums are kept in the cache, and some rows add to a vector of sums while
// it is in a register. These rows lie far apart: each is a stream of its own (see vectors.h).
#pragma once

#include <memory>

#include "product.h"
#include "vectors.h"

#if defined(CORE_CPU_BF16_PAIRS)
#include <immintrin.h>
#endif

namespace core_cpu {

constexpr int64_t STREAMS = 8;          // rows of the weight that add to a vector of sums in a register
constexpr int64_t SUM_BYTES = 1 << 15;  // of sums: they stay in the first cache or near it while the weight passes by
constexpr int64_t SUM_ROWS = 8;         // rows of x whose sums stay in registers

// How ROWS rows of a weight, times a factor each, add to STEP sums, which are VECTORS vectors.
template <typename T>
struct Adding {
  using Factors = float;
  struct Numbers {
    Vec vectors[1];
  };
  static constexpr int ROWS = 1, VECTORS = 1;
  static constexpr int64_t STEP = WIDTH;

  static Factors factors(const T& first, const T&) {
    return static_cast<float>(first);
  }

  // Load STEP numbers, or `count` and zeros where these are fewer; of the row `second` numbers behind too, zeros if 0.
  static Numbers load(const T* from, int64_t, int64_t count) {
    if (count >= STEP) {
      return {wide(from)};
    }
    T rest[STEP] = {};
    std::memcpy(rest, from, count * sizeof(T));
    return {wide(rest)};
  }

  static void add(Vec& sums, Factors factors, const Vec& numbers) {
    sums = at::vec::fmadd(Vec(factors), numbers, sums);
  }

  static void put_in_order(float*) {}
};

#if defined(CORE_CPU_BF16_PAIRS)
// By the instruction for pairs of bf16: numbers of two rows take turns, which unpacking does within 128 bits.
template <>
struct Adding<c10::BFloat16> {
  using Factors = uint32_t;
  struct Numbers {
    __m512i vectors[2];
  };
  static constexpr int ROWS = 2, VECTORS = 2;
  static constexpr int64_t STEP = 32;

  static Factors factors(const c10::BFloat16& first, const c10::BFloat16& second) {
    return first.x | static_cast<uint32_t>(second.x) << 16;
  }

  static Numbers load(const c10::BFloat16* from, int64_t second, int64_t count) {
    const __mmask32 mask = count >= STEP ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
    const __m512i a = _mm512_maskz_loadu_epi16(mask, from);
    const __m512i b = _mm512_maskz_loadu_epi16(second == 0 ? 0 : mask, from + second);
    return {_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)};
  }

  static void add(Vec& sums, Factors factors, const __m512i& numbers) {
    sums = _mm512_dpbf16_ps(sums, (__m512bh)numbers, (__m512bh)_mm512_set1_epi32(static_cast<int>(factors)));
  }

  // Let each 128 bits of the first vector come before those of the second.
  static void put_in_order(float* sums) {
    const __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + 16);
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    _mm512_storeu_ps(sums, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(sums + 16, _mm512_permutex2var_ps(low, second, high));
  }
};
#endif

// Add `count` rows of the weight, `apart` rows from one another, to the sums of R rows of x.
//
// weight: its first row. x: R factors of each row, or of each pair. early: bytes by which the weight is fetched ahead of
// its use, or 0.
template <int R, typename T>
void add_rows(const Operands<T>& share, const T* weight, int64_t apart, int64_t count,
              const typename Adding<T>::Factors* x, float* sums, int64_t lds, int64_t early) {
  using Add = Adding<T>;
  constexpr int64_t SIZE = static_cast<int64_t>(sizeof(T));
  const auto add = [&]<int N>(std::integral_constant<int, N>, int64_t c) __attribute__((always_inline)) {
    constexpr int COUNT = N * Add::VECTORS;
    Vec found[R][COUNT];  // added to the sums at the end: a sum of all rows in one order would round as often
    unrolled<R * COUNT>([&](auto i) __attribute__((always_inline)) { found[i / COUNT][i % COUNT] = Vec(0.f); });
    const T* row = weight + c;
    const int64_t ahead = (fetched(c * SIZE, early, share.columns * SIZE, share.ldw * SIZE) - c * SIZE) / SIZE;
    const auto* factors = x;
    for (int64_t s = 0; s < count; s += Add::ROWS, row += Add::ROWS * apart * share.ldw, factors += R) {
      // The last row of an odd number of them has no second.
      const int64_t second = Add::ROWS == 2 && s + 1 < count ? apart * share.ldw : 0;
      for (int64_t j = 0; early != 0 && j < N * Add::STEP * SIZE; j += LINE) {
        __builtin_prefetch(row + ahead + j / SIZE);
        if (Add::ROWS == 2) {
          __builtin_prefetch(row + second + ahead + j / SIZE);
        }
      }
      unrolled<N>([&](auto step) __attribute__((always_inline)) {
        const int64_t at = step * Add::STEP;
        const auto numbers = Add::load(row + at, second, share.columns - c - at);
        unrolled<R * Add::VECTORS>([&](auto i) __attribute__((always_inline)) {
          constexpr int r = i / Add::VECTORS, v = i % Add::VECTORS;
          Add::add(found[r][step * Add::VECTORS + v], factors[r], numbers.vectors[v]);
        });
      });
    }
    unrolled<R * COUNT>([&](auto i) __attribute__((always_inline)) {
      float* sum = sums + i / COUNT * lds + c + i % COUNT * WIDTH;
      (Vec::loadu(sum) + found[i / COUNT][i % COUNT]).store(sum);
    });
  };
  constexpr int WHOLE = std::max<int>(8 / R / Add::VECTORS, 1);  // steps, so that sums do not wait for one another
  int64_t c = 0;
  for (; c + WHOLE * Add::STEP <= share.columns; c += WHOLE * Add::STEP) {
    add(std::integral_constant<int, WHOLE>{}, c);
  }
  for (; c < share.columns; c += Add::STEP) {
    add(std::integral_constant<int, 1>{}, c);
  }
}

// Write the factors of the rows of x: R for each row of the weight, or pair of these, in the order of use.
template <int R, typename T>
void put_factors(const Operands<T>& share, int64_t apart, typename Adding<T>::Factors* to) {
  using Add = Adding<T>;
  const int64_t groups = STREAMS / Add::ROWS, rest = share.depth % STREAMS;
  for (int64_t r = 0; r < share.rows; ++r) {
    const T* x = share.x + r * share.ldx;
    for (int64_t group = 0; group < groups; ++group) {
      const T* from = x + group * Add::ROWS * apart;
      for (int64_t i = 0; i < apart; ++i) {
        to[(i * groups + group) * R + r] = Add::factors(from[i], from[i + (Add::ROWS - 1) * apart]);
      }
    }
    const T* from = x + STREAMS * apart;
    for (int64_t k = 0; k < rest; k += Add::ROWS) {
      to[(apart * groups + k / Add::ROWS) * R + r] = Add::factors(from[k], k + 1 < rest ? from[k + 1] : T(0.f));
    }
  }
}

// Compute R rows of x, of which those from share.rows on are zeros.
template <int R, typename T>
void transposed_rows(const Operands<T>& share) {
  using Add = Adding<T>;
  const int64_t lds = (share.columns + Add::STEP - 1) / Add::STEP * Add::STEP, groups = STREAMS / Add::ROWS;
  const int64_t apart = share.depth / STREAMS, rest = share.depth % STREAMS;
  const std::unique_ptr<float[]> sums(new float[R * lds]());
  const std::unique_ptr<typename Add::Factors[]> factors(new typename Add::Factors[R * (apart + 1) * groups]());
  put_factors<R>(share, apart, factors.get());
  const auto* x = factors.get();
  for (int64_t i = 0; i < apart; ++i, x += groups * R) {
    add_rows<R>(share, share.weight + i * share.ldw, apart, STREAMS, x, sums.get(), lds, DISTANCE / STREAMS);
  }
  add_rows<R>(share, share.weight + STREAMS * apart * share.ldw, 1, rest, x, sums.get(), lds, 0);
  for (int64_t r = 0; r < share.rows; ++r) {
    float* found = sums.get() + r * lds;
    for (int64_t c = 0; c < share.columns; c += Add::STEP) {
      Add::put_in_order(found + c);
    }
    for (int64_t c = 0; share.bias != nullptr && c < share.columns; ++c) {
      found[c] += static_cast<float>(share.bias[c]);
    }
    at::vec::convert(found, share.out + r * share.ldo, share.columns);
  }
}

// Compute a share, some columns at a time; the weight is (depth, columns).
template <typename T>
void transposed_share(const Operands<T>& share) {
  for (int64_t r = 0; r < share.rows; r += SUM_ROWS) {
    const int64_t rows = std::min(share.rows - r, SUM_ROWS);
    const auto compute = rows > 4   ? transposed_rows<8, T>
                         : rows > 2 ? transposed_rows<4, T>
                         : rows > 1 ? transposed_rows<2, T>
                                    : transposed_rows<1, T>;
    const int64_t together = SUM_BYTES / static_cast<int64_t>(sizeof(float)) / rows / 64 * 64;
    for (int64_t c = 0; c < share.columns; c += together) {
      Operands<T> part = share;
      part.rows = rows, part.columns = std::min(share.columns - c, together);
      part.x += r * share.ldx, part.weight += c, part.out += r * share.ldo + c;
      part.bias = share.bias == nullptr ? nullptr : share.bias + c;
      compute(part);
    }
  }
}

}  // namespace core_cpu
