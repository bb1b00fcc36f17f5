// The card's memory: real addresses of this process, so that the CPU can compute on them. Pages that nobody touches
// cost nothing. What is handed out is counted, and refused beyond CARD_BYTES (80 GiB unless it is set).
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace card {

constexpr size_t kPage = size_t{2} << 20; // granularity of physical memory

inline size_t card_bytes() {
  static const size_t bytes = [] {
    const char* given = std::getenv("CARD_BYTES");
    return given ? std::strtoull(given, nullptr, 10) : size_t{80} << 30;
  }();
  return bytes;
}

/// Where intervals of addresses lie.
class Intervals {
 public:
  void add(const void* begin, size_t bytes) { found_[address(begin)] = bytes; }

  /// Bytes of the interval that begins here, which is forgotten; 0 for none.
  size_t remove(const void* begin) {
    auto found = found_.find(address(begin));
    if (found == found_.end()) return 0;
    const size_t bytes = found->second;
    found_.erase(found);
    return bytes;
  }

  bool hold(const void* pointer) const {
    auto after = found_.upper_bound(address(pointer));
    if (after == found_.begin()) return false;
    --after;
    return address(pointer) < after->first + after->second;
  }

 private:
  static uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }
  std::map<uintptr_t, size_t> found_;
};

class Memory {
 public:
  static Memory& of_the_card() {
    static auto* memory = new Memory;
    return *memory;
  }

  /// Addresses for `bytes`; null where the system has none.
  void* reserve(size_t bytes) {
    void* found =
        mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return nullptr;
    void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(found) + kPage - 1) / kPage * kPage);
    std::lock_guard<std::mutex> guard(lock_);
    device_.add(aligned, bytes);
    return aligned;
  }

  /// Counts `bytes` as taken, unless the card has no room for them.
  bool take(size_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    if (taken_ + bytes > card_bytes()) return false;
    taken_ += bytes;
    most_ = std::max(most_, taken_);
    return true;
  }

  void give_back(size_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    taken_ -= bytes;
  }

  void* allocate(size_t bytes) {
    if (!take(bytes)) return nullptr;
    void* found = reserve(bytes);
    if (!found) give_back(bytes);
    return found;
  }

  void free(void* pointer) {
    std::lock_guard<std::mutex> guard(lock_);
    const size_t bytes = device_.remove(pointer);
    if (!bytes) return;
    taken_ -= bytes;
    munmap(pointer, bytes);
  }

  void pin(const void* pointer, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    pinned_.add(pointer, bytes);
  }

  void unpin(const void* pointer) {
    std::lock_guard<std::mutex> guard(lock_);
    pinned_.remove(pointer);
  }

  bool is_device(const void* pointer) {
    std::lock_guard<std::mutex> guard(lock_);
    return device_.hold(pointer);
  }

  bool is_pinned(const void* pointer) {
    std::lock_guard<std::mutex> guard(lock_);
    return pinned_.hold(pointer);
  }

  size_t taken() {
    std::lock_guard<std::mutex> guard(lock_);
    return taken_;
  }

  size_t most() {
    std::lock_guard<std::mutex> guard(lock_);
    return most_;
  }

 private:
  std::mutex lock_;
  Intervals device_, pinned_;
  size_t taken_ = 0, most_ = 0;
};

/// Whether a copy of so many bytes is carried out: all are where everything is computed, else up to 1 MiB.
inline bool is_copied(size_t bytes) {
  static const char* mode = std::getenv("CARD_ARITHMETIC");
  static const bool all = mode && std::string(mode) == "all";
  return all || bytes <= size_t{1} << 20;
}

} // namespace card
