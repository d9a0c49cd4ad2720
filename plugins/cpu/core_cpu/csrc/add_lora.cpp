// `core_cpu::add_lora`: the kernel of `core::add_lora` for one layer, of fp32, bf16 and fp16.
//
// Rows of one adapter are computed together, so that A and B are read once for each adapter that is there, and those of
// other slots are not. As `core_cpu::add_lora_alike` each sum is added up in one order, whatever other rows there are.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "binding.h"
#include "vectors.h"

namespace core_cpu {
namespace {

using at::Tensor;

// Multiplications that are worth another thread.
constexpr int64_t WORK = 1 << 16;
constexpr int COLUMNS = 4, ROWS = 2;  // of a block of x A^T, whose sums stay in registers
constexpr int64_t UNIT = BLOCK_COLUMNS * WIDTH;  // columns of B's result at a time
constexpr int64_t MANY_ROWS = 8;

// The rows of each slot, one slot after the other; those without an adapter are in none.
struct Batch {
  std::vector<int64_t> rows, ends;

  Batch(const int64_t* slots, int64_t count, int64_t num_slots) : ends(num_slots, 0) {
    for (int64_t i = 0; i < count; ++i) {
      if (slots[i] > 0 && slots[i] <= num_slots) {
        ++ends[slots[i] - 1];
      }
    }
    std::vector<int64_t> next(num_slots, 0);
    for (int64_t s = 0, sum = 0; s < num_slots; ++s) {
      next[s] = sum, sum += ends[s], ends[s] = sum;
    }
    rows.resize(num_slots == 0 ? 0 : ends.back());
    for (int64_t i = 0; i < count; ++i) {
      if (slots[i] > 0 && slots[i] <= num_slots) {
        rows[next[slots[i] - 1]++] = i;
      }
    }
  }

  int64_t begin(int64_t slot) const {
    return slot == 0 ? 0 : ends[slot - 1];
  }
};

// The operands; of x the rows that have an adapter, in the order of the batch, as fp32 and padded to whole vectors.
template <typename T>
struct Call {
  const float* x;
  const T *a, *b;
  int64_t depth, rank, columns, width;
  float* shrunk;  // (rows of the batch, padded rank)
  const T* base;
  int64_t ldb;
  T* out;
  bool alike;
};

// shrunk = x A^T of R rows from `row` on and C columns from `column` on, of a slot.
template <int R, int C, typename T>
void shrink_block(const Call<T>& call, int64_t slot, int64_t row, int64_t column) {
  const int64_t ldx = padded(call.depth), whole = call.depth / WIDTH * WIDTH;
  const T* a = call.a + (slot * call.rank + column) * call.depth;
  const float* x = call.x + row * ldx;
  Vec sums[R][C];
  unrolled<R>([&](auto r) { unrolled<C>([&](auto c) { sums[r][c] = Vec(0.f); }); });
  const auto take = [&](int64_t k, const auto& load) {
    unrolled<C>([&](auto c) {
      const Vec numbers = load(a + c * call.depth + k);
      unrolled<R>([&](auto r) { sums[r][c] = at::vec::fmadd(Vec::loadu(x + r * ldx + k), numbers, sums[r][c]); });
    });
  };
  for (int64_t k = 0; k < whole; k += WIDTH) {
    take(k, [](const T* from) { return wide(from); });
  }
  if (whole < call.depth) {
    take(whole, [&](const T* from) {
      T rest[WIDTH] = {};
      std::memcpy(rest, from, (call.depth - whole) * sizeof(T));
      return wide(rest);
    });
  }
  const int64_t ldh = padded(call.rank);
  unrolled<R>([&](auto r) {
    unrolled<C>([&](auto c) { call.shrunk[(row + r) * ldh + column + c] = total(sums[r][c]); });
  });
}

template <int C, typename T>
void shrink_columns(const Call<T>& call, const Batch& batch, int64_t slot, int64_t column) {
  int64_t row = batch.begin(slot);
  for (; row + ROWS <= batch.ends[slot]; row += ROWS) {
    shrink_block<ROWS, C>(call, slot, row, column);
  }
  for (; row < batch.ends[slot]; ++row) {
    shrink_block<1, C>(call, slot, row, column);
  }
}

template <typename T>
void shrink(const Call<T>& call, const Batch& batch) {
  const int64_t blocks = (call.rank + COLUMNS - 1) / COLUMNS, num_slots = batch.ends.size();
  const int64_t rows = std::max<int64_t>(batch.rows.size() / num_slots, 1);
  const int64_t grain = std::max<int64_t>(WORK / std::max<int64_t>(rows * call.depth * COLUMNS, 1), 1);
  at::parallel_for(0, blocks * num_slots, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = i / blocks, first = i % blocks * COLUMNS;
      if (first + COLUMNS <= call.rank) {
        shrink_columns<COLUMNS>(call, batch, slot, first);
        continue;
      }
      for (int64_t column = first; column < call.rank; ++column) {
        shrink_columns<1>(call, batch, slot, column);
      }
    }
  });
}

// Add rows of T to sums, and write these as T.
template <typename T>
void add_and_store(float* sums, const T* base, int64_t count, T* to) {
  int64_t c = 0;
  for (; c + WIDTH <= count; c += WIDTH) {
    (Vec::loadu(sums + c) + wide(base + c)).store(sums + c);
  }
  for (; c < count; ++c) {
    sums[c] += static_cast<float>(base[c]);
  }
  at::vec::convert(sums, to, count);
}

