// The most rows that a kernel multiplies itself, for each kind of call; set by row_limits.py as this machine was measured.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <vector>

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

  // Set all limits and return what they were.
  std::vector<int64_t> exchange(at::IntArrayRef limits) {
    TORCH_CHECK(limits.size() == N, "a kernel with ", N, " limits was given ", limits.size());
    std::vector<int64_t> before;
    for (size_t i = 0; i < N; ++i) {
      before.push_back(limits_[i].exchange(limits[i]));
    }
    return before;
  }

 private:
  std::array<std::atomic<int64_t>, N> limits_{};
};

}  // namespace core_cpu
