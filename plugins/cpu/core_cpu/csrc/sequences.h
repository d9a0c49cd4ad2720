// What calls of recurrent layers have in common: the slots and rows of their sequences, and small operands.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "binding.h"

namespace core_cpu {

using at::Tensor;
using Optional = std::optional<Tensor>;

// Numbers of a state that are worth another thread.
inline constexpr int64_t WORK = 1 << 15;
// The states that the sequences of a call read and write, and the rows of each.
struct Sequences {
  const int64_t* from;
  const int64_t* to;
  const int32_t* starts;
  int64_t count;

  Sequences(const Optional& slots, const Optional& kept, const Optional& query_starts, int64_t num_states,
            int64_t num_rows, const char* op)
      : from(slots ? slots->const_data_ptr<int64_t>() : nullptr), to(kept ? kept->const_data_ptr<int64_t>() : from),
        starts(query_starts ? query_starts->const_data_ptr<int32_t>() : nullptr),
        count(query_starts ? query_starts->size(0) - 1 : num_rows) {
    for (const int64_t* places : {from, to}) {
      for (int64_t i = 0; places != nullptr && i < count; ++i) {
        TORCH_CHECK_INDEX(places[i] >= 0 && places[i] < num_states, op, ": slot ", places[i], " of ", num_states);
      }
    }
    for (int64_t i = 0; starts != nullptr && i <= count; ++i) {
      TORCH_CHECK_INDEX(starts[i] >= (i ? starts[i - 1] : 0) && starts[i] <= num_rows, op, ": row ", starts[i], " of ",
                        num_rows);
    }
  }

  int64_t read(int64_t i) const {
    return from == nullptr ? i : from[i];
  }

  int64_t written(int64_t i) const {
    return to == nullptr ? i : to[i];
  }

  int64_t begin(int64_t i) const {
    return starts == nullptr ? i : starts[i];
  }

  // The first row of padding.
  int64_t end(int64_t num_rows) const {
    return starts == nullptr ? num_rows : starts[count];
  }

  // Call `step(row, old, kept)` for each row of a sequence, the states part of the slots of `size` numbers each.
  template <typename S, typename Step>
  void along(int64_t i, S* states, int64_t slot, int64_t part, int64_t size, const Step& step) const {
    const S* old = states + read(i) * slot + part;
    S* kept = states + written(i) * slot + part;
    if (begin(i) == begin(i + 1) && old != kept) {
      std::memcpy(kept, old, size * sizeof(S));
    }
    for (int64_t row = begin(i); row < begin(i + 1); ++row, old = kept) {
      step(row, old, kept);
    }
  }
};

// Return a tensor for results (T, …), with zeros in the rows of padding.
inline Tensor results(at::IntArrayRef sizes, at::ScalarType dtype, const Sequences& places) {
  Tensor out = empty(sizes, dtype);
  const int64_t first = places.end(sizes[0]);
  if (first < sizes[0]) {
    out.narrow(0, first, sizes[0] - first).zero_();
  }
  return out;
}

inline Optional in_run(const Optional& index) {
  return index ? Optional(index->contiguous()) : std::nullopt;
}

// Numbers of any dtype, of which few are read.
struct Numbers {
  const void* data;
  at::ScalarType dtype;
  int64_t row, column, inner;

  // Of (rows, columns, more), of (rows, columns), or of columns alone.
  explicit Numbers(const Tensor& from)
      : data(from.const_data_ptr()), dtype(from.scalar_type()), row(from.dim() > 1 ? from.stride(0) : 0),
        column(from.stride(from.dim() > 1 ? 1 : 0)), inner(from.dim() > 2 ? from.stride(2) : 0) {}

  float at(int64_t i, int64_t j, int64_t k = 0) const {
    const int64_t place = i * row + j * column + k * inner;
    switch (dtype) {
      case at::kFloat:
        return static_cast<const float*>(data)[place];
      case at::kBFloat16:
        return static_cast<const c10::BFloat16*>(data)[place];
      default:
        return static_cast<const c10::Half*>(data)[place];
    }
  }
};

inline Tensor in_rows(const Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous();
}

inline int64_t grain(int64_t size) {
  return std::max<int64_t>(WORK / std::max<int64_t>(size, 1), 1);
}

template <typename T>
const T* head(const Tensor& x, int64_t row, int64_t head) {
  return x.const_data_ptr<T>() + row * x.stride(0) + head * x.stride(1);
}

}  // namespace core_cpu
