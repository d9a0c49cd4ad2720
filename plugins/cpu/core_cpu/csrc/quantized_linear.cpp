// `core_cpu::quantized_linear`: the kernel of `core::quantized_linear` for int8 codes with a scale per token or tensor and
// per channel or tensor. Sums are exact integers; scales, zero points and bias come last.

#include <ATen/Parallel.h>

#include <optional>

#include "binding.h"
#include "integers.h"

namespace core_cpu {
namespace {

using at::Tensor;

// Multiplications that are worth another thread.
constexpr int64_t WORK = 1 << 18;

// A scale and a zero point for each row or column, or one for all: step 0. zero null: none.
struct Regions {
  const float* scale;
  const int8_t* zero;
  int64_t step;

  float scale_of(int64_t at) const {
    return scale[at * step];
  }

  int64_t zero_of(int64_t at) const {
    return zero == nullptr ? 0 : zero[at * step];
  }
};

Regions regions_of(const Tensor& scale, const std::optional<Tensor>& zero, int64_t count) {
  TORCH_CHECK(scale.numel() == count || scale.numel() == 1, "core_cpu::quantized_linear takes one scale or ", count,
              ", not ", scale.numel());
  return {scale.const_data_ptr<float>(), zero ? zero->const_data_ptr<int8_t>() : nullptr, scale.numel() == 1 ? 0 : 1};
}

// Write a share's columns from `first` on: sums of products times scales, plus bias (of all columns, or null).
template <typename T>
void finish(const IntegerProduct& share, int64_t first, const Regions& x, const Regions& w, const float* bias, T* out,
            int64_t ldo) {
  for (int64_t r = 0; r < share.rows; ++r) {
    int32_t* sums = share.out + r * share.ldo;
    if (x.zero != nullptr || w.zero != nullptr) {
      const int64_t zero = x.zero_of(r), row_sum = share.x->sums[r] - share.depth * zero;
      for (int64_t c = 0; c < share.columns; ++c) {
        const int64_t moved = zero == 0 ? 0 : zero * share.column_sums[c];
        sums[c] = static_cast<int32_t>(sums[c] - moved - w.zero_of(first + c) * row_sum);
      }
    }
    const float scale = x.scale_of(r);
    T* to = out + r * ldo + first;
    for (int64_t c = 0; c < share.columns; ++c) {
      const float product = static_cast<float>(sums[c]) * scale * w.scale_of(first + c);
      to[c] = static_cast<T>(bias == nullptr ? product : product + bias[first + c]);
    }
  }
}

template <typename T>
void multiply(const Tensor& x_codes, const Tensor& w_codes, const Regions& x, const Regions& w, const Tensor& added,
              Tensor& out) {
  const int64_t columns = w_codes.size(0), depth = w_codes.size(1), rows = x_codes.numel() / depth;
  const IntegerRows arranged(x_codes.const_data_ptr<int8_t>(), depth, rows, depth);
  const float* bias = added.defined() ? added.const_data_ptr<float>() : nullptr;
  const int8_t* codes = w_codes.const_data_ptr<int8_t>();
  T* to = out.mutable_data_ptr<T>();
  const int64_t blocks = (columns + INTEGER_COLUMNS - 1) / INTEGER_COLUMNS;
  const int64_t grain = std::max<int64_t>(WORK / std::max<int64_t>(rows * depth * INTEGER_COLUMNS, 1), 1);
  at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * INTEGER_COLUMNS, count = std::min(end * INTEGER_COLUMNS, columns) - first;
    const std::unique_ptr<int32_t[]> sums(new int32_t[(rows + 1) * count]);
    const int8_t* weight = codes + first * w_codes.stride(0);
    const IntegerProduct share{&arranged,  weight, w_codes.stride(0), count, depth,
                               sums.get(), count,  rows,              sums.get() + rows * count};
    x.zero == nullptr ? integer_share<false>(share) : integer_share<true>(share);
    finish(share, first, x, w, bias, to, columns);
  });
}

}  // namespace

// As `core::quantized_linear` has it, for calls that the condition in quantized.py lets pass.
Tensor quantized_linear(const Tensor& x_codes, const Tensor& x_scale, const Tensor& w_codes, const Tensor& w_scale,
                        const std::optional<Tensor>& bias, at::ScalarType out_dtype,
                        const std::optional<Tensor>& x_zero_point, const std::optional<Tensor>& w_zero_point) {
  at::DimVector sizes(x_codes.sizes());
  sizes.back() = w_codes.size(0);
  Tensor out = empty(sizes, out_dtype);
  const Tensor added = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  const int64_t depth = w_codes.size(1);
  if (depth == 0) {  // sums of nothing
    added.defined() ? out.copy_(added) : out.zero_();
    return out;
  }
  const auto in_order = [](const std::optional<Tensor>& zero) {
    return zero ? std::optional<Tensor>(zero->contiguous()) : zero;
  };
  const auto x_zero = in_order(x_zero_point), w_zero = in_order(w_zero_point);
  const Tensor x_all = x_scale.contiguous(), w_all = w_scale.contiguous();
  const Regions x = regions_of(x_all, x_zero, x_codes.numel() / depth), w = regions_of(w_all, w_zero, w_codes.size(0));
  const Tensor weight = depth > 1 && w_codes.stride(1) != 1 ? w_codes.contiguous() : w_codes;
  const Tensor rows = x_codes.contiguous();
  with_dtype(out_dtype, "core_cpu::quantized_linear",
             [&]<typename T>(T) { multiply<T>(rows, weight, x, w, added, out); });
  return out;
}

CORE_CPU_DIRECT(quantized_linear, quantized_linear)

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CPU, m) {
  m.impl("quantized_linear", Calls<quantized_linear>::boxed);
}

}  // namespace core_cpu
