// What AOTInductor's code of a graph needs, in place of torch's headers of models and their containers, which take the
// compiler several times as long as that code. For graphs that hold no constants and call no op through the dispatcher.
#pragma once

#include <c10/util/generic_math.h>
#include <torch/csrc/inductor/aoti_runtime/scalar_to_tensor.h>
#include <torch/csrc/inductor/aoti_runtime/utils.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <array>
#include <memory>
#include <optional>

// As torch/csrc/inductor/aoti_include/common.h has it: up to a multiple of 64.
[[maybe_unused]] inline int64_t align(int64_t bytes) {
  return (bytes + 64 - 1) & -64;
}

namespace torch::aot_inductor {

using DeviceStreamType = void*;

// The names are those of the generated code.
struct AOTInductorModelKernels {};

class AOTInductorModel {
 public:
  void run_impl(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles, DeviceStreamType stream,
                AOTIProxyExecutorHandle proxy_executor);

 private:
  int32_t device_idx_ = -1;
  std::unique_ptr<AOTInductorModelKernels> kernels_ = std::make_unique<AOTInductorModelKernels>();
};

}  // namespace torch::aot_inductor

// What graph.cpp looks for: run on handles of tensors, which are the graph's from then on; the outputs are the caller's.
#define CORE_CPU_MODEL(count)                                                                           \
  extern "C" __attribute__((visibility("default"))) const int64_t core_cpu_model_outputs = count;       \
  extern "C" __attribute__((visibility("default"))) void core_cpu_model_run(AtenTensorHandle* inputs,   \
                                                                            AtenTensorHandle* outputs) { \
    torch::aot_inductor::AOTInductorModel().run_impl(inputs, outputs, nullptr, nullptr);                \
  }
