// The most rows that a kernel multiplies itself, for each kind of call; set by row_limits.py as this machine was measured.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>

namespace core_cpu {

template <size_t N>
class RowLimits {
 public:
  // Return the limit of fp32, bf16 or fp16, which stand in this order from kind `first` on; 0 for other dtypes.
  int64_t of(at::ScalarType dtype, size_t first = 0) const {
    switch (dtype) {
      case at::kFloat:
        return limits_[first];
      case at::kBFloat16:
        return limits_[first + 1];
      case at::kHalf:
        return limits_[first + 2];
      default:
        return 0;
    }
  }

  // Set the limit of a kind and return what it was.
  int64_t exchange(size_t kind, int64_t rows) {
    TORCH_CHECK(kind < N, "a kernel with ", N, " limits was given one of kind ", kind);
    return limits_[kind].exchange(rows);
  }

 private:
  std::array<std::atomic<int64_t>, N> limits_{};
};

}  // namespace core_cpu