// Memory of a thread for some columns of B: these as fp32, (UNIT, padded rank), also turned, and the sums of rows.
struct Columns {
  std::unique_ptr<float[]> numbers, turned, sums;

  Columns(int64_t size, int64_t rows)
      : numbers(new float[UNIT * size]()), turned(new float[UNIT * size]), sums(new float[rows * UNIT]) {}
};

// sums (rows, UNIT) = shrunk (rows, padded rank) times some columns of B. Few rows do not pay for turning these.
void multiply_columns(const float* shrunk, int64_t rows, int64_t size, const float* numbers, int64_t ldn, bool alike,
                      const Columns& of) {
  if (rows >= MANY_ROWS && !alike) {
    transpose(numbers, ldn, UNIT, size, of.turned.get(), UNIT);
    multiply(shrunk, size, of.turned.get(), UNIT, of.sums.get(), UNIT, rows, UNIT, size, false);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < UNIT; c += WIDTH) {
      dots(shrunk + i * size, numbers + c * ldn, ldn, size).store(of.sums.get() + i * UNIT + c);
    }
  }
}

// out = base + shrunk B^T of the rows that have an adapter, UNIT columns at a time.
template <typename T>
void expand(const Call<T>& call, const Batch& batch) {
  const int64_t size = padded(call.rank), num_slots = batch.ends.size();
  const int64_t blocks = (call.columns + UNIT - 1) / UNIT, most = batch.rows.size();
  const int64_t grain = std::max<int64_t>(WORK / std::max<int64_t>(most * size * UNIT, 1), 1);
  at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    const Columns of(size, most);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * UNIT, count = std::min(UNIT, call.columns - first);
      for (int64_t slot = 0; slot < num_slots; ++slot) {
        const int64_t row = batch.begin(slot), rows = batch.ends[slot] - row;
        if (rows == 0) {
          continue;
        }
        const T* b = call.b + first * call.width + slot * call.rank;
        const float* numbers = of.numbers.get();
        int64_t ldn = size;
        if (std::is_same_v<T, float> && size == call.rank && count == UNIT) {
          numbers = reinterpret_cast<const float*>(b), ldn = call.width;
        } else {
          for (int64_t c = 0; c < count; ++c) {
            widen(b + c * call.width, call.rank, of.numbers.get() + c * size, 1.f);
          }
        }
        multiply_columns(call.shrunk + row * size, rows, size, numbers, ldn, call.alike, of);
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t place = batch.rows[row + i];
          add_and_store(of.sums.get() + i * UNIT, call.base + place * call.ldb + first, count,
                        call.out + place * call.columns + first);
        }
      }
    }
  });
}

// Return the numbers of rows as they lie, each row one run of memory.
Tensor as_rows(const Tensor& x, int64_t rows) {
  const Tensor flat = x.reshape({rows, x.size(-1)});
  return flat.size(1) > 1 && flat.stride(1) != 1 ? flat.contiguous() : flat;
}

Tensor added(const Tensor& base, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& slots, int64_t rank,
             bool alike) {
  const int64_t count = slots.numel(), depth = x.size(-1), columns = b.size(0), width = b.size(1);
  Tensor out = empty(base.sizes(), base.scalar_type());
  out.copy_(base);
  const Tensor places = slots.contiguous(), downs = a.contiguous(), ups = b.contiguous();
  const Batch batch(places.const_data_ptr<int64_t>(), count, width / rank);
  if (batch.rows.empty()) {
    return out;
  }
  const Tensor from = as_rows(x, count), given = as_rows(base, count);
  const int64_t num_rows = batch.rows.size(), ldx = padded(depth);
  std::unique_ptr<float[]> wider(new float[num_rows * ldx]), shrunk(new float[num_rows * padded(rank)]());
  with_dtype(x.scalar_type(), "core_cpu::add_lora", [&]<typename T>(T) {
    const int64_t grain = std::max<int64_t>(WORK / std::max<int64_t>(depth, 1), 1);
    at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        widen(from.const_data_ptr<T>() + batch.rows[i] * from.stride(0), depth, wider.get() + i * ldx, 1.f);
      }
    });
    const Call<T> call{wider.get(), downs.const_data_ptr<T>(), ups.const_data_ptr<T>(), depth, rank, columns, width,
                       shrunk.get(), given.const_data_ptr<T>(), given.stride(0), out.mutable_data_ptr<T>(), alike};
    shrink(call, batch);
    expand(call, batch);
  });
  return out;
}

}  // namespace

// As `core::add_lora` has it for one layer, for calls that the condition in lora.py lets pass.
Tensor add_lora(const Tensor& base, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& slots,
                int64_t rank) {
  return added(base, x, a, b, slots, rank, false);
}

Tensor add_lora_alike(const Tensor& base, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& slots,
                      int64_t rank) {
  return added(base, x, a, b, slots, rank, true);
}

CORE_CPU_DIRECT(add_lora, add_lora)
CORE_CPU_DIRECT(add_lora_alike, add_lora_alike)

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CPU, m) {
  m.impl("add_lora", Calls<add_lora>::boxed);
  m.impl("add_lora_alike", Calls<add_lora_alike>::boxed);
}

}  // namespace core_cpu
