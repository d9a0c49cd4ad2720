// The device "shore" for tests: torch's PrivateUse1 with memory, a generator and streams, and hardly a kernel.
//
// Its memory is the host's, so that any operator can run on the processor. What a real device does not forgive is not
// forgiven here either: an operator takes no tensor of another device, except a number or an index that torch allows.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>
#include <sstream>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kShore = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
constexpr size_t kTotalBytes = size_t{4} << 30;

// Memory

std::atomic<int64_t> used_bytes{0}, peak_bytes{0};

struct Block {
  void* address;
  int64_t num_bytes;
};

void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  used_bytes -= block->num_bytes;
  std::free(block->address);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const Device device(kShore, 0);
    if (num_bytes == 0) return {nullptr, nullptr, [](void*) {}, device};
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 64, num_bytes) == 0, "shore: ", num_bytes, " bytes cannot be allocated");
    const auto now = used_bytes += static_cast<int64_t>(num_bytes);
    auto peak = peak_bytes.load();
    while (peak < now && !peak_bytes.compare_exchange_weak(peak, now)) {
    }
    return {address, new Block{address, static_cast<int64_t>(num_bytes)}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) {
      bytes->current = used_bytes;
      bytes->peak = peak_bytes;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { peak_bytes = used_bytes.load(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {kTotalBytes - used_bytes, kTotalBytes}; }
};

Allocator allocator;
REGISTER_ALLOCATOR(kShore, &allocator);

// Random numbers: the processor's engine, with a state apart from the host's

struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator engine) : GeneratorImpl(Device(kShore, 0), kKeys), engine(std::move(engine)) {}
  void set_current_seed(uint64_t seed) override { engine.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { engine.set_offset(offset); }
  uint64_t get_offset() const override { return engine.get_offset(); }
  uint64_t current_seed() const override { return engine.current_seed(); }
  uint64_t seed() override { return engine.seed(); }
  void set_state(const c10::TensorImpl& state) override { engine.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return engine.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(engine.clone()); }

  at::Generator engine;
};

at::Generator new_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }

const at::Generator& default_generator() {
  static const at::Generator generator = new_generator();
  return generator;
}

c10::GeneratorImpl& default_generator_impl() { return *default_generator().unsafeGetGeneratorImpl(); }

const at::Generator& engine_of(const at::Generator& generator) {
  auto* own = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(own != nullptr, "shore: expected a generator of shore, and got one of ", generator.device());
  return own->engine;
}

// One device; work is done when its call returns, so that streams and events only have names

std::atomic<int64_t> next_stream{1};
thread_local c10::StreamId current_stream = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static Stream named(c10::StreamId id) { return Stream(Stream::UNSAFE, Device(kShore, 0), id); }
  c10::DeviceType type() const override { return kShore; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(kShore, 0); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < 1, "shore: device ", int(device.index()), " does not exist: there is 1");
  }
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return named(current_stream); }
  Stream getDefaultStream(Device) const override { return named(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return named(next_stream++); }
  Stream getNewStream(Device, int) const override { return named(next_stream++); }
  Stream exchangeStream(Stream stream) const override { return named(std::exchange(current_stream, stream.id())); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return new_generator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

Hooks hooks;

// The kernels that torch cannot do without

// Views a tensor of shore as one of the processor, in the same memory.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  return at::from_blob(const_cast<void*>(tensor.storage().data()), tensor.sizes(), tensor.strides(),
                       tensor.storage_offset(), [](void*) {}, tensor.options().device(at::kCPU));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) { return at::cpu::_local_scalar_dense(on_host(tensor)); }

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(storage), offset, size, stride);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }

Tensor& set_whole_storage(Tensor& self, at::Storage source) { return at::native::set_(self, std::move(source)); }

// The operators named in SHORE_LACKS, separated by commas, are missing: neither kernel nor fallback.
void refuse_missing(const std::string& name) {
  static const std::set<std::string> missing = [] {
    std::set<std::string> names;
    const char* given = std::getenv("SHORE_LACKS");
    std::stringstream text(given == nullptr ? "" : given);
    for (std::string each; std::getline(text, each, ',');) names.insert(each);
    return names;
  }();
  TORCH_CHECK_NOT_IMPLEMENTED(missing.count(name) == 0, "shore: operator ", name, " is missing");
}

// Of whole numbers too, unlike the processor's: experts of transformers' models are counted so.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  refuse_missing("aten::histc");
  return at::histc(on_host(self).to(at::kDouble), bins, low, high).to(self.scalar_type()).to(self.device());
}

// All other operators

// Warns once for each operator, as the extensions of vendors do; the warning bears the line of the calling Python code.
void warn_once(const std::string& name) {
  static std::mutex mutex;
  static std::set<std::string> warned;
  const std::lock_guard<std::mutex> lock(mutex);
  if (warned.insert(name).second) TORCH_WARN("shore: ", name, " has no kernel of its own and runs on the processor");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = op.schema().name();
  refuse_missing(name);
  warn_once(name);
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  // Copies cross devices, and torch lets indices lie on the processor.
  const bool crosses = name == "aten::_to_copy" || name == "aten::copy_" || name.rfind("aten::index", 0) == 0 ||
                       name.rfind("aten::_index", 0) == 0 || name.rfind("aten::_unsafe_index", 0) == 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (arguments[i].type()->str().rfind("Generator", 0) == 0) {
      value = engine_of(value.isNone() ? default_generator() : value.toGenerator());
    } else if (value.isTensor() && value.toTensor().defined()) {
      const auto& tensor = value.toTensor();
      TORCH_CHECK(crosses || tensor.is_privateuseone() || tensor.dim() == 0, "shore: ", name, " takes argument '",
                  arguments[i].name(), "' on ", tensor.device(), "; it has to lie on shore");
    }
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("histc", histc);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// What torch_shore/__init__.py needs of this library.
TORCH_LIBRARY(shore, m) {
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("get_rng_state", [] { return default_generator().get_state(); });
  m.def("set_rng_state", [](const Tensor& state) { default_generator_impl().set_state(*state.unsafeGetTensorImpl()); });
  m.def("manual_seed", [](int64_t seed) { default_generator_impl().set_current_seed(seed); });
}

}  // namespace
