// What happened before what on a device whose streams run at the same time, and which accesses no order stands between.
//
// Every stream has a vector clock: for each stream, how many of its operations are done before the next operation here.
//
//     record an event    the event takes a copy of the stream's clock
//     wait for an event  the waiting stream's clock becomes the larger of both, number by number
//     the host waits     the host's clock does; whatever is submitted later, on any stream, starts after that
//
// Two operations of different streams that use the same bytes, one of them to write, must be ordered by these clocks. This
// is looked at when the second one is submitted, so the verdict does not depend on how long anything takes. All threads of
// the host share one clock: threads are ordered by queues and locks, which are not the device's.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {

using StreamKey = std::pair<int, int64_t>;  // device, stream
using Clock = std::vector<uint32_t>;        // by the number of a stream
constexpr int HOST = -1;                    // in place of the number of a stream

inline double now() {  // Python's time.perf_counter reads the same clock
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Access {
  size_t low, high;  // bytes of the block
  int stream;
  uint32_t time;  // the number of the operation on its stream
  bool write;
  std::string what;
};

struct Block {  // memory of a device, or pinned memory of the host
  char* base = nullptr;
  size_t bytes = 0;
  StreamKey home{-1, 0};           // the stream that it was allocated on; device -1: the host
  int stream = HOST;               // its number
  bool pooled = false;             // of a graph: nothing else gets this memory before the device is done with it
  std::vector<Access> accesses;    // those that a later one may have to be ordered after
  std::set<int> recorded;          // the streams of record_stream
};

struct Event {
  Clock clock;
  double time = 0;
  bool asked = false;  // whether it is over
};

struct Span {
  int stream;
  std::string what;
  double start, end;
};

struct Use {  // bytes that an operation is about to use
  Block* block;
  size_t low, high;
  bool write;
};

class Ordering {
 public:
  std::mutex mutex;  // guards all of this; never taken by who waits for Python's lock while holding it
  std::vector<std::string> errors, waits;
  std::vector<Span> spans;
  double seconds = 0, copy_seconds = 0;  // the simulated duration of an operation, of a copy between devices

  int number(StreamKey key) {
    auto [found, is_new] = numbers_.try_emplace(key, (int)keys_.size());
    if (is_new) keys_.push_back(key), clocks_.emplace_back(), ready_.push_back(0);
    return found->second;
  }

  // Submit an operation; returns its number on the stream.
  uint32_t submit(int stream, const std::vector<Use>& uses, const std::string& what, double duration) {
    auto& clock = clocks_[stream];
    join(clock, host_);
    if ((int)clock.size() <= stream) clock.resize(stream + 1);
    auto time = ++clock[stream];
    for (auto& use : uses) this->use(use, stream, time, what);
    auto start = std::max(ready_[stream], now());
    ready_[stream] = start + duration;
    if (duration > 0) spans.push_back({stream, what, start, ready_[stream]});
    return time;
  }

  // A use of memory by the host, at once. Only what devices have still to do there matters.
  void use_on_host(const Use& use, const std::string& what) {
    for (auto& past : use.block->accesses)
      if (overlap(past, use) && (past.write || use.write) && !done(past, host_))
        errors.push_back(what + " by the host " + (use.write ? "writes" : "reads") + " memory that " + name(past) +
                         (past.write ? " writes" : " reads") + ", without waiting for that stream");
  }

  void record(Event& event, int stream) {
    join(clocks_[stream], host_);
    event = {clocks_[stream], std::max(ready_[stream], now())};
  }

  void wait(int stream, const Event& event) {
    join(clocks_[stream], event.clock);
    ready_[stream] = std::max(ready_[stream], event.time);
  }

  // The host waits: for an event, or for all that a stream has to do. Returns until when.
  double wait_on_host(const Event& event, const std::string& what) {
    join(host_, event.clock);
    waits.push_back(what);
    return event.time;
  }

  double wait_on_host(int stream, const std::string& what) {
    Event event;
    record(event, stream);
    return wait_on_host(event, what);
  }

  double wait_on_host_for_device(int device, const std::string& what) {
    double until = now();
    for (size_t stream = 0; stream < keys_.size(); stream++)
      if (keys_[stream].first == device) join(host_, clocks_[stream]), until = std::max(until, ready_[stream]);
    waits.push_back(what);
    return until;
  }

  // Whether an event is over. The first time the answer is no, unless the host has waited: anything may take longer.
  bool query(Event& event) {
    bool waited = true;
    for (size_t stream = 0; stream < event.clock.size(); stream++)
      waited &= event.clock[stream] <= (stream < host_.size() ? host_[stream] : 0);
    if (!waited && (!std::exchange(event.asked, true) || event.time > now())) return false;
    join(host_, event.clock);
    return true;
  }

  bool query(int stream) {
    if (ready_[stream] > now()) return false;
    join(host_, clocks_[stream]);
    return true;
  }

  // Memory goes back to the stream that it came from, which may use it for something else at once.
  void free(Block& block, const std::string& what) {
    if (block.stream == HOST || block.pooled) return;  // torch waits before it reuses pinned memory
    auto& clock = clocks_[block.stream];
    for (auto& past : block.accesses)
      if (past.stream != block.stream && !block.recorded.count(past.stream) && !done(past, clock) && !done(past, host_))
        errors.push_back("memory of " + stream(block.stream) + " is freed " + what + " while " + name(past) +
                         " may still use it: neither does its stream wait, nor has record_stream been called");
  }

  // Forget all that happened, also in the blocks that are alive.
  void reset(const std::map<char*, Block*>& alive) {
    numbers_.clear(), keys_.clear(), clocks_.clear(), ready_.clear(), host_.clear();
    errors.clear(), waits.clear(), spans.clear();
    for (auto& [_, block] : alive) {
      block->accesses.clear(), block->recorded.clear();
      if (block->stream != HOST) block->stream = number(block->home);
    }
  }

  std::string stream(int stream) const {
    return "stream " + std::to_string(keys_[stream].first) + ":" + std::to_string(keys_[stream].second);
  }

 private:
  std::map<StreamKey, int> numbers_;
  std::vector<StreamKey> keys_;
  std::vector<Clock> clocks_;
  std::vector<double> ready_;  // when the stream has done what it has to do
  Clock host_;

  static void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
  }

  static bool done(const Access& past, const Clock& clock) {
    return past.stream < (int)clock.size() && past.time <= clock[past.stream];
  }

  static bool overlap(const Access& past, const Use& use) { return past.low < use.high && use.low < past.high; }

  std::string name(const Access& access) const { return access.what + " on " + stream(access.stream); }

  void use(const Use& use, int stream, uint32_t time, const std::string& what) {
    auto& accesses = use.block->accesses;
    auto& clock = clocks_[stream];
    for (auto& past : accesses)
      if (overlap(past, use) && (past.write || use.write) && !done(past, clock))
        errors.push_back(what + " on " + this->stream(stream) + (use.write ? " writes" : " reads") + " what " + name(past) +
                         (past.write ? " writes" : " reads") + ": nothing orders the two streams");
    // What comes later is ordered after this use, and so after those that this one is ordered after.
    auto covered = [&](const Access& past) {
      return use.low <= past.low && past.high <= use.high && (use.write || (!past.write && past.stream == stream));
    };
    accesses.erase(std::remove_if(accesses.begin(), accesses.end(), covered), accesses.end());
    accesses.push_back({use.low, use.high, stream, time, use.write, what});
  }
};

inline void sleep_until(double time) {
  auto left = time - now();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

}  // namespace simulated
