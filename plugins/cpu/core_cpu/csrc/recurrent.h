// One token of one head of a recurrent layer, on a state of fp32; and some channels of a short convolution.
#pragma once

#include <vector>

#include "vectors.h"

namespace core_cpu {

// Channels of a convolution that are computed in one go.
constexpr int64_t CHANNELS = 512;
// Vectors of a row of a state that are summed in registers.
constexpr int COLUMNS = 8;
// Rows of a state that are summed on their own first: one sum after the other rounds as often as there are rows.
constexpr int64_t SUMMED = 16;

// Write `size` numbers of fp32 as T.
template <typename T>
void narrow(const float* from, int64_t size, T* to) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, from, size * sizeof(float));
  } else {
    at::vec::convert(from, to, size);
  }
}

template <typename T, typename W>
struct Convolution {
  const T* x;
  const T* state;  // (count, length)
  T* kept;         // of another slot, or the same
  const W* weight;  // (count, taps)
  const W* bias;    // or null
  T* out;
  int64_t count;

  void run(int64_t length, int64_t taps, bool silu) {
    float sums[CHANNELS];
    if (length == 4 && taps == 4) {
      shift<4, 4>(sums, 4, 4);
    } else if (length == 3 && taps == 3) {
      shift<3, 3>(sums, 3, 3);
    } else {
      shift<0, 0>(sums, length, taps);
    }
    finish(sums, silu);
  }

 private:
  // LENGTH, TAPS: known when compiled, or 0.
  template <int LENGTH, int TAPS>
  void shift(float* sums, int64_t given_length, int64_t given_taps) {
    const int64_t length = LENGTH ? LENGTH : given_length, taps = TAPS ? TAPS : given_taps;
    for (int64_t c = 0; c < count; ++c) {
      const T* old = state + c * length;
      const W* factors = weight + c * taps;
      T* to = kept + c * length;
      float sum = static_cast<float>(x[c]) * static_cast<float>(factors[taps - 1]);
      for (int64_t j = 0; j < taps - 1; ++j) {
        sum += static_cast<float>(old[length - taps + 1 + j]) * static_cast<float>(factors[j]);
      }
      for (int64_t j = 0; j < length - 1; ++j) {
        to[j] = old[j + 1];
      }
      to[length - 1] = x[c];
      sums[c] = sum;
    }
  }

  // Add the bias, round as W, apply the activation, round as W and as T.
  void finish(float* sums, bool silu) {
    for (int64_t c = 0; c < count; ++c) {
      const float sum = bias == nullptr ? sums[c] : sums[c] + static_cast<float>(bias[c]);
      sums[c] = static_cast<float>(static_cast<W>(sum));
    }
    for (int64_t c = 0; silu && c < count; c += WIDTH) {
      const int64_t left = std::min(WIDTH, count - c);
      const Vec sum = Vec::loadu(sums + c, left);
      (sum / (Vec(1.f) + sum.neg().exp())).store(sums + c, left);
    }
    for (int64_t c = 0; silu && !std::is_same_v<W, float> && c < count; ++c) {
      sums[c] = static_cast<float>(static_cast<W>(sums[c]));
    }
    narrow(sums, count, out);
  }
};

// A head of the gated delta rule; keys of `depth` features, values of `width`.
struct DeltaRule {
  DeltaRule(int64_t depth, int64_t width)
      : depth(depth), width(width), memory(3 * padded(depth) + 3 * padded(width)), query(memory.data()),
        key(query + padded(depth)), fades(key + padded(depth)), value(fades + padded(depth)),
        missing(value + padded(width)), result(missing + padded(width)) {}

  template <typename T>
  void take(const T* q, const T* k, const T* v, float scale, float eps) {
    widen(q, depth, query, 1.f);
    widen(k, depth, key, 1.f);
    widen(v, width, value, 1.f);
    const float norm = eps > 0.f ? root(query, eps) : 1.f;
    scale_row(query, padded(depth), norm * scale);
    if (eps > 0.f) {
      scale_row(key, padded(depth), root(key, eps));
    }
  }

  void fade(float by) {
    std::fill_n(fades, depth, std::exp(by));
  }

  void fade(const float* by) {
    for (int64_t d = 0; d < depth; ++d) {
      fades[d] = std::exp(by[d]);
    }
  }

  // state, kept (depth, width): the same memory, or another.
  template <typename T>
  void run(const float* state, float* kept, float beta, T* out) {
    int64_t j = 0;
    for (; width - j >= COLUMNS * WIDTH; j += COLUMNS * WIDTH) {
      columns<COLUMNS>(state + j, kept + j, beta, j, WIDTH);
    }
    for (; width - j >= WIDTH; j += WIDTH) {
      columns<1>(state + j, kept + j, beta, j, WIDTH);
    }
    if (j < width) {
      columns<1>(state + j, kept + j, beta, j, width - j);
    }
    narrow(result, width, out);
  }

 private:
  float root(const float* row, float eps) const {
    Vec sums(0.f);
    for (int64_t d = 0; d < depth; d += WIDTH) {
      const Vec part = Vec::loadu(row + d);
      sums = at::vec::fmadd(part, part, sums);
    }
    return 1.f / std::sqrt(total(sums) + eps);
  }

  // Add what `add` adds for each feature of the key to N sums, SUMMED features at a time.
  template <int N, typename Add>
  void in_parts(Vec* sums, const Add& add) const {
    for (int64_t begin = 0; begin < depth; begin += SUMMED) {
      Vec part[N];
      unrolled<N>([&](auto n) { part[n] = Vec(0.f); });
      for (int64_t d = begin; d < std::min(begin + SUMMED, depth); ++d) {
        add(d, part);
      }
      unrolled<N>([&](auto n) { sums[n] = sums[n] + part[n]; });
    }
  }

