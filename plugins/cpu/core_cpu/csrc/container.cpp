// Opens graphs in torch's own container: those that hold constants, or call ops through the dispatcher, which only
// torch's class of this name knows how to do.

#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include "graph.h"

namespace core_cpu {
namespace {

class Contained : public Graph {
 public:
  explicit Contained(const char* path) : runner_(path, 1) {}

  std::vector<AtenTensorHandle> run(const std::vector<AtenTensorHandle>& inputs) override {
    std::vector<at::Tensor> given;
    given.reserve(inputs.size());
    for (AtenTensorHandle each : inputs) {
      given.push_back(*reinterpret_cast<const at::Tensor*>(each));
    }
    std::vector<AtenTensorHandle> found;
    for (at::Tensor& each : runner_.run(given)) {
      found.push_back(reinterpret_cast<AtenTensorHandle>(new at::Tensor(std::move(each))));
    }
    return found;
  }

 private:
  torch::inductor::AOTIModelContainerRunnerCpu runner_;
};

}  // namespace
}  // namespace core_cpu

CORE_CPU_EXPORT const char* core_cpu_container_failure() {
  return core_cpu::failure().c_str();
}

// The shared object at a path, or null; as `core_cpu_graph_open`.
CORE_CPU_EXPORT void* core_cpu_container_open(const char* path) {
  using namespace core_cpu;
  return guarded(static_cast<void*>(nullptr),
                 [&]() -> void* { return new Shared(std::make_shared<Contained>(path)); });
}
