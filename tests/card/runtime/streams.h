// Streams as queues of work, events as marks in them.
//
// Work of one stream runs in order. Between streams only events order it, so each of these schedules is one that a GPU
// may choose, and a program that waits where it must computes the same under all of them:
//
//   now            everything runs when it is issued
//   late-copies    the default stream runs at once; another stream only when somebody waits for it
//   late-compute   other streams run at once; the default stream only when somebody waits for it
//   shuffled:SEED  whenever something is issued, some work that may run does, of a stream drawn at random
#pragma once

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>

namespace card {

using Work = std::function<void()>;

/// Position `position` of the stream that `stream` names: done when that much of its work has run.
struct Mark {
  void* stream = nullptr;
  uint64_t position = 0;
};

class Streams {
 public:
  static Streams& all() {
    static auto* streams = new Streams; // never destroyed: other libraries use it while the process ends
    return *streams;
  }

  bool now() const { return schedule_ == Schedule::now; }

  /// Takes a schedule by its name, once everything that waits has run; false where there is none of that name.
  bool choose(const std::string& name) {
    finish_all();
    const auto colon = name.find(':');
    static const std::map<std::string, Schedule> known = {{"now", Schedule::now},
                                                          {"late-copies", Schedule::late_copies},
                                                          {"late-compute", Schedule::late_compute},
                                                          {"shuffled", Schedule::shuffled}};
    const auto found = known.find(name.substr(0, colon));
    if (found == known.end()) return false;
    std::lock_guard<std::recursive_mutex> guard(lock_);
    schedule_ = found->second;
    random_.seed(colon == std::string::npos ? 0 : std::strtoul(name.c_str() + colon + 1, nullptr, 10));
    return true;
  }

  void issue(void* stream, Work work) {
    if (now()) {
      work();
      return;
    }
    std::lock_guard<std::recursive_mutex> guard(lock_);
    push(stream, {std::move(work), {}});
    run_what_the_schedule_says(stream);
  }

  void record(void* event, void* stream) {
    if (now()) return;
    std::lock_guard<std::recursive_mutex> guard(lock_);
    events_[event] = {stream, queues_[stream].issued};
  }

  void forget(void* event) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    events_.erase(event);
  }

  /// Lets `stream` wait for `event` as it was last recorded; for one that never was, nobody waits.
  void wait(void* stream, void* event) {
    if (now()) return;
    std::lock_guard<std::recursive_mutex> guard(lock_);
    auto found = events_.find(event);
    if (found == events_.end() || found->second.stream == stream || done(found->second)) return;
    push(stream, {{}, found->second});
    run_what_the_schedule_says(stream);
  }

  bool is_done(void* event) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    auto found = events_.find(event);
    return found == events_.end() || done(found->second);
  }

  bool is_idle(void* stream) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    return queues_[stream].items.empty();
  }

  void finish_event(void* event) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    auto found = events_.find(event);
    if (found != events_.end()) run_until(Mark(found->second));
  }

  void finish(void* stream) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    run_until({stream, queues_[stream].issued});
  }

  void finish_all() {
    if (now()) return;
    std::lock_guard<std::recursive_mutex> guard(lock_);
    for (auto& [stream, queue] : queues_) run_until({stream, queue.issued});
  }

 private:
  enum class Schedule { now, late_copies, late_compute, shuffled };

  struct Item {
    Work work; // empty: waits for `after`
    Mark after;
  };

  struct Queue {
    std::deque<Item> items;
    uint64_t issued = 0, ran = 0;
  };

  Streams() {
    const char* given = std::getenv("CARD_STREAMS");
    if (!choose(given ? given : "now")) std::abort();
  }

  void push(void* stream, Item item) {
    auto& queue = queues_[stream];
    queue.items.push_back(std::move(item));
    ++queue.issued;
  }

  bool done(const Mark& mark) { return queues_[mark.stream].ran >= mark.position; }

  /// Runs work of one stream in order, and of others as far as it waits for them. A mark is older than the item that
  /// waits for it, so this ends.
  void run_until(Mark mark) {
    auto& queue = queues_[mark.stream];
    while (queue.ran < mark.position && !queue.items.empty()) run_one(queue);
  }

  void run_one(Queue& queue) {
    Item item = std::move(queue.items.front());
    queue.items.pop_front();
    if (item.work)
      item.work();
    else
      run_until(item.after);
    ++queue.ran;
  }

  void run_what_the_schedule_says(void* issued_to) {
    const bool compute = issued_to == nullptr;
    if (schedule_ == Schedule::shuffled)
      run_some();
    else if (compute == (schedule_ == Schedule::late_copies))
      run_until({issued_to, queues_[issued_to].issued});
  }

  void run_some() {
    for (auto draws = random_() % 4; draws > 0; --draws) {
      auto chosen = queues_.begin();
      std::advance(chosen, random_() % queues_.size());
      auto& queue = chosen->second;
      if (queue.items.empty()) continue;
      const Item& next = queue.items.front();
      if (next.work || done(next.after)) run_one(queue);
    }
  }

  Schedule schedule_ = Schedule::now;
  std::recursive_mutex lock_;
  std::map<void*, Queue> queues_; // a stream by its handle; the default stream is null
  std::map<void*, Mark> events_;
  std::mt19937 random_;
};

} // namespace card
