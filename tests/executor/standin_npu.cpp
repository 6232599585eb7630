// A stand-in for torch_npu: PyTorch's private-use backend with its own memory, its own devices and no kernels.
//
// Every operator is computed by the CPU's kernel on copies, and its name is noted. Device memory is guarded: its
// pages may not be touched except while this file copies, so that code which takes a device tensor for a host
// tensor dies instead of passing by luck.
//
// Owns memory, device indices, generators, copies and the fallback. Knows nothing of the project.
// ASCEND_RT_VISIBLE_DEVICES lists the devices (two without it); STANDIN_NPU_SEEN names a folder for notes.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::Tensor;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

c10::DeviceIndex count_devices() {
  const char* listed = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  const std::string list = listed == nullptr ? "0,1" : listed;
  return static_cast<c10::DeviceIndex>(list.empty() ? 0 : 1 + std::count(list.begin(), list.end(), ','));
}

const c10::DeviceIndex kDevices = count_devices();
thread_local c10::DeviceIndex current = 0;

// --- memory: pages that nobody may touch but the copies below ---------------------------------------------

struct Memory final : c10::Allocator {
  static size_t pages(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (std::max<size_t>(bytes, 1) + page - 1) / page * page;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = pages(bytes);
    void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "the stand-in device is out of memory");
    std::lock_guard<std::mutex> lock(mutex);
    blocks[at] = Block{size, 0};
    return {at, at, &Memory::release, c10::Device(kType, current)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &Memory::release;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override;

  static void release(void* at) {
    std::lock_guard<std::mutex> lock(mutex);
    auto block = blocks.find(at);
    if (block != blocks.end()) {
      munmap(at, block->second.size);
      blocks.erase(block);
    }
  }

  struct Block {
    size_t size;
    int users;
  };
  static std::mutex mutex;
  static std::map<void*, Block> blocks;
};

std::mutex Memory::mutex;
std::map<void*, Memory::Block> Memory::blocks;
Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

// Opens the block that a storage lies in for as long as this lives; nests and is shared between threads.
struct Open {
  explicit Open(const void* start) {
    std::lock_guard<std::mutex> lock(Memory::mutex);
    auto block = Memory::blocks.find(const_cast<void*>(start));
    if (block == Memory::blocks.end()) {
      return;
    }
    at = block->first;
    if (block->second.users++ == 0) {
      mprotect(at, block->second.size, PROT_READ | PROT_WRITE);
    }
  }
  ~Open() {
    if (at == nullptr) {
      return;
    }
    std::lock_guard<std::mutex> lock(Memory::mutex);
    auto block = Memory::blocks.find(at);
    if (block != Memory::blocks.end() && --block->second.users == 0) {
      mprotect(at, block->second.size, PROT_NONE);
    }
  }
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;
  void* at = nullptr;
};

void Memory::copy_data(void* to, const void* from, size_t bytes) const {
  Open target(to), source(from);
  default_copy_data(to, from, bytes);
}

// --- devices and generators --------------------------------------------------------------------------------

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "there is no stand-in device ", static_cast<int>(index));
  return index;
}

c10::DeviceIndex exchange(c10::DeviceIndex index) {
  const auto before = current;
  current = checked(index);
  return before;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, exchange(device.index())};
  }
  c10::Device getDevice() const override {
    return {kType, current};
  }
  void setDevice(c10::Device device) const override {
    current = checked(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index) {
    device_ = c10::Device(kType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return kDevices > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    current = checked(index);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : exchange(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::vector<at::Generator> generators = [] {
      std::vector<at::Generator> made;
      for (c10::DeviceIndex i = 0; i < kDevices; ++i) {
        made.push_back(at::make_generator<DeviceGenerator>(i));
      }
      return made;
    }();
    return generators[checked(index < 0 ? current : index)];
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr larger = memory.allocate(bytes);
    if (storage.nbytes() > 0 && bytes > 0) {
      memory.copy_data(larger.get(), storage.data(), std::min(storage.nbytes(), bytes));
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(checked(index < 0 ? current : index));
  }
};

// --- what a backend must do itself: make tensors, view them, copy them ----------------------------------------

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current)));
  return at::detail::empty_generic(size, &memory, kKeys, at::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current)));
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, at::dtype_or_default(dtype));
}

// The same memory, seen as a tensor of the CPU; the block must be open while it is used.
Tensor host_view(const Tensor& tensor) {
  if (tensor.device().type() != kType) {
    return tensor;
  }
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(
          c10::Storage::use_byte_size_t(),
          tensor.storage().nbytes(),
          c10::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::DeviceType::CPU)),
          nullptr,
          false),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  Open source(from.storage().data()), target(to.storage().data());
  Tensor view = host_view(to);
  view.copy_(host_view(from));
  return to;
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format);

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) {
    return self;  // as it lies: a view keeps its strides
  }
  const auto needed = static_cast<size_t>(c10::multiply_integers(size)) * self.itemsize();
  if (self.storage().nbytes() < needed + self.storage_offset() * self.itemsize()) {
    Tensor larger = empty(size, self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt);
    if (self.numel() > 0) {
      const auto bytes = std::min(self.storage().nbytes(), larger.storage().nbytes());
      memory.copy_data(larger.storage().mutable_data(), self.storage().data(), bytes);
    }
    self.unsafeGetTensorImpl()->set_storage_keep_dtype(larger.storage());
    self.unsafeGetTensorImpl()->set_storage_offset(0);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Open block(self.storage().data());
  return at::native::_local_scalar_dense_cpu(host_view(self));
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {length}, {1});
}

Tensor& set_storage_strided(
    Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

// As torch_npu has it: a parameter in the host's memory may become one on the device.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  return self.layout() == from.layout();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_strided);
}

// --- everything else: the CPU's kernel, counted -------------------------------------------------------------

std::mutex seen_mutex;
std::set<std::string> seen;

// With the dtype of the first tensor. Written at once: a worker is killed at the end of a run.
void note(const c10::OperatorName& op, const torch::jit::Stack& stack) {
  std::string name = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
  const auto tensor = std::find_if(stack.begin(), stack.end(), [](const c10::IValue& v) { return v.isTensor(); });
  if (tensor != stack.end() && tensor->toTensor().defined()) {
    name += std::string(" ") + c10::toString(tensor->toTensor().scalar_type());
  }
  std::lock_guard<std::mutex> lock(seen_mutex);
  const char* folder = std::getenv("STANDIN_NPU_SEEN");
  if (seen.insert(name).second && folder != nullptr) {
    std::ofstream(std::string(folder) + "/" + std::to_string(getpid()) + ".operators", std::ios::app) << name << "\n";
  }
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  note(op.operator_name(), *stack);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

void start() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

int64_t device_count() {
  return kDevices;
}

int64_t current_device() {
  return current;
}

void set_device(int64_t index) {
  current = checked(static_cast<c10::DeviceIndex>(index));
}

TORCH_LIBRARY(standin_npu, m) {
  m.def("start() -> ()", &start);
  m.def("device_count() -> int", &device_count);
  m.def("current_device() -> int", &current_device);
  m.def("set_device(int index) -> ()", &set_device);
}

}  // namespace
