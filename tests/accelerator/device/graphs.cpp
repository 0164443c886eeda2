// Graphs: operators that are captured once, and launched again as a whole, into the same memory.
#include "device.h"

#if __has_include(<ATen/core/GraphImplInterface.h>)  // since PyTorch 2.13
#include <ATen/core/GraphImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace simulated {

struct Graph final : at::GraphImplInterface {
  Recording recorded;
  explicit Graph(const at::GraphImplArgs&) {}

  void capture_begin(c10::MempoolId_t, at::GraphCaptureMode) override {
    c10::impl::VirtualGuardImpl guard(TYPE);
    TORCH_CHECK(guard.getStream(guard.getDevice()).id() != 0, "graphs are captured on a stream other than the default one");
    TORCH_CHECK(!recording, "a graph is being captured on this thread already");
    recording = &recorded;
  }

  // What was computed while the operators were captured is no result: nobody may read it.
  void capture_end() override {
    TORCH_CHECK(recording == &recorded, "nothing is being captured on this thread");
    recording = nullptr;
    for (auto& tensor : recorded.made)
      if (tensor.defined()) memset(tensor.storage().mutable_data(), 0xFF, tensor.storage().nbytes());
  }

  void replay() override {
    for (auto& operation : recorded.again) operation();
    launches++;
  }

  void instantiate() override {}
  void reset() override { recorded = {}; }
  c10::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}
};

}  // namespace simulated

namespace at {
REGISTER_GRAPH_IMPL(SIM, simulated::Graph);
}
#endif
