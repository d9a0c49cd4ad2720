// Products of few rows with a weight of int8 or 4-bit codes, each of which is read from memory once.
//
// As in linear.h, a block is some rows of x times some rows of the weight, with its sums in registers.
#pragma once

#include "codes.h"

namespace core_cpu {

constexpr int64_t CODED_COLUMNS = 8;  // shares of threads are multiples of so many rows of the weight

// Writes a number at an index as a dtype; called, so that what is below is not compiled for each dtype.
using Store = void (*)(void* out, int64_t index, float number);

// One share of a product: out (rows, ldo), from column `first` on; bias (columns,) or null.
template <typename Way>
struct CodedProduct {
  const Arranged<Way>* x;
  CodedWeight weight;
  const float* bias;
  void* out;
  Store store;
  int64_t ldo, first, rows;
  // Minus the zero points (columns, groups) of the block at hand, times the scales where numbers take these first.
  float* offsets;
};

// Add the products of a unit: codes of C columns, stride bytes apart, and R rows of x.
template <int R, int C, bool GROUPS, bool ZEROS, typename Way>
__attribute__((always_inline)) inline void add_unit(Vec* sums, const typename Way::Number* x, const uint8_t* codes,
                                                    int64_t stride, const Vec* scale, const Vec* offset,
                                                    const float* lane_sums) {
  constexpr int64_t LANES = Way::UNIT / Way::PARTS;
  if constexpr (Way::SCALED_FIRST || !GROUPS) {
    unrolled<Way::PARTS>([&](auto p) __attribute__((always_inline)) {
      typename Way::Numbers numbers[C];
      unrolled<C>([&](auto j) __attribute__((always_inline)) {
        numbers[j] = Way::part(codes + j * stride, p);
        if constexpr (ZEROS) {
          numbers[j] = at::vec::fmadd(numbers[j], scale[j], offset[j]);
        } else if constexpr (GROUPS) {
          numbers[j] = numbers[j] * scale[j];
        }
      });
      unrolled<R>([&](auto i) __attribute__((always_inline)) {
        const auto values = Way::load(x + (p * R + i) * LANES);
        unrolled<C>([&](auto j) __attribute__((always_inline)) {
          Way::multiply_add(sums[i * C + j], values, numbers[j]);
        });
      });
    });
  } else {
    typename Way::Numbers numbers[C][Way::PARTS];
    unrolled<C>([&](auto j) __attribute__((always_inline)) {
      unrolled<Way::PARTS>([&](auto p) __attribute__((always_inline)) {
        numbers[j][p] = Way::part(codes + j * stride, p);
      });
    });
    unrolled<R>([&](auto i) __attribute__((always_inline)) {
      Vec found[C];
      unrolled<C>([&](auto j) __attribute__((always_inline)) {
        found[j] = ZEROS ? Vec::loadu(lane_sums + i * WIDTH) * offset[j] : Vec(0.f);
      });
      unrolled<Way::PARTS>([&](auto p) __attribute__((always_inline)) {
        const auto values = Way::load(x + (p * R + i) * LANES);
        unrolled<C>([&](auto j) __attribute__((always_inline)) {
          Way::multiply_add(found[j], values, numbers[j][p]);
        });
      });
      unrolled<C>([&](auto j) __attribute__((always_inline)) {
        sums[i * C + j] = at::vec::fmadd(found[j], scale[j], sums[i * C + j]);
      });
    });
  }
}

// Compute R rows of x times C columns, from row `r` and column `c` on, each column `apart` behind the one before. Fetches
// as much of the weight into the cache meanwhile, from DISTANCE on, where `ahead`.
template <int R, int C, bool GROUPS, bool ZEROS, typename Way>
void coded_block(const CodedProduct<Way>& product, int64_t r, int64_t c, int64_t apart, bool ahead) {
  constexpr int COUNT = power_of_2(R * C);
  static_assert(COUNT <= WIDTH);
  constexpr bool SUMS = ZEROS && !Way::SCALED_FIRST;
  const CodedWeight& weight = product.weight;
  const int64_t units = product.x->units, ldx = R * Way::UNIT, ldl = R * WIDTH;
  const int64_t full = weight.depth / Way::UNIT, row = full * Way::BYTES;
  const int64_t stride = apart * weight.stride, early = std::min<int64_t>(DISTANCE / C, row);
  const uint8_t* codes = weight.codes + c * weight.stride;
  const float* scales = weight.scale + c * weight.groups;
  const int64_t between_scales = apart * weight.groups;
  const auto* x = product.x->numbers.get() + r * units * Way::UNIT;
  const float* lane_sums = SUMS ? product.x->sums.get() + r * units * WIDTH : nullptr;
  Vec sums[COUNT];
  unrolled<COUNT>([&](auto i) { sums[i] = Vec(0.f); });
  Lanes<Way::UNIT> lanes(weight);
  const auto step = [&](const uint8_t* from, int64_t between, int64_t u) __attribute__((always_inline)) {
    Vec scale[C], offset[C];
    unrolled<C>([&](auto j) __attribute__((always_inline)) {
      if constexpr (GROUPS) {
        scale[j] = lanes.of(scales + j * between_scales);
      }
      if constexpr (ZEROS) {
        offset[j] = lanes.of(product.offsets + j * weight.groups);
      }
    });
    add_unit<R, C, GROUPS, ZEROS, Way>(sums, x + u * ldx, from, between, scale, offset,
                                       SUMS ? lane_sums + u * ldl : nullptr);
    lanes.next();
  };
  for (int64_t u = 0; u < full; ++u) {
    if (ahead) {
      const uint8_t* next = codes + fetched(u * Way::BYTES, early, row, weight.stride);
#pragma GCC unroll 8
      for (int j = 0; j < C; ++j) {
        for (int64_t at = 0; at < Way::BYTES; at += LINE) {
          __builtin_prefetch(next + j * stride + at);
        }
      }
    }
    step(codes + u * Way::BYTES, stride, u);
  }
  if (full < units) {
    uint8_t rest[C * Way::BYTES] = {};
    const int64_t bytes = (weight.depth - full * Way::UNIT) * Way::BYTES;
    for (int j = 0; j < C; ++j) {
      const uint8_t* from = codes + j * stride + row;
      std::memcpy(rest + j * Way::BYTES, from, (bytes + Way::UNIT - 1) / Way::UNIT);
    }
    step(rest, Way::BYTES, full);
  }
  float found[WIDTH];
  totals<COUNT>(sums).store(found);
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < C; ++j) {
      const float sum = found[i * C + j] * (GROUPS ? 1.f : scales[j * apart]);
      const float bias = product.bias == nullptr ? 0.f : product.bias[c + j * apart];
      product.store(product.out, (r + i) * product.ldo + product.first + c + j * apart, sum + bias);
    }
  }
}

