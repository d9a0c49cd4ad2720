// `core_cpu::linear`: the kernel of `core::linear` for few rows of fp32, bf16 and fp16; torch's product for more.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear_ops.h>

#include <optional>

#include "binding.h"
#include "linear.h"

namespace core_cpu {
namespace {

using at::Tensor;

// Multiplications that are worth another thread.
constexpr int64_t WORK = 1 << 16;

// The most rows that the kernel multiplies, as in linear.py: it reads the weight once for each block of them, and torch's
// product keeps parts of the weight in the cache.
constexpr int64_t MOST_ROWS = 64;

template <typename T>
void multiply_rows(const Tensor& x, int64_t ldx, const Tensor& weight, const Tensor& added, Tensor& out) {
  const int64_t columns = weight.size(0), depth = weight.size(1), rows = x.numel() / depth;
  const T* bias = added.defined() ? added.const_data_ptr<T>() : nullptr;
  const Product<T> whole{x.const_data_ptr<T>(), ldx, weight.const_data_ptr<T>(), weight.stride(0), bias,
                         out.mutable_data_ptr<T>(), columns, rows, columns, depth};
  const int64_t blocks = (columns + COLUMNS - 1) / COLUMNS;
  const int64_t grain = std::max<int64_t>(WORK / std::max<int64_t>(rows * depth * COLUMNS, 1), 1);
  at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    Product<T> share = whole;
    const int64_t first = begin * COLUMNS;
    share.weight += first * share.ldw, share.out += first;
    share.bias = bias == nullptr ? nullptr : bias + first;
    share.columns = std::min(end * COLUMNS, columns) - first;
    linear_share(share);
  });
}

}  // namespace

// As `core::linear` has it, for calls that the condition in linear.py lets pass.
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const int64_t depth = weight.size(1);
  const int64_t rows = depth == 0 ? 0 : x.numel() / depth;
  if (rows == 0 || rows > MOST_ROWS || weight.stride(1) != 1) {
    return at::_ops::linear::call(x, weight, bias).contiguous();
  }
  const bool is_wider = x.dim() == 2 && x.stride(1) == 1;  // rows of a wider tensor
  const Tensor in = is_wider ? x : x.contiguous();
  const Tensor added = bias ? bias->contiguous() : Tensor();
  at::DimVector sizes(x.sizes());
  sizes.back() = weight.size(0);
  Tensor out = empty(sizes, x.scalar_type());
  with_dtype(x.scalar_type(), "core_cpu::linear", [&]<typename T>(T) {
    multiply_rows<T>(in, is_wider ? x.stride(0) : depth, weight, added, out);
  });
  return out;
}

CORE_CPU_DIRECT(linear, linear)

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CPU, m) {
  m.impl("linear", Calls<linear>::boxed);
}

}  // namespace core_cpu
