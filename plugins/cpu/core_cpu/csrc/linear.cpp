// `core_cpu::linear`: the kernel of `core::linear` for few rows of fp32, bf16 and fp16. More rows go to torch's product,
// of numbers widened to fp32 where torch's own of 16 bits is slower than that. And the same kernel for any number of rows
// as `core_cpu::linear_alike`, whose results for a row do not depend on the others.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear_ops.h>

#include <optional>

#include "binding.h"
#include "linear.h"

namespace core_cpu {
namespace {

using at::Tensor;

template <typename T>
void multiply_rows(const Tensor& x, int64_t ldx, const Tensor& weight, const Tensor& added, Tensor& out, int64_t from,
                   int64_t rows, bool alike) {
  const int64_t columns = weight.size(0), depth = weight.size(1);
  const T* bias = added.defined() ? added.const_data_ptr<T>() : nullptr;
  Product<T> whole{{x.const_data_ptr<T>() + from * ldx, ldx, weight.const_data_ptr<T>(), weight.stride(0), bias,
                    out.mutable_data_ptr<T>() + from * columns, columns, rows, columns, depth}};
  whole.alike = alike;
  share_columns(whole, COLUMNS, whole.ldw, linear_share<T>);
}

// Numbers of a widened part of the weight: it stays in the second or third cache, and torch's product reads it there.
constexpr int64_t TILE = 1 << 18;

// Whether torch multiplies many rows of a dtype by instructions of the processor, as far as the build can tell.
bool has_fast_product(at::ScalarType dtype) {
#if defined(CPU_CAPABILITY_AVX2)
  return dtype == at::kFloat;
#else
  return dtype != at::kHalf;
#endif
}

// Multiply any number of rows, some columns at a time, in fp32.
template <typename T>
void multiply_widened(const Tensor& x, const Tensor& weight, const Tensor& added, Tensor& out) {
  const int64_t columns = weight.size(0), depth = weight.size(1);
  const Tensor rows = x.reshape({-1, depth}).to(at::kFloat);
  const Tensor bias = added.defined() ? added.to(at::kFloat) : Tensor();
  Tensor flat = out.view({-1, columns});
  const Tensor tile = empty({std::min(std::max<int64_t>(TILE / depth, 8), columns), depth}, at::kFloat);
  const int64_t grain = std::max<int64_t>(WORK / depth, 1);
  for (int64_t first = 0; first < columns; first += tile.size(0)) {
    const int64_t count = std::min(tile.size(0), columns - first);
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const T* from = weight.const_data_ptr<T>() + (first + c) * weight.stride(0);
        at::vec::convert(from, tile.mutable_data_ptr<float>() + c * depth, depth);
      }
    });
    const auto part = bias.defined() ? std::optional(bias.narrow(0, first, count)) : std::nullopt;
    flat.narrow(1, first, count).copy_(at::_ops::linear::call(rows, tile.narrow(0, 0, count), part));
  }
}

}  // namespace

// As `core::linear` has it, for calls that the condition in linear.py lets pass.
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const int64_t depth = weight.size(1);
  const int64_t rows = depth == 0 ? 0 : x.numel() / depth;
  const bool widens = rows > MOST_ROWS && !has_fast_product(x.scalar_type());
  if (rows == 0 || weight.stride(1) != 1 || (rows > MOST_ROWS && !widens)) {
    return by_torch(x, weight, bias);
  }
  const bool is_wider = x.dim() == 2 && x.stride(1) == 1;  // rows of a wider tensor
  const Tensor in = is_wider ? x : x.contiguous();
  const Tensor added = bias ? bias->contiguous() : Tensor();
  at::DimVector sizes(x.sizes());
  sizes.back() = weight.size(0);
  Tensor out = empty(sizes, x.scalar_type());
  with_dtype(x.scalar_type(), "core_cpu::linear", [&]<typename T>(T) {
    if (widens) {
      return multiply_widened<T>(x, weight, added, out);
    }
    multiply_rows<T>(in, is_wider ? x.stride(0) : depth, weight, added, out, 0, rows, false);
  });
  return out;
}

// The same for any number of rows, some at a time, each sum in one order.
Tensor linear_alike(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const int64_t depth = weight.size(1), columns = weight.size(0);
  const int64_t rows = depth == 0 ? 0 : x.numel() / depth;
  TORCH_CHECK(weight.stride(1) == 1, "core_cpu::linear_alike: the rows of weight are not one run of memory each");
  const Tensor in = x.contiguous(), added = bias ? bias->contiguous() : Tensor();
  at::DimVector sizes(x.sizes());
  sizes.back() = columns;
  Tensor out = empty(sizes, x.scalar_type());
  if (depth == 0 && out.numel() > 0) {
    return added.defined() ? out.copy_(added) : out.zero_();
  }
  with_dtype(x.scalar_type(), "core_cpu::linear_alike", [&]<typename T>(T) {
    for (int64_t from = 0; from < rows && columns > 0; from += MOST_ROWS) {
      multiply_rows<T>(in, depth, weight, added, out, from, std::min(MOST_ROWS, rows - from), true);
    }
  });
  return out;
}

CORE_CPU_DIRECT(linear, linear)
CORE_CPU_DIRECT(linear_alike, linear_alike)

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CPU, m) {
  m.impl("linear", Calls<linear>::boxed);
  m.impl("linear_alike", Calls<linear_alike>::boxed);
}

}  // namespace core_cpu
