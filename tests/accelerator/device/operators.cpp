// The operators: the host computes each at once, in the device's memory, and its uses of that memory are written down as
// those of the current stream. Copies wait for streams and for the host where CUDA's do.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

namespace simulated {

using c10::IValue;
using Stack = torch::jit::Stack;

static thread_local bool computing = false;  // the host is at work for a device

struct Computing {
  bool before = computing;
  Computing() { computing = true; }
  ~Computing() { computing = before; }
};

static bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == TYPE;
}

static c10::Stream stream_on(c10::Device device) { return c10::impl::VirtualGuardImpl(TYPE).getStream(device); }

// Memory of the device as the host sees it ------------------------------------------------------------------------

// A tensor of the host with the same memory. If it is resized, that memory is new.
static at::Tensor seen(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  auto storage = tensor.storage();
  c10::Storage here(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true));
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(here), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// Memory that the host has made becomes the device's.
static c10::DataPtr adopted(const c10::Storage& storage, int device) {
  auto kept = std::make_shared<c10::Storage>(storage);
  return tracked(storage.mutable_data(), storage.nbytes(), device, nullptr, kept);
}

static at::Tensor with_storage(const c10::Storage& storage, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

static void use(std::vector<Use>& uses, const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0 || tensor.layout() != at::kStrided) return;
  auto size = tensor.element_size();
  auto* block = block_at(tensor.const_data_ptr());
  if (block == nullptr) return;
  size_t low = static_cast<const char*>(tensor.const_data_ptr()) - block->base, high = low + size;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) high += (tensor.size(dim) - 1) * tensor.stride(dim) * size;
  uses.push_back({block, low, high, write});
}

static void submit(c10::Device device, const std::vector<Use>& uses, const std::string& what, double seconds) {
  if (recording) return;  // nothing runs yet
  auto stream = current_stream(device.index());
  std::lock_guard<std::mutex> guard(ordering.mutex);
  ordering.submit(stream, uses, what, seconds);
}

// All operators ----------------------------------------------------------------------------------------------------

struct Argument {
  at::Tensor tensor, seen;
  bool write;
};

struct Call {
  c10::OperatorHandle op;
  Stack* stack;
  const c10::FunctionSchema& schema;
  std::vector<Argument> arguments;
  std::optional<c10::Device> device;

  Call(const c10::OperatorHandle& op, Stack* stack) : op(op), stack(stack), schema(op.schema()) {}

