// How kernels are called: as ops, through torch's dispatcher, and as C functions, by graphs of AOTInductor.
//
// torch's stable headers register the ops: torch/library.h takes six seconds to compile.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "stable.h"

namespace core_cpu {

// How an argument of type T stands in the C function (Given) and in the dispatcher's stack (Taken), and how the kernel
// gets it from either.
template <typename T>
struct Argument {
  using Given = T;
  using Taken = T;

  static T of(T given) {
    return given;
  }

  static void drop(T) {}
};

template <>
struct Argument<bool> : Argument<int32_t> {
  using Taken = bool;
};

// Numbered as torch numbers dtypes.
template <>
struct Argument<at::ScalarType> {
  using Given = int32_t;
  using Taken = at::ScalarType;

  static at::ScalarType of(Given given) {
    return static_cast<at::ScalarType>(given);
  }

  static at::ScalarType of(Taken taken) {
    return taken;
  }

  static void drop(Taken) {}
};

template <>
struct Argument<const at::Tensor&> {
  using Given = AtenTensorHandle;
  using Taken = AtenTensorHandle;

  static const at::Tensor& of(AtenTensorHandle handle) {
    return *reinterpret_cast<const at::Tensor*>(handle);
  }

  static void drop(AtenTensorHandle handle) {
    delete reinterpret_cast<at::Tensor*>(handle);
  }
};

template <>
struct Argument<const std::optional<at::Tensor>&> {
  using Given = const AtenTensorHandle*;
  using Taken = std::optional<AtenTensorHandle>;

  static std::optional<at::Tensor> of(Given given) {
    return given == nullptr ? std::nullopt : std::optional(Argument<const at::Tensor&>::of(*given));
  }

  static std::optional<at::Tensor> of(const Taken& taken) {
    return of(taken ? &*taken : nullptr);
  }

  static void drop(const Taken& taken) {
    if (taken) {
      Argument<const at::Tensor&>::drop(*taken);
    }
  }
};

inline AtenTensorHandle handle_of(at::Tensor&& tensor) {
  return reinterpret_cast<AtenTensorHandle>(new at::Tensor(std::move(tensor)));
}

// What a kernel returns, a tensor or an array of them, as an array.
template <size_t N>
std::array<at::Tensor, N> results(std::array<at::Tensor, N>&& found) {
  return std::move(found);
}

inline std::array<at::Tensor, 1> results(at::Tensor&& found) {
  return {std::move(found)};
}

// The ways to call a kernel. It may throw: the code of graphs is C++ too.
template <auto kernel>
struct Calls;

template <typename Result, typename... Args, Result (*kernel)(Args...)>
struct Calls<kernel> {
  using Found = decltype(results(std::declval<Result>()));
  using Every = std::make_index_sequence<std::tuple_size_v<Found>>;

  // As the dispatcher calls: the arguments on the stack are the kernel's, and the results take their place.
  static void boxed(StableIValue* stack, uint64_t, uint64_t) {
    boxed(stack, std::index_sequence_for<Args...>{});
  }

  template <typename Indices>
  struct Direct;

  template <size_t... I>
  struct Direct<std::index_sequence<I...>> {
    template <size_t>
    using Handle = AtenTensorHandle*;

    // As AOTInductor calls its own C functions; the caller owns the results.
    static AOTITorchError call(typename Argument<Args>::Given... args, Handle<I>... made) {
      Found found = results(kernel(Argument<Args>::of(args)...));
      ((*made = handle_of(std::move(found[I]))), ...);
      return AOTI_TORCH_SUCCESS;
    }
  };

 private:
  using Stack = std::tuple<typename Argument<Args>::Taken...>;

  struct Taken {
    Stack values;

    ~Taken() {
      std::apply([](const auto&... each) { (Argument<Args>::drop(each), ...); }, values);
    }
  };

  template <size_t... I>
  static void boxed(StableIValue* stack, std::index_sequence<I...>) {
    const Taken taken{{unpacked<std::tuple_element_t<I, Stack>>(stack[I])...}};
    Found found = results(kernel(Argument<Args>::of(std::get<I>(taken.values))...));
    for (size_t i = 0; i < found.size(); ++i) {
      stack[i] = packed(handle_of(std::move(found[i])));
    }
  }
};

template <auto kernel>
using Direct = decltype(&Calls<kernel>::template Direct<typename Calls<kernel>::Every>::call);

template <auto kernel>
constexpr Direct<kernel> direct = &Calls<kernel>::template Direct<typename Calls<kernel>::Every>::call;

// The name by which graphs find a kernel of this build, and of no other.
#define CORE_CPU_DIRECT(name, kernel)                                              \
  extern "C" {                                                                     \
  extern __attribute__((visibility("default"))) Direct<kernel> core_cpu_direct_##name asm( \
      "core_cpu_" #name "_" CORE_CPU_ENDING);                                      \
  Direct<kernel> core_cpu_direct_##name = direct<kernel>;                          \
  }

// Call `body` with a number of the dtype, one of fp32, bf16 and fp16.
template <typename Body>
void with_dtype(at::ScalarType dtype, const char* op, const Body& body) {
  switch (dtype) {
    case at::kFloat:
      return body(0.f);
    case at::kBFloat16:
      return body(c10::BFloat16());
    case at::kHalf:
      return body(c10::Half());
    default:
      TORCH_CHECK(false, op, " takes fp32, bf16 and fp16, not ", dtype);
  }
}

// Return new memory for a contiguous tensor, without a way through the dispatcher.
inline at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_cpu(sizes, dtype));
}

}  // namespace core_cpu
