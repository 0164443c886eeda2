// The device: its indices, streams, events and memory, as torch asks for them.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <deque>

namespace simulated {

Ordering ordering;
std::atomic<int> pinned_blocks{0};
thread_local Recording* recording = nullptr;
std::atomic<int64_t> launches{0};
static std::map<char*, Block*> blocks;  // all that are alive, by address
static thread_local c10::DeviceIndex current_device = 0;
static thread_local int64_t current_streams[DEVICES] = {};
static std::atomic<int64_t> next_stream{1};
static std::deque<c10::CachingDeviceAllocator::DeviceStats> stats(DEVICES);

int current_stream(int device) {
  std::lock_guard<std::mutex> guard(ordering.mutex);
  return ordering.number({device, current_streams[device]});
}

// Memory ------------------------------------------------------------------------------------------------------------

static void freed(void* context) {
  std::unique_ptr<Memory> memory(static_cast<Memory*>(context));
  auto what = " (" + line() + ")";
  std::lock_guard<std::mutex> guard(ordering.mutex);
  ordering.free(memory->block, what);
  if (auto device = memory->block.home.first; device >= 0) stats[device].allocated_bytes[0].decrease(memory->block.bytes);
  if (memory->block.stream == HOST) pinned_blocks--;
  blocks.erase(memory->block.base);
  std::free(memory->owned);
}

c10::DataPtr tracked(void* data, size_t bytes, int device, void* owned, std::shared_ptr<void> kept) {
  if (data == nullptr) return {nullptr, nullptr, &freed, c10::Device(TYPE, (c10::DeviceIndex)std::max(device, 0))};
  auto memory = new Memory{{}, owned, std::move(kept)};
  memory->block.base = static_cast<char*>(data);
  memory->block.bytes = bytes;
  std::lock_guard<std::mutex> guard(ordering.mutex);
  blocks[memory->block.base] = &memory->block;
  if (device < 0) {
    pinned_blocks++;
    return {data, memory, &freed, c10::Device(c10::kCPU)};
  }
  memory->block.pooled = recording != nullptr;
  memory->block.home = {device, current_streams[device]};
  memory->block.stream = ordering.number(memory->block.home);
  stats[device].allocated_bytes[0].increase(bytes);
  return {data, memory, &freed, c10::Device(TYPE, (c10::DeviceIndex)device)};
}

Block* block_at(const void* data) {
  std::lock_guard<std::mutex> guard(ordering.mutex);
  auto after = blocks.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  if (after == blocks.begin()) return nullptr;
  auto* block = std::prev(after)->second;
  return static_cast<const char*>(data) < block->base + block->bytes ? block : nullptr;
}

void reset() {
  std::lock_guard<std::mutex> guard(ordering.mutex);
  ordering.reset(blocks);
}

static c10::DataPtr allocated(size_t bytes, int device) {
  void* data = bytes ? std::malloc(bytes) : nullptr;
  TORCH_CHECK(data || !bytes, "no memory for ", bytes, " bytes");
  return tracked(data, bytes, device, data, nullptr);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocated(bytes, current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { simulated::record_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override { return stats[device]; }
  void resetAccumulatedStats(c10::DeviceIndex device) override { stats[device].allocated_bytes[0].reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex device) override { stats[device].allocated_bytes[0].reset_peak(); }
  virtual std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    return {BYTES - stats[device].allocated_bytes[0].current, BYTES};
  }
};

static DeviceMemory device_memory;
REGISTER_ALLOCATOR(TYPE, &device_memory);
c10::Allocator* allocator() { return &device_memory; }

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocated(bytes, -1); }
  c10::DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

static PinnedMemory pinned_memory;

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  if (data.get_context() == nullptr) return;
  std::lock_guard<std::mutex> guard(ordering.mutex);
  auto number = ordering.number({stream.device_index(), stream.id()});
  static_cast<Memory*>(data.get_context())->block.recorded.insert(number);
}

// Streams and events ------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  c10::DeviceType type() const override { return TYPE; }

  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(0 <= device.index() && device.index() < DEVICES, "there is no ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  static c10::Stream stream_of(c10::Device device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  static c10::Device with_index(c10::Device device) {
    return device.has_index() ? device : c10::Device(TYPE, current_device);
  }
  c10::Stream getStream(c10::Device device) const override {
    device = with_index(device);
    return stream_of(device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(with_index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(with_index(device), next_stream++); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }

  static int number(const c10::Stream& stream) { return ordering.number({stream.device_index(), stream.id()}); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard<std::mutex> guard(ordering.mutex);
    if (!*event) *event = new Event;
    ordering.record(*static_cast<Event*>(*event), number(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    std::lock_guard<std::mutex> guard(ordering.mutex);
    ordering.wait(number(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    std::lock_guard<std::mutex> guard(ordering.mutex);
    return ordering.query(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> guard(ordering.mutex);
    return ordering.query(number(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_on_host(stream, "a stream's synchronize"); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto what = "an event's synchronize, " + line();
    double until;
    {
      std::lock_guard<std::mutex> guard(ordering.mutex);
      until = ordering.wait_on_host(*static_cast<Event*>(event), what);
    }
    sleep_until(until);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    auto what = "a device's synchronize, " + line();
    double until;
    {
      std::lock_guard<std::mutex> guard(ordering.mutex);
      until = ordering.wait_on_host_for_device(device, what);
    }
    sleep_until(until);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    simulated::record_stream(data, stream);
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    return (static_cast<Event*>(end)->time - static_cast<Event*>(start)->time) * 1e3;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void wait_on_host(const c10::Stream& stream, const std::string& why) {
  auto what = why + ", " + line();
  double until;
  {
    std::lock_guard<std::mutex> guard(ordering.mutex);
    until = ordering.wait_on_host(ordering.number({stream.device_index(), stream.id()}), what);
  }
  sleep_until(until);
}

// What torch asks of a backend --------------------------------------------------------------------------------------

at::Generator generator(int device) {  // the host runs the operations, with generators of its own kind
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int device = 0; device < DEVICES; device++) made.push_back(at::detail::createCPUGenerator(device));
    return made;
  }();
  return generators.at(device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({TYPE, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({TYPE, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    auto* block = block_at(data);
    return block != nullptr && block->stream == HOST;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize(storage, bytes); }
};

static Hooks hooks;
static bool installed = [] {
  at::setHostAllocator(TYPE, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace simulated
