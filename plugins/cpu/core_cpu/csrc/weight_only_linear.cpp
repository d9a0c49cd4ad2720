// `core_cpu::weight_only_linear`: the kernel of `core::weight_only_linear` for x of fp32, bf16 and fp16, and weights of
// int8 and packed 4-bit codes.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear_ops.h>

#include <optional>

#include "binding.h"
#include "row_limits.h"
#include "weight_only.h"

namespace core_cpu {
namespace {

using at::Tensor;

// Multiplications that are worth another thread.
constexpr int64_t WORK = 1 << 16;
// Codes that are turned into numbers at once, where these are multiplied by torch's product.
constexpr int64_t TILE = 1 << 18;

// The most rows of fp32, bf16 and fp16, for int8 and for 4-bit codes, that are multiplied in registers.
RowLimits<6> most_rows;

// limit_rows_weight_only_linear(int kind, int rows) -> int
void limit_rows(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = packed(most_rows.exchange(unpacked<int64_t>(stack[0]), unpacked<int64_t>(stack[1])));
}

// Share the columns of a weight among threads; each share begins at a multiple of CODED_COLUMNS.
template <typename Share>
void for_columns(const CodedWeight& weight, int64_t rows, const Share& share) {
  const int64_t blocks = (weight.columns + CODED_COLUMNS - 1) / CODED_COLUMNS;
  const int64_t grain = std::max<int64_t>(WORK / std::max<int64_t>(rows * weight.depth * CODED_COLUMNS, 1), 1);
  at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    CodedWeight part = weight;
    const int64_t first = begin * CODED_COLUMNS;
    part.codes += first * part.stride, part.scale += first * part.groups;
    part.zero = part.zero == nullptr ? nullptr : part.zero + first * part.groups;
    part.columns = std::min(end * CODED_COLUMNS, weight.columns) - first;
    share(part, first);
  });
}

template <typename T>
void store(void* out, int64_t index, float number) {
  static_cast<T*>(out)[index] = static_cast<T>(number);
}

template <typename Way>
void multiply_arranged(const Arranged<Way>& x, int64_t rows, const CodedWeight& weight, const float* bias, void* out,
                       Store store) {
  for_columns(weight, rows, [&](const CodedWeight& part, int64_t first) {
    std::unique_ptr<float[]> offsets(part.zero == nullptr ? nullptr : new float[CODED_COLUMNS * part.groups]);
    const CodedProduct<Way> share{&x,    part,           bias == nullptr ? nullptr : bias + first, out, store,
                                  weight.columns, first, rows, offsets.get()};
    if (part.zero != nullptr) {
      coded_share<true, true>(share);
    } else if (part.groups > 1) {
      coded_share<true, false>(share);
    } else {
      coded_share<false, false>(share);
    }
  });
}

template <int BITS, typename T>
void multiply_coded(const T* x, int64_t ldx, int64_t rows, const CodedWeight& weight, const float* bias, T* out) {
  const auto multiply = [&](auto way) {
    const Arranged<decltype(way)> arranged(x, ldx, rows, weight.depth, weight.zero != nullptr);
    multiply_arranged(arranged, rows, weight, bias, out, store<T>);
  };
#if defined(CORE_CPU_BF16_PAIRS)
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    // The lanes of int8 pairs hold other shares in each part, which have one scale only where units lie in a group.
    if (BITS == 4 || weight.groups == 1 || weight.depth / weight.groups % Pairs<BITS>::UNIT == 0) {
      return multiply(Pairs<BITS>{});
    }
  }
#endif
  multiply(Wide<BITS>{});
}

// Write the numbers (columns, depth) of a weight, as the reference computes them.
template <int BITS>
void numbers_of(const CodedWeight& weight, float* to) {
  const int64_t size = weight.depth / weight.groups;
  for (int64_t c = 0; c < weight.columns; ++c, to += weight.depth) {
    const uint8_t* codes = weight.codes + c * weight.stride;
    for (int64_t g = 0; g < weight.groups; ++g) {
      const int64_t at = c * weight.groups + g;
      const float scale = weight.scale[at], zero = weight.zero == nullptr ? 0.f : weight.zero[at];
      for (int64_t k = g * size; k < (g + 1) * size; ++k) {
        const int code = BITS == 8 ? static_cast<int8_t>(codes[k]) : ((codes[k / 2] >> (k % 2 * 4)) & 15) - 8;
        to[k] = (static_cast<float>(code) - zero) * scale;
      }
    }
  }
}

