// `core_cpu::linear_transposed`: the kernel of `core::linear` for few rows and a weight whose columns, not rows, are one
// run of memory each: what a product by `torch.addmm` or `@` reads, seen as a linear layer's weight.

#include <ATen/core/Tensor.h>

#include <optional>

#include "binding.h"
#include "linear_transposed.h"

namespace core_cpu {
namespace {

using at::Tensor;

// Shares of threads are multiples of so many columns: one line of the memory at least.
constexpr int64_t COLUMNS = 64;

template <typename T>
void multiply_rows(const Tensor& x, const Tensor& weight, const Tensor& added, Tensor& out) {
  const int64_t columns = weight.size(0), depth = weight.size(1), rows = x.numel() / depth;
  const T* bias = added.defined() ? added.const_data_ptr<T>() : nullptr;
  const Operands<T> whole{x.const_data_ptr<T>(), depth, weight.const_data_ptr<T>(), weight.stride(1), bias,
                          out.mutable_data_ptr<T>(), columns, rows, columns, depth};
  share_columns(whole, COLUMNS, 1, transposed_share<T>);
}

Tensor multiplied(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Tensor in = x.contiguous(), added = bias ? bias->contiguous() : Tensor();
  at::DimVector sizes(x.sizes());
  sizes.back() = weight.size(0);
  Tensor out = empty(sizes, x.scalar_type());
  with_dtype(x.scalar_type(), "core_cpu::linear_transposed",
             [&]<typename T>(T) { multiply_rows<T>(in, weight, added, out); });
  return out;
}

bool has_rows(const Tensor& x, const Tensor& weight) {
  return x.numel() > 0 && weight.size(1) > 0;
}

}  // namespace

// As `core::linear` has it, for calls that the condition in linear.py lets pass.
Tensor linear_transposed(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (!has_rows(x, weight) || x.numel() / weight.size(1) > MOST_ROWS || weight.stride(0) != 1) {
    return by_torch(x, weight, bias);
  }
  return multiplied(x, weight, bias);
}

// The same for any number of rows: sums of a row are added up in one order whatever the others are.
Tensor linear_transposed_alike(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(weight.stride(0) == 1,
              "core_cpu::linear_transposed_alike: the columns of weight are not one run of memory each");
  if (!has_rows(x, weight)) {  // zeros and the bias, or nothing at all
    return by_torch(x, weight, bias);
  }
  return multiplied(x, weight, bias);
}

CORE_CPU_DIRECT(linear_transposed, linear_transposed)
CORE_CPU_DIRECT(linear_transposed_alike, linear_transposed_alike)

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CPU, m) {
  m.impl("linear_transposed", Calls<linear_transposed>::boxed);
  m.impl("linear_transposed_alike", Calls<linear_transposed_alike>::boxed);
}

}  // namespace core_cpu
