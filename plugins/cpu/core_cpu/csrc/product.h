// Products of few rows with a weight of the same dtype: their operands, and which columns a thread computes.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear_ops.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace core_cpu {

// The most rows that a kernel multiplies, as in linear.py: it reads the weight once for each block of them, and torch's
// product keeps parts of the weight in the cache.
constexpr int64_t MOST_ROWS = 64;

// torch's product, rows side by side: of strides by which it can't see them so, it multiplies each by a copy of weight.
inline at::Tensor by_torch(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  at::DimVector sizes(x.sizes());
  sizes.back() = weight.size(0);
  const at::Tensor rows = x.dim() > 2 ? x.flatten(0, -2) : x;
  return at::_ops::linear::call(rows, weight, bias).contiguous().view(sizes);
}

// Multiplications that are worth another thread.
constexpr int64_t WORK = 1 << 16;

// x (rows, depth), bias (columns,) or null, out (rows, columns). In which order the weight lies, each kernel says.
template <typename T>
struct Operands {
  const T* x;
  int64_t ldx;
  const T* weight;
  int64_t ldw;
  const T* bias;
  T* out;
  int64_t ldo, rows, columns, depth;
};

// Compute shares of a product in threads, `unit` columns at least. step: from a column of the weight to the next.
template <typename Product, typename Compute>
void share_columns(const Product& whole, int64_t unit, int64_t step, const Compute& compute) {
  const int64_t blocks = (whole.columns + unit - 1) / unit;
  const int64_t grain = std::max<int64_t>(WORK / std::max<int64_t>(whole.rows * whole.depth * unit, 1), 1);
  at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    Product share = whole;
    const int64_t first = begin * unit;
    share.weight += first * step, share.out += first;
    share.bias = whole.bias == nullptr ? nullptr : whole.bias + first;
    share.columns = std::min(end * unit, whole.columns) - first;
    compute(share);
  });
}

}  // namespace core_cpu