// Multiply any number of rows, some columns at a time, whose numbers stay in the cache for torch's product.
template <int BITS>
void multiply_tiles(const Tensor& x, const CodedWeight& weight, const Tensor& bias, Tensor& out) {
  const Tensor rows = x.reshape({-1, weight.depth}).to(at::kFloat);
  Tensor flat = out.view({-1, weight.columns});
  const int64_t blocks = std::max<int64_t>(TILE / weight.depth / CODED_COLUMNS, 1);
  const Tensor tile = empty({blocks * CODED_COLUMNS, weight.depth}, at::kFloat);
  for (int64_t first = 0; first < weight.columns; first += tile.size(0)) {
    CodedWeight some = weight;
    some.codes += first * some.stride, some.scale += first * some.groups;
    some.zero = some.zero == nullptr ? nullptr : some.zero + first * some.groups;
    some.columns = std::min(tile.size(0), weight.columns - first);
    for_columns(some, 1, [&](const CodedWeight& part, int64_t at) {
      numbers_of<BITS>(part, tile.mutable_data_ptr<float>() + at * part.depth);
    });
    const auto added = bias.defined() ? std::optional(bias.narrow(0, first, some.columns)) : std::nullopt;
    flat.narrow(1, first, some.columns).copy_(at::_ops::linear::call(rows, tile.narrow(0, 0, some.columns), added));
  }
}

}  // namespace

// As `core::weight_only_linear` has it, for calls that the condition in weight_only.py lets pass.
Tensor weight_only_linear(const Tensor& x, const Tensor& w_codes, const Tensor& w_scale,
                          const std::optional<Tensor>& w_zero_point, const std::optional<Tensor>& bias,
                          int64_t num_bits) {
  const int64_t depth = x.size(-1), columns = w_codes.size(0), rows = depth == 0 ? 0 : x.numel() / depth;
  at::DimVector sizes(x.sizes());
  sizes.back() = columns;
  Tensor out = empty(sizes, x.scalar_type());
  const Tensor added = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  if (depth == 0) {  // sums of nothing
    added.defined() ? out.copy_(added) : out.zero_();
    return out;
  }
  const Tensor codes = w_codes.size(1) > 1 && w_codes.stride(1) != 1 ? w_codes.contiguous() : w_codes;
  const Tensor scale = w_scale.contiguous(), zero = w_zero_point ? w_zero_point->contiguous() : Tensor();
  const CodedWeight weight{static_cast<const uint8_t*>(codes.const_data_ptr()),
                           codes.stride(0) * codes.element_size(),
                           scale.const_data_ptr<float>(),
                           zero.defined() ? zero.const_data_ptr<int8_t>() : nullptr,
                           scale.size(1), columns, depth};
  if (rows > most_rows.of(x.scalar_type(), num_bits == 8 ? 0 : 3)) {
    num_bits == 8 ? multiply_tiles<8>(x, weight, added, out) : multiply_tiles<4>(x, weight, added, out);
    return out;
  }
  const bool is_wider = x.dim() == 2 && x.stride(1) == 1;  // rows of a wider tensor
  const Tensor in = is_wider ? x : x.contiguous();
  const int64_t ldx = is_wider ? x.stride(0) : depth;
  const float* added_to = added.defined() ? added.const_data_ptr<float>() : nullptr;
  with_dtype(x.scalar_type(), "core_cpu::weight_only_linear", [&]<typename T>(T) {
    const T* from = in.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    num_bits == 8 ? multiply_coded<8>(from, ldx, rows, weight, added_to, to)
                  : multiply_coded<4>(from, ldx, rows, weight, added_to, to);
  });
  return out;
}

CORE_CPU_DIRECT(weight_only_linear, weight_only_linear)

STABLE_TORCH_LIBRARY_FRAGMENT(core_cpu, m) {
  m.def("limit_rows_weight_only_linear(int kind, int rows) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CompositeExplicitAutograd, m) {
  m.impl("limit_rows_weight_only_linear", &limit_rows);
}

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CPU, m) {
  m.impl("weight_only_linear", Calls<weight_only_linear>::boxed);
}

}  // namespace core_cpu