  void run() {
    find_device();
    c10::DeviceGuard guard(*device);
    auto taken_before = torch::jit::last(*stack, schema.arguments().size()).vec();
    auto begin = stack->size() - schema.arguments().size();
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      auto& argument = schema.arguments()[i];
      auto write = argument.alias_info() && argument.alias_info()->isWrite();
      (*stack)[begin + i] = taken((*stack)[begin + i], argument, write);
    }
    compute();
    std::vector<Use> uses;
    for (auto& argument : arguments) {
      if (argument.write) keep_resized(argument);
      use(uses, argument.tensor, argument.write);
    }
    bool waits = waits_for_host(), only_views = !schema.returns().empty();
    begin = stack->size() - schema.returns().size();
    for (size_t i = 0; i < schema.returns().size(); i++) {
      auto* alias = schema.returns()[i].alias_info();
      auto& value = (*stack)[begin + i];
      only_views &= alias && !alias->isWrite();
      waits |= !value.isTensor() && !value.isTensorList() && !value.isNone();
      value = given(value, alias && alias->isWrite(), uses);
    }
    if (only_views) return;
    auto what = schema.name() + ", " + line();
    if (recording) record(taken_before, what, waits);
    submit(*device, uses, what, ordering.seconds);
    if (waits) wait_on_host(stream_on(*device), what);
  }

  // Keep the operator for the graph. What it has computed now serves to know its results.
  void record(const std::vector<IValue>& inputs, const std::string& what, bool waits) {
    TORCH_CHECK(!waits, what, " needs the host, which a graph does not wait for");
    for (auto& argument : arguments)
      TORCH_CHECK(!argument.write || block_at(argument.tensor.const_data_ptr())->pooled, what, " writes memory that is not the graph's");
    std::vector<at::Tensor> results;
    for (auto& value : torch::jit::last(*stack, schema.returns().size()))
      each(value, [&](const at::Tensor& tensor) { results.push_back(tensor); });
    recording->made.insert(recording->made.end(), results.begin(), results.end());
    recording->again.push_back([op = op, inputs, results, what, device = *device] {
      Stack stack = inputs;
      Call(op, &stack).run_again(results, what, device);
    });
  }

  // Compute a recorded operator, into the same memory as when it was recorded.
  void run_again(const std::vector<at::Tensor>& results, const std::string& what, c10::Device there) {
    device = there;
    c10::DeviceGuard guard(there);
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      auto* alias = schema.arguments()[i].alias_info();
      (*stack)[i] = taken((*stack)[i], schema.arguments()[i], alias && alias->isWrite());
    }
    compute();
    std::vector<Use> uses;
    for (auto& argument : arguments) use(uses, argument.tensor, argument.write);
    size_t next = 0;
    for (auto& value : *stack)
      each(value, [&](const at::Tensor& found) {
        auto& result = results[next++];
        if (!result.defined()) return;
        auto memory = seen(result);
        Computing here;
        if (memory.data_ptr() != found.data_ptr()) memory.copy_(found);
        use(uses, result, true);
      });
    submit(there, uses, what, ordering.seconds);
  }

  // Operators that draw numbers and take no generator draw from the host's, which stands in for the device's meanwhile.
  void compute() {
    Computing here;
    auto draws = op.hasTag(at::Tag::nondeterministic_seeded) && !schema.argumentIndexWithName("generator");
    if (!draws) return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> guard(one_at_a_time);
    auto host = at::detail::getDefaultCPUGenerator(), own = generator(device->index());
    auto before = host.get_state();
    host.set_state(own.get_state());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    own.set_state(host.get_state());
    host.set_state(before);
  }

  void find_device() {
    auto found = [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) {
        TORCH_CHECK(!tensor.defined() || tensor.dim() == 0 || !tensor.is_cpu() || schema.name() == "aten::index",
                    "Expected all tensors to be on the same device, but ", schema.name(), " got one on ", tensor.device());
        return;
      }
      TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but ",
                  schema.name(), " got tensors on ", device->str(), " and ", tensor.device());
      device = tensor.device();
    };
    auto values = torch::jit::last(*stack, schema.arguments().size());
    for (auto& value : values) each(value, found);
    for (auto& value : values)
      if (!device && value.isDevice() && value.toDevice().type() == TYPE) device = value.toDevice();
    auto current = c10::impl::VirtualGuardImpl(TYPE).getDevice();
    if (!device || !device->has_index()) device = current;
  }

  template <class F>
  static void each(const IValue& value, F found) {
    if (value.isTensor()) found(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorList()) found(tensor);
    if (value.isOptionalTensorList())
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        if (tensor) found(*tensor);
  }

  at::Tensor taken(const at::Tensor& tensor, bool write) {
    if (!on_device(tensor)) return tensor;
    arguments.push_back({tensor, seen(tensor), write});
    return arguments.back().seen;
  }

  IValue taken(const IValue& value, const c10::Argument& argument, bool write) {
    if (value.isTensor()) return taken(value.toTensor(), write);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(taken(tensor, write));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional(taken(*tensor, write)) : tensor);
      return list;
    }
    if (value.isDevice()) return value.toDevice().type() == TYPE ? IValue(c10::Device(c10::kCPU)) : value;
    if (argument.name() == "generator") return IValue(generator(device->index()));
    return value;
  }

  void keep_resized(Argument& argument) {
    auto &tensor = argument.tensor, &here = argument.seen;
    if (here.storage().data() != tensor.storage().data() || here.storage().nbytes() != tensor.storage().nbytes()) {
      auto storage = tensor.storage();
      auto bytes = here.storage().nbytes();
      storage.set_data_ptr_noswap(adopted(here.storage(), device->index()));
      storage.set_nbytes(bytes);
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    if (tensor.sizes() != here.sizes() || tensor.strides() != here.strides())
      impl->set_sizes_and_strides(here.sizes(), here.strides());
  }

  std::map<c10::StorageImpl*, c10::Storage> made;  // results may share memory

  at::Tensor given(const at::Tensor& result, std::vector<Use>& uses) {
    if (!result.defined()) return result;
    for (auto& argument : arguments)
      if (argument.seen.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
        return with_storage(argument.tensor.storage(), result);
    auto& storage = made[result.storage().unsafeGetStorageImpl()];
    if (!storage) {
      auto bytes = result.storage().nbytes();
      storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), bytes, adopted(result.storage(), device->index()), allocator(), true));
    }
    auto tensor = with_storage(storage, result);
    use(uses, tensor, true);
    return tensor;
  }

  IValue given(const IValue& value, bool same, std::vector<Use>& uses) {
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(given(tensor, uses));
      return list;
    }
    if (!value.isTensor()) return value;
    auto result = value.toTensor();
    if (same)
      for (auto& argument : arguments)
        if (argument.seen.is_same(result)) return argument.tensor;
    return given(result, uses);
  }

  // Operators whose result has a size that depends on the data: a host must know it before it goes on.
  bool waits_for_host() const {
    static const std::set<std::string> names = {
        "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    };
    if (names.count(schema.name())) return true;
    if (schema.name() != "aten::index") return false;
    auto masks = [](const Argument& argument) {
      return argument.tensor.scalar_type() == at::kBool || argument.tensor.scalar_type() == at::kByte;
    };
    return std::any_of(arguments.begin() + 1, arguments.end(), masks);
  }
};

