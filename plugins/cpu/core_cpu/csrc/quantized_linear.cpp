// `core_cpu::quantized_linear`: the kernel of `core::quantized_linear` for int8 codes with a scale per token or tensor and
// per channel or tensor. Sums are exact integers; scales, zero points and bias come last.
//
// `core_cpu::quantized_linears_2` and `_3` are several such products of the same codes: these are arranged once, and
// threads begin and end once.

#include <ATen/Parallel.h>

#include <array>
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

// A weight (columns, depth) as a call gives it.
struct Weight {
  const Tensor& codes;
  const Tensor& scale;
  const std::optional<Tensor>& bias;
};

// The same, ready to be read, and where its product goes; bias null: none.
struct Part {
  Part(const Weight& given, const std::optional<Tensor>& zero, const Tensor& result)
      : codes(given.codes.size(1) > 1 && given.codes.stride(1) != 1 ? given.codes.contiguous() : given.codes),
        scale(given.scale.contiguous()),
        added(given.bias ? given.bias->to(at::kFloat).contiguous() : Tensor()),
        out(result),
        regions(regions_of(scale, zero, codes.size(0))),
        bias(added.defined() ? added.const_data_ptr<float>() : nullptr) {}

  int64_t columns() const {
    return codes.size(0);
  }

  int64_t blocks() const {
    return (columns() + INTEGER_COLUMNS - 1) / INTEGER_COLUMNS;
  }

  Tensor codes, scale, added, out;
  Regions regions;
  const float* bias;
};

// Sums that need no memory of their own: those of a row and 2,048 columns with their own sums.
constexpr int64_t FEW_SUMS = 4096;

// Write a share's columns from `first` on: sums of products times scales, plus bias.
template <typename T>
void finish(const IntegerProduct& share, int64_t first, const Regions& x, const Part& part) {
  const Regions& w = part.regions;
  const float* bias = part.bias;
  const int64_t ldo = part.columns();
  T* out = part.out.template mutable_data_ptr<T>();
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

// Compute blocks `begin` to `end` of the columns of one product.
template <typename T>
void multiply_share(const IntegerRows& arranged, int64_t rows, int64_t begin, int64_t end, const Regions& x,
                    const Part& part) {
  const int64_t depth = part.codes.size(1), ldw = part.codes.stride(0);
  const int64_t first = begin * INTEGER_COLUMNS, count = std::min(end * INTEGER_COLUMNS, part.columns()) - first;
  const int64_t needed = (rows + 1) * count;
  int32_t few[FEW_SUMS];
  const std::unique_ptr<int32_t[]> many(needed > FEW_SUMS ? new int32_t[needed] : nullptr);
  int32_t* sums = many ? many.get() : few;
  const int8_t* weight = part.codes.const_data_ptr<int8_t>() + first * ldw;
  const IntegerProduct share{&arranged, weight, ldw, count, depth, sums, count, rows, sums + rows * count};
  x.zero == nullptr ? integer_share<false>(share) : integer_share<true>(share);
  finish<T>(share, first, x, part);
}

// Compute the products of x (rows, depth) with each weight, all blocks of columns as one range.
template <typename T, size_t N>
void multiply(const Tensor& x_codes, const Regions& x, const std::array<Part, N>& parts) {
  const int64_t depth = parts[0].codes.size(1), rows = x_codes.numel() / depth;
  const IntegerRows arranged(x_codes.const_data_ptr<int8_t>(), depth, rows, depth);
  int64_t blocks = 0;
  for (const Part& part : parts) {
    blocks += part.blocks();
  }
  const int64_t grain = std::max<int64_t>(WORK / std::max<int64_t>(rows * depth * INTEGER_COLUMNS, 1), 1);
  at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    for (const Part& part : parts) {
      const int64_t from = std::max<int64_t>(begin, 0), to = std::min(end, part.blocks());
      if (from < to) {
        multiply_share<T>(arranged, rows, from, to, x, part);
      }
      begin -= part.blocks(), end -= part.blocks();
    }
  });
}

using Zero = std::optional<Tensor>;

