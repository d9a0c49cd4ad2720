// A graph that AOTInductor compiled, however it is run.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// What Python calls by ctypes, which lets its lock go meanwhile.
#define CORE_CPU_EXPORT extern "C" __attribute__((visibility("default")))

namespace core_cpu {

class Graph {
 public:
  virtual ~Graph() = default;

  // Run on tensors that remain the caller's, and return the outputs, which are the caller's.
  virtual std::vector<AtenTensorHandle> run(const std::vector<AtenTensorHandle>& inputs) = 0;
};

// Python's handle of a graph, which a step of the graph holds too.
using Shared = std::shared_ptr<Graph>;

// Why this thread's last call of a function of this library failed.
inline std::string& failure() {
  static thread_local std::string why;
  return why;
}

// Return what `body` returns; where it throws, `otherwise`, and note why.
template <typename Body>
auto guarded(decltype(std::declval<Body>()()) otherwise, const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    failure() = error.what();
  } catch (...) {
    failure() = "an exception that is none of C++'s own";
  }
  return otherwise;
}

}  // namespace core_cpu
