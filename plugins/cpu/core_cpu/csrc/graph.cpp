// Runs what AOTInductor compiled, bound to its inputs, without Python's lock. torch's own binding holds the lock for the
// whole step (pytorch/pytorch#197516): meanwhile a server could answer nobody.

#include <c10/core/GradMode.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "binding.h"

namespace core_cpu {
namespace {

using Graph = std::shared_ptr<torch::inductor::AOTIModelContainerRunnerCpu>;

// A graph with the tensors that it reads, and the results of its last run.
struct Step {
  Graph graph;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
};

// Why the last call of this thread failed.
thread_local std::string failure;

template <typename Body>
auto guarded(decltype(std::declval<Body>()()) otherwise, const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    failure = error.what();
  } catch (...) {
    failure = "an exception that is none of C++'s own";
  }
  return otherwise;
}

Step& step_at(StableIValue pointer) {
  return *reinterpret_cast<Step*>(unpacked<int64_t>(pointer));
}

// step_output(int step, int index) -> Tensor, once for each output of a run.
void step_output(StableIValue* stack, uint64_t, uint64_t) {
  auto& outputs = step_at(stack[0]).outputs;
  stack[0] = packed(handle_of(std::move(outputs.at(unpacked<int64_t>(stack[1])))));
}

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CompositeExplicitAutograd, m) {
  m.impl("step_output", &step_output);
}

}  // namespace
}  // namespace core_cpu

// What graph.py calls by ctypes, which lets Python's lock go meanwhile.
#define CORE_CPU_EXPORT extern "C" __attribute__((visibility("default")))

CORE_CPU_EXPORT const char* core_cpu_failure() {
  return core_cpu::failure.c_str();
}

// The shared object at a path, or null.
CORE_CPU_EXPORT void* core_cpu_graph_open(const char* path) {
  return core_cpu::guarded(static_cast<void*>(nullptr), [&]() -> void* {
    auto runner = std::make_shared<torch::inductor::AOTIModelContainerRunnerCpu>(path, 1);
    return new core_cpu::Graph(std::move(runner));
  });
}

CORE_CPU_EXPORT void core_cpu_graph_close(void* graph) {
  delete static_cast<core_cpu::Graph*>(graph);
}

// A step of a graph on tensors, each given as `Tensor._cdata`; it holds them.
CORE_CPU_EXPORT void* core_cpu_step_open(void* graph, void* const* tensors, int64_t count) {
  auto* step = new core_cpu::Step{*static_cast<core_cpu::Graph*>(graph), {}, {}};
  step->inputs.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    auto* impl = static_cast<c10::TensorImpl*>(tensors[i]);
    step->inputs.emplace_back(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
  }
  return step;
}

CORE_CPU_EXPORT void core_cpu_step_close(void* step) {
  delete static_cast<core_cpu::Step*>(step);
}

// Run the graph; the number of its outputs, or -1.
CORE_CPU_EXPORT int64_t core_cpu_step_run(void* step) {
  return core_cpu::guarded(int64_t{-1}, [&]() -> int64_t {
    auto& self = *static_cast<core_cpu::Step*>(step);
    const c10::AutoGradMode without(false);
    self.outputs = self.graph->run(self.inputs);
    return static_cast<int64_t>(self.outputs.size());
  });
}