// Prepare the offsets of a block of columns, from column `c` on, each `apart` behind the one before.
template <typename Way>
void coded_offsets(const CodedProduct<Way>& product, int64_t c, int64_t apart, int64_t columns) {
  const int64_t groups = product.weight.groups;
  float* offset = product.offsets;
  for (int64_t j = 0; j < columns; ++j, c += apart) {
    for (int64_t at = c * groups; at < (c + 1) * groups; ++at) {
      const float zero = -static_cast<float>(product.weight.zero[at]);
      *offset++ = Way::SCALED_FIRST ? zero * product.weight.scale[at] : zero;
    }
  }
}

// Compute `count` columns from column `c` on for R rows from row `r` on.
template <int R, bool GROUPS, bool ZEROS, typename Way>
void coded_rows(const CodedProduct<Way>& product, int64_t r, int64_t c, int64_t count, bool ahead) {
  constexpr int C = Way::template columns<R, GROUPS>();
  const int64_t apart = count / C, end = c + count;
  for (int64_t i = 0; i < apart; ++i) {
    if constexpr (ZEROS) {
      coded_offsets(product, c + i, apart, C);
    }
    coded_block<R, C, GROUPS, ZEROS>(product, r, c + i, apart, ahead);
  }
  for (c += apart * C; c < end; ++c) {
    if constexpr (ZEROS) {
      coded_offsets(product, c, 1, 1);
    }
    coded_block<R, 1, GROUPS, ZEROS>(product, r, c, 1, false);
  }
}

template <bool GROUPS, bool ZEROS, typename Way, int... R>
void coded_some(const CodedProduct<Way>& product, int64_t r, int64_t rows, int64_t c, int64_t count,
                std::integer_sequence<int, R...>) {
  ((rows == R + 1 ? coded_rows<R + 1, GROUPS, ZEROS>(product, r, c, count, r == 0) : void()), ...);
}

// Compute a share. The first block of rows reads columns from memory, the others find them in the cache.
template <bool GROUPS, bool ZEROS, typename Way>
void coded_share(const CodedProduct<Way>& product) {
  const int64_t all = product.weight.columns, kept = std::max(KEPT / product.weight.depth, CODED_COLUMNS);
  const int64_t together = product.rows <= MAX_CODED_ROWS ? all : kept;
  for (int64_t c = 0; c < all; c += together) {
    for (int64_t r = 0; r < product.rows; r += MAX_CODED_ROWS) {
      const int64_t rows = std::min<int64_t>(MAX_CODED_ROWS, product.rows - r);
      coded_some<GROUPS, ZEROS>(product, r, rows, c, std::min(together, all - c),
                                std::make_integer_sequence<int, MAX_CODED_ROWS>{});
    }
  }
}

}  // namespace core_cpu