  // N vectors of each row, the last of which has `count` numbers: what the faded state tells of the key, then the new
  // state, and what that tells of the query.
  template <int N>
  void columns(const float* state, float* kept, float beta, int64_t at, int64_t count) {
    const bool whole = count == WIDTH;
    Vec sums[N];
    unrolled<N>([&](auto n) { sums[n] = Vec(0.f); });
    in_parts<N>(sums, [&](int64_t d, Vec* part) {
      const Vec factor(key[d] * fades[d]);
      unrolled<N>([&](auto n) {
        const float* from = state + d * width + n * WIDTH;
        part[n] = at::vec::fmadd(factor, whole ? Vec::loadu(from) : Vec::loadu(from, count), part[n]);
      });
    });
    unrolled<N>([&](auto n) {
      ((Vec::loadu(value + at + n * WIDTH) - sums[n]) * Vec(beta)).store(missing + at + n * WIDTH);
      sums[n] = Vec(0.f);
    });
    in_parts<N>(sums, [&](int64_t d, Vec* part) {
      const Vec faded(fades[d]), k(key[d]), q(query[d]);
      unrolled<N>([&](auto n) {
        const int64_t place = d * width + n * WIDTH;
        const Vec old = whole ? Vec::loadu(state + place) : Vec::loadu(state + place, count);
        const Vec next = at::vec::fmadd(k, Vec::loadu(missing + at + n * WIDTH), old * faded);
        part[n] = at::vec::fmadd(q, next, part[n]);
        whole ? next.store(kept + place) : next.store(kept + place, count);
      });
    });
    unrolled<N>([&](auto n) { sums[n].store(result + at + n * WIDTH); });
  }

  int64_t depth, width;
  std::vector<float> memory;
  float *query, *key, *fades, *value, *missing, *result;
};

// A head of a selective state space, or some of its features; `size` numbers of state for each.
struct StateSpace {
  StateSpace(int64_t features, int64_t size)
      : features(features), size(size), memory(2 * padded(features) + 2 * padded(size)), x(memory.data()),
        result(x + padded(features)), keys(result + padded(features)), queries(keys + padded(size)) {}

  template <typename T>
  void take(const T* in, const T* B, const T* C) {
    widen(in, features, x, 1.f);
    widen(B, size, keys, 1.f);
    widen(C, size, queries, 1.f);
  }

  // state, kept (features, size): the same memory, or another.
  template <typename T>
  void run(const float* state, float* kept, float step, float fade, float skip, T* out) {
    const Vec faded(fade);
    each(state, kept, [&](int64_t) { return step; }, [&](int64_t, int64_t, int64_t) { return faded; });
    for (int64_t i = 0; i < features; ++i) {
      result[i] += skip * x[i];
    }
    narrow(result, features, out);
  }

  // steps (features), rates (features, size): of each feature, and of each of its numbers; skips (features), or null.
  template <typename T>
  void run(const float* state, float* kept, const float* steps, const float* rates, const float* skips, T* out) {
    each(state, kept, [&](int64_t p) { return steps[p]; }, [&](int64_t p, int64_t i, int64_t left) {
      return (Vec(steps[p]) * Vec::loadu(rates + p * size + i, left)).exp();
    });
    for (int64_t i = 0; skips != nullptr && i < features; ++i) {
      result[i] += skips[i] * x[i];
    }
    narrow(result, features, out);
  }

 private:
  // step(p): of a feature. fade(p, i, left): by what `left` of its numbers from the i-th on decay.
  template <typename Step, typename Fade>
  void each(const float* state, float* kept, const Step& step, const Fade& fade) {
    int64_t p = 0;
    for (; features - p >= 4; p += 4) {
      rows<4>(state + p * size, kept + p * size, step, fade, p);
    }
    for (; p < features; ++p) {
      rows<1>(state + p * size, kept + p * size, step, fade, p);
    }
  }

  template <int N, typename Step, typename Fade>
  void rows(const float* state, float* kept, const Step& step, const Fade& fade, int64_t first) {
    Vec sums[N], added[N];
    unrolled<N>([&](auto n) {
      sums[n] = Vec(0.f);
      added[n] = Vec(step(first + n) * x[first + n]);
    });
    int64_t i = 0;
    for (; size - i >= WIDTH; i += WIDTH) {
      const Vec key = Vec::loadu(keys + i), query = Vec::loadu(queries + i);
      unrolled<N>([&](auto n) {
        const Vec old = Vec::loadu(state + n * size + i) * fade(first + n, i, WIDTH);
        const Vec next = at::vec::fmadd(added[n], key, old);
        sums[n] = at::vec::fmadd(next, query, sums[n]);
        next.store(kept + n * size + i);
      });
    }
    if (i < size) {
      const int64_t left = size - i;
      const Vec key = Vec::loadu(keys + i), query = Vec::loadu(queries + i);
      unrolled<N>([&](auto n) {
        const Vec old = Vec::loadu(state + n * size + i, left) * fade(first + n, i, left);
        const Vec next = at::vec::fmadd(added[n], key, old);
        sums[n] = at::vec::fmadd(Vec::set(Vec(0.f), next, left), query, sums[n]);
        next.store(kept + n * size + i, left);
      });
    }
    unrolled<N>([&](auto n) { result[first + n] = total(sums[n]); });
  }

  int64_t features, size;
  std::vector<float> memory;
  float *x, *result, *keys, *queries;
};

}  // namespace core_cpu
