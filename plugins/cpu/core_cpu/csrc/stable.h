// What stands in a place of the dispatcher's stack, by torch's stable headers alone.
#pragma once

#include <torch/csrc/stable/library.h>

namespace core_cpu {

// torch 2.8 has both ways in no namespace.
#if __has_include(<torch/csrc/stable/stableivalue_conversions.h>)
#define CORE_CPU_STABLE torch::stable::detail
#else
#define CORE_CPU_STABLE
#endif

template <typename T>
T unpacked(StableIValue place) {
  return CORE_CPU_STABLE::to<T>(place);
}

template <typename T>
StableIValue packed(T value) {
  return CORE_CPU_STABLE::from(value);
}

}  // namespace core_cpu
