// What the parts of the device share.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <memory>

#include "ordering.h"

namespace simulated {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 8;
constexpr int64_t BYTES = int64_t(1) << 34;  // the memory of each device

struct Memory {  // the context of a DataPtr
  Block block;
  void* owned;                 // to be freed with it
  std::shared_ptr<void> kept;  // to be kept as long
};

struct Recording {  // what a thread does between the beginning and the end of a graph's capture
  std::vector<std::function<void()>> again;
  std::vector<at::Tensor> made;
};

extern Ordering ordering;
extern thread_local Recording* recording;  // null while nothing is captured
extern std::atomic<int64_t> launches;      // of graphs
extern std::atomic<int> pinned_blocks;  // how many are alive

int current_stream(int device);  // its number
c10::DataPtr tracked(void* data, size_t bytes, int device, void* owned, std::shared_ptr<void> kept);
Block* block_at(const void* data);
c10::Allocator* allocator();
at::Generator generator(int device);
void resize(const c10::Storage& storage, size_t bytes);
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);
void wait_on_host(const c10::Stream& stream, const std::string& why);
void reset();
std::string line();  // where Python is, outside of torch

}  // namespace simulated