template <size_t N>
std::array<Tensor, N> products(const char* op, const Tensor& x_codes, const Tensor& x_scale,
                               const std::array<Weight, N>& weights, at::ScalarType out_dtype, const Zero& x_zero,
                               const Zero& w_zero) {
  std::array<Tensor, N> out;
  const int64_t depth = weights[0].codes.size(1);
  at::DimVector sizes(x_codes.sizes());
  for (size_t i = 0; i < N; ++i) {
    sizes.back() = weights[i].codes.size(0);
    out[i] = empty(sizes, out_dtype);
    if (depth == 0) {  // sums of nothing
      weights[i].bias ? out[i].copy_(*weights[i].bias) : out[i].zero_();
    }
  }
  if (depth == 0) {
    return out;
  }
  const Tensor rows = x_codes.contiguous(), scale = x_scale.contiguous();
  const Regions x = regions_of(scale, x_zero, x_codes.numel() / depth);
  const auto parts = [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<Part, N>{Part(weights[I], w_zero, out[I])...};
  }(std::make_index_sequence<N>());
  with_dtype(out_dtype, op, [&]<typename T>(T) { multiply<T>(rows, x, parts); });
  return out;
}

}  // namespace

// As `core::quantized_linear` has it, for calls that the condition in quantized.py lets pass.
Tensor quantized_linear(const Tensor& x_codes, const Tensor& x_scale, const Tensor& w_codes, const Tensor& w_scale,
                        const std::optional<Tensor>& bias, at::ScalarType out_dtype, const Zero& x_zero_point,
                        const Zero& w_zero_point) {
  const auto in_order = [](const Zero& zero) { return zero ? Zero(zero->contiguous()) : zero; };
  const Zero x_zero = in_order(x_zero_point), w_zero = in_order(w_zero_point);
  const std::array<Weight, 1> weight{Weight{w_codes, w_scale, bias}};
  return products("core_cpu::quantized_linear", x_codes, x_scale, weight, out_dtype, x_zero, w_zero)[0];
}

// Two of them, as `core_cpu::quantized_linears_2` has it.
std::array<Tensor, 2> quantized_linears_2(const Tensor& x_codes, const Tensor& x_scale, const Tensor& w_codes_0,
                                          const Tensor& w_scale_0, const std::optional<Tensor>& bias_0,
                                          const Tensor& w_codes_1, const Tensor& w_scale_1,
                                          const std::optional<Tensor>& bias_1, at::ScalarType out_dtype) {
  const std::array<Weight, 2> weights{Weight{w_codes_0, w_scale_0, bias_0}, Weight{w_codes_1, w_scale_1, bias_1}};
  return products("core_cpu::quantized_linears_2", x_codes, x_scale, weights, out_dtype, {}, {});
}

std::array<Tensor, 3> quantized_linears_3(const Tensor& x_codes, const Tensor& x_scale, const Tensor& w_codes_0,
                                          const Tensor& w_scale_0, const std::optional<Tensor>& bias_0,
                                          const Tensor& w_codes_1, const Tensor& w_scale_1,
                                          const std::optional<Tensor>& bias_1, const Tensor& w_codes_2,
                                          const Tensor& w_scale_2, const std::optional<Tensor>& bias_2,
                                          at::ScalarType out_dtype) {
  const std::array<Weight, 3> weights{Weight{w_codes_0, w_scale_0, bias_0}, Weight{w_codes_1, w_scale_1, bias_1},
                                      Weight{w_codes_2, w_scale_2, bias_2}};
  return products("core_cpu::quantized_linears_3", x_codes, x_scale, weights, out_dtype, {}, {});
}

CORE_CPU_DIRECT(quantized_linear, quantized_linear)
CORE_CPU_DIRECT(quantized_linears_2, quantized_linears_2)
CORE_CPU_DIRECT(quantized_linears_3, quantized_linears_3)

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CPU, m) {
  m.impl("quantized_linear", Calls<quantized_linear>::boxed);
  m.impl("quantized_linears_2", Calls<quantized_linears_2>::boxed);
  m.impl("quantized_linears_3", Calls<quantized_linears_3>::boxed);
}

}  // namespace core_cpu