static void run(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// Backends other than torch's own get convolutions under these names.
static void convolution(const c10::OperatorHandle&, Stack* stack) {
  Call(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack).run();
}

static void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  auto channels = stack->at(stack->size() - 10).toTensor().size(1);  // the gradient is the first of ten arguments
  stack->insert(stack->end() - 7, IValue(std::vector<int64_t>{channels}));
  Call(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack).run();
}

// Those that CUDA has of its own -----------------------------------------------------------------------------------

static at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

static at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

static void order(c10::Device waiting, c10::Device done) {
  auto first = current_stream(done.index()), second = current_stream(waiting.index());
  std::lock_guard<std::mutex> guard(ordering.mutex);
  Event event;
  ordering.record(event, first);
  ordering.wait(second, event);
}

// Between devices the source's current stream copies, after all that the target's has to do, which waits for the copy.
// Between device and host the host waits, unless the copy is asynchronous: then pinned memory is used by the stream. The
// contents of other memory are read before the call returns, and nobody knows when they are written.
static at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  {
    Computing here;
    seen(to).copy_(seen(from));
  }
  auto what = "a copy from " + from.device().str() + " to " + to.device().str() + ", " + line();
  if (recording) {
    TORCH_CHECK(from.device() == to.device(), what, " leaves the device that a graph is of");
    TORCH_CHECK(block_at(to.const_data_ptr())->pooled, what, " writes memory that is not the graph's");
    recording->made.push_back(to);
    recording->again.push_back([from, to] { copy_from(from, to, true); });
    return to;
  }
  auto between = from.device() != to.device() && on_device(from) && on_device(to);
  auto device = on_device(from) ? from.device() : to.device();
  std::vector<Use> uses;
  use(uses, from, false);
  use(uses, to, true);
  if (between) order(from.device(), to.device());
  submit(device, uses, what, from.device() == to.device() ? ordering.seconds : ordering.copy_seconds);
  if (between) order(to.device(), from.device());
  if (!between && from.device() != to.device() && !non_blocking) wait_on_host(stream_on(device), what);
  return to;
}

