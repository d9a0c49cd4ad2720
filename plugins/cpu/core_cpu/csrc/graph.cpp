// Runs what AOTInductor compiled, bound to its inputs, without Python's lock. torch's own binding holds the lock for the
// whole step (pytorch/pytorch#197516): meanwhile a server could answer nobody.
//
// By torch's C functions alone: with headers of ATen this file would take five times as long to compile, and each first
// start waits for it.

#include "graph.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>

#include "stable.h"

namespace core_cpu {
namespace {

void check(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error(std::string("torch fails to ") + what);
  }
}

// A tensor that is somebody else's, once more.
AtenTensorHandle again(AtenTensorHandle tensor) {
  AtenTensorHandle made = nullptr;
  check(aoti_torch_new_tensor_handle(tensor, &made), "share a tensor");
  return made;
}

// Tensors that are ours.
class Tensors {
 public:
  Tensors() = default;
  Tensors(Tensors&&) = default;
  Tensors(const Tensors&) = delete;

  ~Tensors() {
    clear();
  }

  void set(std::vector<AtenTensorHandle>&& all) {
    clear();
    all_ = std::move(all);
  }

  void add(AtenTensorHandle tensor) {
    all_.push_back(tensor);
  }

  const std::vector<AtenTensorHandle>& all() const {
    return all_;
  }

  AtenTensorHandle take(int64_t index) {
    return std::exchange(all_.at(index), nullptr);
  }

 private:
  void clear() {
    for (AtenTensorHandle each : all_) {
      if (each != nullptr) {
        aoti_torch_delete_tensor_object(each);
      }
    }
    all_.clear();
  }

  std::vector<AtenTensorHandle> all_;
};

class WithoutAutograd {
 public:
  WithoutAutograd() {
    aoti_torch_grad_mode_set_enabled(false);
  }

  ~WithoutAutograd() {
    aoti_torch_grad_mode_set_enabled(before_);
  }

 private:
  bool before_ = aoti_torch_grad_mode_is_enabled();
};

// A graph whose code was compiled with model.h.
class Own : public Graph {
 public:
  explicit Own(const char* path) : object_(dlopen(path, RTLD_NOW | RTLD_LOCAL), &close) {
    if (!object_) {
      throw std::runtime_error(dlerror());
    }
    run_ = reinterpret_cast<Run>(dlsym(object_.get(), "core_cpu_model_run"));
    const auto* outputs = static_cast<const int64_t*>(dlsym(object_.get(), "core_cpu_model_outputs"));
    if (run_ == nullptr || outputs == nullptr) {
      throw std::runtime_error("it is no graph");
    }
    num_outputs_ = *outputs;
  }

  std::vector<AtenTensorHandle> run(const std::vector<AtenTensorHandle>& inputs) override {
    std::vector<AtenTensorHandle> given(inputs.size());  // not a member: threads may run steps of one graph
    std::transform(inputs.begin(), inputs.end(), given.begin(), &again);
    std::vector<AtenTensorHandle> outputs(num_outputs_);
    run_(given.data(), outputs.data());
    return outputs;
  }

 private:
  using Run = void (*)(AtenTensorHandle*, AtenTensorHandle*);

  static void close(void* object) {
    if (object != nullptr) {
      dlclose(object);
    }
  }

  std::unique_ptr<void, void (*)(void*)> object_;
  Run run_ = nullptr;
  int64_t num_outputs_ = 0;
};

// A graph with the tensors that it reads, and the results of its last run.
struct Step {
  Shared graph;
  Tensors inputs;
  Tensors outputs;
};

// step_output(int step, int index) -> Tensor, once for each output of a run.
void step_output(StableIValue* stack, uint64_t, uint64_t) {
  auto* step = reinterpret_cast<Step*>(unpacked<int64_t>(stack[0]));
  stack[0] = packed(step->outputs.take(unpacked<int64_t>(stack[1])));
}

STABLE_TORCH_LIBRARY_IMPL(core_cpu, CompositeExplicitAutograd, m) {
  m.impl("step_output", &step_output);
}

}  // namespace
}  // namespace core_cpu

CORE_CPU_EXPORT const char* core_cpu_failure() {
  return core_cpu::failure().c_str();
}

// The shared object at a path, or null.
CORE_CPU_EXPORT void* core_cpu_graph_open(const char* path) {
  using namespace core_cpu;
  return guarded(static_cast<void*>(nullptr), [&]() -> void* { return new Shared(new Own(path)); });
}

CORE_CPU_EXPORT void core_cpu_graph_close(void* graph) {
  delete static_cast<core_cpu::Shared*>(graph);
}

// A step of a graph on tensors, each given as `Tensor._cdata`; it holds them.
CORE_CPU_EXPORT void* core_cpu_step_open(void* graph, void** tensors, int64_t count) {
  using namespace core_cpu;
  return guarded(static_cast<void*>(nullptr), [&]() -> void* {
    auto step = std::make_unique<Step>(Step{*static_cast<Shared*>(graph), {}, {}});
    for (int64_t i = 0; i < count; ++i) {
      // A handle is the address of an at::Tensor, which is one pointer: `Tensor._cdata`.
      step->inputs.add(again(reinterpret_cast<AtenTensorHandle>(tensors + i)));
    }
    return step.release();
  });
}

CORE_CPU_EXPORT void core_cpu_step_close(void* step) {
  delete static_cast<core_cpu::Step*>(step);
}

// Run the graph; the number of its outputs, or -1.
CORE_CPU_EXPORT int64_t core_cpu_step_run(void* step) {
  using namespace core_cpu;
  return guarded(int64_t{-1}, [&]() -> int64_t {
    auto& self = *static_cast<Step*>(step);
    const WithoutAutograd without;
    self.outputs.set(self.graph->run(self.inputs.all()));
    return static_cast<int64_t>(self.outputs.all().size());
  });
}
