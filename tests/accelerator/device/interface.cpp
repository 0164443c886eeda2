// What Python asks of the device: torch.ops.simulated, and where Python is.
#include <Python.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include "device.h"

namespace simulated {

static bool foreign(const char* file) {
  return strstr(file, "/site-packages/") || strstr(file, "/contextlib.py") || file[0] == '<';
}

static std::string python_line() {
  std::string found;
  auto* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    auto* code = PyFrame_GetCode(frame);
    auto* file = PyUnicode_AsUTF8(code->co_filename);
    if (file && !foreign(file)) found = std::string(file) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    auto* before = found.empty() ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = before;
  }
  return found;
}

// The innermost line of Python on this thread that is not torch's; in backward also the node, which mostly has none. A
// thread that has never run Python is not asked, so it does not wait for Python's lock.
std::string line() {
  std::string found;
  if (auto node = torch::autograd::get_current_node()) found = "backward of " + node->name();
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return found.empty() ? "no line of Python" : found;
  auto state = PyGILState_Ensure();
  auto python = python_line();
  PyGILState_Release(state);
  return found.empty() ? python : python.empty() ? found : found + ", " + python;
}

static std::vector<std::string> all_spans() {
  std::vector<std::string> found;
  std::lock_guard<std::mutex> guard(ordering.mutex);
  for (auto& span : ordering.spans)
    found.push_back(ordering.stream(span.stream) + "|" + span.what + "|" + std::to_string(span.start) + "|" + std::to_string(span.end));
  return found;
}

TORCH_LIBRARY(simulated, m) {
  m.def("errors", [] {
    std::lock_guard<std::mutex> guard(ordering.mutex);
    return ordering.errors;
  });
  m.def("waits", [] {
    std::lock_guard<std::mutex> guard(ordering.mutex);
    return ordering.waits;
  });
  m.def("spans", [] { return all_spans(); });
  m.def("durations", [](double seconds, double copy_seconds) {
    std::lock_guard<std::mutex> guard(ordering.mutex);
    ordering.seconds = seconds, ordering.copy_seconds = copy_seconds;
  });
  m.def("reset", [] { reset(); });
  m.def("launches", [] { return (int64_t)launches; });
  m.def("generator", [](int64_t device) { return generator((int)device); });
}

}  // namespace simulated