static at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

static at::Scalar local_scalar(const at::Tensor& tensor) {
  auto what = "item, " + line();
  TORCH_CHECK(!recording, what, " needs the host, which a graph does not wait for");
  std::vector<Use> uses;
  use(uses, tensor, false);
  submit(tensor.device(), uses, what, 0);
  wait_on_host(stream_on(tensor.device()), what);
  Computing here;
  return at::_local_scalar_dense(seen(tensor));
}

void resize(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto data = allocator()->allocate(bytes);
  if (storage.data()) memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

static const at::Tensor& resize_(const at::Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  auto bytes = (impl->numel() + impl->storage_offset()) * tensor.element_size();
  if (tensor.storage().nbytes() < bytes) resize(tensor.storage(), bytes);
  return tensor;
}

static at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return tensor;
}

static at::Tensor& set_whole(at::Tensor& tensor, at::Storage source) {
  auto size = (int64_t)(source.nbytes() / tensor.element_size());
  return set_storage(tensor, std::move(source), 0, {size}, {1});
}

static void record(at::Tensor& tensor, c10::Stream stream) { record_stream(tensor.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record);
  m.impl("resize_", &resize_);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
}

// Copies look at these bits themselves; else torch would copy the tensor first, and so without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Autocast ----------------------------------------------------------------------------------------------------------

// The few operators that autocast gives its dtype, as for other devices; all others are as they are.
static void cast(const c10::OperatorHandle& op, Stack* stack) {
  auto dtype = at::autocast::get_autocast_dtype(TYPE);
  c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++)
    if (auto& value = (*stack)[i]; value.isTensor() && on_device(value.toTensor()))
      value = at::autocast::cached_cast(dtype, value.toTensor(), TYPE);
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto name : {"linear", "matmul", "mm", "addmm", "bmm", "conv2d", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast>());
}

// What the host reads and writes itself ----------------------------------------------------------------------------

// Called before each operator. Of interest are those that the host computes with pinned memory.
static std::unique_ptr<at::ObserverContext> host_operator(const at::RecordFunction& call) {
  if (computing || !pinned_blocks) return nullptr;
  auto name = call.operator_name();
  if (!name) return nullptr;
  std::vector<at::Tensor> pinned;
  bool device = false;
  for (auto& value : call.inputs()) {
    Call::each(value, [&](const at::Tensor& tensor) {
      device |= on_device(tensor);
      if (!tensor.defined() || !tensor.is_cpu() || tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.layout() != at::kStrided || !tensor.numel()) return;
      if (auto* block = block_at(tensor.const_data_ptr()); block && block->stream == HOST) pinned.push_back(tensor);
    });
  }
  if (device || pinned.empty()) return nullptr;
  auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op) return nullptr;
  auto& schema = op->schema();
  auto is_view = !schema.returns().empty() && schema.returns()[0].alias_info() && !schema.returns()[0].alias_info()->isWrite();
  if (is_view || (name->name != "aten::copy_" && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU))) return nullptr;
  std::vector<Use> uses;
  for (size_t i = 0; i < call.inputs().size() && i < schema.arguments().size(); i++) {
    auto* alias = schema.arguments()[i].alias_info();
    Call::each(call.inputs()[i], [&](const at::Tensor& tensor) { use(uses, tensor, alias && alias->isWrite()); });
  }
  auto what = schema.name() + ", " + line();
  std::lock_guard<std::mutex> guard(ordering.mutex);
  for (auto& use : uses) ordering.use_on_host(use, what);
  return nullptr;
}

static auto observed = at::addGlobalCallback(
    at::RecordFunctionCallback(&host_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));

}  // namespace simulated
